//! The waiting loop: makes an attempt, waits for a change, and makes the next attempt. It ends when the lock is granted, at the
//! deadline, when the call is aborted, or when the service closes. A call that ends without the lock leaves its claim to
//! `abandoned.rs`.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::task_tracker::TaskTrackerToken;

use super::Inner;
use super::abandoned::AbandonedClaim;
use super::backoff::Backoff;
use super::event::{Event, EventKind, add, sub};
use super::lease::Lease;
use super::local_fifo::{Position, attempt_in_order};
use super::options::{AcquireOptions, LEAST_STORE_PATIENCE, SAFETY_POLL, Wait};
use crate::clock::Moment;
use crate::engine::{Acquired, Subscription};
use crate::error::{EngineError, LockError};
use crate::model::{Claim, Fence, Key, Names, OwnerToken, Ttl};

/// How an acquisition ended, if not with an error.
#[derive(Debug)]
pub enum Outcome {
    /// The lock is held.
    Acquired(Arc<Lease>),
    /// It was busy for as long as the caller was ready to wait.
    Busy,
    /// The caller's signal came first.
    Aborted,
}

/// The outcome of one attempt.
enum Tried {
    Granted {
        fence: Fence,
        sent: Moment,
    },
    Held {
        key: Key,
        retry_after: Option<Duration>,
    },
    Failed(EngineError),
    /// The store was silent for as long as the call endures.
    Silent,
    GaveUp(Stop),
}

enum Stop {
    Aborted,
    Closed,
    /// The wait is over, and the store has not answered the last attempt.
    OutOfTime,
}

/// One acquisition under way.
pub(super) struct Acquisition {
    inner: Arc<Inner>,
    /// A close waits for as long as this is here.
    _open: TaskTrackerToken,
    started: Instant,
    claim: Arc<Claim>,
    names: Names,
    options: AcquireOptions,
    abort: Option<CancellationToken>,
    /// When waiting ends. `None`: never.
    deadline: Option<Instant>,
    /// The longest silence of the store that this call endures.
    patience: Duration,
    /// Whether an attempt failed that the store may still carry out.
    uncertain: bool,
    /// Whether the call counts as waiting.
    waiting: bool,
    /// The arrival number of the call: its place in the order of this service's calls.
    arrival: u64,
}

impl Acquisition {
    /// Begins to take `names`.
    pub(super) fn new(
        inner: &Arc<Inner>,
        open: TaskTrackerToken,
        names: Names,
        options: AcquireOptions,
        abort: Option<CancellationToken>,
    ) -> Self {
        let started = Instant::now();
        let ttl = options
            .max_hold
            .map_or(options.ttl, |most| Ttl::clamped(most.min(options.ttl.duration())));
        let mut claim = Claim::sharing(&names, OwnerToken::fresh(), ttl, inner.process.clone());
        claim.metadata = options.metadata.clone();
        claim.waiting = options.wait != Wait::No;
        let (deadline, patience) = match options.wait {
            Wait::No => (Some(started), inner.store_timeout),
            Wait::Forever => (None, inner.store_timeout),
            Wait::For(wait) => (
                started.checked_add(wait),
                inner.store_timeout.min(wait.max(LEAST_STORE_PATIENCE)),
            ),
        };
        let (uncertain, waiting) = (false, false);
        let arrival = options
            .resumed
            .unwrap_or_else(|| inner.last_arrival.fetch_add(1, Relaxed) + 1);
        Acquisition {
            inner: inner.clone(),
            _open: open,
            started,
            claim: Arc::new(claim),
            names,
            options,
            abort,
            deadline,
            patience,
            uncertain,
            waiting,
            arrival,
        }
    }

    /// Until there is an outcome.
    pub(super) async fn outcome(&mut self) -> Result<Outcome, LockError> {
        // Nearly all that do not wait have their answer from the first try. What else there is to do is a large future, which
        // is made only where there is something to do.
        let outcome = if self.claim.waiting || self.is_aborted() {
            Box::pin(self.run(None)).await
        } else {
            match self.try_once(self.started).await {
                Tried::Held { .. } => Ok(Outcome::Busy),
                Tried::Granted { fence, sent } => self.granted(fence, sent).map(Outcome::Acquired),
                failed => Box::pin(self.run(Some(failed))).await,
            }
        };
        if self.waiting {
            sub(&self.inner.counters.waiting);
        }
        match outcome {
            Ok(Outcome::Acquired(lease)) => Ok(Outcome::Acquired(lease)),
            other => {
                self.give_up();
                if let Ok(Outcome::Busy) = other {
                    add(&self.inner.counters.busy);
                }
                other.map_err(|error| error.with_key(self.names[0].as_str()))
            }
        }
    }

