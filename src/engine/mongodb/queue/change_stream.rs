//! Watches changes for the waiters of this process: one change stream per engine, open while a call waits.
//!
//! The stream has only events for this process: a name was handed off to one of its waiters, or one of them is the next for a name
//! that is busy for a known time: for a minimum hold, or for a hand-off to a waiter of another process that lasts for less than 2 s
//! (`RESERVATION`). If the process of the next waiter has died, the heartbeats of the others find the free name.
//!
//! The stream has no deletions: the next heartbeat finds them (`queue/mod.rs`).
//!
//! # Gaps
//! The driver resumes a broken stream once. After a gap a heartbeat for all names shows what the lost events would have shown.
//! When another member is elected, the stream is opened there at once: the old primary may hang.

#[cfg(test)]
mod testing;

use std::sync::Arc;
use std::time::Duration;

use futures_util::{FutureExt, StreamExt};
use mongodb::bson::Document;
use mongodb::bson::oid::ObjectId;
use mongodb::change_stream::ChangeStream;
use mongodb::options::ReadConcern;
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use tokio::task::AbortHandle;
use tokio::time::Instant;

use crate::backoff::Backoff;
use crate::engine::mongodb::Outcome;
use crate::engine::mongodb::connection::pool::Pool;
use crate::engine::mongodb::error::Failure;
use crate::engine::mongodb::queue::change_event::{self, Change, change_of};
use crate::engine::mongodb::ttl_index::TtlIndex;

/// How long the stream stays open without subscribers, at least (at most twice as long).
const LINGER: Duration = if cfg!(test) {
    Duration::from_millis(200)
} else {
    Duration::from_secs(10)
};
/// How long the server lets a request of the stream wait for an event.
const REQUEST: Duration = Duration::from_secs(30);
/// The delays between attempts.
const FIRST_DELAY: Duration = Duration::from_millis(100);
const LONGEST_DELAY: Duration = Duration::from_secs(5);
/// The time until a stream is requested again from a server that has no change streams for this user.
const REFUSAL: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 60 });

/// Processes a change. It must not block.
pub(crate) type Deliver = Arc<dyn Fn(Change) + Send + Sync>;

/// The state of the stream.
#[derive(Debug, Clone)]
enum Phase {
    /// There is no waiter, or the first attempt is in progress.
    Closed,
    Open,
    /// The attempt of this number failed. Another one follows while there are waiters.
    Broken(u64, Failure),
}

/// The change stream of an engine, which its waiters share.
pub(crate) struct Watcher(Arc<Shared>);

struct Shared {
    pool: Arc<Pool>,
    index: Arc<TtlIndex>,
    /// The name of this process in the queues.
    process: String,
    deliver: Deliver,
    /// The last election of a primary.
    election: watch::Receiver<Option<ObjectId>>,
    state: Mutex<State>,
    phase: watch::Sender<Phase>,
    /// Ends the delay between two attempts.
    attempt_now: Notify,
}

#[derive(Debug, Default)]
struct State {
    /// Number of current uses of the stream, and of all uses so far.
    uses: usize,
    all_uses: u64,
    /// The stream's task. `None`: it does not run.
    task: Option<AbortHandle>,
    /// The end of the time without another request, and the server's refusal.
    refused: Option<(Instant, Failure)>,
    is_closed: bool,
}

impl Shared {
    /// Publishes the phase, unless the stream was closed for good.
    fn publish(&self, phase: Phase) {
        let state = self.state.lock();
        if !state.is_closed {
            self.phase.send_replace(phase);
        }
    }

    async fn open(&self) -> Outcome<ChangeStream<Document>> {
        // A change stream requires the read concern "majority".
        let locks = self.pool.locks();
        let watch = locks
            .watch()
            .pipeline(change_event::pipeline(&self.process))
            .read_concern(ReadConcern::majority());
        let opened = watch.max_await_time(REQUEST).await;
        Ok(opened.map_err(|error| self.pool.explain(error.into()))?.with_type())
    }

