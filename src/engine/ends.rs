//! The ends of the leases that this process holds, in stores where an entry lasts as long as a session of the process (etcd,
//! ZooKeeper).
//!
//! A lease ends at its ttl, although its session lasts longer: the engine deletes its entry at that moment, if the entry has not
//! changed since.

use std::collections::{BTreeSet, HashMap};
use std::hash::Hash;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::clock::Moment;

/// The longest time between two readings of the clock. Timers stop while the machine is suspended.
const CLOCK_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Values with the moments of their ends.
pub(super) struct Ends<K, V> {
    state: Mutex<State<K, V>>,
    /// The first end is earlier than [`Ends::due`] expects.
    is_earlier: Notify,
}

struct State<K, V> {
    values: HashMap<K, (Moment, V)>,
    order: BTreeSet<(Moment, K)>,
    /// When [`Ends::due`] reads the clock again.
    wakes_at: Moment,
}

impl<K: Hash + Ord + Clone, V: Clone> Ends<K, V> {
    pub(super) fn new() -> Self {
        let state = State {
            values: HashMap::new(),
            order: BTreeSet::new(),
            wakes_at: Moment::from_nanos(u64::MAX),
        };
        Ends {
            state: Mutex::new(state),
            is_earlier: Notify::new(),
        }
    }

    /// Inserts or replaces a value that ends at `end`.
    pub(super) fn insert(&self, key: K, value: V, end: Moment) {
        let mut state = self.state.lock();
        if let Some((before, _)) = state.values.insert(key.clone(), (end, value)) {
            state.order.remove(&(before, key.clone()));
        }
        state.order.insert((end, key));
        if end < state.wakes_at {
            self.is_earlier.notify_one();
        }
    }

    /// Returns a value.
    pub(super) fn get(&self, key: &K) -> Option<V> {
        self.state.lock().values.get(key).map(|(_, value)| value.clone())
    }

    /// Calls a function with the end and the value. Makes the value end at the moment that it returns, and returns whether there is one.
    pub(super) fn update(&self, key: &K, change: impl FnOnce(Moment, &mut V) -> Option<Moment>) -> bool {
        let mut state = self.state.lock();
        let state = &mut *state;
        let Some((at, value)) = state.values.get_mut(key) else {
            return false;
        };
        let Some(end) = change(*at, value) else { return false };
        state.order.remove(&(*at, key.clone()));
        state.order.insert((end, key.clone()));
        *at = end;
        if end < state.wakes_at {
            self.is_earlier.notify_one();
        }
        true
    }

    /// Removes a value.
    pub(super) fn remove(&self, key: &K) -> Option<V> {
        let mut state = self.state.lock();
        let (at, value) = state.values.remove(key)?;
        state.order.remove(&(at, key.clone()));
        Some(value)
    }

    /// Whether a value satisfies a condition.
    pub(super) fn any(&self, condition: impl Fn(&V) -> bool) -> bool {
        self.state.lock().values.values().any(|(_, value)| condition(value))
    }

    /// Waits until values end. Removes and returns them.
    pub(super) async fn due(&self) -> Vec<(K, V)> {
        loop {
            let wait = {
                let mut state = self.state.lock();
                let now = Moment::now();
                let mut ended = Vec::new();
                while let Some((_, key)) = state.order.first().filter(|(end, _)| *end <= now).cloned() {
                    state.order.pop_first();
                    if let Some((_, value)) = state.values.remove(&key) {
                        ended.push((key, value));
                    }
                }
                if !ended.is_empty() {
                    return ended;
                }
                let first = state.order.first().map(|(end, _)| *end);
                let wait = first.map(|end| end.remaining().min(CLOCK_CHECK_INTERVAL));
                state.wakes_at = wait.map_or(Moment::from_nanos(u64::MAX), |wait| now + wait);
                wait
            };
            match wait {
                Some(wait) => tokio::select! {
                    () = self.is_earlier.notified() => {}
                    () = tokio::time::sleep(wait) => {}
                },
                None => self.is_earlier.notified().await,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn values_are_returned_at_their_ends() {
        let ends = Ends::new();
        let start = Moment::now();
        let after = |ms| start + Duration::from_millis(ms);
        ends.insert("late", 1, after(3000));
        ends.insert("early", 2, after(200));
        ends.insert("removed", 3, after(100));
        assert!(!ends.update(&"early", |_, _| None) && ends.get(&"early") == Some(2));
        assert_eq!(ends.remove(&"removed"), Some(3));
        assert_eq!(ends.remove(&"removed"), None);
        assert_eq!(ends.due().await, [("early", 2)]);
        assert!(start.elapsed() >= Duration::from_millis(200));
        let earlier = async {
            tokio::time::sleep(Duration::from_millis(100)).await;
            ends.insert("new", 4, after(500));
            assert!(ends.update(&"late", |end, _| Some(end + Duration::from_secs(1))));
        };
        let (due, ()) = tokio::join!(ends.due(), earlier);
        assert_eq!(due, [("new", 4)]);
        assert!(start.elapsed() < Duration::from_millis(900), "{:?}", start.elapsed());
        assert_eq!(ends.due().await, [("late", 1)]);
        assert!(start.elapsed() >= Duration::from_secs(4));
        assert!(!ends.any(|_| true) && ends.get(&"late").is_none());
    }
}
