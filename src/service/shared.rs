//! The state that all parts of a service share, and the retry loop around a store's operation.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{OnceCell, Semaphore};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

use super::abandoned::AbandonedClaims;
use super::event::{Event, EventKind, Events, Stats};
use super::lease::Lease;
use super::local_fifo::LocalFifos;
use super::ordered_attempts::Attempts;
use super::renewal_scheduler::RenewalScheduler;
use crate::backoff::Backoff;
use crate::engine::{Description, EngineExt, Result as EngineResult, SharedEngine};
use crate::error::{EngineError, LockError};
use crate::model::{Key, Process};
use crate::stall_detector::StallDetector;

/// Which stores have semaphores and read/write locks.
const SHARES_RULE: &str = "must keep a queue of waiters for a semaphore or a read/write lock (memory, SQLite, PostgreSQL, MySQL, \
    MariaDB, Redis with one node, Sentinel or Cluster, a MongoDB replica set, etcd, ZooKeeper)";

pub(super) struct Shared {
    pub(super) engine: SharedEngine,
    /// What the engine's store is.
    pub(super) store: Description,
    pub(super) process: Arc<Process>,
    /// The timeout of each call of the store.
    pub(super) store_timeout: Duration,
    pub(super) events: Events,
    pub(super) stall_detector: Arc<StallDetector>,
    pub(super) counters: Mutex<Stats>,
    pub(super) scheduler: RenewalScheduler,
    /// The arrival number of the newest call.
    pub(super) last_arrival: AtomicU64,
    /// The order of local waiters if the store keeps a queue (`attempts`), and if it keeps none (`local_fifos`).
    pub(super) attempts: Attempts,
    pub(super) local_fifos: Arc<LocalFifos>,
    pub(super) abandoned: AbandonedClaims,
    /// The leases that `release_by_name` releases.
    pub(super) leases_by_name: Mutex<HashMap<Key, Arc<Lease>>>,
    /// Limits the calls that read the holder of a busy name.
    pub(super) holder_reads: Semaphore,
    /// Cancelled when a drain or a close begins: waits end, and new calls are rejected.
    pub(super) draining: CancellationToken,
    pub(super) closing: CancellationToken,
    /// Cancelled by a close after every lease has ended.
    pub(super) ended: CancellationToken,
    pub(super) closed: OnceCell<()>,
    /// Calls in progress: `close` waits for them, because each may still leave a lease or an abandoned claim.
    pub(super) calls: TaskTracker,
    /// Whether a job of `using` runs.
    pub(super) runs_jobs: AtomicBool,
    /// Whether a call keeps the process alive until the abandoned claims are released.
    pub(super) holds_process: AtomicBool,
    /// Tasks for renewals, for releases of abandoned claims, and for attempts of local waiters.
    pub(super) background: TaskTracker,
}

impl Shared {
    /// Begins a call. It lasts as long as the token.
    ///
    /// # Errors
    /// `LOCK_CLOSED` after the begin of a drain or a close.
    pub(super) fn begin_call(&self) -> Result<TaskTrackerToken, LockError> {
        self.begin_call_unless(&self.draining)
    }

    /// Begins a call for `names`.
    ///
    /// # Errors
    /// `LOCK_INVALID_ARGUMENT` for more names than the store takes in one claim, and for a shared name if it has none; those of
    /// [`Shared::begin_call`].
    pub(super) fn begin_call_for(&self, names: &[Key]) -> Result<TaskTrackerToken, LockError> {
        let most = self.store.most_names;
        if names.len() > most {
            let rule = format!("must be at most {most} names on {}", self.store.name);
            return Err(LockError::invalid("names", &rule, names.len()));
        }
        if names.iter().any(Key::is_shared) && !self.store.has_shares {
            let got = format!("{}: a standalone MongoDB and a Redis quorum keep none", self.store.name);
            return Err(LockError::invalid("the store", SHARES_RULE, got));
        }
        self.begin_call()
    }

    /// Begins a call of the holder of a lease, which a drain accepts.
    ///
    /// # Errors
    /// `LOCK_CLOSED` after the begin of a close.
    pub(super) fn begin_holders_call(&self) -> Result<TaskTrackerToken, LockError> {
        self.begin_call_unless(&self.closing)
    }

    fn begin_call_unless(&self, ended: &CancellationToken) -> Result<TaskTrackerToken, LockError> {
        // The token comes first: a close that starts after it waits for this call.
        let token = self.calls.token();
        if ended.is_cancelled() {
            Err(LockError::closed())
        } else {
            Ok(token)
        }
    }

    /// Removes a lost lease from those that `release_by_name` releases.
    pub(super) fn remove_by_name(&self, lease: &Lease) {
        let name = &lease.names()[0];
        let mut leases = self.leases_by_name.lock();
        if leases.get(name).is_some_and(|held| std::ptr::eq(&**held, lease)) {
            leases.remove(name);
        }
    }

    pub(super) fn emit(&self, event: impl FnOnce() -> Event) {
        self.events.emit(event);
    }

    /// Counts an operation of the store that failed or had no answer.
    pub(super) fn store_failed(&self, error: &EngineError) {
        self.counters.lock().store_errors += 1;
        if error.is_locked {
            self.events.store_answered();
        } else if error.retryable {
            // Otherwise the store answered with a permanent error.
            self.events.store_failed(|| error.to_string().into());
        }
    }

    /// Counts a new lease as held, and schedules its renewal. `since`: when its call began.
    pub(super) fn add_lease(&self, lease: &Arc<Lease>, since: Instant) {
        {
            let mut counters = self.counters.lock();
            counters.acquired += 1;
            counters.held += 1;
        }
        self.scheduler.schedule(lease);
        self.emit(|| lease.event(EventKind::Acquired, Some(since.elapsed()), None));
    }

    /// Calls the store until it answers, or until the timeout. `call` must be safe to repeat.
    ///
    /// # Errors
    /// `LOCK_STORE`: a permanent error, or the last error before the timeout.
    pub(super) async fn with_retries<T, F>(
        &self,
        op: &'static str,
        timeout: Duration,
        mut call: impl FnMut() -> F,
    ) -> Result<T, LockError>
    where
        F: Future<Output = EngineResult<T>>,
    {
        let deadline = Instant::now() + timeout;
        let mut backoff = Backoff::for_store();
        let mut last_error = None;
        loop {
            let error = match tokio::time::timeout_at(deadline, call()).await {
                Ok(Ok(answer)) => {
                    self.events.store_answered();
                    return Ok(answer);
                }
                Ok(Err(error)) => error,
                // An earlier error of the store says more than the timeout.
                Err(_) => last_error.take().unwrap_or_else(|| self.engine.no_answer(op, timeout)),
            };
            self.store_failed(&error);
            if !error.retryable {
                return Err(LockError::store(error));
            }
            tokio::time::sleep_until(deadline.min(Instant::now() + backoff.delay())).await;
            if Instant::now() >= deadline {
                return Err(LockError::store(error));
            }
            last_error = Some(error);
        }
    }
}
