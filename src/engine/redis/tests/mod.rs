//! The contract on a real server, and what is special about this one.

use std::collections::BTreeSet;
use std::collections::HashMap;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ::redis::FromRedisValue;

use self::topology::{MASTER, Watched, within};
use super::connection::Link;
use super::topology::Route;
use super::{RedisConfig, RedisEngine};
use crate::engine::contract::PAGE;
use crate::engine::{Acquired, Engine, Released, Settings, SharedEngine, Subscription};
use crate::model::{Claim, Fence, Key, OwnerToken, Process, Ttl};

mod cluster;
mod connection;
mod dead;
mod keyspace;
mod nodes;
mod outage;
mod queue;
#[cfg(unix)]
mod quorum;
// The same tests with calls that come from an event loop's thread, and so go by the lanes.
#[cfg(unix)]
#[path = "quorum/mod.rs"]
#[expect(clippy::duplicate_mod, reason = "both ways to the nodes have to keep every promise")]
mod quorum_by_lanes;
#[cfg(unix)]
mod records;
mod renewal;
mod replicas;
mod rights;
mod security;
mod sentinel;
mod speed;
mod stall;
mod topology;
#[cfg(unix)]
mod trouble;

const URL: &str = "HOLDFAST_TEST_REDIS_URL";
const LONG: Duration = Duration::from_secs(30);

crate::engine::contract::contract_tests!(async |prefix: String| {
    let url = url()?;
    let a: SharedEngine = engine(&url, &prefix).await;
    let b: SharedEngine = engine(&url, &prefix).await;
    Some((a, b))
});

impl RedisEngine {
    /// The way to the one server that there is.
    fn link(&self) -> &Arc<Link> {
        match &self.route {
            Route::One(link) => link,
            Route::Cluster(_) => panic!("a cluster"),
        }
    }
}

/// Says that a test could not run. Where `CI` is set that is a failure.
fn skip(why: &str) {
    assert!(std::env::var_os("CI").is_none(), "{why}");
    eprintln!("skipped: {why}");
}

fn url() -> Option<String> {
    let url = std::env::var(URL).ok();
    if url.is_none() {
        skip(&format!("{URL} is not set"));
    }
    url
}

fn settings(prefix: &str) -> Settings {
    Settings {
        key_prefix: Some(prefix.to_owned()),
        ..Settings::default()
    }
}

async fn engine(url: &str, prefix: &str) -> Arc<RedisEngine> {
    RedisEngine::connect(RedisConfig::parse(url, &settings(prefix)).unwrap())
        .await
        .unwrap()
}

fn key(name: &str) -> Key {
    Key::new(name).unwrap()
}

fn claim(name: &str) -> Claim {
    Claim::new(
        &[key(name)],
        OwnerToken::fresh(),
        Ttl::clamped(LONG),
        Arc::new(Process::current()),
    )
}

/// A claim that is ready to wait.
fn waiting(name: &str) -> Claim {
    let mut claim = claim(name);
    claim.waiting = true;
    claim
}

/// Takes a place in the queue of a busy name.
async fn wait(engine: &RedisEngine, claim: &Claim) -> Box<dyn Subscription> {
    let subscription = engine.subscribe(claim, &claim.keys()[0]).await.unwrap();
    let tried = engine.try_acquire(claim).await.unwrap();
    assert!(matches!(tried, Acquired::Held { .. }), "{tried:?}");
    subscription
}

/// Waits for a hint.
async fn told(subscription: &mut Box<dyn Subscription>) {
    tokio::time::timeout(Duration::from_secs(10), subscription.changed())
        .await
        .expect("told within 10 s");
}

async fn take(engine: &RedisEngine, claim: &Claim) -> Fence {
    match engine.try_acquire(claim).await.unwrap() {
        Acquired::Granted { fence } => fence,
        held => panic!("{held:?}"),
    }
}

async fn free(engine: &RedisEngine, claim: &Claim) {
    assert_eq!(engine.release(claim, Duration::ZERO).await.unwrap(), Released::Freed);
}

