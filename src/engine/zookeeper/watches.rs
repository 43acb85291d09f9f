//! The tasks of an engine: what changes by itself. The events of watches grant names to waiters; leases and positions end; fencing
//! tokens are written.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tokio::sync::mpsc::UnboundedReceiver;

use super::Store;
use super::client::{self, Event, Failure, Part, Request, code};
use super::layout::Child;
use super::own::{Node, Own, Phase};
use crate::clock::Moment;
use crate::engine::entries::{Change, Granted, Watch};
use crate::engine::{HandOff, RESERVATION};
use crate::model::{Fence, Key, OwnerToken, Ttl};

/// How long a waiter without a subscription keeps its place after its last attempt, unless its ttl is shorter.
const LIVENESS: Duration = Duration::from_millis(4500);
/// The time from a grant until its fencing token is written. Most locks are released before.
pub(super) const RECORD_DELAY: Duration = Duration::from_millis(50);
/// The time until a fencing token that could not be written is written again.
const RECORD_RETRY: Duration = Duration::from_millis(500);
/// The time until an end is tried again, while data is written.
const WRITE_DELAY: Duration = Duration::from_millis(5);
/// The time until a watch that the server has refused is tried again.
const WATCH_RETRY: Duration = Duration::from_secs(1);
/// The time until entries that could not be deleted are deleted again.
const DELETE_RETRY: Duration = Duration::from_millis(100);

/// Returns how long a position lives without an attempt.
pub(super) fn liveness(ttl: Ttl) -> Duration {
    ttl.duration().min(LIVENESS)
}

impl Store {
    /// Handles an event, on the task of the connection.
    pub(super) fn handle(self: &Arc<Self>, event: Event<'_>) {
        match event {
            Event::Connected => {
                for key in self.entries.names() {
                    self.entries.lost(&key);
                    self.open_watch(&key);
                }
            }
            Event::Node { path, change } => {
                let Some((key, child)) = self.layout.split(path) else {
                    return;
                };
                let Some(child) = Child::parse(child) else { return };
                let change = match change {
                    client::Change::Created => Change::Created(child.mirrored()),
                    client::Change::Deleted => Change::Deleted(child.id()),
                    client::Change::Other => return,
                };
                let granted = self.entries.changed(&key, self.next_revision(), vec![change]);
                self.grant(granted);
            }
        }
    }

    fn next_revision(&self) -> u64 {
        self.revision.fetch_add(1, Relaxed) + 1
    }

    /// Opens and closes the watches of names.
    pub(super) async fn run_watches(self: Arc<Self>, mut watches: UnboundedReceiver<Watch>) {
        while let Some(watch) = watches.recv().await {
            match watch {
                Watch::Open(key) => self.open_watch(&key),
                Watch::Close(key) => {
                    let request = Request::remove_watches(&self.layout.folder(&key));
                    self.client.call_in_order(request, |_| {});
                }
            }
        }
    }

    /// Opens the watch of a name and reads its entries.
    fn open_watch(self: &Arc<Self>, key: &Key) {
        let folder = self.layout.folder(key);
        let (weak, name) = (Arc::downgrade(self), key.clone());
        self.client.call_in_order(Request::add_watch(&folder), move |answer| {
            let Some(store) = weak.upgrade() else { return };
            match answer {
                Ok(_) => _ = store.entries.begin_read(&name),
                Err(failure) => store.watch_failed(name, &failure),
            }
        });
        let (weak, name) = (Arc::downgrade(self), key.clone());
        self.client.call_in_order(Request::children(&folder), move |answer| {
            let Some(store) = weak.upgrade() else { return };
            let names = match answer.and_then(|reply| Ok(reply.children()?.0)) {
                Ok(names) => names,
                // The server has removed the empty folder.
                Err(Failure::Refused(code::NO_NODE)) => Vec::new(),
                Err(failure) => return store.watch_failed(name, &failure),
            };
            let entries = Child::all(&names).into_iter().map(|child| child.mirrored());
            let granted = store.entries.opened(&name, store.next_revision(), entries);
            store.grant(granted);
        });
    }

    /// Makes the waiters of a name attempt, because the server has refused the watch. (After a broken connection, all are opened.)
    fn watch_failed(self: &Arc<Self>, key: Key, failure: &Failure) {
        tracing::debug!(?failure, %key, "no watch");
        if !matches!(failure, Failure::Refused(_) | Failure::Malformed) {
            return;
        }
        let weak = Arc::downgrade(self);
        tokio::spawn(Box::pin(async move {
            tokio::time::sleep(WATCH_RETRY).await;
            if let Some(store) = weak.upgrade().filter(|store| store.entries.names().contains(&key)) {
                store.entries.wake_name(&key);
                store.open_watch(&key);
            }
        }));
    }

