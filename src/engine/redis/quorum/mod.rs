//! A quorum of independent Redis nodes: what a majority of them grants is held (the algorithm called Redlock in Redis's
//! manual, with what its published versions lack).
//!
//! # Behavior
//! Every verb asks all nodes at once and goes by what a majority says; nobody waits for the others. `docs/quorum.md` has
//! the argument for mutual exclusion, the rule of the fences with its proof, and what is asked of the servers.
//!
//! - **A fresh value per attempt.** A lock key holds `<owner token>.<attempt>`. What failed is taken back by that value, so
//!   that a late "take back" never hits the next attempt of the same owner; a release goes by the owner, whichever attempt
//!   it was.
//! - **Nothing is left behind.** A request whose answer is late or lost is followed up until the answer is there, or
//!   nothing of it can be on its way any more (`withdraw.rs`, `tenure.rs`). A bounded list per node has the removals that
//!   the node did not confirm (`cleanup.rs`). A vote that is unsent when its attempt ends is never sent.
//! - **Validity.** A node has a third of the ttl for its vote at most, so a grant (with the fence agreed on, two thirds at
//!   most) comes with time left: ttl − elapsed − drift > 0. Below a ttl of 150 ms the least patience with a node is
//!   longer than that; there as everywhere the service counts from before the first request, and refuses what is over.
//! - **Lanes.** A call on the event loop's thread asks the nodes by their fast lanes (`lane/`), and each answer is counted
//!   where it is read; no task is made for it. Elsewhere, and for a node without a lane, a task for each node asks by the
//!   ordinary connection. Both end in the same place (`attempt.rs`, `release.rs`).
//! - **A renewal heals** nodes that lost the lock by a restart or were down when it was granted (`renew.rs`).
//!
//! # Deployment
//! Each node as one that stands alone (`maxmemory-policy noeviction`), none of them a replica of another. A user with no
//! more rights than needed, on each, for the prefix `lock:`:
//!
//! ```text
//! ACL SETUSER holdfast on >PASSWORD resetkeys resetchannels -@all
//!     ~lock:* ~holdfast:* &holdfast:free:*
//!     +eval +evalsha +get +set +del +mget +pttl +pexpire +time +zadd +zscore +publish +subscribe +unsubscribe +scan +select
//! ```

mod acquire;
mod attempt;
mod cleanup;
mod config;
mod fence;
mod look;
#[cfg(test)]
mod model;
mod node;
mod release;
mod renew;
mod scripts;
mod tally;
mod tenure;
mod wake;
mod withdraw;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
#[cfg(unix)]
use futures_util::future::join_all;
use redis::Cmd;
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use config::QuorumConfig;

use self::config::LEAST_PATIENCE;
use self::node::Node;
use self::tally::{Tally, majority, no_majority};
use self::tenure::Tenures;
use super::error::{ENGINE, Failure};
#[cfg(unix)]
use super::fast_path::resp;
use super::keys::{Layout, Part};
#[cfg(unix)]
use super::ops::contended::Contended;
use super::scripts::Script;
use crate::engine::attempt_queue::AttemptQueue;
use crate::engine::{Acquired, Engine, Released, Releases, Renewed, Result, Subscription};
use crate::model::{Claim, Key, LockInfo, OwnerToken, Ttl};

/// How many attempts to acquire are in progress at once. Renewals and releases are not limited.
const ATTEMPTS: usize = 512;

/// The engine behind a list of `redis://` and `rediss://` URLs.
pub struct QuorumEngine {
    quorum: Arc<Quorum>,
}

