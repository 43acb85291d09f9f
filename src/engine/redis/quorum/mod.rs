//! A quorum of independent Redis nodes: a lock is held while a majority of them holds it. It is the algorithm called Redlock
//! in the manual of Redis, with what its published versions lack.
//!
//! # Behavior
//! Every verb sends a request to all nodes at once, and returns when a majority has decided: no call waits for the other
//! nodes. `docs/quorum.md` has the protocol and the requirements on the servers, `docs/proofs/quorum.md` the proofs of mutual exclusion
//! and of the fencing tokens.
//!
//! - **A fresh value for each attempt.** A lock key contains `<owner token>.<attempt>`. A failed attempt is rolled back by
//!   that value, so that a late rollback never removes the vote of the next attempt by the same owner. A release is by owner
//!   token, for all attempts of the owner.
//! - **Nothing is left behind.** A request with a late or lost answer is tracked until the answer has arrived, or until the
//!   request can not be in flight any more (`acquire/round.rs`, `acquire/request_lifetime.rs`). A bounded list for each node has
//!   the removals that the node did not confirm (`cleanup.rs`). A vote that is unsent when its attempt ends is never sent.
//! - **Validity.** A node has at most a third of the ttl for its vote. So a grant, including the agreement on the fencing
//!   token, takes two thirds at most and leaves time: ttl − elapsed − drift > 0. Below a ttl of 150 ms the shortest time that
//!   a node has is longer than a third. The service always counts from before the first request, and rejects a grant that
//!   has expired.
//! - **No task per node.** The requests of a call are polled with the call (`votes.rs`). Those that have no answer when the majority has decided
//!   continue in one background task, with the same code.
//! - **Attempts are limited** to [`ATTEMPTS`]. An attempt that ended without the answer of a majority keeps its permit until its last vote is
//!   answered or the connection of that vote has ended. So calls that fail while nodes stall add no further votes.
//! - **A renewal heals** nodes that lost the lock in a restart or were down when it was granted (`renew.rs`).
//!
//! # Deployment
//! Each node is a standalone server (`maxmemory-policy noeviction`), and none is a replica of another. The rights that a user
//! needs on each node, for the prefix `lock:`:
//!
//! ```text
//! ACL SETUSER holdfast on >PASSWORD resetkeys resetchannels -@all
//!     ~lock:* ~holdfast:* &holdfast:free:*
//!     +eval +evalsha +get +set +del +mget +pttl +pexpire +time +zadd +zscore +publish +subscribe +unsubscribe +scan +select +info
//! ```

mod acquire;
mod cleanup;
mod config;
mod fence;
mod inspect;
#[cfg(test)]
mod model;
mod node;
mod notify;
mod release;
mod renew;
mod scripts;
#[cfg(test)]
mod tests;
mod turns;
mod votes;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::BoxFuture;
use redis::Cmd;
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use config::QuorumConfig;

use self::acquire::request_lifetime::RequestLifetimes;
use self::config::MIN_NODE_TIMEOUT;
use self::node::{Node, common_time};
use self::scripts::ROLLBACK;
use self::turns::Turns;
use self::votes::{Votes, majority};
use super::error::{ENGINE, Failure};
use super::keys::{Layout, Part};
use super::ops::contended::Contended;
use super::scripts::Script;
use crate::engine::attempt_queue::AttemptQueue;
use crate::engine::{
    Acquired, Answers, Description, Engine, Read, Released, Renewal, Renewed, Result, Subscription, answer_each,
};
use crate::model::{Claim, Key, LockInfo, OwnerToken, Ttl};

/// The largest number of attempts in progress. Renewals and releases are not limited.
const ATTEMPTS: usize = 512;

/// The keys of a lease, for each name.
const PARTS: [Part; 3] = [Part::Lock, Part::Fence, Part::Metadata];
/// The keys of a vote, for each name. The metadata key only for a claim with metadata.
const VOTED: [Part; 4] = [Part::Lock, Part::Fence, Part::Counter, Part::Metadata];

/// The engine behind a list of `redis://` and `rediss://` URLs.
pub struct QuorumEngine {
    quorum: Arc<Quorum>,
}

