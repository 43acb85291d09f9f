//! The connections to the server.

use std::collections::HashMap;
use std::sync::Arc;

use futures_util::stream::BoxStream;
use futures_util::{FutureExt, TryStreamExt};
use sqlx::mysql::{MySqlArguments, MySqlConnection, MySqlQueryResult, MySqlRow, MySqlSslMode};
use sqlx::{AssertSqlSafe, ConnectOptions, Either, Executor as _, SqlSafeStr as _};
use tokio::time::{Instant, timeout};

use super::NAME;
use super::config::{MysqlConfig, Tls};
use super::error::{READ_ONLY, cannot_prepare, has_no_tls, is_tls, kind_of, refuses_to_prepare};
use super::packet::{Answer, Packet, Row, rows};
use super::tables::Tables;
use crate::engine::core::ledger::StoredName;
use crate::engine::sql::failure::{Failure, Kind};
use crate::engine::sql::server::connection::{Connection, Connections};
use crate::engine::sql::server::products::OF_MYSQL;
use crate::engine::sql::server::{LOCK_WAIT, Outcome};

/// What every connection of an engine needs.
pub(in crate::engine) struct MysqlServer {
    pub(super) config: MysqlConfig,
    pub(super) tables: Tables,
    pub(super) connections: Arc<Connections>,
}

/// The server of a connection, as an expression.
const SERVER: &str = "CONCAT_WS('/', @@GLOBAL.hostname, @@GLOBAL.port, @@GLOBAL.server_id)";

/// A connection as the server knows it.
struct Thread {
    id: i64,
    server: String,
    /// Since when it is open, at the latest.
    since: Instant,
}

/// An open connection. Dropping it closes it.
pub(in crate::engine::sql) struct MysqlSession {
    pub(super) server: Arc<MysqlServer>,
    pub(super) connection: Arc<Connection>,
    pub(super) client: MySqlConnection,
    pub(super) has_tls: bool,
    /// Whether transactions read committed rows. The servers that log statements instead of rows refuse that.
    pub(super) reads_committed: bool,
    /// How long the server waits for a statement outside of transactions, in seconds.
    pub(super) wait_timeout_s: i64,
    /// The size in bytes from which on the server refuses a packet and closes the connection.
    packet_limit: usize,
    /// Whether the server executes prepared statements on this connection.
    pub(super) prepares: bool,
    /// Whether the server is MariaDB, where an `INSERT` returns rows, and a statement can have its own settings.
    pub(super) is_mariadb: bool,
    /// The texts of the prepared statements.
    prepared: HashMap<Statement, Arc<str>>,
    /// Whether the server accepted writes when the connection was opened.
    pub(super) was_writable: bool,
    pub(super) used_at: Instant,
    /// What the current transaction has read.
    pub(super) begun: Begun,
}

/// The key of a prepared statement: its kind and its number of calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Statement {
    Attempt(usize),
    AttemptOne,
    Release(usize),
}

/// What the end of a transaction needs from its beginning.
#[derive(Default)]
pub(super) struct Begun {
    /// The tickets of positions, by owner.
    pub tickets: HashMap<String, i64>,
    /// Names with positions that have expired.
    pub with_expired: Vec<StoredName>,
}

impl MysqlServer {
    pub(super) fn new(config: MysqlConfig) -> Arc<Self> {
        Arc::new(MysqlServer {
            tables: Tables::new(&config.table, &config.database),
            connections: Connections::new(NAME, &config.server, &config.settings),
            config,
        })
    }

    pub(super) fn failure(&self, cause: sqlx::Error) -> Failure {
        Failure::of_driver(&self.connections.place, kind_of(&cause), cause)
    }

    /// Opens a connection of the driver. Returns it, and whether it has TLS.
    async fn dial(&self) -> Outcome<(MySqlConnection, bool)> {
        let options = self.config.driver_options_with_tls().map_err(|wrong| {
            let message = format!("a TLS file cannot be used: {}: {}", wrong.setting, wrong.how);
            Failure::new(&self.connections.place, self.connections.kind_of_tls(), message)
        })?;
        let mode = match self.config.tls_mode {
            Tls::Disabled => MySqlSslMode::Disabled,
            Tls::Unverified => MySqlSslMode::Required,
            Tls::Authority => MySqlSslMode::VerifyCa,
            Tls::Full | Tls::Preferred => MySqlSslMode::VerifyIdentity,
        };
        // The driver's own mode for this verifies nothing.
        let (connected, has_tls) = match options.clone().ssl_mode(mode).connect().await {
            Err(error) if self.config.tls_mode == Tls::Preferred && has_no_tls(&error) => {
                (options.ssl_mode(MySqlSslMode::Disabled).connect().await, false)
            }
            connected => (connected, self.config.tls_mode != Tls::Disabled),
        };
        let client = connected.map_err(|error| match is_tls(&error) {
            true => self.failure(error).with_kind(self.connections.kind_of_tls()),
            false => self.failure(error),
        })?;
        Ok((client, has_tls))
    }

