//! The waiting loop: makes an attempt, waits for a change, and makes the next attempt.
//!
//! The loop ends with a grant, at the deadline, when the caller aborts, or when the service closes. A call that ends without the
//! lock leaves its claim to `abandoned.rs`.
//!
//! `Engine::ordered` says which of two kinds a store is:
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
use super::event::{Event, EventKind, add, sub};
use super::lease::{Grant, Lease};
use super::local_fifo::Position;
use super::options::{AcquireOptions, MIN_STORE_TIMEOUT, Wait};
use crate::backoff::Backoff;
use crate::engine::{HandOff, Subscription};
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
        let options = options.within(shared.engine.longest_lease());
        let max_hold = options.max_hold.unwrap_or(Duration::MAX);
        let ttl = Ttl::clamped(max_hold.min(options.ttl.duration()));
        let mut claim = Claim::with_names(&names, OwnerToken::fresh(), ttl, shared.process.clone());
        claim.metadata = options.metadata.clone();
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
    pub(super) async fn run(&mut self) -> Result<Outcome, LockError> {
        let waits = self.claim.waiting;
        // Most calls end with their first attempt. The loop is a large future, which they do not need.
        let outcome = if self.is_aborted() {
            Ok(Outcome::Aborted)
        } else if waits && !self.shared.engine.ordered() {
            Box::pin(self.run_loop(None, None)).await
        } else {
            // Before the first attempt: it may enter the queue, and a hand-off would be lost.
            let subscription = if waits { self.subscribe_to_first().await } else { None };
            match self.attempt(self.started).await {
                AttemptOutcome::Granted(lease) => Ok(Outcome::Acquired(lease)),
                AttemptOutcome::Held { key, .. } if !waits => {
                    self.busy_name = Some(key);
                    Ok(Outcome::Busy(None))
                }
                other => Box::pin(self.run_loop(Some(other), subscription)).await,
            }
        };
        if self.is_waiting {
            sub(&self.shared.counters.waiting);
        }
        match outcome {
            Ok(Outcome::Acquired(lease)) => Ok(Outcome::Acquired(lease)),
            other => {
                self.abandon_claim();
                if let Ok(Outcome::Busy(_)) = other {
                    add(&self.shared.counters.busy);
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

    /// Makes attempts until there is an outcome. `first`: the outcome of the first attempt, if it was made, and the subscription
    /// that it was made with. Later it is a hand-off, which replaces an attempt.
    async fn run_loop(
        &mut self,
        mut first: Option<AttemptOutcome>,
        mut subscription: Option<Box<dyn Subscription>>,
    ) -> Result<Outcome, LockError> {
        let shared = self.shared.clone();
        let ordered = shared.engine.ordered();
        let waits = self.claim.waiting;
        let mut position: Option<Position> = None;
        let mut backoff = Backoff::for_store();
        // Since when attempts have had no answer. `None`: the last attempt had one.
        let mut unanswered_since: Option<Instant> = None;
        // The last error since then.
        let mut last_error: Option<EngineError> = None;
        if waits && !ordered {
            // Enter the FIFO before the first attempt, so that it keeps the order of the calls.
            position = Some(shared.local_fifos.enter(&self.claim.keys()[0], self.arrival));
        }
        loop {
            if let Some(position) = &position {
                while !position.is_first() {
                    self.set_waiting();
                    self.busy_name = Some(position.key().clone());
                    if let Some(end) = self.wait_for_position(position).await {
                        return end;
                    }
                }
                self.was_busy |= position.was_answered_since(self.started);
            }
            let since = *unanswered_since.get_or_insert_with(|| {
                let since = position.as_ref().and_then(|position| position.unanswered_since(true));
                let begins = if first.is_some() { self.started } else { Instant::now() };
                since.map_or(begins, |since| since.max(self.started))
            });
            if let Some(position) = &position
                && since.elapsed() >= self.store_timeout
            {
                return Err(self.no_answer(position.last_error()));
            }
            let outcome = match first.take() {
                Some(outcome) => outcome,
                None => self.attempt(since).await,
            };
            if let AttemptOutcome::Granted(_) | AttemptOutcome::TooLate(_) | AttemptOutcome::Held { .. } = outcome {
                (unanswered_since, last_error) = (None, None);
                position.iter().for_each(|position| position.answered(since));
            }
            match outcome {
                AttemptOutcome::Granted(lease) => return Ok(Outcome::Acquired(lease)),
                AttemptOutcome::TooLate(too_late) => {
                    if !waits || !too_late.retryable {
                        return Err(too_late);
                    }
                    if ordered {
                        // The claim has a new owner.
                        subscription = self.subscribe_to_first().await;
                    }
                    match self.wait_for(tokio::time::sleep(backoff.delay())).await {
                        Some(Ok(Outcome::Busy(_))) => return Err(too_late),
                        Some(end) => return end,
                        None => {}
                    }
                }
                AttemptOutcome::Held { key, retry_after } => {
                    self.was_busy = true;
                    self.busy_name = Some(key.clone());
                    backoff.reset();
                    if !waits {
                        return Ok(Outcome::Busy(None));
                    }
                    self.set_waiting();
                    if !ordered {
                        if position.as_ref().is_none_or(|position| *position.key() != key) {
                            subscription = None;
                            let next = shared.local_fifos.enter(&key, self.arrival);
                            let is_first = next.is_first();
                            position = Some(next);
                            if !is_first {
                                continue;
                            }
                        }
                        if subscription.is_none() {
                            match self.subscribe(&key).await {
                                Ok(new) => {
                                    subscription = Some(new);
                                    // A change between the busy answer and the subscription was not notified.
                                    continue;
                                }
                                Err(end) => return end,
                            }
                        }
                    }
                    // The attempts of a waiter of several names extend its reservations.
                    let polls = self.names.len() > 1;
                    let change = wait::for_change(&mut subscription, position.as_ref(), retry_after, polls);
                    if let Some(end) = self.wait_for(change).await {
                        return end;
                    }
                    if let Some(end) = self.wait_for_event_loop().await {
                        return end;
                    }
                    // It may have arrived before the answer. Then the server executed the attempt before the hand-off, or the
                    // grant ended early in the store (a forced release), which its first renewal detects as for every lease.
                    let hand_off = subscription
                        .as_mut()
                        .and_then(|subscription| subscription.take_hand_off());
                    first = hand_off
                        .map(|HandOff { fence, until }| self.create_lease(fence, Grant::HandedOff { until }).into());
                }
                AttemptOutcome::Failed(error) => {
                    // Attempts in order have a pause in common.
                    let delay = if waits && ordered && shared.attempts.has(&self.claim.keys()[0]) {
                        Duration::ZERO
                    } else {
                        backoff.delay()
                    };
                    if !error.retryable || since.elapsed() + delay >= self.store_timeout {
                        return Err(LockError::store(error));
                    }
                    position.iter().for_each(|position| position.failed(&error));
                    last_error = Some(error);
                    // Also past the deadline: the call waits for an answer of the store, not for the lock.
                    tokio::select! {
                        biased;
                        cancellation = self.cancelled() => return cancellation.into_outcome(),
                        () = tokio::time::sleep(delay) => {}
                    }
                }
                AttemptOutcome::TimedOut => {
                    // An earlier error of the store says more than the timeout.
                    let last_error = last_error.or_else(|| position.as_ref()?.last_error());
                    return Err(self.no_answer(last_error));
                }
                AttemptOutcome::Cancelled(cancellation) => return cancellation.into_outcome(),
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
        let (engine, ttl) = (self.shared.engine.name(), self.claim.ttl);
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
            add(&self.shared.counters.waiting);
            let names = self.names.clone();
            self.shared.emit(|| Event::new(EventKind::Waiting, Some(names)));
        }
    }

    /// Releases in the background what the store may have for this claim: a position in a queue, or a lock without a caller.
    fn abandon_claim(&mut self) {
        let is_queued = self.is_waiting && self.shared.engine.ordered();
        if (self.doubtful || is_queued) && self.claim.was_sent() {
            let claim = AbandonedClaim::new(Claim::clone(&self.claim), self.doubtful);
            self.shared.release_in_background(claim);
        }
    }
}
