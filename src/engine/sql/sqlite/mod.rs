//! `sqlite:` one file, shared by every process of the user on this machine.
//!
//! - `file.rs`: opens the file, again where necessary, and creates the schema. `identity.rs`, `peers.rs`: deleted and replaced files.
//! - `writer.rs`: the task that owns the connection, and makes transactions of calls. `jobs.rs`: its queue.
//! - `verbs.rs`: what each verb reads and writes. `statements.rs` and `statements/*.sql`: the statements.
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

use std::borrow::Borrow;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use self::file::File;
use self::jobs::{Job, Reply, Sender, Ticket};
use self::statements::Statements;
use self::verbs::Verbs;
use self::writer::Writer;
use super::config::SqliteConfig;
use crate::engine::{Acquired, Attempts, Engine, Released, Releases, Renewed, Result, Subscription, release_each};
use crate::error::EngineError;
use crate::model::{Claim, Key, LockInfo, OwnerToken, Ttl};

mod error;
mod file;
mod identity;
mod jobs;
mod peers;
mod statements;
#[cfg(test)]
mod tests;
mod verbs;
mod writer;

const NAME: &str = "sqlite";

/// The engine behind `sqlite:` URLs, and the default one.
pub struct SqliteEngine {
    path: std::path::PathBuf,
    verbs: Arc<Verbs>,
    /// The writer task. `None` once closed.
    running: Mutex<Option<Running>>,
}

struct Running {
    jobs: Sender,
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
        let mut file = File::new(config, statements);
        file.connection().await.map_err(|failure| failure.error("connect"))?;
        let (jobs, receiver) = jobs::queue();
        let writer = Writer {
            file,
            verbs: verbs.clone(),
        };
        let writer = tokio::spawn(writer.run(receiver));
        Ok(Arc::new(SqliteEngine {
            path,
            verbs,
            running: Mutex::new(Some(Running { jobs, writer })),
        }))
    }

    /// Sends a job to the writer, and waits for its answer.
    async fn call<T>(&self, op: &'static str, job: impl FnOnce(Reply<T>) -> Job) -> Result<T> {
        let (reply, answer) = Reply::new();
        let job = job(reply);
        // When the engine is closed, the job and its reply are dropped.
        if let Some(running) = &*self.running.lock() {
            running.jobs.send(job);
        } else {
            drop(job);
        }
        answer
            .await
            .unwrap_or_else(|_| Err(EngineError::new(NAME, op, false, "this engine is closed")))
    }

    /// Makes attempts in the order of the list, as one job. `copies`: the claims for the job.
    async fn acquire<C: Borrow<Claim> + Sync>(&self, claims: &[C], copies: Vec<Arc<Claim>>) -> Result<Vec<Acquired>> {
        let guard = AttemptGuard {
            claims,
            copies,
            ticket: Arc::default(),
        };
        self.call("acquire", |reply| {
            Job::Acquire(guard.copies.clone(), guard.ticket.clone(), reply)
        })
        .await
    }

    async fn release_in_one(&self, claims: &[Claim], keep: Duration) -> Result<Vec<Released>> {
        self.call("release", |reply| Job::Release(claims.to_vec(), keep, reply))
            .await
    }
}

/// Guard of a caller that waits for its attempts. Dropping it cancels them if the writer has not started them.
struct AttemptGuard<'a, C: Borrow<Claim>> {
    claims: &'a [C],
    copies: Vec<Arc<Claim>>,
    ticket: Arc<Ticket>,
}

impl<C: Borrow<Claim>> Drop for AttemptGuard<'_, C> {
    fn drop(&mut self) {
        if !self.ticket.cancel() {
            for (claim, copy) in self.claims.iter().zip(&self.copies) {
                claim.borrow().copy_sent_marks(copy);
            }
        }
    }
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
        let copies = vec![Arc::new(claim.clone())];
        let answers = self.acquire(std::slice::from_ref(claim), copies).await?;
        one(answers, "acquire")
    }

    /// # Behavior
    /// Makes all attempts in one transaction. If that fails, makes each in its own.
    async fn try_acquire_in_order(&self, claims: &[Arc<Claim>], answer: &mut Attempts<'_>) {
        match self.acquire(claims, claims.to_vec()).await {
            Ok(answers) => answers
                .into_iter()
                .enumerate()
                .for_each(|(index, acquired)| answer(index, Ok(acquired))),
            Err(_) => {
                // One claim may be the cause: each gets its own answer.
                for (index, claim) in claims.iter().enumerate() {
                    answer(index, self.try_acquire(claim).await);
                }
            }
        }
    }

    async fn renew(&self, claim: &Claim, ttl: Ttl) -> Result<Renewed> {
        self.call("renew", |reply| Job::Renew(claim.clone(), ttl, reply)).await
    }

    async fn transfer(&self, claim: &Claim, to: &OwnerToken) -> Result<Renewed> {
        self.call("transfer", |reply| Job::Transfer(claim.clone(), to.clone(), reply))
            .await
    }

    async fn release(&self, claim: &Claim, keep: Duration) -> Result<Released> {
        let answers = self.release_in_one(std::slice::from_ref(claim), keep).await?;
        one(answers, "release")
    }

    /// # Behavior
    /// Makes all releases in one transaction. If that fails, makes each in its own.
    async fn release_all(&self, claims: &[Claim], answer: &mut Releases<'_>) {
        match self.release_in_one(claims, Duration::ZERO).await {
            Ok(answers) => answers
                .into_iter()
                .enumerate()
                .for_each(|(index, released)| answer(index, Ok(released))),
            Err(_) => release_each(self, claims, answer).await,
        }
    }

    /// # Behavior
    /// The subscription belongs to the claim's owner and to no name: a claim waits for one name at a time. The owner's next waiting
    /// attempt stores the address.
    async fn subscribe(&self, claim: &Claim, _key: &Key) -> Result<Box<dyn Subscription>> {
        Ok(self.verbs.wakeup.subscribe(&claim.owner).await)
    }

    async fn inspect(&self, key: &Key) -> Result<Option<LockInfo>> {
        self.call("inspect", |reply| Job::Inspect(key.clone(), reply)).await
    }

    async fn list(&self, prefix: &str, page_timeout: Duration) -> Result<Vec<LockInfo>> {
        let mut found = Vec::new();
        let mut next = Some(self.verbs.first_page(prefix));
        while let Some(page) = next {
            let answer = self.call("list", |reply| Job::List(page, reply));
            let (leases, after) = timeout(page_timeout, answer)
                .await
                .unwrap_or_else(|_| Err(EngineError::no_answer(NAME, "list", page_timeout)))?;
            found.extend(leases);
            next = after;
        }
        Ok(found)
    }

    async fn force_release(&self, key: &Key) -> Result<bool> {
        self.call("forceRelease", |reply| Job::ForceRelease(key.clone(), reply))
            .await
    }

    async fn close(&self) {
        let running = self.running.lock().take();
        if let Some(Running { jobs, writer }) = running {
            // The writer ends after it has answered the earlier jobs.
            drop(jobs);
            let _ = writer.await;
        }
    }
}

/// Returns the answer of a job with one claim.
fn one<T>(answers: Vec<T>, op: &'static str) -> Result<T> {
    let answer = answers.into_iter().next();
    answer.ok_or_else(|| EngineError::new(NAME, op, false, "the job has no answer"))
}