    /// Cancels the current statement of a connection (`KILL QUERY`). After a restart, or on another server behind the same address, the id
    /// may belong to another connection: then nothing is cancelled.
    async fn kill_statement(&self, Thread { id, server, since }: &Thread) -> Outcome<()> {
        let (mut client, _) = self.dial().await?;
        let (mut find, mut kill, mut answers) = (Packet::default(), Packet::default(), Vec::new());
        let found = find.add(format_args!("SELECT {SERVER}"));
        let uptime = find.add("SHOW GLOBAL STATUS LIKE 'Uptime'");
        let failed = |error| self.failure(error);
        execute(&mut client, find, &mut answers).await.map_err(failed)?;
        let found = rows(&answers, found).first().and_then(|row| row.text(0));
        let uptime_s = rows(&answers, uptime).first().and_then(|row| row.number(1));
        let was_running = uptime_s.is_some_and(|uptime| uptime.unsigned_abs() >= since.elapsed().as_secs());
        if found.as_ref() == Some(server) && was_running {
            kill.add(format_args!("KILL QUERY {id}"));
            execute(&mut client, kill, &mut answers).await.map_err(failed)?;
        }
        Ok(())
    }
}

impl MysqlSession {
    /// Opens a connection, with the settings that the statements need.
    pub(super) async fn open(server: &Arc<MysqlServer>) -> Outcome<Self> {
        let epoch = server.connections.epoch();
        let (mut client, has_tls) = server.dial().await?;
        let lock_wait_s = LOCK_WAIT.as_secs();
        // A cancellation ends a wait for a locked table. This limit ends it if the cancellation is lost.
        let table_lock_wait_s = server.connections.store_timeout.as_secs() + 2;
        let mut packet = Packet::default();
        packet.add("SET NAMES utf8mb4");
        packet.add(format_args!(
            "SET SESSION autocommit = 1, sql_mode = 'STRICT_TRANS_TABLES,NO_ENGINE_SUBSTITUTION', \
             innodb_lock_wait_timeout = {lock_wait_s}, lock_wait_timeout = {table_lock_wait_s}, \
             sql_select_limit = 18446744073709551615, sql_safe_updates = 0, sql_big_selects = 1, completion_type = 'NO_CHAIN'"
        ));
        let ids = packet.add(format_args!(
            "SELECT CONNECTION_ID(), @@SESSION.wait_timeout, @@GLOBAL.read_only, {SERVER}, VERSION(), @@SESSION.max_allowed_packet"
        ));
        let since = Instant::now();
        let log = packet.add("SHOW VARIABLES LIKE 'binlog_format'");
        let mut answers = Vec::new();
        let executed = execute(&mut client, packet, &mut answers).await;
        if let Err(error) = executed {
            let mut other = None;
            // Other products lack settings of MySQL.
            if matches!(error, sqlx::Error::Database(_)) {
                let (mut packet, mut answers) = (Packet::default(), Vec::new());
                let version = packet.add("SELECT VERSION()");
                let _ = execute(&mut client, packet, &mut answers).await;
                let version = rows(&answers, version).first().and_then(|row| row.text(0));
                other = version.and_then(|version| OF_MYSQL.failure(&server.connections, &version));
            }
            return Err(other.unwrap_or_else(|| server.failure(error)));
        }
        let ids = rows(&answers, ids).first();
        let version = ids.and_then(|row| row.text(4)).unwrap_or_default();
        if let Some(failure) = OF_MYSQL.failure(&server.connections, &version) {
            return Err(failure);
        }
        let id = ids.and_then(|row| row.number(0));
        let id = id.ok_or_else(|| Failure::unexpected(&server.connections.place, "no connection id"))?;
        let packet_limit = ids.and_then(|row| row.number(5));
        let is_statement = |row: &Row| {
            row.text(1)
                .is_some_and(|format| format.eq_ignore_ascii_case("STATEMENT"))
        };
        let thread = Arc::new(Thread {
            id,
            server: ids.and_then(|row| row.text(3)).unwrap_or_default(),
            since,
        });
        let (killing, limit) = (server.clone(), server.connections.store_timeout);
        let cancel = move || {
            let (server, thread) = (killing.clone(), thread.clone());
            tokio::spawn(async move { timeout(limit, server.kill_statement(&thread)).await.is_ok() }.boxed())
        };
        Ok(MysqlSession {
            server: server.clone(),
            connection: Connection::new(server.connections.clone(), epoch, cancel),
            client,
            has_tls,
            reads_committed: !rows(&answers, log).iter().any(is_statement),
            packet_limit: packet_limit.map_or(usize::MAX, |bytes| bytes as usize),
            prepares: true,
            prepared: HashMap::new(),
            is_mariadb: version.contains("MariaDB"),
            was_writable: ids.is_some_and(|row| is_writable(row, 2)),
            wait_timeout_s: ids.and_then(|row| row.number(1)).unwrap_or(28_800),
            used_at: Instant::now(),
            begun: Begun::default(),
        })
    }

