//! The contract on PostgreSQL.

use std::sync::Arc;

use super::*;
use crate::engine::{Settings, SharedEngine};

/// Returns the URL of the server. `None`: there is none; the test is skipped, or fails if `CI` is set.
fn server_url() -> Option<String> {
    let url = std::env::var("HOLDFAST_TEST_POSTGRES_URL").ok();
    if url.is_none() {
        assert!(
            std::env::var_os("CI").is_none(),
            "HOLDFAST_TEST_POSTGRES_URL is not set"
        );
        eprintln!("skipped: HOLDFAST_TEST_POSTGRES_URL is not set");
    }
    url
}

async fn open(url: &str, settings: &Settings) -> SharedEngine {
    let config = PostgresConfig::parse(url, settings).unwrap();
    let engine: Arc<PostgresEngine> = PostgresEngine::connect(config).await.unwrap();
    engine
}

crate::engine::contract::contract_tests!(async |prefix: String| {
    let url = server_url()?;
    let settings = Settings {
        key_prefix: Some(prefix),
        ..Settings::default()
    };
    Some((open(&url, &settings).await, open(&url, &settings).await))
});