    /// From the first try on, or from what became of it, until there is an outcome.
    async fn run(&mut self, mut first: Option<Tried>) -> Result<Outcome, LockError> {
        let inner = self.inner.clone();
        let ordered = inner.engine.ordered();
        let waits = self.claim.waiting;
        if self.is_aborted() {
            // Whoever gave up on the way here wants nothing of the store.
            return Stop::Aborted.end();
        }
        let mut subscription: Option<Box<dyn Subscription>> = None;
        let mut position: Option<Position> = None;
        let mut backoff = Backoff::for_store();
        // Since when the store owes an answer. Only asking counts: a wait in between is no silence of the store.
        let mut asking_since: Option<Instant> = None;
        // The last error of an attempt since then.
        let mut last_failure: Option<EngineError> = None;
        if waits && ordered {
            // By owner, and before the first try takes a place in the queue.
            let first = self.claim.keys()[0].clone();
            subscription = inner.engine.subscribe(&self.claim, &first).await.ok();
        } else if waits {
            // Enter the FIFO before the first attempt, so that it keeps the order of the calls.
            position = Some(inner.local_fifos.enter(&self.claim.keys()[0], self.arrival));
        }
        loop {
            if let Some(position) = &position {
                while !position.is_first() {
                    self.begin_waiting();
                    if let Some(end) = self.pause(position.woken()).await {
                        return end;
                    }
                }
            }
            let since = *asking_since.get_or_insert(if first.is_some() { self.started } else { Instant::now() });
            let tried = match first.take() {
                Some(tried) => tried,
                None => self.try_once(since).await,
            };
            match tried {
                Tried::Granted { fence, sent } => {
                    (asking_since, last_failure) = (None, None);
                    let too_late = match self.granted(fence, sent) {
                        Ok(lease) => return Ok(Outcome::Acquired(lease)),
                        Err(error) => error,
                    };
                    if !waits {
                        return Err(too_late);
                    }
                    if ordered {
                        let first = self.claim.keys()[0].clone();
                        subscription = inner.engine.subscribe(&self.claim, &first).await.ok();
                    }
                    match self.pause(tokio::time::sleep(backoff.pause())).await {
                        Some(Ok(Outcome::Busy)) => return Err(too_late),
                        Some(end) => return end,
                        None => {}
                    }
                }
                Tried::Held { key, retry_after } => {
                    (asking_since, last_failure) = (None, None);
                    backoff = Backoff::for_store();
                    if !waits {
                        return Ok(Outcome::Busy);
                    }
                    self.begin_waiting();
                    if !ordered {
                        if position.as_ref().is_none_or(|position| *position.key() != key) {
                            subscription = None;
                            let next = inner.local_fifos.enter(&key, self.arrival);
                            let first = next.is_first();
                            position = Some(next);
                            if !first {
                                continue;
                            }
                        }
                        if subscription.is_none() {
                            match self.subscribe(&key).await {
                                Ok(new) => {
                                    subscription = Some(new);
                                    // What changed between the busy answer and the subscription told nobody.
                                    continue;
                                }
                                Err(end) => return end,
                            }
                        }
                    }
                    let watched = subscription
                        .as_ref()
                        .is_some_and(|subscription| subscription.keeps_watch());
                    let poll = async {
                        if watched {
                            std::future::pending().await
                        } else {
                            tokio::time::sleep(next_poll(retry_after)).await
                        }
                    };
                    let change = async {
                        tokio::select! {
                            () = changed(&mut subscription) => {}
                            () = woken(position.as_ref()) => {}
                            () = poll => {}
                        }
                    };
                    if let Some(end) = self.pause(change).await {
                        return end;
                    }
                }
                Tried::Failed(error) => {
                    let pause = backoff.pause();
                    if !error.retryable || since.elapsed() + pause >= self.patience {
                        return Err(LockError::store(error));
                    }
                    last_failure = Some(error);
                    if let Some(stop) = self.stopped(tokio::time::sleep(pause)).await {
                        return stop.end();
                    }
                }
                Tried::Silent => {
                    // An error that the store has sent before says more.
                    let silence = || EngineError::no_answer(inner.engine.name(), "acquire", self.patience);
                    return Err(LockError::store(last_failure.unwrap_or_else(silence)));
                }
                Tried::GaveUp(stop) => return stop.end(),
            }
        }
    }

    /// Creates the lease of a grant.
    ///
    /// # Errors
    /// `LOCK_STORE` when the lease ended before the grant arrived. The claim is then released in the background and gets a new
    /// owner, so that the next attempt is a new acquisition.
    fn granted(&mut self, fence: Fence, sent: Moment) -> Result<Arc<Lease>, LockError> {
        let lease = Lease::new(
            Claim::clone(&self.claim),
            self.names.clone(),
            fence,
            sent,
            &self.options,
            self.arrival,
            self.uncertain,
        );
        if lease.came_in_time() {
            self.inner.adopt(&lease, self.started);
            return Ok(lease);
        }
        let error = EngineError::granted_too_late(self.inner.engine.name(), sent.elapsed(), self.claim.ttl.duration());
        self.inner
            .release_in_background(AbandonedClaim::new(Claim::clone(&self.claim), self.uncertain));
        Arc::make_mut(&mut self.claim).replace_owner();
        self.uncertain = false;
        Err(LockError::store(error))
    }

