//! The queues of waiters.

use std::collections::{BTreeMap, HashMap};

use super::{Position, StoredName};

/// The order of the first position that has no ticket yet. Positions with a ticket come before it.
const NEW: u64 = 1 << 63;

/// The order and the owner. (The ticket that an owner had before may belong to another one after the tables were created again.)
type QueueKey = (u64, String);

/// The queues of names. An owner has one position at most.
#[derive(Debug, Default)]
pub(in crate::engine) struct Queues {
    queues: HashMap<StoredName, BTreeMap<QueueKey, Position>>,
    /// The position of each owner: its name, and its key in the queue.
    owners: HashMap<String, (StoredName, QueueKey)>,
    /// How many positions without a ticket there were.
    entered: u64,
    /// The owners whose positions were changed.
    changed: Vec<String>,
}

impl FromIterator<Position> for Queues {
    /// Creates the queues as they were read.
    fn from_iter<I: IntoIterator<Item = Position>>(positions: I) -> Self {
        let mut queues = Queues::default();
        positions.into_iter().for_each(|position| queues.insert(position));
        queues.changed.clear();
        queues
    }
}

impl Queues {
    /// Returns the position of an owner.
    pub(super) fn of(&self, owner: &str) -> Option<&Position> {
        let (name, key) = self.owners.get(owner)?;
        self.queues.get(name)?.get(key)
    }

    /// Returns the live positions of a name before an order.
    pub(in crate::engine) fn live(
        &self,
        name: &StoredName,
        before: u64,
        now_us: i64,
    ) -> impl DoubleEndedIterator<Item = &Position> {
        let queue = self.queues.get(name).into_iter();
        let ahead = queue.flat_map(move |queue| queue.range(..(before, String::new())));
        let positions = ahead.map(|(_, position)| position);
        positions.filter(move |position| position.is_alive(now_us))
    }

    /// Returns the order of a new position.
    pub(super) fn next_order(&mut self) -> u64 {
        self.entered += 1;
        NEW + self.entered
    }

    pub(super) fn insert(&mut self, position: Position) {
        let (name, owner) = (position.name.clone(), position.owner.clone());
        let key = (position.order, owner.clone());
        self.changed.push(owner.clone());
        self.owners.insert(owner, (name.clone(), key.clone()));
        self.queues.entry(name).or_default().insert(key, position);
    }

    pub(super) fn remove(&mut self, owner: &str) -> Option<Position> {
        let (name, key) = self.owners.remove(owner)?;
        let queue = self.queues.get_mut(&name)?;
        let position = queue.remove(&key);
        if queue.is_empty() {
            self.queues.remove(&name);
        }
        self.changed.push(owner.to_owned());
        position
    }

    /// Returns the positions that were entered or changed, and the owners that have left, since the last call.
    pub(super) fn take_changes(&mut self) -> (Vec<Position>, Vec<String>) {
        let mut owners = std::mem::take(&mut self.changed);
        owners.sort_unstable();
        owners.dedup();
        let left = owners.iter().filter(|owner| !self.owners.contains_key(*owner));
        let left = left.cloned().collect();
        let entered = owners.iter().filter_map(|owner| self.of(owner));
        let mut entered: Vec<Position> = entered.cloned().collect();
        entered.sort_unstable_by_key(|position| position.order);
        (entered, left)
    }

    /// Returns the number of positions.
    pub(in crate::engine) fn len(&self) -> usize {
        self.owners.len()
    }

    /// Returns the names that have a queue.
    pub(in crate::engine) fn names(&self) -> impl Iterator<Item = &StoredName> {
        self.queues.keys()
    }

    /// Makes every position live longer.
    pub(in crate::engine) fn extend(&mut self, by_us: i64) {
        let positions = self.queues.values_mut().flat_map(BTreeMap::values_mut);
        positions.for_each(|position| position.alive_until_us = position.alive_until_us.saturating_add(by_us));
    }

    /// Removes the first positions of a name, as far as they expired before a time.
    pub(in crate::engine) fn drop_expired(&mut self, name: &StoredName, before_us: i64) {
        let first = |queues: &Self| queues.queues.get(name)?.values().next().cloned();
        while let Some(first) = first(self).filter(|first| !first.is_alive(before_us)) {
            self.remove(&first.owner);
        }
    }

    /// Removes the positions that expired before a time.
    pub(in crate::engine) fn sweep(&mut self, before_us: i64) {
        let (queues, owners) = (&mut self.queues, &mut self.owners);
        queues.retain(|_, queue| {
            queue.retain(|_, position| {
                let is_kept = position.is_alive(before_us);
                if !is_kept {
                    owners.remove(&position.owner);
                }
                is_kept
            });
            !queue.is_empty()
        });
    }
}
