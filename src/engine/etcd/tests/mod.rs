//! The contract on a real server, and the tests of etcd's own behavior.

mod client;
mod leases;
mod watches;

use std::sync::Arc;

use super::store::Etcd;
use super::{EntryEngine, EtcdConfig};
use crate::engine::{Settings, SharedEngine};

const URL: &str = "HOLDFAST_TEST_ETCD_URL";

crate::engine::contract::contract_tests!(async |prefix: String| {
    let url = url()?;
    let a: SharedEngine = Arc::new(opened(&url, &prefix).await.engine);
    let b: SharedEngine = Arc::new(opened(&url, &prefix).await.engine);
    Some((a, b))
}; except a_slow_waiter_keeps_its_position, a_set_keeps_its_number);

/// Returns the URL of the tests' server.
fn url() -> Option<String> {
    let url = std::env::var(URL).ok();
    if url.is_none() {
        assert!(std::env::var_os("CI").is_none(), "{URL} is not set");
        eprintln!("skipped: {URL} is not set");
    }
    url
}

/// An engine, and its store.
struct Opened {
    engine: EntryEngine,
    store: Arc<Etcd>,
}

impl std::ops::Deref for Opened {
    type Target = EntryEngine;
    fn deref(&self) -> &EntryEngine {
        &self.engine
    }
}

async fn opened(url: &str, prefix: &str) -> Opened {
    let settings = Settings {
        key_prefix: Some(prefix.to_owned()),
        ..Settings::default()
    };
    let config = EtcdConfig::parse(url, &settings).unwrap();
    let (store, engine) = super::open(config).await.unwrap();
    Opened { engine, store }
}
