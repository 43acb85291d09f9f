//! The engine of all stores of this folder: its calls are jobs for the task that uses its connections.

use std::borrow::Borrow;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use tokio::time::timeout;

use super::Page;
use super::dropped_calls::DroppedCalls;
use super::jobs::{Job, Reply, Sender, StartState};
use crate::engine::{Acquired, Attempts, Description, Engine, Released, Releases, Renewed, Result, Subscription};
use crate::error::EngineError;
use crate::event_loop::Task;
use crate::model::{Claim, Key, LockInfo, OwnerToken, Ttl};
use crate::stall_detector::StallDetector;

/// How the waiters of an engine are woken.
#[async_trait]
pub(in crate::engine) trait Wakeup: Send + Sync {
    /// As [`Engine::watch_event_loop`].
    fn watch_event_loop(&self, _detector: &Arc<StallDetector>) {}

    /// Subscribes for a claim, which waits for one name at a time.
    async fn subscribe(&self, claim: &Claim) -> Box<dyn Subscription>;

    /// Ends its tasks.
    fn close(&self) {}
}

/// The engine of a database. Its task lives until it is closed or dropped.
pub(in crate::engine) struct SqlEngine<W: Wakeup> {
    store: StoreAddress,
    pub(super) waiters: Arc<W>,
    /// The task. `None` once closed.
    running: Mutex<Option<Running>>,
    dropped: Arc<DroppedCalls>,
}

/// The engine's name, the address, and the prefix of the locks.
#[derive(Debug)]
pub(super) struct StoreAddress {
    pub engine: &'static str,
    pub address: String,
    /// The prefix of every name.
    pub prefix: String,
}

impl<W: Wakeup> fmt::Debug for SqlEngine<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.store.fmt(f)
    }
}

impl<W: Wakeup> Drop for SqlEngine<W> {
    fn drop(&mut self) {
        self.waiters.close();
    }
}

struct Running {
    jobs: Sender,
    task: Task,
}

/// Guard of a caller that waits for its attempts. Dropping it cancels them if the task has not started them.
struct AttemptGuard<'a, C: Borrow<Claim>> {
    claims: &'a [C],
    copies: Vec<Arc<Claim>>,
    start_state: Arc<StartState>,
}

impl<C: Borrow<Claim>> Drop for AttemptGuard<'_, C> {
    fn drop(&mut self) {
        if !self.start_state.cancel() {
            for (claim, copy) in self.claims.iter().zip(&self.copies) {
                claim.borrow().copy_sent_marks(copy);
            }
        }
    }
}

impl<W: Wakeup> SqlEngine<W> {
    /// Creates an engine whose jobs `task` executes.
    pub(super) fn new(
        store: StoreAddress,
        waiters: Arc<W>,
        jobs: Sender,
        task: Task,
        dropped: Arc<DroppedCalls>,
    ) -> Arc<Self> {
        Arc::new(SqlEngine {
            store,
            waiters,
            running: Mutex::new(Some(Running { jobs, task })),
            dropped,
        })
    }

    /// Sends a job, and waits for its answer.
    async fn call<T>(&self, op: &'static str, job: impl FnOnce(Reply<T>) -> Job) -> Result<T> {
        let (reply, answer) = Reply::new();
        let job = job(reply);
        // When the engine is closed, or a step of its task panics, the job and its reply are dropped.
        if let Some(running) = &*self.running.lock() {
            running.jobs.send(job);
        } else {
            drop(job);
        }
        let waiting = self.dropped.wait();
        let answer = answer.await;
        waiting.answered();
        answer.unwrap_or_else(|_| {
            let (is_open, text) = match &*self.running.lock() {
                Some(_) => (true, "a bug in holdfast or in its driver: the call panicked"),
                None => (false, "this engine is closed"),
            };
            Err(EngineError::new(self.store.engine, op, is_open, text))
        })
    }

    /// Makes attempts in the order of the list, as one job. `copies`: the claims for the job.
    async fn acquire<C: Borrow<Claim> + Sync>(&self, claims: &[C], copies: Vec<Arc<Claim>>) -> Result<Vec<Acquired>> {
        let guard = AttemptGuard {
            claims,
            copies,
            start_state: Arc::default(),
        };
        self.call("acquire", |reply| {
            Job::Acquire(guard.copies.clone(), guard.start_state.clone(), reply)
        })
        .await
    }

