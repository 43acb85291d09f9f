//! The waiting loop: try, wait for a change, try again, until granted, out of time, aborted or closed; and the clean-up
//! after whoever gives up.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::task_tracker::TaskTrackerToken;

use super::Inner;
use super::backoff::Backoff;
use super::event::{Event, EventKind, add, sub};
use super::inner::Lapsed;
use super::lease::Lease;
use super::line::Place;
use super::options::{AcquireOptions, LEAST_STORE_PATIENCE, SAFETY_POLL, Wait};
use crate::clock::Moment;
use crate::engine::{Acquired, Result as EngineResult, Subscription};
use crate::error::{EngineError, LockError};
use crate::model::{Claim, Fence, Key, Names, OwnerToken, Ttl};

/// How an acquisition ended, if not with an error.
#[derive(Debug)]
pub enum Outcome {
    /// The lock is held.
    Acquired(Arc<Lease>),
    /// It was busy for as long as the caller was ready to wait.
    Busy {
        /// How often the store granted it, but too late for the grant to be of use: a ttl too short for this store.
        too_late: u32,
    },
    /// The caller's signal came first.
    Aborted,
}

type Try = Pin<Box<dyn Future<Output = EngineResult<Acquired>> + Send>>;

/// What ended one try.
enum Tried {
    Granted { fence: Fence, sent: Moment },
    Held { key: Key, retry_after: Option<Duration> },
    Failed(EngineError),
    GaveUp(Stop),
}

enum Stop {
    Aborted,
    Closed,
}

