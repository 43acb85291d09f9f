//! Decides whether a connection is still usable.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;

use crate::clock::Moment;

/// Maximum number of unanswered attempts to acquire on a connection. Further attempts wait in this process, where dropping the
/// future cancels them. So a server that stood still finds no more than these. Other commands are not counted.
pub(in super::super) const ATTEMPTS: usize = 1024;

/// The liveness of a connection.
///
/// An open socket proves nothing: a proxy may have lost its other side, a peer may have vanished. What counts is whether a
/// reply arrived while calls waited.
pub(in super::super) struct Health {
    /// It broke, or was replaced.
    dead: AtomicBool,
    unanswered: Mutex<Unanswered>,
    /// Notified when a call waits again, and at the end.
    used: Notify,
}

/// The calls without a reply.
struct Unanswered {
    calls: usize,
    /// When the last reply arrived, or when the oldest of them was sent: a server replies in the order of the calls.
    since: Moment,
    /// The usual time of a reply: the last one, or the mean of it and the usual time before, if that is longer.
    round_trip: Duration,
    /// The number of callers in a row that were dropped after a significant time without any reply.
    dropped: u32,
    /// When the last of them was dropped. Calls that wait at the same time count once.
    last_dropped: Option<Moment>,
}

/// A call that waited less than this, or less than one and a half usual round trips, says nothing about the connection when it is dropped.
pub(in super::super) const SIGNIFICANT_WAIT: Duration = Duration::from_millis(75);
/// A call that waited for this long counts, whatever the usual round trip is: one late reply must not hide a silence for long.
const LONG_WAIT: Duration = Duration::from_secs(1);
/// This many callers in a row that were dropped in silence make a connection suspect. A renewal waits only for a part of its
/// lease, and has to find a better connection while the lease lasts.
const SUSPECT: u32 = 2;

impl Health {
    pub(in super::super) fn new() -> Self {
        let unanswered = Unanswered {
            calls: 0,
            since: Moment::now(),
            round_trip: Duration::ZERO,
            dropped: 0,
            last_dropped: None,
        };
        Health {
            dead: AtomicBool::new(false),
            unanswered: Mutex::new(unanswered),
            used: Notify::new(),
        }
    }

