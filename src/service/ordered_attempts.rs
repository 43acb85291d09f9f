//! Keeps the attempts of local waiters in the order of their calls, where the store keeps a queue.
//!
//! At most one attempt per name and service is in progress (one more for each half second without an answer). Later attempts wait
//! here. When it ends, they are made together, in the order of the calls. Each call has an arrival number, which the service counts;
//! the order is that of these numbers.
//!
//! After a failure of all of them, the attempts for the name wait for one backoff, and are then made together as well: the queue may be
//! lost, or this process's positions in it.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::Poll;
use std::time::Duration;

use futures_util::FutureExt;
use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::Shared;
use crate::backoff::Backoff;
use crate::engine::{Acquired, EngineExt, Result as EngineResult};
use crate::model::{Claim, Key};

/// Maximum number of attempts in one call of the engine.
const MOST_TOGETHER: usize = 64;
/// How long an attempt without an answer delays the others of its name. Less than a waiter whose process is alive has to confirm a
/// hand-off: 2 s or more, unless its ttl is short.
const OVERDUE: Duration = Duration::from_millis(500);

type Reply = oneshot::Sender<EngineResult<Acquired>>;

/// An attempt that waits for the end of the one in progress. Its call may have ended meanwhile.
#[derive(Debug)]
struct Pending {
    claim: Arc<Claim>,
    reply: Reply,
}

/// The names with attempts.
#[derive(Debug, Default)]
pub(super) struct Attempts {
    names: Mutex<HashMap<Key, Name>>,
    /// The number of attempts that were begun, each of one call or of several together.
    begun: AtomicU64,
}

impl Attempts {
    /// Whether an attempt for the name is in progress, pending, or paused: a new one waits for it.
    pub(super) fn has(&self, key: &Key) -> bool {
        self.names.lock().contains_key(key)
    }

    fn next_id(&self) -> u64 {
        self.begun.fetch_add(1, Relaxed)
    }
}

#[cfg(all(test, feature = "memory"))]
impl Attempts {
    pub(super) fn is_empty(&self) -> bool {
        self.names.lock().is_empty()
    }
}

/// A name has an entry while an attempt for it is in progress or paused.
#[derive(Debug)]
struct Name {
    stage: Stage,
    /// The attempts that wait for the end of the stage, by arrival number.
    pending: BTreeMap<u64, Pending>,
    /// The arrival number at which the next attempt begins, after a failed one with the maximum number of calls: those behind it
    /// have not been made since.
    next_from: Option<u64>,
    backoff: Backoff,
}

#[derive(Debug)]
enum Stage {
    /// An attempt is in progress. `since`: when it began, or when one of several calls last had an answer.
    Attempt { id: u64, since: Instant },
    /// No attempt begins until a timer ends the pause after a failure.
    Pause,
}

impl Stage {
    fn begin(id: u64) -> Self {
        let since = Instant::now();
        Stage::Attempt { id, since }
    }
}

impl Name {
    fn begun(id: u64) -> Self {
        Name {
            stage: Stage::begin(id),
            pending: BTreeMap::new(),
            next_from: None,
            backoff: Backoff::for_store(),
        }
    }

    /// Takes the pending attempts that are made together, and returns them with the last arrival number.
    fn take_pending(&mut self) -> Option<(u64, Vec<Pending>)> {
        let from = self.next_from.take().unwrap_or(0);
        let arrivals: Vec<u64> = self
            .pending
            .range(from..)
            .map(|(arrival, _)| *arrival)
            .take(MOST_TOGETHER)
            .collect();
        let last = *arrivals.last()?;
        let entries = arrivals.iter().filter_map(|arrival| self.pending.remove(arrival));
        Some((last, entries.collect()))
    }

    /// Whether the attempt `id` is in progress: it ends when it is overdue.
    fn is_current(&self, id: u64) -> bool {
        matches!(self.stage, Stage::Attempt { id: current, .. } if current == id)
    }

