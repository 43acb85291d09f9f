//! MySQL 8.0 and MariaDB 10.6, and later: a held lock is one row, and the server's clock decides. `sql/server/` has the engine.
//!
//! - `config.rs`: from a URL and settings to a store. `session.rs`: the connections. `error.rs`: failures.
//! - `tables.rs`: the tables. `packet.rs`: several statements in one packet, and their answers. `prepared.rs`: the sizes of
//!   prepared statements.
//! - `single.rs`, `updates.rs`: the calls that are one statement. `transaction.rs`: what a transaction reads and writes. `checks.rs`: what
//!   a service does beside its calls.
//!
//! # Behavior
//! Times are microseconds since 1970. `@u` is the server's clock, read at the beginning of a packet, or after its locks. An early reading is
//! safe: it never makes a held name free, and it is never earlier than the request.
//!
//! - The driver handles one request at a time on a connection, and does not see that an idle one was closed: one that was not used for 1 s
//!   is tested first.
//! - After an error the server executes no further statement of a packet.
//! - On MariaDB an attempt is an `INSERT … ON DUPLICATE KEY UPDATE … RETURNING`. MySQL has no `RETURNING`: there the insert id of an
//!   attempt for one name is the fencing token (`LAST_INSERT_ID(expr)`), or 0 if the name is busy. Several attempts are read back in the
//!   same packet.
//! - Renewals are read back by a second packet, if the first one did not change the rows of all of them. A row counts if its owner is the
//!   caller and its lease is long enough.
//! - A release is an `UPDATE` of live leases, whose insert id is the time of the release. If it changed the rows of all calls, all were
//!   released; if it changed none, all calls go to a transaction. Otherwise a second request reads the rows: those that are free since
//!   that time were released, and so were those with a later grant, if the number of changed rows says so.
//! - The sweep waits for locked rows (`DELETE` has no `SKIP LOCKED`). If that wait times out, it removes no row of this page.
//! - Waiters poll (`sql/server/waiters.rs`) 2 to 200 ms after the last check, behind waiters of other processes up to 1.5 s. One packet
//!   checks up to 32 names that are due soon. The row of a handed-off name shows that the waiter is the holder, and an attempt confirms
//!   it.
//! - The commit of a release waits for the disk as every commit: a session cannot choose that.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use sqlx::Connection as _;
use tokio::time::{Instant, timeout};

pub use self::config::MysqlConfig;
use self::session::{MysqlServer, MysqlSession};
use super::Page;
use super::jobs::{BATCH, Limit};
use super::server::connection::{Connection, Connections};
use super::server::single_calls::{Attempt, Granted, PageRead, ReleasedNames, RenewedOwners, SingleChanges};
use super::server::transaction::Plan;
use super::server::upkeep::{Checked, Swept};
use super::server::{FOR_CALLS, Outcome, Server, ServerEngine, Session};
use crate::engine::core::ledger::{Changes, Ledger, StoredName};
use crate::engine::{Result, Warnings};
use crate::model::OwnerToken;

mod checks;
mod config;
mod error;
mod packet;
mod prepared;
mod session;
mod single;
mod tables;
#[cfg(test)]
mod tests;
mod transaction;
mod updates;

const NAME: &str = "mysql";
/// A connection that was not used for this long may have been closed by the server: it is tested.
const IDLE: Duration = Duration::from_secs(1);

/// Maximum number of attempts, of releases, and of renewals through TLS in a statement. With usual names its packet is smaller than a record of
/// TLS (16 KiB): version 0.9.0 of the driver does not set `TCP_NODELAY`, so the second record of a packet waits for a delayed
/// acknowledgement (some 40 ms). More attempts and releases are no faster; more renewals take less CPU.
const STATEMENT_BATCH: usize = 64;

/// Connects to the server of `mysql://` and `mariadb://` URLs. Creates the tables if they are missing.
///
/// # Errors
/// Retryable when the server cannot be reached or has no free connection. Not retryable when it refuses the login, or the tables
/// have other columns or another storage engine than InnoDB.
pub(in crate::engine) async fn connect(config: MysqlConfig) -> Result<Arc<ServerEngine>> {
    let key_prefix = config.settings.key_prefix.clone().unwrap_or_default();
    ServerEngine::start(MysqlServer::new(config), key_prefix).await
}

#[async_trait]
impl Server for MysqlServer {
    fn statement_limit(&self) -> Limit {
        Limit {
            claims: STATEMENT_BATCH,
            renewals_per_claim: 4,
        }
    }

    fn transaction_limit(&self) -> Limit {
        // Its packets have more text per claim.
        Limit::claims(BATCH / 2)
    }

    fn hands_off_in_one(&self) -> bool {
        false
    }

    fn connections(&self) -> &Arc<Connections> {
        &self.connections
    }

    fn most_for_calls(&self) -> usize {
        self.config.settings.max_connections.unwrap_or(FOR_CALLS) as usize
    }

    async fn connect(self: Arc<Self>) -> Outcome<Box<dyn Session>> {
        Ok(Box::new(MysqlSession::open(&self).await?))
    }

    fn is_notified(&self) -> bool {
        false
    }

    fn warnings(&self) -> Option<&Warnings> {
        self.config.settings.warnings.as_deref()
    }
}

#[async_trait]
impl Session for MysqlSession {
    fn connection(&self) -> &Arc<Connection> {
        &self.connection
    }

    async fn check_before_use(&mut self) -> bool {
        // The driver does not see that the server has closed an idle connection.
        self.used_at.elapsed() < IDLE || self.ping().await.is_ok()
    }

    async fn ping(&mut self) -> Outcome<()> {
        let answered = self.client.ping().await;
        self.used_at = Instant::now();
        answered.map_err(|error| self.server.failure(error))
    }

    async fn close(self: Box<Self>) {
        // Otherwise the server would report it as aborted.
        let _ = timeout(self.server.connections.store_timeout, self.client.close()).await;
    }

    async fn set_up(&mut self) -> Outcome<()> {
        tables::set_up(self).await
    }

    async fn warnings(&mut self) -> Outcome<Vec<String>> {
        checks::warnings(self).await
    }

    async fn attempt(&mut self, attempts: &[Attempt]) -> Outcome<Granted> {
        single::attempt(self, attempts).await
    }

    async fn change(&mut self, _process: &str, changes: &SingleChanges) -> (ReleasedNames, RenewedOwners) {
        updates::change(self, changes).await
    }

    async fn read(&mut self, pages: &[Page]) -> Outcome<Vec<PageRead>> {
        single::read(self, pages).await
    }

    async fn begin(&mut self, process: &str, plan: &Plan) -> Outcome<Ledger> {
        transaction::read(self, process, plan).await
    }

    async fn commit(&mut self, process: &str, changes: &Changes) -> Outcome<HashMap<String, u64>> {
        transaction::write(self, process, changes).await
    }

    async fn roll_back(&mut self) -> Outcome<()> {
        transaction::roll_back(self).await
    }

    async fn check(&mut self, process: &str, names: &[StoredName], except: Option<&[OwnerToken]>) -> Outcome<Checked> {
        checks::check(self, process, names, except).await
    }

    async fn claim_sweep(&mut self) -> Outcome<bool> {
        checks::claim_sweep(self).await
    }

    async fn sweep(&mut self, after: &[u8]) -> Outcome<Swept> {
        checks::sweep(self, after).await
    }
}
