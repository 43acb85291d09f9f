//! The connections to the server.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::Context;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::join_all;
use parking_lot::Mutex;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_postgres::types::{FromSql, ToSql, Type};
use tokio_postgres::{AsyncMessage, Client, Row, Statement};
use tokio_postgres_rustls::MakeRustlsConnect;

use super::config::PostgresConfig;
use super::dial::{self, Connected, DIRECT};
use super::error::kind_of;
use super::statements::{Sql, Statements};
use super::{NAME, checks};
use crate::engine::core::stream::Replies;
use crate::engine::sql::failure::{Failure, Kind};
use crate::engine::sql::server::Outcome;
use crate::engine::sql::server::connection::{Connection, Connections};
use crate::engine::tls::client_config;
use crate::event_loop::Task;

/// How long a connection in use keeps its plans.
pub(super) const PLAN_AGE: Duration = Duration::from_secs(10);

/// What every connection of an engine needs.
pub(in crate::engine) struct PostgresServer {
    pub(super) config: PostgresConfig,
    pub(super) statements: Statements,
    pub(super) connections: Arc<Connections>,
    /// Whether a pooler is between this process and the server: then no statement is prepared.
    is_pooled: AtomicBool,
    /// Whether the last connection to `listenUrl` did not receive its test notification. Then waiters poll.
    pub(super) receives_nothing: AtomicBool,
    /// Whether the tables were found.
    is_set_up: AtomicBool,
}

/// An open connection. Dropping it closes it.
pub(in crate::engine::sql) struct PostgresSession {
    server: Arc<PostgresServer>,
    pub(super) client: Arc<Client>,
    pub(super) connection: Arc<Connection>,
    /// The statements that were prepared, and those that were executed without it, with their text.
    prepared: Arc<[OnceLock<Statement>]>,
    unprepared: Mutex<Vec<Sql>>,
    /// When the connection was opened, or last discarded its plans.
    planned_at: Instant,
    driver: Task,
    /// Whether the server ended its wait for a synchronous standby, and committed without it.
    has_unsafe_commit: Arc<AtomicBool>,
    /// Whether the options of the session were sent.
    has_options: bool,
    /// Whether the encoding of the database is UTF-8, which has every character.
    pub(super) is_utf8: bool,
    /// Locked while statements are handed to the connection, which then sends them in one packet.
    send_lock: Arc<Mutex<()>>,
    replies: Replies,
}

/// The values of a statement's parameters.
pub(super) type Values<'a> = [&'a (dyn ToSql + Sync)];

impl PostgresServer {
    pub(super) fn new(config: PostgresConfig) -> Arc<Self> {
        let connections = Connections::new(NAME, &config.server, &config.settings);
        Arc::new(PostgresServer {
            statements: Statements::new(&config.table, connections.lock_wait()),
            connections,
            is_pooled: AtomicBool::new(config.target.is_pooled == Some(true)),
            receives_nothing: AtomicBool::new(false),
            is_set_up: AtomicBool::new(false),
            config,
        })
    }

    /// Whether a pooler is between this process and the server.
    pub(super) fn is_pooled(&self) -> bool {
        self.is_pooled.load(Ordering::Relaxed)
    }

    /// Whether the server's notifications arrive. A pooler accepts LISTEN, and delivers nothing. One connection alone is for
    /// calls.
    pub(super) fn can_listen(&self) -> bool {
        match self.config.listen {
            _ if self.config.settings.max_connections == Some(1) => false,
            Some(_) => !self.receives_nothing.load(Ordering::Relaxed),
            None => !self.is_pooled(),
        }
    }

    pub(super) fn failure(&self, cause: tokio_postgres::Error) -> Failure {
        let of_error = kind_of(&cause);
        self.record(of_error.0);
        Failure::of_driver(&self.connections.place, of_error, cause)
    }

    /// Records what a failure says about the server.
    fn record(&self, kind: Kind) {
        match kind {
            Kind::Pooled => self.is_pooled.store(true, Ordering::Relaxed),
            Kind::NoTable => self.is_set_up.store(false, Ordering::Relaxed),
            _ => {}
        }
    }

