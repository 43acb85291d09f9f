//! Subscribes to a channel of a slot, on the node that serves the slot.
//!
//! A message to a sharded channel is published on the node that serves its slot ("Sharded Pub/Sub" in the Redis manual). When
//! the slot moves, the node ends the subscription. When the node is lost, the next one has no subscription. In both cases:
//! resubscribe on the new node, then check the queue again, because messages published in between were lost.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::task::AbortHandle;

use super::map::Address;
use super::{Cluster, Refusal, refusal};
use crate::backoff::Backoff;
use crate::engine::redis::connection::pubsub::{MessageHandler, RedisSubscription};
use crate::engine::redis::error::Failure;

/// The backoff of subscribing again.
const RESUBSCRIBE: Backoff = Backoff::new(Duration::from_millis(20), Duration::from_secs(2));

/// A subscription that follows its slot. It ends when this is dropped.
pub(in crate::engine::redis) struct ShardedSubscription {
    moving: AbortHandle,
    /// Shared with the task that follows the slot.
    place: Arc<Place>,
}

struct Place(Mutex<Option<(Address, RedisSubscription)>>);

impl Drop for ShardedSubscription {
    fn drop(&mut self) {
        self.moving.abort();
        self.place.put(None);
    }
}

impl Place {
    fn put(&self, place: Option<(Address, RedisSubscription)>) {
        let mut now = self.0.lock();
        let before = std::mem::replace(&mut *now, place);
        drop(now);
        drop(before);
    }

    fn endings(&self) -> Option<watch::Receiver<()>> {
        let now = self.0.lock();
        now.as_ref().map(|(_, subscription)| subscription.endings())
    }

    /// Whether the node at this address still has the subscription.
    fn is_good_at(&self, master: &Address) -> bool {
        let now = self.0.lock();
        now.as_ref()
            .is_some_and(|(address, subscription)| address == master && subscription.is_confirmed())
    }
}

impl Cluster {
    /// Subscribes to a channel of this slot. The node that serves the slot has confirmed it when this returns.
    pub(in crate::engine::redis) async fn listen(
        self: &Arc<Self>,
        slot: u16,
        channel: String,
        handler: MessageHandler,
    ) -> Result<ShardedSubscription, Failure> {
        let first = self.subscribe(slot, &channel, &handler).await?;
        let place = Arc::new(Place(Mutex::new(Some(first))));
        let follow = follow(self.clone(), slot, channel, handler, place.clone());
        Ok(ShardedSubscription {
            moving: self.runtime.spawn(follow).abort_handle(),
            place,
        })
    }

    /// Subscribes on the node that serves the slot now.
    async fn subscribe(
        self: &Arc<Self>,
        slot: u16,
        channel: &str,
        handler: &MessageHandler,
    ) -> Result<(Address, RedisSubscription), Failure> {
        let mut hops = 0;
        loop {
            let master = self.master(slot).await?;
            let link = self.node(&master)?;
            match link.subscribe(channel.to_owned(), Some(handler.clone())).await {
                Ok(subscription) => return Ok((master, subscription)),
                Err(failure) => match refusal(&failure, &master) {
                    Some(Refusal::Moved(slot, to)) => {
                        self.learn(slot, &to);
                        hops += 1;
                        if hops > super::HOPS {
                            return Err(Failure::Moving);
                        }
                    }
                    _ => {
                        self.refresh_soon();
                        return Err(failure);
                    }
                },
            }
        }
    }
}

/// Moves the subscription with its slot.
async fn follow(cluster: Arc<Cluster>, slot: u16, channel: String, handler: MessageHandler, place: Arc<Place>) {
    let mut changes = cluster.changes.subscribe();
    let mut backoff = RESUBSCRIBE;
    loop {
        let Some(mut endings) = place.endings() else { return };
        let master = cluster.master(slot).await;
        if master.is_ok_and(|master| place.is_good_at(&master)) {
            backoff.reset();
            tokio::select! {
                _ = changes.changed() => {}
                _ = endings.changed() => {}
            }
            continue;
        }
        match cluster.subscribe(slot, &channel, &handler).await {
            Ok(now) => {
                place.put(Some(now));
                // Messages that were published in between were lost.
                handler(b"");
            }
            Err(Failure::Closed(_)) => return,
            Err(failure) => {
                tracing::debug!(%failure, slot, "a channel is without a node");
                tokio::time::sleep(backoff.delay()).await;
            }
        }
    }
}
