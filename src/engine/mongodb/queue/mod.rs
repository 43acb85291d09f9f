//! The waiters of this process, and their positions in the queues of MongoDB.
//!
//! - `pipelines.rs`: the queue of a name; `hand_off.rs`: what a hand-off writes; `shares.rs`: shared names; `expressions.rs`: expressions
//!   for all of them.
//! - `change_stream.rs`: the change stream that wakes waiters; `change_event.rs`: its events.
//! - `primary_clock.rs`: readings of the primary's clock, for the end of a grant.
//! - `poll.rs`: polling, without a change stream.
//!
//! # Behavior
//! The waiters of this process share one change stream, in which the server names the waiter that a name was handed to. They
//! also share the heartbeat: one command for one name, two for any number of names, which also hand off the names that are free.
//!
//! A grant by hand-off carries its time and its length by the primary's clock, from which the process computes the local end
//! (`engine/hand_off/`). The event is delivered after the majority has the write, so no grant is announced before it is durable.
//! Reservations take the place of grants where one is not possible (`hand_off.rs`); the last token is in the document, so they need no
//! stamp. A program that deletes the document, or the TTL monitor, deletes the queue with it. The next heartbeat shows that: the first
//! waiter of the process makes an attempt within 50 ms, the others up to 50 ms later, and all return with their numbers. While a gist process holds
//! the name, the first waiter polls.

pub(super) mod change_event;
pub(super) mod change_stream;
mod expressions;
pub(super) mod hand_off;
pub(super) mod pipelines;
pub(super) mod poll;
mod primary_clock;
pub(super) mod shares;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::{FutureExt, TryStreamExt};
use mongodb::bson::oid::ObjectId;
use mongodb::bson::{Bson, Document, doc};
use mongodb::options::ReturnDocument;
use tokio::sync::watch;

use crate::clock::Moment;
use crate::engine::local_waiters::{self, LocalWaiters};
use crate::engine::mongodb::connection::pool::{Class, Pool};
use crate::engine::mongodb::connection::session::journaled;
use crate::engine::mongodb::queue::change_event::Change;
use crate::engine::mongodb::queue::change_stream::{StreamUse, Watcher};
use crate::engine::mongodb::queue::hand_off::Grant;
use crate::engine::mongodb::queue::pipelines::Waiter;
use crate::engine::mongodb::queue::poll::Poll;
use crate::engine::mongodb::queue::primary_clock::PrimaryClock;
use crate::engine::mongodb::ttl_index::TtlIndex;
use crate::engine::mongodb::{Outcome, documents};
use crate::engine::{HandOff, Subscription};
use crate::model::{Claim, Fence, Key, OwnerToken};

/// The head start of a waiter over the next one, when a name is free and its queue is gone.
const HEAD_START: Duration = Duration::from_millis(5);
/// Maximum number of head starts for waiters of other processes, and for those of its own.
const MAX_HEAD_STARTS: u32 = 10;

/// The waiters of one engine.
pub(crate) struct Queue {
    pool: Arc<Pool>,
    prefix: String,
    /// The name of this engine in the queues: random, hexadecimal.
    pub(crate) process: String,
    /// The waiters, and for each name the use of the stream.
    pub(crate) known: Arc<LocalWaiters<Option<StreamUse>>>,
    pub(crate) watcher: Watcher,
    store_timeout: Duration,
    /// Whether a hand-off may grant a claim. Not on a sharded cluster: each router sets `$$NOW` by its own clock.
    pub(crate) takes_grants: bool,
    pub(crate) clock: PrimaryClock,
}

impl Queue {
    pub(crate) fn new(
        pool: Arc<Pool>,
        prefix: String,
        store_timeout: Duration,
        election: watch::Receiver<Option<ObjectId>>,
        index: Arc<TtlIndex>,
        takes_grants: bool,
    ) -> Arc<Self> {
        let process = format!("{:016x}", fastrand::u64(..));
        Arc::new_cyclic(|queue: &std::sync::Weak<Queue>| {
            let queue = queue.clone();
            let deliver = Arc::new(move |change: Change| {
                if let Some(queue) = queue.upgrade() {
                    queue.deliver(change);
                }
            });
            Queue {
                clock: PrimaryClock::new(election.clone()),
                watcher: Watcher::new(pool.clone(), &process, election, index, deliver),
                pool,
                prefix,
                process,
                known: Arc::new(LocalWaiters::new()),
                store_timeout,
                takes_grants,
            }
        })
    }

    pub(crate) fn close(&self) {
        self.watcher.close();
        self.known.clear();
    }

    /// Opens the change stream, or keeps it open, for a waiter. `None`: the server has no change streams, and the waiter polls.
    pub(crate) async fn open_stream(&self) -> Outcome<Option<StreamUse>> {
        match self.watcher.open().await {
            Ok(open) => Ok(Some(open)),
            Err(failure) if failure.is_without_change_streams() => Ok(None),
            Err(failure) => Err(failure),
        }
    }

