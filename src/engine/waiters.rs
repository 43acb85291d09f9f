//! Who of this process waits for which name, where a store keeps a queue for all processes.
//!
//! # Behavior
//! Each waiter has a place of its own in the queue of its name, so that all waiters of all processes are served in the
//! order of their arrival. What they share is the process's sign of life: while anybody waits, the guard asks the engine
//! every [`BEAT`] to say for all names that this process still lives. It also asks when the lease in a waiter's way ends,
//! so that what has become free is handed on: a holder that died needs no help of its own.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::Subscription;
use crate::model::{Key, OwnerToken};

/// How often a process with waiters gives a sign of life: twice within the time for which one counts.
pub(super) const BEAT: Duration = Duration::from_secs(2);
/// How long a name that was handed to a waiter is kept for it, if its ttl is not shorter.
pub(super) const RESERVED: Duration = Duration::from_secs(2);

/// The waiters of one engine. With each name that somebody waits for goes an `H`, which lives for as long.
pub(super) struct Waiters<H> {
    state: Mutex<State<H>>,
    /// Something is due earlier than the guard thinks.
    earlier: Notify,
}

struct State<H> {
    waiters: HashMap<OwnerToken, Waiter>,
    names: HashMap<Key, Watched<H>>,
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
    /// When it was last notified of its turn.
    #[cfg(feature = "mongodb")]
    turn: Option<Instant>,
}

impl Waiter {
    fn is_at(&self, key: &Key) -> bool {
        self.place.as_ref().is_some_and(|(at, _)| at == key)
    }

    fn notify_of_turn(&mut self) {
        #[cfg(feature = "mongodb")]
        {
            self.turn = Some(Instant::now());
        }
        self.told.notify_one();
    }
}

/// A name that somebody of this process waits for.
struct Watched<H> {
    waiters: usize,
    /// When the lease in the way ends, as far as is known.
    due: Instant,
    /// How many waiters of other processes came before them, at most.
    #[cfg(feature = "mongodb")]
    ahead: usize,
    _held: H,
}

impl<H> State<H> {
    fn forget(&mut self, key: &Key) {
        if let Entry::Occupied(mut name) = self.names.entry(key.clone()) {
            let name_of = name.get_mut();
            name_of.waiters -= 1;
            #[cfg(feature = "mongodb")]
            {
                // It may have been the first.
                name_of.ahead = usize::MAX;
            }
            if name_of.waiters == 0 {
                name.remove();
            }
        }
    }
}

impl<H> Waiters<H> {
    pub(super) fn new() -> Self {
        Waiters {
            state: Mutex::new(State {
                waiters: HashMap::new(),
                names: HashMap::new(),
                next_look: None,
            }),
            earlier: Notify::new(),
        }
    }

    /// The state. A panic elsewhere leaves it whole: every change is one step.
    fn state(&self) -> MutexGuard<'_, State<H>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A subscription of one waiter.
    pub(super) fn subscribe(self: &Arc<Self>, owner: &OwnerToken) -> Ear<H> {
        let mut state = self.state();
        let waiter = state.waiters.entry(owner.clone()).or_default();
        waiter.subscribed = true;
        Ear {
            waiters: self.clone(),
            owner: owner.clone(),
            told: waiter.told.clone(),
        }
    }

    /// A waiter's number, 0 while it has none.
    pub(super) fn number(&self, owner: &OwnerToken) -> u64 {
        self.place(owner).map_or(0, |(_, number)| number)
    }

    /// Where a waiter has its place, with its number there.
    pub(super) fn place(&self, owner: &OwnerToken) -> Option<(Key, u64)> {
        self.state().waiters.get(owner)?.place.clone()
    }

    /// Whether anybody of this process waits for a name.
    #[cfg(feature = "mongodb")]
    pub(super) fn is_waited_for(&self, key: &Key) -> bool {
        self.state().names.contains_key(key)
    }