    /// Keeps the stream open while there are waiters.
    async fn run(self: Arc<Self>) {
        let mut attempt = 0;
        let mut backoff = Backoff::new(FIRST_DELAY, LONGEST_DELAY);
        loop {
            attempt += 1;
            let mut election = self.election.clone();
            election.mark_unchanged();
            let opened = tokio::select! {
                opened = self.open() => opened,
                // The server may hang.
                Ok(()) = election.changed() => continue,
            };
            match opened {
                Ok(stream) => {
                    let opened = Instant::now();
                    let _connection = self.pool.use_for_stream();
                    self.state.lock().refused = None;
                    self.publish(Phase::Open);
                    if attempt > 1 {
                        (self.deliver)(Change::Gap);
                    }
                    if self.deliver_changes(stream, election).await {
                        return;
                    }
                    self.publish(Phase::Closed);
                    // A stream that breaks soon is opened as rarely as one that cannot be opened.
                    if opened.elapsed() > LONGEST_DELAY {
                        backoff.reset();
                    }
                }
                Err(failure) => {
                    if failure.is_without_change_streams() {
                        self.state.lock().refused = Some((Instant::now() + REFUSAL, failure.clone()));
                    }
                    self.publish(Phase::Broken(attempt, failure));
                    if self.end_if_unused() {
                        return;
                    }
                }
            }
            let _ = tokio::time::timeout(backoff.delay(), self.attempt_now.notified()).await;
        }
    }

    /// Delivers changes until the stream breaks, another primary is elected, or the stream is not needed any more. `true`: it is
    /// not needed, and the task ends.
    async fn deliver_changes(
        &self,
        mut stream: ChangeStream<Document>,
        mut election: watch::Receiver<Option<ObjectId>>,
    ) -> bool {
        let mut uses = self.state.lock().all_uses;
        let mut check = tokio::time::interval(LINGER);
        check.reset();
        loop {
            tokio::select! {
                event = stream.next() => match event {
                    Some(Ok(event)) => {
                        if let Some(change) = change_of(&event, &self.process) {
                            (self.deliver)(change);
                        }
                    }
                    Some(Err(_)) => return false,
                    None => {
                        // The collection was dropped or renamed.
                        self.index.check_soon();
                        return false;
                    }
                },
                // The old primary may hang, and a request of the stream with it.
                Ok(()) = election.changed() => return false,
                _ = check.tick() => {
                    let last = self.state.lock().all_uses;
                    if last == uses && self.end_if_unused() {
                        return true;
                    }
                    uses = last;
                }
            }
        }
    }

    /// Ends the task if the stream has no uses. The next use starts a new task.
    fn end_if_unused(&self) -> bool {
        let mut state = self.state.lock();
        let is_unused = state.uses == 0;
        if is_unused {
            state.task = None;
            // Under the lock: the next use must not read the old phase.
            self.phase
                .send_if_modified(|phase| !matches!(std::mem::replace(phase, Phase::Closed), Phase::Closed));
        }
        is_unused
    }
}

impl Watcher {
    pub(crate) fn new(
        pool: Arc<Pool>,
        process: &str,
        election: watch::Receiver<Option<ObjectId>>,
        index: Arc<TtlIndex>,
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
        }))
    }

    /// Opens the stream, or keeps it open, for a waiter.
    ///
    /// # Behavior
    /// Returns when the stream is open at the server: every later hand-off has an event.
    pub(crate) async fn open(&self) -> Outcome<StreamUse> {
        let mut phase = self.0.phase.subscribe();
        let open = self.enter()?;
        // An earlier failure is no answer. The next attempt is made at once.
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
                return Err(Failure::shutdown());
            }
        }
    }

    fn enter(&self) -> Outcome<StreamUse> {
        let mut state = self.0.state.lock();
        if state.is_closed {
            return Err(Failure::shutdown());
        }
        if let Some((_, failure)) = state.refused.as_ref().filter(|(until, _)| Instant::now() < *until) {
            return Err(failure.clone());
        }
        state.uses += 1;
        state.all_uses += 1;
        if state.task.is_none() {
            state.task = Some(tokio::spawn(self.0.clone().run().boxed()).abort_handle());
        }
        Ok(StreamUse(Arc::new(InUse(self.0.clone()))))
    }

    /// Whether the server has refused the last stream.
    pub(crate) fn is_refused(&self) -> bool {
        self.0.state.lock().refused.is_some()
    }

    /// Closes the stream for good. Calls that wait for its opening fail.
    pub(crate) fn close(&self) {
        let mut state = self.0.state.lock();
        state.is_closed = true;
        if let Some(task) = state.task.take() {
            task.abort();
        }
        self.0.phase.send_replace(Phase::Broken(u64::MAX, Failure::shutdown()));
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.close();
    }
}

/// Keeps the stream open, or has it opened again, until all of its clones are dropped.
#[derive(Clone)]
pub(crate) struct StreamUse(#[expect(dead_code, reason = "its drop ends the use")] Arc<InUse>);

struct InUse(Arc<Shared>);

impl Drop for InUse {
    fn drop(&mut self) {
        self.0.state.lock().uses -= 1;
    }
}
