//! Decides whether a connection is still usable.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

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
}

/// The calls without a reply.
struct Unanswered {
    calls: usize,
    /// When the last reply arrived, or when the oldest of them was sent: a server replies in the order of the calls.
    since: Moment,
    /// The number of callers in a row that were dropped after a significant time without any reply.
    given_up: u32,
    /// When the last of them was dropped. Calls that wait at the same time count once.
    last_given_up: Option<Moment>,
}

/// A call that waited less than this says nothing about the connection when it is dropped.
const TELLING: Duration = Duration::from_millis(75);
/// This many callers in a row that were dropped in silence make a connection suspect. A renewal waits only for a part of its
/// lease, and has to find a better connection while the lease lasts.
const SUSPECT: u32 = 2;

impl Health {
    pub(in super::super) fn new() -> Self {
        let unanswered = Unanswered {
            calls: 0,
            since: Moment::now(),
            given_up: 0,
            last_given_up: None,
        };
        Health {
            dead: AtomicBool::new(false),
            unanswered: Mutex::new(unanswered),
        }
    }

    fn unanswered(&self) -> MutexGuard<'_, Unanswered> {
        self.unanswered.lock()
    }

    pub(in super::super) fn mark_dead(&self) {
        self.dead.store(true, Ordering::Relaxed);
    }

    pub(in super::super) fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Relaxed)
    }

    /// Whether new calls need another connection.
    pub(in super::super) fn is_lost(&self, patience: Duration) -> bool {
        let unanswered = self.unanswered();
        self.is_dead() || unanswered.calls > 0 && unanswered.since.elapsed() >= patience
    }

    /// Records that a call is about to be sent.
    pub(in super::super) fn sent(&self, now: Moment) {
        let mut unanswered = self.unanswered();
        if unanswered.calls == 0 {
            unanswered.since = now;
        }
        unanswered.calls += 1;
    }

    /// Records that a call has ended with a reply or an error. Either ends the silence.
    pub(in super::super) fn heard(&self) {
        let mut unanswered = self.unanswered();
        unanswered.calls -= 1;
        unanswered.since = Moment::now();
        unanswered.given_up = 0;
    }

    /// Records that a call was removed before it was sent.
    pub(in super::super) fn cancelled(&self) {
        self.unanswered().calls -= 1;
    }

    /// Records that the caller of a call sent at `sent` was dropped. Returns whether the connection has to be replaced:
    /// after a silence as long as `patience`, or after several such callers in a row.
    pub(in super::super) fn given_up(&self, sent: Moment, patience: Duration) -> bool {
        let mut unanswered = self.unanswered();
        unanswered.calls -= 1;
        let silence = sent.elapsed().min(unanswered.since.elapsed());
        if silence >= TELLING && unanswered.last_given_up.is_none_or(|last| last <= sent) {
            unanswered.given_up += 1;
            unanswered.last_given_up = Some(Moment::now());
        }
        unanswered.since.elapsed() >= patience || unanswered.given_up >= SUSPECT
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(5);

    async fn pass(seconds: u64) {
        tokio::time::advance(Duration::from_secs(seconds)).await;
    }

    #[tokio::test(start_paused = true)]
    async fn silence_counts_only_while_a_call_waits() {
        let health = Health::new();
        pass(60).await;
        assert!(!health.is_lost(PATIENCE), "no call was sent");
        health.sent(Moment::now());
        pass(4).await;
        health.sent(Moment::now());
        assert!(!health.is_lost(PATIENCE));
        pass(1).await;
        assert!(health.is_lost(PATIENCE), "the first call waits for 5 s");
        health.heard();
        assert!(!health.is_lost(PATIENCE), "a late reply: it lives");
        pass(4).await;
        assert!(!health.is_lost(PATIENCE));
        pass(1).await;
        assert!(health.is_lost(PATIENCE), "nothing came after that one reply");
        health.heard();
        pass(60).await;
        assert!(!health.is_lost(PATIENCE));
        health.mark_dead();
        assert!(health.is_lost(PATIENCE));
    }

    #[tokio::test(start_paused = true)]
    async fn one_caller_who_gives_up_proves_nothing_and_two_in_a_row_do() {
        let health = Health::new();
        let give_up = async |wait: Duration| {
            let sent = Moment::now();
            health.sent(sent);
            tokio::time::advance(wait).await;
            health.given_up(sent, PATIENCE)
        };
        let long = Duration::from_millis(500);
        assert!(!give_up(long).await);
        health.sent(Moment::now());
        health.heard();
        assert!(!give_up(long).await, "a reply arrived in between");
        assert!(!give_up(Duration::from_millis(10)).await, "that was no time to answer");
        assert!(give_up(long).await);
        assert!(Health::new().unanswered().given_up == 0);
        let patient = Health::new();
        let sent = Moment::now();
        patient.sent(sent);
        pass(5).await;
        assert!(patient.given_up(sent, PATIENCE));
    }
}
