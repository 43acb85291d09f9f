//! The process's part in the queues of MongoDB.
//!
//! # Behavior
//! What the waiters of this process share is one change stream (`watch.rs`), on which the server names the waiter that a
//! name was handed to, and the sign of life: one command for one name, two for any number of them, which also hand on
//! what has become free.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::TryStreamExt;
use mongodb::Collection;
use mongodb::bson::oid::ObjectId;
use mongodb::bson::{Document, doc};
use mongodb::options::ReturnDocument;
use tokio::sync::watch;

use super::event::Change;
use super::index::IndexKeeper;
use super::poll::Poll;
use super::pool::{Class, Pool};
use super::watch::{Use, Watcher};
use super::{Outcome, documents, queue};
use crate::engine::Subscription;
use crate::engine::local_waiters::{self, LocalWaiters};
use crate::model::{Claim, Key, OwnerToken};

/// The head start over whoever came later, when a name is free and its queue is gone.
const HEAD_START: Duration = Duration::from_millis(5);
/// How many such head starts there are at most: in front of others, and of the others of the same process.
const HEAD_STARTS: u32 = 10;

/// The waiters of one engine.
pub(super) struct Line {
    pool: Arc<Pool>,
    prefix: String,
    /// By what the queues know this engine: random, hexadecimal.
    pub(super) process: String,
    /// With each name goes the use of the stream.
    pub(super) known: Arc<LocalWaiters<Option<Use>>>,
    watcher: Watcher,
    limit: Duration,
}

impl Line {
    pub(super) fn new(
        pool: Arc<Pool>,
        prefix: String,
        limit: Duration,
        election: watch::Receiver<Option<ObjectId>>,
        index: Arc<IndexKeeper>,
    ) -> Arc<Self> {
        let process = format!("{:016x}", fastrand::u64(..));
        Arc::new_cyclic(|line: &std::sync::Weak<Line>| {
            let line = line.clone();
            let deliver = Arc::new(move |change: Change| {
                if let Some(line) = line.upgrade() {
                    line.deliver(change);
                }
            });
            Line {
                watcher: Watcher::new(pool.clone(), &process, election, index, deliver),
                pool,
                prefix,
                process,
                known: Arc::new(LocalWaiters::new()),
                limit,
            }
        })
    }

    pub(super) fn close(&self) {
        self.watcher.close();
        self.known.clear();
    }

    #[cfg(test)]
    pub(super) fn is_listening(&self) -> bool {
        self.watcher.is_open()
    }

    #[cfg(test)]
    pub(super) fn hang(&self) {
        self.watcher.hang();
    }

    /// Opens the change stream, or keeps it open, for a waiter of this name. `None`: the server has no change streams, and the
    /// waiter polls.
    pub(super) async fn listen(&self, key: &Key) -> Outcome<Option<Use>> {
        match self.watcher.open(self.id(key)).await {
            Ok(open) => Ok(Some(open)),
            Err(failure) if failure.is_without_change_streams() => Ok(None),
            Err(failure) => Err(failure),
        }
    }

    /// A waiter has its place in the queue of `key`, behind a lease that ends in `left`.
    pub(super) fn waits(
        self: &Arc<Self>,
        claim: &Claim,
        key: &Key,
        number: u64,
        left: Option<Duration>,
        open: Option<Use>,
    ) {
        if self.known.enter(&claim.owner, key, number, left, || open) {
            let line = self.clone();
            tokio::spawn(async move { line.known.run_heartbeats(|names| line.look(names)).await });
        }
    }

    /// Something changed at the server.
    pub(super) fn deliver(self: &Arc<Self>, change: Change) {
        match change {
            Change::Handed { id, owner } => {
                if !self.known.notify(&owner) {
                    self.disown(id, owner);
                }
            }
            Change::Freed { id } => {
                if let Some(key) = self.key(&id).filter(|key| self.known.is_waited_for(key)) {
                    let ahead = u32::try_from(self.known.ahead(&key)).unwrap_or(u32::MAX);
                    let line = self.clone();
                    tokio::spawn(async move {
                        tokio::time::sleep(HEAD_START * ahead.min(HEAD_STARTS)).await;
                        line.known.wake_first(&key);
                        tokio::time::sleep(HEAD_START * HEAD_STARTS).await;
                        line.known.wake(&key);
                    });
                }
            }
            Change::Reserved { id, hold } => {
                if let Some(key) = self.key(&id) {
                    self.known.set_lease_end(&key, Some(hold));
                }
            }
            Change::Unknown => {
                let names = self.known.names();
                if !names.is_empty() {
                    self.look(names);
                }
            }
        }
    }

    fn id(&self, key: &Key) -> String {
        format!("{}{key}", self.prefix)
    }

    fn key(&self, id: &str) -> Option<Key> {
        id.strip_prefix(&self.prefix).and_then(|name| Key::new(name).ok())
    }

