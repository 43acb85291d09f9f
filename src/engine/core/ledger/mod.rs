//! The rules of the lock: what a transaction has read of the names that it locked, what the calls in it change there, and what it then
//! writes.
//!
//! An SQL engine locks the rows of all names of a batch, reads them and the front of their queues, and makes the calls here, one after
//! the other, without the store. [`Ledger::finish`] returns the rows to write. `memory:` keeps one ledger with all rows and positions.
//! `decide.rs` has the rules of an attempt. Times are microseconds since 1970 by the store's clock.
//!
//! # Hand-off
//! At the end of a transaction a free name goes to its first live waiter, whose position is removed. A waiter of one name without
//! metadata becomes the holder, until its process counts as dead, or for its ttl if that is shorter. For another one the name is
//! reserved for as long: its row has the owner `<token>-next`, and the waiter makes an attempt. A waiter that missed its hand-off
//! enters again with its ticket ([`Ledger::remember`]).
//!
//! A store without hand-offs (`memory:`) only notifies that waiter, which keeps its position until its attempt.
//!
//! A shared name (`shares.rs`) goes to its first live waiters as long as the next one fits: a claim fits while the permits in use and its own
//! are at most the smallest limit of all. So a release hands off to several, no waiter is overtaken, and a lock is the case where no
//! claim fits beside a holder.

mod changes;
pub(in crate::engine) mod decide;
mod hand_off;
#[cfg(test)]
mod model;
mod queues;
mod rows;
mod shares;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

pub(in crate::engine) use self::changes::{Changes, Content, Notification};
use self::decide::{Decision, HeldLease, NameState, Snapshot, decide, waiter_liveness};
use self::queues::Queues;
pub(in crate::engine) use self::rows::{Position, RESERVED, Row, Waiter};
pub(in crate::engine) use self::shares::{
    SHARED, bounds, held_names, is_share, is_shared, share_name, stored_name, stored_share, without_owner,
};
use crate::engine::{Acquired, Released, Renewed, WAITER_LIVENESS};
use crate::model::{Claim, Fence, OwnerToken, Ttl};

/// A name as it is stored: the prefix and the name.
pub(in crate::engine) type StoredName = Vec<u8>;

/// Maximum number of waiters that a transaction hands a shared name off to: it knows as many of them in their order.
pub(in crate::engine) const MOST_HAND_OFFS: usize = 64;

/// The longest time for which a released name is kept: some 200 years.
const MAX_KEEP_US: i64 = 200 * 366 * 86_400 * 1_000_000;

/// The rows and positions of a transaction, or of a whole store. The default is empty, and of a store without hand-offs.
#[derive(Debug, Default)]
pub(in crate::engine) struct Ledger {
    now_us: i64,
    /// Whether a free name is handed off to its first waiter. If not, the waiter is only notified.
    hands_off: bool,
    /// Every later token is larger.
    pub last_fence: i64,
    pub rows: BTreeMap<StoredName, Row>,
    /// In a transaction, of each name the first live positions, more than there are calls, and those of the calls' owners.
    pub queues: Queues,
    /// The names of the calls.
    concerned: Vec<StoredName>,
    /// The tickets of owners, which may have no position any more.
    tickets: HashMap<String, u64>,
    /// Names whose first waiter is notified, because the current lease may end earlier.
    shortened: Vec<StoredName>,
    /// Names with another number of positions than before.
    recounted: Vec<StoredName>,
}

impl Ledger {
    /// Creates the ledger from what was read. `positions`: in any order.
    pub(in crate::engine) fn new(now_us: i64, rows: BTreeMap<StoredName, Row>, positions: Vec<Position>) -> Self {
        Ledger {
            now_us,
            hands_off: true,
            concerned: rows
                .keys()
                .filter(|name| without_owner(name) == *name)
                .cloned()
                .collect(),
            rows,
            queues: positions.into_iter().collect(),
            ..Ledger::default()
        }
    }

