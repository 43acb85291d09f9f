//! The entries of one name, in their order, and the rule that says which of them are granted.

use std::collections::BTreeMap;
use std::ops::Bound::{Included, Unbounded};
use std::sync::Arc;

use crate::model::OwnerToken;

/// The position of an entry among those of its name: the number that the store gave to its creation, and its index among the entries of
/// that step.
pub(in crate::engine) type Position = (u64, u32);

/// What a claim needs of a name. A lock is the share 1 of 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::engine) struct Share {
    pub weight: u32,
    /// The maximum sum of weights while the claim holds.
    pub limit: u32,
}

impl Share {
    /// An exclusive lock.
    pub(in crate::engine) const LOCK: Share = Share { weight: 1, limit: 1 };
}

/// An entry that the store has created.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::engine) struct Entry {
    /// Identifies the entry in its name: unique, and known to its process before the store creates it.
    pub id: Arc<str>,
    pub position: Position,
    pub share: Share,
}

/// A change of the entries of a name.
#[derive(Debug, Clone)]
pub(in crate::engine) enum Change {
    Created(Entry),
    /// The entry with this id, which a claim of this owner had created, was deleted.
    Deleted(Arc<str>, Option<OwnerToken>),
}

/// The entries of one name at one revision of the store.
///
/// # Behavior
/// A decision from a mirror that lags behind is safe: entries before another one can only disappear, and nothing is inserted
/// before it.
#[derive(Debug, Default)]
pub(in crate::engine) struct Mirror {
    /// Another program may give two entries the same position.
    entries: BTreeMap<(Position, Arc<str>), Share>,
    positions: BTreeMap<Arc<str>, Position>,
}

impl Mirror {
    pub(super) fn apply(&mut self, change: Change) {
        match change {
            Change::Created(Entry { id, position, share }) => {
                if let Some(before) = self.positions.insert(id.clone(), position) {
                    self.entries.remove(&(before, id.clone()));
                }
                self.entries.insert((position, id), share);
            }
            Change::Deleted(id, _) => {
                if let Some(position) = self.positions.remove(&id) {
                    self.entries.remove(&(position, id));
                }
            }
        }
    }

    pub(super) fn has(&self, id: &str) -> bool {
        self.positions.contains_key(id)
    }

    /// Returns the entry whose id begins with `prefix`, and the oldest one. `None`: there is no such entry, or more than one, or it is
    /// granted.
    pub(in crate::engine) fn waits(&self, prefix: &str) -> Option<[Arc<str>; 2]> {
        let ids = self.positions.range::<str, _>((Included(prefix), Unbounded));
        let mut own = ids.map(|(id, _)| id).take_while(|id| id.starts_with(prefix));
        let (Some(own), None) = (own.next(), own.next()) else {
            return None;
        };
        let is_granted = self.granted().any(|granted| granted == own);
        let oldest = self.granted().next().filter(|_| !is_granted)?;
        Some([own.clone(), oldest.clone()])
    }

    /// Returns the entries that are granted: the longest run of oldest entries that fits.
    pub(super) fn granted(&self) -> impl Iterator<Item = &Arc<str>> {
        granted(self.entries.iter().map(|((_, id), share)| (id, *share)))
    }
}

/// Returns the granted ones of the entries of a name, which are in their order.
///
/// # Behavior
/// From the oldest entry on, it adds up the weights and keeps the smallest limit. An entry is granted while the sum is at most
/// that limit, so only the oldest entry of a lock holds.
fn granted<T>(entries: impl IntoIterator<Item = (T, Share)>) -> impl Iterator<Item = T> {
    let (mut sum, mut least) = (0_u64, u32::MAX);
    entries
        .into_iter()
        .take_while(move |(_, share)| {
            sum += u64::from(share.weight);
            least = least.min(share.limit);
            sum <= u64::from(least)
        })
        .map(|(entry, _)| entry)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(shares: &[(u32, u32)]) -> usize {
        granted(shares.iter().map(|&(weight, limit)| ((), Share { weight, limit }))).count()
    }

    #[test]
    fn the_longest_run_of_oldest_entries_that_fits_is_granted() {
        assert_eq!(run(&[]), 0);
        assert_eq!(run(&[(1, 1), (1, 1)]), 1);
        assert_eq!(run(&[(1, 2), (1, 2), (1, 2)]), 2);
        assert_eq!(run(&[(1, 1), (1, 2)]), 1, "the limit of the holder counts");
        assert_eq!(run(&[(1, 2), (1, 1)]), 1, "and that of the claim");
        assert_eq!(run(&[(1, 3), (3, 3), (1, 3)]), 1, "a heavy entry is not overtaken");
        assert_eq!(run(&[(u32::MAX, u32::MAX), (u32::MAX, u32::MAX)]), 1);
    }

    #[test]
    fn an_entry_keeps_its_place_until_it_is_deleted() {
        let created = |id: &str, position| {
            let id = id.into();
            let share = Share::LOCK;
            Change::Created(Entry { id, position, share })
        };
        let mut mirror = Mirror::default();
        for change in [created("b", (7, 1)), created("c", (9, 0)), created("a", (7, 0))] {
            mirror.apply(change);
        }
        let first = |mirror: &Mirror| mirror.granted().next().map(|id| id.to_string());
        assert_eq!(first(&mirror).as_deref(), Some("a"));
        mirror.apply(Change::Deleted("a".into(), None));
        mirror.apply(Change::Deleted("a".into(), None));
        assert_eq!(first(&mirror).as_deref(), Some("b"));
        mirror.apply(created("b", (12, 0)));
        assert_eq!(first(&mirror).as_deref(), Some("c"), "it was created again");
        assert!(mirror.has("b") && !mirror.has("a"));
        assert_eq!(mirror.waits("b"), Some(["b".into(), "c".into()]));
        assert_eq!(
            (mirror.waits("c"), mirror.waits("x")),
            (None, None),
            "granted, or unknown"
        );
        mirror.apply(created("b2", (13, 0)));
        assert_eq!(mirror.waits("b"), None, "a second one, of a repeated request");
        // The end of one of two entries in the same position is not that of the other one.
        mirror.apply(created("d", (9, 0)));
        mirror.apply(Change::Deleted("d".into(), None));
        assert_eq!(first(&mirror).as_deref(), Some("c"));
    }
}