    /// Passes on what was handed to a waiter that this process does not know: its place outlived it, because its process
    /// is alive. (Or it has been granted the name already, and the news of its turn comes late: then nothing is passed on.)
    fn disown(self: &Arc<Self>, id: String, owner: OwnerToken) {
        let line = self.clone();
        tokio::spawn(async move {
            let disowned = tokio::time::timeout(line.limit, line.pass_on(id, &owner)).await;
            if !matches!(disowned, Ok(Ok(()))) {
                // Its place costs the others some time more.
                tracing::debug!(?disowned, "a waiter that nobody knows could not be disowned");
            }
        });
    }

    /// A waiter waits for this name no more.
    pub(super) async fn leave(&self, key: &Key, owner: &OwnerToken) -> Outcome<()> {
        pass_on(&self.pool.locks(), &self.id(key), owner, &self.process).await
    }

    async fn pass_on(&self, id: String, owner: &OwnerToken) -> Outcome<()> {
        let (locks, owner, process) = (self.pool.locks(), owner.clone(), self.process.clone());
        let passing_on = || async move { pass_on(&locks, &id, &owner, &process).await };
        self.pool.call(Class::Release, passing_on).await
    }

    /// Sends a heartbeat for these names.
    fn look(self: &Arc<Self>, names: Vec<Key>) {
        let line = self.clone();
        tokio::spawn(async move {
            let beat = tokio::time::timeout(line.limit, line.beat(&names)).await;
            if !matches!(beat, Ok(Ok(()))) {
                // The waiters' own attempts report the failure, within their deadlines.
                tracing::debug!(?beat, "the heartbeat of the waiters failed");
                names.iter().for_each(|key| line.known.wake(key));
            }
        });
    }

    async fn beat(&self, names: &[Key]) -> Outcome<()> {
        let ids: Vec<String> = names.iter().map(|key| self.id(key)).collect();
        let ours = queue::waited_for(&ids, &self.process);
        let shown = queue::shown(&self.process);
        let (locks, beat, all) = (
            self.pool.locks(),
            queue::beat(&self.process),
            doc! { "_id": { "$in": &ids } },
        );
        let is_one = names.len() == 1;
        let beating = || async move {
            if is_one {
                let beating = locks.find_one_and_update(ours, beat);
                let found = beating.return_document(ReturnDocument::After).projection(shown).await?;
                return Ok(found.into_iter().collect());
            }
            locks.update_many(ours, beat).await?;
            Ok(locks.find(all).projection(shown).await?.try_collect().await?)
        };
        let found: Vec<Document> = self.pool.call(Class::Keep, beating).await?;
        let found: HashMap<&str, &Document> = found
            .iter()
            .filter_map(|document| Some((documents::id(document)?, document)))
            .collect();
        for (key, id) in names.iter().zip(&ids) {
            match found.get(id.as_str()) {
                Some(document) => {
                    let present = queue::owners(document);
                    self.known.wake_others(key, &present);
                    if let Some(owner) = queue::reserved_for(document, &self.process) {
                        self.known.notify(&owner);
                    }
                    self.known.set_lease_end(key, documents::remaining(document));
                    self.known.set_ahead(key, documents::ahead(document));
                }
                // Nobody of this process waits there any more, as far as the store knows.
                None => self.known.wake(key),
            }
        }
        Ok(())
    }

    /// A subscription of one waiter.
    pub(super) fn subscribe(self: &Arc<Self>, owner: &OwnerToken) -> LineSubscription {
        LineSubscription {
            ear: self.known.subscribe(owner),
            line: self.clone(),
            poll: Poll::default(),
        }
    }
}

/// Removes a waiter's place, and hands on what is reserved for it. Leaves what it holds, so that this may run late.
async fn pass_on(locks: &Collection<Document>, id: &str, owner: &OwnerToken, process: &str) -> Outcome<()> {
    let waited_for = queue::waited_for_by(id, process, owner);
    let owners = [owner.as_str()];
    let parted = locks.update_one(waited_for, queue::part(&owners, process)).await?;
    if parted.matched_count == 1 {
        locks.delete_one(queue::freed_by(&[id.to_owned()], &owners)).await?;
    }
    Ok(())
}

/// A waiter's ear, and its eye where nothing can be heard.
pub(super) struct LineSubscription {
    ear: local_waiters::WaiterSubscription<Option<Use>>,
    line: Arc<Line>,
    poll: Poll,
}

#[async_trait]
impl Subscription for LineSubscription {
    async fn changed(&mut self) {
        // Who has no place is told by nobody either.
        if self.line.watcher.is_refused() || !self.ear.is_queued() {
            tokio::select! {
                () = self.ear.changed() => {}
                () = self.poll.changed() => {}
            }
        } else {
            self.ear.changed().await;
        }
    }

    fn is_reliable(&self) -> bool {
        true
    }
}
