//! The lifetime of an owner's requests: whether a request that is still in flight may have an effect.
//!
//! A node may execute a request without an answer at any time: a node that hung and continues, or a request in a buffer after
//! a new connection replaced the old one, on which the release has overtaken it. So the handler of a late answer holds the
//! lifetime, and checks it when the answer arrives.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::model::OwnerToken;

/// The lifetime of the requests of one owner. It ends with the release, or with the rollback of the attempt.
#[derive(Debug, Default)]
pub(super) struct RequestLifetime {
    has_ended: AtomicBool,
    ended: Notify,
    /// For each node the number of the connection on which the release was sent. Zero: there was none.
    released_on: OnceLock<Box<[u64]>>,
}

impl RequestLifetime {
    /// Ends the lifetime: nothing of the requests may be left on any node.
    pub(super) fn end(&self) {
        // Together with the mark of a late vote, one order: an abandoned round and a late vote see each other (`acquire/round.rs`).
        self.has_ended.store(true, Ordering::SeqCst);
        self.ended.notify_waiters();
    }

    /// Waits for the end of the lifetime.
    pub(super) async fn ended(&self) {
        let ended = self.ended.notified();
        if !self.has_ended() {
            ended.await;
        }
    }

    pub(super) fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::SeqCst)
    }

    /// Returns whether the release was sent to a node on this connection: the node executes it after all earlier requests there.
    pub(super) fn is_released_on(&self, node: usize, connection: u64) -> bool {
        connection != 0
            && self
                .released_on
                .get()
                .is_some_and(|numbers| numbers[node] == connection)
    }
}

/// The lifetimes with requests in flight, by owner.
#[derive(Debug, Default)]
pub(super) struct RequestLifetimes(Mutex<Entries>);

#[derive(Debug, Default)]
struct Entries {
    by_owner: HashMap<OwnerToken, Weak<RequestLifetime>>,
    /// The number of entries at which unused ones are removed next.
    sweep_at: usize,
}

const SWEEP_LEAST: usize = 64;

impl RequestLifetimes {
    /// Starts the lifetime of an attempt to acquire. Returns it, and whether no earlier one of this owner is known. An earlier
    /// one is not affected.
    pub(super) fn begin(&self, owner: &OwnerToken) -> (Arc<RequestLifetime>, bool) {
        let lifetime = Arc::new(RequestLifetime::default());
        let is_first = self.0.lock().insert(owner, &lifetime);
        (lifetime, is_first)
    }

    /// Returns the lifetime of an owner that holds a lease.
    pub(super) fn join(&self, owner: &OwnerToken) -> Arc<RequestLifetime> {
        let mut entries = self.0.lock();
        let lifetime = entries.by_owner.get(owner).and_then(Weak::upgrade);
        lifetime.unwrap_or_else(|| {
            let lifetime = Arc::new(RequestLifetime::default());
            entries.insert(owner, &lifetime);
            lifetime
        })
    }

    /// Ends the lifetime of an owner.
    pub(super) fn end(&self, owner: &OwnerToken) {
        if let Some(lifetime) = self.remove(owner) {
            lifetime.end();
        }
    }

    /// Ends the lifetime of an owner whose release is sent on these connections, node by node. Zero: there is none.
    pub(super) fn end_on(&self, owner: &OwnerToken, numbers: impl Iterator<Item = u64>) {
        if let Some(lifetime) = self.remove(owner) {
            // Before the end: code that sees the end reads the numbers.
            lifetime.released_on.get_or_init(|| numbers.collect());
            lifetime.end();
        }
    }

    fn remove(&self, owner: &OwnerToken) -> Option<Arc<RequestLifetime>> {
        self.0.lock().by_owner.remove(owner)?.upgrade()
    }
}

impl Entries {
    fn insert(&mut self, owner: &OwnerToken, lifetime: &Arc<RequestLifetime>) -> bool {
        if self.by_owner.len() >= self.sweep_at.max(SWEEP_LEAST) {
            self.by_owner.retain(|_, lifetime| lifetime.strong_count() > 0);
            self.sweep_at = 2 * self.by_owner.len();
        }
        self.by_owner.insert(owner.clone(), Arc::downgrade(lifetime)).is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_applies_to_the_requests_in_flight_and_not_to_later_ones() {
        let lifetimes = RequestLifetimes::default();
        let owner = OwnerToken::fresh();
        let (first, is_first) = lifetimes.begin(&owner);
        assert!(is_first);
        assert!(Arc::ptr_eq(&first, &lifetimes.join(&owner)));
        lifetimes.end(&owner);
        assert!(first.has_ended());
        let (second, _) = lifetimes.begin(&owner);
        assert!(!second.has_ended());
        lifetimes.end(&OwnerToken::fresh());
        assert!(!second.has_ended());
    }

    #[test]
    fn a_release_is_behind_earlier_requests_on_the_same_connection() {
        let lifetimes = RequestLifetimes::default();
        let owner = OwnerToken::fresh();
        let (lifetime, _) = lifetimes.begin(&owner);
        assert!(!lifetime.is_released_on(0, 7));
        lifetimes.end_on(&owner, [7, 0].into_iter());
        assert!(lifetime.has_ended());
        assert_eq!([7, 8].map(|number| lifetime.is_released_on(0, number)), [true, false]);
        assert!(!lifetime.is_released_on(1, 0), "without a connection there is no order");
    }

    #[test]
    fn owners_without_requests_in_flight_are_forgotten() {
        let lifetimes = RequestLifetimes::default();
        let (kept, _) = lifetimes.begin(&OwnerToken::fresh());
        for _ in 0..10_000 {
            lifetimes.begin(&OwnerToken::fresh());
        }
        assert!(lifetimes.0.lock().by_owner.len() <= SWEEP_LEAST + 1);
        assert!(!kept.has_ended());
    }
}
