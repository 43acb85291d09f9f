//! The contract on a real server, and the tests of ZooKeeper's own behavior.

mod kept;
mod proxy;
mod sessions;
mod waiters;

use std::sync::Arc;
use std::time::Duration;

use super::client::{self, Client, Kind, Request};
use super::layout;
use super::*;
use crate::clock::Moment;
use crate::engine::contract::PAGE;
use crate::engine::entries::servers::Servers;
use crate::engine::{Acquired, Engine, EngineExt, Released, Renewed, Settings, SharedEngine, Subscription};
use crate::model::{Claim, Fence, Key, OwnerToken, Process, Share, Ttl};

const SERVER: &str = "HOLDFAST_TEST_ZOOKEEPER_URL";
const LONG: Duration = Duration::from_secs(30);

/// Returns the URL of the test server. `None`: there is none.
fn url() -> Option<String> {
    let url = std::env::var(SERVER).ok().filter(|url| !url.is_empty());
    if url.is_none() {
        assert!(std::env::var_os("CI").is_none(), "{SERVER} is not set");
        println!("skipped: {SERVER} is not set");
    }
    url
}

/// An engine, and its store.
struct Opened {
    engine: EntryEngine,
    store: Arc<Zookeeper>,
}

impl std::ops::Deref for Opened {
    type Target = EntryEngine;
    fn deref(&self) -> &EntryEngine {
        &self.engine
    }
}

async fn open(url: &str, prefix: &str) -> Opened {
    let settings = Settings {
        key_prefix: Some(prefix.to_owned()),
        ..Settings::default()
    };
    open_with(url, &settings).await
}

async fn open_with(url: &str, settings: &Settings) -> Opened {
    let config = ZookeeperConfig::parse(url, settings).unwrap();
    let (store, engine) = super::open(config).await.unwrap();
    Opened { engine, store }
}

crate::engine::contract::contract_tests!(async |prefix: String| {
    let url = url()?;
    let a: SharedEngine = Arc::new(open(&url, &prefix).await.engine);
    let b: SharedEngine = Arc::new(open(&url, &prefix).await.engine);
    Some((a, b))
}; except a_slow_waiter_keeps_its_position, a_set_keeps_its_number);

/// Returns a prefix of one test.
fn prefix() -> String {
    format!("t{}:", OwnerToken::fresh().as_str())
}

fn key(name: &str) -> Key {
    Key::new(name).unwrap()
}

fn claim(names: &[&str], ttl: Duration) -> Claim {
    let keys: Vec<Key> = names.iter().map(|name| key(name)).collect();
    Claim::new(
        &keys,
        OwnerToken::fresh(),
        Ttl::new(ttl).unwrap(),
        Arc::new(Process::current()),
    )
}

fn waiting(names: &[&str], ttl: Duration) -> Claim {
    let mut claim = claim(names, ttl);
    claim.waiting = true;
    claim
}

async fn acquire(engine: &EntryEngine, claim: &Claim) -> Fence {
    match engine.try_acquire(claim).await.unwrap() {
        Acquired::Granted { fence } => fence,
        held => panic!("expected a grant of {:?}, got {held:?}", claim.keys()),
    }
}

async fn busy(engine: &EntryEngine, claim: &Claim) -> Option<Duration> {
    match engine.try_acquire(claim).await.unwrap() {
        Acquired::Held { retry_after, .. } => retry_after,
        granted => panic!("expected busy for {:?}, got {granted:?}", claim.keys()),
    }
}

async fn woken(subscription: &mut Box<dyn Subscription>) {
    let woken = tokio::time::timeout(Duration::from_secs(10), subscription.changed()).await;
    woken.expect("no wake-up within 10 s");
}

/// Waits for a hand-off. A lost connection wakes waiters, too.
async fn handed_off(subscription: &mut Box<dyn Subscription>) {
    while subscription.take_hand_off().is_none() {
        woken(subscription).await;
    }
}

/// A client of another program at the same servers.
async fn other_client(url: &str) -> Client {
    let timeout = Duration::from_secs(10);
    Client::connect(servers(url), timeout).await.ok().unwrap()
}

fn servers(url: &str) -> Servers {
    Servers::parse(url, &Settings::default(), &config::RULE).unwrap().0
}
