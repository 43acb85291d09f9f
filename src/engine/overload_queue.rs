//! The order in which waiting attempts to acquire are made.
//!
//! The queue is first in, first out until the oldest attempt has waited for [`OVERLOAD`]; then the name of the newest attempt goes
//! first. After a stall the queue is full of attempts that are about to time out. In the order of arrival each of them would be sent
//! shortly before its timeout, and so would every later attempt while the load lasts. (Facebook's "adaptive LIFO": Maurer, "Fail
//! at Scale", ACM Queue 13(8), 2015.) Attempts for one name always keep their order: their callers are served in it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;

use crate::model::Key;

/// How long the oldest attempt waits before the newest name goes first: the store is slower than the calls arrive.
pub(super) const OVERLOAD: Duration = Duration::from_millis(500);

/// The waiting attempts of one engine.
#[derive(Debug)]
pub(super) struct OverloadQueue<T> {
    arrivals: u64,
    /// By number of arrival.
    waiting: BTreeMap<u64, Waiting<T>>,
    /// The numbers of arrival, by name.
    by_name: BTreeSet<(Key, u64)>,
}

#[derive(Debug)]
struct Waiting<T> {
    since: Instant,
    name: Key,
    attempt: T,
}

impl<T> Default for OverloadQueue<T> {
    fn default() -> Self {
        OverloadQueue {
            arrivals: 0,
            waiting: BTreeMap::new(),
            by_name: BTreeSet::new(),
        }
    }
}

impl<T> OverloadQueue<T> {
    /// Appends an attempt that waits since `since`. `name`: its first name.
    pub(super) fn push(&mut self, since: Instant, name: Key, attempt: T) {
        let arrival = self.arrivals;
        self.arrivals += 1;
        self.by_name.insert((name.clone(), arrival));
        self.waiting.insert(arrival, Waiting { since, name, attempt });
    }

    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Removes the attempt with this number of arrival.
    fn remove(&mut self, arrival: u64) -> Option<T> {
        let Waiting { name, attempt, .. } = self.waiting.remove(&arrival)?;
        self.by_name.remove(&(name, arrival));
        Some(attempt)
    }

    /// Removes the next attempt.
    pub(super) fn pop(&mut self) -> Option<T> {
        let (oldest, is_late) = self
            .waiting
            .first_key_value()
            .map(|(arrival, oldest)| (*arrival, oldest.since.elapsed() > OVERLOAD))?;
        let newest = self.waiting.last_key_value().filter(|_| is_late);
        let first_of_newest = newest.and_then(|(_, newest)| self.by_name.range((newest.name.clone(), 0)..).next());
        let next = first_of_newest.map_or(oldest, |(_, arrival)| *arrival);
        self.remove(next)
    }

    /// Removes the oldest attempts that fulfil a condition, up to the first one that does not.
    pub(super) fn drop_oldest_while(&mut self, condition: impl Fn(&T) -> bool) {
        while let Some((arrival, oldest)) = self.waiting.first_key_value()
            && condition(&oldest.attempt)
        {
            let arrival = *arrival;
            self.remove(arrival);
        }
    }

    /// Whether no attempt waits.
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The order of attempts for these names, of which the first wait for `wait` longer than the last one.
    async fn order(names: &[&'static str], wait: Duration) -> Vec<(&'static str, usize)> {
        let mut queue = OverloadQueue::default();
        let (last, first) = names.split_last().unwrap();
        for (index, name) in first.iter().enumerate() {
            queue.push(Instant::now(), Key::new(name).unwrap(), (*name, index));
        }
        tokio::time::advance(wait).await;
        queue.push(Instant::now(), Key::new(last).unwrap(), (*last, first.len()));
        let order = std::iter::from_fn(|| queue.pop()).collect();
        assert!(queue.waiting.is_empty() && queue.by_name.is_empty());
        order
    }

    #[tokio::test(start_paused = true)]
    async fn the_order_is_that_of_arrival_until_the_oldest_attempt_is_late() {
        let names = ["a", "b", "c", "b", "a"];
        let in_order = [("a", 0), ("b", 1), ("c", 2), ("b", 3), ("a", 4)];
        assert_eq!(order(&names, OVERLOAD / 2).await, in_order);
        let newest_first = [("a", 0), ("a", 4), ("b", 1), ("b", 3), ("c", 2)];
        assert_eq!(order(&names, OVERLOAD * 2).await, newest_first);
    }

    #[tokio::test(start_paused = true)]
    async fn attempts_for_one_name_keep_their_order_under_overload() {
        let served = order(&["n"; 5], OVERLOAD * 2).await;
        assert_eq!(served, [0, 1, 2, 3, 4].map(|index| ("n", index)));
    }
}
