//! What the parts of a service share, and how they talk to the store.

use std::collections::HashMap;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

use super::backoff::Backoff;
use super::event::{Counters, Event, EventKind, EventSink, add};
use super::keeper::Keeper;
use super::lease::Lease;
use super::line::Lines;
use super::pulse::Pulse;
use crate::clock::Moment;
use crate::engine::{Result as EngineResult, SharedEngine};
use crate::error::{EngineError, LockError};
use crate::model::{Claim, Key, Process};

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
    pub(super) lines: Arc<Lines>,
    /// What the gist's `acquireLock` holds, by name: its `releaseLock` has nothing else to go by.
    pub(super) gist: Mutex<HashMap<Key, Arc<Lease>>>,
    pub(super) closing: CancellationToken,
    /// Every lease has ended: nothing is left to look after.
    pub(super) ended: CancellationToken,
    pub(super) closed: tokio::sync::OnceCell<()>,
    /// Calls under way: `close` waits for them, because each may still leave a lease or a clean-up.
    pub(super) calls: TaskTracker,
    /// How many clean-ups are under way.
    pub(super) cleanups: watch::Sender<usize>,
    /// Whether somebody waits for them already.
    pub(super) cleanups_awaited: AtomicBool,
    /// Renewals, and the clean-up after calls that gave up.
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
        loop {
            let error = match tokio::time::timeout_at(end, call()).await {
                Ok(Ok(answer)) => return Ok(answer),
                Ok(Err(error)) => error,
                Err(_) => EngineError::no_answer(self.engine.name(), op, limit),
            };
            add(&self.counters.store_errors);
            let pause = backoff.pause();
            if !error.retryable || Instant::now() + pause >= end {
                return Err(LockError::store(error));
            }
            tokio::time::sleep(pause).await;
        }
    }

    /// Starts a clean-up, which [`Locks::clean_up`](super::Locks::clean_up) waits for.
    pub(super) fn clean_up(self: &Arc<Self>, work: impl Future<Output = ()> + Send + 'static) {
        self.cleanups.send_modify(|count| *count += 1);
        let under_way = CleanUp(self.clone());
        self.background.spawn(async move {
            let _under_way = under_way;
            work.await;
        });
    }

    /// Frees a claim that nobody will ask for any more, or that may have been granted without our knowing.
    pub(super) fn free_in_background(self: &Arc<Self>, lapsed: Lapsed) {
        let inner = self.clone();
        self.clean_up(async move { inner.free(lapsed).await });
    }

    /// Tries to free a claim until the store has answered, for as long as it could last there.
    pub(super) async fn free(self: Arc<Self>, mut lapsed: Lapsed) {
        let end = Moment::now() + lapsed.claim.ttl.duration().max(Duration::from_secs(1));
        let mut backoff = Backoff::for_store();
        loop {
            let keep = lapsed.kept_until.map_or(Duration::ZERO, Moment::remaining);
            let released = tokio::time::timeout(self.store_timeout, self.engine.release(&lapsed.claim, keep)).await;
            match released {
                Ok(Ok(_)) => {
                    for key in lapsed.claim.keys() {
                        self.lines.nudge(key);
                    }
                    break;
                }
                // Also what only a human mends (a full disk, say) may be mended while the lease lasts.
                Ok(Err(_)) | Err(_) => lapsed.doubtful = true,
            }
            if end.is_past() {
                return;
            }
            tokio::time::sleep(backoff.pause()).await;
        }
        if lapsed.doubtful {
            let inner = self.clone();
            self.background
                .spawn(async move { inner.free_again(lapsed.claim).await });
        }
    }

    /// Frees a claim a few times more.
    ///
    /// # Behavior
    /// After an outage a request that was given up may still lie in a buffer on its way to the store, and be carried out
    /// after the release. Its owner is nobody's any more, so that a release too many does no harm.
    async fn free_again(self: Arc<Self>, claim: Claim) {
        for pause in DOUBTS {
            tokio::select! {
                () = tokio::time::sleep(pause.min(claim.ttl.duration())) => {}
                () = self.closing.cancelled() => return,
            }
            let _ = tokio::time::timeout(self.store_timeout, self.engine.release(&claim, Duration::ZERO)).await;
        }
    }
}

/// When a claim is freed again after a request for it failed: what a broken connection left behind anywhere is carried
/// out, or gone, within a minute or so.
const DOUBTS: [Duration; 3] = [
    Duration::from_millis(500),
    Duration::from_secs(5),
    Duration::from_secs(60),
];

/// A claim that is to be freed behind its caller's back.
#[derive(Debug, Clone)]
pub(super) struct Lapsed {
    /// Its ttl is the longest that the store may keep it.
    pub(super) claim: Claim,
    /// The name stays busy until then.
    pub(super) kept_until: Option<Moment>,
    /// A request for it failed, and may yet be carried out.
    pub(super) doubtful: bool,
}

/// A clean-up under way, however it ends.
struct CleanUp(Arc<Inner>);

impl Drop for CleanUp {
    fn drop(&mut self) {
        self.0.cleanups.send_modify(|count| *count -= 1);
    }
}