    fn is_overdue(&self) -> bool {
        matches!(self.stage, Stage::Attempt { since, .. } if since.elapsed() >= OVERDUE)
    }
}

/// Makes an attempt of a waiting claim after the one in progress for its first name, in the order of arrival.
///
/// # Behavior
/// An attempt without an answer after [`OVERDUE`] does not delay the others any longer: one of them may be the first waiter in the
/// queue. Dropping the future cancels the attempt.
///
/// # Errors
/// Those of the engine.
pub(super) async fn attempt_in_order(shared: &Arc<Shared>, claim: &Arc<Claim>, arrival: u64) -> EngineResult<Acquired> {
    let key = &claim.keys()[0];
    let begun = {
        let id = shared.attempts.next_id();
        match shared.attempts.names.lock().entry(key.clone()) {
            Entry::Vacant(name) => {
                name.insert(Name::begun(id));
                Ok(id)
            }
            Entry::Occupied(mut name) => {
                let (claim, (reply, answer)) = (claim.clone(), oneshot::channel());
                name.get_mut().pending.insert(arrival, Pending { claim, reply });
                Err(answer)
            }
        }
    };
    match begun {
        Ok(id) => {
            let mut in_progress = InProgress::new(shared, key, id, None);
            let answer = shared.engine.try_acquire(claim).await;
            in_progress.note(&answer);
            answer
        }
        // Boxed: this is rare, and the future of a call stays small.
        Err(answer) => Box::pin(pending_answer(shared, key, answer)).await,
    }
}

/// Waits for the answer to a pending attempt.
async fn pending_answer(
    shared: &Arc<Shared>,
    key: &Key,
    mut answer: oneshot::Receiver<EngineResult<Acquired>>,
) -> EngineResult<Acquired> {
    loop {
        tokio::select! {
            biased;
            answer = &mut answer => return match answer {
                Ok(answer) => answer,
                // The attempts ended in a panic, or the runtime is shutting down.
                Err(_) => std::future::pending().await,
            },
            () = tokio::time::sleep(OVERDUE) => begin_pending(shared, key, |name| name.is_overdue()),
        }
    }
}

/// Makes the pending attempts of a name together, in a task, if `may_begin`. Removes a name without attempts.
fn begin_pending(shared: &Arc<Shared>, key: &Key, may_begin: impl FnOnce(&mut Name) -> bool) {
    // Without a runtime the process or the worker is about to end.
    if tokio::runtime::Handle::try_current().is_err() {
        return;
    }
    let mut names = shared.attempts.names.lock();
    let Some(name) = names.get_mut(key) else { return };
    if !may_begin(name) {
        return;
    }
    let Some((last, pending)) = name.take_pending() else {
        names.remove(key);
        return;
    };
    let id = shared.attempts.next_id();
    name.stage = Stage::begin(id);
    drop(names);
    let last = (pending.len() == MOST_TOGETHER).then_some(last);
    let mut in_progress = InProgress::new(shared, key, id, last);
    shared.background.spawn(FutureExt::boxed(async move {
        make_together(&mut in_progress, pending).await;
        drop(in_progress);
    }));
}

/// Guard of an attempt in progress. Dropping it starts the pending attempts, unless others were started before.
struct InProgress {
    shared: Arc<Shared>,
    key: Key,
    id: u64,
    /// The last arrival number of the calls, if there are as many as are made together at most.
    last: Option<u64>,
    has_failed: bool,
    has_answer: bool,
}

impl InProgress {
    fn new(shared: &Arc<Shared>, key: &Key, id: u64, last: Option<u64>) -> Self {
        InProgress {
            shared: shared.clone(),
            key: key.clone(),
            id,
            last,
            has_failed: false,
            has_answer: false,
        }
    }

    /// Notes the answer to one call.
    fn note(&mut self, answer: &EngineResult<Acquired>) {
        self.has_failed |= answer.as_ref().is_err_and(|error| error.retryable);
        self.has_answer |= answer.is_ok();
    }

