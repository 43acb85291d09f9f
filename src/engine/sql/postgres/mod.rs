//! PostgreSQL 12 and later: a held lock is one row, and the server's clock decides. `sql/server/` has the engine.
//!
//! - `config/`: from a URL, the environment and settings to a store. `dial.rs`, `session.rs`, `cancel.rs`: the connections.
//!   `error.rs`: failures.
//! - `single.rs`: the calls that are one statement. `transaction.rs`: what a transaction reads and writes. `checks.rs`: the tables,
//!   and what a service does beside its calls. `listener.rs`: notifications.
//! - `statements.rs` and `statements/*.sql`: the statements.
//!
//! # Behavior
//! - **One statement releases a name and hands it off** (`hand_off.sql`), where a queue is likely: a waiter of the process waits, or the
//!   last release of the name has handed it off (`QueuedNames`). Any other release takes the shorter statement first.
//! - **A call of one name** is a statement without arrays (`acquire_one.sql`, `release_one.sql`), which the server executes faster.
//! - **Statements are prepared** after their first execution on a connection, so that a new connection costs no round trip. The first
//!   connection of an engine prepares all, which finds missing tables. The listening connection prepares none.
//! - **Plans.** The server plans each statement once, and such a plan may scan a table that had a few rows then. So a connection in use
//!   sends `DISCARD PLANS` every 10 s, and does not wait for the reply.
//! - **One packet.** The statements of a packet are handed to the driver under a lock that its task needs to send (`in_one_packet`).
//! - **Several servers** (`dial.rs`). One without an answer delays the next one by 250 ms, and the first one that accepts writes is used.
//!   The login is asked for, or the password file read, for each connection. `lib/connect.ts` reads the environment, because JavaScript
//!   may change it while another thread reads.
//! - **Cancel requests** (`cancel.rs`). Each is a connection of its own, which waits until the server closes it: by then the server has
//!   signalled the process of the statement. PgBouncer 1.18 and 1.19 terminate if the client closes it first.
//! - **`listenUrl`** bypasses the pooler for the listening connection, so that waiters do not poll. The engine then sends a notification
//!   to itself over another connection. If it does not arrive within 1 s, the waiters poll until one arrives.

use std::collections::HashMap;
use std::sync::Arc;

use async_trait::async_trait;

pub use self::config::PostgresConfig;
use self::session::{PostgresServer, PostgresSession};
use super::Page;
use super::jobs::{BATCH, Limit};
use super::server::connection::{Connection, Connections};
use super::server::single_calls::{Attempt, Granted, PageRead, ReleasedNames, RenewedOwners, SingleChanges};
use super::server::transaction::Plan;
use super::server::upkeep::{Checked, Swept};
use super::server::waiters::Waiters;
use super::server::{FOR_CALLS, Outcome, Server, ServerEngine, Session};
use crate::engine::core::ledger::{Changes, Ledger, StoredName};
use crate::engine::{Result, Warnings};
use crate::model::OwnerToken;

mod cancel;
mod checks;
mod config;
mod dial;
mod error;
mod listener;
mod session;
mod single;
mod statements;
#[cfg(test)]
mod tests;
mod transaction;

const NAME: &str = "postgres";

/// Connects to the server of `postgres://` URLs. Creates the tables if they are missing.
///
/// # Errors
/// Retryable when the server cannot be reached or has no free connection. Not retryable when it refuses the login, or the tables
/// have other columns.
pub(in crate::engine) async fn connect(config: PostgresConfig) -> Result<Arc<ServerEngine>> {
    let key_prefix = config.settings.key_prefix.clone().unwrap_or_default();
    ServerEngine::start(PostgresServer::new(config), key_prefix).await
}

#[async_trait]
impl Server for PostgresServer {
    fn statement_limit(&self) -> Limit {
        Limit::claims(256)
    }

    fn transaction_limit(&self) -> Limit {
        Limit::claims(BATCH)
    }

    fn hands_off_in_one(&self) -> bool {
        true
    }

    fn connections(&self) -> &Arc<Connections> {
        &self.connections
    }

    fn most_for_calls(&self) -> usize {
        // One is for notifications.
        let of_listener = u32::from(self.can_listen());
        let most = self.config.settings.max_connections.map(|most| most - of_listener);
        most.unwrap_or(FOR_CALLS) as usize
    }

    async fn connect(self: Arc<Self>) -> Outcome<Box<dyn Session>> {
        Ok(Box::new(self.connect_with(None).await?))
    }

    fn is_notified(&self) -> bool {
        self.can_listen()
    }

    fn warnings(&self) -> Option<&Warnings> {
        self.config.settings.warnings.as_deref()
    }

    async fn receive(self: Arc<Self>, waiters: &Waiters) -> Outcome<bool> {
        listener::receive(&self, waiters).await
    }
}

#[async_trait]
impl Session for PostgresSession {
    fn connection(&self) -> &Arc<Connection> {
        &self.connection
    }

    async fn check_before_use(&mut self) -> bool {
        self.discard_old_plans();
        !self.client.is_closed()
    }

    async fn ping(&mut self) -> Outcome<()> {
        self.execute("").await
    }

    async fn close(self: Box<Self>) {}

    async fn set_up(&mut self) -> Outcome<()> {
        self.set_up_once().await
    }

    async fn warnings(&mut self) -> Outcome<Vec<String>> {
        let value = self.setting("synchronous_commit").await?;
        let warning = (value == "off").then(|| {
            format!(
                "PostgreSQL at {} has synchronous_commit = off for this role and database: a crash of the server may lose locks \
                 that were just granted; other callers may then acquire them. Set it to on: ALTER ROLE … SET synchronous_commit = on",
                self.connections().place.address
            )
        });
        Ok(warning.into_iter().collect())
    }

    async fn attempt(&mut self, attempts: &[Attempt]) -> Outcome<Granted> {
        let statement = self.packet(single::attempt(self, attempts));
        self.connection.within_limit(statement).await
    }

    async fn change(&mut self, process: &str, changes: &SingleChanges) -> (ReleasedNames, RenewedOwners) {
        single::change(self, process, changes).await
    }

    async fn read(&mut self, pages: &[Page]) -> Outcome<Vec<PageRead>> {
        let statements = self.packet(single::read(self, pages));
        self.connection.within_limit(statements).await
    }

    async fn begin(&mut self, process: &str, plan: &Plan) -> Outcome<Ledger> {
        transaction::read(self, process, plan).await
    }

    async fn commit(&mut self, process: &str, changes: &Changes) -> Outcome<HashMap<String, u64>> {
        self.packet(transaction::write(self, process, changes)).await
    }

    async fn roll_back(&mut self) -> Outcome<()> {
        self.execute("ROLLBACK").await
    }

    async fn check(&mut self, process: &str, names: &[StoredName], except: Option<&[OwnerToken]>) -> Outcome<Checked> {
        self.packet(checks::check(self, process, names, except)).await
    }

    async fn claim_sweep(&mut self) -> Outcome<bool> {
        self.packet(checks::claim_sweep(self)).await
    }

    async fn slowness_warning(&mut self) -> Outcome<Option<String>> {
        self.packet(checks::slowness_warning(self)).await
    }

    async fn sweep(&mut self, after: &[u8]) -> Outcome<Swept> {
        self.packet(checks::sweep(self, after)).await
    }
}
