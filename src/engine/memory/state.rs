//! What the store holds: the leases, and the queues of waiters.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::sync::Notify;

use crate::clock::Moment;
use crate::engine::core::ledger::decide::{HeldLease, NameState, Snapshot};
use crate::engine::{EXPIRED_POSITION_KEPT, Released};
use crate::model::{Claim, Fence, Holder, Key, LockInfo, OwnerToken, Process};

/// The queue of one name: the waiters by number, that is, in order of arrival.
type Queue = BTreeMap<u64, Waiter>;

/// The queue that each waiter is in, and its number there. A waiter is in one queue at a time.
type Positions = HashMap<OwnerToken, (Key, u64)>;

#[derive(Default)]
pub(super) struct State {
    pub(super) held: BTreeMap<Key, Held>,
    pub(super) queues: HashMap<Key, Queue>,
    pub(super) positions: Positions,
    pub(super) subscribers: HashMap<OwnerToken, Arc<Notify>>,
    last_number: u64,
    last_fence: u64,
    /// The number of leases at which the next sweep runs.
    next_sweep: usize,
    /// How far a test has moved the clock.
    advanced: Duration,
}

pub(super) struct Held {
    /// `None` after a release that keeps the name busy (`minHoldMs`).
    pub(super) owner: Option<OwnerToken>,
    /// Whether the name is only reserved for a waiter of several names, which waits for a later one.
    is_reserved: bool,
    pub(super) until: Moment,
    fence: Fence,
    pub(super) holder: Holder,
    metadata: Option<Arc<str>>,
}

pub(super) struct Waiter {
    owner: OwnerToken,
    alive_until: Moment,
}

/// Removes positions that expired some time ago.
fn prune(queue: &mut Queue, positions: &mut Positions) {
    queue.retain(|_, waiter| {
        let keep = waiter.alive_until.elapsed() < EXPIRED_POSITION_KEPT;
        if !keep {
            positions.remove(&waiter.owner);
        }
        keep
    });
}

impl State {
    /// Returns the time since 1970: fencing tokens grow across restarts of the process, too.
    fn wall_clock(&self) -> Duration {
        SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default() + self.advanced
    }

    /// Returns the lease or reservation of a name, unless it has expired.
    fn live_hold(&self, key: &Key) -> Option<&Held> {
        self.held.get(key).filter(|held| !held.until.is_past())
    }

    /// Returns the lease of a name, unless it has expired.
    pub(super) fn live_lease(&self, key: &Key) -> Option<&Held> {
        self.live_hold(key).filter(|held| !held.is_reserved)
    }

    /// Whether `owner` holds a name.
    pub(super) fn is_held_by(&self, key: &Key, owner: &OwnerToken) -> bool {
        self.live_lease(key)
            .is_some_and(|held| held.owner.as_ref() == Some(owner))
    }

    /// Returns the live waiters of a name with a number below `number`.
    fn waiters_before(&self, key: &Key, number: u64) -> impl DoubleEndedIterator<Item = &Waiter> {
        let ahead = self
            .queues
            .get(key)
            .into_iter()
            .flat_map(move |queue| queue.range(..number));
        ahead
            .map(|(_, waiter)| waiter)
            .filter(|waiter| !waiter.alive_until.is_past())
    }

    /// Reads what an attempt depends on.
    pub(super) fn snapshot(&self, claim: &Claim) -> Snapshot {
        let position = self.positions.get(&claim.owner);
        let number = position.map_or(u64::MAX, |(_, number)| *number);
        let names = claim.keys().iter().map(|key| {
            let mut ahead = self
                .waiters_before(key, number)
                .map(|waiter| waiter.alive_until.remaining());
            let first_ahead = ahead.next();
            let is_own = |held: &Held| held.owner.as_ref() == Some(&claim.owner);
            let lease = self.live_hold(key);
            NameState {
                // A reservation for this claim does not count.
                lease: lease
                    .filter(|held| !(held.is_reserved && is_own(held)))
                    .map(|held| HeldLease {
                        is_own: is_own(held),
                        remaining: held.until.remaining(),
                        fence: held.fence.0,
                    }),
                first_ahead,
                last_ahead: ahead.next_back().or(first_ahead),
            }
        });
        Snapshot {
            now_micros: self.wall_clock().as_micros() as u64,
            last_fence: self.last_fence,
            names: names.collect(),
        }
    }

    /// Gives every name to the claim, and removes its position in a queue. A lease that the owner holds already is extended.
    pub(super) fn grant(&mut self, claim: &Claim, fence: Fence) {
        self.last_fence = self.last_fence.max(fence.0);
        for key in claim.keys() {
            let until = Moment::now() + claim.ttl.duration();
            let own = self.live_lease(key);
            let held = Held {
                owner: Some(claim.owner.clone()),
                is_reserved: false,
                // A retry may arrive after the lease was extended.
                until: own.map_or(until, |own| own.until.max(until)),
                fence,
                holder: Holder {
                    process: Process::clone(&claim.process),
                    since_ms: own.map_or_else(|| self.wall_clock().as_millis() as u64, |own| own.holder.since_ms),
                },
                metadata: claim.metadata.clone(),
            };
            self.held.insert(key.clone(), held);
        }
        self.leave_queue(&claim.owner);
    }

