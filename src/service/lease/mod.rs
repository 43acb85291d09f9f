//! A held lock: its local deadline, its renewal, its loss.
//!
//! The local view of a lease is the shorter one. The lease starts when the request that granted (or renewed) it was *sent*, and is
//! shortened by an allowance for clock drift ([`Ttl::validity`]). A failed renewal does not end the lease: it is retried until
//! the local deadline, and only then is the lease lost.

mod batch;
mod release;
mod renewal;
mod renewal_window;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::Shared;
use super::abandoned::AbandonedClaim;
use super::event::{Event, EventKind};
use super::options::AcquireOptions;
use crate::backoff::Backoff;
use crate::clock::Moment;
use crate::error::{EngineError, LockError};
use crate::model::{Claim, Fence, Key, Names, Share, Ttl};

pub(super) use batch::renew_batch;
use renewal_window::RenewalWindow;

/// The reason of a loss by `maxHoldMs`.
const MAX_HOLD_PASSED: &str = "maxHoldMs has passed";

/// Receives the loss of a lease, at most once, on the I/O thread.
pub type LossSink = Box<dyn FnOnce(LockError) + Send>;

/// How a lease was granted.
#[derive(Debug, Clone, Copy)]
pub(super) enum Grant {
    /// By a request that was sent at this moment.
    Requested { sent: Moment },
    /// By a hand-off, until this moment. The first renewal extends it to its ttl.
    HandedOff { until: Moment },
}

/// A lock that was granted.
pub struct Lease {
    /// The claim that the store granted.
    pub(super) claim: Claim,
    /// The names in the caller's order, without duplicates.
    names: Names,
    fence: Fence,
    /// Whether it is renewed.
    pub renew: bool,
    /// Renewal pauses when the event loop has not responded for this long.
    stall_limit: Duration,
    /// The arrival number of its call, for [`AcquireOptions::resumed`].
    pub arrival: u64,
    /// An earlier attempt of this claim failed, and the store may still execute it.
    doubtful: bool,
    /// Locked during an operation (renewal, extension, release) at the store: there is one at a time.
    operation: tokio::sync::Mutex<()>,
    state: Mutex<State>,
}

struct State {
    phase: Phase,
    acquired_at: Moment,
    /// The end of the lease by `max_hold`.
    max_hold_until: Option<Moment>,
    /// The ttl that the caller asked for, if it is longer than the longest lease of the store.
    asked: Option<Ttl>,
    /// The end of that ttl, if renewal is off: the lease is renewed until then.
    asked_until: Option<Moment>,
    /// After an earlier release, the name stays busy until this moment (`min_hold`).
    min_hold_until: Option<Moment>,
    /// The end of the lease for this process.
    deadline: Moment,
    /// The next renewal. `None`: there is none, or it is in progress.
    renewal: Option<RenewalWindow>,
    /// The ttl of the next renewal. `extend` may raise it.
    ttl: Ttl,
    /// The longest ttl that the store was asked for: how long the store may keep the lease.
    max_ttl: Ttl,
    /// Whether the lease is that of a hand-off, and was not extended to its ttl yet.
    is_short: bool,
    /// Whether an extension was requested.
    is_extended: bool,
    /// Whether the caller's event loop has yet to receive the grant of a call that waited.
    is_unreceived: bool,
    /// The holder released the lease during a close of the service, which releases it in the store.
    is_released_by_holder: bool,
    /// `None` after a successful renewal.
    retry: Option<Box<RenewalRetry>>,
    /// The time of its entry in the schedule of the renewal scheduler.
    slot: Option<Moment>,
    on_loss: Option<LossSink>,
}

