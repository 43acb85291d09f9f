//! Renewals, extensions and the release of one lease never overlap at the store.
//!
//! Thousands of leases may be held, and hardly ever does anything wait for another thing of the same lease: so a lease has
//! two bits for it, and all leases of a service share the bell that tells of an end. It wakes whoever waits for any of them,
//! which costs something only where many wait, behind renewals that hang.

use super::Lease;
use crate::service::Inner;

/// The right to do something at the store for one lease, until it is dropped.
pub(super) struct Alone<'a> {
    lease: &'a Lease,
    inner: &'a Inner,
}

impl Lease {
    /// `None`: something is under way.
    pub(super) fn try_alone<'a>(&'a self, inner: &'a Inner) -> Option<Alone<'a>> {
        let was_busy = std::mem::replace(&mut self.state().busy, true);
        (!was_busy).then(|| Alone { lease: self, inner })
    }

    /// Waits until nothing is under way.
    pub(super) async fn alone<'a>(&'a self, inner: &'a Inner) -> Alone<'a> {
        loop {
            let mut ended = std::pin::pin!(inner.ended_alone.notified());
            // Before the look: an end that comes right after it is heard of.
            ended.as_mut().enable();
            {
                let mut state = self.state();
                if !state.busy {
                    state.busy = true;
                    return Alone { lease: self, inner };
                }
                state.awaited = true;
            }
            ended.await;
        }
    }
}

impl Drop for Alone<'_> {
    fn drop(&mut self) {
        let mut state = self.lease.state();
        state.busy = false;
        if std::mem::take(&mut state.awaited) {
            drop(state);
            self.inner.ended_alone.notify_waiters();
        }
    }
}
