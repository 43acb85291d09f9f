//! A held lock: its local deadline, its renewal, its loss.
//!
//! The local view is the cautious one. A lease counts from the moment at which the request that granted (or renewed) it
//! was *sent*, less an allowance for drift ([`Ttl::cautious`]). A failed renewal is *unknown*, not lost: it is tried
//! again until the local deadline, and only then is the lease lost.

mod alone;
mod batch;
mod release;
mod renewal;
mod window;

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::Inner;
use super::abandoned::AbandonedClaim;
use super::backoff::Backoff;
use super::event::{Event, EventKind, add, sub};
use super::options::AcquireOptions;
use crate::clock::Moment;
use crate::error::{EngineError, LockError};
use crate::model::{Claim, Fence, Key, Names, Ttl};

pub(super) use batch::renew_together;
pub use release::ReleaseOutcome;
use window::Window;

/// Called once when a lease is lost, on the I/O thread.
pub type LossSink = Box<dyn FnOnce(LockError) + Send>;

/// A lock that was granted.
pub struct Lease {
    /// What the store knows it by.
    pub(super) claim: Claim,
    /// The names as the caller gave them, without repeats.
    names: Names,
    fence: Fence,
    acquired_at: Moment,
    /// Whether it is renewed.
    renew: bool,
    /// When `max_hold` ends it.
    ends_at: Option<Moment>,
    /// A release before this keeps the name busy until then (`min_hold`).
    kept_until: Option<Moment>,
    /// Renewal pauses while the event loop has not answered for longer than this.
    stall_limit: Duration,
    /// The arrival number of its call.
    arrival: u64,
    /// A try for this claim failed before the one that was granted, and may yet be carried out.
    doubtful: bool,
    state: Mutex<State>,
}

struct State {
    phase: Phase,
    /// The lease counts until then, for this process.
    deadline: Moment,
    /// When to renew next. `None`: never again, or a renewal is under way.
    next: Option<Window>,
    /// What each renewal asks for; `extend` may raise it.
    ttl: Ttl,
    /// The longest that the store was ever asked for: how long the lease may lie there.
    longest: Ttl,
    /// An extension was asked for.
    extended: bool,
    /// Its holder released it while the service closes, which frees it.
    let_go: bool,
    /// Something is under way for it at the store, and whether somebody waits for the end of that (`alone.rs`).
    busy: bool,
    awaited: bool,
    /// `None` while all goes well.
    trouble: Option<Box<Trouble>>,
    /// When the keeper looks at it, if it is on the keeper's schedule.
    slot: Option<Moment>,
    on_loss: Option<LossSink>,
}

/// Renewals that failed, or could not be done.
struct Trouble {
    backoff: Backoff,
    last_failure: Option<Arc<EngineError>>,
}

