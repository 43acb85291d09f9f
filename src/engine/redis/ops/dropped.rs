//! The owners of attempts that were dropped before their answer.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use parking_lot::{Mutex, MutexGuard};

use crate::model::{Claim, OwnerToken};

/// The owners of attempts that were dropped before their answer.
#[derive(Default)]
pub(in super::super) struct Dropped {
    any: AtomicBool,
    owners: Mutex<HashSet<OwnerToken>>,
}

/// Guard of an attempt in progress. Dropping it without [`Unanswered::answered`] records the owner, if the attempt was sent.
pub(in super::super) struct Unanswered<'a>(Option<&'a Dropped>, &'a Claim);

impl Dropped {
    pub(in super::super) fn watch<'a>(&'a self, claim: &'a Claim) -> Unanswered<'a> {
        Unanswered(Some(self), claim)
    }

    fn owners(&self) -> MutexGuard<'_, HashSet<OwnerToken>> {
        self.owners.lock()
    }

    /// Whether an attempt of an owner was dropped.
    pub(in super::super) fn has(&self, owner: &OwnerToken) -> bool {
        self.any.load(Relaxed) && self.owners().contains(owner)
    }

    /// Forgets an owner. Returns whether an attempt of it was dropped.
    pub(in super::super) fn take(&self, owner: &OwnerToken) -> bool {
        if !self.any.load(Relaxed) {
            return false;
        }
        let mut owners = self.owners();
        let known = owners.remove(owner);
        if owners.is_empty() {
            owners.shrink_to_fit();
            self.any.store(false, Relaxed);
        }
        known
    }
}

impl Unanswered<'_> {
    pub(in super::super) fn answered(mut self) {
        self.0 = None;
    }
}

impl Drop for Unanswered<'_> {
    fn drop(&mut self) {
        if let Some(dropped) = self.0
            && self.1.was_sent()
        {
            let mut owners = dropped.owners();
            owners.insert(self.1.owner.clone());
            dropped.any.store(true, Relaxed);
        }
    }
}