    /// Begins a call on names of a whole store.
    pub(in crate::engine) fn begin(&mut self, now_us: i64, names: &[StoredName]) {
        self.now_us = now_us;
        self.concerned.extend_from_slice(names);
    }

    /// Returns the time of the transaction, or of the last call.
    pub(in crate::engine) fn now_us(&self) -> i64 {
        self.now_us
    }

    /// Marks names whose positions [`Ledger::finish`] counts again.
    pub(in crate::engine) fn recount(&mut self, names: &[StoredName]) {
        self.recounted.extend_from_slice(names);
    }

    /// Records the ticket that a waiter had, so that it keeps its position after a missed hand-off. Called before the attempt.
    pub(in crate::engine) fn remember(&mut self, owner: &OwnerToken, ticket: u64) {
        self.tickets.insert(owner.as_str().to_owned(), ticket);
    }

    /// Makes an attempt. `names`: those of the claim, as they are stored.
    pub(in crate::engine) fn attempt(&mut self, claim: &Claim, names: &[StoredName]) -> Acquired {
        let liveness = claim.waiting.then(|| waiter_liveness(claim.ttl));
        match decide(&self.snapshot(claim, names), liveness) {
            Decision::Grant { fence } => {
                let expires_us = self.now_us + micros(claim.ttl.duration());
                self.record_fence(claim, names, fence);
                for name in held_names(claim, names).iter() {
                    let row = self.rows.entry(name.clone()).or_default();
                    *row = Row {
                        owner: Some(claim.owner.as_str().to_owned()),
                        expires_us,
                        fence: fence.0 as i64,
                        holder: Some(claim.process.clone()),
                        granted_us: Some(self.now_us),
                        metadata: claim.metadata.clone(),
                        share: claim.share,
                        is_changed: true,
                    };
                }
                self.leave(claim.owner.as_str());
                Acquired::Granted { fence }
            }
            Decision::AlreadyHeld { fence } => {
                self.extend(&held_names(claim, names), claim.ttl);
                self.leave(claim.owner.as_str());
                Acquired::Granted { fence }
            }
            Decision::Busy { index, retry_after, .. } => {
                // A waiter has one position, and reserves the names before the busy one until its next attempt: waiters acquire
                // names in their order, which cannot deadlock, and callers that keep each name busy do not starve them.
                let kept = if claim.waiting { index } else { 0 };
                self.release_names(&claim.owner, &held_names(claim, names)[kept..], Duration::ZERO);
                if claim.waiting {
                    self.reserve(claim, &names[..index]);
                    self.enter(claim, &names[index]);
                }
                Acquired::Held {
                    key: claim.keys()[index].clone(),
                    retry_after: Some(retry_after),
                }
            }
        }
    }

    /// Extends the lease on every name if `claim` holds all of them.
    pub(in crate::engine) fn renew(&mut self, claim: &Claim, names: &[StoredName], ttl: Ttl) -> Renewed {
        let names = held_names(claim, names);
        if !self.holds_all(&names, &[&claim.owner]) {
            return Renewed::Lost;
        }
        self.extend(&names, ttl);
        Renewed::Extended
    }

    /// Makes `to` the owner of every name if it or `claim` holds each of them.
    pub(in crate::engine) fn transfer(&mut self, claim: &Claim, names: &[StoredName], to: &OwnerToken) -> Renewed {
        if !self.holds_all(names, &[&claim.owner, to]) {
            return Renewed::Lost;
        }
        self.extend(names, claim.ttl);
        for name in names {
            let Some(row) = self.rows.get_mut(name) else { continue };
            row.owner = Some(to.as_str().to_owned());
            row.holder = Some(claim.process.clone());
        }
        Renewed::Extended
    }

