//! Release, in two steps: the lease counts no more from the first, and the second tells the store.

use std::sync::Arc;
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

    /// The second half: tells the store.
    ///
    /// # Behavior
    /// `true`: the store held it and freed it. `false`: it was released before, or is gone. When the store fails, the
    /// release goes on in the background until the lease has ended anyway.
    ///
    /// # Errors
    /// `LOCK_STORE` when the store did not take the release in time.
    pub(in crate::service) async fn finish_release(
        self: &Arc<Self>,
        inner: &Arc<Inner>,
        let_go: &LetGo,
    ) -> Result<bool, LockError> {
        match let_go {
            LetGo::Now(_) => self.tell_store(inner).await,
            LetGo::Before => Ok(false),
            LetGo::TooLate(loss, _) => {
                self.lose(inner, loss.clone());
                if inner.closing.is_cancelled() {
                    // What was held is freed by the close, and the engine may be gone.
                    return Ok(false);
                }
                // The store may hold it for a moment longer than the cautious view does.
                self.free(inner).await?;
                Ok(false)
            }
        }
    }

    /// The release of a lease that its holder did not ask for, because the service closes: freed at the store, lost to
    /// its holder.
    ///
    /// # Errors
    /// As [`Lease::finish_release`].
    pub(in crate::service) async fn end(self: &Arc<Self>, inner: &Arc<Inner>) -> Result<bool, LockError> {
        if let Some(loss) = self.loss() {
            self.lose(inner, loss);
            return Ok(false);
        }
        let loss = self.lost("its LockService was closed");
        let sink = {
            let mut state = self.state();
            if !matches!(state.phase, Phase::Held) {
                return Ok(false);
            }
            state.phase = Phase::Lost(loss.clone().into());
            state.on_loss.take()
        };
        inner.keeper.forget(self);
        sub(&inner.counters.held);
        if let Some(sink) = sink {
            sink(loss);
        }
        self.tell_store(inner).await
    }

    async fn tell_store(self: &Arc<Self>, inner: &Arc<Inner>) -> Result<bool, LockError> {
        let freed = self.free(inner).await?;
        if freed {
            add(&inner.counters.released);
            inner.emit(|| self.event(EventKind::Released, Some(self.acquired_at.elapsed()), None));
        } else {
            add(&inner.counters.lost);
            let why = self.lost("it was gone from the store when it was released");
            inner.emit(|| {
                self.event(
                    EventKind::Lost,
                    Some(self.acquired_at.elapsed()),
                    Some(why.message.into()),
                )
            });
        }
        Ok(freed)
    }

    async fn free(self: &Arc<Self>, inner: &Arc<Inner>) -> Result<bool, LockError> {
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
        let mut calls = 0;
        let released = inner.with_store("release", left, || {
            calls += 1;
            let keep = kept_until.map_or(Duration::ZERO, Moment::remaining);
            inner.engine.release(&self.claim, keep)
        });
        match released.await {
            Ok(answer) => {
                for key in self.claim.keys() {
                    inner.lines.nudge(key);
                }
                if self.doubtful {
                    inner.free_in_background(self.lapsed(kept_until));
                }
                // After a lost reply the store finds nothing to free, because the call before did it.
                Ok(answer == Released::Freed || calls > 1)
            }
            Err(error) => {
                inner.free_in_background(self.lapsed(kept_until));
                Err(error.with_key(self.names[0].as_str()))
            }
        }
    }
}
