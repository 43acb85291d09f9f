//! One attempt of an acquisition.

use std::time::Duration;

use futures_util::future::OptionFuture;
use tokio::time::{Instant, sleep_until};

use super::Acquisition;
use super::wait::Cancellation;
use crate::clock::Moment;
use crate::engine::Acquired;
use crate::error::EngineError;
use crate::model::{Fence, Key};
use crate::service::event::add;
use crate::service::options::MIN_STORE_TIMEOUT;
use crate::service::ordered_attempts::attempt_in_order;

/// The outcome of one attempt.
pub(super) enum AttemptOutcome {
    Granted {
        fence: Fence,
        sent: Moment,
    },
    Held {
        key: Key,
        retry_after: Option<Duration>,
    },
    Failed(EngineError),
    /// The store did not answer within its timeout.
    TimedOut,
    Cancelled(Cancellation),
}

impl Acquisition {
    /// Makes one attempt.
    ///
    /// # Behavior
    /// Cancels the attempt on an abort, on a close, and when the store has not answered since `since` within its timeout. If the
    /// store has answered before that the lock is busy, also cancels it [`MIN_STORE_TIMEOUT`] after the deadline, so that a missing
    /// answer delays the end of the wait by no more than that.
    pub(super) async fn attempt(&mut self, since: Instant) -> AttemptOutcome {
        let (shared, claim) = (&self.shared, &self.claim);
        let began = Moment::now();
        claim.begin_attempt();
        let attempt = async {
            if claim.waiting && shared.engine.ordered() {
                attempt_in_order(shared, claim, self.arrival).await
            } else {
                shared.engine.try_acquire(claim).await
            }
        };
        let deadline = self.deadline.filter(|_| self.was_busy);
        let grace_end = deadline.map(|deadline| sleep_until(deadline + MIN_STORE_TIMEOUT));
        let outcome = tokio::select! {
            biased;
            answer = attempt => match answer {
                Ok(Acquired::Granted { fence }) => {
                    return AttemptOutcome::Granted { fence, sent: claim.sent_at().unwrap_or(began) };
                }
                Ok(Acquired::Held { key, retry_after }) => return AttemptOutcome::Held { key, retry_after },
                Err(error) => {
                    add(&shared.counters.store_errors);
                    AttemptOutcome::Failed(error)
                }
            },
            cancellation = self.cancelled() => AttemptOutcome::Cancelled(cancellation),
            Some(()) = OptionFuture::from(grace_end) => AttemptOutcome::Cancelled(Cancellation::DeadlinePassed),
            () = sleep_until(since + self.store_timeout) => {
                add(&shared.counters.store_errors);
                AttemptOutcome::TimedOut
            }
        };
        self.doubtful |= claim.sent_at().is_some();
        outcome
    }
}
