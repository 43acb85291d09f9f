//! The notifications of one waiter.

use std::collections::hash_map::Entry;
use std::sync::Arc;

use async_trait::async_trait;
use tokio::sync::Notify;

use super::LocalEntries;
use crate::engine::{HandOff, Subscription};
use crate::model::OwnerToken;

/// A waiter's subscription to its notifications.
pub(in crate::engine) struct EntrySubscription {
    entries: Arc<LocalEntries>,
    owner: OwnerToken,
    notify: Arc<Notify>,
}

impl EntrySubscription {
    pub(super) fn new(entries: Arc<LocalEntries>, owner: OwnerToken, notify: Arc<Notify>) -> Self {
        EntrySubscription { entries, owner, notify }
    }
}

#[async_trait]
impl Subscription for EntrySubscription {
    async fn changed(&mut self) {
        self.notify.notified().await;
    }

    fn take_hand_off(&mut self) -> Option<HandOff> {
        self.entries.take_hand_off(&self.owner)
    }

    fn is_reliable(&self) -> bool {
        true
    }
}

impl Drop for EntrySubscription {
    fn drop(&mut self) {
        let mut state = self.entries.state.lock();
        if let Entry::Occupied(mut waiter) = state.waiters.entry(self.owner.clone()) {
            waiter.get_mut().is_subscribed = false;
            if waiter.get().key.is_none() {
                waiter.remove();
            }
        }
    }
}
