//! What is still on its way to a node, and whether it may stay when it arrives.
//!
//! A request whose answer is not in may be carried out at any time: by a node that hangs and goes on, or from a buffer
//! after the connection was replaced by another, on which the release has overtaken it. So whoever waits for a late
//! answer holds the owner's tenure, and looks at it when the answer is there.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use tokio::sync::Notify;

use crate::model::OwnerToken;

/// Whether an owner still wants what it asked for.
#[derive(Debug, Default)]
pub(super) struct Tenure {
    is_over: AtomicBool,
    ended: Notify,
    /// The lanes, node by node, on which the release went out. Zero: none.
    released_on: OnceLock<Box<[u64]>>,
}

impl Tenure {
    /// Nothing of it may be left on any node.
    pub(super) fn end(&self) {
        self.is_over.store(true, Ordering::Release);
        self.ended.notify_waiters();
    }

    /// Waits for the end of the tenure.
    pub(super) async fn ended(&self) {
        let ended = self.ended.notified();
        if !self.is_over() {
            ended.await;
        }
    }

    pub(super) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    /// Whether the release went out on this lane to a node: it is carried out after whatever went out on it before.
    pub(super) fn is_released_on(&self, node: usize, lane: u64) -> bool {
        lane != 0 && self.released_on.get().is_some_and(|lanes| lanes[node] == lane)
    }
}

/// The tenures with something on its way, by owner.
#[derive(Debug, Default)]
pub(super) struct Tenures(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    tenures: HashMap<OwnerToken, Weak<Tenure>>,
    /// When to look next for entries that nobody holds any more.
    sweep_at: usize,
}

const SWEEP_LEAST: usize = 64;

impl Tenures {
    fn with<R>(&self, act: impl FnOnce(&mut Known) -> R) -> R {
        act(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// A new tenure, for an attempt to acquire, and whether it is the owner's first for all that is known. What is left of an
    /// earlier one goes its own way.
    pub(super) fn begin(&self, owner: &OwnerToken) -> (Arc<Tenure>, bool) {
        let tenure = Arc::new(Tenure::default());
        let is_first = self.with(|known| known.insert(owner, &tenure));
        (tenure, is_first)
    }

    /// The tenure of an owner that holds a lease.
    pub(super) fn join(&self, owner: &OwnerToken) -> Arc<Tenure> {
        self.with(|known| {
            let tenure = known.tenures.get(owner).and_then(Weak::upgrade);
            tenure.unwrap_or_else(|| {
                let tenure = Arc::new(Tenure::default());
                known.insert(owner, &tenure);
                tenure
            })
        })
    }

    /// The owner lets go.
    pub(super) fn end(&self, owner: &OwnerToken) {
        if let Some(tenure) = self.remove(owner) {
            tenure.end();
        }
    }

    /// The owner lets go, and its release goes out on these lanes (node by node; zero: not on a lane).
    pub(super) fn end_on(&self, owner: &OwnerToken, lanes: impl Iterator<Item = u64>) {
        if let Some(tenure) = self.remove(owner) {
            // Before it counts as over: whoever sees that looks for the lanes.
            tenure.released_on.get_or_init(|| lanes.collect());
            tenure.end();
        }
    }

    fn remove(&self, owner: &OwnerToken) -> Option<Arc<Tenure>> {
        self.with(|known| known.tenures.remove(owner))?.upgrade()
    }
}

impl Known {
    fn insert(&mut self, owner: &OwnerToken, tenure: &Arc<Tenure>) -> bool {
        if self.tenures.len() >= self.sweep_at.max(SWEEP_LEAST) {
            self.tenures.retain(|_, tenure| tenure.strong_count() > 0);
            self.sweep_at = 2 * self.tenures.len();
        }
        self.tenures.insert(owner.clone(), Arc::downgrade(tenure)).is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_owner_ends_what_is_under_way_and_not_what_it_begins_later() {
        let tenures = Tenures::default();
        let owner = OwnerToken::fresh();
        let (first, is_first) = tenures.begin(&owner);
        assert!(is_first);
        assert!(Arc::ptr_eq(&first, &tenures.join(&owner)));
        tenures.end(&owner);
        assert!(first.is_over());
        let (second, _) = tenures.begin(&owner);
        assert!(!second.is_over());
        tenures.end(&OwnerToken::fresh());
        assert!(!second.is_over());
    }

    #[test]
    fn a_release_is_behind_what_went_out_on_the_same_lane() {
        let tenures = Tenures::default();
        let owner = OwnerToken::fresh();
        let (tenure, _) = tenures.begin(&owner);
        assert!(!tenure.is_released_on(0, 7));
        tenures.end_on(&owner, [7, 0].into_iter());
        assert!(tenure.is_over());
        assert_eq!([7, 8].map(|lane| tenure.is_released_on(0, lane)), [true, false]);
        assert!(
            !tenure.is_released_on(1, 0),
            "what went out on no lane is behind nothing"
        );
    }

    #[test]
    fn owners_with_nothing_on_its_way_are_forgotten() {
        let tenures = Tenures::default();
        let (kept, _) = tenures.begin(&OwnerToken::fresh());
        for _ in 0..10_000 {
            tenures.begin(&OwnerToken::fresh());
        }
        assert!(tenures.with(|known| known.tenures.len()) <= SWEEP_LEAST + 1);
        assert!(!kept.is_over());
    }
}
