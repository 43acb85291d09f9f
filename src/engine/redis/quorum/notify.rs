//! Notifies waiters of releases, by the pub/sub messages of all nodes.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::task::JoinSet;

use super::Quorum;
use super::node::Node;
use super::votes::{Answer, Votes};
use crate::backoff::Backoff;
use crate::engine::redis::connection::pubsub::RedisSubscription;
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
        let notifications = Arc::new(Notifications::default());
        let votes = Arc::new(Votes::new(self.nodes.len()));
        let mut tasks = JoinSet::new();
        for (index, node) in self.nodes.iter().enumerate() {
            let (node, channel) = (node.clone(), channel.clone());
            tasks.spawn(forward(node, index, channel, notifications.clone(), votes.clone()));
        }
        let enough = self.majority();
        let confirmed = |answers: &[Answer<()>]| answers.iter().filter(|answer| matches!(answer, Some(Ok(())))).count();
        let decided = |answers: &[Answer<()>]| (confirmed(answers) >= enough).then_some(());
        match votes.decide(self.node_timeout, decided).await {
            (Some(()), _) => Ok(QuorumSubscription {
                notifications,
                enough,
                _tasks: tasks,
            }),
            (None, answers) => Err(self.no_majority("subscribe", &answers, self.node_timeout)),
        }
    }
}

/// The nodes with a message that was not passed on yet.
#[derive(Default)]
struct Notifications {
    nodes: Mutex<Vec<usize>>,
    added: Notify,
}

impl Notifications {
    fn add(&self, node: usize) {
        let mut nodes = self.nodes.lock();
        if !nodes.contains(&node) {
            nodes.push(node);
        }
        drop(nodes);
        self.added.notify_one();
    }

    /// Clears them if there are at least `least`. Returns whether there were.
    fn take(&self, least: usize) -> bool {
        let mut nodes = self.nodes.lock();
        let enough = nodes.len() >= least;
        if enough {
            nodes.clear();
        }
        enough
    }

    fn is_empty(&self) -> bool {
        self.nodes.lock().is_empty()
    }
}

/// Subscribes on one node, and forwards its messages until the subscription is dropped.
async fn forward(
    node: Arc<Node>,
    index: usize,
    channel: String,
    notifications: Arc<Notifications>,
    votes: Arc<Votes<()>>,
) {
    let mut backoff = BACKOFF;
    let mut missed = false;
    let mut subscription: RedisSubscription = loop {
        match node.link.subscribe(channel.clone(), None).await {
            Ok(subscription) => break subscription,
            Err(failure) => {
                votes.cast(index, Err(failure));
                missed = true;
            }
        }
        tokio::time::sleep(backoff.delay()).await;
    };
    votes.cast(index, Ok(()));
    if missed {
        // Messages before the subscription were lost.
        notifications.add(index);
    }
    loop {
        subscription.changed().await;
        notifications.add(index);
    }
}

/// A subscription to one name on all nodes.
pub(super) struct QuorumSubscription {
    notifications: Arc<Notifications>,
    enough: usize,
    /// Aborted when it is dropped.
    _tasks: JoinSet<()>,
}

#[async_trait]
impl Subscription for QuorumSubscription {
    async fn changed(&mut self) {
        while self.notifications.is_empty() {
            self.notifications.added.notified().await;
        }
        let _ = tokio::time::timeout(GRACE, async {
            while !self.notifications.take(self.enough) {
                self.notifications.added.notified().await;
            }
        })
        .await;
        self.notifications.take(0);
    }
}