/// What the verbs and their work in the background share.
struct Quorum {
    nodes: Box<[Arc<Node>]>,
    layout: Layout,
    /// How long one node has for one answer, at most.
    patience: Duration,
    attempts: Arc<AttemptQueue>,
    last_attempt: AtomicU64,
    last_floor: AtomicU64,
    tenures: Tenures,
    #[cfg(unix)]
    contended: Contended,
    closing: CancellationToken,
    /// Work is left behind where no runtime is entered.
    runtime: Handle,
    /// What a close waits for: releases on their way.
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
    /// Connects, and makes sure that the servers are new enough.
    ///
    /// # Behavior
    /// A majority has to answer. The others are taken up when they come.
    ///
    /// # Errors
    /// When no majority can be reached, or any node refuses the login or is older than Redis 6.2: that is a mistake which
    /// would otherwise show when another node fails.
    pub async fn connect(config: QuorumConfig) -> Result<Arc<Self>> {
        let layout = config.nodes[0].layout.clone();
        let quorum = Arc::new(Quorum {
            nodes: config.nodes.into_iter().map(|node| Arc::new(Node::new(node))).collect(),
            layout,
            patience: config.patience,
            attempts: AttemptQueue::new(ATTEMPTS),
            last_attempt: AtomicU64::new(0),
            last_floor: AtomicU64::new(0),
            tenures: Tenures::default(),
            #[cfg(unix)]
            contended: Contended::default(),
            closing: CancellationToken::new(),
            runtime: Handle::current(),
            urgent: TaskTracker::new(),
        });
        let engine = Arc::new(QuorumEngine { quorum });
        engine.quorum.greet().await.inspect_err(|_| engine.quorum.shut())?;
        Ok(engine)
    }
}

#[cfg(test)]
impl QuorumEngine {
    /// Returns the number of entries on the clean-up list of a node.
    pub(super) fn remains(&self, node: usize) -> usize {
        self.quorum.nodes[node].cleanup.len()
    }

    /// Closes the connection to a node, so that its next call needs a new one.
    pub(super) async fn disconnect(&self, node: usize) {
        let link = &self.quorum.nodes[node].link;
        if let Some(connection) = link.existing().await {
            link.lose(connection.generation);
        }
    }
}

impl Quorum {
    fn majority(&self) -> usize {
        majority(self.nodes.len())
    }

    /// Greets every node. Connecting is worth waiting for the slow ones, within what any node has for an answer.
    async fn greet(self: &Arc<Self>) -> Result<()> {
        let tally = self.ask(self.patience, |node| async move { node.greet().await });
        let (_, answers) = tally.decide(self.patience, |_| None::<()>).await;
        let refusal = answers.iter().find_map(|answer| match answer {
            Some(Err(failure)) if !failure.retryable() => Some(failure.clone()),
            _ => None,
        });
        if let Some(failure) = refusal {
            return Err(failure.during("connect"));
        }
        if answers.iter().filter(|answer| matches!(answer, Some(Ok(())))).count() < self.majority() {
            return Err(self.no_majority("connect", &answers, self.patience));
        }
        Ok(())
    }

    /// Puts a question to every node at once. Each has `limit` for its answer.
    fn ask<T, F>(self: &Arc<Self>, limit: Duration, call: impl Fn(Arc<Node>) -> F) -> Arc<Tally<T>>
    where
        T: Send + 'static,
        F: Future<Output = std::result::Result<T, Failure>> + Send + 'static,
    {
        let tally = Arc::new(Tally::new(self.nodes.len()));
        for (index, node) in self.nodes.iter().enumerate() {
            let (answer, tally) = (call(node.clone()), tally.clone());
            self.spawn(async move {
                if let Ok(answer) = tokio::time::timeout(limit, answer).await {
                    tally.cast(index, answer);
                }
            });
        }
        tally
    }

    /// Asks every node for a number, and takes `yes` of it.
    fn ask_number(
        self: &Arc<Self>,
        limit: Duration,
        script: &'static Script,
        call: Cmd,
        yes: impl Fn(i64) -> bool + Copy + Send + 'static,
    ) -> Arc<Tally<bool>> {
        let call = Arc::new(call);
        self.ask(limit, move |node| {
            let call = call.clone();
            async move { node.number(script, &call).await.map(yes) }
        })
    }

