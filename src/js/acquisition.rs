//! An acquisition whose promise is pending: its wait, its cancellation, and its result.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use napi::Env;
use tokio_util::sync::CancellationToken;

use super::bridge::deferred::Deferred;
use super::bridge::leases::Entry;
use super::bridge::notifier::Notifier;
use super::bridge::{Bridge, hold_process};
use crate::error::LockError;
use crate::model::{Names, Process, Share};
use crate::service::{AcquireOptions, BusyLock, Lease, Locks, Outcome, Wait};

/// A pending acquisition.
pub(super) struct PendingAcquisition {
    pub(super) locks: Locks,
    pub(super) notifier: Arc<Notifier>,
    pub(super) names: Names,
    pub(super) options: Arc<AcquireOptions>,
    /// The ticket of `cancel`, and the token that `cancel` cancels.
    pub(super) cancellation: Option<(u64, CancellationToken)>,
    pub(super) started: Instant,
    /// Whether the call does not keep the event loop alive.
    pub(super) is_in_background: bool,
    pub(super) deferred: Deferred,
}

impl PendingAcquisition {
    /// Starts a call of the service with its own options, or with the rest of its wait. The result settles the promise.
    pub(super) fn start(self, env: &Env, bridge: &Rc<Bridge>, options: Arc<AcquireOptions>) {
        let token = self.cancellation.as_ref().map(|(_, token)| token.clone());
        let acquiring = self.locks.acquire(self.names.clone(), options, token);
        bridge.call(env, self.is_in_background, acquiring, move |env, bridge, outcome| {
            self.received(env, bridge, outcome)
        });
    }

    /// Handles the outcome on the JavaScript thread.
    fn received(self, env: &Env, bridge: &Rc<Bridge>, outcome: Result<Outcome, LockError>) {
        let acquired = match outcome {
            // The lease ended before the event loop received it. Returning it would start a job without a lock.
            Ok(Outcome::Acquired(lease)) if !lease.is_held() => {
                if self.locks.is_closed() {
                    Err(LockError::closed())
                } else if let Some(rest) = self.options.resumed(lease.arrival, self.started.elapsed()) {
                    return self.start(env, bridge, rest.into());
                } else {
                    self.busy(None)
                }
            }
            Ok(Outcome::Acquired(lease)) => {
                lease.received();
                Ok(Some(lease))
            }
            Ok(Outcome::Busy(lock)) => self.busy(lock),
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

    /// Returns the result of a busy name: `LOCK_TIMEOUT` if the call reports the holder, otherwise nothing.
    fn busy(&self, lock: Option<Box<BusyLock>>) -> Result<Option<Arc<Lease>>, LockError> {
        if !self.options.report_holder {
            return Ok(None);
        }
        let waited = match self.options.wait {
            Wait::For(wait) => wait.as_millis(),
            Wait::No | Wait::Forever => 0,
        };
        let name = lock.as_ref().map_or(&self.names[0], |lock| &lock.name).clone();
        let held = lock.as_deref().map(held_by).unwrap_or_default();
        let noun = self.options.share.map_or("lock", Share::noun);
        let message = format!("the {noun} {:?} was still busy after {waited} ms{held}", name.as_str());
        let info = lock.and_then(|lock| lock.info.ok().flatten());
        Err(LockError::timeout(name.as_str(), message, info))
    }
}

/// Returns the part of a message that names the holder, or says why none is known.
fn held_by(lock: &BusyLock) -> String {
    let info = match &lock.info {
        Ok(Some(info)) => info,
        Ok(None) => {
            let reserved = "it is reserved for a waiting call, such as one for several names";
            return format!(": it has no holder now: {reserved}, or has just become free");
        }
        Err(error) => return format!(": its holder is not known ({error})"),
    };
    let Some(holder) = &info.holder else {
        return ": it is held by another tool".into();
    };
    if !holder.is_known() {
        return ": it is held by a process of holdfast that has not written its name, and may have died before".into();
    }
    let Process { host, pid } = &holder.process;
    let others = match lock.others {
        0 => String::new(),
        1 => " and one other holder".into(),
        others => format!(" and {others} other holders"),
    };
    if lock.is_own {
        return format!(": it is held by this process (pid {pid} on {host}){others}");
    }
    format!(": it is held by pid {pid} on {host}{others}")
}
