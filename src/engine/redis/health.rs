//! Whether a connection can still be trusted with a call.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::clock::Moment;

/// What is known of a connection's life.
///
/// An open socket proves nothing: a proxy may have lost its other side, a peer may have vanished without a word. What
/// counts is that something was heard while calls waited.
pub(super) struct Health {
    /// It broke, or was given up.
    dead: AtomicBool,
    unanswered: Mutex<Unanswered>,
}

/// The calls that still wait for their reply.
struct Unanswered {
    calls: usize,
    /// Since when nothing was heard while they waited: a server replies in the order of the calls.
    since: Moment,
}

impl Health {
    pub(super) fn new() -> Self {
        let unanswered = Unanswered {
            calls: 0,
            since: Moment::now(),
        };
        Health {
            dead: AtomicBool::new(false),
            unanswered: Mutex::new(unanswered),
        }
    }

    fn unanswered(&self) -> MutexGuard<'_, Unanswered> {
        self.unanswered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn mark_dead(&self) {
        self.dead.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Relaxed)
    }

    /// Whether a new call should not be trusted to the connection.
    pub(super) fn is_lost(&self, patience: Duration) -> bool {
        let unanswered = self.unanswered();
        self.is_dead() || unanswered.calls > 0 && unanswered.since.elapsed() >= patience
    }

    /// A call is about to be sent.
    pub(super) fn sent(&self) {
        let mut unanswered = self.unanswered();
        if unanswered.calls == 0 {
            unanswered.since = Moment::now();
        }
        unanswered.calls += 1;
    }

    /// A call has ended with a reply (or an error, which is a sign of life or of death, but not silence).
    pub(super) fn heard(&self) {
        let mut unanswered = self.unanswered();
        unanswered.calls -= 1;
        unanswered.since = Moment::now();
    }

    /// A call was given up by its caller. Answers whether that was for a silence as long as `patience`.
    pub(super) fn given_up(&self, patience: Duration) -> bool {
        let mut unanswered = self.unanswered();
        unanswered.calls -= 1;
        unanswered.since.elapsed() >= patience
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
        assert!(!health.is_lost(PATIENCE), "nobody asked");
        health.sent();
        pass(4).await;
        health.sent();
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
    async fn a_caller_who_gives_up_early_proves_nothing() {
        let health = Health::new();
        health.sent();
        pass(4).await;
        assert!(!health.given_up(PATIENCE));
        pass(60).await;
        assert!(!health.is_lost(PATIENCE));
        health.sent();
        pass(5).await;
        assert!(health.given_up(PATIENCE));
    }
}
