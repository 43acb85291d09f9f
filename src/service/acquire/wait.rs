//! The waits of an acquisition between two attempts.

use std::time::Duration;

use futures_util::future::OptionFuture;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{Acquisition, End, Outcome};
use crate::engine::Subscription;
use crate::error::LockError;
use crate::model::Key;
use crate::service::local_fifo::Position;
use crate::service::options::{CLOCK_CHECK_INTERVAL, SAFETY_POLL_INTERVAL};

/// The interval at which a waiter past its deadline checks whether the store has answered the first waiter.
const ANSWER_CHECK_INTERVAL: Duration = Duration::from_millis(10);

impl Acquisition {
    pub(super) fn is_aborted(&self) -> bool {
        self.abort.as_ref().is_some_and(CancellationToken::is_cancelled)
    }

    /// Completes when the caller aborts, or the service drains or closes.
    pub(super) async fn cancelled(&self) -> End {
        let aborted = self.abort.as_ref().map(CancellationToken::cancelled);
        tokio::select! {
            biased;
            Some(()) = OptionFuture::from(aborted) => Ok(Outcome::Aborted),
            () = self.shared.draining.cancelled() => Err(LockError::closed()),
        }
    }

    /// Waits for `change`, at most until the deadline. `Some`: the acquisition has ended.
    pub(super) async fn wait_for(&self, change: impl Future<Output = ()>) -> Option<End> {
        let deadline = self.deadline.map(tokio::time::sleep_until);
        tokio::select! {
            biased;
            end = self.cancelled() => Some(end),
            Some(()) = OptionFuture::from(deadline) => Some(Ok(Outcome::Busy(None))),
            () = change => None,
        }
    }

    /// Waits until the caller's event loop can use a grant: it has responded within a third of the ttl. `Some`: the acquisition has
    /// ended.
    pub(super) async fn wait_for_event_loop(&self) -> Option<End> {
        let detector = &self.shared.stall_detector;
        detector.ping();
        let interval = CLOCK_CHECK_INTERVAL.min(self.claim.ttl.event_loop_timeout());
        while detector.is_stalled(self.claim.ttl) {
            if let Some(end) = self.wait_for(tokio::time::sleep(interval)).await {
                return Some(end);
            }
        }
        None
    }

    /// Waits until the position is the first one, or may be. `Some`: the acquisition has ended.
    ///
    /// # Behavior
    /// At the deadline the lock is busy, unless the store has not answered the first waiter since the call: then the call waits on
    /// for an answer, as the first waiter does. A store that does not answer the first waiter does not answer this call either.
    pub(super) async fn wait_for_position(&self, position: &Position) -> Option<End> {
        loop {
            let now = Instant::now();
            let is_late = self.deadline.is_some_and(|deadline| now >= deadline);
            let end = match self.overdue_at(position) {
                Some(limit) if now >= limit && (is_late || position.is_store_silent()) => {
                    return Some(Err(self.no_answer(position.last_error())));
                }
                // Only the request of the first waiter was lost, which ends with its own timeout.
                Some(limit) if now >= limit => self.deadline,
                Some(limit) if is_late => Some(limit.min(now + ANSWER_CHECK_INTERVAL)),
                Some(limit) => Some(self.deadline.map_or(limit, |deadline| limit.min(deadline))),
                None if is_late => return Some(Ok(Outcome::Busy(None))),
                None => self.deadline,
            };
            tokio::select! {
                biased;
                end = self.cancelled() => return Some(end),
                Some(()) = OptionFuture::from(end.map(tokio::time::sleep_until)) => {}
                () = position.woken() => return None,
            }
        }
    }

    /// Returns when the first waiter, and so this call, will have had no answer of the store for the whole timeout. `None`: it has
    /// had one since this call began.
    fn overdue_at(&self, position: &Position) -> Option<Instant> {
        let since = position
            .unanswered_since(false)
            .filter(|_| !position.was_answered_since(self.started));
        Some(since?.max(self.started) + self.store_timeout)
    }

    /// Subscribes to the first name. An error is ignored: the attempt that follows reports it.
    pub(super) async fn subscribe_to_first(&self) -> Option<Box<dyn Subscription>> {
        let engine = &self.shared.engine;
        engine.subscribe(&self.claim, &self.claim.keys()[0]).await.ok()
    }

    /// Subscribes to a name. `Err`: the acquisition has ended.
    pub(super) async fn subscribe(&self, key: &Key) -> Result<Box<dyn Subscription>, End> {
        let subscribe = || self.shared.engine.subscribe(&self.claim, key);
        tokio::select! {
            answer = self.shared.with_retries("subscribe", self.store_timeout, subscribe) => answer.map_err(Err),
            end = self.cancelled() => Err(end),
        }
    }
}

/// Waits until a new attempt may succeed: for a notification of the store, a wake-up of the local FIFO, or the next poll.
/// `polls`: there are polls also where notifications are reliable.
pub(super) async fn for_change(
    subscription: &mut Option<Box<dyn Subscription>>,
    position: Option<&Position>,
    retry_after: Option<Duration>,
    polls: bool,
) {
    let is_reliable = subscription
        .as_ref()
        .is_some_and(|subscription| subscription.is_reliable() && !polls);
    let changed = subscription.as_mut().map(|subscription| subscription.changed());
    tokio::select! {
        Some(()) = OptionFuture::from(changed) => {}
        Some(()) = OptionFuture::from(position.map(Position::woken)) => {}
        () = tokio::time::sleep(next_poll(retry_after)), if !is_reliable => {}
    }
}

/// Returns the time until the next poll: the end of the current lease, or the safety poll if that is earlier.
///
/// # Behavior
/// The poll comes a little later than the store's answer says, so that the lease has ended by the store's clock.
fn next_poll(retry_after: Option<Duration>) -> Duration {
    let jitter = Duration::from_micros(fastrand::u64(500..3_000));
    retry_after.map_or(SAFETY_POLL_INTERVAL, |after| after.min(SAFETY_POLL_INTERVAL)) + jitter
}
