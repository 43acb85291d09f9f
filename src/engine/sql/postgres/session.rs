//! The connections to the server.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures_util::future::try_join_all;
use tokio::sync::mpsc;
use tokio::task::AbortHandle;
use tokio::time::timeout;
use tokio_postgres::types::{FromSql, ToSql, Type};
use tokio_postgres::{AsyncMessage, Client, Row, Statement};
use tokio_postgres_rustls::MakeRustlsConnect;

use super::NAME;
use super::config::PostgresConfig;
use super::error::kind_of;
use super::statements::{Sql, Statements};
use crate::engine::sql::server::Outcome;
use crate::engine::sql::server::error::{Failure, Kind};
use crate::engine::sql::server::link::{Link, Links};
use crate::engine::tls::client_config;

/// What every connection of an engine needs.
pub(in crate::engine) struct PostgresServer {
    pub(super) config: PostgresConfig,
    pub(super) statements: Statements,
    pub(super) links: Arc<Links>,
    /// Whether a pooler is between this process and the server: then no statement is prepared.
    is_pooled: AtomicBool,
}

/// An open connection. Dropping it closes it.
pub(in crate::engine::sql) struct PostgresSession {
    server: Arc<PostgresServer>,
    pub(super) client: Client,
    pub(super) link: Arc<Link>,
    /// The prepared statements; empty behind a pooler.
    prepared: Vec<Statement>,
    connection: AbortHandle,
}

/// The values of a statement's parameters.
pub(super) type Values<'a> = [&'a (dyn ToSql + Sync)];

impl PostgresServer {
    pub(super) fn new(config: PostgresConfig) -> Arc<Self> {
        Arc::new(PostgresServer {
            statements: Statements::new(&config.table),
            links: Links::new(NAME, &config.server, config.store_timeout),
            is_pooled: AtomicBool::new(config.is_pooled),
            config,
        })
    }

    /// Whether a pooler is between this process and the server.
    pub(super) fn is_pooled(&self) -> bool {
        self.is_pooled.load(Ordering::Relaxed)
    }

    pub(super) fn failure(&self, cause: tokio_postgres::Error) -> Failure {
        let (kind, message) = kind_of(&cause);
        if kind == Kind::Pooled {
            self.is_pooled.store(true, Ordering::Relaxed);
        }
        Failure::of_driver(&self.links, kind, message, cause)
    }

    /// Opens a connection. `notifications`: receives the payloads of `NOTIFY`.
    pub(super) async fn connect_with(
        self: &Arc<Self>,
        notifications: Option<mpsc::UnboundedSender<String>>,
    ) -> Outcome<PostgresSession> {
        let tls = client_config(&self.config.tls, self.config.verified).map_err(|error| {
            let message = format!("a TLS file cannot be used: {error}");
            Failure::new(&self.links, Kind::Permanent, message)
        })?;
        let tls = MakeRustlsConnect::new(tls);
        let epoch = self.links.epoch();
        let connected = self.config.driver.connect(tls.clone()).await;
        let (client, mut connection) = connected.map_err(|error| self.failure(error))?;
        let driving = tokio::spawn(async move {
            loop {
                match poll_fn(|context| connection.poll_message(context)).await {
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
        let (token, limit) = (client.cancel_token(), self.links.store_timeout);
        let cancel = move || {
            let (token, tls) = (token.clone(), tls.clone());
            tokio::spawn(async move {
                let _ = timeout(limit, token.cancel_query(tls)).await;
            });
        };
        Ok(PostgresSession {
            server: self.clone(),
            client,
            link: Link::new(self.links.clone(), epoch, cancel),
            prepared: Vec::new(),
            connection: driving.abort_handle(),
        })
    }
}

impl Drop for PostgresSession {
    fn drop(&mut self) {
        self.connection.abort();
    }
}

impl PostgresSession {
    pub(super) fn links(&self) -> &Links {
        &self.server.links
    }

    /// Prepares all statements. Creates the tables if they are missing.
    pub(super) async fn prepare_all(&mut self) -> Outcome<()> {
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
    async fn prepare(&mut self) -> Outcome<()> {
        if self.server.is_pooled() {
            let (start, end): (&[u8], Option<&[u8]>) = (&[], None);
            self.query(Sql::List, &[&start, &end, &0_i64]).await?;
            return self.query(Sql::Called, &[&""]).await.map(drop);
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
        self.prepared = prepared;
        Ok(())
    }

    /// Executes a statement. It is sent when the future is polled for the first time.
    pub(super) async fn query(&self, sql: Sql, values: &Values<'_>) -> Outcome<Vec<Row>> {
        let rows = match self.prepared.get(sql as usize) {
            Some(statement) => self.client.query(statement, values).await,
            None => {
                let statement = self.server.statements.get(sql);
                let types = statement.types.iter().cloned();
                let typed: Vec<(&(dyn ToSql + Sync), Type)> = values.iter().copied().zip(types).collect();
                self.client.query_typed(&statement.text, &typed).await
            }
        };
        rows.map_err(|error| self.server.failure(error))
    }

    /// Executes statements without parameters. They are sent when the future is polled for the first time.
    pub(super) async fn execute(&self, text: &str) -> Outcome<()> {
        let executed = self.client.batch_execute(text).await;
        executed.map_err(|error| self.server.failure(error))
    }

    /// Returns a value of a row.
    pub(super) fn get<'r, T: FromSql<'r>>(&self, row: &'r Row, column: usize) -> Outcome<T> {
        row.try_get(column).map_err(|error| self.server.failure(error))
    }
}
