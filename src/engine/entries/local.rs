//! The waiters of this process, and the mirrors of the names that they wait for.

use std::collections::HashMap;
use std::collections::hash_map::Entry as Slot;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::mirror::{Change, Entry, Mirror};
use crate::engine::{HandOff, Subscription};
use crate::model::{Claim, Key, OwnerToken};

/// What the engine does with the watch of a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Watch {
    Open(Key),
    Close(Key),
}

/// A waiter of this process whose entry is granted now.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Granted {
    pub owner: OwnerToken,
    pub id: Arc<str>,
    /// A revision at which its entry is granted.
    pub revision: u64,
}

/// The waiters of one engine, and the mirrors of the names that they wait for.
pub(in crate::engine) struct LocalEntries {
    pub(super) state: Mutex<State>,
    watches: UnboundedSender<Watch>,
    grants: UnboundedSender<Granted>,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) waiters: HashMap<OwnerToken, Waiter>,
    names: HashMap<Key, Name>,
    /// The number of times that a claim began to wait.
    entered: u64,
    /// The number of times that the entries of a name were read.
    opened: u64,
}

#[derive(Default)]
pub(super) struct Waiter {
    notify: Arc<Notify>,
    is_subscribed: bool,
    /// The name that it waits for.
    key: Option<Key>,
    /// [`State::opened`] at the beginning of the attempt in progress, and its entries that were deleted since. `None`: there is no attempt.
    attempt: Option<(u64, Vec<Arc<str>>)>,
    /// Whether its entry was deleted, or may have been, since it was created.
    is_gone: bool,
    /// The grant that it has not taken yet.
    hand_off: Option<HandOff>,
}

/// A waiter of a name.
struct Entered {
    owner: OwnerToken,
    /// The number of waiters before it in this process.
    number: u64,
    /// Whether its grant was reported.
    is_known: bool,
}

#[derive(Default)]
struct Name {
    /// The waiters by the ids of their entries.
    waiters: HashMap<Arc<str>, Entered>,
    /// The entries, and their revision. `None`: the watch is being opened.
    mirror: Option<(u64, Mirror)>,
    /// [`State::opened`] after the entries were read.
    opened: u64,
}

impl Name {
    /// Reports the waiter whose entry holds the name, once.
    fn report(&mut self, grants: &UnboundedSender<Granted>) {
        let Some((revision, mirror)) = &self.mirror else { return };
        if let Some(id) = mirror.oldest()
            && let Some(waiter) = self.waiters.get_mut(id)
            && !std::mem::replace(&mut waiter.is_known, true)
        {
            let (owner, id, revision) = (waiter.owner.clone(), id.clone(), *revision);
            // An error means that the engine was dropped.
            let _ = grants.send(Granted { owner, id, revision });
        }
    }
}

impl LocalEntries {
    /// Creates it, with the receivers of the requests for watches and of the grants.
    pub(super) fn new() -> (Arc<Self>, UnboundedReceiver<Watch>, UnboundedReceiver<Granted>) {
        let (watches, requests) = unbounded_channel();
        let (grants, granted) = unbounded_channel();
        let state = Mutex::default();
        (Arc::new(LocalEntries { state, watches, grants }), requests, granted)
    }

    /// Subscribes a waiter to its notifications.
    pub(super) fn subscribe(self: &Arc<Self>, claim: &Claim) -> EntrySubscription {
        let mut state = self.state.lock();
        let waiter = state.waiters.entry(claim.owner.clone()).or_default();
        waiter.is_subscribed = true;
        let (entries, owner, notify) = (self.clone(), claim.owner.clone(), waiter.notify.clone());
        EntrySubscription { entries, owner, notify }
    }

    /// Begins an attempt that may create entries. Returns whether the entry of the name that it waited for is gone.
    ///
    /// # Behavior
    /// [`LocalEntries::enter`] then knows whether its entry was deleted in the meantime. Call `enter` or `leave` after the answer.
    pub(super) fn begin_attempt(&self, owner: &OwnerToken) -> bool {
        let mut state = self.state.lock();
        let opened = state.opened;
        let waiter = state.waiters.entry(owner.clone()).or_default();
        waiter.attempt = Some((opened, Vec::new()));
        std::mem::take(&mut waiter.is_gone)
    }

