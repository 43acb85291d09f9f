//! The contract on a quorum of three servers, and the tests of the quorum's own behavior.

use futures_util::future::join_all;

use super::super::keys::{Part, companion};
use super::super::{QuorumConfig, QuorumEngine};
use super::*;
use crate::engine::{Answers, Description, EngineExt, Read, Renewal, Renewed, Result as EngineResult};

mod bursts;
mod faults;
mod inspect;
mod late_replies;
mod rights;
mod tokens;
mod turns;

/// Returns the key of a name's counter.
fn counter(name: &str) -> String {
    let mut key = String::new();
    companion(Part::Counter, &format!("lock:{name}"), &mut key);
    key
}

/// Independent servers.
struct Nodes(Vec<Server>);

impl Nodes {
    async fn start(count: usize) -> Option<Self> {
        let servers = join_all((0..count).map(|_| Server::start(&[]))).await;
        Some(Nodes(servers.into_iter().collect::<Option<_>>()?))
    }

    fn config(&self, prefix: &str, limit: Duration) -> QuorumConfig {
        let settings = Settings {
            store_timeout: limit,
            ..settings(prefix)
        };
        self.config_for("", &settings)
    }

    /// Returns the configuration for a login. `login`: empty, or `user:password@`.
    fn config_for(&self, login: &str, settings: &Settings) -> QuorumConfig {
        let with_login = |server: &Server| server.url().replace("://", &format!("://{login}"));
        let urls: Vec<String> = self.0.iter().map(with_login).collect();
        QuorumConfig::parse(&urls, settings).unwrap()
    }

    /// Returns an engine with this time limit for the answer of one node.
    async fn with_node_timeout(&self, node_timeout: Duration) -> Arc<QuorumEngine> {
        soon(async || QuorumEngine::connect(self.config("lock:", node_timeout * 4)).await).await
    }

    async fn engine(&self) -> Arc<QuorumEngine> {
        self.with_node_timeout(Duration::from_millis(1250)).await
    }

    async fn other(&self, node: usize) -> OtherClient {
        self.0[node].other().await
    }

    /// Returns the value of a key, node by node.
    async fn get(&self, nodes: &[usize], key: &str) -> Vec<Option<String>> {
        join_all(
            nodes
                .iter()
                .map(async |node| self.other(*node).await.args(&["GET", key]).await),
        )
        .await
    }

    /// Returns the last token of a name, node by node. It stays after the end of a vote or a lease.
    async fn last_fences(&self, nodes: &[usize], name: &str) -> Vec<Option<u64>> {
        let counter = counter(name);
        join_all(nodes.iter().map(async |node| {
            let count: Option<String> = self.other(*node).await.args(&["ZSCORE", &counter, "last"]).await;
            count.map(|count| count.parse().unwrap())
        }))
        .await
    }

    /// Sets the last token of a name on one node.
    async fn set_last_fence(&self, node: usize, name: &str, fence: u64) {
        let mut other = self.other(node).await;
        let added: i64 = other
            .args(&["ZADD", &counter(name), "CH", &fence.to_string(), "last"])
            .await;
        assert_eq!(added, 1);
    }

    /// Returns the record of a grant on one node, when it is written.
    async fn record(&self, node: usize, name: &str) -> String {
        let mut record = None;
        eventually("the record is written", async || {
            record = self
                .get(&[node], &format!("holdfast:fence:{{lock:{name}}}"))
                .await
                .remove(0);
            record.is_some()
        })
        .await;
        record.unwrap()
    }

    /// Waits until all of the nodes have given the same vote. A grant needs a majority only.
    async fn all_have(&self, nodes: &[usize], name: &str) -> Vec<Option<String>> {
        let lock = format!("lock:{name}");
        let mut values = Vec::new();
        eventually("all votes", async || {
            values = self.get(nodes, &lock).await;
            values.iter().all(|value| value.is_some() && *value == values[0])
        })
        .await;
        values
    }

    /// Makes every node execute a vote and a release, so that no later request has to send a script's text.
    async fn load_scripts(&self, engine: &QuorumEngine) {
        let other = claim("scripts");
        acquire_soon(engine, &other).await;
        let nodes: Vec<usize> = (0..self.0.len()).collect();
        self.all_have(&nodes, "scripts").await;
        release(engine, &other).await;
        self.are_free(&nodes, "scripts").await;
    }

    /// Waits until none of the nodes has the lock.
    async fn are_free(&self, nodes: &[usize], name: &str) {
        let lock = format!("lock:{name}");
        eventually("no lock key is left on the nodes", async || {
            self.get(nodes, &lock).await.iter().all(Option::is_none)
        })
        .await;
    }

    /// Suspends a node.
    fn suspend(&self, node: usize) {
        self.signal(node, libc::SIGSTOP);
    }

    fn resume(&self, node: usize) {
        self.signal(node, libc::SIGCONT);
    }

