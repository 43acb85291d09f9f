//! The entries of one name, in their order, and the rule that says which of them are granted.

use std::collections::BTreeMap;
use std::ops::Bound::{Included, Unbounded};
use std::sync::Arc;

use crate::model::{Share, Sums};

/// An entry that the store has created.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::engine) struct Entry {
    /// Identifies the entry in its name: unique, and known to its process before the store creates it.
    pub id: Arc<str>,
    /// The number that the store gave to its creation.
    pub position: u64,
    /// The share of the claim; that of a lock, if the name is not a shared one.
    pub share: Share,
}

/// Returns how many of the entries of a name are granted, and their sums. `shares`: those of all entries, in their order.
///
/// # Behavior
/// The longest run of oldest entries that can hold the name at the same time is granted. Of a lock this is the oldest entry.
pub(in crate::engine) fn granted(shares: impl IntoIterator<Item = Share>) -> (usize, Sums) {
    let mut granted = (0, Sums::default());
    for share in shares {
        let sums = granted.1.with(share);
        if !sums.is_within_limits() {
            break;
        }
        granted = (granted.0 + 1, sums);
    }
    granted
}

/// A change of the entries of a name.
#[derive(Debug, Clone)]
pub(in crate::engine) enum Change {
    Created(Entry),
    /// The entry with this id was deleted.
    Deleted(Arc<str>),
}

/// The entries of one name at one revision of the store.
///
/// # Behavior
/// A decision from a mirror that lags behind is safe: entries before another one can only disappear, and nothing is inserted
/// before it.
#[derive(Debug, Default)]
pub(in crate::engine) struct Mirror {
    /// Another program may give two entries the same position.
    entries: BTreeMap<(u64, Arc<str>), Share>,
    positions: BTreeMap<Arc<str>, u64>,
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
            Change::Deleted(id) => {
                if let Some(position) = self.positions.remove(&id) {
                    self.entries.remove(&(position, id));
                }
            }
        }
    }

    pub(super) fn has(&self, id: &str) -> bool {
        self.positions.contains_key(id)
    }

    /// Returns the granted entries, the next one, and the entry whose id begins with `prefix`. `None`: there is no such entry, or more
    /// than one, or it is granted.
    pub(in crate::engine) fn waits(&self, prefix: &str) -> Option<Vec<Arc<str>>> {
        let ids = self.positions.range::<str, _>((Included(prefix), Unbounded));
        let mut own = ids.map(|(id, _)| id).take_while(|id| id.starts_with(prefix));
        let (Some(own), None) = (own.next(), own.next()) else {
            return None;
        };
        let (count, _) = granted(self.entries.values().copied());
        let before = self.entries.keys().map(|(_, id)| id).take_while(|id| *id != own);
        let mut ids: Vec<Arc<str>> = before.take(count + 1).cloned().collect();
        ids.push(own.clone());
        (ids.len() > count).then_some(ids)
    }

    /// Returns the entries that are granted.
    pub(super) fn granted(&self) -> impl Iterator<Item = Entry> {
        let (count, _) = granted(self.entries.values().copied());
        let entries = self.entries.iter().take(count);
        entries.map(|((position, id), share)| Entry {
            id: id.clone(),
            position: *position,
            share: *share,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(shares: &[(u32, u32)]) -> usize {
        let shares = shares
            .iter()
            .map(|&(permits, limit)| Share::new(permits, limit).unwrap());
        granted(shares).0
    }

    #[test]
    fn the_longest_run_of_oldest_entries_that_fits_is_granted() {
        assert_eq!(run(&[]), 0);
        assert_eq!(run(&[(1, 1), (1, 1)]), 1);
        assert_eq!(run(&[(1, 2), (1, 2), (1, 2)]), 2);
        assert_eq!(run(&[(1, 1), (1, 2)]), 1, "the limit of the holder counts");
        assert_eq!(run(&[(1, 2), (1, 1)]), 1, "and that of the claim");
        assert_eq!(run(&[(1, 3), (3, 3), (1, 3)]), 1, "a heavy entry is not overtaken");
        assert_eq!(run(&[(1, 9), (2, 3), (7, 9)]), 2);
    }

    #[test]
    fn a_waiter_is_shown_with_what_is_before_it() {
        let mut mirror = Mirror::default();
        let entries = [("a", 1), ("b", 1), ("c", 2), ("d", 1), ("e", 1)];
        for (position, (id, permits)) in (1..).zip(entries) {
            let (id, share) = (id.into(), Share::new(permits, 3).unwrap());
            mirror.apply(Change::Created(Entry { id, position, share }));
        }
        let waits = |mirror: &Mirror, id| mirror.waits(id).map(|ids| ids.concat());
        assert_eq!(waits(&mirror, "e").as_deref(), Some("abce"));
        assert_eq!(waits(&mirror, "c").as_deref(), Some("abc"));
        assert_eq!((waits(&mirror, "b"), waits(&mirror, "x")), (None, None));
        // Without the heavy one, the next one fits.
        mirror.apply(Change::Deleted("c".into()));
        let granted = |mirror: &Mirror| mirror.granted().map(|entry| entry.id).collect::<Vec<_>>().concat();
        assert_eq!((waits(&mirror, "d"), granted(&mirror)), (None, "abd".to_owned()));
        assert_eq!(waits(&mirror, "e").as_deref(), Some("abde"));
    }

    #[test]
    fn an_entry_keeps_its_place_until_it_is_deleted() {
        let created = |id: &str, position| {
            let id = id.into();
            let share = Share::LOCK;
            Change::Created(Entry { id, position, share })
        };
        let mut mirror = Mirror::default();
        for change in [created("b", 7), created("c", 9), created("a", 7)] {
            mirror.apply(change);
        }
        let first = |mirror: &Mirror| mirror.granted().next().map(|entry| entry.id.to_string());
        assert_eq!(first(&mirror).as_deref(), Some("a"));
        mirror.apply(Change::Deleted("a".into()));
        mirror.apply(Change::Deleted("a".into()));
        assert_eq!(first(&mirror).as_deref(), Some("b"));
        mirror.apply(created("b", 12));
        assert_eq!(first(&mirror).as_deref(), Some("c"), "it was created again");
        assert!(mirror.has("b") && !mirror.has("a"));
        assert_eq!(mirror.waits("b"), Some(vec!["c".into(), "b".into()]));
        assert_eq!(
            (mirror.waits("c"), mirror.waits("x")),
            (None, None),
            "the oldest one, or unknown"
        );
        mirror.apply(created("b2", 13));
        assert_eq!(mirror.waits("b"), None, "a second one, of a repeated request");
        // The end of one of two entries in the same position is not that of the other one.
        mirror.apply(created("d", 9));
        mirror.apply(Change::Deleted("d".into()));
        assert_eq!(first(&mirror).as_deref(), Some("c"));
    }
}
