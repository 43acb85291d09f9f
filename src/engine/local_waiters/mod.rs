//! The waiters of this process, where a store keeps a queue for the waiters of all processes.
//!
//! # Behavior
//! Each waiter has its own position in the queue of its name, so that the waiters of all processes are served in order of
//! arrival. They share the heartbeat of the process: while there are waiters, one task has the engine send a heartbeat for all
//! their names every [`HEARTBEAT_INTERVAL`]. It also has the engine check a name when the current lease on it ends, so that a
//! name whose holder died is handed off.

mod checks;
mod subscription;
#[cfg(test)]
mod tests;

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

use self::checks::{WaitedName, check_time};
pub(super) use self::subscription::WaiterSubscription;
pub(super) use super::RESERVATION;
use super::{DetectorSlot, HandOff};
use crate::model::{Claim, Key, OwnerToken, Ttl};

/// The time between two heartbeats: less than half of the time for which one keeps a position alive.
pub(super) const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(2);

/// The waiters of one engine. `H` is a resource that the engine keeps for each name with waiters.
pub(super) struct LocalWaiters<H> {
    state: Mutex<State<H>>,
    /// A check is due earlier than the heartbeat task expects.
    rescheduled: Notify,
    /// Detects an event loop that does not respond.
    pub(super) stall_detector: DetectorSlot,
}

/// How long a waiter that took a grant is remembered: longer than it takes to extend that grant.
const TAKEN_KEPT: Duration = Duration::from_secs(3);

struct State<H> {
    waiters: HashMap<OwnerToken, Waiter>,
    names: HashMap<Key, WaitedName<H>>,
    /// When the heartbeat task wakes up. `None`: it does not run.
    next_check: Option<Instant>,
    /// The waiters that took a grant within the last [`TAKEN_KEPT`], the oldest first.
    taken: VecDeque<(Instant, OwnerToken)>,
}

#[derive(Default)]
struct Waiter {
    notify: Arc<Notify>,
    is_subscribed: bool,
    /// The name that it waits for, and its number in the queue.
    position: Option<(Key, u64)>,
    /// The grant that a hand-off was, until the waiter takes it.
    hand_off: Option<HandOff>,
    /// Whether it confirms every hand-off by an attempt.
    confirms: bool,
    /// The ttl of its claim. `None`: it has no subscription.
    ttl: Option<Ttl>,
    /// When it was last notified of a hand-off.
    notified_at: Option<Instant>,
}

impl Waiter {
    /// Returns the name that it waits for.
    fn name(&self) -> Option<&Key> {
        self.position.as_ref().map(|(name, _)| name)
    }

    fn notify(&mut self) {
        self.notified_at = Some(Instant::now());
        self.notify.notify_one();
    }
}

impl<H> State<H> {
    /// Forgets the waiters that took a grant more than [`TAKEN_KEPT`] ago.
    fn forget_taken(&mut self) {
        let now = Instant::now();
        while self.taken.pop_front_if(|(at, _)| now - *at > TAKEN_KEPT).is_some() {}
    }

    /// Removes one waiter of a name.
    fn remove_waiter(&mut self, key: &Key) {
        if let Entry::Occupied(mut entry) = self.names.entry(key.clone()) {
            let name = entry.get_mut();
            name.waiters -= 1;
            // The count referred to the first waiter, which may be the one that is removed.
            name.ahead = usize::MAX;
            if name.waiters == 0 {
                entry.remove();
            }
        }
    }
}

impl<H> LocalWaiters<H> {
    pub(super) fn new() -> Self {
        LocalWaiters {
            state: Mutex::new(State {
                waiters: HashMap::new(),
                names: HashMap::new(),
                next_check: None,
                taken: VecDeque::new(),
            }),
            rescheduled: Notify::new(),
            stall_detector: Arc::default(),
        }
    }

    /// Subscribes a waiter to its notifications.
    pub(super) fn subscribe(self: &Arc<Self>, claim: &Claim) -> WaiterSubscription<H> {
        let mut state = self.state.lock();
        let waiter = state.waiters.entry(claim.owner.clone()).or_default();
        waiter.is_subscribed = true;
        waiter.ttl = Some(claim.ttl);
        WaiterSubscription::new(self.clone(), claim.owner.clone(), waiter.notify.clone())
    }

    /// Returns a waiter's number in its queue; 0 without a position.
    pub(super) fn number(&self, owner: &OwnerToken) -> u64 {
        self.position(owner).map_or(0, |(_, number)| number)
    }