/// One acquisition under way.
pub(super) struct Acquisition {
    inner: Arc<Inner>,
    /// A close waits for as long as this is here.
    _open: TaskTrackerToken,
    started: Instant,
    claim: Claim,
    names: Names,
    options: AcquireOptions,
    abort: Option<CancellationToken>,
    /// When waiting ends. `None`: never.
    deadline: Option<Instant>,
    /// The longest silence of the store that this call endures.
    patience: Duration,
    /// A try failed, and may yet be carried out: the store may come to hold the claim without our knowing.
    uncertain: bool,
    /// Whether the call counts as waiting.
    waiting: bool,
    too_late: u32,
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
        let (uncertain, waiting, too_late) = (false, false, 0);
        Acquisition {
            inner: inner.clone(),
            _open: open,
            started,
            claim,
            names,
            options,
            abort,
            deadline,
            patience,
            uncertain,
            waiting,
            too_late,
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
                Tried::Held { .. } => Ok(self.busy()),
                Tried::Granted { fence, sent } => match self.granted(fence, sent) {
                    Some(lease) => Ok(Outcome::Acquired(lease)),
                    None => Ok(self.busy()),
                },
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
                if let Ok(Outcome::Busy { .. }) = other {
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
        let mut place: Option<Place> = None;
        let mut backoff = Backoff::for_store();
        // Since when the store owes an answer. Only asking counts: a wait in between is no silence of the store.
        let mut asking_since: Option<Instant> = None;
        if waits && ordered {
            // By owner, and before the first try takes a place in the queue.
            let first = self.claim.keys()[0].clone();
            subscription = inner.engine.subscribe(&self.claim, &first).await.ok();
        } else if waits
            && let [only] = self.claim.keys()
            && inner.lines.is_occupied(only)
        {
            place = Some(inner.lines.enter(only));
        }
        loop {
            if let Some(place) = &place {
                self.begin_waiting();
                while !place.is_first() {
                    if let Some(end) = self.pause(place.told()).await {
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
                    asking_since = None;
                    if let Some(lease) = self.granted(fence, sent) {
                        return Ok(Outcome::Acquired(lease));
                    }
                    if !waits {
                        return Ok(self.busy());
                    }
                    if ordered {
                        let first = self.claim.keys()[0].clone();
                        subscription = inner.engine.subscribe(&self.claim, &first).await.ok();
                    }
                    if let Some(end) = self.pause(tokio::time::sleep(backoff.pause())).await {
                        return end;
                    }
                }
                Tried::Held { key, retry_after } => {
                    asking_since = None;
                    backoff = Backoff::for_store();
                    if !waits {
                        return Ok(self.busy());
                    }
                    self.begin_waiting();
                    if !ordered {
                        if place.as_ref().is_none_or(|place| *place.key() != key) {
                            subscription = None;
                            let next = inner.lines.enter(&key);
                            let first = next.is_first();
                            place = Some(next);
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
                            () = nudged(place.as_ref()) => {}
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
                    if let Some(stop) = self.stopped(tokio::time::sleep(pause)).await {
                        return stop.end();
                    }
                }
                Tried::GaveUp(stop) => return stop.end(),
            }
        }
    }

    /// The lease of a grant. `None`: validity was gone on return. The next try is a new acquisition then, with an owner of
    /// its own.
    fn granted(&mut self, fence: Fence, sent: Moment) -> Option<Arc<Lease>> {
        let lease = Lease::new(
            self.claim.clone(),
            self.names.clone(),
            fence,
            sent,
            &self.options,
            self.uncertain,
        );
        if lease.came_in_time() {
            self.inner.adopt(&lease, self.started);
            return Some(lease);
        }
        self.too_late += 1;
        self.inner.free_in_background(self.lapsed());
        self.claim.owner = OwnerToken::fresh();
        self.uncertain = false;
        None
    }

    /// One try, for as long as the store may stay silent. A try that is given up goes on by itself, and is undone when
    /// its answer comes: a release on another connection could overtake it.
    async fn try_once(&mut self, since: Instant) -> Tried {
        let (engine, claim) = (self.inner.engine.clone(), self.claim.clone());
        let mut trying: Try = Box::pin(async move { engine.try_acquire(&claim).await });
        let sent = Moment::now();
        let tried = tokio::select! {
            biased;
            answer = &mut trying => match answer {
                Ok(Acquired::Granted { fence }) => return Tried::Granted { fence, sent },
                Ok(Acquired::Held { key, retry_after }) => return Tried::Held { key, retry_after },
                Err(error) => {
                    add(&self.inner.counters.store_errors);
                    self.uncertain = true;
                    return Tried::Failed(error);
                }
            },
            () = self.aborted() => Tried::GaveUp(Stop::Aborted),
            () = self.inner.closing.cancelled() => Tried::GaveUp(Stop::Closed),
            () = tokio::time::sleep_until(since + self.patience) => {
                add(&self.inner.counters.store_errors);
                Tried::Failed(EngineError::no_answer(self.inner.engine.name(), "acquire", self.patience))
            }
        };
        let (inner, mut lapsed) = (self.inner.clone(), self.lapsed());
        // The clean-up that begins here is the one for this claim.
        self.uncertain = false;
        self.inner.clean_up(async move {
            let mut answer = tokio::time::timeout(inner.store_timeout, &mut trying).await;
            if answer.is_err() {
                // The answer may never come, for instance when only the replies are lost: what the store has done so far
                // is undone now, and what it may yet do when the answer comes.
                inner
                    .clone()
                    .free(Lapsed {
                        doubtful: false,
                        ..lapsed.clone()
                    })
                    .await;
                answer = tokio::time::timeout(lapsed.claim.ttl.duration(), trying).await;
            }
            lapsed.doubtful |= !matches!(answer, Ok(Ok(_)));
            inner.free(lapsed).await;
        });
        tried
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
            () = out_of_time => Some(Ok(self.busy())),
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

    fn busy(&self) -> Outcome {
        Outcome::Busy {
            too_late: self.too_late,
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

    /// Leaves nothing behind: no place in a queue, no lock that nobody knows of.
    fn give_up(&mut self) {
        let queued = self.waiting && self.inner.engine.ordered();
        if self.uncertain || queued {
            self.inner.free_in_background(self.lapsed());
        }
    }

    fn lapsed(&self) -> Lapsed {
        let (claim, kept_until, doubtful) = (self.claim.clone(), None, self.uncertain);
        Lapsed {
            claim,
            kept_until,
            doubtful,
        }
    }
}

impl Stop {
    fn end(self) -> Result<Outcome, LockError> {
        match self {
            Stop::Aborted => Ok(Outcome::Aborted),
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

async fn nudged(place: Option<&Place>) {
    match place {
        Some(place) => place.told().await,
        None => std::future::pending().await,
    }
}

/// When to try again although nothing was heard: when the lease that is in the way ends, a little later than the store
/// said so that its clock has surely passed that point, and now and then in any case.
fn next_poll(retry_after: Option<Duration>) -> Duration {
    let jitter = Duration::from_micros(fastrand::u64(500..3_000));
    retry_after.map_or(SAFETY_POLL, |after| after.min(SAFETY_POLL)) + jitter
}
