//! `sqlite:` one file, shared by every process of the user on this machine.
//!
//! - `file.rs`: the file, opened and re-opened; the schema.
//! - `writer.rs`: the task that owns the connection, and puts calls into transactions.
//! - `verbs.rs`: what each verb reads and writes.
//! - `statements.rs` and `*.sql`: the statements.
//! - `failure.rs`: what the database's errors mean.
//!
//! # Behavior
//! The file is in WAL mode with `synchronous = NORMAL`: a process that is killed anywhere loses nothing that was
//! acknowledged; a power failure may undo the last moments, but then every process that held a lock there is gone, too.
//! Every change is a transaction that takes the write lock first and reads the clock after it, so that all calls of all
//! processes are in one order, and their times, too. The clock is SQLite's own, that is the machine's.
//!
//! No other SQLite library in the same process (better-sqlite3, `node:sqlite`) may open the same file: POSIX drops the
//! locks that a process has on a file when any of its descriptors of that file is closed.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

use self::file::File;
use self::statements::Statements;
use self::verbs::Verbs;
use self::writer::{Job, Reply, Writer};
use super::config::SqliteConfig;
use super::wake::Wakes;
use crate::engine::{Acquired, Engine, Released, Renewed, Result, Subscription};
use crate::error::EngineError;
use crate::model::{Claim, Key, LockInfo, OwnerToken, Ttl};

mod failure;
mod file;
mod statements;
#[cfg(test)]
mod tests;
mod verbs;
mod writer;

const NAME: &str = "sqlite";

/// The engine behind `sqlite:` URLs, and behind no URL at all.
pub struct SqliteEngine {
    path: std::path::PathBuf,
    wakes: Arc<Wakes>,
    /// The way to the writer. `None` once closed.
    running: Mutex<Option<Running>>,
}

struct Running {
    calls: mpsc::UnboundedSender<Job>,
    writer: JoinHandle<()>,
}

impl fmt::Debug for SqliteEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqliteEngine")
            .field("path", &self.path)
            .finish_non_exhaustive()
    }
}

impl SqliteEngine {
    /// Opens the store, and makes it when it is missing: its folder, its file and its tables.
    ///
    /// # Behavior
    /// Any number of processes may do so at the same time. One thread of the driver and one task on the current runtime
    /// live until the engine is closed or dropped.
    ///
    /// # Errors
    /// Retryable when other processes kept the file busy for all of the store's time-out; not retryable when the path
    /// cannot be written, or what is there is no database, or has tables of the same name with other columns.
    pub async fn connect(config: SqliteConfig) -> Result<Arc<Self>> {
        let path = config.path().to_owned();
        let wakes = Arc::new(Wakes::default());
        let statements = Arc::new(Statements::new(&config.table));
        let verbs = Verbs {
            statements: statements.clone(),
            wakes: wakes.clone(),
            prefix: config.key_prefix.clone(),
        };
        let mut file = File::new(config, statements);
        file.connection().await.map_err(|failure| failure.error("connect"))?;
        let (calls, receiver) = mpsc::unbounded_channel();
        let writer = tokio::spawn(
            Writer {
                file,
                verbs: Arc::new(verbs),
            }
            .run(receiver),
        );
        Ok(Arc::new(SqliteEngine {
            path,
            wakes,
            running: Mutex::new(Some(Running { calls, writer })),
        }))
    }

    /// Hands a call to the writer, and waits for its answer.
    async fn call<T>(&self, op: &'static str, job: impl FnOnce(Reply<T>) -> Job) -> Result<T> {
        let (reply, answer) = Reply::new();
        self.send(job(reply));
        wait_for(op, answer).await
    }

    /// When the engine is closed, the job is dropped, and with it the sender of its answer.
    fn send(&self, job: Job) {
        if let Some(running) = &*self.running.lock().unwrap_or_else(PoisonError::into_inner) {
            let _ = running.calls.send(job);
        }
    }
}

async fn wait_for<T>(op: &'static str, answer: oneshot::Receiver<Result<T>>) -> Result<T> {
    answer
        .await
        .unwrap_or_else(|_| Err(EngineError::new(NAME, op, false, "this engine is closed")))
}

#[async_trait]
impl Engine for SqliteEngine {
    fn name(&self) -> &'static str {
        NAME
    }

    fn ordered(&self) -> bool {
        true
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Acquired> {
        self.call("acquire", |reply| Job::TryAcquire(claim.clone(), reply))
            .await
    }

    async fn renew(&self, claim: &Claim, ttl: Ttl) -> Result<Renewed> {
        self.call("renew", |reply| Job::Renew(claim.clone(), ttl, reply)).await
    }

    async fn transfer(&self, claim: &Claim, to: &OwnerToken) -> Result<Renewed> {
        self.call("transfer", |reply| Job::Transfer(claim.clone(), to.clone(), reply))
            .await
    }

    async fn release(&self, claim: &Claim, keep: Duration) -> Result<Released> {
        self.call("release", |reply| Job::Release(claim.clone(), keep, reply))
            .await
    }

    /// # Behavior
    /// The subscription is of the claim's owner, whatever the name: a claim waits for one name at a time. Its address
    /// gets into the store with the next waiting try.
    async fn subscribe(&self, claim: &Claim, _key: &Key) -> Result<Box<dyn Subscription>> {
        Ok(self.wakes.subscribe(&claim.owner).await)
    }

    async fn inspect(&self, key: &Key) -> Result<Option<LockInfo>> {
        self.call("inspect", |reply| Job::Inspect(key.clone(), reply)).await
    }

    async fn list(&self, prefix: &str, _page_timeout: Duration) -> Result<Vec<LockInfo>> {
        self.call("list", |reply| Job::List(prefix.to_owned(), reply)).await
    }

    async fn force_release(&self, key: &Key) -> Result<bool> {
        self.call("forceRelease", |reply| Job::ForceRelease(key.clone(), reply))
            .await
    }

    async fn close(&self) {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(Running { calls, writer }) = running {
            // The writer ends once it has answered what was sent before.
            drop(calls);
            let _ = writer.await;
        }
    }
}
