//! The notifications of one waiter.

use std::collections::hash_map::Entry;
use std::sync::Arc;

use async_trait::async_trait;
use tokio::sync::Notify;

use super::LocalWaiters;
use crate::engine::HandOff;
use crate::engine::Subscription;
use crate::model::OwnerToken;

/// A waiter's subscription to its notifications.
pub(in crate::engine) struct WaiterSubscription<H> {
    waiters: Arc<LocalWaiters<H>>,
    owner: OwnerToken,
    notify: Arc<Notify>,
}

impl<H> WaiterSubscription<H> {
    pub(super) fn new(waiters: Arc<LocalWaiters<H>>, owner: OwnerToken, notify: Arc<Notify>) -> Self {
        WaiterSubscription { waiters, owner, notify }
    }

    /// Whether the waiter polls.
    pub(in crate::engine) fn polls(&self) -> bool {
        self.waiters.polls(&self.owner)
    }

    /// Whether no waiter of this process is ahead of it.
    pub(in crate::engine) fn is_first(&self) -> bool {
        self.waiters.is_first(&self.owner)
    }
}

#[async_trait]
impl<H: Send> Subscription for WaiterSubscription<H> {
    async fn changed(&mut self) {
        self.notify.notified().await;
    }

    fn take_hand_off(&mut self) -> Option<HandOff> {
        self.waiters.take_hand_off(&self.owner)
    }

    fn is_reliable(&self) -> bool {
        true
    }
}

impl<H> Drop for WaiterSubscription<H> {
    fn drop(&mut self) {
        let mut state = self.waiters.state.lock();
        if let Entry::Occupied(mut entry) = state.waiters.entry(self.owner.clone()) {
            entry.get_mut().is_subscribed = false;
            if entry.get().position.is_none() {
                entry.remove();
            }
        }
    }
}