    /// Executes the statements of a packet. Adds their answers to `answers`, also those before a statement that failed.
    pub(super) async fn run(&mut self, packet: Packet, answers: &mut Vec<Answer>) -> Outcome<()> {
        let (bytes, most) = (packet.text.len(), self.packet_limit);
        if bytes >= most {
            let message = format!(
                "the statement has {bytes} bytes, and max_allowed_packet of the server is {most}: acquire fewer names at once, or raise it"
            );
            return Err(Failure::new(&self.server.connections.place, Kind::Permanent, message));
        }
        let executed = execute(&mut self.client, packet, answers).await;
        self.used_at = Instant::now();
        executed.map_err(|error| self.server.failure(error))
    }

    /// Executes the statements of a packet as [`MysqlSession::run`] does, within the store timeout.
    pub(super) async fn run_within_limit(&mut self, packet: Packet, answers: &mut Vec<Answer>) -> Outcome<()> {
        let connection = self.connection.clone();
        connection.within_limit(self.run(packet, answers)).await
    }

    /// Executes a prepared statement within the store timeout. The first call of a connection prepares `text()`.
    /// `None`: the server cannot prepare it. Nothing was executed, and this connection prepares no further statements.
    pub(super) async fn run_prepared(
        &mut self,
        statement: Statement,
        text: impl FnOnce(&Tables) -> String,
        arguments: MySqlArguments,
    ) -> Outcome<Option<Answer>> {
        let connection = self.connection.clone();
        let text = match self.prepared.get(&statement) {
            Some(text) => text.clone(),
            None => {
                let text: Arc<str> = text(&self.server.tables).into();
                // Has its own limit. With a shared one, a slow connection would count as silent.
                let prepared = connection.within_limit(self.prepare(text.clone()));
                if !prepared.await.map_err(Failure::not_sent)? {
                    return Ok(None);
                }
                self.prepared.insert(statement, text.clone());
                text
            }
        };
        let executing = async {
            let mut answers = Vec::new();
            let results = self.client.fetch_many(sqlx::query_with(AssertSqlSafe(text), arguments));
            let executed = receive(results, &mut answers).await;
            let is_executed = self.unless_refused(executed, cannot_prepare)?;
            Ok(answers.pop().filter(|_| is_executed))
        };
        connection.within_limit(executing).await
    }

    /// Prepares a statement. `false`: the server refused to prepare it. It is then sent as text, and that reply has the error, if there is one.
    async fn prepare(&mut self, text: Arc<str>) -> Outcome<bool> {
        let prepared = self.client.prepare(AssertSqlSafe(text).into_sql_str()).await;
        self.unless_refused(prepared.map(|_| ()), refuses_to_prepare)
    }

    /// Evaluates the outcome of a preparation, or of a prepared statement. `false`: the server refuses prepared statements.
    fn unless_refused(&mut self, outcome: sqlx::Result<()>, is_refusal: fn(&sqlx::Error) -> bool) -> Outcome<bool> {
        self.used_at = Instant::now();
        match outcome {
            Err(error) if is_refusal(&error) => {
                self.prepares = false;
                Ok(false)
            }
            outcome => outcome.map(|()| true).map_err(|error| self.server.failure(error)),
        }
    }

    /// Checks the answer to `SELECT @@GLOBAL.read_only`. A server that became read-only may be a former primary, whose rows are old.
    pub(super) fn check_writable(&self, answers: &[Answer], index: usize) -> Outcome<()> {
        let is_writable = rows(answers, index).iter().all(|row| is_writable(row, 0));
        if is_writable || !self.was_writable {
            return Ok(());
        }
        let message = format!("the server has become read-only ({READ_ONLY})");
        Err(Failure::new(&self.server.connections.place, Kind::Broken, message))
    }

    /// Returns the failure of an answer that lacks a value.
    pub(super) fn unexpected(&self) -> Failure {
        Failure::unexpected(&self.server.connections.place, "a row without a value")
    }
}

/// Whether a server whose `read_only` is in this column accepts writes.
fn is_writable(row: &Row, column: usize) -> bool {
    matches!(row.bytes(column), Some(b"0" | b"OFF"))
}

async fn execute(client: &mut MySqlConnection, packet: Packet, answers: &mut Vec<Answer>) -> sqlx::Result<()> {
    receive(sqlx::raw_sql(AssertSqlSafe(packet.text)).fetch_many(client), answers).await
}

/// Receives the answers of statements.
async fn receive(
    mut results: BoxStream<'_, sqlx::Result<Either<MySqlQueryResult, MySqlRow>>>,
    answers: &mut Vec<Answer>,
) -> sqlx::Result<()> {
    let mut rows = Vec::new();
    while let Some(result) = results.try_next().await? {
        match result {
            Either::Right(row) => rows.push(Row(row)),
            Either::Left(done) => answers.push(Answer {
                rows: std::mem::take(&mut rows),
                affected: done.rows_affected(),
                insert_id: done.last_insert_id(),
            }),
        }
    }
    Ok(())
}

#[cfg(test)]
#[path = "tests/session.rs"]
mod tests;
