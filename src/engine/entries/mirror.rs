//! The entries of one name, in their order. The oldest one holds the name.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound::{Included, Unbounded};
use std::sync::Arc;

/// An entry that the store has created.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::engine) struct Entry {
    /// Identifies the entry in its name: unique, and known to its process before the store creates it.
    pub id: Arc<str>,
    /// The number that the store gave to its creation.
    pub position: u64,
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
    entries: BTreeSet<(u64, Arc<str>)>,
    positions: BTreeMap<Arc<str>, u64>,
}

impl Mirror {
    pub(super) fn apply(&mut self, change: Change) {
        match change {
            Change::Created(Entry { id, position }) => {
                if let Some(before) = self.positions.insert(id.clone(), position) {
                    self.entries.remove(&(before, id.clone()));
                }
                self.entries.insert((position, id));
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

    /// Returns the entry whose id begins with `prefix`, and the oldest one. `None`: there is no such entry, or more than one, or it is
    /// the oldest one.
    pub(in crate::engine) fn waits(&self, prefix: &str) -> Option<[Arc<str>; 2]> {
        let ids = self.positions.range::<str, _>((Included(prefix), Unbounded));
        let mut own = ids.map(|(id, _)| id).take_while(|id| id.starts_with(prefix));
        let (Some(own), None) = (own.next(), own.next()) else {
            return None;
        };
        let (_, oldest) = self.oldest().filter(|(_, oldest)| oldest != own)?;
        Some([own.clone(), oldest.clone()])
    }

    /// Returns the position and the id of the entry that holds the name.
    pub(super) fn oldest(&self) -> Option<&(u64, Arc<str>)> {
        self.entries.first()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_keeps_its_place_until_it_is_deleted() {
        let created = |id: &str, position| {
            let id = id.into();
            Change::Created(Entry { id, position })
        };
        let mut mirror = Mirror::default();
        for change in [created("b", 7), created("c", 9), created("a", 7)] {
            mirror.apply(change);
        }
        let first = |mirror: &Mirror| mirror.oldest().map(|(_, id)| id.to_string());
        assert_eq!(first(&mirror).as_deref(), Some("a"));
        mirror.apply(Change::Deleted("a".into()));
        mirror.apply(Change::Deleted("a".into()));
        assert_eq!(first(&mirror).as_deref(), Some("b"));
        mirror.apply(created("b", 12));
        assert_eq!(first(&mirror).as_deref(), Some("c"), "it was created again");
        assert!(mirror.has("b") && !mirror.has("a"));
        assert_eq!(mirror.waits("b"), Some(["b".into(), "c".into()]));
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
