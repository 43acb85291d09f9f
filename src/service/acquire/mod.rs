//! The waiting loop: makes an attempt, waits for a change, and makes the next attempt.
//!
//! The loop ends with a grant, at the deadline, when the caller aborts, or when the service closes. A call that ends without the
//! lock leaves its claim to `abandoned.rs`.
//!
//! `Description::ordered` says which of two kinds a store is:
//!
//! - **It keeps a queue.** The claim subscribes before its first attempt, because that attempt may enter the queue. Each later attempt
//!   keeps the position alive. Where the engine keeps the positions of the process alive (`Subscription::is_reliable`), a waiter does not
//!   poll.
//! - **It keeps none** (a standalone MongoDB, a quorum). The waiters of a name in this process form a FIFO (`local_fifo.rs`), and only the
//!   first one uses the store. It subscribes *after* a busy answer and makes an attempt again at once, because changes in between were not
//!   notified.
//!
//! A notification may be lost. That costs the time until the next poll: at the end of the current lease, at most 5 s later.
//!
//! A grant whose lease has ended when it arrives is released, and the next attempt has a new owner. Where the lease ended while a blocked
//! event loop had not received it, the call continues under its number (`AcquireOptions::resumed`), but behind waiters of other processes.

mod attempt;
mod attempt_loop;
mod holder;
mod outage;
mod wait;

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::task_tracker::TaskTrackerToken;

use self::attempt::AttemptOutcome;
pub use self::holder::BusyLock;
pub(super) use self::holder::add_service;
use super::Shared;
use super::abandoned::AbandonedClaim;
use super::event::{Event, EventKind};
use super::lease::{Grant, Lease};
use super::options::{AcquireOptions, MIN_STORE_TIMEOUT, Wait};
use crate::engine::EngineExt;
use crate::error::{EngineError, LockError};
use crate::model::{Claim, Fence, Key, Names, OwnerToken, Ttl};

/// The outcome of an acquisition without an error.
#[derive(Debug)]
pub enum Outcome {
    /// The lock is held.
    Acquired(Arc<Lease>),
    /// The lock was busy until the caller's deadline. The name and its holder, if the options ask for them.
    Busy(Option<Box<BusyLock>>),
    /// The caller aborted.
    Aborted,
}

/// The end of an acquisition.
type End = Result<Outcome, LockError>;

/// An acquisition in progress.
pub(super) struct Acquisition {
    shared: Arc<Shared>,
    /// A close waits while this exists.
    call: TaskTrackerToken,
    started: Instant,
    /// The time of the call. Earlier than `started` in a repetition after an outage.
    called: Instant,
    claim: Arc<Claim>,
    names: Names,
    options: Arc<AcquireOptions>,
    abort: Option<CancellationToken>,
    /// The end of the wait. `None`: it has no end.
    deadline: Option<Instant>,
    /// How long the store may leave attempts without an answer.
    store_timeout: Duration,
    /// An attempt failed, and the store may still execute it.
    doubtful: bool,
    /// Whether the call waits for a busy lock, or behind other local waiters.
    is_waiting: bool,
    /// Whether the store has answered that the lock is busy.
    was_busy: bool,
    /// The name that the call waits for, or found busy.
    busy_name: Option<Key>,
    /// The number of the call in the order of this service's calls.
    arrival: u64,
}

impl Acquisition {
    pub(super) fn new(
        shared: &Arc<Shared>,
        call: TaskTrackerToken,
        names: Names,
        options: Arc<AcquireOptions>,
        abort: Option<CancellationToken>,
    ) -> Self {
        let started = Instant::now();
        let options = options.within(shared.store.longest_lease);
        let max_hold = options.max_hold.unwrap_or(Duration::MAX);
        let ttl = Ttl::clamped(max_hold.min(options.ttl.duration()));
        let mut claim = Claim::with_names(&names, OwnerToken::fresh(), ttl, shared.process.clone());
        claim.metadata = options.metadata.clone();
        claim.share = options.share;
        claim.waiting = options.wait != Wait::No;
        // Its events have the token.
        claim.needs_token = options.needs_token || shared.events.is_enabled();
        let (deadline, store_timeout) = match options.wait {
            Wait::No => (Some(started), shared.store_timeout),
            Wait::Forever => (None, shared.store_timeout),
            Wait::For(wait) => (
                started.checked_add(wait),
                shared.store_timeout.min(wait.max(MIN_STORE_TIMEOUT)),
            ),
        };
        let arrival = options
            .resumed
            .unwrap_or_else(|| shared.last_arrival.fetch_add(1, Relaxed) + 1);
        Acquisition {
            shared: shared.clone(),
            call,
            started,
            called: started,
            claim: Arc::new(claim),
            names,
            options,
            abort,
            deadline,
            store_timeout,
            doubtful: false,
            is_waiting: false,
            was_busy: false,
            busy_name: None,
            arrival,
        }
    }

