//! The lifetime of an owner's requests: whether a request that is still in flight may have an effect.
//!
//! A node may execute a request without an answer at any time: a node that hung and continues, or a request in a buffer after
//! a new connection replaced the old one, on which the release has overtaken it. So the handler of a late answer holds the
//! lifetime, and checks it when the answer arrives.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

use crate::model::OwnerToken;

/// The lifetime of the requests of one owner. It ends with the release, or with the rollback of the attempt.
#[derive(Debug, Default)]
pub(in super::super) struct RequestLifetime {
    ended: CancellationToken,
    is_released: AtomicBool,
}

impl RequestLifetime {
    /// Ends the lifetime: nothing of the requests may be left on any node.
    pub(in super::super) fn end(&self) {
        self.ended.cancel();
    }

    /// Waits for the end of the lifetime.
    pub(in super::super) async fn ended(&self) {
        self.ended.cancelled().await;
    }

    pub(in super::super) fn has_ended(&self) -> bool {
        self.ended.is_cancelled()
    }

    /// Whether it has ended with a release, which is sent on the current connection to each node.
    pub(in super::super) fn is_released(&self) -> bool {
        self.is_released.load(SeqCst)
    }
}

/// The lifetimes with requests in flight, by owner.
#[derive(Debug, Default)]
pub(in super::super) struct RequestLifetimes(Mutex<Entries>);

#[derive(Debug, Default)]
struct Entries {
    by_owner: HashMap<OwnerToken, Weak<RequestLifetime>>,
    /// The number of entries at which unused ones are removed next.
    sweep_at: usize,
}

const SWEEP_LEAST: usize = 64;

impl RequestLifetimes {
    /// Starts the lifetime of an attempt to acquire. An earlier one of this owner is not affected.
    pub(in super::super) fn begin(&self, owner: &OwnerToken) -> Arc<RequestLifetime> {
        self.0.lock().begin(owner)
    }

    /// Returns the lifetime of an owner that holds a lease.
    pub(in super::super) fn join(&self, owner: &OwnerToken) -> Arc<RequestLifetime> {
        let mut entries = self.0.lock();
        let known = entries.by_owner.get(owner).and_then(Weak::upgrade);
        known.unwrap_or_else(|| entries.begin(owner))
    }

    /// Ends the lifetime of an owner. `is_released`: its release follows.
    pub(in super::super) fn end(&self, owner: &OwnerToken, is_released: bool) {
        let known = self.0.lock().by_owner.remove(owner);
        if let Some(lifetime) = known.and_then(|known| known.upgrade()) {
            // Before the end: code that sees the end reads this.
            lifetime.is_released.store(is_released, SeqCst);
            lifetime.end();
        }
    }
}

impl Entries {
    fn begin(&mut self, owner: &OwnerToken) -> Arc<RequestLifetime> {
        if self.by_owner.len() >= self.sweep_at.max(SWEEP_LEAST) {
            self.by_owner.retain(|_, lifetime| lifetime.strong_count() > 0);
            self.sweep_at = 2 * self.by_owner.len();
        }
        let lifetime = Arc::default();
        self.by_owner.insert(owner.clone(), Arc::downgrade(&lifetime));
        lifetime
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_applies_to_the_requests_in_flight_and_not_to_later_ones() {
        let lifetimes = RequestLifetimes::default();
        let owner = OwnerToken::fresh();
        let first = lifetimes.begin(&owner);
        assert!(Arc::ptr_eq(&first, &lifetimes.join(&owner)));
        lifetimes.end(&owner, false);
        assert!(first.has_ended() && !first.is_released());
        let second = lifetimes.begin(&owner);
        assert!(!second.has_ended());
        lifetimes.end(&OwnerToken::fresh(), true);
        assert!(!second.has_ended());
        lifetimes.end(&owner, true);
        assert!(second.has_ended() && second.is_released());
    }

    #[test]
    fn owners_without_requests_in_flight_are_forgotten() {
        let lifetimes = RequestLifetimes::default();
        let kept = lifetimes.begin(&OwnerToken::fresh());
        for _ in 0..10_000 {
            lifetimes.begin(&OwnerToken::fresh());
        }
        assert!(lifetimes.0.lock().by_owner.len() <= SWEEP_LEAST + 1);
        assert!(!kept.has_ended());
    }
}