/// The state that the verbs and their background tasks share.
struct Quorum {
    nodes: Box<[Arc<Node>]>,
    layout: Layout,
    /// The longest time that one node has for one answer.
    node_timeout: Duration,
    attempts: Arc<AttemptQueue>,
    last_attempt: AtomicU64,
    lifetimes: RequestLifetimes,
    contended: Contended,
    turns: Turns,
    closing: CancellationToken,
    /// Background tasks are also spawned by threads that are not in a runtime.
    runtime: Handle,
    /// Tracks the releases in flight, for which a close waits.
    urgent: TaskTracker,
}

impl fmt::Debug for QuorumEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QuorumEngine")
            .field("nodes", &self.quorum.nodes.len())
            .field("layout", &self.quorum.layout)
            .finish_non_exhaustive()
    }
}

impl QuorumEngine {
    /// Connects, and checks the versions of the servers.
    ///
    /// # Behavior
    /// A majority has to answer. The other nodes are used when they answer later.
    ///
    /// # Errors
    /// Fails when no majority answers. Also fails when any node rejects the login or is older than Redis 6.2: this mistake
    /// would otherwise show when another node fails.
    pub async fn connect(config: QuorumConfig) -> Result<Arc<Self>> {
        let quorum = Quorum::new(config);
        quorum.handshake().await.inspect_err(|_| quorum.close_connections())?;
        Ok(Arc::new(QuorumEngine { quorum }))
    }
}

impl Quorum {
    /// Creates a quorum without connections. Needs a current runtime.
    fn new(config: QuorumConfig) -> Arc<Self> {
        Arc::new(Quorum {
            layout: config.nodes[0].layout.clone(),
            nodes: config.nodes.into_iter().map(|node| Arc::new(Node::new(node))).collect(),
            node_timeout: config.node_timeout,
            attempts: AttemptQueue::new(ATTEMPTS),
            last_attempt: AtomicU64::new(0),
            lifetimes: RequestLifetimes::default(),
            contended: Contended::default(),
            turns: Turns::default(),
            closing: CancellationToken::new(),
            runtime: Handle::current(),
            urgent: TaskTracker::new(),
        })
    }

    fn majority(&self) -> usize {
        majority(self.nodes.len())
    }

    /// Connects to every node. Waits for the slow ones, too, within the time that a node has for an answer.
    async fn handshake(self: &Arc<Self>) -> Result<()> {
        let mut votes = self.request(self.node_timeout, |node| async move { node.handshake().await });
        votes.decide(self.node_timeout, |_| None::<()>).await;
        let answers = &votes.answers;
        let rejection = answers.iter().find_map(|answer| match answer {
            Some(Err(failure)) if !failure.retryable() => Some(failure.clone()),
            _ => None,
        });
        if let Some(failure) = rejection {
            return Err(failure.during("connect"));
        }
        if answers.iter().filter(|answer| matches!(answer, Some(Ok(())))).count() < self.majority() {
            return Err(self.no_majority("connect", answers, self.node_timeout));
        }
        Ok(())
    }

    /// Requests the answer of every node. Each of them has `limit` for it.
    fn request<T, F>(self: &Arc<Self>, limit: Duration, call: impl Fn(Arc<Node>) -> F) -> Votes<T>
    where
        T: Send + 'static,
        F: Future<Output = std::result::Result<T, Failure>> + Send + 'static,
    {
        self.request_from(0..self.nodes.len(), limit, call)
    }

    /// Requests the answers of these nodes, in this order.
    fn request_from<T, F>(
        self: &Arc<Self>,
        nodes: impl Iterator<Item = usize>,
        limit: Duration,
        call: impl Fn(Arc<Node>) -> F,
    ) -> Votes<T>
    where
        T: Send + 'static,
        F: Future<Output = std::result::Result<T, Failure>> + Send + 'static,
    {
        let requests = nodes.map(|index| {
            let answer = call(self.nodes[index].clone());
            async move { tokio::time::timeout(limit, answer).await.ok() }
        });
        Votes::new(self, requests)
    }

