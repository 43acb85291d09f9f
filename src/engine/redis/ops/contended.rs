//! Names that expire: those that were busy a moment ago.

use std::collections::HashMap;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use crate::clock::Moment;
use crate::model::Key;

/// A name that was busy less than this time ago is likely to be busy again.
const RECENT: Duration = Duration::from_secs(2);
/// The largest number of names. Beyond it, no more are recorded.
const MOST_RECENT: usize = 1000;

/// Names with the moments of their ends.
#[derive(Default)]
pub(in super::super) struct ExpiringNames(Mutex<HashMap<Key, Moment>>);

impl ExpiringNames {
    fn names(&self) -> MutexGuard<'_, HashMap<Key, Moment>> {
        self.0.lock()
    }

    pub(in super::super) fn note(&self, key: &Key, until: Moment) {
        let mut names = self.names();
        if names.len() >= MOST_RECENT {
            names.retain(|_, until| !until.is_past());
            if names.len() >= MOST_RECENT {
                return;
            }
        }
        names.insert(key.clone(), until);
    }

    /// Returns the time until the moment of a name. Zero: it is not recorded any more.
    pub(in super::super) fn remaining(&self, key: &Key) -> Duration {
        self.names().get(key).map_or(Duration::ZERO, |until| until.remaining())
    }
}

/// The names that were busy a moment ago.
#[derive(Default)]
pub(in super::super) struct Contended(ExpiringNames);

impl Contended {
    /// Records that a name was busy.
    pub(in super::super) fn note(&self, key: &Key) {
        self.0.note(key, Moment::now() + RECENT);
    }

    /// Records that an attempt has found a name free.
    pub(in super::super) fn forget(&self, key: &Key) {
        self.0.names().remove(key);
    }

    /// Whether the last attempt, a moment ago, has found a name busy.
    pub(in super::super) fn is(&self, key: &Key) -> bool {
        !self.0.remaining(key).is_zero()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn names_are_remembered_for_a_while_and_not_without_end() {
        let contended = Contended::default();
        let key = |name: &str| Key::new(name).unwrap();
        contended.note(&key("n"));
        assert!(contended.is(&key("n")));
        assert!(!contended.is(&key("m")));
        contended.forget(&key("n"));
        assert!(!contended.is(&key("n")));
        contended.note(&key("n"));
        tokio::time::advance(RECENT).await;
        assert!(!contended.is(&key("n")));
        for i in 0..2 * MOST_RECENT {
            contended.note(&key(&i.to_string()));
        }
        assert_eq!(contended.0.names().len(), MOST_RECENT);
        tokio::time::advance(RECENT).await;
        contended.note(&key("n"));
        assert!(contended.is(&key("n")));
        assert_eq!(contended.0.names().len(), 1);
    }
}
