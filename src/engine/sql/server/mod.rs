//! What the engines of SQL servers have in common. A dialect implements [`Server`] and [`Session`]: how it connects, and its
//! statements.
//!
//! - `single.rs`, `single_calls.rs`: the calls that are one statement. `upkeep.rs`: the checks of waiters, and the sweep.
//! - `worker.rs`: the other calls, as transactions. `transaction.rs`: what one needs; `core/ledger/` decides what changes.
//! - `waiters.rs`: the waiters of this process. `connection.rs`, `pool.rs`: the connections.
//! - `products.rs`: servers that are other products.
//!
//! # Behavior
//! A free name keeps its row for an hour, so that its fencing tokens grow within the hour even if the server's clock is set back.
//! Transactions lock the rows of their names in the order of the names, and read the queue after that. No state of a lock is in a
//! session of the server.
//!
//! `docs/proofs/sql-locks.md` shows that services do not deadlock, that transactions read the current queue, and that fencing tokens grow.
//!
//! # The event loop
//! If there is one, Node's event loop polls the tasks of the engine, and on PostgreSQL its sockets. So the calls of a tick share a
//! statement that is written in the same tick, and its reply settles them without a switch between threads. The driver of MySQL opens its
//! own socket, so its replies arrive on the I/O thread. What the I/O thread wakes (a timer, a renewal) runs there.
//!
//! # Which calls are transactions
//! Claims of several names, shares (except their renewals), names with a queue, waiters that found a name busy, locked rows. Calls for a name
//! with waiters of this process are sent to a transaction directly, and so is a release while an attempt of the same owner is there
//! (`ForwardedOwners`). `queued` in the row of a name is the number of its positions, so that a single statement sees there whether it has a
//! queue.
//!
//! # The hand-off is the grant
//! At the end of a transaction a free name goes to its first live waiter ([`Ledger::finish`]). The notification has the fencing token and
//! the lease, from which the process computes the local end (`engine/hand_off/`). With synchronous standbys it has only the owner, and the
//! waiter makes an attempt, whose commit waits for the standby. A waiter that missed its hand-off has no position any more: the answer to
//! the next heartbeat lists the positions that remain, so the process wakes the waiter, and it enters again with its ticket.
//!
//! # Heartbeats and sweeps
//! One heartbeat per process, every 2 s, keeps its positions alive, except those of waiters whose event loop does not respond. With it,
//! and at the end of the lease that a waiter waits for, the names are checked without a lock; a free name with a waiter goes to a
//! transaction. A waiter of a dead process may be the first in the queue, so the process checks the name again when that hand-off ends.
//! The row with the empty name, which no lock has, is the lease of the sweep: one process sweeps every 5 minutes.
//!
//! # Tables
//! Every statement names the schema of its table, because the session may have the `search_path` of another program. A statement that
//! finds no table fails with a retryable error, a `HoldfastWarning` is emitted, and the set-up of the next connection creates the tables.
//!
//! # Silent connections
//! A statement without an answer within the store timeout is cancelled, because a statement that waits for a lock does not end with its
//! connection. It is cancelled earlier when two callers, one after the other, were dropped without an answer, and when a heartbeat has no
//! answer after 2 s. If no other connection has answered in the second half of the store timeout, the others may be silent, too: their statements
//! are cancelled after 100 ms, and idle ones are tested before they are used (`connection.rs`, `pool.rs`).
//!
//! If a connection does not answer its test within 500 ms, the test continues, and a new connection is opened beside it. The silent one is
//! closed when the new one is open, or after the store timeout; with a full pool after half of it. The silence of a connection that has
//! never answered says nothing about the others.

use std::any::Any;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::mpsc;

use self::connection::{Connection, Connections, open_first};
use self::pool::Pool;
use self::single::{ForwardedOwners, Shared, SingleWorker, Timers};
use self::single_calls::{Attempt, Granted, PageRead, QueuedNames, ReleasedNames, RenewedOwners, SingleChanges};
use self::transaction::{Plan, Prefix};
use self::upkeep::{Checked, Swept};
use self::waiters::Waiters;
use self::worker::{LockedNames, Worker};
use super::Page;
use super::calls::{SqlEngine, StoreAddress};
use super::jobs::{self, Limit};
use crate::engine::core::ledger::{Changes, Ledger, StoredName};
use crate::engine::sql::failure::Failure;
use crate::engine::{Result, Warnings};
use crate::model::OwnerToken;

pub(super) mod connection;
pub(super) mod pool;
pub(super) mod products;
mod single;
pub(super) mod single_calls;
#[cfg(test)]
pub(super) mod tests;
pub(super) mod transaction;
pub(super) mod upkeep;
pub(super) mod waiters;
mod worker;

pub(super) type Outcome<T> = std::result::Result<T, Failure>;

/// The number of connections for calls without a setting: the parts of the queue, and the transactions.
pub(super) const FOR_CALLS: u32 = 4;

/// How long a statement waits for a row that another transaction has locked. The other calls of the statement wait as long.
pub(super) const LOCK_WAIT: Duration = Duration::from_secs(1);

/// The server of one store. `Any` lets the tests of a dialect downcast to its type.
#[async_trait]
pub(in crate::engine::sql) trait Server: Any + Send + Sync {
    /// Returns the size of single statements.
    fn statement_limit(&self) -> Limit;

    /// Returns the size of a transaction.
    fn transaction_limit(&self) -> Limit;

    /// Whether a release that is a single statement hands the name off.
    fn hands_off_in_one(&self) -> bool;

    fn connections(&self) -> &Arc<Connections>;