    async fn release_in_one(&self, claims: &[Claim], keep: Duration) -> Result<Vec<Released>> {
        self.call("release", |reply| Job::Release(claims.to_vec(), keep, reply))
            .await
    }

    /// Returns the answer of a job with one claim.
    fn one<T>(&self, answers: Vec<T>, op: &'static str) -> Result<T> {
        let answer = answers.into_iter().next();
        answer.ok_or_else(|| EngineError::new(self.store.engine, op, false, "the job has no answer"))
    }
}

#[async_trait]
impl<W: Wakeup> Engine for SqlEngine<W> {
    fn describe(&self) -> Description {
        Description::new(self.store.engine, true)
    }

    fn address(&self) -> String {
        self.store.address.clone()
    }

    fn watch_event_loop(&self, detector: &Arc<StallDetector>) {
        self.waiters.watch_event_loop(detector);
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Acquired> {
        let copies = vec![Arc::new(claim.clone())];
        let answers = self.acquire(std::slice::from_ref(claim), copies).await?;
        self.one(answers, "acquire")
    }

    /// Makes all attempts in one transaction. If that fails, makes each in its own. After a retryable error of a claim of a single name the
    /// later ones get the same error and are not made: they would enter the queue before it.
    async fn try_acquire_in_order(&self, claims: &[Arc<Claim>], answer: &mut Attempts<'_>) {
        match self.acquire(claims, claims.to_vec()).await {
            Ok(answers) => answers
                .into_iter()
                .enumerate()
                .for_each(|(index, acquired)| answer(index, Ok(acquired))),
            Err(_) => {
                // One claim may be the cause: each gets its own answer.
                let mut failed: Option<EngineError> = None;
                for (index, claim) in claims.iter().enumerate() {
                    let acquired = match &failed {
                        Some(error) => Err(error.copy()),
                        None => self.try_acquire(claim).await,
                    };
                    if let Err(error) = &acquired
                        && error.retryable
                        && claim.keys().len() == 1
                    {
                        failed = Some(error.copy());
                    }
                    answer(index, acquired);
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
        self.one(answers, "release")
    }

    /// Makes all releases in one transaction. If that fails, makes each in its own.
    async fn release_all(&self, claims: &[Claim], answer: &mut Releases<'_>) {
        let released = self.release_in_one(claims, Duration::ZERO).await;
        match released {
            Ok(answers) => answers
                .into_iter()
                .enumerate()
                .for_each(|(index, released)| answer(index, Ok(released))),
            Err(_) => {
                let each = claims.iter().map(|claim| self.release(claim, Duration::ZERO));
                let answers = futures_util::future::join_all(each).await;
                answers
                    .into_iter()
                    .enumerate()
                    .for_each(|(index, released)| answer(index, released));
            }
        }
    }

    async fn subscribe(&self, claim: &Claim, _key: &Key) -> Result<Box<dyn Subscription>> {
        Ok(self.waiters.subscribe(claim).await)
    }

    async fn inspect(&self, key: &Key) -> Result<Option<LockInfo>> {
        self.call("inspect", |reply| Job::Inspect(key.clone(), reply)).await
    }

    async fn list(&self, prefix: &str, page_timeout: Duration) -> Result<Vec<LockInfo>> {
        let StoreAddress {
            engine,
            address,
            prefix: of_all,
        } = &self.store;
        let mut found = Vec::new();
        let mut next = Some(Page::first(of_all, prefix));
        while let Some(page) = next {
            let answer = self.call("list", |reply| Job::List(page, reply));
            let (leases, after) = timeout(page_timeout, answer)
                .await
                .unwrap_or_else(|_| Err(EngineError::no_answer(engine, address, "list", page_timeout)))?;
            found.extend(leases);
            next = after;
        }
        Ok(found)
    }

    async fn force_release(&self, key: &Key) -> Result<bool> {
        self.call("forceRelease", |reply| Job::ForceRelease(key.clone(), reply))
            .await
    }

    /// Ends the task after it has answered the earlier jobs.
    async fn close(&self) {
        self.waiters.close();
        let running = self.running.lock().take();
        if let Some(Running { jobs, task }) = running {
            drop(jobs);
            task.ended().await;
        }
    }
}