    /// Opens a connection. With `notifications`, which receives the payloads of `NOTIFY`, it is one to listen on, without a pooler if the
    /// configuration has its address.
    pub(super) async fn connect_with(
        self: &Arc<Self>,
        notifications: Option<mpsc::UnboundedSender<String>>,
    ) -> Outcome<PostgresSession> {
        let target = match (&notifications, &self.config.listen) {
            (Some(_), Some(listen)) => listen,
            _ => &self.config.target,
        };
        let tls = client_config(&target.tls, target.verified).map_err(|error| {
            let message = format!("a TLS file cannot be used: {error}");
            Failure::new(&self.connections.place, self.connections.kind_of_tls(), message)
        })?;
        let tls = MakeRustlsConnect::new(tls);
        let epoch = self.connections.epoch();
        let has_options = target.is_pooled.is_none() && !self.is_pooled();
        let connected = dial::connect(&self.config, &self.connections, target, &tls, has_options).await;
        let Connected {
            client,
            mut driver,
            socket,
            canceller,
        } = connected.inspect_err(|failure| self.record(failure.kind()))?;
        let is_utf8 = driver.parameter("server_encoding") == Some("UTF8");
        let (receivers, replies) = (Replies::default(), Replies::default());
        receivers.set(usize::from(notifications.is_some()));
        if let Some(event_loop) = &self.connections.event_loop {
            let served = socket.serve_on(event_loop, &receivers, &replies);
            served.map_err(|error| {
                let message = format!("the socket cannot be passed to the event loop: {error}");
                Failure::of_driver(&self.connections.place, (Kind::Broken, message), error)
            })?;
        }
        let send_lock: Arc<Mutex<()>> = Arc::default();
        let driver_send_lock = send_lock.clone();
        let has_unsafe_commit: Arc<AtomicBool> = Arc::default();
        let is_unsafe = has_unsafe_commit.clone();
        let driving = async move {
            loop {
                let next = poll_fn(|context| {
                    let _sending = driver_send_lock.lock();
                    driver.poll_message(context)
                });
                match next.await {
                    Some(Ok(AsyncMessage::Notification(notification))) => {
                        if let Some(notifications) = &notifications {
                            let _ = notifications.send(notification.payload().to_owned());
                        }
                    }
                    // As after `pg_cancel_backend` by an operator.
                    Some(Ok(AsyncMessage::Notice(notice))) if notice.routine() == Some("SyncRepWaitForLSN") => {
                        is_unsafe.store(true, Ordering::Relaxed);
                    }
                    Some(Ok(_)) => {}
                    Some(Err(error)) => {
                        tracing::debug!(%error, "a connection broke");
                        break;
                    }
                    None => break,
                }
            }
        };
        let limit = self.connections.store_timeout;
        let cancel = move || tokio::spawn(FutureExt::boxed(canceller.clone().cancel(limit)));
        Ok(PostgresSession {
            server: self.clone(),
            client: Arc::new(client),
            connection: Connection::new(self.connections.clone(), epoch, cancel),
            prepared: self.statements.all().iter().map(|_| OnceLock::new()).collect(),
            unprepared: Mutex::default(),
            planned_at: Instant::now(),
            driver: self.connections.spawn(driving),
            has_unsafe_commit,
            has_options,
            is_utf8,
            send_lock,
            replies,
        })
    }
}

impl Drop for PostgresSession {
    fn drop(&mut self) {
        self.driver.cancel();
    }
}

impl PostgresSession {
    pub(super) fn connections(&self) -> &Connections {
        &self.server.connections
    }

    pub(super) fn statements(&self) -> &Statements {
        &self.server.statements
    }

