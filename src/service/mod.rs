//! The service: waiting, leases, renewal, clean-up, over any engine.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::AcqRel, Ordering::Relaxed, Ordering::Release};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::{Either, ready};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::clock::Moment;
use crate::engine::{Renewed, SharedEngine};
use crate::error::LockError;
use crate::model::{Claim, Fence, Key, LockInfo, Names, OwnerToken, Process, Ttl};

mod abandoned;
mod acquire;
pub(crate) mod backoff;
mod event;
mod inner;
mod keeper;
mod lease;
mod local_fifo;
mod options;
mod pulse;
#[cfg(all(test, feature = "memory"))]
mod tests;

use acquire::Acquisition;
pub use acquire::Outcome;
pub use event::{Event, EventKind, EventSink, Stats};
pub use lease::{Lease, LossSink, ReleaseOutcome};
pub use options::{AcquireOptions, Wait};
pub use pulse::Pulse;

use abandoned::AbandonedClaim;
use backoff::Backoff;
use event::{Counters, add};
use inner::Inner;
use keeper::Keeper;
use options::LEAST_CLOSE_STEP;

/// A lock service over one store. Clones share it.
#[derive(Clone)]
pub struct Locks {
    inner: Arc<Inner>,
}

impl fmt::Debug for Locks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Locks")
            .field("engine", &self.inner.engine)
            .finish_non_exhaustive()
    }
}

impl Locks {
    /// A service over `engine`. Call it on the runtime that shall carry its tasks.
    ///
    /// `store_timeout` is the longest that one call waits for the store.
    pub fn new(engine: SharedEngine, store_timeout: Duration, pulse: Arc<Pulse>, events: Option<EventSink>) -> Self {
        let inner = Arc::new(Inner {
            engine,
            process: Arc::new(Process::current()),
            store_timeout,
            events,
            pulse,
            counters: Counters::default(),
            keeper: Keeper::default(),
            ended_alone: Notify::new(),
            last_arrival: AtomicU64::new(0),
            attempts: local_fifo::Attempts::default(),
            local_fifos: Arc::default(),
            abandoned: abandoned::AbandonedClaims::default(),
            gist: Mutex::default(),
            closing: CancellationToken::new(),
            ended: CancellationToken::new(),
            closed: tokio::sync::OnceCell::new(),
            calls: TaskTracker::new(),
            holds_process: AtomicBool::new(false),
            background: TaskTracker::new(),
        });
        tokio::spawn(Keeper::run(inner.clone()));
        Locks { inner }
    }