/// The retries of a renewal that failed or was delayed.
struct RenewalRetry {
    backoff: Backoff,
    last_error: Option<Arc<EngineError>>,
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
    /// Creates a lease. `doubtful`: an earlier attempt failed, and the store may still execute it.
    pub(super) fn new(
        claim: Claim,
        names: Names,
        fence: Fence,
        grant: Grant,
        options: &AcquireOptions,
        arrival: u64,
        doubtful: bool,
    ) -> Arc<Self> {
        let ttl = claim.ttl;
        let acquired_at = Moment::now();
        let (deadline, renewal, is_short) = match grant {
            Grant::Requested { sent } => {
                let is_renewed = options.renew || options.asked.is_some();
                let renewal = is_renewed.then(|| RenewalWindow::after(sent, ttl));
                (sent + ttl.validity(), renewal, false)
            }
            Grant::HandedOff { until } => (until, Some(RenewalWindow::after_hand_off()), true),
        };
        let state = State {
            phase: Phase::Held,
            acquired_at,
            max_hold_until: options.max_hold.map(|max_hold| acquired_at + max_hold),
            asked: options.asked,
            asked_until: options
                .asked
                .filter(|_| !options.renew)
                .map(|ttl| acquired_at + ttl.validity()),
            min_hold_until: (!options.min_hold.is_zero()).then(|| acquired_at + options.min_hold),
            deadline,
            renewal,
            ttl,
            max_ttl: ttl,
            is_short,
            is_extended: is_short,
            is_unreceived: false,
            is_released_by_holder: false,
            retry: None,
            slot: None,
            on_loss: None,
        };
        Arc::new(Lease {
            claim,
            names,
            fence,
            renew: options.renew,
            stall_limit: options.stall_limit,
            arrival,
            doubtful,
            operation: tokio::sync::Mutex::default(),
            state: Mutex::new(state),
        })
    }

    /// Returns the names in the caller's order: at least one, without duplicates.
    pub fn names(&self) -> &[Key] {
        &self.names
    }

    /// Returns the owner token.
    pub fn token(&self) -> &str {
        self.claim.owner.as_str()
    }

    /// Returns the fencing token.
    pub fn fence(&self) -> Fence {
        self.fence
    }

    /// Marks the grant as one that the caller's event loop has yet to receive ([`Lease::received`]).
    pub(super) fn set_unreceived(&self) {
        self.state.lock().is_unreceived = true;
    }

    /// Records that the caller's event loop has received the grant.
    ///
    /// # Behavior
    /// The event loop of a waiting call may hang. Until this method is called, the lease is renewed only while the loop has
    /// responded within a third of the ttl, however long `stallLimitMs` is.
    pub fn received(&self) {
        self.state.lock().is_unreceived = false;
    }

    /// Sets the minimum hold: after an earlier release, the name stays busy until this time has passed since the grant.
    pub fn set_min_hold(&self, min_hold: Duration) {
        let mut state = self.state.lock();
        state.min_hold_until = Some(state.acquired_at + min_hold);
    }

    /// Returns the ttl of the next renewal, or the one that the caller asked for if that is longer than the longest lease of the store.
    pub fn ttl(&self) -> Ttl {
        let state = self.state.lock();
        state.asked.unwrap_or(state.ttl)
    }

    /// Returns owner token, fencing token, ttl in milliseconds, whether it is renewed, and the metadata, separated by spaces.
    pub fn description(&self) -> String {
        let (token, fence, ttl) = (self.claim.owner.as_str(), self.fence.0, self.ttl().as_millis());
        let metadata = self.claim.metadata.as_deref().unwrap_or_default();
        format!("{token} {fence} {ttl} {} {metadata}", self.renew)
    }

    /// Returns the rest of the lease for this process; zero after its release or loss. It is computed from the clock, not from a
    /// timer, so that it is correct right after the process or the machine was suspended.
    pub fn remaining(&self) -> Duration {
        let state = self.state.lock();
        if matches!(state.phase, Phase::Held) && !state.is_released_by_holder {
            state.deadline.remaining()
        } else {
            Duration::ZERO
        }
    }

    /// Whether the deadline had not passed when the grant arrived.
    pub(super) fn was_granted_in_time(&self) -> bool {
        let state = self.state.lock();
        state.acquired_at < state.deadline
    }

    /// Whether the lease is held: neither released nor lost.
    pub fn is_held(&self) -> bool {
        !self.remaining().is_zero()
    }

    /// Returns the loss. `None` while the lease is held, and after a release.
    pub fn loss(&self) -> Option<LockError> {
        let state = self.state.lock();
        match &state.phase {
            Phase::Lost(error) => Some(LockError::clone(error)),
            Phase::Held if state.deadline.is_past() => Some(self.expired(&state)),
            _ => None,
        }
    }

    /// Whether the holder released the lease.
    pub fn is_released(&self) -> bool {
        matches!(self.state.lock().phase, Phase::Released)
    }