    /// Runs the acquisition to its outcome.
    ///
    /// # Errors
    /// `LOCK_STORE`, `LOCK_CLOSED`.
    pub(super) async fn run(&mut self) -> End {
        let waits = self.claim.waiting;
        // Most calls end with their first attempt. The loop is a large future, which they do not need.
        let outcome = if self.is_aborted() {
            Ok(Outcome::Aborted)
        } else if waits && !self.shared.store.ordered {
            Box::pin(self.run_loop(None, None)).await
        } else {
            // Before the first attempt: it may enter the queue, and a hand-off would be lost.
            let subscription = if waits { self.subscribe_to_first().await } else { None };
            match self.attempt(self.started).await {
                AttemptOutcome::Granted(Ok(lease)) => Ok(Outcome::Acquired(lease)),
                AttemptOutcome::Held { key, .. } if !waits => {
                    self.busy_name = Some(key);
                    Ok(Outcome::Busy(None))
                }
                other => Box::pin(self.run_loop(Some(other), subscription)).await,
            }
        };
        if self.is_waiting {
            self.shared.counters.lock().waiting -= 1;
        }
        match outcome {
            Ok(Outcome::Acquired(lease)) => Ok(Outcome::Acquired(lease)),
            other => {
                self.abandon_claim();
                if let Ok(Outcome::Busy(_)) = other {
                    self.shared.counters.lock().busy += 1;
                    if self.options.report_holder {
                        // Boxed: most calls do not need this future.
                        let busy = Box::pin(self.busy_lock()).await;
                        return Ok(Outcome::Busy(Some(busy.into())));
                    }
                }
                other.map_err(|error| error.with_key(self.names[0].as_str()))
            }
        }
    }

    /// Creates the lease of a grant.
    ///
    /// # Errors
    /// `LOCK_STORE` when the lease ended before the grant arrived. The claim is then released in the background and gets a new
    /// owner, so that the next attempt is a new acquisition.
    fn create_lease(&mut self, fence: Fence, grant: Grant) -> Result<Arc<Lease>, LockError> {
        let mut claim = Claim::clone(&self.claim);
        claim.fence = Some(fence);
        let lease = Lease::new(
            claim,
            self.names.clone(),
            fence,
            grant,
            &self.options,
            self.arrival,
            self.doubtful,
        );
        if self.is_waiting {
            lease.set_unreceived();
        }
        if lease.was_granted_in_time() {
            self.shared.add_lease(&lease, self.called);
            return Ok(lease);
        }
        let (engine, ttl) = (self.shared.store.name, self.claim.ttl);
        let error = match grant {
            Grant::Requested { sent } => EngineError::granted_too_late(engine, sent.elapsed(), ttl),
            Grant::HandedOff { until } => EngineError::handed_off_too_late(engine, until.elapsed()),
        };
        self.shared
            .release_in_background(AbandonedClaim::new(Claim::clone(&self.claim), self.doubtful));
        Arc::make_mut(&mut self.claim).replace_owner();
        self.doubtful = false;
        Err(LockError::store(error))
    }

    /// Returns the error of a call without an answer.
    fn no_answer(&self, last_error: Option<EngineError>) -> LockError {
        let timeout = || self.shared.engine.no_answer("acquire", self.store_timeout);
        LockError::store(last_error.unwrap_or_else(timeout))
    }

    /// Counts the call as waiting, and emits its event.
    fn set_waiting(&mut self) {
        if !self.is_waiting {
            self.is_waiting = true;
            self.shared.counters.lock().waiting += 1;
            self.shared.emit(|| self.event(EventKind::Waiting));
        }
    }

    /// Emits the event of a call that ended without a lease.
    pub(super) fn emit_end(&self, outcome: &End) {
        let (kind, error) = match outcome {
            Ok(Outcome::Acquired(_)) => return,
            Ok(Outcome::Busy(_)) => (EventKind::Timeout, None),
            Ok(Outcome::Aborted) => (EventKind::Aborted, None),
            Err(error) => (EventKind::Failed, Some(error)),
        };
        self.shared.emit(|| Event {
            duration: Some(self.called.elapsed()),
            reason: error.map(|error| error.message.as_str().into()),
            code: error.map(|error| error.code),
            ..self.event(kind)
        });
    }

    fn event(&self, kind: EventKind) -> Event {
        Event {
            share: self.options.share,
            ..Event::new(kind, Some(self.names.clone()))
        }
    }

    /// Releases in the background what the store may have for this claim: a position in a queue, or a lock without a caller.
    fn abandon_claim(&mut self) {
        let is_queued = self.is_waiting && self.shared.store.ordered;
        if (self.doubtful || is_queued) && self.claim.was_sent() {
            let claim = AbandonedClaim::new(Claim::clone(&self.claim), self.doubtful);
            self.shared.release_in_background(claim);
        }
    }
}