    /// Records a waiter's position in the queue of `key`, behind a lease that ends after `left`. The waiters of the name poll
    /// without a use of the stream, and where a gist process has the lease (`is_foreign`): the stream does not contain its
    /// release.
    pub(crate) fn enter(
        self: &Arc<Self>,
        claim: &Claim,
        key: &Key,
        number: u64,
        left: Option<Duration>,
        open: Option<StreamUse>,
        is_foreign: bool,
    ) {
        let polls = is_foreign || open.is_none();
        let has_no_heartbeat = self.known.enter(&claim.owner, key, number, left, || open);
        self.known.set_polls(key, polls);
        if has_no_heartbeat {
            let queue = self.clone();
            tokio::spawn(FutureExt::boxed(async move {
                queue.known.run_heartbeats(|names| queue.send_heartbeat(names)).await
            }));
        }
    }

    /// Processes an event of the change stream.
    pub(crate) fn deliver(self: &Arc<Self>, change: Change) {
        match change {
            Change::HandedOff { id, owner } => {
                if !self.known.notify(&owner) {
                    self.remove_unknown_waiter(id, owner, None);
                }
            }
            Change::Granted { id, grants } => grants.into_iter().for_each(|grant| self.deliver_grant(&id, grant)),
            Change::Check { id, after } => {
                if let Some(key) = self.key(&id) {
                    self.known.set_lease_end(&key, Some(after));
                }
            }
            Change::Gap => {
                self.clock.forget();
                let names = self.known.names();
                if !names.is_empty() {
                    self.send_heartbeat(names);
                }
            }
        }
    }

    /// Wakes the waiters of a name whose queue is gone: the first one after a head start for each waiter of other processes ahead of
    /// it, the others a little later.
    fn wake_in_order(self: &Arc<Self>, key: &Key) {
        let ahead = u32::try_from(self.known.ahead(key)).unwrap_or(u32::MAX);
        let (queue, key) = (self.clone(), key.clone());
        tokio::spawn(FutureExt::boxed(async move {
            tokio::time::sleep(HEAD_START * ahead.min(MAX_HEAD_STARTS)).await;
            queue.known.wake_first(&key);
            tokio::time::sleep(HEAD_START * MAX_HEAD_STARTS).await;
            queue.known.wake(&key);
        }));
    }

    /// Notifies the waiter that a hand-off made the holder.
    fn deliver_grant(self: &Arc<Self>, id: &Bson, grant: Grant) {
        let owner = &grant.owner;
        let reading = self.clock.reading();
        let until = reading.and_then(|reading| reading.local_end(grant.times()?, Moment::now()));
        let is_known = match until {
            Some(until) => {
                let fence = grant.fence;
                self.known.grant(owner, HandOff { fence, until })
            }
            None => self.known.notify(owner),
        };
        if !is_known && !self.known.has_taken(owner) {
            self.remove_unknown_waiter(id.clone(), owner.clone(), Some(grant));
        } else if is_known && let Some(key) = self.key(id) {
            // The hand-off limits the liveness of this process to the lease. If it has other waiters for the name, a heartbeat
            // corrects that in time.
            self.known.set_lease_end(&key, Some(grant.hold / 2));
        }
    }