    /// The names that this process waits for.
    #[cfg(feature = "mongodb")]
    pub(super) fn names(&self) -> Vec<Key> {
        self.state().names.keys().cloned().collect()
    }

    /// A waiter has its place in the queue of `key`, behind a lease that ends in `left`. `true`: nobody guards the queues
    /// yet, and the caller has to have [`Waiters::guard`] run.
    #[must_use]
    pub(super) fn waits(
        &self,
        owner: &OwnerToken,
        key: &Key,
        number: u64,
        left: Option<Duration>,
        held: impl FnOnce() -> H,
    ) -> bool {
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
                #[cfg(feature = "mongodb")]
                ahead: usize::MAX,
                _held: held(),
            });
            name.waiters += 1;
        }
        if let Some(name) = state.names.get_mut(key) {
            name.due = due;
        }
        match state.next_look {
            None => {
                state.next_look = Some(due);
                return true;
            }
            Some(next) if due < next => self.earlier.notify_one(),
            Some(_) => {}
        }
        false
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

    /// Nobody waits any more.
    #[cfg(feature = "mongodb")]
    pub(super) fn forget_all(&self) {
        let mut state = self.state();
        state.names.clear();
        for waiter in state.waiters.values_mut() {
            waiter.place = None;
        }
        self.earlier.notify_one();
    }

    /// Notifies one waiter of its turn. `false`: this engine does not know the waiter.
    pub(super) fn tell(&self, owner: &OwnerToken) -> bool {
        let mut state = self.state();
        let waiter = state.waiters.get_mut(owner);
        let is_known = waiter.is_some();
        if let Some(waiter) = waiter {
            waiter.notify_of_turn();
        }
        is_known
    }

    /// Whether a waiter was notified of its turn within the last [`RESERVED`].
    #[cfg(feature = "mongodb")]
    pub(super) fn has_turn(&self, owner: &OwnerToken) -> bool {
        let state = self.state();
        let turn = state.waiters.get(owner).and_then(|waiter| waiter.turn);
        turn.is_some_and(|turn| turn.elapsed() < RESERVED)
    }

    /// Has every waiter of a name look for itself.
    pub(super) fn wake(&self, key: &Key) {
        self.wake_those(|_, waiter| waiter.is_at(key));
    }

    /// Has those waiters of a name look for themselves that are not among these.
    #[cfg(feature = "mongodb")]
    pub(super) fn wake_others(&self, key: &Key, these: &std::collections::HashSet<OwnerToken>) {
        self.wake_those(|owner, waiter| waiter.is_at(key) && !these.contains(owner));
    }

    /// Has the first waiter of a name look for itself.
    #[cfg(feature = "mongodb")]
    pub(super) fn wake_first(&self, key: &Key) {
        let mut state = self.state();
        let here = state.waiters.values_mut().filter_map(|waiter| {
            let (at, number) = waiter.place.as_ref()?;
            (at == key).then_some((*number, waiter))
        });
        if let Some((_, waiter)) = here.min_by_key(|(number, _)| *number) {
            waiter.notify_of_turn();
        }
    }

    /// At most so many waiters of other processes are before those of this one.
    #[cfg(feature = "mongodb")]
    pub(super) fn is_behind(&self, key: &Key, ahead: usize) {
        if let Some(name) = self.state().names.get_mut(key) {
            name.ahead = ahead;
        }
    }

    /// How many waiters of other processes are before those of this one, at most.
    #[cfg(feature = "mongodb")]
    pub(super) fn ahead(&self, key: &Key) -> usize {
        self.state().names.get(key).map_or(usize::MAX, |name| name.ahead)
    }

    /// Has every waiter look for itself.
    #[cfg(feature = "redis")]
    pub(super) fn wake_all(&self) {
        self.wake_those(|_, _| true);
    }

    /// Wakes waiters in the order of their numbers, so that they try again in that order.
    fn wake_those(&self, are_meant: impl Fn(&OwnerToken, &Waiter) -> bool) {
        let state = self.state();
        let meant = state.waiters.iter().filter(|(owner, waiter)| are_meant(owner, waiter));
        let mut meant: Vec<_> = meant
            .map(|(_, waiter)| {
                (
                    waiter.place.as_ref().map_or(u64::MAX, |(_, number)| *number),
                    &waiter.told,
                )
            })
            .collect();
        meant.sort_unstable_by_key(|(number, _)| *number);
        meant.into_iter().for_each(|(_, told)| told.notify_one());
    }

    /// The lease in the way of a name's waiters ends in `left`.
    pub(super) fn ends_in(&self, key: &Key, left: Option<Duration>) {
        let due = due(left);
        let mut state = self.state();
        let next_look = state.next_look;
        if let Some(name) = state.names.get_mut(key) {
            name.due = due;
            if next_look.is_some_and(|next| due < next) {
                self.earlier.notify_one();
            }
        }
    }

    /// Calls `look` with the names whose lease in the way has ended, and every [`BEAT`] with all of them, for as long as
    /// anybody waits. `look` must not block.
    pub(super) async fn guard(&self, mut look: impl FnMut(Vec<Key>)) {
        let mut beat_at = Instant::now() + BEAT;
        loop {
            let next = {
                let mut state = self.state();
                let due = state.names.values().map(|name| name.due).min();
                state.next_look = due.map(|due| due.min(beat_at));
                let Some(next) = state.next_look else { return };
                next
            };
            tokio::select! {
                () = tokio::time::sleep_until(next) => {}
                () = self.earlier.notified() => continue,
            }
            let now = Instant::now();
            let beating = now >= beat_at;
            let names: Vec<Key> = {
                let mut state = self.state();
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
            if !names.is_empty() {
                look(names);
            }
        }
    }
}

