//! When a lease is renewed, what an answer means for it, and `extend`.

use std::sync::Arc;
use std::time::Duration;

use super::{Lease, Phase, State, Trouble, Window};
use crate::clock::Moment;
use crate::engine::Renewed;
use crate::error::{EngineError, LockError};
use crate::model::Ttl;
use crate::service::Inner;
use crate::service::backoff::Backoff;
use crate::service::event::{EventKind, add};

/// How long one renewal waits for its answer: several tries fit into what is left of the lease.
fn renewal_limit(ttl: Ttl) -> Duration {
    (ttl.duration() / 6).max(LEAST_RENEWAL_LIMIT)
}

/// The same for a batch: rounded down a little (to three binary digits), so that leases of similar ttls share a call.
fn batch_limit(limit: Duration) -> Duration {
    let ms = (limit.as_millis() as u64).max(1);
    let unit = 1 << ms.ilog2().saturating_sub(2);
    Duration::from_millis(ms / unit * unit)
}

/// A renewal is given at least this long for an answer, however short the ttl.
const LEAST_RENEWAL_LIMIT: Duration = Duration::from_millis(100);

impl Lease {
    /// Does what is due: declares the loss, or begins a renewal.
    ///
    /// # Behavior
    /// `Some`: it is to be renewed now, and an answer is to be waited for as long as that. Until then, nothing else is due
    /// for it but its deadline.
    pub(in crate::service) fn look_after(&self, inner: &Arc<Inner>) -> Option<Duration> {
        let mut state = self.state();
        if !matches!(state.phase, Phase::Held) {
            return None;
        }
        if state.deadline.is_past() {
            let error = self.expired(&state);
            drop(state);
            self.lose(inner, error);
            return None;
        }
        state.next.filter(|window| window.opens.is_past())?;
        if inner.pulse.silence() > self.stall_limit {
            // Renewal pauses; it goes on if the event loop answers before the deadline.
            state.pause();
            return None;
        }
        inner.pulse.check();
        state.next = None;
        Some(batch_limit(renewal_limit(state.ttl).min(inner.store_timeout)))
    }

    pub(super) fn renewed(&self, inner: &Arc<Inner>, answer: Result<Renewed, EngineError>, sent: Moment, ttl: Ttl) {
        let mut state = self.state();
        match answer {
            // A deadline that has passed is final: whoever asked has been told so.
            Ok(Renewed::Extended) if matches!(state.phase, Phase::Held) && state.deadline.is_past() => {
                let error = self.expired(&state);
                drop(state);
                self.lose(inner, error);
            }
            Ok(Renewed::Extended) if matches!(state.phase, Phase::Held) => {
                state.deadline = state.deadline.max(sent + ttl.cautious());
                let next = Window::after(sent, state.ttl);
                let goes_on = self.renew && self.ends_at.is_none_or(|end| next.due < end);
                state.next = goes_on.then_some(next);
                state.trouble = None;
                drop(state);
                add(&inner.counters.renewed);
                inner.emit(|| self.event(EventKind::Renewed, None, None));
            }
            Ok(Renewed::Extended) => {
                let lost = matches!(state.phase, Phase::Lost(_));
                drop(state);
                if lost {
                    // The lease was lost locally during the renewal: the store must not keep a lock without a caller.
                    inner.release_in_background(self.abandoned());
                }
            }
            Ok(Renewed::Lost) => {
                drop(state);
                self.lose(
                    inner,
                    self.lost("it is gone from the store: expired, deleted, or taken over"),
                );
            }
            Err(error) => {
                add(&inner.counters.store_errors);
                tracing::debug!(%error, name = %self.names[0], "a renewal failed and is tried again");
                state.pause().last_failure = Some(Arc::new(error));
            }
        }
    }

    /// The ttl, shortened so that the lease does not outlast `max_hold`. `None` once that is over.
    pub(super) fn capped(&self, ttl: Ttl) -> Option<Ttl> {
        let Some(end) = self.ends_at else { return Some(ttl) };
        let left = end.remaining();
        (!left.is_zero()).then(|| Ttl::clamped(left.min(ttl.duration())))
    }

    /// Makes the lease last at least `ttl` from now on, and each later renewal ask for it.
    ///
    /// # Errors
    /// `LOCK_LOST` when it is gone (or was released), `LOCK_STORE` when the store failed.
    pub(in crate::service) async fn extend(self: &Arc<Self>, inner: &Arc<Inner>, ttl: Ttl) -> Result<(), LockError> {
        let started = tokio::time::Instant::now();
        let name = || self.names[0].as_str();
        let Ok(_alone) = tokio::time::timeout(inner.store_timeout, self.alone(inner)).await else {
            let error = EngineError::no_answer(inner.engine.name(), "renew", inner.store_timeout);
            return Err(LockError::store(error).with_key(name()));
        };
        if let Phase::Released = self.state().phase {
            return Err(self.lost("it was released"));
        }
        if let Some(loss) = self.loss() {
            return Err(loss);
        }
        let Some(asked) = self.capped(ttl) else {
            return Err(self.lost("maxHoldMs is over"));
        };
        let limit = {
            let mut state = self.state();
            state.longest = state.longest.max(asked);
            state.extended = true;
            renewal_limit(state.ttl)
        };
        let mut sent = Moment::now();
        let answer = inner
            .with_store("renew", inner.store_timeout.saturating_sub(started.elapsed()), || {
                sent = Moment::now();
                async move {
                    // No longer than a renewal waits: the lease must not run out under an extension.
                    match tokio::time::timeout(limit, inner.engine.renew(&self.claim, asked)).await {
                        Ok(answer) => answer,
                        Err(_) => Err(EngineError::no_answer(inner.engine.name(), "renew", limit)),
                    }
                }
            })
            .await
            .map_err(|error| error.with_key(name()))?;
        match answer {
            Renewed::Extended => {
                self.state().ttl = ttl;
                self.renewed(inner, Ok(answer), sent, asked);
                if let Some(loss) = self.loss() {
                    return Err(loss);
                }
                inner.keeper.schedule(self);
                Ok(())
            }
            Renewed::Lost => {
                let error = self.lost("it is gone from the store: expired, deleted, or taken over");
                self.lose(inner, error.clone());
                Err(error)
            }
        }
    }
}

impl State {
    /// Puts the next renewal off: it failed, or cannot be done just now.
    pub(super) fn pause(&mut self) -> &mut Trouble {
        let ttl = self.ttl;
        let trouble = self.trouble.get_or_insert_with(|| {
            Box::new(Trouble {
                backoff: renewal_backoff(ttl),
                last_failure: None,
            })
        });
        self.next = Some(Window::after_pause(trouble.backoff.pause()));
        trouble
    }
}

/// A failed renewal is tried again soon, but not so often that a struggling store is kept from recovering.
fn renewal_backoff(ttl: Ttl) -> Backoff {
    let most = (ttl.duration() / 6).clamp(Duration::from_millis(5), Duration::from_secs(2));
    Backoff::new((most / 8).max(Duration::from_millis(2)), most)
}
