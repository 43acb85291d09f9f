//! Who of this process waits for which name, and the process's part in the queues.
//!
//! # Behavior
//! Each waiter has a place of its own in the queue of its name, so that all waiters of all processes are served in the
//! order of their arrival. What they share is the process's mailbox, one channel on which the server names the waiter
//! that a name was handed to, and its sign of life: while anybody waits, one script every [`BEAT`] says for all names
//! that this process still lives. The same script is run when the lease in a waiter's way ends, and hands on what has
//! become free: a holder that died needs no help of its own.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use async_trait::async_trait;
use redis::Value;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::failure::Failure;
use super::keys::{Layout, Part};
use super::route::{Ear, Route};
use super::scripts::{BEAT as SCRIPT, DISOWN};
use crate::engine::{Subscription, WAITER_LIVENESS};
use crate::model::{Claim, Key, OwnerToken};

/// How often a process with waiters gives a sign of life: twice within the time for which one counts.
const BEAT: Duration = Duration::from_secs(2);
/// How long a name that was handed to a waiter is kept for it, if its ttl is not shorter: `RESERVED_MS` in `queue.lua`.
const RESERVED: Duration = Duration::from_secs(2);
/// The most names in one script, so that the server is not kept from others for long.
const NAMES_AT_ONCE: usize = 100;

/// The waiters of one engine.
pub(super) struct Waiters {
    route: Route,
    layout: Layout,
    /// By what the queues know this engine: random, hexadecimal.
    pub(super) process: String,
    state: Mutex<State>,
    /// Something is due earlier than the guard thinks.
    earlier: Notify,
}

#[derive(Default)]
struct State {
    waiters: HashMap<OwnerToken, Waiter>,
    names: HashMap<Key, Watched>,
    /// The mailboxes that are open, by slot.
    ears: HashMap<u16, Weak<Ear>>,
    /// The only one, where there are no slots: it stays open.
    kept: Option<Arc<Ear>>,
    /// When the guard looks next; `None` while there is none.
    next_look: Option<Instant>,
}

#[derive(Default)]
struct Waiter {
    told: Arc<Notify>,
    /// Whether somebody listens to `told`.
    subscribed: bool,
    /// Where it waits, with its number there.
    place: Option<(Key, u64)>,
}

/// A name that somebody of this process waits for.
struct Watched {
    waiters: usize,
    /// When the lease in the way ends, as far as is known.
    due: Instant,
    /// Where its waiters are told.
    _ear: Arc<Ear>,
}