    fn unanswered(&self) -> MutexGuard<'_, Unanswered> {
        self.unanswered.lock()
    }

    pub(in super::super) fn mark_dead(&self) {
        self.dead.store(true, Ordering::Relaxed);
        self.used.notify_one();
    }

    pub(in super::super) fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Relaxed)
    }

    /// Whether new calls need another connection.
    pub(in super::super) fn is_lost(&self, silence_limit: Duration) -> bool {
        self.is_dead() || self.is_silent(silence_limit)
    }

    /// Whether calls have waited for this time without any reply.
    pub(in super::super) fn is_silent(&self, limit: Duration) -> bool {
        let unanswered = self.unanswered();
        unanswered.calls > 0 && unanswered.since.elapsed() >= limit
    }

    /// Waits until a call waits, or the end. For one task.
    pub(super) async fn used(&self) {
        while self.unanswered().calls == 0 && !self.is_dead() {
            self.used.notified().await;
        }
    }

    /// Records that a call is about to be sent.
    pub(in super::super) fn sent(&self, now: Moment) {
        let mut unanswered = self.unanswered();
        if unanswered.calls == 0 {
            unanswered.since = now;
            self.used.notify_one();
        }
        unanswered.calls += 1;
    }

    /// Records that a call has ended with a reply or an error. Either ends the silence. `round_trip`: the time since the call was
    /// sent, if it is known.
    pub(in super::super) fn replied(&self, round_trip: Option<Duration>) {
        if let Some(round_trip) = round_trip {
            self.measured(round_trip);
        }
        let mut unanswered = self.unanswered();
        unanswered.calls -= 1;
        unanswered.since = Moment::now();
        unanswered.dropped = 0;
    }

    /// Records a round trip on the connection, or the time of a few of them in which it was opened.
    pub(in super::super) fn measured(&self, round_trip: Duration) {
        let mut unanswered = self.unanswered();
        unanswered.round_trip = round_trip.max((unanswered.round_trip + round_trip) / 2);
    }

    /// Records that a call was removed before it was sent.
    pub(in super::super) fn cancelled(&self) {
        self.unanswered().calls -= 1;
    }

    /// Records that the caller of a call sent at `sent` was dropped. Returns whether the connection has to be replaced:
    /// after a silence as long as `silence_limit`, or after several such callers in a row.
    pub(in super::super) fn dropped(&self, sent: Moment, silence_limit: Duration) -> bool {
        let mut unanswered = self.unanswered();
        unanswered.calls -= 1;
        let silence = sent.elapsed().min(unanswered.since.elapsed());
        let is_significant = silence >= SIGNIFICANT_WAIT.max((unanswered.round_trip * 3 / 2).min(LONG_WAIT));
        if is_significant && unanswered.last_dropped.is_none_or(|last| last <= sent) {
            unanswered.dropped += 1;
            unanswered.last_dropped = Some(Moment::now());
        }
        unanswered.since.elapsed() >= silence_limit || unanswered.dropped >= SUSPECT
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SILENCE_LIMIT: Duration = Duration::from_secs(5);

    async fn pass(seconds: u64) {
        tokio::time::advance(Duration::from_secs(seconds)).await;
    }

    #[tokio::test(start_paused = true)]
    async fn silence_counts_only_while_a_call_waits() {
        let health = Health::new();
        pass(60).await;
        assert!(!health.is_lost(SILENCE_LIMIT), "no call was sent");
        health.sent(Moment::now());
        pass(4).await;
        health.sent(Moment::now());
        assert!(!health.is_lost(SILENCE_LIMIT));
        pass(1).await;
        assert!(health.is_lost(SILENCE_LIMIT), "the first call waits for 5 s");
        health.replied(None);
        assert!(!health.is_lost(SILENCE_LIMIT), "a late reply: it lives");
        pass(4).await;
        assert!(!health.is_lost(SILENCE_LIMIT));
        pass(1).await;
        assert!(health.is_lost(SILENCE_LIMIT), "nothing came after that one reply");
        health.replied(None);
        pass(60).await;
        assert!(!health.is_lost(SILENCE_LIMIT));
        health.mark_dead();
        assert!(health.is_lost(SILENCE_LIMIT));
    }

    #[tokio::test]
    async fn a_watch_sleeps_while_no_call_waits() {
        let health = Health::new();
        health.sent(Moment::now());
        health.used().await;
        health.replied(None);
        let mut idle = Box::pin(health.used());
        assert!(futures_util::poll!(&mut idle).is_pending());
        health.sent(Moment::now());
        idle.await;
        health.replied(None);
        let mut idle = Box::pin(health.used());
        assert!(futures_util::poll!(&mut idle).is_pending());
        health.mark_dead();
        idle.await;
    }

    #[tokio::test(start_paused = true)]
    async fn one_dropped_caller_proves_nothing_and_two_in_a_row_do() {
        let health = Health::new();
        let drop_after = async |wait: Duration| {
            let sent = Moment::now();
            health.sent(sent);
            tokio::time::advance(wait).await;
            health.dropped(sent, SILENCE_LIMIT)
        };
        let long = Duration::from_millis(500);
        assert!(!drop_after(long).await);
        health.sent(Moment::now());
        health.replied(None);
        assert!(!drop_after(long).await, "a reply arrived in between");
        assert!(
            !drop_after(Duration::from_millis(10)).await,
            "that was no time to answer"
        );
        assert!(drop_after(long).await);
        assert!(Health::new().unanswered().dropped == 0);
        health.sent(Moment::now());
        health.replied(Some(Duration::from_millis(300)));
        let usual = Duration::from_millis(400);
        assert!(
            !drop_after(usual).await && !drop_after(usual).await,
            "less than one and a half round trips"
        );
        let longer = Duration::from_millis(500);
        assert!(!drop_after(longer).await && drop_after(longer).await);
        health.sent(Moment::now());
        health.replied(Some(Duration::from_secs(3)));
        let longest = Duration::from_millis(1500);
        assert!(
            !drop_after(longest).await && drop_after(longest).await,
            "one late reply"
        );
        let patient = Health::new();
        let sent = Moment::now();
        patient.sent(sent);
        pass(5).await;
        assert!(patient.dropped(sent, SILENCE_LIMIT));
    }
}
