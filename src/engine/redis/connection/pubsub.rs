//! Subscriptions to channels, kept the same on this side and on the server.
//!
//! A channel is subscribed once for any number of receivers, and unsubscribed when the last of them is dropped. A new
//! connection subscribes to all channels that have receivers before any call uses it.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use futures_util::FutureExt;
use futures_util::future::join_all;
use parking_lot::{Mutex, MutexGuard};
use redis::{ErrorKind, RedisResult};
use tokio::sync::watch;

use super::{Connection, Link};
use crate::engine::Subscription;
use crate::engine::core::stream::{PendingReply, Replies};
use crate::engine::redis::error::Failure;
use crate::engine::redis::wire::UNSUBSCRIBE_SHARD;

/// Handles the messages of a channel. It must not block. An empty message means that messages may have been lost.
pub(in super::super) type MessageHandler = Arc<dyn Fn(&[u8]) + Send + Sync>;

/// A channel with receivers.
struct Topic {
    channel: Arc<str>,
    /// Receives the messages of this channel one by one.
    handler: Option<MessageHandler>,
    /// Notifies the receivers. A new receiver gets only later notifications.
    notifications: watch::Sender<()>,
    /// Serializes SUBSCRIBE and UNSUBSCRIBE of this channel, so that they cannot overtake each other.
    turn: tokio::sync::Mutex<()>,
    /// The generation of the connection on which the server confirmed the subscription. 0: none.
    confirmed: AtomicU64,
    /// How often a node has ended the subscription because the slot of the channel moved.
    ended: AtomicU64,
}

/// All channels with receivers, and what waits for their messages, for the event loop.
#[derive(Default)]
pub(in super::super) struct Topics(Mutex<HashMap<Arc<str>, Arc<Topic>>>, Replies);

impl Topic {
    /// Whether it has receivers, and the connection is not subscribed to it.
    fn is_unconfirmed(&self, generation: u64) -> bool {
        self.notifications.receiver_count() > 0 && self.confirmed.load(Ordering::Relaxed) != generation
    }

    fn notify(&self, message: &[u8]) {
        match &self.handler {
            Some(handler) => handler(message),
            None => {
                self.notifications.send_replace(());
            }
        }
    }
}

impl Topics {
    fn lock(&self) -> MutexGuard<'_, HashMap<Arc<str>, Arc<Topic>>> {
        self.0.lock()
    }

    pub(super) fn receivers(&self) -> &Replies {
        &self.1
    }

    pub(in super::super) fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    fn find(&self, channel: &[u8]) -> Option<Arc<Topic>> {
        self.lock().get(std::str::from_utf8(channel).ok()?).cloned()
    }

    /// Passes a message on to the receivers of a channel.
    pub(in super::super) fn notify(&self, channel: &[u8], message: &[u8]) {
        if let Some(topic) = self.find(channel) {
            topic.notify(message);
        }
    }

    /// Records that a node has ended a subscription, on request or on its own.
    pub(in super::super) fn end(&self, channel: &[u8]) {
        if let Some(topic) = self.find(channel) {
            topic.ended.fetch_add(1, Ordering::Relaxed);
            topic.confirmed.store(0, Ordering::Relaxed);
        }
    }

    /// Notifies all receivers of all channels.
    pub(in super::super) fn notify_all(&self) {
        let topics: Vec<Arc<Topic>> = self.lock().values().cloned().collect();
        for topic in topics {
            topic.notify(b"");
        }
    }

    fn enrol(&self, channel: String, handler: Option<MessageHandler>) -> (Arc<Topic>, watch::Receiver<()>) {
        let channel: Arc<str> = channel.into();
        let mut topics = self.lock();
        let topic = topics.entry(channel.clone()).or_insert_with(|| {
            Arc::new(Topic {
                channel,
                handler,
                notifications: watch::Sender::new(()),
                turn: tokio::sync::Mutex::new(()),
                confirmed: AtomicU64::new(0),
                ended: AtomicU64::new(0),
            })
        });
        // Under the lock, so that a topic with a receiver is never removed from the map.
        (topic.clone(), topic.notifications.subscribe())
    }

    /// Whether a topic in the map has no receiver.
    fn is_idle(&self, topic: &Arc<Topic>) -> bool {
        let topics = self.lock();
        topic.notifications.receiver_count() == 0
            && topics
                .get(&topic.channel)
                .is_some_and(|known| Arc::ptr_eq(known, topic))
    }

    /// Removes a topic from the map, unless it has a receiver again.
    fn forget(&self, topic: &Topic) {
        let mut topics = self.lock();
        if topic.notifications.receiver_count() == 0 {
            topics.remove(&topic.channel);
        }
    }

    /// Returns the channels with receivers to which a connection is not subscribed.
    fn unconfirmed(&self, generation: u64) -> Vec<Arc<Topic>> {
        let topics = self.lock();
        let unconfirmed = topics.values().filter(|topic| topic.is_unconfirmed(generation));
        unconfirmed.cloned().collect()
    }
}

