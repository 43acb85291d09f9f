//! The waiters of this process, in stores where the order of entries is the lock (etcd, ZooKeeper).
//!
//! Each claim has an entry below its name. The store numbers entries in the order of their creation, and removes an entry when its
//! claim ends or its process dies. The oldest entries that fit hold the name (`mirror.rs`). So the deletion of the holder's entry
//! is the grant of the next one, and each process finds it in its mirror of the name.
//!
//! The first waiter of a name opens the watch ([`Watch::Open`]). The engine waits until the server has confirmed it, reads the
//! entries once, and reports the changes that are newer than the read. The last waiter closes it.

mod mirror;
mod subscription;
pub(in crate::engine) mod target;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::collections::hash_map::Entry as Slot;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use self::mirror::Mirror;
pub(in crate::engine) use self::mirror::{Change, Entry, Share};
#[cfg(feature = "etcd")]
pub(in crate::engine) use self::mirror::Place;
pub(in crate::engine) use self::subscription::EntrySubscription;
use super::HandOff;
use crate::model::{Claim, Key, OwnerToken};

/// What the engine does with the watch of a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::engine) enum Watch {
    /// Opens it: calls [`LocalEntries::begin_read`] when the server has confirmed it, and [`LocalEntries::opened`] with the
    /// entries. Repeats that after the watch was lost.
    Open(Key),
    Close(Key),
}

/// A waiter of this process whose entry is granted now.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::engine) struct Granted {
    pub key: Key,
    pub owner: OwnerToken,
    /// A revision at which its entry is granted.
    pub revision: u64,
}

/// The waiters of one engine, and the mirrors of the names that they wait for.
pub(in crate::engine) struct LocalEntries {
    state: Mutex<State>,
    watches: UnboundedSender<Watch>,
}

#[derive(Default)]
struct State {
    waiters: HashMap<OwnerToken, Waiter>,
    names: HashMap<Key, Name>,
}

#[derive(Default)]
struct Waiter {
    notify: Arc<Notify>,
    is_subscribed: bool,
    /// The name that it waits for.
    key: Option<Key>,
    /// The first name of its attempt in progress, until it has entered.
    attempted: Option<Key>,
    /// Its entry of that name was deleted during the attempt.
    is_deleted: bool,
    /// The grant that it has not taken yet.
    hand_off: Option<HandOff>,
}

#[derive(Default)]
struct Name {
    /// The waiters by the ids of their entries. `true`: the engine knows that it is granted.
    waiters: HashMap<Arc<str>, (OwnerToken, bool)>,
    /// The entries, and their revision. `None`: the watch is being opened.
    mirror: Option<(u64, Mirror)>,
    /// The changes since the watch was confirmed, with their revisions, until the entries are read.
    newer: Vec<(u64, Change)>,
    /// The ids of the waiters whose entries existed before the read in progress.
    expected: Vec<Arc<str>>,
}

impl Name {
    fn apply(&mut self, revision: u64, changes: impl IntoIterator<Item = Change>) {
        let Some((at, mirror)) = &mut self.mirror else {
            self.newer.extend(changes.into_iter().map(|change| (revision, change)));
            return;
        };
        if revision > *at {
            *at = revision;
            changes.into_iter().for_each(|change| mirror.apply(change));
        }
    }

    /// Returns the waiters that are granted since the last call.
    fn newly_granted(&mut self, key: &Key) -> Vec<Granted> {
        let Some((revision, mirror)) = &self.mirror else {
            return Vec::new();
        };
        let mut found = Vec::new();
        for id in mirror.granted() {
            if let Some((owner, is_known)) = self.waiters.get_mut(id)
                && !std::mem::replace(is_known, true)
            {
                found.push(Granted {
                    key: key.clone(),
                    owner: owner.clone(),
                    revision: *revision,
                });
            }
        }
        found
    }
}

impl State {
    /// Makes a waiter whose entry is gone leave its name, and wakes it for a new attempt. Returns whether the name has no waiters.
    fn gone(&mut self, key: &Key, id: &str) -> bool {
        let Some(name) = self.names.get_mut(key) else {
            return false;
        };
        let Some((owner, _)) = name.waiters.remove(id) else {
            return false;
        };
        let is_last = name.waiters.is_empty();
        if let Some(waiter) = self.waiters.get_mut(&owner) {
            (waiter.key, waiter.hand_off) = (None, None);
            waiter.notify.notify_one();
        }
        is_last
    }
}