impl Waiters {
    pub(super) fn new(route: Route, layout: Layout) -> Arc<Self> {
        Arc::new(Waiters {
            route,
            layout,
            process: format!("{:016x}", fastrand::u64(..)),
            state: Mutex::default(),
            earlier: Notify::new(),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// By what the queues know a waiter of this engine: a member as in `queue.lua`.
    pub(super) fn member(&self, claim: &Claim) -> String {
        let (process, owner) = (&self.process, claim.owner.as_str());
        if claim.ttl.duration() < RESERVED {
            format!("{process}:{owner}:{}", claim.ttl.as_millis())
        } else {
            format!("{process}:{owner}")
        }
    }

    /// The mailbox for a slot, if it is open: whether this engine would hear of a name that is handed to it.
    pub(super) fn ear(&self, slot: u16) -> Option<Arc<Ear>> {
        self.state().ears.get(&slot).and_then(Weak::upgrade)
    }

    /// Opens the mailbox for a slot, for as long as somebody waits there. Where there are no slots it stays open for as
    /// long as the engine lives.
    pub(super) async fn listen(self: &Arc<Self>, slot: u16) -> Result<Arc<Ear>, Failure> {
        let waiters = Arc::downgrade(self);
        let deliver = Arc::new(move |message: &[u8]| {
            if let Some(waiters) = waiters.upgrade() {
                waiters.deliver(message);
            }
        });
        let ear = Arc::new(self.route.listen(slot, &self.process, deliver).await?);
        let mut state = self.state();
        if let Some(other) = state.ears.get(&slot).and_then(Weak::upgrade) {
            drop(state);
            return Ok(other);
        }
        state.ears.retain(|_, ear| ear.strong_count() > 0);
        state.ears.insert(slot, Arc::downgrade(&ear));
        if !self.route.is_cluster() {
            state.kept = Some(ear.clone());
        }
        Ok(ear)
    }

    /// Wakes the waiter that a message names; all of them when it names none, after a connection was lost.
    fn deliver(self: &Arc<Self>, message: &[u8]) {
        let state = self.state();
        if message.is_empty() {
            for waiter in state.waiters.values() {
                waiter.told.notify_one();
            }
            return;
        }
        // Other messages are not for us to understand.
        let Some((member, lock)) = std::str::from_utf8(message).ok().and_then(|text| text.split_once(' ')) else {
            return;
        };
        let Some(owner) = member.split(':').nth(1).and_then(|owner| OwnerToken::parse(owner).ok()) else {
            return;
        };
        match state.waiters.get(&owner) {
            Some(waiter) => waiter.told.notify_one(),
            None => {
                let (waiters, member, lock) = (self.clone(), member.to_owned(), lock.to_owned());
                self.route.runtime().spawn(async move {
                    if let Err(failure) = waiters.disown(&member, &lock).await {
                        // Its place costs the others some time more: whom it is handed to is asked again.
                        tracing::debug!(%failure, "a waiter that nobody knows could not be disowned");
                    }
                });
            }
        }
    }

    /// Takes away the place of a waiter that this process does not know. Else the name would be handed to it again and
    /// again: its process is alive, after all.
    async fn disown(&self, member: &str, lock: &str) -> Result<(), Failure> {
        let Some(name) = self.layout.name_of(lock) else {
            return Ok(());
        };
        let mut call = DISOWN.call(&self.layout, &[Part::Lock, Part::Queue], std::iter::once(name));
        let slot = self.route.slot(&self.layout, name);
        call.arg(self.route.mailboxes(slot)).arg(member);
        let reply = tokio::time::timeout(self.route.limit(), self.route.run(&DISOWN, &call, slot)).await;
        reply
            .unwrap_or(Err(Failure::Unexpected("no answer in time")))
            .map(|_| ())
    }

    /// A subscription of one waiter.
    pub(super) fn subscribe(self: &Arc<Self>, owner: &OwnerToken) -> QueueSubscription {
        let mut state = self.state();
        let waiter = state.waiters.entry(owner.clone()).or_default();
        waiter.subscribed = true;
        QueueSubscription {
            waiters: self.clone(),
            owner: owner.clone(),
            told: waiter.told.clone(),
        }
    }

    /// A waiter's number, 0 while it has none.
    pub(super) fn number(&self, owner: &OwnerToken) -> u64 {
        let state = self.state();
        let place = state.waiters.get(owner).and_then(|waiter| waiter.place.as_ref());
        place.map_or(0, |(_, number)| *number)
    }

    /// A waiter has its place in the queue of `key`, behind a lease that ends in `left`.
    pub(super) fn waits(
        self: &Arc<Self>,
        owner: &OwnerToken,
        key: &Key,
        number: u64,
        left: Option<Duration>,
        ear: &Arc<Ear>,
    ) {
        let due = due(left);
        let mut state = self.state();
        let waiter = state.waiters.entry(owner.clone()).or_default();
        let before = waiter.place.replace((key.clone(), number));
        if before.as_ref().is_none_or(|(at, _)| at != key) {
            if let Some((at, _)) = before {
                state.forget(&at);
            }
            let name = state.names.entry(key.clone()).or_insert_with(|| Watched {
                waiters: 0,
                due,
                _ear: ear.clone(),
            });
            name.waiters += 1;
        }
        if let Some(name) = state.names.get_mut(key) {
            name.due = due;
        }
        match state.next_look {
            None => {
                state.next_look = Some(due);
                self.route.runtime().spawn(guard(self.clone()));
            }
            Some(next) if due < next => self.earlier.notify_one(),
            Some(_) => {}
        }
    }

    /// A waiter waits no more: it was granted what it wanted, or gave up.
    pub(super) fn leaves(&self, owner: &OwnerToken) {
        let mut state = self.state();
        let Entry::Occupied(mut entry) = state.waiters.entry(owner.clone()) else {
            return;
        };
        let place = entry.get_mut().place.take();
        if !entry.get().subscribed {
            entry.remove();
        }
        if let Some((key, _)) = place {
            state.forget(&key);
        }
    }

    /// Has every waiter of a name look for itself.
    fn wake(&self, key: &Key) {
        for waiter in self.state().waiters.values() {
            if waiter.place.as_ref().is_some_and(|(at, _)| at == key) {
                waiter.told.notify_one();
            }
        }
    }

    /// The names in scripts: not too many in one, and none over two slots.
    fn together(&self, mut names: Vec<Key>) -> Vec<Vec<Key>> {
        if self.route.is_cluster() {
            let mut slots: HashMap<u16, Vec<Key>> = HashMap::new();
            for name in names.drain(..) {
                let slot = self.route.slot(&self.layout, name.as_str());
                slots.entry(slot).or_default().push(name);
            }
            let some = slots.values().flat_map(|names| names.chunks(NAMES_AT_ONCE));
            return some.map(<[Key]>::to_vec).collect();
        }
        names.chunks(NAMES_AT_ONCE).map(<[Key]>::to_vec).collect()
    }

    async fn beat(self: &Arc<Self>, names: &[Key]) -> Result<(), Failure> {
        let mut call = SCRIPT.call(&self.layout, &[Part::Lock, Part::Queue], names.iter().map(Key::as_str));
        let slot = self.route.slot(&self.layout, names[0].as_str());
        call.arg(self.route.mailboxes(slot))
            .arg(&self.process)
            .arg(WAITER_LIVENESS.as_millis() as u64);
        let reply = tokio::time::timeout(self.route.limit(), self.route.run(&SCRIPT, &call, slot)).await;
        let reply = reply.unwrap_or(Err(Failure::Unexpected("no beat in time")));
        let Value::Array(left) = reply? else {
            return Err(Failure::Unexpected("of beat.lua"));
        };
        for (key, left) in names.iter().zip(left) {
            match left {
                Value::Int(GONE) => self.wake(key),
                Value::Int(left) => {
                    if let Some(name) = self.state().names.get_mut(key) {
                        name.due = due(u64::try_from(left).ok().map(Duration::from_millis));
                    }
                }
                _ => return Err(Failure::Unexpected("of beat.lua")),
            }
        }
        Ok(())
    }
}

/// What `beat.lua` answers for a name that the process has to see to itself.
const GONE: i64 = -2;

impl State {
    fn forget(&mut self, key: &Key) {
        if let Entry::Occupied(mut name) = self.names.entry(key.clone()) {
            name.get_mut().waiters -= 1;
            if name.get().waiters == 0 {
                name.remove();
            }
        }
    }
}

/// When to look at a name again because the lease in the way has ended: a little later than the server said, so that its
/// clock has surely passed that point, and not all processes at once.
fn due(left: Option<Duration>) -> Instant {
    let jitter = Duration::from_micros(fastrand::u64(500..3_000));
    // For a lock that never expires the beat is often enough.
    Instant::now() + left.unwrap_or(BEAT).min(Duration::from_secs(3600)) + jitter
}

/// Gives the signs of life for as long as anybody waits.
async fn guard(waiters: Arc<Waiters>) {
    let mut beat_at = Instant::now() + BEAT;
    loop {
        let next = {
            let mut state = waiters.state();
            let due = state.names.values().map(|name| name.due).min();
            state.next_look = due.map(|due| due.min(beat_at));
            let Some(next) = state.next_look else { return };
            next
        };
        tokio::select! {
            () = tokio::time::sleep_until(next) => {}
            () = waiters.earlier.notified() => continue,
        }
        let now = Instant::now();
        let beating = now >= beat_at;
        let names: Vec<Key> = {
            let mut state = waiters.state();
            let due = state.names.iter_mut().filter(|(_, name)| beating || name.due <= now);
            due.map(|(key, name)| {
                // Until the answer says otherwise.
                name.due = now + BEAT;
                key.clone()
            })
            .collect()
        };
        if beating {
            beat_at = now + BEAT;
        }
        for some in waiters.together(names) {
            // A task of its own: a node that hangs must not keep the others from hearing of this process.
            let waiters = waiters.clone();
            tokio::spawn(async move {
                if let Err(failure) = waiters.beat(&some).await {
                    // Each waiter meets the failure itself, and knows for how long to bear it.
                    tracing::debug!(%failure, "no sign of life could be given");
                    some.iter().for_each(|key| waiters.wake(key));
                }
            });
        }
    }
}

/// A waiter's ear.
pub(super) struct QueueSubscription {
    waiters: Arc<Waiters>,
    owner: OwnerToken,
    told: Arc<Notify>,
}

#[async_trait]
impl Subscription for QueueSubscription {
    async fn changed(&mut self) {
        self.told.notified().await;
    }

    fn keeps_watch(&self) -> bool {
        true
    }
}

impl Drop for QueueSubscription {
    fn drop(&mut self) {
        let mut state = self.waiters.state();
        if let Entry::Occupied(mut entry) = state.waiters.entry(self.owner.clone()) {
            entry.get_mut().subscribed = false;
            if entry.get().place.is_none() {
                entry.remove();
            }
        }
    }
}