    /// Records the answer to one of several calls.
    fn record(&mut self, answer: &EngineResult<Acquired>) {
        self.note(answer);
        if let Some(name) = self.shared.attempts.names.lock().get_mut(&self.key)
            && name.is_current(self.id)
        {
            name.stage = Stage::begin(self.id);
        }
    }

    /// Begins the pause after a failure, and ends it with a task. Attempts that were not made since the failure go first, without
    /// a pause.
    fn pause(&self) {
        let mut names = self.shared.attempts.names.lock();
        let Some(name) = names.get_mut(&self.key).filter(|name| name.is_current(self.id)) else {
            return;
        };
        if let Some(next) = self.last.map(|last| last + 1)
            && name.pending.range(next..).any(|(_, entry)| !entry.reply.is_closed())
        {
            name.next_from = Some(next);
            return;
        }
        let end = Instant::now() + name.backoff.delay();
        name.stage = Stage::Pause;
        drop(names);
        let (shared, key) = (self.shared.clone(), self.key.clone());
        self.shared.background.spawn(FutureExt::boxed(async move {
            tokio::select! {
                () = tokio::time::sleep_until(end) => {}
                () = shared.closing.cancelled() => {
                    shared.attempts.names.lock().remove(&key);
                }
            }
            begin_pending(&shared, &key, |name| matches!(name.stage, Stage::Pause));
        }));
    }
}

impl Drop for InProgress {
    fn drop(&mut self) {
        if tokio::runtime::Handle::try_current().is_err() {
            return;
        }
        // A failure beside an answer concerns one claim, for example another name of it.
        if self.has_failed && !self.has_answer {
            self.pause();
        }
        begin_pending(&self.shared, &self.key, |name| {
            if self.has_answer {
                name.backoff.reset();
            }
            name.is_current(self.id)
        });
    }
}

async fn make_together(in_progress: &mut InProgress, mut pending: Vec<Pending>) {
    let shared = in_progress.shared.clone();
    loop {
        pending.retain(|entry| !entry.reply.is_closed());
        if pending.is_empty() {
            return;
        }
        let (claims, replies): (Vec<_>, Vec<_>) = pending
            .into_iter()
            .map(|Pending { claim, reply }| (claim, Mutex::new(Some(reply))))
            .unzip();
        claims.iter().for_each(|claim| claim.begin_attempt());
        let attempts: Vec<&Claim> = claims.iter().map(|claim| &**claim).collect();
        let mut answer = |index: usize, answer| {
            in_progress.record(&answer);
            if let Some(reply) = replies.get(index).and_then(|reply| reply.lock().take())
                && reply.send(answer).is_err()
            {
                // The caller was dropped: release what its attempt left in the store.
                shared.abandon(&claims[index]);
            }
        };
        let is_cancelled = tokio::select! {
            biased;
            () = shared.engine.try_acquire_all(&attempts, &mut answer) => false,
            () = cancelled(&claims, &replies) => true,
        };
        pending = Vec::new();
        for (claim, reply) in claims.into_iter().zip(replies) {
            let Some(reply) = reply.into_inner() else {
                continue;
            };
            if is_cancelled && claim.sent_at().is_none() && !reply.is_closed() {
                pending.push(Pending { claim, reply });
            } else {
                shared.abandon(&claim);
            }
        }
    }
}

/// Completes when the attempts should be dropped: when every remaining caller was dropped, or when one was dropped before
/// anything was sent. Then the attempts of the others start again without it.
async fn cancelled(claims: &[Arc<Claim>], replies: &[Mutex<Option<Reply>>]) {
    poll_fn(|context| {
        let (mut is_dropped, mut is_awaited) = (false, false);
        for reply in replies {
            if let Some(reply) = &mut *reply.lock() {
                match reply.poll_closed(context) {
                    Poll::Ready(()) => is_dropped = true,
                    Poll::Pending => is_awaited = true,
                }
            }
        }
        if is_dropped && (!is_awaited || claims.iter().all(|claim| claim.sent_at().is_none())) {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    })
    .await;
}