impl LocalEntries {
    /// Creates the list, and the requests for watches, which the engine executes in their order.
    pub(in crate::engine) fn new() -> (Arc<Self>, UnboundedReceiver<Watch>) {
        let (watches, requests) = unbounded_channel();
        let state = Mutex::default();
        (Arc::new(LocalEntries { state, watches }), requests)
    }

    /// Subscribes a waiter to its notifications.
    pub(in crate::engine) fn subscribe(self: &Arc<Self>, claim: &Claim) -> EntrySubscription {
        let mut state = self.state.lock();
        let waiter = state.waiters.entry(claim.owner.clone()).or_default();
        waiter.is_subscribed = true;
        EntrySubscription::new(self.clone(), claim.owner.clone(), waiter.notify.clone())
    }

    /// Begins an attempt that may create an entry of `key` with the owner token as its id.
    ///
    /// # Behavior
    /// [`LocalEntries::enter`] then knows whether that entry was deleted in the meantime. Call `enter` or `leave` after the answer.
    pub(in crate::engine) fn begin_attempt(&self, owner: &OwnerToken, key: &Key) {
        let mut state = self.state.lock();
        let waiter = state.waiters.entry(owner.clone()).or_default();
        (waiter.attempted, waiter.is_deleted) = (Some(key.clone()), false);
    }

    /// Records that a claim waits for `key` with the entry `id`, and opens the watch for the first one. Returns the waiters that
    /// are granted now.
    #[must_use]
    pub(in crate::engine) fn enter(&self, owner: &OwnerToken, key: &Key, id: &Arc<str>) -> Vec<Granted> {
        let mut state = self.state.lock();
        let state = &mut *state;
        let waiter = state.waiters.entry(owner.clone()).or_default();
        let is_deleted = std::mem::take(&mut waiter.is_deleted) && waiter.attempted.as_ref() == Some(key);
        waiter.attempted = None;
        let before = waiter.key.replace(key.clone());
        if is_deleted {
            waiter.key = None;
            waiter.notify.notify_one();
        }
        if let Some(before) = before
            && (is_deleted || before != *key)
        {
            self.remove(&mut state.names, &before, owner);
        }
        if is_deleted {
            return Vec::new();
        }
        let name = state.names.entry(key.clone()).or_insert_with(|| {
            let _ = self.watches.send(Watch::Open(key.clone()));
            Name::default()
        });
        // A grant that it has not taken stays known.
        name.waiters.entry(id.clone()).or_insert((owner.clone(), false));
        name.newly_granted(key)
    }

    /// Makes a claim leave, after its grant or the end of its wait.
    pub(in crate::engine) fn leave(&self, owner: &OwnerToken) {
        let mut state = self.state.lock();
        let state = &mut *state;
        let Slot::Occupied(mut waiter) = state.waiters.entry(owner.clone()) else {
            return;
        };
        let key = waiter.get_mut().key.take();
        (waiter.get_mut().attempted, waiter.get_mut().hand_off) = (None, None);
        if !waiter.get().is_subscribed {
            waiter.remove();
        }
        if let Some(key) = key {
            self.remove(&mut state.names, &key, owner);
        }
    }

    /// Removes a waiter of a name, and closes the watch behind the last one.
    fn remove(&self, names: &mut HashMap<Key, Name>, key: &Key, owner: &OwnerToken) {
        if let Some(name) = names.get_mut(key) {
            name.waiters.retain(|_, (waiter, _)| waiter != owner);
            if name.waiters.is_empty() {
                self.close(names, key);
            }
        }
    }

    fn close(&self, names: &mut HashMap<Key, Name>, key: &Key) {
        names.remove(key);
        let _ = self.watches.send(Watch::Close(key.clone()));
    }

    /// Whether a waiter has a subscription.
    #[cfg(feature = "zookeeper")]
    pub(in crate::engine) fn is_subscribed(&self, owner: &OwnerToken) -> bool {
        let state = self.state.lock();
        state.waiters.get(owner).is_some_and(|waiter| waiter.is_subscribed)
    }

    /// Whether there are no waiters.
    #[cfg(feature = "etcd")]
    pub(in crate::engine) fn is_empty(&self) -> bool {
        self.state.lock().names.is_empty()
    }

    /// Returns the names with waiters.
    pub(in crate::engine) fn names(&self) -> Vec<Key> {
        self.state.lock().names.keys().cloned().collect()
    }

    /// Begins to keep the changes of a name, whose watch the server has confirmed. The engine then reads its entries. `false`:
    /// the name has no waiters any more.
    pub(in crate::engine) fn begin_read(&self, key: &Key) -> bool {
        let mut state = self.state.lock();
        let Some(name) = state.names.get_mut(key) else {
            return false;
        };
        (name.mirror, name.newer) = (None, Vec::new());
        name.expected = name.waiters.keys().cloned().collect();
        true
    }

