//! One attempt of an acquisition, and what cancels it.

use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{Acquisition, Outcome};
use crate::clock::Moment;
use crate::engine::Acquired;
use crate::error::{EngineError, LockError};
use crate::model::{Fence, Key};
use crate::service::event::add;
use crate::service::local_fifo::attempt_in_order;
use crate::service::options::MIN_STORE_TIMEOUT;

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

/// The reason for the end of an acquisition without an answer of the store.
pub(super) enum Cancellation {
    Aborted,
    Closed,
    /// The caller's deadline has passed.
    DeadlinePassed,
}

impl Cancellation {
    pub(super) fn into_outcome(self) -> Result<Outcome, LockError> {
        match self {
            Cancellation::Aborted => Ok(Outcome::Aborted),
            Cancellation::DeadlinePassed => Ok(Outcome::Busy),
            Cancellation::Closed => Err(LockError::closed()),
        }
    }
}

impl Acquisition {
    /// Makes one attempt. Cancels it on an abort, on a close, after the deadline, and when the store has not answered since
    /// `since` within its timeout.
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
            () = self.aborted() => AttemptOutcome::Cancelled(Cancellation::Aborted),
            () = shared.closing.cancelled() => AttemptOutcome::Cancelled(Cancellation::Closed),
            () = self.grace_ended() => AttemptOutcome::Cancelled(Cancellation::DeadlinePassed),
            () = tokio::time::sleep_until(since + self.store_timeout) => {
                add(&shared.counters.store_errors);
                AttemptOutcome::TimedOut
            }
        };
        self.doubtful |= claim.sent_at().is_some();
        outcome
    }

    /// Completes [`MIN_STORE_TIMEOUT`] after the deadline, if the store has answered before that the lock is busy: an attempt
    /// without an answer does not prolong the wait further.
    async fn grace_ended(&self) {
        match self.deadline.filter(|_| self.is_waiting) {
            Some(deadline) => tokio::time::sleep_until(deadline + MIN_STORE_TIMEOUT).await,
            None => std::future::pending().await,
        }
    }

    pub(super) fn is_aborted(&self) -> bool {
        self.abort.as_ref().is_some_and(CancellationToken::is_cancelled)
    }

    /// Completes when the caller aborts.
    pub(super) async fn aborted(&self) {
        match &self.abort {
            Some(abort) => abort.cancelled().await,
            None => std::future::pending().await,
        }
    }
}
