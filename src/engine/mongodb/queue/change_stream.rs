//! Watches changes for the waiters of this process: one change stream per engine, open while a call waits.
//!
//! The stream has an event for each name that was handed on to a waiter of this process. Of the names that this process waits
//! for, and of no others, it has deletions (by a gist process, by the TTL monitor, or because the queue was empty), releases
//! that keep the name busy for less than the rest of the lease, and hand-offs to waiters of other processes that have less
//! than 2 s (`local_waiters::RESERVATION`) to confirm. The server filters out everything else.
//!
//! # Names
//! A stream is opened with the names that have waiters then. For names that come later the stream has only the hand-offs to
//! this process; the heartbeat covers the rest. Where a call waits for such a name for longer than [`SETTLE`], the stream is
//! opened again, at most every [`REOPEN`].
//!
//! # Gaps
//! The driver resumes a broken stream once. After a gap a heartbeat for all names shows what the lost events would have shown.
//! When another member is elected, the stream is opened there at once: the old primary may hang.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::StreamExt;
use mongodb::bson::oid::ObjectId;
use mongodb::change_stream::ChangeStream;
use mongodb::error::ErrorKind;
use mongodb::options::ReadConcern;
use tokio::sync::{Notify, watch};
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::Outcome;
use super::event::{self, Change, Event};
use super::failure::Failure;
use super::index::IndexKeeper;
use super::pool::Pool;

/// How long the stream stays open without subscribers, at least (at most twice as long).
const LINGER: Duration = if cfg!(test) {
    Duration::from_millis(200)
} else {
    Duration::from_secs(10)
};
/// How long the server lets the stream's request wait for something to happen.
const REQUEST: Duration = Duration::from_secs(30);
/// The pauses between attempts to open the stream.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// How long a server that has no change streams (for this user) is not asked again.
const REFUSAL: Duration = Duration::from_secs(60);

/// How long a call waits for a name before the stream is opened again to cover it.
const SETTLE: Duration = Duration::from_millis(500);
/// The shortest interval between two such openings.
const REOPEN: Duration = if cfg!(test) {
    Duration::from_millis(500)
} else {
    Duration::from_secs(5)
};
/// Maximum number of names of a stream. Beyond it the stream covers all names of the collection.
const MOST_NAMES: usize = 1000;
/// How many names without waiters a stream may cover, besides half of its names.
const SPARE_NAMES: usize = 16;

/// Why a stream ended.
enum Ended {
    Broken,
    /// It does not cover the names that have waiters.
    Outdated,
    Unwanted,
}

/// What is done with a change. It must not block.
pub(super) type Deliver = Arc<dyn Fn(Change) + Send + Sync>;

/// Where the stream is.
#[derive(Debug, Clone)]
enum Phase {
    /// Nobody waits, or the first attempt is under way.
    Closed,
    Open,
    /// Attempt number so-and-so failed. Another follows while anybody waits.
    Broken(u64, Failure),
}

/// The stream, and who is told.
pub(super) struct Watcher(Arc<Shared>);

struct Shared {
    pool: Arc<Pool>,
    index: Arc<IndexKeeper>,
    /// The name of this process in the queues.
    process: String,
    deliver: Deliver,
    /// The last election of a primary that was seen.
    election: watch::Receiver<Option<ObjectId>>,
    state: Mutex<State>,
    phase: watch::Sender<Phase>,
    /// Cuts a pause between two attempts short.
    attempt_now: Notify,
    /// Notified when a call waits for a name that the open stream does not cover.
    uncovered: Notify,
}

#[derive(Debug, Default)]
struct State {
    /// How many need the stream now, and how many have needed it so far.
    uses: usize,
    all_uses: u64,
    /// Number of uses of each name.
    names: HashMap<String, usize>,
    /// The names of the open stream. `None`: all.
    covered: Option<HashSet<String>>,
    /// The stream's task. `None`: nobody waits for it.
    task: Option<AbortHandle>,
    /// Why there will be no stream for a while.
    refused: Option<(Instant, Failure)>,
    is_closed: bool,
}

impl Shared {
    /// The state. A panic elsewhere leaves it whole: every change is one step.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells where the stream is, unless that was told for good.
    fn tell(&self, phase: Phase) {
        let state = self.lock();
        if !state.is_closed {
            self.phase.send_replace(phase);
        }
    }