impl Link {
    /// Subscribes to a channel. The server has confirmed it when this returns. A handler receives the messages. All
    /// subscriptions to a channel have the same handler, or none.
    pub(in super::super) async fn subscribe(
        self: &Arc<Self>,
        channel: String,
        handler: Option<MessageHandler>,
    ) -> Result<RedisSubscription, Failure> {
        let (topic, notifications) = self.topics.enrol(channel, handler);
        // From here on, the drop of this future ends the subscription.
        let subscription = RedisSubscription {
            link: self.clone(),
            topic: topic.clone(),
            notifications: Some(notifications),
            waits: Some(self.topics.1.expect()),
        };
        let _turn = topic.turn.lock().await;
        let connection = self.connection().await?;
        if topic.confirmed.load(Ordering::Relaxed) != connection.generation {
            self.in_time(&connection, self.enter(&connection, std::slice::from_ref(&topic)))
                .await?;
        }
        Ok(subscription)
    }

    /// Unsubscribes from a channel that still has no receiver.
    async fn unsubscribe(self: Arc<Self>, topic: Arc<Topic>) {
        let _turn = topic.turn.lock().await;
        if self.topics.is_idle(&topic) {
            // A connection that is being opened may have subscribed. Without a connection there is nothing to end.
            if let Some(connection) = self.existing().await {
                let verb = if self.sharded { UNSUBSCRIBE_SHARD } else { "UNSUBSCRIBE" };
                let left = connection.wire.change_subscription(verb, &topic.channel);
                if let Err(failure) = self.in_time(&connection, left).await {
                    tracing::debug!(%failure, channel = &*topic.channel, "could not unsubscribe");
                }
            }
            // After the reply: the next holder of the lock has to subscribe again.
            topic.confirmed.store(0, Ordering::Relaxed);
            self.topics.forget(&topic);
        }
    }

    /// Subscribes a new connection to all channels with receivers.
    pub(in super::super) async fn resubscribe(&self, connection: &Connection) -> RedisResult<()> {
        let topics = self.topics.unconfirmed(connection.generation);
        match self.enter(connection, &topics).await {
            Err(error) if matches!(error.kind(), ErrorKind::Io | ErrorKind::Parse) => return Err(error),
            // The subscriber of a slot's channel searches for the node that serves the slot now.
            Err(error) if self.sharded => tracing::debug!(%error, "a node refused a subscription"),
            // Locks work without notifications: the service polls now and then. `keep_trying` subscribes again.
            Err(error) => tracing::warn!(%error, "the server refused a subscription"),
            Ok(()) => {}
        }
        Ok(())
    }

    /// Whether a channel has receivers.
    pub(in super::super) fn is_subscribed_to(&self, channel: &str) -> bool {
        self.topics.lock().contains_key(channel)
    }

    /// Whether the server of a connection has confirmed every subscription. Always true in a cluster: each channel has its own
    /// subscriber.
    pub(super) fn is_subscribed_on(&self, generation: u64) -> bool {
        self.sharded || self.topics.unconfirmed(generation).is_empty()
    }

