//! Keeps local waiters in the order of their calls, where the store keeps no queue.
//!
//! The waiters of a name form a FIFO, and only the first one calls the store. Each call has an arrival number, which the service
//! counts; the order is that of these numbers. The waiters behind the first one share its answers: a store that does not answer it
//! does not answer them either.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::error::EngineError;
use crate::model::Key;

/// The FIFOs of one service, by name.
#[derive(Debug, Default)]
pub(super) struct LocalFifos {
    by_name: Mutex<HashMap<Key, Fifo>>,
    /// When the newest attempt began that the store has answered, for any name.
    answered: Mutex<Option<Instant>>,
}

#[derive(Debug, Default)]
struct Fifo {
    waiters: BTreeMap<u64, Arc<Notify>>,
    /// Since when the first waiter has had no answer, and the last error since then.
    unanswered: Option<(Instant, Option<EngineError>)>,
    answered_at: Option<Instant>,
}

/// A position in the FIFO of one name. Dropping it leaves the FIFO.
#[derive(Debug)]
pub(super) struct Position {
    fifos: Arc<LocalFifos>,
    key: Key,
    arrival: u64,
    wake: Arc<Notify>,
}

impl LocalFifos {
    /// Enters the FIFO of `key`.
    pub(super) fn enter(self: &Arc<Self>, key: &Key, arrival: u64) -> Position {
        let wake = Arc::new(Notify::new());
        self.by_name
            .lock()
            .entry(key.clone())
            .or_default()
            .waiters
            .insert(arrival, wake.clone());
        Position {
            fifos: self.clone(),
            key: key.clone(),
            arrival,
            wake,
        }
    }

    /// Wakes the first waiter of a name that this process released. The store's own notification may come later.
    pub(super) fn wake_first(&self, key: &Key) {
        if let Some((_, first)) = self
            .by_name
            .lock()
            .get(key)
            .and_then(|fifo| fifo.waiters.first_key_value())
        {
            first.notify_one();
        }
    }
}

impl Position {
    /// Returns the name.
    pub(super) fn key(&self) -> &Key {
        &self.key
    }

    /// Whether all earlier waiters have left.
    pub(super) fn is_first(&self) -> bool {
        let fifos = self.fifos.by_name.lock();
        let first = fifos.get(&self.key).and_then(|fifo| fifo.waiters.first_key_value());
        first.is_some_and(|(first, _)| *first == self.arrival)
    }

    /// Returns since when the store has not answered an attempt for the name. `begins`: an attempt begins.
    pub(super) fn unanswered_since(&self, begins: bool) -> Option<Instant> {
        let mut fifos = self.fifos.by_name.lock();
        let unanswered = &mut fifos.get_mut(&self.key)?.unanswered;
        if begins {
            // A store that has answered later attempts for other names works: only this request was lost.
            let answered = *self.fifos.answered.lock();
            unanswered.take_if(|(since, _)| answered.is_some_and(|answered| answered > *since));
            unanswered.get_or_insert_with(|| (Instant::now(), None));
        }
        unanswered.as_ref().map(|(since, _)| *since)
    }

    /// Whether the store has answered no attempt for any name that began after the one without an answer.
    pub(super) fn is_store_silent(&self) -> bool {
        let since = self.unanswered_since(false);
        let answered = *self.fifos.answered.lock();
        since.is_some_and(|since| answered.is_none_or(|answered| answered <= since))
    }

    /// Records that the store has answered an attempt for the name, which began at `began`.
    pub(super) fn answered(&self, began: Instant) {
        let mut fifos = self.fifos.by_name.lock();
        if let Some(fifo) = fifos.get_mut(&self.key) {
            fifo.unanswered = None;
            fifo.answered_at = Some(Instant::now());
        }
        let mut answered = self.fifos.answered.lock();
        *answered = (*answered).max(Some(began));
    }

    /// Records that an attempt for the name failed.
    pub(super) fn failed(&self, error: &EngineError) {
        let mut fifos = self.fifos.by_name.lock();
        let unanswered = fifos.get_mut(&self.key).and_then(|fifo| fifo.unanswered.as_mut());
        if let Some((_, last_error)) = unanswered {
            *last_error = Some(error.copy());
        }
    }

    /// Returns the last error since the store stopped answering.
    pub(super) fn last_error(&self) -> Option<EngineError> {
        let fifos = self.fifos.by_name.lock();
        let (_, error) = fifos.get(&self.key)?.unanswered.as_ref()?;
        error.as_ref().map(EngineError::copy)
    }

    /// Whether the store has answered an attempt for the name since `start`.
    pub(super) fn was_answered_since(&self, start: Instant) -> bool {
        let fifos = self.fifos.by_name.lock();
        let answered_at = fifos.get(&self.key).and_then(|fifo| fifo.answered_at);
        answered_at.is_some_and(|at| at >= start)
    }

    /// Waits until this position is the first, or this process released the name. May return spuriously.
    pub(super) async fn woken(&self) {
        self.wake.notified().await;
    }
}

impl Drop for Position {
    fn drop(&mut self) {
        let mut fifos = self.fifos.by_name.lock();
        let Some(fifo) = fifos.get_mut(&self.key) else { return };
        fifo.waiters.remove(&self.arrival);
        match fifo.waiters.first_key_value() {
            None => {
                fifos.remove(&self.key);
            }
            Some((first, next)) if *first > self.arrival => next.notify_one(),
            Some(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_fifo_advances_in_order_and_is_removed_when_empty() {
        let fifos = Arc::new(LocalFifos::default());
        let key = Key::new("n").unwrap();
        let enter = |arrival| fifos.enter(&key, arrival);
        let (first, second, third) = (enter(1), enter(3), enter(4));
        assert!(first.is_first() && !second.is_first() && !third.is_first());
        drop(second);
        assert!(first.is_first() && !third.is_first());
        drop(first);
        third.woken().await;
        assert!(third.is_first());
        fifos.wake_first(&key);
        third.woken().await;
        let returned = enter(2);
        assert!(returned.is_first() && !third.is_first());
        drop(returned);
        third.woken().await;
        drop(third);
        assert!(fifos.by_name.lock().is_empty());
    }
}