    /// Spawns a task that continues without its caller until the engine is closed.
    fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        let closing = self.closing.clone();
        // Boxed: the code of a task exists once, and not for each kind of work.
        let work: BoxFuture<'static, ()> = Box::pin(work);
        self.runtime.spawn(async move {
            tokio::select! {
                biased;
                () = closing.cancelled() => {}
                () = work => {}
            }
        });
    }

    /// Returns the call of a script with the keys of every name of a claim, and its first argument.
    fn call(&self, script: &Script, parts: &[Part], claim: &Claim, first: &str) -> Cmd {
        let mut call = script.call(&self.layout, parts, claim.keys().iter().map(Key::as_str));
        call.arg(first);
        call
    }

    /// Returns the call that rolls back the vote with this value.
    fn rollback_call(&self, claim: &Claim, value: &str) -> Cmd {
        self.call(&ROLLBACK, &[Part::Lock, Part::Metadata], claim, value)
    }

    /// Returns the time that a node has for its vote for a lease with this ttl.
    fn vote_timeout(&self, ttl: Ttl) -> Duration {
        self.node_timeout.min((ttl.duration() / 3).max(MIN_NODE_TIMEOUT))
    }

    /// Returns the number of the next attempt, larger than every earlier one of this process: the time by the clocks of the nodes in µs, or
    /// the last number + 1. (Other processes never make attempts of the same owner.) It is the floor of the attempt's fencing token, too.
    fn next_attempt(&self) -> u64 {
        let now = common_time(&self.nodes);
        let after = |last: u64| Some(now.max(last + 1));
        let last = self
            .last_attempt
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, after);
        now.max(last.unwrap_or_default() + 1)
    }

    /// Sends the records of grants that were not sent yet. The nodes store them before they execute later requests.
    fn write_records(&self) {
        self.nodes.iter().for_each(|node| node.link.write_records());
    }

    /// Ends the background tasks and closes the connections.
    fn close_connections(&self) {
        self.closing.cancel();
        for node in &self.nodes {
            // The rounds in progress keep it open otherwise.
            if let Some(connection) = node.link.current() {
                connection.wire.end();
            }
            node.link.close();
        }
    }
}

#[async_trait]
impl Engine for QuorumEngine {
    fn describe(&self) -> Description {
        Description::new(ENGINE, false)
    }

    async fn try_acquire_all(&self, claims: &[&Claim], answer: &mut Answers<'_, Acquired>) {
        for (index, claim) in claims.iter().enumerate() {
            answer(index, self.quorum.acquire(claim).await);
        }
    }

    async fn renew_all(&self, renewals: &[Renewal<'_>], answer: &mut Answers<'_, Renewed>) {
        let calls = renewals
            .iter()
            .map(|renewal| self.quorum.renew(renewal.claim, renewal.ttl));
        answer_each(calls, answer).await;
    }

    async fn transfer(&self, claim: &Claim, to: &OwnerToken) -> Result<Renewed> {
        self.quorum.transfer(claim, to).await
    }

    async fn release_all(&self, claims: &[&Claim], keep: Duration, answer: &mut Answers<'_, Released>) {
        answer_each(claims.iter().map(|claim| self.quorum.release(claim, keep)), answer).await;
    }

    async fn subscribe(&self, _claim: &Claim, key: &Key) -> Result<Box<dyn Subscription>> {
        Ok(Box::new(self.quorum.subscribe(key).await?))
    }

    async fn read(&self, what: Read<'_>) -> Result<Vec<LockInfo>> {
        match what {
            Read::Name { key, .. } => self.quorum.inspect(key.as_str()).await,
            Read::Prefix { prefix, page_timeout } => self.quorum.list(prefix, page_timeout).await,
        }
    }

    async fn force_release(&self, key: &Key) -> Result<bool> {
        self.quorum.force_release(key).await
    }

    /// # Behavior
    /// Waits for releases that a majority has confirmed and that are still in flight to other nodes.
    async fn close(&self) {
        self.quorum.urgent.close();
        let _ = tokio::time::timeout(self.quorum.node_timeout, self.quorum.urgent.wait()).await;
        self.quorum.close_connections();
    }
}
