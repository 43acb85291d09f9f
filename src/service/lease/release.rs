//! Release, in two steps: the first ends the lease in this process, the second releases it at the store.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use super::{Lease, Phase};
use tokio_util::task::task_tracker::TaskTrackerToken;

use crate::clock::Moment;
use crate::engine::Released;
use crate::error::LockError;
use crate::service::Inner;
use crate::service::event::{EventKind, add, sub};

/// What a release found.
#[derive(Debug)]
pub(in crate::service) enum LetGo {
    /// The lease counted until now. A close waits for the second half.
    Now(#[expect(dead_code, reason = "held, not read")] TaskTrackerToken),
    /// It was released before.
    Before,
    /// It is lost. A close waits for what is told to the store all the same.
    TooLate(
        LockError,
        #[expect(dead_code, reason = "held, not read")] TaskTrackerToken,
    ),
}

/// The outcome of a release.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReleaseOutcome {
    /// This release freed the lock.
    Freed,
    /// The lock was released before, or is lost.
    NotHeld,
}

impl ReleaseOutcome {
    /// Whether the store confirmed that this release freed the lock.
    pub fn is_freed(self) -> bool {
        self == ReleaseOutcome::Freed
    }
}

impl Lease {
    /// The first half of a release: from here on the lease counts no more.
    pub(in crate::service) fn let_go(&self, inner: &Inner) -> LetGo {
        // The token comes first: a close from here on waits for this release. One that has begun frees the lease itself.
        let token = inner.calls.token();
        if inner.closing.is_cancelled() {
            self.state().let_go = true;
            return LetGo::Before;
        }
        {
            let mut state = self.state();
            match &state.phase {
                Phase::Released => return LetGo::Before,
                Phase::Lost(loss) => return LetGo::TooLate(LockError::clone(loss), token),
                Phase::Held if state.deadline.is_past() => return LetGo::TooLate(self.expired(&state), token),
                Phase::Held => {
                    state.phase = Phase::Released;
                    state.on_loss = None;
                }
            }
        }
        inner.keeper.forget(self);
        sub(&inner.counters.held);
        LetGo::Now(token)
    }

    /// Releases the lease at the store: the second step.
    ///
    /// # Behavior
    /// When the store fails, the release is repeated in the background until the lease has expired.
    ///
    /// # Errors
    /// `LOCK_STORE` when the store did not answer the release in time.
    pub(in crate::service) async fn finish_release(
        self: &Arc<Self>,
        inner: &Arc<Inner>,
        let_go: &LetGo,
    ) -> Result<ReleaseOutcome, LockError> {
        match let_go {
            LetGo::Now(_) => {
                let outcome = self.release_at_store(inner).await?;
                self.released(inner, outcome != ReleaseOutcome::NotHeld);
                Ok(outcome)
            }
            LetGo::Before => Ok(ReleaseOutcome::NotHeld),
            LetGo::TooLate(loss, _) => {
                self.lose(inner, loss.clone());
                if !inner.closing.is_cancelled() {
                    // The store may hold the lease for a moment longer than the local deadline says. During a close the list of
                    // abandoned claims releases it.
                    self.release_at_store(inner).await?;
                }
                Ok(ReleaseOutcome::NotHeld)
            }
        }
    }

    /// Ends a lease because the service closes: reports it as lost, and releases it in the background.
    pub(in crate::service) fn end(self: &Arc<Self>, inner: &Arc<Inner>) {
        if let Some(loss) = self.loss() {
            return self.lose(inner, loss);
        }
        let loss = self.lost("its LockService was closed");
        let sink = {
            let mut state = self.state();
            if !matches!(state.phase, Phase::Held) {
                return;
            }
            state.phase = Phase::Lost(loss.clone().into());
            state.on_loss.take()
        };
        inner.keeper.forget(self);
        sub(&inner.counters.held);
        if let Some(sink) = sink {
            sink(loss);
        }
        inner.release_in_background(self.abandoned().kept_until(self.kept_until).of_lease(self));
    }

    /// Emits the event for the store's answer to the release: released, or lost where the store did not hold the lease.
    pub(in crate::service) fn released(&self, inner: &Inner, was_held: bool) {
        let held_for = Some(self.acquired_at.elapsed());
        if was_held {
            add(&inner.counters.released);
            inner.emit(|| self.event(EventKind::Released, held_for, None));
        } else {
            add(&inner.counters.lost);
            let why = self.lost("it was gone from the store when it was released");
            inner.emit(|| self.event(EventKind::Lost, held_for, Some(why.message.into())));
        }
    }

    async fn release_at_store(self: &Arc<Self>, inner: &Arc<Inner>) -> Result<ReleaseOutcome, LockError> {
        let mut left = inner.store_timeout;
        // A renewal that hangs must not hold the release up for longer than the store may take; it never re-creates.
        let _alone = match self.try_alone(inner) {
            Some(alone) => Some(alone),
            None => {
                let started = tokio::time::Instant::now();
                let alone = tokio::time::timeout(left / 2, self.alone(inner)).await.ok();
                left = left.saturating_sub(started.elapsed());
                alone
            }
        };
        let kept_until = self.kept_until;
        // An earlier request had no answer, but may have been executed.
        let is_unanswered = AtomicBool::new(false);
        let released = inner.with_store("release", left, || async {
            let keep = kept_until.map_or(Duration::ZERO, Moment::remaining);
            let released = inner.engine.release(&self.claim, keep).await;
            if released.as_ref().is_err_and(|error| error.may_be_executed) {
                is_unanswered.store(true, Relaxed);
            }
            released
        });
        let in_background = || inner.release_in_background(self.abandoned().kept_until(kept_until));
        match released.await {
            Ok(answer) => {
                for key in self.claim.keys() {
                    inner.local_fifos.wake_first(key);
                }
                if self.doubtful {
                    in_background();
                }
                Ok(match answer {
                    Released::Freed => ReleaseOutcome::Freed,
                    // That one freed it.
                    Released::NotHeld if is_unanswered.load(Relaxed) => ReleaseOutcome::Freed,
                    Released::NotHeld => ReleaseOutcome::NotHeld,
                })
            }
            Err(error) => {
                in_background();
                Err(error.with_key(self.names[0].as_str()))
            }
        }
    }
}
