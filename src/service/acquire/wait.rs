//! The waits of an acquisition between two attempts.

use std::time::Duration;

use super::{Acquisition, Cancellation, Outcome};
use crate::engine::Subscription;
use crate::error::LockError;
use crate::model::Key;
use crate::service::local_fifo::Position;
use crate::service::options::SAFETY_POLL_INTERVAL;

impl Acquisition {
    /// Subscribes to the first name. An error is ignored: the attempt that follows reports it.
    pub(super) async fn subscribe_owner(&self) -> Option<Box<dyn Subscription>> {
        let engine = &self.shared.engine;
        engine.subscribe(&self.claim, &self.claim.keys()[0]).await.ok()
    }

    /// Subscribes to a name. `Err`: the acquisition has ended.
    pub(super) async fn subscribe(&self, key: &Key) -> Result<Box<dyn Subscription>, Result<Outcome, LockError>> {
        let shared = &self.shared;
        let subscribing = shared.with_retries("subscribe", self.store_timeout, || {
            shared.engine.subscribe(&self.claim, key)
        });
        tokio::select! {
            answer = subscribing => answer.map_err(Err),
            () = self.aborted() => Err(Cancellation::Aborted.into_outcome()),
            () = shared.closing.cancelled() => Err(Cancellation::Closed.into_outcome()),
        }
    }

    /// Waits for `change`, at most until the deadline. `Some`: the acquisition has ended.
    pub(super) async fn wait_for(&self, change: impl Future<Output = ()>) -> Option<Result<Outcome, LockError>> {
        let deadline = async {
            match self.deadline {
                Some(deadline) => tokio::time::sleep_until(deadline).await,
                None => std::future::pending().await,
            }
        };
        let cancellation = tokio::select! {
            biased;
            () = self.aborted() => Cancellation::Aborted,
            () = self.shared.closing.cancelled() => Cancellation::Closed,
            () = deadline => Cancellation::DeadlinePassed,
            () = change => return None,
        };
        Some(cancellation.into_outcome())
    }

    /// Sleeps before a retry, also past the deadline: the call waits for an answer of the store, not for the lock. `Some`: the
    /// acquisition has ended.
    pub(super) async fn sleep_past_deadline(&self, delay: Duration) -> Option<Cancellation> {
        tokio::select! {
            biased;
            () = self.aborted() => Some(Cancellation::Aborted),
            () = self.shared.closing.cancelled() => Some(Cancellation::Closed),
            () = tokio::time::sleep(delay) => None,
        }
    }
}

/// Waits until a new attempt may succeed: for a notification of the store, for a wake-up of the local FIFO, or for the next poll.
pub(super) async fn for_change(
    subscription: &mut Option<Box<dyn Subscription>>,
    position: Option<&Position>,
    retry_after: Option<Duration>,
) {
    let is_reliable = subscription
        .as_ref()
        .is_some_and(|subscription| subscription.is_reliable());
    let poll = async {
        if is_reliable {
            std::future::pending().await
        } else {
            tokio::time::sleep(next_poll(retry_after)).await
        }
    };
    let changed = async {
        match subscription {
            Some(subscription) => subscription.changed().await,
            None => std::future::pending().await,
        }
    };
    let woken = async {
        match position {
            Some(position) => position.woken().await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        () = changed => {}
        () = woken => {}
        () = poll => {}
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