    /// Records that a claim waits for `key` with the entry `id`, and opens the watch for the first one.
    pub(super) fn enter(&self, owner: &OwnerToken, key: &Key, id: &Arc<str>) {
        let mut state = self.state.lock();
        let state = &mut *state;
        let waiter = state.waiters.entry(owner.clone()).or_default();
        // No event reports a deletion that happened while the watch was being opened.
        let may_be_gone = |began| {
            let name = state.names.get(key).filter(|name| name.opened > began);
            name.and_then(|name| name.mirror.as_ref())
                .is_some_and(|(_, mirror)| !mirror.has(id))
        };
        let attempt = waiter.attempt.take();
        let is_deleted = attempt.is_some_and(|(began, deleted)| deleted.contains(id) || may_be_gone(began));
        let now = (!is_deleted).then(|| key.clone());
        let before = std::mem::replace(&mut waiter.key, now.clone());
        waiter.is_gone = is_deleted;
        if is_deleted {
            waiter.notify.notify_one();
        }
        let stays = now == before && state.names.get(key).is_some_and(|name| name.waiters.contains_key(id));
        if let Some(before) = before.filter(|_| !stays) {
            self.remove(&mut state.names, &before, owner);
        }
        if is_deleted {
            return;
        }
        let name = state.names.entry(key.clone()).or_insert_with(|| {
            let _ = self.watches.send(Watch::Open(key.clone()));
            Name::default()
        });
        // A grant that was reported is not reported again.
        name.waiters.entry(id.clone()).or_insert_with(|| {
            state.entered += 1;
            Entered {
                owner: owner.clone(),
                number: state.entered,
                is_known: false,
            }
        });
        name.report(&self.grants);
    }

    /// Removes a claim from the waiters, after its grant or the end of its wait.
    pub(super) fn leave(&self, owner: &OwnerToken) {
        let mut state = self.state.lock();
        let state = &mut *state;
        let Slot::Occupied(mut waiter) = state.waiters.entry(owner.clone()) else {
            return;
        };
        let key = waiter.get_mut().key.take();
        (waiter.get_mut().attempt, waiter.get_mut().hand_off) = (None, None);
        if !waiter.get().is_subscribed {
            waiter.remove();
        }
        if let Some(key) = key {
            self.remove(&mut state.names, &key, owner);
        }
    }