enum Phase {
    Held,
    Released,
    Lost(Box<LockError>),
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
    /// A lease whose granting request was sent at `sent`. `doubtful`: an earlier one failed, and may yet be carried out.
    pub(super) fn new(
        claim: Claim,
        names: Names,
        fence: Fence,
        sent: Moment,
        options: &AcquireOptions,
        arrival: u64,
        doubtful: bool,
    ) -> Arc<Self> {
        let ttl = claim.ttl;
        let state = State {
            phase: Phase::Held,
            deadline: sent + ttl.cautious(),
            next: options.renew.then(|| Window::after(sent, ttl)),
            ttl,
            longest: ttl,
            extended: false,
            let_go: false,
            busy: false,
            awaited: false,
            trouble: None,
            slot: None,
            on_loss: None,
        };
        let acquired_at = Moment::now();
        Arc::new(Lease {
            claim,
            names,
            fence,
            acquired_at,
            renew: options.renew,
            ends_at: options.max_hold.map(|most| acquired_at + most),
            kept_until: (!options.min_hold.is_zero()).then(|| acquired_at + options.min_hold),
            stall_limit: options.stall_limit,
            arrival,
            doubtful,
            state: Mutex::new(state),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The names as the caller gave them, without repeats; at least one.
    pub fn names(&self) -> &[Key] {
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

    /// Whether it was asked for with renewal.
    pub fn is_renewed(&self) -> bool {
        self.renew
    }

    /// Returns the arrival number of its call, for [`AcquireOptions::resumed`].
    pub fn arrival(&self) -> u64 {
        self.arrival
    }

    /// The metadata it was acquired with.
    pub fn metadata(&self) -> Option<&str> {
        self.claim.metadata.as_deref()
    }

    /// How long the lease still counts for this process; zero once it is released or lost. True at any instant, also
    /// right after the process or the machine was suspended: it is computed from the clock, not from a timer.
    pub fn remaining(&self) -> Duration {
        let state = self.state();
        if matches!(state.phase, Phase::Held) && !state.let_go {
            state.deadline.remaining()
        } else {
            Duration::ZERO
        }
    }

    /// Whether it counted when its grant was known.
    pub(super) fn came_in_time(&self) -> bool {
        self.acquired_at < self.state().deadline
    }

    /// Whether the lease still counts.
    pub fn is_held(&self) -> bool {
        !self.remaining().is_zero()
    }

    /// Why the lease is gone although it was not released; `None` while it is held and after a release.
    pub fn loss(&self) -> Option<LockError> {
        let state = self.state();
        match &state.phase {
            Phase::Lost(error) => Some(LockError::clone(error)),
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
                let error = LockError::clone(error);
                drop(state);
                sink(error);
            }
            Phase::Held => state.on_loss = Some(sink),
            Phase::Released => {}
        }
    }

    pub(super) fn slot(&self) -> Option<Moment> {
        self.state().slot
    }

    pub(super) fn set_slot(&self, slot: Option<Moment>) {
        self.state().slot = slot;
    }

    /// When the keeper must look at this lease next. `None` once it is over.
    pub(super) fn next_event(&self) -> Option<Moment> {
        let state = self.state();
        match state.phase {
            Phase::Held => Some(state.next.map_or(state.deadline, |next| next.due.min(state.deadline))),
            _ => None,
        }
    }

    /// Whether it may be renewed now, along with others.
    pub(super) fn may_be_renewed(&self, now: Moment) -> bool {
        self.state().next.is_some_and(|next| next.opens <= now)
    }

    /// Returns the claim as an abandoned one, with the longest ttl that the store may have for it.
    fn abandoned(&self) -> AbandonedClaim {
        let mut claim = self.claim.clone();
        claim.ttl = claim.ttl.max(self.state().longest);
        AbandonedClaim::new(claim, self.doubtful)
    }

    fn lose(&self, inner: &Arc<Inner>, error: LockError) {
        let sink = {
            let mut state = self.state();
            if !matches!(state.phase, Phase::Held) {
                return;
            }
            state.phase = Phase::Lost(error.clone().into());
            state.next = None;
            state.on_loss.take()
        };
        inner.keeper.forget(self);
        inner.forget_gist(self);
        sub(&inner.counters.held);
        add(&inner.counters.lost);
        if self.renew || self.doubtful || self.state().extended {
            // A renewal or an extension whose reply was lost may have made it last at the store.
            inner.release_in_background(self.abandoned());
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
        if let Some(failure) = state.trouble.as_ref().and_then(|trouble| trouble.last_failure.as_ref()) {
            let mut error = self.lost(&format!("it could not be renewed in time ({failure})"));
            error.engine = Some(failure.engine);
            error.cause = Some(failure.clone());
            return error;
        }
        let drift = state.ttl.duration() - state.ttl.cautious();
        if self.ends_at.is_some_and(|end| end.remaining() <= drift) {
            return self.lost("maxHoldMs is over");
        }
        self.lost(if self.renew {
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
