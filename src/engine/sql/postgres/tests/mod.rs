//! The contract on PostgreSQL, and the tests of its own behavior.

mod connections;
mod faults;
mod hand_off;
mod pooler;
mod tables;

use std::sync::Arc;
use std::time::Duration;

use tokio_postgres::{Client, NoTls};

use super::*;
use crate::engine::contract::PAGE;
use crate::engine::sql::server::tests::*;
use crate::engine::{Acquired, Engine, Released, Renewed, Settings, SharedEngine};
use crate::model::{Claim, OwnerToken};

const SERVER: &str = "HOLDFAST_TEST_POSTGRES_URL";

async fn open(url: &str, settings: &Settings) -> Arc<ServerEngine> {
    let config = PostgresConfig::parse(url, settings).unwrap();
    super::connect(config).await.unwrap()
}

/// Opens two engines with a prefix.
async fn two(url: &str, prefix: String) -> (SharedEngine, SharedEngine) {
    let settings = Settings {
        key_prefix: Some(prefix),
        ..Settings::default()
    };
    (open(url, &settings).await, open(url, &settings).await)
}

crate::engine::contract::contract_tests!(async |prefix: String| Some(two(&url_of(SERVER)?, prefix).await));

/// A database of one test. Dropping it leaves it to the server, which ends with the tests.
struct Database {
    name: String,
    url: String,
    /// A connection of another program.
    client: Client,
}

impl Database {
    /// Creates a database. `None`: there is no server.
    async fn create() -> Option<Self> {
        let url = url_of(SERVER)?;
        let name = format!("t{}", OwnerToken::fresh().as_str());
        connect(&url)
            .await
            .batch_execute(&format!("CREATE DATABASE {name}"))
            .await
            .unwrap();
        let (server, _) = url.rsplit_once('/').unwrap();
        let url = format!("{server}/{name}");
        let client = connect(&url).await;
        Some(Database { name, url, client })
    }

    async fn engine(&self) -> Arc<ServerEngine> {
        open(&self.url, &Settings::default()).await
    }

    async fn engine_with(&self, settings: Settings) -> Arc<ServerEngine> {
        open(&self.url, &settings).await
    }

    async fn execute(&self, text: &str) {
        self.client.batch_execute(text).await.unwrap();
    }

    async fn number(&self, text: &str) -> i64 {
        self.client.query_one(text, &[]).await.unwrap().get(0)
    }

    /// Ends the connections of the engines.
    async fn terminate(&self) -> i64 {
        let text = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity \
                    WHERE datname = current_database() AND application_name = 'holdfast'";
        self.number(text).await
    }
}

impl TestDatabase for Database {
    fn url(&self) -> &str {
        &self.url
    }

    async fn open_with(&self, url: &str, settings: &Settings) -> Arc<ServerEngine> {
        open(url, settings).await
    }

    // A question for TLS, and the login.
    const LOGIN_PACKETS: usize = 2;

    const POLLING: &str = "?pooler=transaction";

    async fn execute(&mut self, text: &str) {
        Database::execute(self, text).await;
    }

    async fn number(&mut self, text: &str) -> i64 {
        Database::number(self, text).await
    }

    async fn blocked(&mut self) -> i64 {
        // A transaction would read the same activity again.
        let text = "SELECT count(*) FROM (SELECT pg_stat_clear_snapshot() OFFSET 0) AS new CROSS JOIN pg_stat_activity \
                    WHERE datname = current_database() AND wait_event_type = 'Lock'";
        Database::number(self, text).await
    }

    async fn connections(&mut self) -> Vec<i64> {
        let text = "SELECT pid::bigint FROM pg_stat_activity \
                    WHERE datname = current_database() AND application_name = 'holdfast'";
        let rows = self.client.query(text, &[]).await.unwrap();
        rows.iter().map(|row| row.get(0)).collect()
    }

    async fn end(&mut self, connection: i64) {
        let text = format!("SELECT pg_terminate_backend({connection})");
        Database::execute(self, &text).await;
    }

    fn ago(seconds: u64) -> String {
        format!("clock_timestamp() - interval '{seconds} seconds'")
    }

    fn after(ms: u64) -> String {
        format!("clock_timestamp() + interval '{ms} milliseconds'")
    }
}

server_tests!(Database);

/// Connects as another program, with the settings of the server.
async fn connect_plainly(url: &str) -> Client {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}

/// Connects as another program, which finds the tables without their schema.
async fn connect(url: &str) -> Client {
    let client = connect_plainly(url).await;
    client
        .batch_execute("SET search_path = holdfast, public")
        .await
        .unwrap();
    client
}
