//! The lines of local waiters: where a store keeps no queue, the waiters of one name in one process stand in a line, and
//! only the first of them talks to the store.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use crate::model::Key;

/// All lines of one service.
#[derive(Debug, Default)]
pub(super) struct Lines(Mutex<HashMap<Key, VecDeque<Arc<Notify>>>>);

/// A place in the line of one name. Dropping it gives it up.
#[derive(Debug)]
pub(super) struct Place {
    lines: Arc<Lines>,
    key: Key,
    me: Arc<Notify>,
}

impl Lines {
    fn lock(&self) -> MutexGuard<'_, HashMap<Key, VecDeque<Arc<Notify>>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the last place in the line of `key`.
    pub(super) fn enter(self: &Arc<Self>, key: &Key) -> Place {
        let me = Arc::new(Notify::new());
        self.lock().entry(key.clone()).or_default().push_back(me.clone());
        Place {
            lines: self.clone(),
            key: key.clone(),
            me,
        }
    }

    /// Whether anybody stands in the line of `key`.
    pub(super) fn is_occupied(&self, key: &Key) -> bool {
        self.lock().contains_key(key)
    }

    /// Tells the first in line that this process freed the name: it need not wait for the store's own word.
    pub(super) fn nudge(&self, key: &Key) {
        if let Some(first) = self.lock().get(key).and_then(VecDeque::front) {
            first.notify_one();
        }
    }
}

impl Place {
    /// The name whose line this is.
    pub(super) fn key(&self) -> &Key {
        &self.key
    }

    /// Whether everybody in front has gone.
    pub(super) fn is_first(&self) -> bool {
        let lines = self.lines.lock();
        lines
            .get(&self.key)
            .and_then(VecDeque::front)
            .is_some_and(|first| Arc::ptr_eq(first, &self.me))
    }

    /// Waits until this place has become the first, or the name was freed here. May return without need.
    pub(super) async fn told(&self) {
        self.me.notified().await;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut lines = self.lines.lock();
        let Some(line) = lines.get_mut(&self.key) else { return };
        let was_first = line.front().is_some_and(|first| Arc::ptr_eq(first, &self.me));
        line.retain(|place| !Arc::ptr_eq(place, &self.me));
        match line.front() {
            None => {
                lines.remove(&self.key);
            }
            Some(next) if was_first => next.notify_one(),
            Some(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_line_moves_in_order_and_leaves_nothing() {
        let lines = Arc::new(Lines::default());
        let key = Key::new("n").unwrap();
        let (first, second, third) = (lines.enter(&key), lines.enter(&key), lines.enter(&key));
        assert!(first.is_first() && !second.is_first() && !third.is_first());
        drop(second);
        assert!(first.is_first() && !third.is_first());
        drop(first);
        third.told().await;
        assert!(third.is_first());
        lines.nudge(&key);
        third.told().await;
        drop(third);
        assert!(!lines.is_occupied(&key));
    }
}
