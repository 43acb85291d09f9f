//! The service: waiting, leases, renewal, clean-up, over any engine.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::AcqRel, Ordering::Relaxed, Ordering::Release};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::{Either, ready};
use parking_lot::Mutex;
use tokio::sync::{OnceCell, Semaphore};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::backoff::Backoff;
use crate::clock::Moment;
use crate::engine::{EngineExt, Renewed, SharedEngine};
use crate::error::{EngineError, LockError};
use crate::model::{Claim, Fence, Key, LockInfo, Names, OwnerToken, Process, Ttl};
use crate::stall_detector::StallDetector;

mod abandoned;
mod acquire;
mod closing;
mod event;
mod lease;
mod local_fifo;
mod options;
mod ordered_attempts;
mod renewal_scheduler;
mod shared;
pub mod testing;
#[cfg(all(test, feature = "memory"))]
mod tests;

pub use acquire::{BusyLock, Outcome};
pub use event::{Event, EventKind, EventSink, Stats};
use lease::Grant;
pub use lease::{Lease, LossSink};
pub use options::{AcquireOptions, Wait};

use abandoned::AbandonedClaim;
use acquire::Acquisition;
use event::Events;
use options::MOST_HOLDER_READS;
use renewal_scheduler::RenewalScheduler;
use shared::Shared;

/// A lock service over one store. Clones share it.
#[derive(Clone)]
pub struct Locks {
    shared: Arc<Shared>,
}

impl Locks {
    /// Creates a service over `engine`. Its tasks run on the current tokio runtime. `store_timeout` limits each call of the store.
    pub fn new(
        engine: SharedEngine,
        store_timeout: Duration,
        stall_detector: Arc<StallDetector>,
        events: Option<EventSink>,
    ) -> Self {
        let shared = Arc::new(Shared {
            store: engine.describe(),
            engine,
            process: Arc::new(Process::current()),
            store_timeout,
            events: Events::new(events),
            stall_detector,
            counters: Mutex::default(),
            scheduler: RenewalScheduler::default(),
            last_arrival: AtomicU64::new(0),
            attempts: ordered_attempts::Attempts::default(),
            local_fifos: Arc::default(),
            abandoned: abandoned::AbandonedClaims::default(),
            leases_by_name: Mutex::new(HashMap::new()),
            holder_reads: Semaphore::new(MOST_HOLDER_READS),
            draining: CancellationToken::new(),
            closing: CancellationToken::new(),
            ended: CancellationToken::new(),
            closed: OnceCell::new(),
            calls: TaskTracker::new(),
            runs_jobs: AtomicBool::new(false),
            holds_process: AtomicBool::new(false),
            background: TaskTracker::new(),
        });
        shared.store.watch_event_loop(&shared.stall_detector);
        acquire::add_service(&shared);
        tokio::spawn(RenewalScheduler::run(shared.clone()).boxed());
        shared.background.spawn(shared.clone().release_abandoned().boxed());
        Locks { shared }
    }

