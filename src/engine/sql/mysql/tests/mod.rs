//! The contract on MariaDB or MySQL, and the tests of the engine's own behavior.

mod faults;
mod hand_off;
mod load;

mod single;
mod tables;

use std::sync::Arc;
use std::time::Duration;

use sqlx::mysql::{MySqlConnection, MySqlRow};
use sqlx::{AssertSqlSafe, Connection, Executor, Row as _};
use tokio::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::*;
use crate::engine::contract::PAGE;
use crate::engine::sql::mysql::packet::Packet;
use crate::engine::sql::server::tests::*;
use crate::engine::{Acquired, Engine, Released, Renewed, Settings, SharedEngine};
use crate::model::{Claim, OwnerToken};

const SERVER: &str = "HOLDFAST_TEST_MYSQL_URL";

async fn open(url: &str, settings: &Settings) -> Arc<ServerEngine> {
    let config = MysqlConfig::parse(url, settings).unwrap();
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

/// Each database has it for reading. A test that changes settings of the server has it for writing.
static SERVER_SETTINGS: RwLock<()> = RwLock::const_new(());

/// A database of one test. Dropping it leaves it to the server, which ends with the tests.
pub(super) struct Database {
    name: String,
    /// The user of the engines: of this test only, so that its connections are known.
    user: String,
    url: String,
    /// A connection of another program.
    client: MySqlConnection,
    settings: Option<RwLockReadGuard<'static, ()>>,
}

impl Database {
    /// Creates a database. `None`: there is no server.
    pub(super) async fn create() -> Option<Self> {
        let url = url_of(SERVER)?;
        let settings = Some(SERVER_SETTINGS.read().await);
        let name = format!("t{}", OwnerToken::fresh().as_str());
        let user = name[..24].to_owned();
        let mut client = connect(&url).await;
        for text in [
            format!("CREATE DATABASE {name}"),
            format!("CREATE USER {user}"),
            format!("GRANT ALL ON {name}.* TO {user}"),
            format!("USE {name}"),
        ] {
            client.execute(AssertSqlSafe(text)).await.unwrap();
        }
        let (server, _) = url.rsplit_once('/').unwrap();
        let (scheme, host) = server.split_once("://").unwrap();
        let host = host.rsplit_once('@').map_or(host, |(_, host)| host);
        let url = format!("{scheme}://{user}@{host}/{name}");
        Some(Database {
            name,
            user,
            url,
            client,
            settings,
        })
    }

    /// Waits until no other test has a database. Until the answer is dropped, no other one gets one.
    async fn alone(&mut self) -> RwLockWriteGuard<'static, ()> {
        self.settings = None;
        SERVER_SETTINGS.write().await
    }

    async fn engine_with(&self, settings: Settings) -> Arc<ServerEngine> {
        open(&self.url, &settings).await
    }

    /// Returns the number of connections of the engines that satisfy a condition.
    pub(super) async fn connected(&mut self, condition: &str) -> i64 {
        let user = &self.user;
        let text = format!("SELECT COUNT(*) FROM information_schema.processlist WHERE user = '{user}' AND {condition}");
        self.number(&text).await
    }

    /// Ends the connections of the engines. Returns how many.
    async fn terminate(&mut self) -> usize {
        let ids = self.connections().await;
        for id in &ids {
            self.end(*id).await;
        }
        ids.len()
    }
}

impl TestDatabase for Database {
    fn url(&self) -> &str {
        &self.url
    }

    async fn open_with(&self, url: &str, settings: &Settings) -> Arc<ServerEngine> {
        open(url, settings).await
    }

    const LOGIN_PACKETS: usize = 1;

    const POLLING: &str = "";

    async fn execute(&mut self, text: &str) {
        self.client.execute(sqlx::raw_sql(AssertSqlSafe(text))).await.unwrap();
    }

    async fn number(&mut self, text: &str) -> i64 {
        let row = self.client.fetch_one(sqlx::raw_sql(AssertSqlSafe(text))).await.unwrap();
        number_of(&row)
    }

    /// Also counts those that are executed.
    async fn blocked(&mut self) -> i64 {
        self.connected("command IN ('Query', 'Execute')").await
    }

    async fn connections(&mut self) -> Vec<i64> {
        let user = &self.user;
        let text = format!("SELECT id FROM information_schema.processlist WHERE user = '{user}'");
        let rows = self.client.fetch_all(sqlx::raw_sql(AssertSqlSafe(text))).await.unwrap();
        rows.iter().map(number_of).collect()
    }

    async fn end(&mut self, connection: i64) {
        let text = AssertSqlSafe(format!("KILL {connection}"));
        // It may have ended.
        let _ = self.client.execute(text).await;
    }

    fn ago(seconds: u64) -> String {
        let us = seconds * 1_000_000;
        format!("TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) - {us}")
    }

    fn after(ms: u64) -> String {
        format!("TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) + {ms}000")
    }
}

server_tests!(Database);

fn number_of(row: &MySqlRow) -> i64 {
    let bytes: Vec<u8> = row.try_get_unchecked(0).unwrap();
    String::from_utf8(bytes).unwrap().parse().unwrap()
}

/// Connects as another program.
pub(super) async fn connect(url: &str) -> MySqlConnection {
    MySqlConnection::connect(&format!("{url}?ssl-mode=DISABLED"))
        .await
        .unwrap()
}