    /// Passes names to the waiters whose entries are the oldest now. A claim of several names makes an attempt.
    pub(super) fn grant(self: &Arc<Self>, granted: Vec<Granted>) {
        for Granted { key, owner, .. } in granted {
            let own = self.own.get(&owner).filter(|own| !own.is_set);
            let Some(Own {
                nodes,
                needs_token,
                session,
                ..
            }) = own
            else {
                self.entries.wake(&owner);
                continue;
            };
            if !needs_token {
                self.hand_off(&owner, Fence::NONE, session);
                continue;
            }
            let Some(Node { child, .. }) = nodes.into_iter().next() else {
                continue;
            };
            // The token of a state that has the entry: it is the oldest one in it.
            let reads = [
                Request::data(&self.layout.entry(&key, &child.name)),
                Request::data(&self.layout.folder(&key)),
            ];
            let weak = Arc::downgrade(self);
            self.client.call_in_order(Request::multi_read(&reads), move |answer| {
                let Some(store) = weak.upgrade() else { return };
                let parts = answer.and_then(|reply| Ok(reply.parts()?));
                match parts.as_deref() {
                    Ok([Part::Data(..), Part::Data(_, folder)]) => {
                        store.hand_off(&owner, Fence(folder.last_child_change as u64), session);
                    }
                    _ => store.entries.wake(&owner),
                }
            });
        }
    }

    fn hand_off(&self, owner: &OwnerToken, fence: Fence, session: i64) {
        let state = self.client.state();
        let is_subscribed = self.entries.is_subscribed(owner);
        let ttl = self.own.update(owner, |own| {
            if own.phase != Phase::Waiting || state.id != session {
                return None;
            }
            own.set_phase(Phase::Held(fence));
            Some(own.record.ttl())
        });
        let Some(ttl) = ttl.flatten() else {
            return self.entries.wake(owner);
        };
        let now = Moment::now();
        if is_subscribed {
            self.ends
                .insert(owner.clone(), (), now + ttl.duration().min(RESERVATION));
        }
        self.records.insert(owner.clone(), (), now + RECORD_DELAY);
        let until = state.until.min(now + ttl.validity());
        self.entries.grant(owner, HandOff { fence, until });
    }

    /// Ends leases at their ttl, and the positions of waiters that make no more attempts.
    pub(super) async fn run_ends(self: Arc<Self>) {
        loop {
            for (owner, ()) in self.ends.due().await {
                self.end(&owner);
            }
        }
    }

    fn end(self: &Arc<Self>, owner: &OwnerToken) {
        // The versions of entries are not known while data is written: the deletion would find another one.
        let Ok(_guard) = self.writes.try_lock() else {
            return self.ends.insert(owner.clone(), (), Moment::now() + WRITE_DELAY);
        };
        let Some(own) = self.own.get(owner) else { return };
        if own.phase == Phase::Waiting && self.entries.is_subscribed(owner) {
            let ttl = own.record.ttl();
            let is_stalled = self.stall_detector.get().is_some_and(|detector| {
                detector.ping();
                detector.is_stalled(ttl)
            });
            if !is_stalled {
                return self.ends.insert(owner.clone(), (), Moment::now() + liveness(ttl));
            }
        }
        self.forget(owner);
        let paths = own
            .nodes
            .iter()
            .map(|node| self.layout.entry(&node.key, &node.child.name));
        let paths: Vec<String> = paths.collect();
        self.ending.lock().extend(paths.iter().cloned());
        self.entries.wake(owner);
        let store = self.clone();
        tokio::spawn(Box::pin(async move {
            store.delete(own).await;
            store.ending.lock().retain(|path| !paths.contains(path));
        }));
    }

    /// Removes what this engine knows about a claim.
    pub(super) fn forget(&self, owner: &OwnerToken) -> Option<Own> {
        self.ends.remove(owner);
        self.records.remove(owner);
        self.entries.leave(owner);
        self.own.remove(owner)
    }

    /// Deletes entries that have not changed since, until the session ends.
    async fn delete(&self, mut own: Own) {
        while !own.nodes.is_empty() && self.client.state().id == own.session {
            let deletion = |node: &Node| Request::delete(&self.layout.entry(&node.key, &node.child.name), node.version);
            let answers: Vec<_> = own
                .nodes
                .iter()
                .map(|node| self.client.call_urgently(deletion(node)))
                .collect();
            let mut left = Vec::new();
            for (node, answer) in own.nodes.into_iter().zip(answers) {
                match answer.await {
                    Ok(_) | Err(Failure::Refused(_)) => {}
                    Err(Failure::Closed) => return,
                    Err(_) => left.push(node),
                }
            }
            own.nodes = left;
            if !own.nodes.is_empty() {
                tokio::time::sleep(DELETE_RETRY).await;
            }
        }
    }

    /// Writes the fencing tokens of grants.
    pub(super) async fn run_records(self: Arc<Self>) {
        loop {
            let due = self.records.due().await;
            let _guard = self.writes.lock().await;
            let mut writes = Vec::new();
            for (owner, ()) in due {
                let Some(own) = self.own.get(&owner) else { continue };
                let Phase::Held(fence) = own.phase else { continue };
                let mut record = own.record.clone();
                record.fence = Some(fence.0);
                writes.push((owner, self.begin_write(&own, &record), record));
            }
            for (owner, answers, record) in writes {
                if let Err(failure) = self.finish_write(&owner, answers, record).await {
                    tracing::debug!(?failure, "a fencing token was not written");
                    if self.own.get(&owner).is_some() {
                        self.records.insert(owner, (), Moment::now() + RECORD_RETRY);
                    }
                }
            }
        }
    }
}