    /// Work that goes on without its caller, until the engine is closed.
    fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        let closing = self.closing.clone();
        self.runtime.spawn(async move {
            tokio::select! {
                biased;
                () = closing.cancelled() => {}
                () = work => {}
            }
        });
    }

    /// The call of a script with the keys of every name of a claim, and its first argument.
    fn call(&self, script: &Script, parts: &[Part], claim: &Claim, first: &str) -> Cmd {
        let mut call = script.call(&self.layout, parts, claim.keys().iter().map(Key::as_str));
        call.arg(first);
        call
    }

    /// How long a node has for an answer while a lease of so long a ttl is begun.
    fn limit(&self, ttl: Ttl) -> Duration {
        self.patience.min((ttl.duration() / 3).max(LEAST_PATIENCE))
    }

    /// A number for the next attempt, larger than every earlier one of this process: the wall clock in µs, where it has
    /// moved on. (Other processes never make attempts of the same owner.)
    fn next_attempt(&self) -> u64 {
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default()
            .as_micros() as u64;
        next(&self.last_attempt, now)
    }

    /// The floor of the next attempt's fence: the time, where it is known, but larger than every earlier one of this
    /// process, so that two attempts do not ask for the same.
    fn next_floor(&self, time: u64) -> u64 {
        if time == 0 { 0 } else { next(&self.last_floor, time) }
    }

    /// Has what inspection tells written down, before somebody looks.
    fn write_records(&self) {
        #[cfg(unix)]
        for lane in self.nodes.iter().filter_map(|node| node.link.fast_path()) {
            lane.write_records();
        }
    }

    /// The same, and waits until it is written, for so long at most: what comes next goes another way to the nodes.
    #[cfg(unix)]
    async fn settle_records(&self, limit: Duration) {
        let lanes: Vec<_> = self.nodes.iter().filter_map(|node| node.link.fast_path()).collect();
        let written = lanes.iter().filter(|lane| lane.write_records());
        let settled = join_all(written.map(|lane| lane.call_written(|out| resp::write(out, &["TIME"]))));
        let _ = tokio::time::timeout(limit, settled).await;
    }

    fn no_majority<T>(
        &self,
        op: &'static str,
        answers: &[tally::Answer<T>],
        limit: Duration,
    ) -> crate::error::EngineError {
        no_majority(op, self.nodes.iter().map(|node| &**node), answers, limit)
    }

    /// Gives back the connections.
    fn shut(&self) {
        self.closing.cancel();
        for node in &self.nodes {
            node.link.close();
        }
    }
}

/// The next of growing numbers, and no less than this.
fn next(last: &AtomicU64, least: u64) -> u64 {
    let after = |last: u64| Some(least.max(last + 1));
    let before = last.fetch_update(Ordering::Relaxed, Ordering::Relaxed, after);
    least.max(before.unwrap_or_default() + 1)
}

#[async_trait]
impl Engine for QuorumEngine {
    fn name(&self) -> &'static str {
        ENGINE
    }

    fn ordered(&self) -> bool {
        false
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Acquired> {
        self.quorum.acquire(claim).await
    }

    async fn renew(&self, claim: &Claim, ttl: Ttl) -> Result<Renewed> {
        self.quorum.renew(claim, ttl).await
    }

    async fn transfer(&self, claim: &Claim, to: &OwnerToken) -> Result<Renewed> {
        self.quorum.transfer(claim, to).await
    }

    async fn release(&self, claim: &Claim, keep: Duration) -> Result<Released> {
        self.quorum.release(claim, keep).await
    }

    async fn release_all(&self, claims: &[Claim], answer: &mut Releases<'_>) {
        self.quorum.release_all(claims, answer).await;
    }

    async fn subscribe(&self, _claim: &Claim, key: &Key) -> Result<Box<dyn Subscription>> {
        Ok(Box::new(self.quorum.subscribe(key).await?))
    }

    async fn inspect(&self, key: &Key) -> Result<Option<LockInfo>> {
        self.quorum.look_at(key.as_str()).await
    }

    async fn list(&self, prefix: &str, page_timeout: Duration) -> Result<Vec<LockInfo>> {
        self.quorum.look_for(prefix, page_timeout).await
    }

    async fn force_release(&self, key: &Key) -> Result<bool> {
        self.quorum.free(key).await
    }

    /// # Behavior
    /// A release that a majority has confirmed may still be on its way to the other nodes: it is waited for.
    async fn close(&self) {
        self.quorum.urgent.close();
        let _ = tokio::time::timeout(self.quorum.patience, self.quorum.urgent.wait()).await;
        self.quorum.shut();
    }
}