    /// The store's name.
    pub fn engine_name(&self) -> &'static str {
        self.inner.engine.name()
    }

    /// Takes all of `names`, or none.
    ///
    /// # Behavior
    /// Waits as `options.wait` says; `abort` ends the wait. Repeats among the names count once. The call begins at once, and a
    /// close waits for it until the future is done or dropped.
    ///
    /// # Errors
    /// `LOCK_STORE`, `LOCK_CLOSED`. Busy is an [`Outcome`].
    pub fn acquire(
        &self,
        names: &[Key],
        options: AcquireOptions,
        abort: Option<CancellationToken>,
    ) -> impl Future<Output = Result<Outcome, LockError>> + Send + use<> {
        let open = match self.inner.open() {
            Ok(open) => open,
            Err(closed) => return Either::Left(ready(Err(closed))),
        };
        let mut call = Acquisition::new(&self.inner, open, Names::unique(names), options, abort);
        Either::Right(async move { call.outcome().await })
    }

    /// The gist's `acquireLock`: one attempt, not renewed (whatever the options say), released by name.
    ///
    /// # Behavior
    /// `None`: the name is busy. The caller checks `is_held` before it reports success: the lease may have ended meanwhile.
    ///
    /// # Errors
    /// `LOCK_STORE`, `LOCK_CLOSED`.
    pub fn acquire_by_name(
        &self,
        name: Key,
        options: AcquireOptions,
    ) -> impl Future<Output = Result<Option<Arc<Lease>>, LockError>> + Send + use<> {
        let options = AcquireOptions {
            wait: Wait::No,
            renew: false,
            ..options
        };
        let inner = self.inner.clone();
        let acquired = self.acquire(std::slice::from_ref(&name), options, None);
        acquired.map(move |outcome| match outcome? {
            // A close in this very moment has released it, or will.
            Outcome::Acquired(_) if inner.closing.is_cancelled() => Err(LockError::closed()),
            Outcome::Acquired(lease) => {
                inner.gist().insert(name, lease.clone());
                Ok(Some(lease))
            }
            Outcome::Busy | Outcome::Aborted => Ok(None),
        })
    }

    /// The gist's `releaseLock`: releases what [`Locks::acquire_by_name`] acquired. `NotHeld` when this service holds no such
    /// lease (any more).
    ///
    /// # Errors
    /// `LOCK_STORE`, `LOCK_CLOSED`.
    pub fn release_by_name(
        &self,
        name: &Key,
    ) -> impl Future<Output = Result<ReleaseOutcome, LockError>> + Send + use<> {
        if let Err(closed) = self.inner.open() {
            return Either::Left(ready(Err(closed)));
        }
        let lease = self.inner.gist().remove(name);
        match lease {
            Some(lease) => Either::Right(self.release(&lease)),
            None => Either::Left(ready(Ok(ReleaseOutcome::NotHeld))),
        }
    }

    /// Releases a lease.
    ///
    /// # Behavior
    /// The lease ends with the call; the future releases it at the store.
    ///
    /// # Errors
    /// `LOCK_STORE`; the release is then repeated in the background until the lease has expired.
    pub fn release(
        &self,
        lease: &Arc<Lease>,
    ) -> impl Future<Output = Result<ReleaseOutcome, LockError>> + Send + use<> {
        let (inner, lease) = (self.inner.clone(), lease.clone());
        let let_go = lease.let_go(&inner);
        async move { lease.finish_release(&inner, &let_go).await }
    }

    /// Makes a lease last at least `ttl` from now on. Never shortens it.
    ///
    /// # Errors
    /// `LOCK_LOST` when it is gone, `LOCK_STORE`, `LOCK_CLOSED`.
    pub async fn extend(&self, lease: &Arc<Lease>, ttl: Ttl) -> Result<(), LockError> {
        let _call = self.inner.open()?;
        lease.extend(&self.inner, ttl).await
    }

    /// Takes over a lease that was acquired elsewhere, by its owner token.
    ///
    /// # Behavior
    /// The lease goes on under a fresh owner token. Whoever had it before can neither renew nor release it any more, and
    /// finds it lost at the next renewal. When the store fails, what it may have handed over is freed in the background:
    /// nobody knows the fresh token.
    ///
    /// # Errors
    /// `LOCK_LOST` when the store does not hold it (any more) for that token, `LOCK_STORE`, `LOCK_CLOSED`.
    pub async fn restore(
        &self,
        names: &[Key],
        owner: OwnerToken,
        fence: Fence,
        options: AcquireOptions,
    ) -> Result<Arc<Lease>, LockError> {
        let inner = &self.inner;
        let _call = inner.open()?;
        let names = Names::unique(names);
        let mut claim = Claim::sharing(&names, owner, options.ttl, inner.process.clone());
        claim.metadata = options.metadata.clone();
        let ours = OwnerToken::fresh();
        let (mut sent, mut calls) = (Moment::now(), 0);
        let answer = inner
            .with_store("transfer", inner.store_timeout, || {
                sent = Moment::now();
                calls += 1;
                inner.engine.transfer(&claim, &ours)
            })
            .await;
        claim.owner = ours;
        let first = names.first().map_or("", Key::as_str);
        // Attempts that failed are no doubt: once one is through, a late one finds nothing of the old owner's.
        let lease = Lease::new(claim.clone(), names.clone(), fence, sent, &options, 0, false);
        if matches!(answer, Ok(Renewed::Extended)) && lease.is_held() {
            inner.adopt(&lease, tokio::time::Instant::now());
            return Ok(lease);
        }
        if calls > 1 || !matches!(answer, Ok(Renewed::Lost)) {
            // It may be ours all the same, by an attempt whose answer was lost or came too late.
            inner.release_in_background(AbandonedClaim::new(claim, answer.is_err()));
        }
        Err(match answer {
            Err(error) => error.with_key(first),
            Ok(_) => LockError::lost(
                first,
                format!("the lock {first:?} is lost: the store does not hold it any more"),
            ),
        })
    }

    /// Who holds a name; `None` when it is free.
    ///
    /// # Errors
    /// `LOCK_STORE`, `LOCK_CLOSED`.
    pub async fn inspect(&self, name: &Key) -> Result<Option<LockInfo>, LockError> {
        let inner = &self.inner;
        let _call = inner.open()?;
        inner
            .with_store("inspect", inner.store_timeout, || inner.engine.inspect(name))
            .await
            .map_err(|error| error.with_key(name.as_str()))
    }

    /// Everything held whose name starts with `prefix`, sorted by name.
    ///
    /// # Behavior
    /// Each page has one store timeout, whatever the whole takes. A failure that may pass is retried while less than one
    /// store timeout has passed since the call; so a page without an answer ends the call.
    ///
    /// # Errors
    /// `LOCK_STORE`, `LOCK_CLOSED`.
    pub async fn list(&self, prefix: &str) -> Result<Vec<LockInfo>, LockError> {
        let inner = &self.inner;
        let _call = inner.open()?;
        let started = tokio::time::Instant::now();
        let mut backoff = Backoff::for_store();
        loop {
            let error = match inner.engine.list(prefix, inner.store_timeout).await {
                Ok(found) => return Ok(found),
                Err(error) => error,
            };
            add(&inner.counters.store_errors);
            let pause = backoff.pause();
            if !error.retryable || started.elapsed() + pause >= inner.store_timeout {
                return Err(LockError::store(error));
            }
            tokio::time::sleep(pause).await;
        }
    }

    /// Releases a name, no matter which owner holds it. `false`: it was free.
    ///
    /// # Errors
    /// `LOCK_STORE`, `LOCK_CLOSED`.
    pub async fn force_release(&self, name: &Key) -> Result<bool, LockError> {
        let inner = &self.inner;
        let _call = inner.open()?;
        let end = tokio::time::Instant::now() + inner.store_timeout;
        // Inspect first: when the reply to a first request is lost, the next request finds the name free.
        let inspected = tokio::time::timeout_at(end, inner.engine.inspect(name)).await;
        let was_held = matches!(inspected, Ok(Ok(Some(_))));
        let is_unanswered = AtomicBool::new(false);
        let freed = inner
            .with_store("force_release", end - tokio::time::Instant::now(), || async {
                let freed = inner.engine.force_release(name).await;
                if freed.as_ref().is_err_and(|error| error.may_be_executed) {
                    is_unanswered.store(true, Relaxed);
                }
                freed
            })
            .await
            .map_err(|error| error.with_key(name.as_str()))?;
        inner.local_fifos.wake_first(name);
        Ok(freed || was_held && is_unanswered.load(Relaxed))
    }

    /// The service's counters.
    pub fn stats(&self) -> Stats {
        self.inner.counters.read()
    }

    /// Whether the service is closed, or about to be.
    pub fn is_closed(&self) -> bool {
        self.inner.closing.is_cancelled()
    }

    /// Returns a future that waits until all abandoned claims have been released, for one store timeout at most. `None`: there
    /// are none, or another caller waits for them already.
    pub fn background_releases(&self) -> Option<impl Future<Output = ()> + Send + use<>> {
        let inner = self.inner.clone();
        if inner.abandoned.is_empty() || inner.holds_process.swap(true, AcqRel) {
            return None;
        }
        Some(async move {
            let _ = tokio::time::timeout(inner.store_timeout, inner.abandoned.emptied()).await;
            inner.holds_process.store(false, Release);
        })
    }

    /// Releases what is held, ends the waits with `LOCK_CLOSED`, and gives back the store. Later calls reject with
    /// `LOCK_CLOSED`. May be called again.
    ///
    /// # Behavior
    /// Whoever works under a lease at that moment did not let go of it: to its holder the lease is lost. All of it takes
    /// `store_timeout` at most, and a moment more where the store is silent.
    pub async fn close(&self) {
        let inner = &self.inner;
        inner
            .closed
            .get_or_init(|| async {
                inner.closing.cancel();
                let deadline = tokio::time::Instant::now() + inner.store_timeout;
                // A step that comes late still gets a chance.
                let limit = || deadline.max(tokio::time::Instant::now() + LEAST_CLOSE_STEP);
                inner.calls.close();
                let _ = tokio::time::timeout_at(limit(), inner.calls.wait()).await;
                for lease in inner.keeper.held() {
                    lease.end(inner);
                }
                let _ = tokio::time::timeout_at(limit(), inner.abandoned.emptied()).await;
                inner.abandoned.close();
                inner.ended.cancel();
                inner.gist().clear();
                inner.background.close();
                let _ = tokio::time::timeout_at(limit(), inner.background.wait()).await;
                let _ = tokio::time::timeout_at(limit(), inner.engine.close()).await;
            })
            .await;
    }
}