    /// Sets the entries of a name, as they were read at `revision`: a number that grows with the changes of the store, or with the
    /// order in which this process receives its messages. Applies the changes that are newer, and wakes the waiters whose entries
    /// are gone. Returns those that are granted.
    #[must_use]
    pub(in crate::engine) fn opened(
        &self,
        key: &Key,
        revision: u64,
        entries: impl IntoIterator<Item = Entry>,
    ) -> Vec<Granted> {
        let mut state = self.state.lock();
        let Some(name) = state.names.get_mut(key) else {
            return Vec::new();
        };
        let mut mirror = Mirror::default();
        entries
            .into_iter()
            .for_each(|entry| mirror.apply(Change::Created(entry)));
        name.mirror = Some((revision, mirror));
        for (at, change) in std::mem::take(&mut name.newer) {
            if let Some((last, mirror)) = &mut name.mirror
                && at > revision
            {
                *last = at.max(*last);
                mirror.apply(change);
            }
        }
        let is_gone = |id: &Arc<str>| name.mirror.as_ref().is_some_and(|(_, mirror)| !mirror.has(id));
        let gone: Vec<_> = std::mem::take(&mut name.expected).into_iter().filter(is_gone).collect();
        self.decide(&mut state, key, &gone)
    }

    /// Applies all changes of one revision of the store, and wakes the waiters whose entries were deleted. Returns those that are
    /// granted.
    #[must_use]
    pub(in crate::engine) fn changed(&self, key: &Key, revision: u64, changes: Vec<Change>) -> Vec<Granted> {
        let mut state = self.state.lock();
        let deleted: Vec<Arc<str>> = changes
            .iter()
            .filter_map(|change| match change {
                Change::Deleted(id) => Some(id.clone()),
                Change::Created(_) => None,
            })
            .collect();
        for id in &deleted {
            if let Ok(owner) = OwnerToken::parse(id)
                && let Some(waiter) = state.waiters.get_mut(&owner)
                && waiter.attempted.as_ref() == Some(key)
            {
                waiter.is_deleted = true;
            }
        }
        let Some(name) = state.names.get_mut(key) else {
            return Vec::new();
        };
        name.apply(revision, changes);
        let gone: &[_] = if name.mirror.is_some() { &deleted } else { &[] };
        self.decide(&mut state, key, gone)
    }

    fn decide(&self, state: &mut State, key: &Key, gone: &[Arc<str>]) -> Vec<Granted> {
        for id in gone {
            if state.gone(key, id) {
                self.close(&mut state.names, key);
            }
        }
        let name = state.names.get_mut(key);
        name.map(|name| name.newly_granted(key)).unwrap_or_default()
    }

    /// Forgets the entries of a name whose watch was lost, until [`LocalEntries::opened`].
    pub(in crate::engine) fn lost(&self, key: &Key) {
        if let Some(name) = self.state.lock().names.get_mut(key) {
            (name.mirror, name.newer) = (None, Vec::new());
        }
    }

    /// Passes its grant to a waiter. `false`: it is not a waiter any more.
    pub(in crate::engine) fn grant(&self, owner: &OwnerToken, hand_off: HandOff) -> bool {
        let mut state = self.state.lock();
        let Some(waiter) = state.waiters.get_mut(owner).filter(|waiter| waiter.key.is_some()) else {
            return false;
        };
        waiter.hand_off = Some(hand_off);
        waiter.notify.notify_one();
        true
    }

    /// Wakes a waiter for a new attempt.
    pub(in crate::engine) fn wake(&self, owner: &OwnerToken) {
        if let Some(waiter) = self.state.lock().waiters.get(owner) {
            waiter.notify.notify_one();
        }
    }

    /// Wakes all waiters of a name for new attempts.
    pub(in crate::engine) fn wake_name(&self, key: &Key) {
        let state = self.state.lock();
        let owners = state.names.get(key).into_iter().flat_map(|name| name.waiters.values());
        let waiters = owners.filter_map(|(owner, _)| state.waiters.get(owner));
        waiters.for_each(|waiter| waiter.notify.notify_one());
    }

    /// Takes the grant of a waiter, which then has left. `None`: there is none, or it has ended.
    fn take_hand_off(&self, owner: &OwnerToken) -> Option<HandOff> {
        let hand_off = self.state.lock().waiters.get_mut(owner)?.hand_off.take();
        let hand_off = hand_off.filter(|hand_off| !hand_off.until.is_past())?;
        self.leave(owner);
        Some(hand_off)
    }
}