    /// Subscribes again to the channels that the server refused, and wakes their receivers: messages were lost.
    pub(super) async fn subscribe_refused(self: &Arc<Self>, connection: &Arc<Connection>) {
        if self.sharded {
            return;
        }
        for topic in self.topics.unconfirmed(connection.generation) {
            let _turn = topic.turn.lock().await;
            // Another call may have subscribed or unsubscribed meanwhile.
            if topic.is_unconfirmed(connection.generation) {
                let entered = self.in_time(connection, self.enter(connection, std::slice::from_ref(&topic)));
                if entered.await.is_ok() {
                    topic.notify(b"");
                }
            }
        }
    }

    /// Sends the subscriptions to the server.
    async fn enter(&self, connection: &Connection, topics: &[Arc<Topic>]) -> RedisResult<()> {
        let verb = if self.sharded { "SSUBSCRIBE" } else { "SUBSCRIBE" };
        // One channel per command, so that each command has one reply; in a cluster they may be in different slots.
        let outcomes = join_all(topics.iter().map(|topic| async move {
            let ended = topic.ended.load(Ordering::Relaxed);
            connection.wire.change_subscription(verb, &topic.channel).await?;
            topic.confirmed.store(connection.generation, Ordering::Relaxed);
            if topic.ended.load(Ordering::Relaxed) != ended {
                // The node has ended it at the same time, because its slot moves.
                let moving = redis::ServerErrorKind::TryAgain.into();
                return Err((moving, "the node has ended the subscription").into());
            }
            Ok(())
        }));
        let outcomes = outcomes.await;
        for (topic, outcome) in topics.iter().zip(&outcomes) {
            if outcome.is_err() {
                topic.confirmed.store(0, Ordering::Relaxed);
                self.endings.send_replace(());
            }
        }
        outcomes.into_iter().collect()
    }

    /// Waits for the reply within the limit, because others may wait for the lock.
    async fn in_time(
        self: &Arc<Self>,
        connection: &Arc<Connection>,
        reply: impl Future<Output = RedisResult<()>>,
    ) -> Result<(), Failure> {
        let exchange = self.exchange(connection, reply);
        let outcome = tokio::time::timeout(self.limit(), exchange).await;
        outcome.unwrap_or(Err(Failure::timed_out()))
    }
}

/// A subscription to one channel.
pub(in super::super) struct RedisSubscription {
    link: Arc<Link>,
    topic: Arc<Topic>,
    /// `None` only while it is dropped.
    notifications: Option<watch::Receiver<()>>,
    /// Something waits for its messages.
    waits: Option<PendingReply>,
}

impl RedisSubscription {
    /// From here on it counts as waiting only while a result of [`Self::waits`] exists: it is open longer than anything waits.
    pub(in super::super) fn idle(mut self) -> Self {
        self.waits = None;
        self
    }

    /// Counts something that waits for its messages.
    pub(in super::super) fn waits(&self) -> PendingReply {
        self.link.topics.1.expect()
    }

    /// Whether the server still has it, or the link will restore it.
    pub(in super::super) fn is_confirmed(&self) -> bool {
        self.topic.confirmed.load(Ordering::Relaxed) != 0
    }

    /// Notified when the node has ended a subscription, perhaps this one.
    pub(in super::super) fn endings(&self) -> watch::Receiver<()> {
        self.link.endings.subscribe()
    }
}

#[async_trait]
impl Subscription for RedisSubscription {
    async fn changed(&mut self) {
        if let Some(notifications) = &mut self.notifications {
            // The sender lives in the topic, which lives in `self`: this cannot fail.
            let _ = notifications.changed().await;
        }
    }
}

impl Drop for RedisSubscription {
    fn drop(&mut self) {
        self.notifications = None;
        if self.link.topics.is_idle(&self.topic) {
            self.link
                .runtime
                .spawn(self.link.clone().unsubscribe(self.topic.clone()).boxed());
        }
    }
}