    /// Releases the names that `claim` holds, and removes its position.
    pub(in crate::engine) fn release(&mut self, claim: &Claim, names: &[StoredName], keep: Duration) -> Released {
        let names = held_names(claim, names);
        let held = self.release_names(&claim.owner, &names, keep);
        self.leave(claim.owner.as_str());
        let name = without_owner(&names[0]).to_vec();
        let last_fence = self.last_fence_of(&name);
        if claim.share.is_some()
            && held > 0
            && let Some(row) = self.rows.get_mut(&name)
        {
            // A row without an owner is kept for some time after its last change, with its token.
            (row.fence, row.is_changed) = (row.fence.max(last_fence), true);
        }
        if held == names.len() {
            Released::Freed
        } else {
            Released::NotHeld
        }
    }

    /// Releases a name of any owner, and a shared one of all owners. What is only reserved for a waiter stays reserved.
    pub(in crate::engine) fn force_release(&mut self, name: &StoredName) -> bool {
        let now_us = self.now_us;
        let (first, end) = bounds(name);
        let mut rows: Vec<&mut Row> = if is_shared(name) {
            self.rows.range_mut(first..end).map(|(_, row)| row).collect()
        } else {
            self.rows.get_mut(name).into_iter().collect()
        };
        rows.retain(|row| row.is_live(now_us) && !row.is_reserved());
        let is_held = !rows.is_empty();
        rows.into_iter().for_each(Row::release);
        is_held
    }

    /// Returns the live positions of a name, in their order.
    pub(in crate::engine) fn live(&self, name: &StoredName) -> impl DoubleEndedIterator<Item = &Position> {
        self.queues.live(name, u64::MAX, self.now_us)
    }

    fn snapshot(&self, claim: &Claim, names: &[StoredName]) -> Snapshot {
        let own = claim.owner.as_str();
        let position = self.queues.of(own).map(|position| position.order);
        let ticket = || self.tickets.get(own).copied();
        let own_order = position.or_else(ticket).unwrap_or(u64::MAX);
        let fences = names.iter().map(|name| self.last_fence_of(name));
        let state = |name: &StoredName| {
            let held = held_names(claim, std::slice::from_ref(name));
            let lease = self.rows.get(&held[0]).filter(|row| row.is_live(self.now_us));
            if lease.is_some_and(|row| row.is_reserved_for(&claim.owner)) {
                return NameState::default();
            }
            let lease = lease.map(|row| HeldLease {
                is_own: row.owner.as_deref() == Some(own),
                remaining: span(row.expires_us - self.now_us),
                fence: row.fence.unsigned_abs(),
            });
            let ahead = self.queues.live(name, own_order, self.now_us);
            let mut ahead = ahead.map(|position| span(position.alive_until_us - self.now_us));
            let first_ahead = ahead.next();
            NameState {
                lease: lease.or_else(|| self.lease_in_the_way(claim, name)),
                first_ahead,
                // With hand-offs, a notification wakes the waiter in time.
                last_ahead: ahead.next_back().or(first_ahead).filter(|_| !self.hands_off),
            }
        };
        Snapshot {
            now_micros: self.now_us.unsigned_abs(),
            last_fence: fences.fold(self.last_fence, i64::max).unsigned_abs(),
            names: names.iter().map(state).collect(),
        }
    }

    fn holds_all(&self, names: &[StoredName], owners: &[&OwnerToken]) -> bool {
        names.iter().all(|name| {
            let row = self.rows.get(name);
            row.is_some_and(|row| owners.iter().any(|owner| row.is_held_by(owner, self.now_us)))
        })
    }

    fn extend(&mut self, names: &[StoredName], ttl: Ttl) {
        let until = self.now_us + micros(ttl.duration());
        for name in names {
            let Some(row) = self.rows.get_mut(name) else { continue };
            row.expires_us = row.expires_us.max(until);
            row.is_changed = true;
        }
    }