    /// Removes a waiter of a name, and closes the watch after the last one.
    fn remove(&self, names: &mut HashMap<Key, Name>, key: &Key, owner: &OwnerToken) {
        if let Some(name) = names.get_mut(key) {
            name.waiters.retain(|_, waiter| waiter.owner != *owner);
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
    pub(super) fn is_subscribed(&self, owner: &OwnerToken) -> bool {
        let state = self.state.lock();
        state.waiters.get(owner).is_some_and(|waiter| waiter.is_subscribed)
    }

    /// Whether a name has waiters.
    pub(in crate::engine) fn has_waiters(&self, key: &Key) -> bool {
        self.state.lock().names.contains_key(key)
    }

    /// Whether there are no waiters.
    pub(in crate::engine) fn is_empty(&self) -> bool {
        self.state.lock().names.is_empty()
    }

    /// Reads the mirror of a name. `None`: its entries are not known.
    pub(in crate::engine) fn mirror<T>(&self, key: &Key, read: impl FnOnce(&Mirror) -> T) -> Option<T> {
        let state = self.state.lock();
        state.names.get(key)?.mirror.as_ref().map(|(_, mirror)| read(mirror))
    }

    /// Forgets the entries of a name whose watch the server has confirmed. The store then reads them. `false`: it has no waiters.
    pub(in crate::engine) fn begin_read(&self, key: &Key) -> bool {
        let mut state = self.state.lock();
        let Some(name) = state.names.get_mut(key) else {
            return false;
        };
        name.mirror = None;
        true
    }

    /// Sets the entries of a name, as they were read at `revision`: a number that grows with the changes of the store, or with the
    /// order in which this process receives its messages. Wakes the waiters whose entries are gone.
    pub(in crate::engine) fn opened(&self, key: &Key, revision: u64, entries: impl IntoIterator<Item = Entry>) {
        let mut state = self.state.lock();
        let State {
            waiters, names, opened, ..
        } = &mut *state;
        let Some(name) = names.get_mut(key) else { return };
        *opened += 1;
        name.opened = *opened;
        let mut mirror = Mirror::default();
        entries
            .into_iter()
            .for_each(|entry| mirror.apply(Change::Created(entry)));
        let gone = name.waiters.extract_if(|id, _| !mirror.has(id));
        let mut gone: Vec<Entered> = gone.map(|(_, waiter)| waiter).collect();
        gone.sort_by_key(|waiter| waiter.number);
        let woken = gone.iter().filter_map(|Entered { owner, .. }| {
            let waiter = waiters.get_mut(owner)?;
            (waiter.key, waiter.hand_off, waiter.is_gone) = (None, None, true);
            Some(waiter.notify.clone())
        });
        wake_in_order(woken.collect());
        name.mirror = Some((revision, mirror));
        name.report(&self.grants);
        if name.waiters.is_empty() {
            self.close(names, key);
        }
    }

    /// Applies all changes of one revision of the store, if it is newer than the entries.
    ///
    /// # Behavior
    /// After the deletion of a waiter's entry the store opens the watch again: at the end of a session ZooKeeper reports some deletions,
    /// in any order. The read shows all of them, so that the waiters enter again in the order of their arrival.
    pub(in crate::engine) fn changed(&self, key: &Key, revision: u64, changes: Vec<Change>) {
        let mut state = self.state.lock();
        let State { waiters, names, .. } = &mut *state;
        let mut deleted = Vec::new();
        for change in &changes {
            let Change::Deleted(id, owner) = change else { continue };
            deleted.push(id.clone());
            let waiter = owner.as_ref().and_then(|owner| waiters.get_mut(owner));
            if let Some((_, during)) = waiter.and_then(|waiter| waiter.attempt.as_mut()) {
                during.push(id.clone());
            }
        }
        let Some(name) = names.get_mut(key) else { return };
        let Some((at, mirror)) = &mut name.mirror else { return };
        if revision > *at {
            *at = revision;
            changes.into_iter().for_each(|change| mirror.apply(change));
        }
        let gone: Vec<&Entered> = deleted.iter().filter_map(|id| name.waiters.get(id)).collect();
        if gone.is_empty() {
            return name.report(&self.grants);
        }
        for Entered { owner, .. } in gone {
            if let Some(waiter) = waiters.get_mut(owner) {
                waiter.hand_off = None;
            }
        }
        name.mirror = None;
        let _ = [Watch::Close, Watch::Open].map(|watch| self.watches.send(watch(key.clone())));
    }

    /// Forgets the entries of a name whose watch was lost, until [`LocalEntries::opened`]. Returns whether they were read.
    pub(in crate::engine) fn lost(&self, key: &Key) -> bool {
        let mut state = self.state.lock();
        let name = state.names.get_mut(key);
        name.is_some_and(|name| name.mirror.take().is_some())
    }

    /// Passes its grant to a waiter. `false`: it is not a waiter any more, or its entry may be gone.
    pub(super) fn grant(&self, owner: &OwnerToken, hand_off: HandOff) -> bool {
        let mut state = self.state.lock();
        let State { waiters, names, .. } = &mut *state;
        let is_open = |key: &Key| names.get(key).is_some_and(|name| name.mirror.is_some());
        let waits = |waiter: &&mut Waiter| waiter.key.as_ref().is_some_and(is_open);
        let Some(waiter) = waiters.get_mut(owner).filter(waits) else {
            return false;
        };
        waiter.hand_off = Some(hand_off);
        waiter.notify.notify_one();
        true
    }

    /// Wakes a waiter for a new attempt.
    pub(super) fn wake(&self, owner: &OwnerToken) {
        if let Some(waiter) = self.state.lock().waiters.get(owner) {
            waiter.notify.notify_one();
        }
    }

    /// Wakes all waiters of a name for new attempts.
    pub(super) fn wake_name(&self, key: &Key) {
        let state = self.state.lock();
        let name = state.names.get(key).into_iter();
        let mut entered: Vec<&Entered> = name.flat_map(|name| name.waiters.values()).collect();
        entered.sort_by_key(|waiter| waiter.number);
        let waiters = entered.iter().filter_map(|waiter| state.waiters.get(&waiter.owner));
        wake_in_order(waiters.map(|waiter| waiter.notify.clone()).collect());
    }

    /// Returns the grant of a waiter, and removes the waiter. `None`: there is no grant, or it has ended.
    fn take_hand_off(&self, owner: &OwnerToken) -> Option<HandOff> {
        let hand_off = self.state.lock().waiters.get_mut(owner)?.hand_off.take();
        let hand_off = hand_off.filter(|hand_off| !hand_off.until.is_past())?;
        self.leave(owner);
        Some(hand_off)
    }
}

/// Wakes waiters, so that their attempts are made in this order.
///
/// # Behavior
/// A runtime may poll the task that was woken last first. So the first one is woken before the others: while its attempt is in progress,
/// the service puts the others in order.
fn wake_in_order(woken: Vec<Arc<Notify>>) {
    const START: Duration = Duration::from_millis(5);
    let mut woken = woken.into_iter();
    woken.next().iter().for_each(|first| first.notify_one());
    if woken.len() > 0 {
        tokio::spawn(Box::pin(async move {
            tokio::time::sleep(START).await;
            woken.for_each(|next| next.notify_one());
        }));
    }
}

/// A waiter's subscription to its notifications.
pub(in crate::engine) struct EntrySubscription {
    entries: Arc<LocalEntries>,
    owner: OwnerToken,
    notify: Arc<Notify>,
}

#[async_trait]
impl Subscription for EntrySubscription {
    async fn changed(&mut self) {
        self.notify.notified().await;
    }

    fn take_hand_off(&mut self) -> Option<HandOff> {
        self.entries.take_hand_off(&self.owner)
    }

    fn is_reliable(&self) -> bool {
        true
    }
}

impl Drop for EntrySubscription {
    fn drop(&mut self) {
        let mut state = self.entries.state.lock();
        if let Slot::Occupied(mut waiter) = state.waiters.entry(self.owner.clone()) {
            waiter.get_mut().is_subscribed = false;
            if waiter.get().key.is_none() {
                waiter.remove();
            }
        }
    }
}