    fn signal(&self, node: usize, signal: i32) {
        // SAFETY: the process is a child of this one that was not waited for yet.
        unsafe { libc::kill(self.0[node].process.id() as i32, signal) };
    }
}

crate::engine::contract::contract_tests!(async |prefix: String| {
    let nodes = Nodes::start(3).await?;
    let a = QuorumEngine::connect(nodes.config(&prefix, Duration::from_secs(20)))
        .await
        .unwrap();
    let b = QuorumEngine::connect(nodes.config(&prefix, Duration::from_secs(20)))
        .await
        .unwrap();
    let nodes = Arc::new(nodes);
    let (a, b): (SharedEngine, SharedEngine) = (EngineWithNodes::new(a, &nodes), EngineWithNodes::new(b, &nodes));
    Some((a, b))
});

async fn acquire(engine: &QuorumEngine, claim: &Claim) -> Fence {
    match engine.try_acquire(claim).await.unwrap() {
        Acquired::Granted { fence } => fence,
        held => panic!("{held:?}"),
    }
}

/// Repeats a call that fails with a retryable error, for 10 s: the machine may stand still for longer than a node has to answer.
async fn soon<T>(mut call: impl AsyncFnMut() -> EngineResult<T>) -> T {
    let deadline = tokio::time::Instant::now() + Duration::from_secs(10);
    loop {
        match call().await {
            Err(error) if error.retryable && tokio::time::Instant::now() < deadline => {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            outcome => return outcome.unwrap(),
        }
    }
}

/// Releases a lease. Where a call has failed, an earlier one may have released it.
async fn release_soon(engine: &QuorumEngine, claim: &Claim) {
    let mut calls = 0;
    let released = soon(async || {
        calls += 1;
        engine.release(claim, Duration::ZERO).await
    })
    .await;
    assert!(released == Released::Freed || calls > 1, "{released:?}");
}

async fn renew_soon(engine: &QuorumEngine, claim: &Claim) -> Renewed {
    soon(async || renew(engine, claim).await).await
}

/// Acquires a name as soon as possible: connections may have to be opened first, or a failed attempt rolled back.
async fn acquire_soon(engine: &QuorumEngine, claim: &Claim) -> Fence {
    let mut granted = None;
    eventually("the name is granted", async || {
        granted = match engine.try_acquire(claim).await {
            Ok(Acquired::Granted { fence }) => Some(fence),
            _ => None,
        };
        granted.is_some()
    })
    .await;
    granted.unwrap()
}

async fn busy(engine: &QuorumEngine, claim: &Claim) -> Option<Duration> {
    match engine.try_acquire(claim).await.unwrap() {
        Acquired::Held { retry_after, .. } => retry_after,
        granted => panic!("{granted:?}"),
    }
}

async fn release(engine: &QuorumEngine, claim: &Claim) {
    assert_eq!(engine.release(claim, Duration::ZERO).await.unwrap(), Released::Freed);
}

async fn renew(engine: &QuorumEngine, claim: &Claim) -> EngineResult<Renewed> {
    engine.renew(claim, claim.ttl).await
}

/// An engine that keeps its servers running.
#[derive(Debug)]
struct EngineWithNodes {
    engine: Arc<QuorumEngine>,
    _nodes: Arc<Nodes>,
}

impl std::fmt::Debug for Nodes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} nodes", self.0.len())
    }
}

impl EngineWithNodes {
    fn new(engine: Arc<QuorumEngine>, nodes: &Arc<Nodes>) -> Arc<Self> {
        let _nodes = nodes.clone();
        Arc::new(EngineWithNodes { engine, _nodes })
    }
}

#[async_trait::async_trait]
impl Engine for EngineWithNodes {
    fn describe(&self) -> Description {
        self.engine.describe()
    }
    async fn try_acquire_all(&self, claims: &[&Claim], answer: &mut Answers<'_, Acquired>) {
        self.engine.try_acquire_all(claims, answer).await;
    }
    async fn renew_all(&self, renewals: &[Renewal<'_>], answer: &mut Answers<'_, Renewed>) {
        self.engine.renew_all(renewals, answer).await;
    }
    async fn transfer(&self, claim: &Claim, to: &OwnerToken) -> EngineResult<Renewed> {
        self.engine.transfer(claim, to).await
    }
    async fn release_all(&self, claims: &[&Claim], keep: Duration, answer: &mut Answers<'_, Released>) {
        self.engine.release_all(claims, keep, answer).await;
    }
    async fn subscribe(&self, claim: &Claim, key: &Key) -> EngineResult<Box<dyn crate::engine::Subscription>> {
        self.engine.subscribe(claim, key).await
    }
    async fn read(&self, what: Read<'_>) -> EngineResult<Vec<crate::model::LockInfo>> {
        self.engine.read(what).await
    }
    async fn force_release(&self, key: &Key) -> EngineResult<bool> {
        self.engine.force_release(key).await
    }
    async fn close(&self) {
        self.engine.close().await;
    }
}