    /// On the first connection, and on the first one after an error about a missing table: prepares all statements, and creates missing
    /// tables. Other connections send nothing before the first call, so that a replacement is ready quickly.
    pub(super) async fn set_up_once(&mut self) -> Outcome<()> {
        if self.server.is_set_up.load(Ordering::Relaxed) {
            return Ok(());
        }
        checks::check_server(self).await?;
        let ready = match self.prepare().await {
            Err(failure) if failure.kind() == Kind::NoTable => {
                checks::create_tables(self).await?;
                self.prepare().await
            }
            prepared => prepared,
        };
        let ready = match ready {
            Ok(()) => checks::check_privileges(self).await,
            failed => failed,
        };
        self.server.is_set_up.store(ready.is_ok(), Ordering::Relaxed);
        ready
    }

    /// Prepares all statements, which fails without the tables. Behind a pooler it only checks the tables.
    async fn prepare(&self) -> Outcome<()> {
        if self.has_options && self.setting(DIRECT).await?.is_empty() {
            let message = "a pooler ignores the options of a session".to_owned();
            self.server.record(Kind::Pooled);
            return Err(Failure::new(&self.server.connections.place, Kind::Pooled, message));
        }
        if self.server.is_pooled() {
            let (start, end): (&[u8], Option<&[u8]>) = (&[], None);
            let no_names: &[&[u8]] = &[];
            // A pooler in statement mode ends a transaction.
            let (begun, ended) = tokio::join!(biased; self.execute("BEGIN"), self.execute("COMMIT"));
            begun.and(ended)?;
            self.query(Sql::List, &[&start, &end, &0_i64]).await?;
            return self.query(Sql::Check, &[&no_names, &"", &0_i64]).await.map(drop);
        }
        let _pending = self.replies.expect();
        let all = self.server.statements.all().iter();
        let preparing = all.map(|one| self.client.prepare_typed(self.text_of(one), &one.types));
        // In one transaction, one cancellation ends all of them. They may wait for tables that another program has locked.
        let (begun, prepared, ended) = tokio::join!(
            biased;
            self.execute("BEGIN; SET LOCAL idle_in_transaction_session_timeout = 2000; SET LOCAL lock_timeout = 0"),
            join_all(preparing),
            self.execute("COMMIT"),
        );
        begun?;
        // The first error is the cause of the others.
        let prepared: Result<Vec<Statement>, _> = prepared.into_iter().collect();
        let prepared = prepared.map_err(|error| self.server.failure(error))?;
        ended?;
        for (place, statement) in self.prepared.iter().zip(prepared) {
            let _ = place.set(statement);
        }
        Ok(())
    }

    /// Executes a statement. It is sent when the future is polled for the first time.
    pub(super) async fn query(&self, sql: Sql, values: &Values<'_>) -> Outcome<Vec<Row>> {
        let _pending = self.replies.expect();
        let is_pooled = self.server.is_pooled();
        let prepared = self.prepared[sql as usize].get().filter(|_| !is_pooled);
        if let Some(statement) = prepared {
            let rows = self.client.query(statement, values).await;
            return self.outcome(rows);
        }
        let statement = self.server.statements.get(sql);
        let types = statement.types.iter().cloned();
        let typed: Vec<(&(dyn ToSql + Sync), Type)> = values.iter().copied().zip(types).collect();
        let rows = self.client.query_typed(self.text_of(statement), &typed).await;
        let rows = self.outcome(rows)?;
        if !is_pooled {
            let mut unprepared = self.unprepared.lock();
            if !unprepared.contains(&sql) {
                unprepared.push(sql);
            }
        }
        Ok(rows)
    }

    #[cfg(test)]
    pub(super) async fn rows(&self, text: &str) -> Vec<Row> {
        self.client.query(text, &[]).await.unwrap()
    }

    /// Returns the number of statements that are prepared.
    #[cfg(test)]
    pub(super) fn prepared(&self) -> usize {
        self.prepared.iter().filter(|one| one.get().is_some()).count()
    }

