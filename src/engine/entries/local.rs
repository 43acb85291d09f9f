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
    pub entry: Entry,
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
}

#[derive(Default)]
pub(super) struct Waiter {
    notify: Arc<Notify>,
    is_subscribed: bool,
    /// The name that it waits for, and the id of its entry, unless that is gone.
    entered: Option<(Key, Arc<str>)>,
    /// The grant that it has not taken yet.
    hand_off: Option<HandOff>,
}

/// A waiter of a name.
struct Entered {
    owner: OwnerToken,
    position: u64,
    /// Whether its grant was reported.
    is_known: bool,
}

#[derive(Default)]
struct Name {
    /// The waiters by the ids of their entries.
    waiters: HashMap<Arc<str>, Entered>,
    /// The entries, and their revision. `None`: the watch is being opened.
    mirror: Option<(u64, Mirror)>,
}

impl Name {
    /// Reports the waiters whose entries are granted, each one once.
    fn report(&mut self, grants: &UnboundedSender<Granted>) {
        let Some((revision, mirror)) = &self.mirror else { return };
        for entry in mirror.granted() {
            // An entry that was created again has the same id on etcd, and another position.
            let waiter = self.waiters.get_mut(&entry.id);
            if let Some(waiter) = waiter.filter(|waiter| waiter.position == entry.position)
                && !std::mem::replace(&mut waiter.is_known, true)
            {
                let (owner, revision) = (waiter.owner.clone(), *revision);
                // An error means that the engine was dropped.
                let _ = grants.send(Granted { owner, entry, revision });
            }
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

    /// Whether a claim waits for a name, and its entry is not gone.
    pub(super) fn waits(&self, owner: &OwnerToken) -> bool {
        let state = self.state.lock();
        state.waiters.get(owner).is_some_and(|waiter| waiter.entered.is_some())
    }

    /// Records that a claim waits for `key` with `entry`, and opens the watch for the first one. Wakes the waiter if its entry is gone.
    pub(super) fn enter(&self, owner: &OwnerToken, key: &Key, Entry { id, position, .. }: Entry) {
        let mut state = self.state.lock();
        let state = &mut *state;
        let waiter = state.waiters.entry(owner.clone()).or_default();
        let mirror = state.names.get(key).and_then(|name| name.mirror.as_ref());
        // No event will report a deletion that the mirror has applied.
        let is_gone = mirror.is_some_and(|(at, mirror)| *at >= position && !mirror.has(&id));
        let now = (!is_gone).then(|| (key.clone(), id.clone()));
        let before = std::mem::replace(&mut waiter.entered, now.clone());
        if before != now {
            self.remove(&mut state.names, before);
        }
        if is_gone {
            return waiter.notify.notify_one();
        }
        let name = state.names.entry(key.clone()).or_insert_with(|| {
            let _ = self.watches.send(Watch::Open(key.clone()));
            Name::default()
        });
        // A grant that was reported is not reported again, unless the entry was created again.
        let is_same = |entered: &&Entered| entered.position == position;
        let is_known = name
            .waiters
            .get(&id)
            .filter(is_same)
            .is_some_and(|entered| entered.is_known);
        let owner = owner.clone();
        name.waiters.insert(
            id,
            Entered {
                owner,
                position,
                is_known,
            },
        );
        name.report(&self.grants);
    }

    /// Removes a claim from the waiters, after its grant or the end of its wait.
    pub(super) fn leave(&self, owner: &OwnerToken) {
        let mut state = self.state.lock();
        let state = &mut *state;
        let Slot::Occupied(mut waiter) = state.waiters.entry(owner.clone()) else {
            return;
        };
        let entered = waiter.get_mut().entered.take();
        waiter.get_mut().hand_off = None;
        if !waiter.get().is_subscribed {
            waiter.remove();
        }
        self.remove(&mut state.names, entered);
    }

    /// Removes a waiter of a name, and closes the watch after the last one.
    fn remove(&self, names: &mut HashMap<Key, Name>, entered: Option<(Key, Arc<str>)>) {
        let Some((key, id)) = entered else { return };
        if let Slot::Occupied(mut name) = names.entry(key.clone()) {
            name.get_mut().waiters.remove(&id);
            if name.get().waiters.is_empty() {
                name.remove();
                let _ = self.watches.send(Watch::Close(key));
            }
        }
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
    /// order in which this process receives its messages. It is not smaller than the position of an entry that the mirror contains, or has
    /// contained. Wakes the waiters whose entries are gone.
    pub(in crate::engine) fn opened(&self, key: &Key, revision: u64, entries: impl IntoIterator<Item = Entry>) {
        let mut state = self.state.lock();
        let State { waiters, names } = &mut *state;
        let Some(name) = names.get_mut(key) else { return };
        let mut mirror = Mirror::default();
        entries
            .into_iter()
            .for_each(|entry| mirror.apply(Change::Created(entry)));
        // An event will report the entries that were created after the read.
        let gone = name
            .waiters
            .extract_if(|id, waiter| waiter.position <= revision && !mirror.has(id));
        let mut gone: Vec<Entered> = gone.map(|(_, waiter)| waiter).collect();
        gone.sort_by_key(|waiter| waiter.position);
        let woken = gone.iter().filter_map(|Entered { owner, .. }| {
            let waiter = waiters.get_mut(owner)?;
            (waiter.entered, waiter.hand_off) = (None, None);
            Some(waiter.notify.clone())
        });
        wake_in_order(woken.collect());
        name.mirror = Some((revision, mirror));
        name.report(&self.grants);
        if name.waiters.is_empty() {
            names.remove(key);
            let _ = self.watches.send(Watch::Close(key.clone()));
        }
    }

    /// Applies all changes of one revision of the store, if it is newer than the entries.
    ///
    /// # Behavior
    /// After the deletion of a waiter's entry the store opens the watch again: at the end of a session ZooKeeper reports some deletions,
    /// in any order. The read shows all of them, so that the waiters enter again in the order of their arrival.
    pub(in crate::engine) fn changed(&self, key: &Key, revision: u64, changes: Vec<Change>) {
        let mut state = self.state.lock();
        let State { waiters, names } = &mut *state;
        let Some(name) = names.get_mut(key) else { return };
        let Some((at, mirror)) = name.mirror.as_mut().filter(|(at, _)| revision > *at) else {
            return;
        };
        *at = revision;
        let mut is_gone = false;
        for change in changes {
            if let Change::Deleted(id) = &change
                && let Some(Entered { owner, .. }) = name.waiters.get(id)
            {
                is_gone = true;
                if let Some(waiter) = waiters.get_mut(owner) {
                    waiter.hand_off = None;
                }
            }
            mirror.apply(change);
        }
        if !is_gone {
            return name.report(&self.grants);
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
        let State { waiters, names } = &mut *state;
        let is_open = |key: &Key| names.get(key).is_some_and(|name| name.mirror.is_some());
        let waits = |waiter: &&mut Waiter| waiter.entered.as_ref().is_some_and(|(key, _)| is_open(key));
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
        entered.sort_by_key(|waiter| waiter.position);
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
            if waiter.get().entered.is_none() {
                waiter.remove();
            }
        }
    }
}