    /// Makes one attempt. Cancels it on an abort, on a close, and when the store has been silent for too long.
    async fn try_once(&mut self, since: Instant) -> Tried {
        let (inner, claim) = (&self.inner, &self.claim);
        let began = Moment::now();
        claim.begin_attempt();
        let attempt = async {
            if claim.waiting && inner.engine.ordered() {
                attempt_in_order(inner, claim, self.arrival).await
            } else {
                inner.engine.try_acquire(claim).await
            }
        };
        let tried = tokio::select! {
            biased;
            answer = attempt => match answer {
                Ok(Acquired::Granted { fence }) => {
                    return Tried::Granted { fence, sent: claim.sent_at().unwrap_or(began) };
                }
                Ok(Acquired::Held { key, retry_after }) => return Tried::Held { key, retry_after },
                Err(error) => {
                    add(&inner.counters.store_errors);
                    Tried::Failed(error)
                }
            },
            () = self.aborted() => Tried::GaveUp(Stop::Aborted),
            () = inner.closing.cancelled() => Tried::GaveUp(Stop::Closed),
            () = self.out_of_time() => Tried::GaveUp(Stop::OutOfTime),
            () = tokio::time::sleep_until(since + self.patience) => {
                add(&inner.counters.store_errors);
                Tried::Silent
            }
        };
        self.uncertain |= claim.sent_at().is_some();
        tried
    }

    /// Completes a little after the end of the wait, if the store has said before that the lock is busy: an attempt that has no
    /// answer by then does not prolong the wait.
    async fn out_of_time(&self) {
        match self.deadline.filter(|_| self.waiting) {
            Some(deadline) => tokio::time::sleep_until(deadline + LEAST_STORE_PATIENCE).await,
            None => std::future::pending().await,
        }
    }

    fn is_aborted(&self) -> bool {
        self.abort.as_ref().is_some_and(CancellationToken::is_cancelled)
    }

    async fn aborted(&self) {
        match &self.abort {
            Some(abort) => abort.cancelled().await,
            None => std::future::pending().await,
        }
    }

    async fn subscribe(&mut self, key: &Key) -> Result<Box<dyn Subscription>, Result<Outcome, LockError>> {
        let inner = self.inner.clone();
        let claim = self.claim.clone();
        let subscribing = inner.with_store("subscribe", self.patience, || inner.engine.subscribe(&claim, key));
        tokio::select! {
            answer = subscribing => answer.map_err(Err),
            () = self.aborted() => Err(Stop::Aborted.end()),
            () = inner.closing.cancelled() => Err(Stop::Closed.end()),
        }
    }

    /// Waits for `change`, but no longer than the caller does. `Some`: the acquisition has ended.
    async fn pause(&self, change: impl Future<Output = ()>) -> Option<Result<Outcome, LockError>> {
        let out_of_time = async {
            match self.deadline {
                Some(deadline) => tokio::time::sleep_until(deadline).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = self.aborted() => Some(Stop::Aborted.end()),
            () = self.inner.closing.cancelled() => Some(Stop::Closed.end()),
            () = out_of_time => Some(Ok(Outcome::Busy)),
            () = change => None,
        }
    }

    /// Waits for `change` past the caller's deadline, too: the store, not the lock, is what is waited for.
    async fn stopped(&self, change: impl Future<Output = ()>) -> Option<Stop> {
        tokio::select! {
            biased;
            () = self.aborted() => Some(Stop::Aborted),
            () = self.inner.closing.cancelled() => Some(Stop::Closed),
            () = change => None,
        }
    }

    fn begin_waiting(&mut self) {
        if !self.waiting {
            self.waiting = true;
            add(&self.inner.counters.waiting);
            let names = self.names.clone();
            self.inner.emit(|| Event {
                kind: EventKind::Waiting,
                names,
                fence: None,
                duration: None,
                reason: None,
            });
        }
    }

    /// Releases in the background what the store may hold for this claim: a place in a queue, or a lock without a caller.
    fn give_up(&mut self) {
        let queued = self.waiting && self.inner.engine.ordered();
        if (self.uncertain || queued) && self.claim.was_sent() {
            let claim = AbandonedClaim::new(Claim::clone(&self.claim), self.uncertain);
            self.inner.release_in_background(claim);
        }
    }
}

impl Stop {
    fn end(self) -> Result<Outcome, LockError> {
        match self {
            Stop::Aborted => Ok(Outcome::Aborted),
            Stop::OutOfTime => Ok(Outcome::Busy),
            Stop::Closed => Err(LockError::closed()),
        }
    }
}

async fn changed(subscription: &mut Option<Box<dyn Subscription>>) {
    match subscription {
        Some(subscription) => subscription.changed().await,
        None => std::future::pending().await,
    }
}

async fn woken(position: Option<&Position>) {
    match position {
        Some(position) => position.woken().await,
        None => std::future::pending().await,
    }
}

/// When to try again although nothing was heard: when the lease that is in the way ends, a little later than the store
/// said so that its clock has surely passed that point, and now and then in any case.
fn next_poll(retry_after: Option<Duration>) -> Duration {
    let jitter = Duration::from_micros(fastrand::u64(500..3_000));
    retry_after.map_or(SAFETY_POLL, |after| after.min(SAFETY_POLL)) + jitter
}
