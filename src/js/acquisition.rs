//! An acquisition whose promise is pending: its wait, its cancellation, and its result.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use napi::Env;
use tokio_util::sync::CancellationToken;

use super::bridge::{Bridge, hold_process};
use super::deferred::Deferred;
use super::leases::Entry;
use super::notifier::Notifier;
use crate::error::LockError;
use crate::model::Key;
use crate::service::{AcquireOptions, Lease, Locks, Outcome, Wait};

/// A pending acquisition.
pub(super) struct PendingAcquisition {
    pub(super) locks: Locks,
    pub(super) notifier: Arc<Notifier>,
    pub(super) names: Vec<Key>,
    pub(super) options: AcquireOptions,
    /// Whether a busy name rejects with `LOCK_TIMEOUT`. Otherwise it resolves to zero.
    pub(super) rejects_busy: bool,
    /// The ticket of `cancel`, and the token that `cancel` cancels.
    pub(super) cancellation: Option<(u64, CancellationToken)>,
    pub(super) started: Instant,
    pub(super) deferred: Deferred,
}

impl PendingAcquisition {
    /// Starts the call of the service. The result settles the promise.
    pub(super) fn start(self, env: &Env, bridge: &Rc<Bridge>) {
        let token = self.cancellation.as_ref().map(|(_, token)| token.clone());
        let acquiring = self.locks.acquire(&self.names, self.options.clone(), token);
        bridge.call(env, acquiring, move |env, bridge, outcome| {
            self.received(env, bridge, outcome);
        });
    }

    /// Returns the options with the rest of the wait. `None`: the wait has ended.
    fn remaining_options(&self) -> Option<AcquireOptions> {
        let wait = match self.options.wait {
            Wait::No => return None,
            Wait::Forever => Wait::Forever,
            Wait::For(wait) => Wait::For(
                wait.checked_sub(self.started.elapsed())
                    .filter(|left| !left.is_zero())?,
            ),
        };
        Some(AcquireOptions {
            wait,
            ..self.options.clone()
        })
    }

    /// Handles the outcome on the JavaScript thread.
    fn received(mut self, env: &Env, bridge: &Rc<Bridge>, outcome: Result<Outcome, LockError>) {
        let acquired = match outcome {
            // The lease ended before the event loop received it. Returning it would start a job without a lock.
            Ok(Outcome::Acquired(lease)) if !lease.is_held() => {
                if self.locks.is_closed() {
                    Err(LockError::closed())
                } else if let Some(rest) = self.remaining_options() {
                    self.options = AcquireOptions {
                        resumed: Some(lease.arrival()),
                        ..rest
                    };
                    return self.start(env, bridge);
                } else {
                    self.busy()
                }
            }
            Ok(Outcome::Acquired(lease)) => Ok(Some(lease)),
            Ok(Outcome::Busy) => self.busy(),
            Ok(Outcome::Aborted) => Ok(None),
            Err(error) => Err(error),
        };
        if let Some((ticket, _)) = self.cancellation {
            bridge.cancellations.borrow_mut().remove(&ticket);
        }
        hold_process(env, bridge, &self.locks);
        let (locks, notifier) = (self.locks, self.notifier);
        let number = |lease| bridge.leases.borrow_mut().add(Entry { locks, lease, notifier });
        self.deferred
            .settle(env, acquired.map(|lease| lease.map_or(0.0, number)));
    }

    /// Returns the result of a busy name.
    fn busy(&self) -> Result<Option<Arc<Lease>>, LockError> {
        if !self.rejects_busy {
            return Ok(None);
        }
        let waited = match self.options.wait {
            Wait::For(wait) => wait.as_millis(),
            Wait::No | Wait::Forever => 0,
        };
        let first = self.names[0].as_str();
        Err(LockError::timeout(
            first,
            format!("the lock {first:?} was still busy after {waited} ms"),
        ))
    }
}
