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

use std::any::Any;
use std::collections::HashMap;
use std::fmt;
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
use super::calls::{Calls, JobEngine};
use super::jobs::{self, Limit};
use crate::engine::core::ledger::{Changes, Ledger, StoredName};
use crate::engine::sql::failure::Failure;
use crate::engine::{Result, Subscription, Warnings};
use crate::model::{Claim, OwnerToken};
use crate::stall_detector::StallDetector;

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
pub(in crate::engine) struct ServerEngine {
    pub(super) server: Arc<dyn Server>,
    pub(super) waiters: Arc<Waiters>,
    calls: Calls,
}

impl fmt::Debug for ServerEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServerEngine")
            .field("engine", &self.server.connections().place.engine)
            .field("server", &self.server.connections().place.address)
            .finish_non_exhaustive()
    }
}

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
        let (place, dropped) = (connections.place.clone(), connections.dropped.clone());
        let calls = Calls::new(place, prefix.0, jobs, single, dropped);
        Ok(Arc::new(ServerEngine { server, waiters, calls }))
    }
}

#[async_trait]
impl JobEngine for ServerEngine {
    fn calls(&self) -> &Calls {
        &self.calls
    }

    async fn subscription(&self, claim: &Claim) -> Box<dyn Subscription> {
        Box::new(self.waiters.subscribe(claim))
    }

    fn watch(&self, detector: &Arc<StallDetector>) {
        self.waiters.known.watch_event_loop(detector);
    }

    fn end(&self) {
        self.waiters.close();
    }
}

impl Drop for ServerEngine {
    fn drop(&mut self) {
        self.waiters.close();
    }
}
