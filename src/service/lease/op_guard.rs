//! Serializes the operations (renewal, extension, release) of one lease at the store.
//!
//! A service may hold thousands of leases, and an operation rarely waits for another one of the same lease. A lease therefore has
//! two bits of state, and all leases of a service share one `Notify`. A waiting operation may wake up for the end of an operation
//! of another lease, and then waits again.

use super::Lease;
use crate::service::Shared;

/// The right to call the store for one lease, until it is dropped.
pub(super) struct OpGuard<'a> {
    lease: &'a Lease,
    shared: &'a Shared,
}

impl Lease {
    /// Begins an operation. `None`: another one is in progress.
    pub(super) fn try_begin_op<'a>(&'a self, shared: &'a Shared) -> Option<OpGuard<'a>> {
        let is_busy = std::mem::replace(&mut self.state.lock().op_in_progress, true);
        (!is_busy).then(|| OpGuard { lease: self, shared })
    }

    /// Begins an operation after the one in progress.
    pub(super) async fn begin_op<'a>(&'a self, shared: &'a Shared) -> OpGuard<'a> {
        loop {
            let mut ended = std::pin::pin!(shared.op_ended.notified());
            // Enabled before the check: an end right after the check is not missed.
            ended.as_mut().enable();
            {
                let mut state = self.state.lock();
                if !state.op_in_progress {
                    state.op_in_progress = true;
                    return OpGuard { lease: self, shared };
                }
                state.op_awaited = true;
            }
            ended.await;
        }
    }
}

impl Drop for OpGuard<'_> {
    fn drop(&mut self) {
        let mut state = self.lease.state.lock();
        state.op_in_progress = false;
        if std::mem::take(&mut state.op_awaited) {
            drop(state);
            self.shared.op_ended.notify_waiters();
        }
    }
}
