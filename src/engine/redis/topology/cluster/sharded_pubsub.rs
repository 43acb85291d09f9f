//! A channel of a slot, listened to wherever that slot is.
//!
//! A sharded channel is told on the node that serves its slot ("Sharded Pub/Sub" in the Redis manual). When the slot
//! leaves, the node ends the subscription, and when the node itself is lost, its successor knows nothing of it: either way
//! somebody has to subscribe at the new place, and then to look, because what was told meanwhile told nobody.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::task::AbortHandle;

use super::map::Address;
use super::{Cluster, Refusal, refusal};
use crate::engine::redis::connection::pubsub::{MessageHandler, RedisSubscription};
use crate::engine::redis::error::Failure;

/// Pauses between the attempts to subscribe anew.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// Listens for as long as it is kept.
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
    /// Listens to a channel that lies in this slot. When this returns, the node that serves the slot has confirmed it.
    pub(in crate::engine::redis) async fn listen(
        self: &Arc<Self>,
        slot: u16,
        channel: String,
        mailbox: MessageHandler,
    ) -> Result<ShardedSubscription, Failure> {
        let first = self.subscribe(slot, &channel, &mailbox).await?;
        let place = Arc::new(Place(Mutex::new(Some(first))));
        let follow = follow(self.clone(), slot, channel, mailbox, place.clone());
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
        mailbox: &MessageHandler,
    ) -> Result<(Address, RedisSubscription), Failure> {
        let mut hops = 0;
        loop {
            let master = self.master(slot).await?;
            let link = self.node(&master)?.channels.clone();
            match link.subscribe(channel.to_owned(), Some(mailbox.clone())).await {
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

/// Keeps the subscription where the slot is.
async fn follow(cluster: Arc<Cluster>, slot: u16, channel: String, mailbox: MessageHandler, place: Arc<Place>) {
    let mut changes = cluster.changes.subscribe();
    let mut pause = FIRST_PAUSE;
    loop {
        let Some(mut endings) = place.endings() else { return };
        let master = cluster.master(slot).await;
        if master.is_ok_and(|master| place.is_good_at(&master)) {
            pause = FIRST_PAUSE;
            tokio::select! {
                _ = changes.changed() => {}
                _ = endings.changed() => {}
            }
            continue;
        }
        match cluster.subscribe(slot, &channel, &mailbox).await {
            Ok(now) => {
                place.put(Some(now));
                // What was told in between told nobody.
                mailbox(b"");
            }
            Err(Failure::Closed) => return,
            Err(failure) => {
                tracing::debug!(%failure, slot, "a channel is without a node");
                tokio::time::sleep(pause.mul_f64(0.5 + fastrand::f64() / 2.0)).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
        }
    }
}
