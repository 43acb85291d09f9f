//! The contract on a real server, and the tests of Redis's own behavior.

use std::collections::BTreeSet;
use std::collections::HashMap;
use std::path::Path;
use std::pin::Pin;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use ::redis::FromRedisValue;
use tokio::net::TcpSocket;

use self::security::Certificates;
use super::connection::Link;
use super::topology::Route;
use super::{RedisConfig, RedisEngine};
use crate::engine::contract::{PAGE, one_is_faster, one_succeeds};
use crate::engine::{Acquired, Engine, EngineExt, Released, Settings, SharedEngine, Subscription, TlsFiles, Warnings};
use crate::event_loop::{EventLoop, Socket};
use crate::model::{Claim, Fence, Key, OwnerToken, Process, Ttl};

mod connect_checks;
mod connection;
mod hand_off;
mod keyspace;
#[cfg(unix)]
mod messages;
mod outages;
mod queue;
#[cfg(unix)]
mod quorum;
#[cfg(unix)]
mod records;
mod renewal;
pub(super) mod security;
pub(super) mod shares;
mod speed;
mod topology;

const URL: &str = "HOLDFAST_TEST_REDIS_URL";
const LONG: Duration = Duration::from_secs(30);

crate::engine::contract::contract_tests!(async |prefix: String| {
    let url = url()?;
    let a: SharedEngine = engine(&url, &prefix).await;
    let b: SharedEngine = engine(&url, &prefix).await;
    Some((a, b))
});

impl RedisEngine {
    /// Returns the link to the only server.
    fn link(&self) -> &Arc<Link> {
        match &self.route {
            Route::One(link) => link,
            Route::Cluster(_) => panic!("a cluster"),
        }
    }
}

/// An event loop on the test's own thread, which flushes and reads every millisecond.
#[derive(Debug)]
struct TestLoop(std::thread::ThreadId);

impl TestLoop {
    fn here() -> Arc<dyn EventLoop> {
        Arc::new(TestLoop(std::thread::current().id()))
    }
}

impl EventLoop for TestLoop {
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

    fn spawn(&self, future: Pin<Box<dyn Future<Output = ()> + Send>>) {
        tokio::spawn(future);
    }

    fn watch(&self, _: Weak<dyn Socket>) {}
}

/// Prints that a test could not run. With `CI` set, that is a failure.
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

