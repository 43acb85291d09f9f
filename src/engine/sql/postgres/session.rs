//! One connection to the server, opened again where necessary.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::Context;
use std::time::Duration;

use futures_util::future::try_join_all;
use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};
use tokio::task::AbortHandle;
use tokio::time::{Instant, timeout};
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{AsyncMessage, Client, Row, Statement};
use tokio_postgres_rustls::MakeRustlsConnect;

use super::config::PostgresConfig;
use super::dial;
use super::error::{Failure, Kind};
use super::statements::{Sql, Statements};
use crate::engine::sql::dropped_calls::DroppedCalls;
use crate::engine::tls::client_config;

/// How long the server has to confirm that it cancelled a statement.
const CANCELLATION: Duration = Duration::from_millis(50);
/// How many statements are cancelled.
const CANCELLATIONS: usize = 6;

/// How long statements of an outdated connection have for their outcome.
const OUTDATED: Duration = Duration::from_millis(100);

/// What every connection of an engine needs.
pub(super) struct Server {
    pub config: PostgresConfig,
    pub statements: Statements,
    /// The server's address, for messages.
    pub address: Arc<str>,
    /// Whether a pooler is between this process and the server: then no statement is prepared.
    is_pooled: AtomicBool,
    /// Whether the tables were found.
    is_set_up: AtomicBool,
    pub dropped: Arc<DroppedCalls>,
    /// Incremented when a connection was silent: those that were opened before may be silent, too, and do not know it.
    epoch: watch::Sender<u64>,
}

/// An open connection. Dropping it closes it.
pub(super) struct Session {
    server: Arc<Server>,
    client: Arc<Client>,
    tls: MakeRustlsConnect,
    /// The statements that were prepared. Others are sent with their text.
    prepared: Arc<[OnceLock<Statement>]>,
    /// The statements that were executed without.
    unprepared: Mutex<Vec<Sql>>,
    connection: AbortHandle,
    /// Locked while statements are handed to the connection, which then sends them in one packet.
    gate: Arc<Mutex<()>>,
    epoch: u64,
}

/// The values of a statement's parameters.
pub(super) type Values<'a> = [&'a (dyn ToSql + Sync)];

impl Server {
    pub(super) fn new(config: PostgresConfig) -> Arc<Self> {
        Arc::new(Server {
            statements: Statements::new(&config.table),
            address: config.server.as_str().into(),
            is_pooled: AtomicBool::new(config.target.is_pooled == Some(true)),
            is_set_up: AtomicBool::new(false),
            dropped: Arc::default(),
            epoch: watch::Sender::default(),
            config,
        })
    }

    /// Whether a pooler is between this process and the server.
    pub(super) fn is_pooled(&self) -> bool {
        self.is_pooled.load(Ordering::Relaxed)
    }

    /// Whether the server's notifications arrive.
    pub(super) fn can_listen(&self) -> bool {
        self.config.listen.is_some() || !self.is_pooled()
    }

    pub(super) fn failure(&self, cause: tokio_postgres::Error) -> Failure {
        self.noticed(Failure::of_driver(&self.address, cause))
    }

    /// Records what a failure says about the server.
    fn noticed(&self, failure: Failure) -> Failure {
        match failure.kind() {
            Kind::Pooled => self.is_pooled.store(true, Ordering::Relaxed),
            Kind::NoTable => self.is_set_up.store(false, Ordering::Relaxed),
            _ => {}
        }
        failure
    }

    /// Opens a connection. The first one creates the tables if they are missing, as does the first one after an error that says so. The
    /// others send nothing before the first call, so that a connection is quickly replaced. With `notifications`, which receives the
    /// payloads of `NOTIFY`, it is one to listen on, without a pooler if the configuration has its address.
    pub(super) async fn open(
        self: &Arc<Self>,
        notifications: Option<mpsc::UnboundedSender<String>>,
    ) -> Result<Session, Failure> {
        let limit = self.config.store_timeout;
        let unanswered = || Failure::unanswered(&self.address, limit, Kind::Broken);
        let is_listening = notifications.is_some();
        let opened = async {
            let connected = timeout(limit, self.connect(notifications)).await;
            let session = connected.unwrap_or_else(|_| Err(unanswered()))?;
            if is_listening || self.is_set_up.load(Ordering::Relaxed) {
                return Ok(session);
            }
            if let Ok(ready) = timeout(limit, session.set_up()).await {
                self.is_set_up.store(ready.is_ok(), Ordering::Relaxed);
                return ready.map(|()| session);
            }
            session.cancel();
            Err(unanswered())
        };
        opened.await.map_err(Failure::not_sent)
    }

