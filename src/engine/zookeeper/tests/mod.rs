//! The contract on a real server, and the tests of ZooKeeper's own behavior.

mod proxy;
mod sessions;
mod waiters;

use std::sync::Arc;
use std::time::Duration;

use super::client::{Client, Kind, Login, Request};
use super::*;
use crate::engine::contract::PAGE;
use crate::engine::entries::target::{Server, Target};
use crate::engine::{Settings, SharedEngine};
use crate::model::{Fence, OwnerToken, Process};

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

async fn open(url: &str, prefix: &str) -> Arc<ZookeeperEngine> {
    let settings = Settings {
        key_prefix: Some(prefix.to_owned()),
        ..Settings::default()
    };
    open_with(url, &settings).await
}

async fn open_with(url: &str, settings: &Settings) -> Arc<ZookeeperEngine> {
    ZookeeperEngine::connect(ZookeeperConfig::parse(url, settings).unwrap())
        .await
        .unwrap()
}

crate::engine::contract::contract_tests!(async |prefix: String| {
    let url = url()?;
    let a: SharedEngine = open(&url, &prefix).await;
    let b: SharedEngine = open(&url, &prefix).await;
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

async fn acquire(engine: &ZookeeperEngine, claim: &Claim) -> Fence {
    match engine.try_acquire(claim).await.unwrap() {
        Acquired::Granted { fence } => fence,
        held => panic!("expected a grant of {:?}, got {held:?}", claim.keys()),
    }
}

async fn busy(engine: &ZookeeperEngine, claim: &Claim) -> Option<Duration> {
    match engine.try_acquire(claim).await.unwrap() {
        Acquired::Held { retry_after, .. } => retry_after,
        granted => panic!("expected busy for {:?}, got {granted:?}", claim.keys()),
    }
}

async fn woken(subscription: &mut Box<dyn Subscription>) {
    let woken = tokio::time::timeout(Duration::from_secs(10), subscription.changed()).await;
    woken.expect("no wake-up within 10 s");
}

/// A client of another program at the same servers.
async fn other_client(url: &str) -> Client {
    let Target { servers, .. } = Target::parse(url.split_once("://").unwrap().1, 2181).unwrap();
    client_of(servers, None).await
}

async fn client_of(servers: Vec<Server>, digest: Option<&str>) -> Client {
    let login = Login {
        tls: None,
        digest: digest.map(Into::into),
        session_timeout: Duration::from_secs(10),
    };
    Client::connect(servers, login).await.unwrap()
}