    async fn open(&self) -> Outcome<ChangeStream<Event>> {
        let covered = {
            let mut state = self.lock();
            let names = state.names.keys().cloned();
            let covered: Option<HashSet<String>> = (names.len() <= MOST_NAMES).then(|| names.collect());
            state.covered = covered.clone();
            covered
        };
        // A change stream reads what the majority has, and refuses to be asked for less.
        let locks = self.pool.locks();
        let watch = locks
            .watch()
            .pipeline(event::pipeline(&self.process, covered))
            .read_concern(ReadConcern::majority());
        Ok(watch.max_await_time(REQUEST).await?.with_type())
    }

    /// Whether the stream lacks a name that has waiters, or covers many names without waiters.
    fn should_reopen(&self) -> bool {
        let state = self.lock();
        let Some(covered) = &state.covered else { return false };
        let is_missing = state.names.keys().any(|name| !covered.contains(name));
        is_missing || covered.len() > 2 * state.names.len() + SPARE_NAMES
    }

    /// Keeps the stream open until nobody waits any more.
    async fn run(self: Arc<Self>) {
        let (mut attempt, mut pause) = (0, FIRST_PAUSE);
        loop {
            attempt += 1;
            let mut election = self.election.clone();
            election.mark_unchanged();
            let opened = tokio::select! {
                opened = self.open() => opened,
                // Whoever was asked may hang.
                Ok(()) = election.changed() => continue,
            };
            match opened {
                Ok(stream) => {
                    let opened = Instant::now();
                    self.tell(Phase::Open);
                    if attempt > 1 {
                        (self.deliver)(Change::Unknown);
                    }
                    match self.pass_on(stream, election).await {
                        Ended::Unwanted => return,
                        Ended::Outdated => {
                            self.tell(Phase::Closed);
                            continue;
                        }
                        Ended::Broken => self.tell(Phase::Closed),
                    }
                    // One that breaks again and again is opened as seldom as one that cannot be opened.
                    if opened.elapsed() > LONGEST_PAUSE {
                        pause = FIRST_PAUSE;
                    }
                }
                Err(failure) => {
                    if failure.is_without_change_streams() {
                        self.lock().refused = Some((Instant::now() + REFUSAL, failure.clone()));
                    }
                    self.tell(Phase::Broken(attempt, failure));
                    if self.retire_unless_wanted() {
                        return;
                    }
                }
            }
            let jittered = pause.mul_f64(0.5 + fastrand::f64() / 2.0);
            let _ = tokio::time::timeout(jittered, self.attempt_now.notified()).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// Passes changes on until the stream breaks, or there is another primary, or it is not needed any more.
    async fn pass_on(&self, mut stream: ChangeStream<Event>, mut election: watch::Receiver<Option<ObjectId>>) -> Ended {
        let mut seen = self.lock().all_uses;
        let mut look = tokio::time::interval(LINGER);
        look.reset();
        let opened = Instant::now();
        let mut reopen_at = None;
        if self.should_reopen() {
            self.uncovered.notify_one();
        }
        loop {
            tokio::select! {
                event = stream.next() => match event {
                    Some(Ok(event)) => {
                        if let Some(change) = event.change(&self.process) {
                            (self.deliver)(change);
                        }
                    }
                    Some(Err(_)) => return Ended::Broken,
                    None => {
                        // The collection was dropped or renamed.
                        self.index.check_soon();
                        return Ended::Broken;
                    }
                },
                // The old one may hang, and its connection with it, for as long as a request waits there.
                Ok(()) = election.changed() => return Ended::Broken,
                () = self.uncovered.notified(), if reopen_at.is_none() => {
                    reopen_at = Some((Instant::now() + SETTLE).max(opened + REOPEN));
                }
                () = at(reopen_at) => {
                    if self.should_reopen() {
                        return Ended::Outdated;
                    }
                    reopen_at = None;
                }
                _ = look.tick() => {
                    let last = self.lock().all_uses;
                    if last == seen && self.retire_unless_wanted() {
                        return Ended::Unwanted;
                    }
                    seen = last;
                    if self.should_reopen() {
                        self.uncovered.notify_one();
                    }
                }
            }
        }
    }

    /// Ends the task when nobody needs it: whoever comes from now on starts a new one.
    fn retire_unless_wanted(&self) -> bool {
        let mut state = self.lock();
        let unwanted = state.uses == 0;
        if unwanted {
            state.task = None;
            // Within the lock: who comes next must not find the old phase beside its new task.
            self.phase
                .send_if_modified(|phase| !matches!(std::mem::replace(phase, Phase::Closed), Phase::Closed));
        }
        unwanted
    }
}

impl Watcher {
    pub(super) fn new(
        pool: Arc<Pool>,
        process: &str,
        election: watch::Receiver<Option<ObjectId>>,
        index: Arc<IndexKeeper>,
        deliver: Deliver,
    ) -> Self {
        Watcher(Arc::new(Shared {
            pool,
            index,
            process: process.to_owned(),
            deliver,
            election,
            state: Mutex::default(),
            phase: watch::Sender::new(Phase::Closed),
            attempt_now: Notify::new(),
            uncovered: Notify::new(),
        }))
    }

    /// Opens the stream, or keeps it open, for a waiter of the document `id`.
    ///
    /// # Behavior
    /// Returns when the stream is open at the server: every later hand-off has an event.
    pub(super) async fn open(&self, id: String) -> Outcome<Use> {
        let mut phase = self.0.phase.subscribe();
        let open = self.enter(id)?;
        // A failure from before is no answer. The attempt that follows it is made at once.
        let before = match &*phase.borrow_and_update() {
            Phase::Broken(attempt, _) => *attempt,
            Phase::Open => return Ok(open),
            Phase::Closed => 0,
        };
        self.0.attempt_now.notify_one();
        loop {
            match &*phase.borrow_and_update() {
                Phase::Open => return Ok(open),
                Phase::Broken(attempt, failure) if *attempt > before => return Err(failure.clone()),
                Phase::Broken(..) | Phase::Closed => {}
            }
            if phase.changed().await.is_err() {
                return Err(Failure(ErrorKind::Shutdown.into()));
            }
        }
    }

    fn enter(&self, id: String) -> Outcome<Use> {
        let mut state = self.0.lock();
        if state.is_closed {
            return Err(Failure(ErrorKind::Shutdown.into()));
        }
        if let Some((_, failure)) = state.refused.as_ref().filter(|(until, _)| Instant::now() < *until) {
            return Err(failure.clone());
        }
        state.uses += 1;
        state.all_uses += 1;
        *state.names.entry(id.clone()).or_default() += 1;
        if state.covered.as_ref().is_some_and(|covered| !covered.contains(&id)) {
            self.0.uncovered.notify_one();
        }
        if state.task.is_none() {
            state.task = Some(tokio::spawn(self.0.clone().run()).abort_handle());
        }
        Ok(Use {
            shared: self.0.clone(),
            id,
        })
    }

    /// Whether the server has refused a stream.
    pub(super) fn is_refused(&self) -> bool {
        self.0.lock().refused.is_some()
    }

    #[cfg(test)]
    pub(super) fn is_open(&self) -> bool {
        matches!(*self.0.phase.borrow(), Phase::Open)
    }

    /// Makes every opening of the stream wait from now on.
    #[cfg(test)]
    pub(super) fn hang(&self) {
        let task = tokio::spawn(std::future::pending::<()>());
        self.0.lock().task = Some(task.abort_handle());
    }

    /// Closes the stream for good. Who waits for it to open is told so.
    pub(super) fn close(&self) {
        let mut state = self.0.lock();
        state.is_closed = true;
        if let Some(task) = state.task.take() {
            task.abort();
        }
        self.0
            .phase
            .send_replace(Phase::Broken(u64::MAX, Failure(ErrorKind::Shutdown.into())));
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.close();
    }
}

/// Keeps the stream open, or has it opened again, until it is dropped.
pub(super) struct Use {
    shared: Arc<Shared>,
    id: String,
}

impl Drop for Use {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.uses -= 1;
        if let Entry::Occupied(mut name) = state.names.entry(std::mem::take(&mut self.id)) {
            *name.get_mut() -= 1;
            if *name.get() == 0 {
                name.remove();
            }
        }
    }
}

/// Waits until `moment`. `None`: waits for ever.
async fn at(moment: Option<Instant>) {
    match moment {
        Some(moment) => tokio::time::sleep_until(moment).await,
        None => std::future::pending().await,
    }
}