    /// Reserves free names for a waiter while its position lives, at most for its ttl. A store that hands off writes again at 60 %.
    fn reserve(&mut self, claim: &Claim, names: &[StoredName]) {
        let (now_us, lasts_us) = (self.now_us, micros(waiter_liveness(claim.ttl)));
        for name in names {
            let row = self.rows.entry(name.clone()).or_default();
            if self.hands_off && row.is_reserved_for(&claim.owner) && 5 * (row.expires_us - now_us) > 3 * lasts_us {
                continue;
            }
            *row = Row {
                owner: Some(format!("{}{RESERVED}", claim.owner.as_str())),
                expires_us: now_us + lasts_us,
                fence: row.fence,
                granted_us: Some(self.now_us),
                is_changed: true,
                ..Row::default()
            };
        }
    }

    /// Releases the names that an owner has, and returns how many of them it held.
    fn release_names(&mut self, owner: &OwnerToken, names: &[StoredName], keep: Duration) -> usize {
        let mut held = 0;
        for name in names {
            let Some(row) = self.rows.get_mut(name) else { continue };
            if row.is_reserved_for(owner) {
                row.release();
            }
            if row.owner.as_deref() != Some(owner.as_str()) {
                continue;
            }
            let is_live = row.is_live(self.now_us);
            held += usize::from(is_live);
            if is_live && !keep.is_zero() {
                row.owner = Some(format!("{}-kept", owner.as_str()));
                row.expires_us = self.now_us + micros(keep).min(MAX_KEEP_US);
                row.is_changed = true;
                self.shortened.push(name.clone());
            } else {
                row.release();
            }
        }
        held
    }

    /// Enters the claim into the queue of a name, keeps its position there alive, or moves it there with its order.
    fn enter(&mut self, claim: &Claim, name: &StoredName) {
        let owner = claim.owner.as_str();
        let before = self.queues.remove(owner);
        let ticket = self.tickets.get(owner).copied();
        let order = before.as_ref().map(|before| before.order).or(ticket);
        let order = order.unwrap_or_else(|| self.queues.next_order());
        let hold = waiter_liveness(claim.ttl);
        // With hand-offs, the process of the waiter keeps its position alive.
        let liveness = if self.hands_off { WAITER_LIVENESS } else { hold };
        self.queues.insert(Position {
            order,
            name: name.clone(),
            owner: owner.to_owned(),
            alive_until_us: self.now_us + micros(liveness),
            waiter: Waiter {
                engine: None,
                holder: claim.takes_hand_offs().then(|| claim.process.clone()),
                hold_ms: hold.as_millis() as i32,
                share: claim.share,
            },
            keeps_ticket: before.as_ref().map_or(ticket.is_some(), |before| before.keeps_ticket),
        });
        self.recounted.extend(before.map(|before| before.name));
        self.recounted.push(name.clone());
    }

    /// Records the token of a new share as the last one of its name.
    fn record_fence(&mut self, claim: &Claim, names: &[StoredName], fence: Fence) {
        if claim.share.is_some() {
            let row = self.rows.entry(names[0].clone()).or_default();
            (row.fence, row.is_changed) = (fence.0 as i64, true);
        }
    }

    /// Returns the lease that ends next of those that hold a shared name, if the claim does not fit beside them.
    fn lease_in_the_way(&self, claim: &Claim, name: &StoredName) -> Option<HeldLease> {
        let (others, next_end) = self.shares_of_others(name, claim.owner.as_str());
        let is_busy = !others.with(claim.share?).is_within_limits();
        next_end.filter(|_| is_busy).map(|end_us| HeldLease {
            is_own: false,
            remaining: span(end_us - self.now_us),
            fence: 0,
        })
    }

    /// Removes the position of an owner.
    fn leave(&mut self, owner: &str) {
        let left = self.queues.remove(owner);
        self.recounted.extend(left.map(|position| position.name));
    }
}

pub(in crate::engine) fn micros(span: Duration) -> i64 {
    i64::try_from(span.as_micros()).unwrap_or(i64::MAX / 4)
}

pub(in crate::engine) fn span(micros: i64) -> Duration {
    Duration::from_micros(micros.max(0).unsigned_abs())
}