    /// Returns the name that a waiter waits for, and its number in the queue.
    pub(super) fn position(&self, owner: &OwnerToken) -> Option<(Key, u64)> {
        self.state.lock().waiters.get(owner)?.position.clone()
    }

    /// Whether this process has waiters for a name.
    pub(super) fn is_waited_for(&self, key: &Key) -> bool {
        self.state.lock().names.contains_key(key)
    }

    /// Returns the shortest ttl of the waiters. `None`: no waiter has a subscription.
    pub(super) fn shortest_ttl(&self) -> Option<Duration> {
        let state = self.state.lock();
        let ttls = state.waiters.values().filter_map(|waiter| waiter.ttl);
        ttls.map(|ttl| ttl.duration()).min()
    }

    /// Returns the names with waiters in this process.
    pub(super) fn names(&self) -> Vec<Key> {
        self.state.lock().names.keys().cloned().collect()
    }

    /// Records a waiter's position in the queue of `key`, behind a lease that ends after `left`. Returns `true` when the
    /// heartbeat task does not run: the caller spawns [`LocalWaiters::run_heartbeats`].
    #[must_use]
    pub(super) fn enter(
        &self,
        owner: &OwnerToken,
        key: &Key,
        number: u64,
        left: Option<Duration>,
        resource: impl FnOnce() -> H,
    ) -> bool {
        let check_at = check_time(left);
        let mut state = self.state.lock();
        let waiter = state.waiters.entry(owner.clone()).or_default();
        let before = waiter.position.replace((key.clone(), number));
        if before.as_ref().is_none_or(|(at, _)| at != key) {
            if let Some((at, _)) = before {
                state.remove_waiter(&at);
            }
            let name = state.names.entry(key.clone()).or_insert_with(|| WaitedName {
                waiters: 0,
                check_at,
                set_at: Instant::now(),
                ahead: usize::MAX,
                polls: false,
                _resource: None,
            });
            name.waiters += 1;
        }
        if let Some(name) = state.names.get_mut(key) {
            name.set_check(check_at);
            // The resource of the last attempt replaces earlier ones.
            name._resource = Some(resource());
        }
        match state.next_check {
            None => {
                state.next_check = Some(check_at);
                return true;
            }
            Some(next) if check_at < next => self.rescheduled.notify_one(),
            Some(_) => {}
        }
        false
    }

    /// Removes a waiter's position, after its grant or the end of its wait.
    pub(super) fn leave(&self, owner: &OwnerToken) {
        let mut state = self.state.lock();
        let Entry::Occupied(mut entry) = state.waiters.entry(owner.clone()) else {
            return;
        };
        let position = entry.get_mut().position.take();
        if !entry.get().is_subscribed {
            entry.remove();
        }
        if let Some((key, _)) = position {
            state.remove_waiter(&key);
        }
    }

    /// Removes all positions. The heartbeat task ends.
    pub(super) fn clear(&self) {
        let mut state = self.state.lock();
        state.names.clear();
        for waiter in state.waiters.values_mut() {
            waiter.position = None;
        }
        self.rescheduled.notify_one();
    }

    /// Notifies a waiter of a hand-off. `false`: this engine does not have that waiter.
    pub(super) fn notify(&self, owner: &OwnerToken) -> bool {
        let mut state = self.state.lock();
        state.waiters.get_mut(owner).map(Waiter::notify).is_some()
    }

    /// Notifies a waiter of a hand-off that is a grant. `false`: this engine does not have that waiter.
    pub(super) fn grant(&self, owner: &OwnerToken, hand_off: HandOff) -> bool {
        let mut state = self.state.lock();
        let Some(waiter) = state.waiters.get_mut(owner) else {
            return false;
        };
        waiter.hand_off = Some(hand_off).filter(|_| !waiter.confirms);
        waiter.notify();
        true
    }

    /// Makes a waiter confirm every hand-off by an attempt, because an attempt of it releases what it holds. Drops a grant that it
    /// has not taken.
    pub(super) fn confirm_hand_offs(&self, owner: &OwnerToken) {
        if let Some(waiter) = self.state.lock().waiters.get_mut(owner) {
            waiter.confirms = true;
            waiter.hand_off = None;
        }
    }

