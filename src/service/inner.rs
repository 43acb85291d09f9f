//! What the parts of a service share, and how they talk to the store.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

use super::abandoned::AbandonedClaims;
use super::backoff::Backoff;
use super::event::{Counters, Event, EventKind, EventSink, add};
use super::keeper::Keeper;
use super::lease::Lease;
use super::local_fifo::{Attempts, LocalFifos};
use super::pulse::Pulse;
use crate::engine::{Result as EngineResult, SharedEngine};
use crate::error::{EngineError, LockError};
use crate::model::{Key, Process};

pub(super) struct Inner {
    pub(super) engine: SharedEngine,
    pub(super) process: Arc<Process>,
    pub(super) store_timeout: Duration,
    pub(super) events: Option<EventSink>,
    pub(super) pulse: Arc<Pulse>,
    pub(super) counters: Counters,
    pub(super) keeper: Keeper,
    /// Something that others of the same lease wait for has ended (`lease/alone.rs`).
    pub(super) ended_alone: Notify,
    /// The arrival number of the newest call.
    pub(super) last_arrival: AtomicU64,
    /// The order of local waiters where the store keeps a queue (`attempts`), and where it keeps none (`local_fifos`).
    pub(super) attempts: Attempts,
    pub(super) local_fifos: Arc<LocalFifos>,
    pub(super) abandoned: AbandonedClaims,
    /// What the gist's `acquireLock` holds, by name: its `releaseLock` has nothing else to go by.
    pub(super) gist: Mutex<HashMap<Key, Arc<Lease>>>,
    pub(super) closing: CancellationToken,
    /// Every lease has ended: nothing is left to look after.
    pub(super) ended: CancellationToken,
    pub(super) closed: tokio::sync::OnceCell<()>,
    /// Calls in progress: `close` waits for them, because each may still leave a lease or an abandoned claim.
    pub(super) calls: TaskTracker,
    /// Whether a call keeps the process alive until the abandoned claims are released.
    pub(super) holds_process: AtomicBool,
    /// Tasks for renewals, for releases of abandoned claims, and for attempts of local waiters.
    pub(super) background: TaskTracker,
}

impl Inner {
    /// Begins a call, which lasts as long as the token.
    pub(super) fn open(&self) -> Result<TaskTrackerToken, LockError> {
        // The token comes first: a close from here on waits for this call.
        let token = self.calls.token();
        if self.closing.is_cancelled() {
            Err(LockError::closed())
        } else {
            Ok(token)
        }
    }

    pub(super) fn gist(&self) -> MutexGuard<'_, HashMap<Key, Arc<Lease>>> {
        self.gist.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn forget_gist(&self, lease: &Lease) {
        let name = &lease.names()[0];
        let mut gist = self.gist();
        if gist.get(name).is_some_and(|held| std::ptr::eq(&**held, lease)) {
            gist.remove(name);
        }
    }

    pub(super) fn emit(&self, event: impl FnOnce() -> Event) {
        if let Some(sink) = &self.events {
            sink(event());
        }
    }

    /// Counts a new lease as held, and has it looked after. It was asked for at `since`.
    pub(super) fn adopt(&self, lease: &Arc<Lease>, since: Instant) {
        add(&self.counters.acquired);
        add(&self.counters.held);
        self.keeper.schedule(lease);
        self.emit(|| lease.event(EventKind::Acquired, Some(since.elapsed()), None));
    }

    /// Has the store do something that may be done again, until it answers or `limit` is over.
    pub(super) async fn with_store<T, F>(
        &self,
        op: &'static str,
        limit: Duration,
        mut call: impl FnMut() -> F,
    ) -> Result<T, LockError>
    where
        F: Future<Output = EngineResult<T>>,
    {
        let end = Instant::now() + limit;
        let mut backoff = Backoff::for_store();
        let mut last_error = None;
        loop {
            let error = match tokio::time::timeout_at(end, call()).await {
                Ok(Ok(answer)) => return Ok(answer),
                Ok(Err(error)) => error,
                // An error that the store has sent before says more.
                Err(_) => last_error
                    .take()
                    .unwrap_or_else(|| EngineError::no_answer(self.engine.name(), op, limit)),
            };
            add(&self.counters.store_errors);
            let pause = backoff.pause();
            if !error.retryable || Instant::now() + pause >= end {
                return Err(LockError::store(error));
            }
            last_error = Some(error);
            tokio::time::sleep(pause).await;
        }
    }
}