    /// Returns how many connections there are for calls at most.
    fn most_for_calls(&self) -> usize;

    /// Opens a connection, without its set-up.
    async fn connect(self: Arc<Self>) -> Outcome<Box<dyn Session>>;

    /// Whether other processes notify waiters.
    fn is_notified(&self) -> bool;

    /// Returns the receiver of warnings.
    fn warnings(&self) -> Option<&Warnings>;

    /// Receives notifications for the waiters until the connection breaks. `true`: there have been no waiters for some time.
    async fn receive(self: Arc<Self>, _waiters: &Waiters) -> Outcome<bool> {
        Ok(true)
    }
}

/// An open connection. Dropping it closes it.
///
/// A future of a statement may be dropped only together with the connection.
#[async_trait]
pub(in crate::engine::sql) trait Session: Any + Send + Sync {
    fn connection(&self) -> &Arc<Connection>;

    /// Checks the connection before the statements of a task. `false`: it is known to be closed. On PostgreSQL also discards old plans.
    async fn check_before_use(&mut self) -> bool;

    /// Sends a request without an effect, and waits for its answer.
    async fn ping(&mut self) -> Outcome<()>;

    /// Closes the connection.
    async fn close(self: Box<Self>);

    /// Makes the connection ready for statements. Creates the tables if they are missing.
    async fn set_up(&mut self) -> Outcome<()>;

    /// Returns warnings of what puts locks at risk, such as a setting with which a crash of the server loses committed
    /// transactions.
    async fn warnings(&mut self) -> Outcome<Vec<String>>;

    /// Makes attempts for different names in one statement. MySQL may read the answers with a second one. The store timeout limits each packet.
    async fn attempt(&mut self, attempts: &[Attempt]) -> Outcome<Granted>;

    /// Executes releases and renewals, those of a kind together. The store timeout limits each kind on PostgreSQL, and each packet on MySQL
    /// and MariaDB. `process`: this process.
    async fn change(&mut self, process: &str, changes: &SingleChanges) -> (ReleasedNames, RenewedOwners);

    /// Reads the leases of pages, each sorted by name. The store timeout limits all pages on PostgreSQL, and each packet on MySQL and
    /// MariaDB.
    async fn read(&mut self, pages: &[Page]) -> Outcome<Vec<PageRead>>;

    /// Begins a transaction, locks the rows of the plan in their order, and reads them and their queues. `process`: this process.
    async fn begin(&mut self, process: &str, plan: &Plan) -> Outcome<Ledger>;

    /// Writes the changes of a transaction with its notifications of other processes, and commits it. Returns the tickets of the positions that
    /// were entered, by owner.
    async fn commit(&mut self, process: &str, changes: &Changes) -> Outcome<HashMap<String, u64>>;

    /// Ends a transaction that failed.
    async fn roll_back(&mut self) -> Outcome<()>;

    /// Reads the lease and the queue of each name. `Some`: keeps the positions of this process alive, except those of these owners.
    async fn check(&mut self, process: &str, names: &[StoredName], except: Option<&[OwnerToken]>) -> Outcome<Checked>;

    /// Claims the sweep of this interval. `false`: another process has done that.
    async fn claim_sweep(&mut self) -> Outcome<bool>;

    /// Returns a warning if another program makes all calls slow. MySQL shows that only to privileged users.
    async fn slowness_warning(&mut self) -> Outcome<Option<String>> {
        Ok(None)
    }

    /// Reads some rows after the name `after`, in the order of the names, and removes those of names that have been free for long.
    async fn sweep(&mut self, after: &[u8]) -> Outcome<Swept>;
}

/// The engine of an SQL server.
pub(in crate::engine) type ServerEngine = SqlEngine<Waiters>;

impl ServerEngine {
    /// Connects to the server. Creates the tables if they are missing.
    pub(super) async fn start(server: Arc<dyn Server>, key_prefix: String) -> Result<Arc<Self>> {
        let prefix = Prefix(key_prefix);
        let mut session = open_first(&server).await.map_err(|failure| failure.error("connect"))?;
        if let Some(warnings) = server.warnings() {
            let connection = session.connection().clone();
            // A connection that fails is opened again by the first call.
            let found = connection.within_limit(session.warnings()).await;
            found.into_iter().flatten().for_each(|warning| warnings.warn(warning));
        }
        let connections = server.connections();
        let (check, checks) = mpsc::unbounded_channel();
        let (names, named) = mpsc::unbounded_channel();
        let waiters = Waiters::new(server.clone(), check);
        let pool = Pool::new(server.clone(), session);
        let (transactions, transaction_jobs) = jobs::queue(server.transaction_limit());
        let locked: Arc<LockedNames> = Arc::default();
        let worker = Worker {
            pool: pool.clone(),
            prefix: prefix.clone(),
            waiters: waiters.clone(),
            names: named,
            locked: locked.clone(),
        };
        let single = SingleWorker {
            shared: Shared {
                pool,
                prefix: prefix.clone(),
                waiters: waiters.clone(),
                transactions,
                names,
                locked,
                forwarded: ForwardedOwners::default(),
                queued: QueuedNames::default(),
                timers: Timers::default(),
            },
            checks,
            worker: connections.spawn(worker.run(transaction_jobs)),
        };
        let (jobs, receiver) = jobs::queue(server.statement_limit());
        let single = connections.spawn(single.run(receiver));
        let store = StoreAddress {
            engine: connections.place.engine,
            address: connections.place.address.to_string(),
            prefix: prefix.0,
        };
        let dropped = connections.dropped.clone();
        Ok(SqlEngine::new(store, waiters, jobs, single, dropped))
    }
}
