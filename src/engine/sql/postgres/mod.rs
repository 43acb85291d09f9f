//! PostgreSQL 12 and later: a held lock is one row, and the server's clock decides.
//!
//! - `config/`: from a URL, the environment and settings to a store. `dial.rs`, `session.rs`, `slot.rs`: the connections. `error.rs`: failures.
//! - `single.rs`, `single_calls.rs`: the calls that are one statement. `upkeep.rs`: the checks of waiters, and the sweep.
//! - `worker.rs`: the other calls, as transactions. `transaction.rs`: what one reads and writes; `sql/ledger/` decides between both.
//! - `waiters.rs`: the waiters of this process. `statements.rs` and `statements/*.sql`: the statements.
//!
//! # Behavior
//! A free name keeps its row for an hour, so that its fencing tokens grow within the hour even if the server's clock is set back.
//! Transactions lock the rows of their names in the order of the names, and read the queue after that. No state of a lock is in a
//! session of the server.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::mpsc;

pub use self::config::PostgresConfig;
use self::session::{Server, Session};
use self::single::{ForwardedOwners, Shared, SingleWorker, Timers};
use self::slot::Slot;
use self::transaction::Prefix;
use self::waiters::Waiters;
use self::worker::Worker;
use super::Page;
use super::calls::Calls;
use super::jobs::{self, Failed};
use crate::engine::{Acquired, Attempts, Engine, Released, Releases, Renewed, Result, Subscription};
use crate::model::{Claim, Key, LockInfo, OwnerToken, Ttl};

mod config;
mod dial;
mod error;
mod session;
mod single;
mod single_calls;
mod slot;
mod statements;
#[cfg(test)]
mod tests;
mod transaction;
mod upkeep;
mod waiters;
mod worker;

const NAME: &str = "postgres";

/// The engine behind `postgres://` URLs.
pub struct PostgresEngine {
    server: Arc<Server>,
    prefix: Prefix,
    waiters: Arc<Waiters>,
    calls: Calls,
}

impl fmt::Debug for PostgresEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresEngine")
            .field("server", &self.server.address)
            .finish_non_exhaustive()
    }
}

impl PostgresEngine {
    /// Connects to the server. Creates the tables if they are missing.
    ///
    /// # Errors
    /// Retryable when the server cannot be reached or has no free connection. Not retryable when it refuses the login, or the tables
    /// have other columns.
    pub async fn connect(config: PostgresConfig) -> Result<Arc<Self>> {
        let prefix = Prefix(config.key_prefix.clone());
        let server = Server::new(config);
        let session = server.open_first().await.map_err(|failure| failure.error("connect"))?;
        warn_of_settings(&server, &session).await;
        let (check, checks) = mpsc::unbounded_channel();
        let (names, named) = mpsc::unbounded_channel();
        let waiters = Waiters::new(server.clone(), check);
        let (transactions, transaction_jobs) = jobs::queue();
        let worker = Worker {
            server: server.clone(),
            slot: Slot::new(server.clone(), None),
            prefix: prefix.clone(),
            waiters: waiters.clone(),
            names: named,
        };
        let single = SingleWorker {
            shared: Shared {
                server: server.clone(),
                prefix: prefix.clone(),
                waiters: waiters.clone(),
                transactions,
                names,
                forwarded: ForwardedOwners::default(),
                timers: Timers::default(),
            },
            idle: vec![Slot::new(server.clone(), Some(session))],
            checks,
            worker: tokio::spawn(worker.run(transaction_jobs)),
        };
        let (jobs, receiver) = jobs::queue();
        let single = tokio::spawn(single.run(receiver));
        let dropped = server.dropped.clone();
        Ok(Arc::new(PostgresEngine {
            server,
            prefix,
            waiters,
            calls: Calls::new(NAME, jobs, single, dropped),
        }))
    }
}

/// Warns of settings of the server with which it may lose what it confirmed.
async fn warn_of_settings(server: &Server, session: &Session) {
    if server.config.warnings.is_none() {
        return;
    }
    // A connection that fails is opened again by the first call.
    if let Ok(value) = session.setting("synchronous_commit").await
        && value == "off"
    {
        server.config.warn(|| {
            format!(
                "PostgreSQL at {} has synchronous_commit = off for this role and database: a crash of the server loses the last \
                 locks that it granted, and grants them again. Set it to on: ALTER ROLE … SET synchronous_commit = on",
                server.address
            )
        });
    }
}

#[async_trait]
impl Engine for PostgresEngine {
    fn name(&self) -> &'static str {
        NAME
    }

    fn ordered(&self) -> bool {
        true
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Acquired> {
        self.calls.try_acquire(claim).await
    }

    async fn try_acquire_in_order(&self, claims: &[Arc<Claim>], answer: &mut Attempts<'_>) {
        self.calls.try_acquire_in_order(claims, answer).await;
    }

    async fn renew(&self, claim: &Claim, ttl: Ttl) -> Result<Renewed> {
        self.calls.renew(claim, ttl).await
    }

    async fn transfer(&self, claim: &Claim, to: &OwnerToken) -> Result<Renewed> {
        self.calls.transfer(claim, to).await
    }

    async fn release(&self, claim: &Claim, keep: Duration) -> Result<Released> {
        self.calls.release(claim, keep).await
    }

    async fn release_all(&self, claims: &[Claim], answer: &mut Releases<'_>) {
        self.calls.release_all(claims, answer).await;
    }

    async fn subscribe(&self, claim: &Claim, _key: &Key) -> Result<Box<dyn Subscription>> {
        Ok(Box::new(self.waiters.subscribe(&claim.owner)))
    }

    async fn inspect(&self, key: &Key) -> Result<Option<LockInfo>> {
        self.calls.inspect(key).await
    }

    async fn list(&self, prefix: &str, page_timeout: Duration) -> Result<Vec<LockInfo>> {
        let first = Page::first(&self.prefix.0, prefix);
        self.calls.list(first, page_timeout).await
    }

    async fn force_release(&self, key: &Key) -> Result<bool> {
        self.calls.force_release(key).await
    }

    async fn close(&self) {
        self.waiters.close();
        self.calls.close().await;
    }
}

impl Drop for PostgresEngine {
    fn drop(&mut self) {
        self.waiters.close();
    }
}
