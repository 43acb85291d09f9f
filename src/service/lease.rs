//! A held lock: its local deadline, its renewal, its loss.
//!
//! The local view is the cautious one. A lease counts from the moment at which the request that granted (or renewed) it
//! was *sent*, less an allowance for drift ([`Ttl::cautious`]). A failed renewal is *unknown*, not lost: it is tried
//! again until the local deadline, and only then is the lease lost.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::Inner;
use super::backoff::Backoff;
use super::event::{Event, EventKind, add, sub};
use super::options::AcquireOptions;
use crate::clock::Moment;
use crate::engine::{Released, Renewed};
use crate::error::{EngineError, LockError};
use crate::model::{Claim, Fence, Key, Ttl};

/// A renewal is given at least this long for an answer, however short the ttl.
const LEAST_RENEWAL_LIMIT: Duration = Duration::from_millis(100);

/// Called once when a lease is lost, on the I/O thread.
pub type LossSink = Box<dyn FnOnce(LockError) + Send>;

/// A lock that was granted.
pub struct Lease {
    /// What the store knows it by.
    pub(super) claim: Claim,
    /// The names as the caller gave them, without repeats.
    names: Arc<[Key]>,
    fence: Fence,
    acquired_at: Moment,
    options: AcquireOptions,
    state: Mutex<State>,
    /// Renewals, extensions and the release of one lease never overlap at the store.
    ops: tokio::sync::Mutex<()>,
}

struct State {
    phase: Phase,
    /// The lease counts until then, for this process.
    deadline: Moment,
    /// When to renew next. `None`: never again.
    renew_at: Option<Moment>,
    /// What each renewal asks for; `extend` may raise it.
    ttl: Ttl,
    backoff: Backoff,
    last_failure: Option<Arc<EngineError>>,
    /// Where the keeper's schedule has this lease.
    pub(super) slot: Option<(u64, u64)>,
    on_loss: Option<LossSink>,
}

enum Phase {
    Held,
    Released,
    Lost(LockError),
}

/// What a release found.
#[derive(Debug)]
pub enum LetGo {
    /// The lease counted until now.
    Now,
    /// It was released before.
    Before,
    /// It is lost.
    TooLate(LockError),
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease")
            .field("names", &self.names)
            .field("fence", &self.fence)
            .finish_non_exhaustive()
    }
}