    /// Prepares the statements that were executed without preparation, in the background. Before the first execution a preparation costs
    /// one more round trip, and between the packets of a transaction it would delay the second one.
    fn prepare_for_next(&self) {
        for sql in self.unprepared.lock().drain(..) {
            let (server, client, prepared) = (self.server.clone(), self.client.clone(), self.prepared.clone());
            let pending = self.replies.expect();
            let has_options = self.has_options;
            tokio::spawn(FutureExt::boxed(async move {
                let _pending = pending;
                let statement = server.statements.get(sql);
                match client
                    .prepare_typed(statement.text(has_options), &statement.types)
                    .await
                {
                    Ok(statement) => _ = prepared[sql as usize].set(statement),
                    // The next execution repeats the preparation, unless the cause is a pooler.
                    Err(error) => _ = server.failure(error),
                }
            }));
        }
    }

    /// Discards the server's plans if they are older than [`PLAN_AGE`], without waiting for the reply. A plan made for a table with a few
    /// rows reads the whole table. The server replaces it only after its next analysis of the table, which may have many rows by then.
    pub(super) fn discard_old_plans(&mut self) {
        if self.planned_at.elapsed() >= PLAN_AGE && !self.server.is_pooled() {
            self.planned_at = Instant::now();
            let _ = self.client.batch_execute("DISCARD PLANS").now_or_never();
        }
    }

    /// Returns the text of a statement for this session.
    fn text_of<'s>(&self, statement: &'s super::statements::Statement) -> &'s str {
        statement.text(self.has_options && !self.server.is_pooled())
    }

    /// Reads a setting of the server for this session.
    pub(super) async fn setting(&self, name: &str) -> Outcome<String> {
        self.value_of("SELECT coalesce(current_setting($1, true), '')", &[name])
            .await
    }

    /// Returns the one value that a statement with these texts as its parameters reads.
    pub(super) async fn value_of<T: for<'r> FromSql<'r>>(&self, text: &str, parameters: &[&str]) -> Outcome<T> {
        let _pending = self.replies.expect();
        let parameters: Vec<(&(dyn ToSql + Sync), Type)> = parameters
            .iter()
            .map(|text| (text as &(dyn ToSql + Sync), Type::TEXT))
            .collect();
        let rows = self.client.query_typed(text, &parameters).await;
        let rows = rows.map_err(|error| self.server.failure(error))?;
        let value = rows.first().and_then(|row| row.try_get(0).ok());
        value.ok_or_else(|| Failure::unexpected(&self.server.connections.place, "no value"))
    }

    /// Executes statements outside of transactions, or the last ones of one, as [`PostgresSession::in_one_packet`] does.
    pub(super) async fn packet<T>(&self, statements: impl Future<Output = T>) -> T {
        let outcome = self.in_one_packet(statements).await;
        self.prepare_for_next();
        outcome
    }

    /// Executes statements. Those that one poll of the future hands to the connection are sent together.
    pub(super) async fn in_one_packet<T>(&self, statements: impl Future<Output = T>) -> T {
        let mut statements = pin!(statements);
        let send = |context: &mut Context<'_>| {
            let _sending = self.send_lock.lock();
            statements.as_mut().poll(context)
        };
        poll_fn(send).await
    }

    /// Executes statements without parameters. They are sent when the future is polled for the first time.
    pub(super) async fn execute(&self, text: &str) -> Outcome<()> {
        let _pending = self.replies.expect();
        self.outcome(self.client.batch_execute(text).await)
    }

    /// Returns the outcome of a statement. A commit that no standby has is no success.
    fn outcome<T>(&self, executed: Result<T, tokio_postgres::Error>) -> Outcome<T> {
        let done = executed.map_err(|error| self.server.failure(error))?;
        match self.has_unsafe_commit.swap(false, Ordering::Relaxed) {
            true => {
                let message = "the server no longer waits for a synchronous standby to have this commit".to_owned();
                Err(Failure::new(&self.server.connections.place, Kind::Refused, message))
            }
            false => Ok(done),
        }
    }

    /// Returns a value of a row.
    pub(super) fn get<'r, T: FromSql<'r>>(&self, row: &'r Row, column: usize) -> Outcome<T> {
        row.try_get(column).map_err(|error| self.server.failure(error))
    }
}
