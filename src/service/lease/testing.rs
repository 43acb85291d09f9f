//! What `holdfast/testing` does to a held lease.

use std::sync::Arc;
use std::time::Duration;

use super::Lease;
use super::renewal::GONE;
use crate::model::Key;
use crate::service::Shared;

impl Lease {
    /// Moves the clock of this lease forward: all of its moments become earlier by `by`.
    pub(in crate::service) fn advance(&self, by: Duration) {
        let mut state = self.state.lock();
        state.acquired_at = state.acquired_at - by;
        state.deadline = state.deadline - by;
        state.max_hold_until = state.max_hold_until.map(|end| end - by);
        state.min_hold_until = state.min_hold_until.map(|end| end - by);
        if let Some(window) = &mut state.renewal {
            window.opens = window.opens - by;
            window.due = window.due - by;
        }
    }

    /// Declares the lease lost if it has this name, as after a renewal that did not find the name in the store.
    pub(in crate::service) fn lose_name(&self, shared: &Arc<Shared>, name: &Key) {
        if self.claim.keys().contains(name) {
            self.lose(shared, self.lost(GONE));
        }
    }
}
