//! What happens to the waiters of this process: one change stream per engine, while anybody waits.
//!
//! The stream tells of names that were handed on to a waiter of this process, and of them alone; of documents that were
//! deleted (by a gist process, by the TTL monitor, or because nobody waited for them); and of releases that keep the name
//! busy for a shorter while than the lease would have. Takeovers and renewals are left out by the server: they free nobody.
//!
//! The driver goes on where a broken stream was, once and by itself. What happens while that fails is made up for by a hint
//! to everybody when there is a stream again: whoever tries then sees the present. Where another member is elected, the
//! stream goes there at once: the old one may hang.

use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::StreamExt;
use mongodb::Collection;
use mongodb::bson::oid::ObjectId;
use mongodb::bson::{Bson, Document, doc};
use mongodb::change_stream::ChangeStream;
use mongodb::error::ErrorKind;
use mongodb::options::ReadConcern;
use serde::Deserialize;
use tokio::sync::{Notify, watch};
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::Outcome;
use super::documents::KEPT;
use super::failure::Failure;
use super::queue::RESERVED;
use crate::model::OwnerToken;

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

/// What happened, as far as it matters to waiters.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// A name was handed on to a waiter of this process.
    Handed { id: String, owner: OwnerToken },
    /// A name may be free, or sooner than it was thought.
    Freed { id: String },
    /// Nobody knows: the stream was interrupted.
    Unknown,
}

/// What is done with a change. It must not block.
pub(super) type Deliver = Arc<dyn Fn(Change) + Send + Sync>;

/// What the server sends of a change.
#[derive(Debug, Deserialize)]
struct Event {
    #[serde(rename = "documentKey")]
    document: Option<DocumentKey>,
    /// `<process>:<owner>`.
    to: Option<String>,
}

#[derive(Debug, Deserialize)]
struct DocumentKey {
    #[serde(rename = "_id")]
    id: Bson,
}

impl Event {
    fn change(self) -> Option<Change> {
        let DocumentKey { id: Bson::String(id) } = self.document? else {
            return None;
        };
        Some(match self.to {
            Some(to) => {
                let (_, owner) = to.split_once(':')?;
                let owner = OwnerToken::parse(owner).ok()?;
                Change::Handed { id, owner }
            }
            None => Change::Freed { id },
        })
    }
}

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
    locks: Collection<Document>,
    /// The name of this process in the queues.
    process: String,
    deliver: Deliver,
    /// The last election of a primary that was seen.
    election: watch::Receiver<Option<ObjectId>>,
    state: Mutex<State>,
    phase: watch::Sender<Phase>,
    /// Cuts a pause between two attempts short.
    attempt_now: Notify,
}

#[derive(Debug, Default)]
struct State {
    /// How many need the stream now, and how many have needed it so far.
    uses: usize,
    all_uses: u64,
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
        let kept = doc! { "$regex": format!("{KEPT}$") };
        let ours = doc! { "$regex": format!("^{}:", self.process) };
        let updated = |field: &str| format!("updateDescription.updatedFields.{field}");
        // How the server logs an update that a difference would describe at greater length: as a replacement.
        let replaced = |field: &str| format!("fullDocument.{field}");
        let telling = doc! { "$or": [
            // A collection that is dropped or renamed ends the stream.
            { "operationType": "delete" },
            { "operationType": "update", updated(RESERVED): ours.clone() },
            { "operationType": "replace", replaced(RESERVED): ours },
            { "operationType": "update", updated("owner"): kept.clone() },
            { "operationType": "replace", replaced("owner"): kept },
        ] };
        let to = doc! { "$ifNull": [format!("${}", updated(RESERVED)), format!("${}", replaced(RESERVED))] };
        // The driver needs `_id`, the resume token.
        let pipeline = [
            doc! { "$match": telling },
            doc! { "$project": { "_id": 1, "documentKey._id": 1, "to": to } },
        ];
        // A change stream reads what the majority has, and refuses to be asked for less.
        let watch = self
            .locks
            .watch()
            .pipeline(pipeline)
            .read_concern(ReadConcern::majority());
        Ok(watch.max_await_time(REQUEST).await?.with_type())
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
                    if self.pass_on(stream, election).await.is_break() {
                        return;
                    }
                    self.tell(Phase::Closed);
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
    async fn pass_on(
        &self,
        mut stream: ChangeStream<Event>,
        mut election: watch::Receiver<Option<ObjectId>>,
    ) -> ControlFlow<()> {
        let mut seen = self.lock().all_uses;
        let mut look = tokio::time::interval(LINGER);
        look.reset();
        loop {
            tokio::select! {
                event = stream.next() => match event {
                    Some(Ok(event)) => {
                        if let Some(change) = event.change() {
                            (self.deliver)(change);
                        }
                    }
                    Some(Err(_)) | None => return ControlFlow::Continue(()),
                },
                // The old one may hang, and its connection with it, for as long as a request waits there.
                Ok(()) = election.changed() => return ControlFlow::Continue(()),
                _ = look.tick() => {
                    let last = self.lock().all_uses;
                    if last == seen && self.retire_unless_wanted() {
                        return ControlFlow::Break(());
                    }
                    seen = last;
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
        locks: Collection<Document>,
        process: &str,
        election: watch::Receiver<Option<ObjectId>>,
        deliver: Deliver,
    ) -> Self {
        Watcher(Arc::new(Shared {
            locks,
            process: process.to_owned(),
            deliver,
            election,
            state: Mutex::default(),
            phase: watch::Sender::new(Phase::Closed),
            attempt_now: Notify::new(),
        }))
    }

    /// Opens the stream, or keeps it open.
    ///
    /// # Behavior
    /// Returns when the stream is open at the server: whatever happens from then on is told.
    pub(super) async fn open(&self) -> Outcome<Use> {
        let mut phase = self.0.phase.subscribe();
        let open = self.enter()?;
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

    fn enter(&self) -> Outcome<Use> {
        let mut state = self.0.lock();
        if state.is_closed {
            return Err(Failure(ErrorKind::Shutdown.into()));
        }
        if let Some((_, failure)) = state.refused.as_ref().filter(|(until, _)| Instant::now() < *until) {
            return Err(failure.clone());
        }
        state.uses += 1;
        state.all_uses += 1;
        if state.task.is_none() {
            state.task = Some(tokio::spawn(self.0.clone().run()).abort_handle());
        }
        Ok(Use(self.0.clone()))
    }

    /// Whether the server has refused a stream.
    pub(super) fn is_refused(&self) -> bool {
        self.0.lock().refused.is_some()
    }

    #[cfg(test)]
    pub(super) fn is_open(&self) -> bool {
        matches!(*self.0.phase.borrow(), Phase::Open)
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

/// As long as there is one, the stream is open, or is opened again.
pub(super) struct Use(Arc<Shared>);

impl Drop for Use {
    fn drop(&mut self) {
        self.0.lock().uses -= 1;
    }
}