impl Lease {
    /// A lease whose granting request was sent at `sent`.
    pub(super) fn new(
        claim: Claim,
        names: Arc<[Key]>,
        fence: Fence,
        sent: Moment,
        options: AcquireOptions,
    ) -> Arc<Self> {
        let ttl = claim.ttl;
        let state = State {
            phase: Phase::Held,
            deadline: sent + ttl.cautious(),
            renew_at: options.renew.then(|| sent + ttl.duration() / 3),
            ttl,
            backoff: renewal_backoff(ttl),
            last_failure: None,
            slot: None,
            on_loss: None,
        };
        let ops = tokio::sync::Mutex::new(());
        Arc::new(Lease {
            claim,
            names,
            fence,
            acquired_at: Moment::now(),
            options,
            state: Mutex::new(state),
            ops,
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The names as the caller gave them, without repeats; at least one.
    pub fn names(&self) -> &Arc<[Key]> {
        &self.names
    }

    /// The owner token at the store.
    pub fn token(&self) -> &str {
        self.claim.owner.as_str()
    }

    /// The fencing token.
    pub fn fence(&self) -> Fence {
        self.fence
    }

    /// What each renewal asks for.
    pub fn ttl(&self) -> Ttl {
        self.state().ttl
    }

    /// How the lease was asked for.
    pub fn options(&self) -> &AcquireOptions {
        &self.options
    }

    /// The metadata it was acquired with.
    pub fn metadata(&self) -> Option<&str> {
        self.claim.metadata.as_deref()
    }

    /// How long the lease still counts for this process; zero once it is released or lost. True at any instant, also
    /// right after the process or the machine was suspended: it is computed from the clock, not from a timer.
    pub fn remaining(&self) -> Duration {
        let state = self.state();
        if matches!(state.phase, Phase::Held) {
            state.deadline.remaining()
        } else {
            Duration::ZERO
        }
    }

    /// Whether the lease still counts.
    pub fn is_held(&self) -> bool {
        !self.remaining().is_zero()
    }

    /// Why the lease is gone although it was not released; `None` while it is held and after a release.
    pub fn loss(&self) -> Option<LockError> {
        let state = self.state();
        match &state.phase {
            Phase::Lost(error) => Some(error.clone()),
            Phase::Held if state.deadline.is_past() => Some(self.expired(&state)),
            _ => None,
        }
    }

    /// Whether the holder released it, as opposed to losing it.
    pub fn is_released(&self) -> bool {
        matches!(self.state().phase, Phase::Released)
    }

    /// Has `sink` called when the lease is lost; at once when it is already. Never after a release.
    pub fn on_loss(&self, sink: LossSink) {
        let mut state = self.state();
        match &state.phase {
            Phase::Lost(error) => {
                let error = error.clone();
                drop(state);
                sink(error);
            }
            Phase::Held => state.on_loss = Some(sink),
            Phase::Released => {}
        }
    }

    pub(super) fn slot(&self) -> Option<(u64, u64)> {
        self.state().slot
    }

    pub(super) fn set_slot(&self, slot: Option<(u64, u64)>) {
        self.state().slot = slot;
    }

    /// When the keeper must look at this lease next. `None` once it is over.
    pub(super) fn next_event(&self) -> Option<Moment> {
        let state = self.state();
        match state.phase {
            Phase::Held => Some(state.renew_at.map_or(state.deadline, |at| at.min(state.deadline))),
            _ => None,
        }
    }

    /// Does what is due: declares the loss, or starts a renewal.
    pub(super) fn look_after(self: &Arc<Self>, inner: &Arc<Inner>) {
        let mut state = self.state();
        if !matches!(state.phase, Phase::Held) {
            return;
        }
        if state.deadline.is_past() {
            let error = self.expired(&state);
            drop(state);
            self.lose(inner, error);
        } else if state.renew_at.is_some_and(Moment::is_past) {
            if inner.pulse.silence() > self.options.stall_limit {
                // Renewal pauses; it goes on if the event loop answers before the deadline.
                state.renew_at = Some(Moment::now() + state.backoff.pause());
            } else {
                inner.pulse.check();
                // The renewal itself says when the next one is due.
                state.renew_at = None;
                drop(state);
                inner.background.spawn(self.clone().renew(inner.clone()));
            }
        }
    }

    async fn renew(self: Arc<Self>, inner: Arc<Inner>) {
        {
            let _alone = self.ops.lock().await;
            let (ttl, limit) = {
                let state = self.state();
                if !matches!(state.phase, Phase::Held) || state.deadline.is_past() {
                    return;
                }
                // Several tries fit into what is left of the lease.
                let limit = (state.ttl.duration() / 6)
                    .max(LEAST_RENEWAL_LIMIT)
                    .min(inner.store_timeout);
                (self.capped(state.ttl), limit)
            };
            let Some(ttl) = ttl else { return };
            let sent = Moment::now();
            let answer = match tokio::time::timeout(limit, inner.engine.renew(&self.claim, ttl)).await {
                Ok(answer) => answer,
                Err(_) => Err(EngineError::no_answer(inner.engine.name(), "renew", limit)),
            };
            self.renewed(&inner, answer, sent, ttl);
        }
        inner.keeper.schedule(&self);
    }

    fn renewed(&self, inner: &Arc<Inner>, answer: Result<Renewed, EngineError>, sent: Moment, ttl: Ttl) {
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
                let next = sent + state.ttl.duration() / 3;
                let goes_on = self.options.renew && self.ends_at().is_none_or(|end| next < end);
                state.renew_at = goes_on.then_some(next);
                state.backoff = renewal_backoff(state.ttl);
                state.last_failure = None;
                drop(state);
                add(&inner.counters.renewed);
                inner.emit(|| self.event(EventKind::Renewed, None, None));
            }
            Ok(Renewed::Extended) => {
                let lost = matches!(state.phase, Phase::Lost(_));
                drop(state);
                if lost {
                    // Lost here meanwhile: nothing may be left held that nobody knows of.
                    inner.free_in_background(self.claim.clone(), None);
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
                state.renew_at = Some(Moment::now() + state.backoff.pause());
                state.last_failure = Some(Arc::new(error));
            }
        }
    }

    /// When `max_hold` ends the lease.
    fn ends_at(&self) -> Option<Moment> {
        self.options.max_hold.map(|most| self.acquired_at + most)
    }

    /// The ttl, shortened so that the lease does not outlast `max_hold`. `None` once that is over.
    fn capped(&self, ttl: Ttl) -> Option<Ttl> {
        let Some(end) = self.ends_at() else { return Some(ttl) };
        let left = end.remaining();
        (!left.is_zero()).then(|| Ttl::clamped(left.min(ttl.duration())))
    }

    /// Makes the lease last at least `ttl` from now on, and each later renewal ask for it.
    ///
    /// # Errors
    /// `LOCK_LOST` when it is gone (or was released), `LOCK_STORE` when the store failed.
    pub(super) async fn extend(self: &Arc<Self>, inner: &Arc<Inner>, ttl: Ttl) -> Result<(), LockError> {
        let _alone = self.ops.lock().await;
        if let Phase::Released = self.state().phase {
            return Err(self.lost("it was released"));
        }
        if let Some(loss) = self.loss() {
            return Err(loss);
        }
        let Some(asked) = self.capped(ttl) else {
            return Err(self.lost("maxHoldMs is over"));
        };
        let mut sent = Moment::now();
        let answer = inner
            .with_store("renew", inner.store_timeout, || {
                sent = Moment::now();
                inner.engine.renew(&self.claim, asked)
            })
            .await
            .map_err(|error| error.with_key(self.names[0].as_str()))?;
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

    /// The first half of a release: from here on the lease counts no more.
    pub(super) fn let_go(&self, inner: &Inner) -> LetGo {
        {
            let mut state = self.state();
            match &state.phase {
                Phase::Released => return LetGo::Before,
                Phase::Lost(loss) => return LetGo::TooLate(loss.clone()),
                Phase::Held if state.deadline.is_past() => return LetGo::TooLate(self.expired(&state)),
                Phase::Held => {
                    state.phase = Phase::Released;
                    state.on_loss = None;
                }
            }
        }
        inner.keeper.forget(self);
        sub(&inner.counters.held);
        LetGo::Now
    }

    /// The second half: tells the store.
    ///
    /// # Behavior
    /// `true`: the store held it and freed it. `false`: it was released before, or is gone. When the store fails, the
    /// release goes on in the background until the lease has ended anyway.
    ///
    /// # Errors
    /// `LOCK_STORE` when the store did not take the release in time.
    pub(super) async fn finish_release(self: &Arc<Self>, inner: &Arc<Inner>, let_go: LetGo) -> Result<bool, LockError> {
        match let_go {
            LetGo::Now => {}
            LetGo::Before => return Ok(false),
            LetGo::TooLate(loss) => {
                self.lose(inner, loss);
                // The store may hold it for a moment longer than the cautious view does.
                self.free(inner).await?;
                return Ok(false);
            }
        }
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
        let _alone = self.ops.lock().await;
        let kept_until = self.acquired_at + self.options.min_hold;
        let mut calls = 0;
        let released = inner.with_store("release", inner.store_timeout, || {
            calls += 1;
            inner.engine.release(&self.claim, kept_until.remaining())
        });
        match released.await {
            Ok(answer) => {
                for key in self.claim.keys() {
                    inner.lines.nudge(key);
                }
                // After a lost reply the store finds nothing to free, because the call before did it.
                Ok(answer == Released::Freed || calls > 1)
            }
            Err(error) => {
                inner.free_in_background(self.claim.clone(), Some(kept_until));
                Err(error.with_key(self.names[0].as_str()))
            }
        }
    }

    fn lose(&self, inner: &Arc<Inner>, error: LockError) {
        let sink = {
            let mut state = self.state();
            if !matches!(state.phase, Phase::Held) {
                return;
            }
            state.phase = Phase::Lost(error.clone());
            state.renew_at = None;
            state.on_loss.take()
        };
        inner.keeper.forget(self);
        inner.forget_gist(self);
        sub(&inner.counters.held);
        add(&inner.counters.lost);
        if self.options.renew {
            // A renewal whose reply was lost may have made it last at the store.
            inner.free_in_background(self.claim.clone(), None);
        }
        inner.emit(|| {
            self.event(
                EventKind::Lost,
                Some(self.acquired_at.elapsed()),
                Some(error.message.as_str().into()),
            )
        });
        if let Some(sink) = sink {
            sink(error);
        }
    }

    fn expired(&self, state: &State) -> LockError {
        if let Some(failure) = &state.last_failure {
            let mut error = self.lost(&format!("it could not be renewed in time ({failure})"));
            error.engine = Some(failure.engine);
            error.cause = Some(failure.clone());
            return error;
        }
        let drift = state.ttl.duration() - state.ttl.cautious();
        if self.ends_at().is_some_and(|end| end.remaining() <= drift) {
            return self.lost("maxHoldMs is over");
        }
        self.lost(if self.options.renew {
            "it could not be renewed in time (the process was suspended, or its event loop was silent for stallLimitMs)"
        } else {
            "its ttl is over, and it was not to be renewed"
        })
    }

    fn lost(&self, why: &str) -> LockError {
        let name = self.names[0].as_str();
        LockError::lost(name, format!("the lock {name:?} is lost: {why}"))
    }

    pub(super) fn event(&self, kind: EventKind, duration: Option<Duration>, reason: Option<Arc<str>>) -> Event {
        Event {
            kind,
            names: self.names.clone(),
            fence: Some(self.fence),
            duration,
            reason,
        }
    }
}

/// A failed renewal is tried again soon, but not so often that a struggling store is kept from recovering.
fn renewal_backoff(ttl: Ttl) -> Backoff {
    let most = (ttl.duration() / 6).clamp(Duration::from_millis(5), Duration::from_secs(2));
    Backoff::new((most / 8).max(Duration::from_millis(2)), most)
}
