//! What wakes a waiter: a push from any of the nodes.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::Notify;
use tokio::task::JoinSet;

use super::super::connection::pubsub::RedisSubscription;
use super::Quorum;
use super::node::Node;
use super::tally::{Answer, Tally};
use crate::engine::{Result, Subscription};
use crate::model::Key;

/// In front of a lock key: where its release is told. The scripts build the same text.
pub(super) const CHANNEL: &str = "holdfast:free:";
/// A release reaches the nodes one after the other. A hint is passed on when a majority has given it, or so long after the
/// first: a try that came at once would find the other nodes still busy.
const GRACE: Duration = Duration::from_millis(5);
/// Pauses between the attempts to subscribe at a node that is down.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(3);

impl Quorum {
    /// Subscribes at every node.
    ///
    /// # Behavior
    /// Returns when a majority has confirmed: every release that counts reaches one of them. The others are subscribed at
    /// as soon as they can be.
    ///
    /// # Errors
    /// When no majority can be reached.
    pub(super) async fn subscribe(self: &Arc<Self>, key: &Key) -> Result<QuorumSubscription> {
        let mut lock = String::new();
        self.layout.lock(key.as_str(), &mut lock);
        let channel = format!("{CHANNEL}{lock}");
        let hints = Arc::new(Hints::default());
        let tally = Arc::new(Tally::new(self.nodes.len()));
        let mut listeners = JoinSet::new();
        for (index, node) in self.nodes.iter().enumerate() {
            let (node, channel) = (node.clone(), channel.clone());
            listeners.spawn(listen(node, index, channel, hints.clone(), tally.clone()));
        }
        let enough = self.majority();
        let confirmed = |answers: &[Answer<()>]| answers.iter().filter(|answer| matches!(answer, Some(Ok(())))).count();
        let decided = |answers: &[Answer<()>]| (confirmed(answers) >= enough).then_some(());
        match tally.decide(self.patience, decided).await {
            (Some(()), _) => Ok(QuorumSubscription {
                hints,
                enough,
                _listeners: listeners,
            }),
            (None, answers) => Err(self.no_majority("subscribe", &answers, self.patience)),
        }
    }
}

/// Which nodes have given a hint that was not passed on yet.
#[derive(Default)]
struct Hints {
    given: Mutex<Vec<usize>>,
    told: Notify,
}

impl Hints {
    fn give(&self, node: usize) {
        let mut given = self.given.lock().unwrap_or_else(PoisonError::into_inner);
        if !given.contains(&node) {
            given.push(node);
        }
        drop(given);
        self.told.notify_one();
    }

    fn take(&self, least: usize) -> bool {
        let mut given = self.given.lock().unwrap_or_else(PoisonError::into_inner);
        let enough = given.len() >= least;
        if enough {
            given.clear();
        }
        enough
    }

    fn any(&self) -> bool {
        !self.given.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }
}

/// Passes on the hints of one node for as long as anybody waits.
async fn listen(node: Arc<Node>, index: usize, channel: String, hints: Arc<Hints>, tally: Arc<Tally<()>>) {
    let mut pause = FIRST_PAUSE;
    let mut missed = false;
    let mut subscription: RedisSubscription = loop {
        match node.link.subscribe(channel.clone(), None).await {
            Ok(subscription) => break subscription,
            Err(failure) => {
                tally.cast(index, Err(failure));
                missed = true;
            }
        }
        // With jitter, so that the many clients of a node that restarts do not come all at once.
        tokio::time::sleep(pause.mul_f64(0.5 + fastrand::f64())).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    };
    tally.cast(index, Ok(()));
    if missed {
        // What happened there meanwhile is not known.
        hints.give(index);
    }
    loop {
        subscription.changed().await;
        hints.give(index);
    }
}

/// A subscription to one name on all nodes.
pub(super) struct QuorumSubscription {
    hints: Arc<Hints>,
    enough: usize,
    /// End with it.
    _listeners: JoinSet<()>,
}

#[async_trait]
impl Subscription for QuorumSubscription {
    async fn changed(&mut self) {
        while !self.hints.any() {
            self.hints.told.notified().await;
        }
        let _ = tokio::time::timeout(GRACE, async {
            while !self.hints.take(self.enough) {
                self.hints.told.notified().await;
            }
        })
        .await;
        self.hints.take(0);
    }
}
