//! Counts callers that were dropped without an answer: a sign of a connection that is silent.
//!
//! A renewal waits only for a part of its lease, and needs a working connection before the lease expires.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

/// A call that waited less than this says nothing about the connection when it is dropped.
const SIGNIFICANT_WAIT: Duration = Duration::from_millis(75);
/// Calls that are dropped within this time count once: they waited at the same time.
const TOGETHER: Duration = Duration::from_millis(20);
/// Number of dropped calls, at least [`TOGETHER`] apart, that make a connection suspect.
const SUSPECT: u64 = 2;

/// The dropped calls of one engine.
#[derive(Debug, Default)]
pub(super) struct DroppedCalls(watch::Sender<Count>);

#[derive(Debug, Default)]
struct Count {
    calls: u64,
    last: Option<Instant>,
}

/// A call that waits for its answer. Dropping it counts, unless the answer arrived.
pub(super) struct WaitingCall<'a> {
    dropped: &'a DroppedCalls,
    since: Instant,
    is_answered: bool,
}

impl DroppedCalls {
    /// Begins a call.
    pub(super) fn wait(&self) -> WaitingCall<'_> {
        WaitingCall {
            dropped: self,
            since: Instant::now(),
            is_answered: false,
        }
    }

    /// Completes when [`SUSPECT`] calls, at least [`TOGETHER`] apart, were dropped after this was called.
    pub(super) async fn are_suspect(&self) {
        let mut counts = self.0.subscribe();
        let before = counts.borrow().calls;
        // The sender lives as long as `self`.
        let _ = counts.wait_for(|count| count.calls >= before + SUSPECT).await;
    }
}

impl WaitingCall<'_> {
    /// Ends the call with its answer.
    pub(super) fn answered(mut self) {
        self.is_answered = true;
    }
}

impl Drop for WaitingCall<'_> {
    fn drop(&mut self) {
        if self.is_answered || self.since.elapsed() < SIGNIFICANT_WAIT {
            return;
        }
        self.dropped.0.send_if_modified(|count| {
            let now = Instant::now();
            let is_next = count.last.is_none_or(|last| now - last >= TOGETHER);
            if is_next {
                count.calls += 1;
                count.last = Some(now);
            }
            is_next
        });
    }
}

#[cfg(all(test, any(feature = "mysql", feature = "postgres")))]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn two_callers_that_are_dropped_one_after_the_other_make_a_connection_suspect() {
        let dropped = DroppedCalls::default();
        let mut suspect = Box::pin(dropped.are_suspect());
        assert!((&mut suspect).now_or_never().is_none());
        let calls = [dropped.wait(), dropped.wait(), dropped.wait()];
        drop(dropped.wait());
        tokio::time::advance(SIGNIFICANT_WAIT).await;
        dropped.wait().answered();
        drop(calls);
        assert!(
            (&mut suspect).now_or_never().is_none(),
            "calls at the same time count once"
        );
        let call = dropped.wait();
        tokio::time::advance(SIGNIFICANT_WAIT).await;
        drop(call);
        assert!(suspect.now_or_never().is_some());
        assert!(
            dropped.are_suspect().now_or_never().is_none(),
            "calls before this do not count"
        );
    }
}
