//! Notifies waiters of releases, by the pub/sub messages of all nodes.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;

use super::Quorum;
use super::node::Node;
use super::votes::{Answer, Votes};
use crate::backoff::Backoff;
use crate::engine::redis::error::Failure;
use crate::engine::redis::keys::FREE_CHANNEL;
use crate::engine::{Result, Subscription};
use crate::model::Key;

/// The time after the first message of a release in which a majority may send theirs, because a release reaches the nodes one
/// after the other. An immediate attempt would find the other nodes busy.
const GRACE: Duration = Duration::from_millis(5);
/// The delays between the attempts to subscribe on a node that is down: on average 100 ms at first and 3 s in the end. The
/// jitter spreads the clients of a node that restarts.
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(150), Duration::from_millis(4500)).with_jitter(2.0 / 3.0);

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
        let (notify, notifications) = mpsc::channel(self.nodes.len());
        let mut tasks = JoinSet::new();
        let outcomes = self.nodes.iter().enumerate().map(|(index, node)| {
            let (sender, outcome) = oneshot::channel();
            tasks.spawn(forward(node.clone(), index, channel.clone(), notify.clone(), sender));
            async move { outcome.await.ok() }
        });
        let mut votes = Votes::new(self, outcomes);
        let enough = self.majority();
        let confirmed = |answers: &[Answer<()>]| answers.iter().filter(|answer| matches!(answer, Some(Ok(())))).count();
        let decided = |answers: &[Answer<()>]| (confirmed(answers) >= enough).then_some(());
        match votes.decide(self.node_timeout, decided).await {
            Some(()) => Ok(QuorumSubscription {
                notifications,
                nodes: Vec::new(),
                enough,
                _tasks: tasks,
            }),
            None => Err(self.no_majority("subscribe", &votes.answers, self.node_timeout)),
        }
    }
}

/// Subscribes on one node, and forwards its messages until the subscription is dropped. `outcome`: receives that of the first attempt.
async fn forward(
    node: Arc<Node>,
    index: usize,
    channel: String,
    notifications: mpsc::Sender<usize>,
    outcome: oneshot::Sender<std::result::Result<(), Failure>>,
) {
    let mut backoff = BACKOFF;
    let mut outcome = Some(outcome);
    let mut report = |subscribed| outcome.take().is_some_and(|outcome| outcome.send(subscribed).is_ok());
    let mut subscription = loop {
        match node.link.subscribe(channel.clone(), None).await {
            Ok(subscription) => break subscription,
            Err(failure) => _ = report(Err(failure)),
        }
        tokio::time::sleep(backoff.delay()).await;
    };
    if !report(Ok(())) {
        // Messages before the subscription were lost.
        let _ = notifications.try_send(index);
    }
    loop {
        subscription.changed().await;
        // A full channel wakes the waiter anyway.
        let _ = notifications.try_send(index);
    }
}

/// A subscription to one name on all nodes.
pub(super) struct QuorumSubscription {
    /// The nodes that have sent messages.
    notifications: mpsc::Receiver<usize>,
    /// Those of them that were received and not passed on yet.
    nodes: Vec<usize>,
    enough: usize,
    /// Aborted when it is dropped.
    _tasks: JoinSet<()>,
}

impl QuorumSubscription {
    /// Receives messages until this number of nodes has sent one.
    async fn receive(&mut self, enough: usize) {
        while self.nodes.len() < enough {
            // The senders live in the tasks: they are not dropped before.
            let Some(node) = self.notifications.recv().await else {
                return;
            };
            if !self.nodes.contains(&node) {
                self.nodes.push(node);
            }
        }
    }
}

#[async_trait]
impl Subscription for QuorumSubscription {
    async fn changed(&mut self) {
        self.receive(1).await;
        let _ = tokio::time::timeout(GRACE, self.receive(self.enough)).await;
        self.nodes.clear();
        while self.notifications.try_recv().is_ok() {}
    }
}
