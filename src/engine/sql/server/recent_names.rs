//! Names of recent calls.

use std::collections::HashSet;

use parking_lot::Mutex;

use crate::engine::core::ledger::StoredName;

/// Names with a property, such as a locked row, that the next call for the name is likely to find again.
#[derive(Default)]
pub(super) struct RecentNames(Mutex<HashSet<StoredName>>);

impl RecentNames {
    /// Maximum number of names. A full set is cleared: names without further calls would stay.
    const MOST: usize = 1024;

    pub(super) fn have_one_of(&self, mut names: impl Iterator<Item = StoredName>) -> bool {
        let recent = self.0.lock();
        !recent.is_empty() && names.any(|name| recent.contains(&name))
    }

    /// Records whether a name has the property.
    pub(super) fn record(&self, name: &StoredName, has_it: bool) {
        let mut recent = self.0.lock();
        if !has_it {
            recent.remove(name);
            return;
        }
        if recent.len() >= Self::MOST {
            recent.clear();
        }
        recent.insert(name.clone());
    }
}