    /// Returns the store's name.
    pub fn engine_name(&self) -> &'static str {
        self.shared.store.name
    }

    /// Acquires all of `names`, or none.
    ///
    /// # Behavior
    /// Waits as `options.wait` says. `abort` ends the wait. The call begins at once. A close waits until
    /// the future completes or is dropped.
    ///
    /// With `options.share`, the only name is a shared one.
    ///
    /// # Errors
    /// `LOCK_STORE`, `LOCK_CLOSED`, `LOCK_INVALID_ARGUMENT`. Busy is an [`Outcome`].
    pub fn acquire<O: Into<Arc<AcquireOptions>>>(
        &self,
        names: Names,
        options: O,
        abort: Option<CancellationToken>,
    ) -> impl Future<Output = Result<Outcome, LockError>> + Send + use<O> {
        let open = match self.shared.begin_call_for(&names) {
            Ok(open) => open,
            Err(closed) => return Either::Left(ready(Err(closed))),
        };
        let options = options.into();
        let waits_for_store = options.waits_for_store && options.wait != Wait::No;
        let mut call = Acquisition::new(&self.shared, open, names, options, abort);
        Either::Right(async move {
            let outcome = if waits_for_store {
                Box::pin(call.run_through_outages()).await
            } else {
                call.run().await
            };
            call.emit_end(&outcome);
            outcome
        })
    }

    /// Acquires a lease that [`Locks::release_by_name`] releases: `acquireLock` in JavaScript.
    ///
    /// # Behavior
    /// The caller passes `options` without a wait and without renewal. Returns `None` when the name is busy. The caller checks `is_held`
    /// before it reports success: the lease may end before that.
    ///
    /// # Errors
    /// `LOCK_STORE`, `LOCK_CLOSED`.
    pub fn acquire_by_name<O: Into<Arc<AcquireOptions>>>(
        &self,
        name: Key,
        options: O,
    ) -> impl Future<Output = Result<Option<Arc<Lease>>, LockError>> + Send + use<O> {
        let shared = self.shared.clone();
        let acquired = self.acquire(name.clone().into(), options, None);
        acquired.map(move |outcome| match outcome? {
            // The close releases the lease.
            Outcome::Acquired(_) if shared.closing.is_cancelled() => Err(LockError::closed()),
            Outcome::Acquired(lease) => {
                shared.leases_by_name.lock().insert(name, lease.clone());
                Ok(Some(lease))
            }
            Outcome::Busy(_) | Outcome::Aborted => Ok(None),
        })
    }

    /// Releases a lease of [`Locks::acquire_by_name`]: `releaseLock` in JavaScript. Returns `false` when this service does not
    /// hold such a lease.
    ///
    /// # Errors
    /// `LOCK_STORE`, `LOCK_CLOSED`.
    pub fn release_by_name(&self, name: &Key) -> impl Future<Output = Result<bool, LockError>> + Send + use<> {
        if let Err(closed) = self.shared.begin_holders_call() {
            return Either::Left(ready(Err(closed)));
        }
        let lease = self.shared.leases_by_name.lock().remove(name);
        match lease {
            Some(lease) => Either::Right(self.release(&lease)),
            None => Either::Left(ready(Ok(false))),
        }
    }

    /// Releases a lease. Returns whether this call released it: `false` when it was released before, or is lost.
    ///
    /// # Behavior
    /// The call ends the lease in this process at once. The future releases it in the store.
    ///
    /// # Errors
    /// `LOCK_STORE`. The release is then repeated in the background until the lease has expired.
    pub fn release(&self, lease: &Arc<Lease>) -> impl Future<Output = Result<bool, LockError>> + Send + use<> {
        let (shared, lease) = (self.shared.clone(), lease.clone());
        let start = lease.begin_release(&shared);
        async move {
            match &start {
                Some(start) => lease.finish_release(&shared, start).await,
                None => Ok(false),
            }
        }
    }

    /// Extends a lease to at least `ttl` from now on. Never shortens it.
    ///
    /// # Errors
    /// `LOCK_LOST` when the lease is lost, `LOCK_STORE`, `LOCK_CLOSED`.
    pub async fn extend(&self, lease: &Arc<Lease>, ttl: Ttl) -> Result<(), LockError> {
        let _call = self.shared.begin_holders_call()?;
        lease.extend(&self.shared, ttl).await
    }

    /// Transfers a lease of another service to this one, by its owner token.
    ///
    /// # Behavior
    /// The lease gets a new owner token. Its former holder can neither renew nor release it, and finds it lost at the next
    /// renewal. `fence` comes from a text of the caller, so only this process shows it: no token is computed from it. When the store
    /// fails, the lease that it may have transferred is released in the background, because no caller knows the new token.
    ///
    /// # Errors
    /// `LOCK_LOST` when the token does not hold the names in the store, `LOCK_STORE`, `LOCK_CLOSED`; `LOCK_INVALID_ARGUMENT` for a shared
    /// name, whose shares cannot be transferred.
    pub async fn restore(
        &self,
        names: &[Key],
        owner: OwnerToken,
        fence: Fence,
        options: AcquireOptions,
    ) -> Result<Arc<Lease>, LockError> {
        let shared = &self.shared;
        let names = Names::unique(names);
        let options = Arc::new(options).within(shared.store.longest_lease);
        let _call = shared.begin_call_for(&names)?;
        if names.iter().any(Key::is_shared) {
            return Err(LockError::invalid("names", "must be names of locks", "a shared name"));
        }
        let mut claim = Claim::with_names(&names, owner, options.ttl, shared.process.clone());
        claim.metadata = options.metadata.clone();
        let new_owner = OwnerToken::fresh();
        let (mut sent, mut calls) = (Moment::now(), 0);
        let answer = shared
            .with_retries("transfer", shared.store_timeout, || {
                sent = Moment::now();
                calls += 1;
                shared.engine.transfer(&claim, &new_owner)
            })
            .await;
        claim.owner = new_owner;
        let first = names.first().map_or("", Key::as_str);
        // Not doubtful: after a successful attempt, a late one finds no name with the old owner.
        let grant = Grant::Requested { sent };
        let lease = Lease::new(claim.clone(), names.clone(), fence, grant, &options, 0, false);
        if matches!(answer, Ok(Renewed::Extended)) && lease.is_held() {
            shared.add_lease(&lease, tokio::time::Instant::now());
            return Ok(lease);
        }
        if calls > 1 || !matches!(answer, Ok(Renewed::Lost)) {
            // An attempt whose answer was lost or late may have transferred the lease.
            shared.release_in_background(AbandonedClaim::new(claim, answer.is_err()));
        }
        Err(match answer {
            Err(error) => error.with_key(first),
            Ok(_) => LockError::lost(
                first,
                format!("the lock {first:?} is lost: the store no longer has it for this token"),
            ),
        })
    }

    /// Reads the holders of a name, in the order of their grants: at most one, unless the name is a shared one.
    ///
    /// # Errors
    /// `LOCK_STORE`, `LOCK_CLOSED`; `LOCK_INVALID_ARGUMENT` for a shared name on a store without them.
    pub async fn inspect(&self, name: &Key) -> Result<Vec<LockInfo>, LockError> {
        let shared = &self.shared;
        let _call = shared.begin_call_for(std::slice::from_ref(name))?;
        let mut found = shared
            .with_retries("inspect", shared.store_timeout, || shared.engine.holders(name, true))
            .await
            .map_err(|error| error.with_key(name.as_str()))?;
        found.sort_by_key(|info| info.fence);
        Ok(found)
    }

    /// Makes one round trip to the store, and returns its duration: of the last attempt, if an earlier one failed.
    ///
    /// # Errors
    /// `LOCK_STORE`, `LOCK_CLOSED`.
    pub async fn ping(&self) -> Result<Duration, LockError> {
        let shared = &self.shared;
        let _call = shared.begin_call()?;
        // A read of a name needs no rights that other calls do not need.
        let name = Key::new("ping")?;
        shared
            .with_retries("ping", shared.store_timeout, || async {
                let sent = tokio::time::Instant::now();
                let read = shared.engine.inspect(&name).await.map(|_| sent.elapsed());
                read.map_err(|error| EngineError { op: "ping", ..error })
            })
            .await
    }

    /// Lists the held locks whose name starts with `prefix`, sorted by name.
    ///
    /// # Behavior
    /// Each page has one store timeout. The number of pages is not limited. A retryable error is retried until one store timeout
    /// after the start of the call. Each page of a retry has the rest of that time: a store that is down costs no more.
    ///
    /// # Errors
    /// `LOCK_STORE`, `LOCK_CLOSED`.
    pub async fn list(&self, prefix: &str) -> Result<Vec<LockInfo>, LockError> {
        let shared = &self.shared;
        let _call = shared.begin_call()?;
        let started = tokio::time::Instant::now();
        let mut backoff = Backoff::for_store();
        loop {
            let page_timeout = shared.store_timeout.saturating_sub(started.elapsed());
            let error = match shared.engine.list(prefix, page_timeout).await {
                Ok(found) => {
                    shared.events.store_answered();
                    return Ok(found);
                }
                Err(error) => error,
            };
            shared.store_failed(&error);
            let delay = backoff.delay();
            if !error.retryable || started.elapsed() + delay >= shared.store_timeout {
                return Err(LockError::store(error));
            }
            tokio::time::sleep(delay).await;
            // The machine stood still: an answer within the rest of the time is not possible.
            if started.elapsed() >= shared.store_timeout {
                return Err(LockError::store(error));
            }
        }
    }

    /// Releases a name, no matter which owners hold it. `false`: it was free.
    ///
    /// # Errors
    /// `LOCK_STORE`, `LOCK_CLOSED`; `LOCK_INVALID_ARGUMENT` for a shared name on a store without them.
    pub async fn force_release(&self, name: &Key) -> Result<bool, LockError> {
        let shared = &self.shared;
        let _call = shared.begin_call_for(std::slice::from_ref(name))?;
        let (was_held, is_unanswered) = (OnceCell::new(), AtomicBool::new(false));
        let freed = shared
            .with_retries("forceRelease", shared.store_timeout, || async {
                // Inspect first: when the reply to a first request is lost, the next request finds the name free.
                was_held
                    .get_or_init(|| async {
                        let inspecting = shared.engine.inspect_now(name);
                        let inspected = tokio::time::timeout(shared.store_timeout / 2, inspecting).await;
                        matches!(inspected, Ok(Ok(Some(_))))
                    })
                    .await;
                let freed = shared.engine.force_release(name).await;
                if freed.as_ref().is_err_and(|error| error.may_be_executed) {
                    is_unanswered.store(true, Relaxed);
                }
                freed
            })
            .await
            .map_err(|error| error.with_key(name.as_str()))?;
        shared.local_fifos.wake_first(name);
        Ok(freed || is_unanswered.into_inner() && was_held.into_inner() == Some(true))
    }

    /// Switches the events on or off. At first they are on, if there is a sink.
    pub fn set_events(&self, enabled: bool) {
        self.shared.events.set_enabled(enabled);
    }

    /// Returns whether the last operation of the store succeeded, or there was none.
    pub fn is_connected(&self) -> bool {
        self.shared.events.is_connected()
    }

    /// Returns the service's counters.
    pub fn stats(&self) -> Stats {
        *self.shared.counters.lock()
    }

    /// Whether a close has begun.
    pub fn is_closed(&self) -> bool {
        self.shared.closing.is_cancelled()
    }

    /// Returns a future that waits until all abandoned claims have been released, for one store timeout at most. `None`: there
    /// are none, or another caller waits for them already.
    pub fn background_releases(&self) -> Option<impl Future<Output = ()> + Send + use<>> {
        let shared = self.shared.clone();
        if shared.abandoned.is_empty() || shared.holds_process.swap(true, AcqRel) {
            return None;
        }
        Some(async move {
            let _ = tokio::time::timeout(shared.store_timeout, shared.abandoned.emptied()).await;
            shared.holds_process.store(false, Release);
        })
    }
}
