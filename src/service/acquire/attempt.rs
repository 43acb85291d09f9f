//! One attempt of an acquisition.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use super::{Acquisition, End, Outcome};
use crate::clock::Moment;
use crate::engine::{Acquired, EngineExt};
use crate::error::{EngineError, LockError};
use crate::model::Key;
use crate::service::lease::{Grant, Lease};
use crate::service::options::MIN_STORE_TIMEOUT;
use crate::service::ordered_attempts::attempt_in_order;

/// The outcome of one attempt.
pub(super) enum AttemptOutcome {
    /// An error: the lease ended before the grant arrived.
    Granted(Result<Arc<Lease>, LockError>),
    Held {
        key: Key,
        retry_after: Option<Duration>,
    },
    Failed(EngineError),
    /// The store did not answer within its timeout.
    TimedOut,
    /// The call was cancelled, or its deadline has passed.
    Ended(End),
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
            if claim.waiting && shared.store.ordered {
                attempt_in_order(shared, claim, self.arrival).await
            } else {
                shared.engine.try_acquire(claim).await
            }
        };
        let timeout = since + self.store_timeout;
        let deadline = self.deadline.filter(|_| self.was_busy);
        let grace_end = deadline.map(|deadline| deadline + MIN_STORE_TIMEOUT);
        // One timer for both: it is a large part of the future.
        let end = grace_end.map_or(timeout, |grace_end| grace_end.min(timeout));
        let outcome = tokio::select! {
            biased;
            answer = attempt => match answer {
                Ok(Acquired::Granted { fence }) => {
                    shared.events.store_answered();
                    let sent = claim.sent_at().unwrap_or(began);
                    return AttemptOutcome::Granted(self.create_lease(fence, Grant::Requested { sent }));
                }
                Ok(Acquired::Held { key, retry_after }) => {
                    shared.events.store_answered();
                    return AttemptOutcome::Held { key, retry_after };
                }
                Err(error) => {
                    shared.store_failed(&error);
                    AttemptOutcome::Failed(error)
                }
            },
            end = self.cancelled() => AttemptOutcome::Ended(end),
            () = sleep_until(end) => if grace_end == Some(end) {
                AttemptOutcome::Ended(Ok(Outcome::Busy(None)))
            } else {
                shared.store_failed(&shared.engine.no_answer("acquire", self.store_timeout));
                AttemptOutcome::TimedOut
            }
        };
        self.doubtful |= claim.sent_at().is_some();
        outcome
    }
}
