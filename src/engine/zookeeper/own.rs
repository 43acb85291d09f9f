//! The entries of this engine's claims.

use std::collections::HashMap;
use std::time::{SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;

use super::layout::Child;
use super::record::Record;
use crate::model::{Fence, Key, OwnerToken};

/// An entry that this engine has created or taken over.
#[derive(Debug, Clone)]
pub(super) struct Node {
    pub key: Key,
    pub child: Child,
    /// The version of its data. -1: not known.
    pub version: i32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    Waiting,
    Held(Fence),
    /// Released, but the name stays busy.
    Kept,
}

/// The entries of one claim.
#[derive(Debug, Clone)]
pub(super) struct Own {
    /// In the order of the names.
    pub nodes: Vec<Node>,
    pub phase: Phase,
    /// The data of the entries.
    pub record: Record,
    /// The session that the entries belong to.
    pub session: i64,
    /// Whether it is a claim of several names.
    pub is_set: bool,
    pub needs_token: bool,
}

impl Own {
    /// Whether it has an entry of each of the names, and no others.
    pub(super) fn has_all(&self, keys: &[Key]) -> bool {
        self.nodes.iter().map(|node| &node.key).eq(keys)
    }

    /// Sets the phase. A waiter that is granted holds from now on.
    pub(super) fn set_phase(&mut self, phase: Phase) {
        if self.phase == Phase::Waiting && phase != Phase::Waiting {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            self.record.since = Some(now.as_millis() as u64);
        }
        self.phase = phase;
    }
}

/// The claims of this engine by owner.
#[derive(Debug, Default)]
pub(super) struct OwnClaims(Mutex<HashMap<OwnerToken, Own>>);

impl OwnClaims {
    pub(super) fn get(&self, owner: &OwnerToken) -> Option<Own> {
        self.0.lock().get(owner).cloned()
    }

    pub(super) fn insert(&self, owner: &OwnerToken, own: Own) {
        self.0.lock().insert(owner.clone(), own);
    }

    pub(super) fn remove(&self, owner: &OwnerToken) -> Option<Own> {
        self.0.lock().remove(owner)
    }

    /// Changes a claim, if it is here.
    pub(super) fn update<T>(&self, owner: &OwnerToken, change: impl FnOnce(&mut Own) -> T) -> Option<T> {
        self.0.lock().get_mut(owner).map(change)
    }
}