    /// Reserves the names of a waiter before `busy`, which it waits for, and removes its reservations of later ones.
    pub(super) fn reserve(&mut self, claim: &Claim, busy: usize, liveness: Duration) {
        let (before, after) = claim.keys().split_at(busy);
        for key in before {
            let reservation = Held {
                owner: Some(claim.owner.clone()),
                is_reserved: true,
                until: Moment::now() + liveness,
                fence: Fence::NONE,
                holder: Holder {
                    process: Process::clone(&claim.process),
                    since_ms: 0,
                },
                metadata: None,
            };
            self.held.insert(key.clone(), reservation);
        }
        for key in after {
            self.release(key, &claim.owner, Duration::ZERO);
        }
    }

    /// Releases a name of `owner`, also one that is reserved for it. With `keep` over zero, the name stays busy for that time.
    pub(super) fn release(&mut self, key: &Key, owner: &OwnerToken, keep: Duration) -> Released {
        let is_held = self.is_held_by(key, owner);
        match self.held.get_mut(key).filter(|held| held.owner.as_ref() == Some(owner)) {
            Some(held) if is_held && !keep.is_zero() => {
                held.owner = None;
                held.until = Moment::now() + keep;
                // The lease may now end before the time that the waiter knows.
                self.wake_first(key);
            }
            Some(_) => {
                self.held.remove(key);
                self.wake_first(key);
            }
            None => {}
        }
        if is_held { Released::Freed } else { Released::NotHeld }
    }

    /// Wakes the first live waiter of a name.
    pub(super) fn wake_first(&self, key: &Key) {
        if let Some(waiter) = self.waiters_before(key, u64::MAX).next()
            && let Some(notify) = self.subscribers.get(&waiter.owner)
        {
            notify.notify_one();
        }
    }

    /// Enters the claim into the queue of `key`, or keeps its position alive. A claim that moves from another queue keeps its
    /// number.
    pub(super) fn enqueue(&mut self, claim: &Claim, key: &Key, liveness: Duration) {
        let position = self.positions.get(&claim.owner).cloned();
        let number = position.as_ref().map_or(self.last_number + 1, |(_, number)| *number);
        self.last_number = self.last_number.max(number);
        if position.is_some_and(|(at, _)| at != *key) {
            self.leave_queue(&claim.owner);
        }
        let queue = self.queues.entry(key.clone()).or_default();
        prune(queue, &mut self.positions);
        self.positions.insert(claim.owner.clone(), (key.clone(), number));
        let waiter = Waiter {
            owner: claim.owner.clone(),
            alive_until: Moment::now() + liveness,
        };
        queue.insert(number, waiter);
    }

    /// Removes the position of `owner`, and wakes the next waiter of a free name.
    pub(super) fn leave_queue(&mut self, owner: &OwnerToken) {
        let Some((key, number)) = self.positions.remove(owner) else {
            return;
        };
        if let Some(queue) = self.queues.get_mut(&key) {
            queue.remove(&number);
            if queue.is_empty() {
                self.queues.remove(&key);
            }
        }
        if self.live_hold(&key).is_none() {
            self.wake_first(&key);
        }
    }

    /// Removes expired leases and positions once in a while, so that one-time names leave nothing behind.
    pub(super) fn sweep(&mut self) {
        if self.held.len() >= self.next_sweep {
            self.held.retain(|_, held| !held.until.is_past());
            let positions = &mut self.positions;
            self.queues.retain(|_, queue| {
                prune(queue, positions);
                !queue.is_empty()
            });
            self.next_sweep = (self.held.len() * 2).max(1024);
        }
    }

    /// Returns when the next lease expires.
    pub(super) fn next_expiry(&self) -> Option<Moment> {
        let leases = self.held.values().filter(|held| !held.is_reserved);
        leases.map(|held| held.until).filter(|until| !until.is_past()).min()
    }

    /// Moves the clock forward: every lease ends earlier by that much.
    ///
    /// # Behavior
    /// Positions in the queues and reservations stay alive, because the waiters would have made attempts in that time.
    pub(super) fn advance(&mut self, by: Duration) {
        self.advanced += by;
        for held in self.held.values_mut().filter(|held| !held.is_reserved) {
            held.until = held.until - by;
        }
        for key in self.queues.keys().filter(|key| self.live_hold(key).is_none()) {
            self.wake_first(key);
        }
    }

    /// Whether no call has to act: none is first in the queue of a free name, and none that still waits has been granted a name.
    pub(super) fn is_settled(&self) -> bool {
        let waits = |owner| self.subscribers.contains_key(owner);
        let first = |key| self.waiters_before(key, u64::MAX).next();
        let is_served = |key| self.live_hold(key).is_some() || !first(key).is_some_and(|first| waits(&first.owner));
        let is_received = |key| {
            let owner = self.live_lease(key).and_then(|held| held.owner.as_ref());
            !owner.is_some_and(waits)
        };
        self.queues.keys().all(is_served) && self.held.keys().all(is_received)
    }

    pub(super) fn info(&self, key: &Key) -> Option<LockInfo> {
        let held = self.live_lease(key)?;
        Some(LockInfo {
            name: key.as_str().to_owned(),
            remaining: Some(held.until.remaining()),
            fence: Some(held.fence),
            holder: Some(held.holder.clone()),
            metadata: held.metadata.as_deref().map(str::to_owned),
            waiting: Some(self.waiters_before(key, u64::MAX).count() as u64),
        })
    }
}