/// Returns settings whose warnings are collected, and the warnings.
fn with_warnings(settings: Settings) -> (Settings, Arc<Mutex<Vec<String>>>) {
    let texts: Arc<Mutex<Vec<String>>> = Arc::default();
    let reported = texts.clone();
    let warnings = Warnings::new(move |text| reported.lock().unwrap().push(text.to_owned()));
    let warnings = Some(Arc::new(warnings));
    (Settings { warnings, ..settings }, texts)
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

/// Returns a claim that enters the queue when the name is busy.
fn waiting(name: &str) -> Claim {
    let mut claim = claim(name);
    claim.waiting = true;
    claim
}

/// Enters the queue of a busy name.
async fn enqueue(engine: &RedisEngine, claim: &Claim) -> Box<dyn Subscription> {
    let subscription = engine.subscribe(claim, &claim.keys()[0]).await.unwrap();
    let tried = engine.try_acquire(claim).await.unwrap();
    assert!(matches!(tried, Acquired::Held { .. }), "{tried:?}");
    subscription
}

/// Waits for a notification.
async fn notified(subscription: &mut Box<dyn Subscription>) {
    tokio::time::timeout(LONG, subscription.changed())
        .await
        .expect("a notification within 30 s");
}

async fn acquire(engine: &RedisEngine, claim: &Claim) -> Fence {
    match engine.try_acquire(claim).await.unwrap() {
        Acquired::Granted { fence } => fence,
        held => panic!("{held:?}"),
    }
}

async fn release(engine: &RedisEngine, claim: &Claim) {
    assert_eq!(engine.release(claim, Duration::ZERO).await.unwrap(), Released::Freed);
}

/// Waits until a condition holds.
async fn eventually(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let deadline = tokio::time::Instant::now() + Duration::from_secs(10);
    while !holds().await {
        assert!(tokio::time::Instant::now() < deadline, "not within 10 s: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// The connection of another tool.
struct OtherClient(::redis::aio::MultiplexedConnection);

impl OtherClient {
    async fn connect(url: &str) -> Self {
        // A second call changes nothing.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let options = ::redis::AsyncConnectionConfig::new()
            .set_connection_timeout(Some(Duration::from_secs(20)))
            .set_response_timeout(Some(Duration::from_secs(20)));
        let client = ::redis::Client::open(url).unwrap();
        OtherClient(
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

    /// Returns the number of scripts that the server has run.
    async fn scripts(&mut self) -> u64 {
        let stats: String = self.run("INFO commandstats").await;
        let calls = |verb: &str| -> u64 {
            let line = stats
                .lines()
                .find_map(|line| line.strip_prefix(&format!("cmdstat_{verb}:calls=")));
            line.map_or(0, |line| line.split(',').next().unwrap().parse().unwrap())
        };
        calls("eval") + calls("evalsha")
    }

    /// Waits until the server has the records of the grants of `count` names.
    async fn recorded(&mut self, count: usize) {
        eventually("the records", async || {
            self.run::<Vec<String>>("KEYS holdfast:fence:*").await.len() >= count
        })
        .await;
    }
}

/// A server of one test.
struct Server {
    process: Child,
    port: u16,
    dir: tempfile::TempDir,
    /// With TLS.
    files: Option<Certificates>,
}

impl Server {
    /// Starts a server. Returns `None`, after a message, if `redis-server` is not on the path.
    async fn start(options: &[&str]) -> Option<Self> {
        let port = free_port();
        let dir = tempfile::tempdir().unwrap();
        let process = spawn(port, dir.path(), options)?;
        let mut server = Server {
            process,
            port,
            dir,
            files: None,
        };
        server.wait_until_ready().await.then_some(server)
    }

    /// Starts a server, with TLS or without.
    async fn start_with(tls: bool) -> Option<Self> {
        if !tls {
            return Self::start(&[]).await;
        }
        let files = Certificates::make()?;
        let mut server = files.server("no").await?;
        server.files = Some(files);
        Some(server)
    }

    /// Waits until the server listens. Returns `false`, after a message, if it ended because it was built without TLS.
    async fn wait_until_ready(&mut self) -> bool {
        let mut ended = None;
        eventually("a server that listens", async || {
            ended = self.process.try_wait().unwrap();
            ended.is_some() || tokio::net::TcpStream::connect(("127.0.0.1", self.port)).await.is_ok()
        })
        .await;
        let Some(ended) = ended else { return true };
        let mut output = String::new();
        if let Some(stderr) = &mut self.process.stderr {
            std::io::Read::read_to_string(stderr, &mut output).unwrap();
        }
        assert!(output.contains("tls"), "redis-server ended ({ended}): {output}");
        skip("this redis-server was built without TLS");
        false
    }

    /// Stops the server like a crash, and starts it again without data.
    async fn restart(&mut self) {
        self.stop();
        self.process = spawn(self.port, self.dir.path(), &[]).unwrap();
        assert!(self.wait_until_ready().await);
    }

    fn stop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }

    fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    fn url(&self) -> String {
        let scheme = if self.files.is_some() { "rediss" } else { "redis" };
        format!("{scheme}://{}", self.address())
    }

    /// Returns the TLS settings for its URL.
    fn tls(&self) -> TlsFiles {
        TlsFiles {
            ca_file: self.files.as_ref().map(|files| files.path("ca.pem")),
            ..TlsFiles::default()
        }
    }

    async fn engine(&self) -> Arc<RedisEngine> {
        engine(&self.url(), "lock:").await
    }

    async fn other(&self) -> OtherClient {
        let trust_all = if self.files.is_some() { "/#insecure" } else { "" };
        OtherClient::connect(&(self.url() + trust_all)).await
    }
}

/// Returns an unused port that no other test of this process gets. It is below the ports of outgoing connections, one of which
/// could use it before the server does.
///
/// The port is tried with a socket that does not listen: a process that another test starts in that moment has a copy of the
/// socket until it executes its program, and would accept connections that the kernel resets then.
fn free_port() -> u16 {
    static GIVEN: Mutex<BTreeSet<u16>> = Mutex::new(BTreeSet::new());
    loop {
        let port = fastrand::u16(10_000..32_000);
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_reuseaddr(true).unwrap();
        if socket.bind(([127, 0, 0, 1], port).into()).is_ok() && GIVEN.lock().unwrap().insert(port) {
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
        // Otherwise it waits five seconds for more replicas before it copies its data to the first.
        .args(["--repl-diskless-sync-delay", "0", "--dir"])
        .arg(dir);
    for option in options {
        command.arg(option.replace("PORT", &port.to_string()));
    }
    // The default is 10 000 above the port, and may be the port of an outgoing connection.
    if options.contains(&"--cluster-enabled") && !options.contains(&"--cluster-port") {
        command.arg("--cluster-port").arg(free_port().to_string());
    }
    match command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn() {
        Ok(process) => Some(process),
        Err(error) => {
            skip(&format!("no redis-server: {error}"));
            None
        }
    }
}
