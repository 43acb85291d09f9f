//! `sqlite:` one file, shared by every process of the user on this machine.
//!
//! - `file.rs`: opens the file, again where necessary, and creates the schema. `identity.rs`, `peers.rs`: deleted and replaced files.
//! - `writer.rs`: the task that owns the connection, and makes transactions of calls.
//! - `verbs.rs`: what each verb reads and writes. `statements.rs` and `statements/*.sql`: the statements. `rows.rs`: the rows that they return.
//! - `error.rs`: the meaning of the database's errors.
//!
//! # Behavior
//! The file is in WAL mode with `synchronous = NORMAL`. A process that is killed at any point loses nothing that was acknowledged.
//! A power failure may lose the last transactions, but then every process that held a lock there has ended, too. Every change is
//! a transaction that takes the write lock first and then reads the clock. So all calls of all processes have one order, and so
//! have their times. The clock is SQLite's, which is the machine's.
//!
//! No other SQLite library in the same process (better-sqlite3, `node:sqlite`) may open the same file: POSIX drops the
//! locks of a process on a file when any of its descriptors of that file is closed.
//!
//! # Waiters
//! SQLite sends no messages. A release reads the address of the first waiter in its transaction, and sends a datagram after the commit
//! (`sql/udp_wakeup.rs`). Containers that share a volume have separate loopback interfaces. So while calls of an engine wait, its writer
//! also reads `PRAGMA data_version` every 50 ms. If another connection has committed, it reads which of these calls are the first for a
//! free name (`next_waiters.sql`), and wakes them. It spends at most a tenth of its time on this. Both statements only read: if all waiters
//! made an attempt after each commit, these attempts would be commits again.
//!
//! A shared name has a row for each share, and none for itself. A release wakes its first waiter, whose grant wakes the next one if
//! that one fits, too.
//!
//! # Files
//! `docs/proofs/sqlite-files.md` has the rule for deleted and replaced files.

use std::sync::Arc;

use self::file::File;
use self::statements::Statements;
use self::verbs::Verbs;
use self::writer::Writer;
use super::calls::{SqlEngine, StoreAddress};
use super::config::SqliteConfig;
use super::jobs::{self, BATCH, Limit};
use super::udp_wakeup::UdpWakeup;
use crate::engine::Result;
use crate::event_loop::Task;

mod error;
mod file;
mod identity;
mod peers;
mod rows;
mod statements;
#[cfg(test)]
mod tests;
mod verbs;
mod writer;

const NAME: &str = "sqlite";

/// The engine behind `sqlite:` URLs, and the default one.
pub(in crate::engine) type SqliteEngine = SqlEngine<UdpWakeup>;

impl SqliteEngine {
    /// Opens the store. Creates its folder, its file and its tables if they are missing.
    ///
    /// # Behavior
    /// Any number of processes may connect at the same time. One thread of the driver and one task on the current runtime
    /// live until the engine is closed or dropped.
    ///
    /// # Errors
    /// Retryable when other processes kept the file busy for the whole store timeout. Not retryable when the path cannot be
    /// written, the file is not a database, or it has tables of the same name with other columns.
    pub async fn connect(config: SqliteConfig) -> Result<Arc<Self>> {
        let path = config.path().to_owned();
        let statements = Arc::new(Statements::new(&config.table));
        let verbs = Arc::new(Verbs {
            statements: statements.clone(),
            wakeup: Arc::default(),
            prefix: config.key_prefix.clone(),
        });
        let mut file = File::new(config, statements, verbs.wakeup.clone());
        file.connection().await.map_err(|failure| failure.error("connect"))?;
        let (jobs, receiver) = jobs::queue(Limit::claims(BATCH));
        let writer = Writer {
            file,
            verbs: verbs.clone(),
            version: None,
        };
        let writer = Task::spawn(None, writer.run(receiver));
        let store = StoreAddress {
            engine: NAME,
            address: path.display().to_string(),
            prefix: verbs.prefix.clone(),
        };
        Ok(SqlEngine::new(
            store,
            verbs.wakeup.clone(),
            jobs,
            writer,
            Arc::default(),
        ))
    }
}
