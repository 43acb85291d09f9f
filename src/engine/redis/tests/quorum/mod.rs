//! The contract on a quorum of three servers, and what is special about many.

use futures_util::future::join_all;

use super::super::keys::{Part, companion};
use super::super::{QuorumConfig, QuorumEngine};
use super::*;
use crate::engine::{Renewed, Result as EngineResult};
use crate::event_loop::{EventLoop, Socket};

mod bursts;
mod faults;
mod late;
mod looking;
mod tokens;

/// An event loop on the test's own thread: it comes round once in a millisecond.
#[derive(Debug)]
struct Loop(std::thread::ThreadId);

impl EventLoop for Loop {
    fn is_here(&self) -> bool {
        std::thread::current().id() == self.0
    }

    fn serve(&self, socket: Arc<dyn Socket>) {
        tokio::spawn(async move {
            while socket.flush() && socket.readable() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        });
    }
}

/// This file is compiled twice.
fn by_lanes() -> bool {
    module_path!().contains("by_lanes")
}

/// The key of a name's counter.
fn counter(name: &str) -> String {
    let mut key = String::new();
    companion(Part::Counter, &format!("lock:{name}"), &mut key);
    key
}

/// Servers that know nothing of each other.
struct Nodes(Vec<Server>);

impl Nodes {
    async fn start(count: usize) -> Option<Self> {
        let servers = join_all((0..count).map(|_| Server::start(&[]))).await;
        Some(Nodes(servers.into_iter().collect::<Option<_>>()?))
    }

    fn config(&self, prefix: &str, limit: Duration) -> QuorumConfig {
        let urls: Vec<String> = self.0.iter().map(Server::url).collect();
        let event_loop = by_lanes().then(|| Arc::new(Loop(std::thread::current().id())) as Arc<dyn EventLoop>);
        let settings = Settings {
            store_timeout: limit,
            event_loop,
            ..settings(prefix)
        };
        QuorumConfig::parse(&urls, &settings).unwrap()
    }

    /// An engine that waits for a node for so long.
    async fn patient(&self, patience: Duration) -> Arc<QuorumEngine> {
        QuorumEngine::connect(self.config("lock:", patience * 4)).await.unwrap()
    }

    async fn engine(&self) -> Arc<QuorumEngine> {
        self.patient(Duration::from_millis(1250)).await
    }

    async fn other(&self, node: usize) -> Other {
        self.0[node].other().await
    }

    /// What a key holds, node by node.
    async fn get(&self, nodes: &[usize], key: &str) -> Vec<Option<String>> {
        join_all(
            nodes
                .iter()
                .map(async |node| self.other(*node).await.args(&["GET", key]).await),
        )
        .await
    }

    /// The last fence of a name, node by node: a vote leaves it there, whatever becomes of the lease.
    async fn counts(&self, nodes: &[usize], name: &str) -> Vec<Option<u64>> {
        let counter = counter(name);
        join_all(nodes.iter().map(async |node| {
            let count: Option<String> = self.other(*node).await.args(&["ZSCORE", &counter, "last"]).await;
            count.map(|count| count.parse().unwrap())
        }))
        .await
    }

    /// Makes a name's last fence this on one node.
    async fn count(&self, node: usize, name: &str, fence: u64) {
        let mut other = self.other(node).await;
        let added: i64 = other
            .args(&["ZADD", &counter(name), "CH", &fence.to_string(), "last"])
            .await;
        assert_eq!(added, 1);
    }

    /// What inspection tells of a grant on one node, as soon as that is written down.
    async fn record(&self, node: usize, name: &str) -> String {
        let mut record = None;
        eventually("the grant is written down", async || {
            record = self
                .get(&[node], &format!("holdfast:fence:{{lock:{name}}}"))
                .await
                .remove(0);
            record.is_some()
        })
        .await;
        record.unwrap()
    }

    /// Waits until each of the nodes has given its vote, and the same: a grant comes as soon as a majority has.
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