    /// Returns a waiter of this process with its number in the queue, 0 without a position. `open`: its use of the change stream.
    pub(crate) fn waiter(&self, number: u64, open: &Option<StreamUse>) -> Waiter<'_> {
        Waiter {
            process: &self.process,
            number,
            takes_grants: self.takes_grants && open.is_some(),
        }
    }

    fn id(&self, key: &Key) -> String {
        format!("{}{key}", self.prefix)
    }

    fn key(&self, id: &Bson) -> Option<Key> {
        shares::key(&self.prefix, id)
    }

    /// Removes a waiter that this process does not have: its position outlived it. `grant`: the grant that it got. (If the waiter
    /// confirmed the hand-off in the meantime, and the event was late, this changes nothing.) A share that was granted to it ends by itself.
    fn remove_unknown_waiter(self: &Arc<Self>, id: Bson, owner: OwnerToken, grant: Option<Grant>) {
        let Bson::String(id) = id else { return };
        let queue = self.clone();
        tokio::spawn(FutureExt::boxed(async move {
            let waited_for = match grant {
                Some(grant) => grant.unconfirmed(&id),
                None => pipelines::waited_for_by(&id, &queue.process, &owner),
            };
            let ending = queue.clone();
            let removal = || async move { ending.end(&[id], &[owner.as_str()], waited_for, None).await };
            let removal = queue.pool.call(Class::Release, removal);
            let outcome = tokio::time::timeout(queue.store_timeout, removal).await;
            if !matches!(outcome, Ok(Ok(_))) {
                // Until its reservation or liveness ends, the other waiters wait longer.
                tracing::debug!(?outcome, "an unknown waiter could not be removed");
            }
        }));
    }

    /// Removes a waiter's position in the queue of this name, and hands off what is reserved for it. Does not release what it holds.
    pub(crate) async fn leave(&self, key: &Key, owner: &OwnerToken) -> Outcome<()> {
        let id = self.id(key);
        let waited_for = pipelines::waited_for_by(&id, &self.process, owner);
        self.end(&[id], &[owner.as_str()], waited_for, None).await.map(drop)
    }

    /// Hands off or deletes the documents of `filter` that belong to these owners of this process, and removes the positions of the owners
    /// in the others. Returns their number. `last`: the token of the owner, if it holds them.
    pub(crate) async fn end(
        &self,
        ids: &[String],
        owners: &[&str],
        filter: Document,
        last: Option<Fence>,
    ) -> Outcome<u64> {
        let locks = self.pool.releases();
        let steps = pipelines::release(owners, &self.process, last);
        // For one name commands that the driver retries after a failover.
        let update = match ids.len() {
            1 => locks.update_one(filter, steps),
            _ => locks.update_many(filter, steps),
        };
        let ended = update.write_concern(journaled()).await?.matched_count;
        // Even without a match: an earlier call may have ended after it marked a document.
        let marked = pipelines::marked_freed(ids, owners);
        match ids.len() {
            1 => locks.delete_one(marked).await?,
            _ => locks.delete_many(marked).await?,
        };
        Ok(ended)
    }

    /// Sends a heartbeat for these names, in a task for the locks and one for the shared names. If it fails, wakes their waiters.
    fn send_heartbeat(self: &Arc<Self>, names: Vec<Key>) {
        let (shared, locks): (Vec<Key>, Vec<Key>) = names.into_iter().partition(Key::is_shared);
        for names in [locks, shared].into_iter().filter(|names| !names.is_empty()) {
            let queue = self.clone();
            tokio::spawn(FutureExt::boxed(async move {
                let outcome = tokio::time::timeout(queue.store_timeout, queue.heartbeat(&names)).await;
                if !matches!(outcome, Ok(Ok(()))) {
                    // The waiters' own attempts report the failure, within their deadlines.
                    tracing::debug!(?outcome, "the heartbeat of the waiters failed");
                    names.iter().for_each(|key| queue.known.wake(key));
                }
            }));
        }
    }

    /// Sends a heartbeat for locks, or for shared names.
    async fn heartbeat(self: &Arc<Self>, names: &[Key]) -> Outcome<()> {
        let (steps, fields) = match names[0].is_shared() {
            true => shares::heartbeat(&self.process),
            false => pipelines::heartbeat(&self.process),
        };
        let ids: Vec<Bson> = names.iter().map(|key| shares::id(&self.prefix, key)).collect();
        let ours = pipelines::waited_for(&ids, &self.process);
        let (locks, all) = (self.pool.locks(), doc! { "_id": { "$in": &ids } });
        let is_one = names.len() == 1;
        let commands = || async move {
            if is_one {
                let update = locks.find_one_and_update(ours, steps);
                let sent = Moment::now();
                let found = update.return_document(ReturnDocument::After).projection(fields).await?;
                return Ok((sent, found.into_iter().collect()));
            }
            locks.update_many(ours, steps).await?;
            let sent = Moment::now();
            Ok((sent, locks.find(all).projection(fields).await?.try_collect().await?))
        };
        let (sent, found): (Moment, Vec<Document>) = self.pool.call(Class::Keep, commands).await?;
        found.first().into_iter().for_each(|first| self.clock.read(sent, first));
        let found: HashMap<Key, &Document> = found
            .iter()
            .filter_map(|document| Some((self.key(document.get("_id")?)?, document)))
            .collect();
        for key in names {
            match found.get(key) {
                Some(document) => {
                    let present = pipelines::owners(document);
                    self.known
                        .wake_where(|name, owner| name == key && !present.contains(owner));
                    if let Some(owner) = pipelines::handed_off_to(document, &self.process) {
                        self.known.notify(&owner);
                    }
                    self.known.set_lease_end(key, documents::remaining(document));
                    self.known.set_ahead(key, documents::ahead(document));
                }
                // The store has no waiters of this process for the name any more.
                None => self.wake_in_order(key),
            }
        }
        Ok(())
    }

    /// Subscribes a waiter to its notifications.
    pub(crate) fn subscribe(self: &Arc<Self>, claim: &Claim) -> QueueSubscription {
        QueueSubscription {
            waiter: self.known.subscribe(claim),
            queue: self.clone(),
            poll: Poll::default(),
        }
    }
}

/// The subscription of a waiter, which polls where notifications do not reach it.
pub(crate) struct QueueSubscription {
    waiter: local_waiters::WaiterSubscription<Option<StreamUse>>,
    queue: Arc<Queue>,
    poll: Poll,
}

#[async_trait]
impl Subscription for QueueSubscription {
    /// # Behavior
    /// Where the document of the name has no owner, only the first waiter of the process polls. It wakes the others.
    async fn changed(&mut self) {
        if !self.queue.watcher.is_refused() && !self.waiter.polls() {
            return self.waiter.changed().await;
        }
        loop {
            tokio::select! {
                () = self.waiter.changed() => return,
                () = self.poll.changed() => {}
            }
            if self.queue.watcher.is_refused() || self.waiter.is_first() {
                return;
            }
        }
    }

    fn take_hand_off(&mut self) -> Option<HandOff> {
        self.waiter.take_hand_off()
    }

    fn is_reliable(&self) -> bool {
        true
    }
}