    /// Takes the grant of a waiter, which then has left the queue. `None`: there is none, or it has ended.
    fn take_hand_off(&self, owner: &OwnerToken) -> Option<HandOff> {
        let mut state = self.state.lock();
        let hand_off = state.waiters.get_mut(owner)?.hand_off.take();
        let hand_off = hand_off.filter(|hand_off| !hand_off.until.is_past())?;
        state.forget_taken();
        state.taken.push_back((Instant::now(), owner.clone()));
        drop(state);
        self.leave(owner);
        Some(hand_off)
    }

    /// Whether a waiter took its grant within the last [`TAKEN_KEPT`].
    pub(super) fn has_taken(&self, owner: &OwnerToken) -> bool {
        let mut state = self.state.lock();
        state.forget_taken();
        state.taken.iter().any(|(_, taken)| taken == owner)
    }

    /// Whether a waiter was notified of a hand-off within the last [`RESERVATION`].
    pub(super) fn has_reservation(&self, owner: &OwnerToken) -> bool {
        let state = self.state.lock();
        let notified_at = state.waiters.get(owner).and_then(|waiter| waiter.notified_at);
        notified_at.is_some_and(|at| at.elapsed() < RESERVATION)
    }

    /// Wakes every waiter of a name for a new attempt.
    pub(super) fn wake(&self, key: &Key) {
        self.wake_where(|name, _| name == key);
    }

    /// Wakes the waiters whose name and owner match, for a new attempt.
    pub(super) fn wake_where(&self, matches: impl Fn(&Key, &OwnerToken) -> bool) {
        self.wake_if(|owner, waiter| waiter.name().is_some_and(|name| matches(name, owner)));
    }

    /// Notifies the first waiter of a name.
    pub(super) fn wake_first(&self, key: &Key) {
        let mut state = self.state.lock();
        let waiters = state.waiters.values_mut().filter_map(|waiter| {
            let (at, number) = waiter.position.as_ref()?;
            (at == key).then_some((*number, waiter))
        });
        if let Some((_, waiter)) = waiters.min_by_key(|(number, _)| *number) {
            waiter.notify();
        }
    }

    /// Records the maximum number of waiters of other processes ahead of those of this one.
    pub(super) fn set_ahead(&self, key: &Key, ahead: usize) {
        if let Some(name) = self.state.lock().names.get_mut(key) {
            name.ahead = ahead;
        }
    }

    /// Sets whether the waiters of a name poll.
    pub(super) fn set_polls(&self, key: &Key, polls: bool) {
        if let Some(name) = self.state.lock().names.get_mut(key) {
            name.polls = polls;
        }
    }

    /// Whether a waiter polls: its name is polled, or it has no position in a queue, so that it is never notified.
    pub(super) fn polls(&self, owner: &OwnerToken) -> bool {
        let state = self.state.lock();
        let name = state.waiters.get(owner).and_then(Waiter::name);
        name.and_then(|name| state.names.get(name))
            .is_none_or(|name| name.polls)
    }

    /// Whether no waiter of this process is ahead of this one in the queue of its name.
    pub(super) fn is_first(&self, owner: &OwnerToken) -> bool {
        let state = self.state.lock();
        let Some((key, number)) = state.waiters.get(owner).and_then(|waiter| waiter.position.as_ref()) else {
            return true;
        };
        let mut positions = state.waiters.values().filter_map(|waiter| waiter.position.as_ref());
        !positions.any(|(of, earlier)| of == key && earlier < number)
    }

    /// Returns the maximum number of waiters of other processes ahead of those of this one.
    pub(super) fn ahead(&self, key: &Key) -> usize {
        let state = self.state.lock();
        state.names.get(key).map_or(usize::MAX, |name| name.ahead)
    }

    /// Wakes every waiter.
    pub(super) fn wake_all(&self) {
        self.wake_if(|_, _| true);
    }

    /// Wakes waiters in the order of their numbers, so that they make their attempts in that order.
    fn wake_if(&self, is_selected: impl Fn(&OwnerToken, &Waiter) -> bool) {
        let state = self.state.lock();
        let selected = state
            .waiters
            .iter()
            .filter(|(owner, waiter)| is_selected(owner, waiter));
        let number = |waiter: &Waiter| waiter.position.as_ref().map_or(u64::MAX, |(_, number)| *number);
        let mut selected: Vec<_> = selected.map(|(_, waiter)| (number(waiter), &waiter.notify)).collect();
        selected.sort_unstable_by_key(|(number, _)| *number);
        selected.into_iter().for_each(|(_, notify)| notify.notify_one());
    }
}