    /// Has every node carry out a vote and a release, so that what is late later is not late for want of a script.
    async fn know_the_scripts(&self, engine: &QuorumEngine) {
        let other = claim("scripts");
        take_soon(engine, &other).await;
        let nodes: Vec<usize> = (0..self.0.len()).collect();
        self.all_have(&nodes, "scripts").await;
        free(engine, &other).await;
        self.are_free(&nodes, "scripts").await;
    }

    /// Waits until none of the nodes has the lock.
    async fn are_free(&self, nodes: &[usize], name: &str) {
        let lock = format!("lock:{name}");
        eventually("nothing is left on the nodes", async || {
            self.get(nodes, &lock).await.iter().all(Option::is_none)
        })
        .await;
    }

    /// Stops a node in the middle of what it does, as SIGSTOP or a machine without a processor would.
    fn hang(&self, node: usize) {
        self.signal(node, libc::SIGSTOP);
    }

    fn go_on(&self, node: usize) {
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
    let (a, b): (SharedEngine, SharedEngine) = (Held::new(a, &nodes), Held::new(b, &nodes));
    Some((a, b))
});

async fn take(engine: &QuorumEngine, claim: &Claim) -> Fence {
    match engine.try_acquire(claim).await.unwrap() {
        Acquired::Granted { fence } => fence,
        held => panic!("{held:?}"),
    }
}

/// Takes a name as soon as that works: connections may have to come back first, or a failed attempt to be taken back.
async fn take_soon(engine: &QuorumEngine, claim: &Claim) -> Fence {
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

async fn free(engine: &QuorumEngine, claim: &Claim) {
    assert_eq!(engine.release(claim, Duration::ZERO).await.unwrap(), Released::Freed);
}

async fn renew(engine: &QuorumEngine, claim: &Claim) -> EngineResult<Renewed> {
    engine.renew(claim, claim.ttl).await
}

/// An engine that keeps its servers running.
#[derive(Debug)]
struct Held {
    engine: Arc<QuorumEngine>,
    _nodes: Arc<Nodes>,
}

impl std::fmt::Debug for Nodes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} nodes", self.0.len())
    }
}

impl Held {
    fn new(engine: Arc<QuorumEngine>, nodes: &Arc<Nodes>) -> Arc<Self> {
        let _nodes = nodes.clone();
        Arc::new(Held { engine, _nodes })
    }
}

#[async_trait::async_trait]
impl Engine for Held {
    fn name(&self) -> &'static str {
        self.engine.name()
    }
    fn ordered(&self) -> bool {
        self.engine.ordered()
    }
    async fn try_acquire(&self, claim: &Claim) -> EngineResult<Acquired> {
        self.engine.try_acquire(claim).await
    }
    async fn renew(&self, claim: &Claim, ttl: Ttl) -> EngineResult<Renewed> {
        self.engine.renew(claim, ttl).await
    }
    async fn transfer(&self, claim: &Claim, to: &OwnerToken) -> EngineResult<Renewed> {
        self.engine.transfer(claim, to).await
    }
    async fn release(&self, claim: &Claim, keep: Duration) -> EngineResult<Released> {
        self.engine.release(claim, keep).await
    }
    async fn subscribe(&self, claim: &Claim, key: &Key) -> EngineResult<Box<dyn crate::engine::Subscription>> {
        self.engine.subscribe(claim, key).await
    }
    async fn inspect(&self, key: &Key) -> EngineResult<Option<crate::model::LockInfo>> {
        self.engine.inspect(key).await
    }
    async fn list(&self, prefix: &str, page_timeout: Duration) -> EngineResult<Vec<crate::model::LockInfo>> {
        self.engine.list(prefix, page_timeout).await
    }
    async fn force_release(&self, key: &Key) -> EngineResult<bool> {
        self.engine.force_release(key).await
    }
    async fn close(&self) {
        self.engine.close().await;
    }
}