    /// Opens a connection as [`Server::open`] does, again without prepared statements if there is a pooler.
    pub(super) async fn open_first(self: &Arc<Self>) -> Result<Session, Failure> {
        match self.open(None).await {
            Err(failure) if failure.kind() == Kind::Pooled => self.open(None).await,
            opened => opened,
        }
    }

    async fn connect(
        self: &Arc<Self>,
        notifications: Option<mpsc::UnboundedSender<String>>,
    ) -> Result<Session, Failure> {
        let target = match (&notifications, &self.config.listen) {
            (Some(_), Some(listen)) => listen,
            _ => &self.config.target,
        };
        let tls =
            client_config(&target.tls, target.verified).map_err(|error| Failure::of_tls_file(&self.address, &error))?;
        let tls = MakeRustlsConnect::new(tls);
        let epoch = *self.epoch.borrow();
        let has_options = target.is_pooled.is_none() && !self.is_pooled();
        let connected = dial::connect(&self.config, target, &tls, has_options).await;
        let (client, mut connection) = connected.map_err(|failure| self.noticed(failure))?;
        let gate: Arc<Mutex<()>> = Arc::default();
        let closed = gate.clone();
        let driving = tokio::spawn(async move {
            loop {
                let next = poll_fn(|context| {
                    let _closed = closed.lock();
                    connection.poll_message(context)
                });
                match next.await {
                    Some(Ok(AsyncMessage::Notification(notification))) => {
                        if let Some(notifications) = &notifications {
                            let _ = notifications.send(notification.payload().to_owned());
                        }
                    }
                    Some(Ok(_)) => {}
                    Some(Err(error)) => {
                        tracing::debug!(%error, "a connection broke");
                        break;
                    }
                    None => break,
                }
            }
        });
        Ok(Session {
            server: self.clone(),
            client: Arc::new(client),
            tls,
            prepared: self.statements.all().iter().map(|_| OnceLock::new()).collect(),
            unprepared: Mutex::default(),
            connection: driving.abort_handle(),
            gate,
            epoch,
        })
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.connection.abort();
    }
}

impl Session {
    /// Whether the connection is known to be broken, or outdated.
    pub(super) fn is_unusable(&self) -> bool {
        self.client.is_closed() || *self.server.epoch.borrow() > self.epoch
    }

    /// Makes the other connections of this epoch outdated.
    pub(super) fn outdate_others(&self) {
        self.server.epoch.send_if_modified(|epoch| {
            let is_first = *epoch == self.epoch;
            *epoch += u64::from(is_first);
            is_first
        });
    }

    /// Completes when another connection of the same epoch was silent.
    pub(super) async fn outdated(&self) {
        let mut epochs = self.server.epoch.subscribe();
        // The sender lives as long as the session.
        let _ = epochs.wait_for(|epoch| *epoch > self.epoch).await;
    }

    /// Prepares all statements. Creates the tables if they are missing.
    async fn set_up(&self) -> Result<(), Failure> {
        match self.prepare().await {
            Err(failure) if failure.kind() == Kind::NoTable => {
                let schema = self.server.statements.schema.as_str();
                self.execute(schema).await?;
                self.prepare().await
            }
            prepared => prepared,
        }
    }

    /// Prepares all statements, which fails without the tables. Behind a pooler it only checks the tables.
    async fn prepare(&self) -> Result<(), Failure> {
        if self.server.is_pooled() {
            let (start, end): (&[u8], Option<&[u8]>) = (&[], None);
            let no_names: &[&[u8]] = &[];
            self.query(Sql::List, &[&start, &end, &0_i64]).await?;
            return self.query(Sql::Check, &[&no_names]).await.map(drop);
        }
        let all = self.server.statements.all().iter();
        let preparing = all.map(|one| self.client.prepare_typed(&one.text, one.types));
        // In one transaction, one cancellation ends all of them.
        let (begun, prepared, ended) = tokio::join!(
            biased;
            self.execute("BEGIN"),
            try_join_all(preparing),
            self.execute("COMMIT"),
        );
        begun?;
        let prepared = prepared.map_err(|error| self.server.failure(error))?;
        ended?;
        for (place, statement) in self.prepared.iter().zip(prepared) {
            let _ = place.set(statement);
        }
        Ok(())
    }