    /// Calls `sink` when the lease is lost: at once if it is lost already, never after a release.
    pub fn on_loss(&self, sink: LossSink) {
        let mut state = self.state.lock();
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

    /// Moves its slot to its next event. Returns the slot before, and when the next event is possible and due: a renewal, or the deadline.
    /// `None`: the lease has ended.
    pub(super) fn reschedule(&self) -> (Option<Moment>, Option<RenewalWindow>) {
        let mut state = self.state.lock();
        let next = matches!(state.phase, Phase::Held).then(|| {
            let opens = state.renewal.map_or(state.deadline, |next| next.opens);
            let due = state
                .renewal
                .map_or(state.deadline, |next| next.due.min(state.deadline));
            RenewalWindow { opens, due }
        });
        (std::mem::replace(&mut state.slot, next.map(|next| next.due)), next)
    }

    /// Returns the claim for the list of abandoned claims, with the longest ttl that the store may have for it.
    fn abandoned(&self) -> AbandonedClaim {
        let mut claim = self.claim.clone();
        claim.ttl = claim.ttl.max(self.state.lock().max_ttl);
        AbandonedClaim::new(claim, self.doubtful)
    }

    /// Ends the lease in this process by a loss. Returns whether it was held until now, and what receives the loss.
    fn end_by_loss(self: &Arc<Self>, shared: &Shared, loss: &LockError) -> (bool, Option<LossSink>) {
        let sink = {
            let mut state = self.state.lock();
            if !matches!(state.phase, Phase::Held) {
                return (false, None);
            }
            state.phase = Phase::Lost(loss.clone().into());
            state.on_loss.take()
        };
        shared.scheduler.schedule(self);
        shared.counters.lock().held -= 1;
        (true, sink)
    }

    fn lose(self: &Arc<Self>, shared: &Arc<Shared>, error: LockError) {
        let (true, sink) = self.end_by_loss(shared, &error) else {
            return;
        };
        tracing::debug!(%error, "a lease ended early");
        shared.remove_by_name(self);
        shared.counters.lock().lost += 1;
        let (acquired_at, is_extended, is_bounded) = {
            let state = self.state.lock();
            (state.acquired_at, state.is_extended, state.asked_until.is_some())
        };
        if self.renew || self.doubtful || is_extended || is_bounded {
            // A renewal or an extension whose reply was lost may have extended the lease in the store.
            shared.release_in_background(self.abandoned());
        }
        shared.emit(|| {
            self.event(
                EventKind::Lost,
                Some(acquired_at.elapsed()),
                Some(error.message.as_str().into()),
            )
        });
        if let Some(sink) = sink {
            sink(error);
        }
    }

    /// Returns the error of a deadline that has passed.
    fn expired(&self, state: &State) -> LockError {
        if let Some(failure) = state.retry.as_ref().and_then(|retry| retry.last_error.as_ref()) {
            let mut error = self.lost(&format!("it could not be renewed in time ({failure})"));
            error.engine = Some(failure.engine);
            error.cause = Some(failure.clone());
            return error;
        }
        if state.is_short {
            return self
                .lost("it was handed to this call for a short time, and could not be extended before that had passed");
        }
        let drift = state.ttl.duration() - state.ttl.validity();
        if state.max_hold_until.is_some_and(|end| end.remaining() <= drift) {
            return self.lost(MAX_HOLD_PASSED);
        }
        self.lost(if self.renew {
            "it could not be renewed in time (the process was suspended, or its event loop did not respond for stallLimitMs)"
        } else {
            "its ttl has passed, and renewal is off"
        })
    }

    /// Returns a `LOCK_LOST` error with a reason.
    fn lost(&self, reason: &str) -> LockError {
        let name = self.names[0].as_str();
        let held = match self.claim.share.map(Share::noun) {
            Some("semaphore") => "permit of",
            noun => noun.unwrap_or("lock"),
        };
        LockError::lost(name, format!("the {held} {name:?} is lost: {reason}"))
    }

    pub(super) fn event(&self, kind: EventKind, duration: Option<Duration>, reason: Option<Arc<str>>) -> Event {
        Event {
            share: self.claim.share,
            fence: Some(self.fence),
            duration,
            reason,
            ..Event::new(kind, Some(self.names.clone()))
        }
    }
}