/// Waits for something that comes about in the background.
async fn eventually(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let deadline = tokio::time::Instant::now() + Duration::from_secs(10);
    while !holds().await {
        assert!(tokio::time::Instant::now() < deadline, "not within 10 s: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Another tool's connection.
struct Other(::redis::aio::MultiplexedConnection);

impl Other {
    async fn connect(url: &str) -> Self {
        let options = ::redis::AsyncConnectionConfig::new()
            .set_connection_timeout(Some(Duration::from_secs(20)))
            .set_response_timeout(Some(Duration::from_secs(20)));
        let client = ::redis::Client::open(url).unwrap();
        Other(
            client
                .get_multiplexed_async_connection_with_config(&options)
                .await
                .unwrap(),
        )
    }

    /// Runs a command whose arguments have no blanks.
    async fn run<T: FromRedisValue>(&mut self, line: &str) -> T {
        self.args(&line.split(' ').collect::<Vec<_>>()).await
    }

    async fn args<T: FromRedisValue>(&mut self, args: &[&str]) -> T {
        let mut cmd = ::redis::Cmd::new();
        cmd.arg(args);
        cmd.query_async(&mut self.0)
            .await
            .unwrap_or_else(|error| panic!("{args:?}: {error}"))
    }
}

/// A server of a test's own.
struct Server {
    process: Child,
    port: u16,
    dir: tempfile::TempDir,
}

impl Server {
    /// Starts one. `None`, having said so, where `redis-server` is not on the path.
    async fn start(options: &[&str]) -> Option<Self> {
        let port = free_port();
        let dir = tempfile::tempdir().unwrap();
        let process = spawn(port, dir.path(), options)?;
        let mut server = Server { process, port, dir };
        server.answers().await.then_some(server)
    }

    /// Waits until the server listens. `false`, having said so, when it ended because it was built without TLS.
    async fn answers(&mut self) -> bool {
        let mut ended = None;
        eventually("a server that listens", async || {
            ended = self.process.try_wait().unwrap();
            ended.is_some() || tokio::net::TcpStream::connect(("127.0.0.1", self.port)).await.is_ok()
        })
        .await;
        let Some(ended) = ended else { return true };
        let mut told = String::new();
        if let Some(output) = &mut self.process.stderr {
            std::io::Read::read_to_string(output, &mut told).unwrap();
        }
        assert!(told.contains("tls"), "redis-server ended ({ended}): {told}");
        skip("this redis-server was built without TLS");
        false
    }

    /// Stops the server as a crash would, and starts it again with nothing in it.
    async fn restart(&mut self) {
        self.stop();
        self.process = spawn(self.port, self.dir.path(), &[]).unwrap();
        assert!(self.answers().await);
    }

    fn stop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }

    fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    async fn engine(&self) -> Arc<RedisEngine> {
        engine(&self.url(), "lock:").await
    }

    async fn other(&self) -> Other {
        Other::connect(&self.url()).await
    }
}

/// A port that nobody uses, and that no other test of this process is given: below those that the kernel gives to
/// outgoing connections, one of which could have it before the server does.
fn free_port() -> u16 {
    static GIVEN: Mutex<BTreeSet<u16>> = Mutex::new(BTreeSet::new());
    loop {
        let port = fastrand::u16(10_000..32_000);
        if TcpListener::bind(("127.0.0.1", port)).is_ok() && GIVEN.lock().unwrap().insert(port) {
            return port;
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

fn spawn(port: u16, dir: &Path, options: &[&str]) -> Option<Child> {
    let mut command = Command::new("redis-server");
    if !options.contains(&"--tls-port") {
        command.arg("--port").arg(port.to_string());
    }
    command
        .args(["--bind", "127.0.0.1", "--save", "", "--appendonly", "no"])
        // Or it waits five seconds for more replicas before it copies itself to the first.
        .args(["--repl-diskless-sync-delay", "0", "--dir"])
        .arg(dir);
    for option in options {
        command.arg(option.replace("PORT", &port.to_string()));
    }
    match command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn() {
        Ok(process) => Some(process),
        Err(error) => {
            skip(&format!("no redis-server: {error}"));
            None
        }
    }
}