/// When to look at a name again because the lease in the way has ended: a little later than the store said, so that its
/// clock has surely passed that point, and not all processes at once.
fn due(left: Option<Duration>) -> Instant {
    let jitter = Duration::from_micros(fastrand::u64(500..3_000));
    // For a lock that never expires the beat is often enough.
    Instant::now() + left.unwrap_or(BEAT).min(Duration::from_secs(3600)) + jitter
}

/// A waiter's ear.
pub(super) struct Ear<H> {
    waiters: Arc<Waiters<H>>,
    owner: OwnerToken,
    told: Arc<Notify>,
}

impl<H> Ear<H> {
    /// Whether its owner has a place, and so will be told.
    #[cfg(feature = "mongodb")]
    pub(super) fn is_expected(&self) -> bool {
        self.waiters.number(&self.owner) > 0
    }
}

#[async_trait]
impl<H: Send> Subscription for Ear<H> {
    async fn changed(&mut self) {
        self.told.notified().await;
    }

    fn keeps_watch(&self) -> bool {
        true
    }
}

impl<H> Drop for Ear<H> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_end_that_a_sign_of_life_tells_of_is_looked_at_in_time() {
        let waiters = Arc::new(Waiters::<()>::new());
        let (owner, key) = (OwnerToken::fresh(), Key::new("n").unwrap());
        assert!(waiters.waits(&owner, &key, 1, Some(Duration::from_secs(30)), || ()));
        let began = Instant::now();
        let mut looks = Vec::new();
        let guarded = waiters.guard(|names| {
            assert_eq!(names, std::slice::from_ref(&key));
            looks.push(began.elapsed());
            // The answer comes later than the guard goes to sleep again.
            let (waiters, key) = (waiters.clone(), key.clone());
            tokio::spawn(async move {
                tokio::time::sleep(Duration::from_millis(5)).await;
                waiters.ends_in(&key, Some(Duration::from_millis(300)));
            });
        });
        let _ = tokio::time::timeout(BEAT + Duration::from_millis(500), guarded).await;
        assert_eq!(looks.len(), 2, "{looks:?}");
        assert!(
            looks[0] >= BEAT && looks[1] < BEAT + Duration::from_millis(310),
            "{looks:?}"
        );
    }
}
