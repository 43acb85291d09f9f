//! Release, in two steps: the first ends the lease in this process, the second releases it in the store.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use tokio_util::task::task_tracker::TaskTrackerToken;

use super::{Lease, Phase};
use crate::clock::Moment;
use crate::engine::{EngineExt, Released};
use crate::error::LockError;
use crate::service::Shared;
use crate::service::event::EventKind;

/// The reasons of a loss that a close or a release detects.
const SERVICE_CLOSED: &str = "its LockService was closed";
const GONE_AT_RELEASE: &str = "the store no longer had it when it was released, before the end of its lease";

/// The first step of a release. A close waits for the second step while the token exists.
#[derive(Debug)]
pub(in crate::service) struct ReleaseStart {
    _call: TaskTrackerToken,
    /// `None`: the lease was held.
    loss: Option<LockError>,
}

impl Lease {
    /// Ends the lease in this process: the first step. `None`: it was released before, or the close releases it.
    pub(in crate::service) fn begin_release(self: &Arc<Self>, shared: &Shared) -> Option<ReleaseStart> {
        // The token comes first: a close that starts after it waits for this release.
        let _call = shared.calls.token();
        if shared.closing.is_cancelled() {
            self.state.lock().is_released_by_holder = true;
            return None;
        }
        let loss = {
            let mut state = self.state.lock();
            match &state.phase {
                Phase::Released => return None,
                Phase::Lost(loss) => Some(LockError::clone(loss)),
                Phase::Held if state.deadline.is_past() => Some(self.expired(&state)),
                Phase::Held => {
                    state.phase = Phase::Released;
                    state.on_loss = None;
                    None
                }
            }
        };
        if loss.is_none() {
            shared.scheduler.schedule(self);
            shared.counters.lock().held -= 1;
        }
        Some(ReleaseStart { _call, loss })
    }

    /// Returns the loss of a lease whose release returned `false`, and that no caller had released before.
    pub fn lost_at_release(&self, is_closed: bool) -> LockError {
        self.lost(if is_closed { SERVICE_CLOSED } else { GONE_AT_RELEASE })
    }

    /// Releases the lease in the store: the second step. Returns whether this call released it.
    ///
    /// # Behavior
    /// When the store fails, the release is repeated in the background until the lease has expired.
    ///
    /// `true` is an assumption in two cases in which the store no longer has the lock. The reply to a request was lost, and the
    /// repeated request finds the lock gone: the first one released it, unless the store lost its data. Or the answer came after
    /// the end of the lease: the lease expired before the store executed the release, and until this call the caller had the
    /// lock. A release leaves nothing in the store by which these cases differ from a loss.
    ///
    /// # Errors
    /// `LOCK_STORE` when the store did not answer the release in time.
    pub(in crate::service) async fn finish_release(
        self: &Arc<Self>,
        shared: &Arc<Shared>,
        start: &ReleaseStart,
    ) -> Result<bool, LockError> {
        let Some(loss) = &start.loss else {
            let is_freed = self.release_in_store(shared, true).await?;
            self.emit_released(shared, is_freed);
            return Ok(is_freed);
        };
        self.lose(shared, loss.clone());
        if !shared.closing.is_cancelled() {
            // The lease in the store may last a little longer than the local deadline. During a close the list of
            // abandoned claims releases it.
            self.release_in_store(shared, false).await?;
        }
        Ok(false)
    }

    /// Ends the lease for a close: the first step reports it as lost. Returns whether the second step has to release it.
    pub(in crate::service) fn end_for_close(self: &Arc<Self>, shared: &Arc<Shared>) -> bool {
        if let Some(loss) = self.loss() {
            self.lose(shared, loss);
            return false;
        }
        let loss = self.lost(SERVICE_CLOSED);
        let (was_held, sink) = self.end_by_loss(shared, &loss);
        if let Some(sink) = sink {
            sink(loss);
        }
        was_held
    }

    /// Releases the lease in the background, after [`Lease::end_for_close`].
    pub(in crate::service) fn release_for_close(self: &Arc<Self>, shared: &Arc<Shared>) {
        let min_hold_until = self.state.lock().min_hold_until;
        shared.release_in_background(self.abandoned().min_hold_until(min_hold_until).of_lease(self));
    }

    /// Emits the event for the store's answer to the release: `Released`, or `Lost` if the store did not have the lease.
    pub(in crate::service) fn emit_released(&self, shared: &Shared, was_held: bool) {
        let held_for = Some(self.state.lock().acquired_at.elapsed());
        if was_held {
            shared.counters.lock().released += 1;
            shared.emit(|| self.event(EventKind::Released, held_for, None));
        } else {
            shared.counters.lock().lost += 1;
            let reason = self.lost(GONE_AT_RELEASE).message;
            shared.emit(|| self.event(EventKind::Lost, held_for, Some(reason.into())));
        }
    }

    /// Releases the lease in the store. `was_held`: it was held when its release was called.
    async fn release_in_store(self: &Arc<Self>, shared: &Arc<Shared>, was_held: bool) -> Result<bool, LockError> {
        let mut timeout = shared.store_timeout;
        // A renewal without an answer delays the release by at most half of the timeout. A renewal never re-creates the lock.
        let _guard = match self.operation.try_lock() {
            Ok(guard) => Some(guard),
            Err(_) => {
                let started = tokio::time::Instant::now();
                let guard = tokio::time::timeout(timeout / 2, self.operation.lock()).await.ok();
                timeout = timeout.saturating_sub(started.elapsed());
                guard
            }
        };
        let min_hold_until = self.state.lock().min_hold_until;
        // An earlier request had no answer, but the store may have executed it.
        let is_unanswered = AtomicBool::new(false);
        let released = shared.with_retries("release", timeout, || async {
            let keep = min_hold_until.map_or(Duration::ZERO, Moment::remaining);
            let released = shared.engine.release(&self.claim, keep).await;
            if released.as_ref().is_err_and(|error| error.may_be_executed) {
                is_unanswered.store(true, Relaxed);
            }
            released
        });
        let in_background = || shared.release_in_background(self.abandoned().min_hold_until(min_hold_until));
        match released.await {
            Ok(answer) => {
                for key in self.claim.keys() {
                    shared.local_fifos.wake_first(key);
                }
                // The store may have released it: see `finish_release`.
                let is_assumed = answer == Released::NotHeld
                    && (is_unanswered.load(Relaxed) || was_held && self.state.lock().deadline.is_past());
                // A lease that expired before its release has no minimum hold in the store.
                if self.doubtful || is_assumed && min_hold_until.is_some() {
                    in_background();
                }
                Ok(answer == Released::Freed || is_assumed)
            }
            Err(error) => {
                in_background();
                Err(error.with_key(self.names[0].as_str()))
            }
        }
    }
}
