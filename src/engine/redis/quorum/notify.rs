//! Notifies waiters of releases, by the pub/sub messages of all nodes.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::select_all;

use super::Quorum;
use super::votes::{Answer, Votes};
use crate::engine::redis::connection::pubsub::RedisSubscription;
use crate::engine::redis::keys::FREE_CHANNEL;
use crate::engine::{Result, Subscription};
use crate::model::Key;

/// The time after the first message of a release in which a majority may send theirs, because a release reaches the nodes one
/// after the other. An immediate attempt would find the other nodes busy.
const GRACE: Duration = Duration::from_millis(5);

impl Quorum {
    /// Returns the channel of a name.
    pub(super) fn channel(&self, key: &Key) -> String {
        let mut lock = String::new();
        self.layout.lock(key.as_str(), &mut lock);
        lock.insert_str(0, FREE_CHANNEL);
        lock
    }

    /// Subscribes on every node.
    ///
    /// # Behavior
    /// Returns when a majority has confirmed: every release by a majority reaches one of them. The other subscriptions are
    /// retried in the background.
    ///
    /// # Errors
    /// Fails when no majority confirms in time.
    pub(super) async fn subscribe(self: &Arc<Self>, key: &Key) -> Result<QuorumSubscription> {
        let channel = self.channel(key);
        let subscriptions: Vec<_> = self
            .nodes
            .iter()
            .map(|node| node.link.enrol(channel.clone(), None))
            .collect();
        let confirmations = subscriptions.iter().map(|subscription| {
            let confirmed = subscription.confirmation();
            async move { Some(confirmed.await) }
        });
        let mut votes = Votes::new(self, confirmations);
        let enough = self.majority();
        let confirmed = |answers: &[Answer<()>]| answers.iter().filter(|answer| matches!(answer, Some(Ok(())))).count();
        let decided = |answers: &[Answer<()>]| (confirmed(answers) >= enough).then_some(());
        match votes.decide(self.node_timeout, decided).await {
            Some(()) => Ok(QuorumSubscription {
                subscriptions,
                notified: Vec::new(),
                enough,
            }),
            None => Err(self.no_majority("subscribe", &votes.answers, self.node_timeout)),
        }
    }
}

/// A subscription to one name on all nodes.
pub(super) struct QuorumSubscription {
    /// That of each node. The node's link restores it after an outage, and notifies it then.
    subscriptions: Vec<RedisSubscription>,
    /// The nodes with a message that was not passed on yet.
    notified: Vec<usize>,
    enough: usize,
}

impl QuorumSubscription {
    /// Receives messages until this number of nodes has sent one.
    async fn receive(&mut self, enough: usize) {
        while self.notified.len() < enough {
            let messages = self.subscriptions.iter_mut().map(|subscription| subscription.changed());
            let ((), node, _) = select_all(messages).await;
            if !self.notified.contains(&node) {
                self.notified.push(node);
            }
        }
    }
}

#[async_trait]
impl Subscription for QuorumSubscription {
    async fn changed(&mut self) {
        self.receive(1).await;
        let _ = tokio::time::timeout(GRACE, self.receive(self.enough)).await;
        self.notified.clear();
        self.subscriptions
            .iter_mut()
            .for_each(RedisSubscription::forget_messages);
    }
}