    /// Executes a statement. It is sent when the future is polled for the first time.
    pub(super) async fn query(&self, sql: Sql, values: &Values<'_>) -> Result<Vec<Row>, Failure> {
        let is_pooled = self.server.is_pooled();
        let prepared = self.prepared[sql as usize].get().filter(|_| !is_pooled);
        if let Some(statement) = prepared {
            let rows = self.client.query(statement, values).await;
            return rows.map_err(|error| self.server.failure(error));
        }
        let statement = self.server.statements.get(sql);
        let types = statement.types.iter().cloned();
        let typed: Vec<(&(dyn ToSql + Sync), Type)> = values.iter().copied().zip(types).collect();
        let rows = self.client.query_typed(&statement.text, &typed).await;
        let rows = rows.map_err(|error| self.server.failure(error))?;
        if !is_pooled {
            self.unprepared.lock().push(sql);
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

    /// Prepares the statements that were executed without, in the background. In front of its first execution it would be one more round
    /// trip, and between the packets of a transaction it would delay the second one.
    fn prepare_for_next(&self) {
        for sql in self.unprepared.lock().drain(..) {
            let (server, client, prepared) = (self.server.clone(), self.client.clone(), self.prepared.clone());
            tokio::spawn(async move {
                let statement = server.statements.get(sql);
                match client.prepare_typed(&statement.text, statement.types).await {
                    Ok(statement) => _ = prepared[sql as usize].set(statement),
                    // The next execution does it again, unless the cause is a pooler.
                    Err(error) => _ = server.failure(error),
                }
            });
        }
    }

    /// Reads a setting of the server for this session.
    pub(super) async fn setting(&self, name: &str) -> Result<String, Failure> {
        let text = "SELECT current_setting($1)";
        let rows = self.client.query_typed(text, &[(&name, Type::TEXT)]).await;
        let rows = rows.map_err(|error| self.server.failure(error))?;
        let value = rows.first().and_then(|row| row.try_get(0).ok());
        value.ok_or_else(|| Failure::unexpected(&self.server.address, "no value of a setting"))
    }

    /// Executes statements without parameters. They are sent when the future is polled for the first time.
    pub(super) async fn execute(&self, text: &str) -> Result<(), Failure> {
        let executed = self.client.batch_execute(text).await;
        executed.map_err(|error| self.server.failure(error))
    }

    /// Waits for the outcome of statements within the store timeout, or until callers that had no answer are dropped, or another
    /// connection was silent. Then cancels them. If the server confirms that, the connection stays usable.
    pub(super) async fn within_limit<T>(
        &self,
        statements: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        self.within(self.server.config.store_timeout, statements).await
    }

    /// Waits for the outcome of statements as [`Session::within_limit`] does, for `limit` at most.
    pub(super) async fn within<T>(
        &self,
        limit: Duration,
        statements: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        let since = Instant::now();
        let mut statements = pin!(self.in_one_packet(statements));
        tokio::select! {
            biased;
            outcome = &mut statements => {
                self.prepare_for_next();
                return outcome;
            }
            () = tokio::time::sleep(limit) => {}
            () = self.server.dropped.are_suspect() => {}
            () = async { self.outdated().await; tokio::time::sleep(OUTDATED).await } => {}
        }
        let waited = since.elapsed();
        let unanswered = |kind| Err(Failure::unanswered(&self.server.address, waited, kind));
        // One cancellation ends one statement.
        for _ in 0..CANCELLATIONS {
            self.cancel();
            match timeout(CANCELLATION, &mut statements).await {
                Ok(Ok(answer)) => return Ok(answer),
                Ok(Err(failure)) => return unanswered(failure.kind()),
                Err(_) => {}
            }
        }
        unanswered(Kind::Broken)
    }

    /// Executes statements. Those that one poll of the future hands to the connection are sent together.
    async fn in_one_packet<T>(&self, statements: impl Future<Output = T>) -> T {
        let mut statements = pin!(statements);
        let send = |context: &mut Context<'_>| {
            let _closed = self.gate.lock();
            statements.as_mut().poll(context)
        };
        poll_fn(send).await
    }

    /// Asks the server to cancel the current statement, in the background: a statement that waits for a lock is not ended by the
    /// end of its connection.
    fn cancel(&self) {
        let (token, tls) = (self.client.cancel_token(), self.tls.clone());
        let limit = self.server.config.store_timeout;
        tokio::spawn(async move {
            let _ = timeout(limit, token.cancel_query(tls)).await;
        });
    }
}
