//! The contract, and tests of what only this store has.

use std::path::Path;
use std::time::{Duration, Instant};

use sqlx::sqlite::{SqliteConnectOptions, SqliteConnection};
use sqlx::{ConnectOptions, Connection, Executor, Row};
use tempfile::TempDir;

use super::*;
use crate::engine::contract::PAGE;
use crate::engine::{Acquired, Engine, EngineExt, Released, Renewed, Settings, SharedEngine};
use crate::model::{Claim, Key, OwnerToken, Process, Ttl};

mod bursts;
mod files;
mod processes;
mod queue;
mod store;

fn folder() -> TempDir {
    tempfile::Builder::new().prefix("holdfast-sqlite-").tempdir().unwrap()
}

crate::engine::contract::contract_tests!(async |_prefix: String| {
    let folder = folder();
    let engines = (
        open(folder.path()).await as SharedEngine,
        open(folder.path()).await as SharedEngine,
    );
    // The folder lives as long as the test's runtime.
    tokio::spawn(async move {
        let _folder = folder;
        std::future::pending::<()>().await
    });
    Some(engines)
});

fn config(folder: &Path, settings: &Settings) -> SqliteConfig {
    SqliteConfig::parse(&format!("sqlite:{}/deep/locks.sqlite", folder.display()), settings).unwrap()
}

async fn open(folder: &Path) -> Arc<SqliteEngine> {
    SqliteEngine::connect(config(folder, &Settings::default()))
        .await
        .unwrap()
}

/// Waits until the writer has begun the transaction of an attempt.
async fn sent(claim: &Claim) {
    let sent = async {
        while !claim.was_sent() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), sent)
        .await
        .expect("the writer has not begun");
}

/// Opens a plain connection to the file, as another program would.
async fn raw(folder: &Path) -> SqliteConnection {
    SqliteConnectOptions::new()
        .filename(folder.join("deep/locks.sqlite"))
        .connect()
        .await
        .unwrap()
}

async fn count(connection: &mut SqliteConnection, table: &'static str) -> i64 {
    let sql = format!("SELECT count(*) FROM {table}");
    connection
        .fetch_one(sqlx::raw_sql(sqlx::AssertSqlSafe(sql)))
        .await
        .unwrap()
        .get(0)
}

fn key(name: &str) -> Key {
    Key::new(name).unwrap()
}

fn claim(names: &[&str], ttl_ms: u64) -> Claim {
    let keys: Vec<Key> = names.iter().map(|name| key(name)).collect();
    let ttl = Ttl::new(Duration::from_millis(ttl_ms)).unwrap();
    Claim::new(&keys, OwnerToken::fresh(), ttl, Arc::new(Process::current()))
}

fn waiting(names: &[&str], ttl_ms: u64) -> Claim {
    let mut claim = claim(names, ttl_ms);
    claim.waiting = true;
    claim
}

async fn granted(engine: &SqliteEngine, claim: &Claim) -> bool {
    matches!(engine.try_acquire(claim).await.unwrap(), Acquired::Granted { .. })
}
