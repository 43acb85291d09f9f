//! Wake-up by a change stream: one per engine, while anybody waits.
//!
//! The stream tells of documents that were deleted (released, forced, cleaned up after they expired, or freed by a gist
//! process) and of releases that keep the name busy for a shorter while than the lease would have. Takeovers and renewals
//! are left out by the server: they free nobody.
//!
//! What happens while there is no stream is not made up for by a resume token but by a hint to everybody once there is
//! one again: whoever tries then sees the present.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::StreamExt;
use mongodb::Collection;
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
use crate::engine::Subscription;

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

/// What the server sends of a change.
#[derive(Debug, Deserialize)]
struct Change {
    #[serde(rename = "documentKey")]
    document: Option<DocumentKey>,
}

#[derive(Debug, Deserialize)]
struct DocumentKey {
    #[serde(rename = "_id")]
    id: Bson,
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
#[derive(Debug)]
pub(super) struct Watcher(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    locks: Collection<Document>,
    state: Mutex<State>,
    phase: watch::Sender<Phase>,
    /// Cuts a pause between two attempts short.
    attempt_now: Notify,
}

#[derive(Debug, Default)]
struct State {
    subscribers: HashMap<String, Vec<(u64, Arc<Notify>)>>,
    last_subscriber: u64,
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

    fn hint(&self, id: &str) {
        if let Some(subscribers) = self.lock().subscribers.get(id) {
            subscribers.iter().for_each(|(_, hint)| hint.notify_one());
        }
    }

    fn hint_everybody(&self) {
        self.lock()
            .subscribers
            .values()
            .flatten()
            .for_each(|(_, hint)| hint.notify_one());
    }

    async fn open(&self) -> Outcome<ChangeStream<Change>> {
        let kept = doc! { "$regex": format!("{KEPT}$") };
        let telling = doc! { "$or": [
            { "operationType": { "$in": ["delete", "drop", "rename", "dropDatabase"] } },
            { "operationType": "update", "updateDescription.updatedFields.owner": kept.clone() },
            // How the server logs an update that a difference would describe at greater length.
            { "operationType": "replace", "fullDocument.owner": kept },
        ] };
        // The driver needs `_id`, the resume token.
        let pipeline = [
            doc! { "$match": telling },
            doc! { "$project": { "_id": 1, "documentKey._id": 1 } },
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
            match self.open().await {
                Ok(stream) => {
                    let opened = Instant::now();
                    self.tell(Phase::Open);
                    if attempt > 1 {
                        self.hint_everybody();
                    }
                    if self.pass_on(stream).await.is_break() {
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

    /// Passes changes on until the stream breaks, or is not needed any more.
    async fn pass_on(&self, mut stream: ChangeStream<Change>) -> ControlFlow<()> {
        let mut seen = self.lock().last_subscriber;
        let mut look = tokio::time::interval(LINGER);
        look.reset();
        loop {
            tokio::select! {
                change = stream.next() => match change {
                    Some(Ok(change)) => {
                        if let Some(DocumentKey { id: Bson::String(id) }) = change.document {
                            self.hint(&id);
                        }
                    }
                    Some(Err(_)) | None => return ControlFlow::Continue(()),
                },
                _ = look.tick() => {
                    let last = self.lock().last_subscriber;
                    if last == seen && self.retire_unless_wanted() {
                        return ControlFlow::Break(());
                    }
                    seen = last;
                }
            }
        }
    }

    /// Ends the task when there are no subscribers: whoever comes from now on starts a new one.
    fn retire_unless_wanted(&self) -> bool {
        let mut state = self.lock();
        let unwanted = state.subscribers.is_empty();
        if unwanted {
            state.task = None;
            // Within the lock: a new subscriber must not find the old phase beside its new task.
            self.phase
                .send_if_modified(|phase| !matches!(std::mem::replace(phase, Phase::Closed), Phase::Closed));
        }
        unwanted
    }
}

impl Watcher {
    pub(super) fn new(locks: Collection<Document>) -> Self {
        Watcher(Arc::new(Shared {
            locks,
            state: Mutex::default(),
            phase: watch::Sender::new(Phase::Closed),
            attempt_now: Notify::new(),
        }))
    }

    /// Subscribes to one document.
    ///
    /// # Behavior
    /// Returns when the stream is open at the server: whoever tries then sees all that happened before, and is told of
    /// all that happens later.
    pub(super) async fn subscribe(&self, id: String) -> Outcome<Told> {
        let mut phase = self.0.phase.subscribe();
        let told = self.enter(id)?;
        // A failure from before is no answer. The attempt that follows it is made at once.
        let before = match &*phase.borrow_and_update() {
            Phase::Broken(attempt, _) => *attempt,
            Phase::Closed | Phase::Open => 0,
        };
        self.0.attempt_now.notify_one();
        loop {
            match &*phase.borrow_and_update() {
                Phase::Open => return Ok(told),
                Phase::Broken(attempt, failure) if *attempt > before => return Err(failure.clone()),
                Phase::Broken(..) | Phase::Closed => {}
            }
            if phase.changed().await.is_err() {
                return Err(Failure(ErrorKind::Shutdown.into()));
            }
        }
    }

    fn enter(&self, id: String) -> Outcome<Told> {
        let mut state = self.0.lock();
        if state.is_closed {
            return Err(Failure(ErrorKind::Shutdown.into()));
        }
        if let Some((_, failure)) = state.refused.as_ref().filter(|(until, _)| Instant::now() < *until) {
            return Err(failure.clone());
        }
        state.last_subscriber += 1;
        let number = state.last_subscriber;
        let hint = Arc::new(Notify::new());
        state
            .subscribers
            .entry(id.clone())
            .or_default()
            .push((number, hint.clone()));
        if state.task.is_none() {
            state.task = Some(tokio::spawn(self.0.clone().run()).abort_handle());
        }
        Ok(Told {
            shared: self.0.clone(),
            id,
            number,
            hint,
        })
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

/// A subscription to one document.
#[derive(Debug)]
pub(super) struct Told {
    shared: Arc<Shared>,
    id: String,
    number: u64,
    hint: Arc<Notify>,
}

#[async_trait]
impl Subscription for Told {
    async fn changed(&mut self) {
        self.hint.notified().await;
    }
}

impl Drop for Told {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        if let Some(subscribers) = state.subscribers.get_mut(&self.id) {
            subscribers.retain(|(number, _)| *number != self.number);
            if subscribers.is_empty() {
                state.subscribers.remove(&self.id);
            }
        }
    }
}
