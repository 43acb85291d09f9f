//! The engine of all stores of this folder: its calls are jobs for the task that uses its connections.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use tokio::time::timeout;

use super::Page;
use super::dropped_calls::DroppedCalls;
use super::jobs::{Job, PageOfLocks, Reply, Sender, StartState};
use crate::engine::core::ledger::stored_name;
use crate::engine::{
    Acquired, Answers, Description, DetectorSlot, Engine, EngineExt, Read, Released, Renewal, Renewed, Result,
    Subscription, answer_each,
};
use crate::error::EngineError;
use crate::event_loop::Task;
use crate::model::{Claim, Key, LockInfo, OwnerToken};

/// How the waiters of an engine are woken.
#[async_trait]
pub(in crate::engine) trait Wakeup: Send + Sync {
    /// As [`Description::detector`].
    fn detector(&self) -> Option<DetectorSlot> {
        None
    }

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
struct AttemptGuard(Arc<StartState>);

impl Drop for AttemptGuard {
    fn drop(&mut self) {
        self.0.cancel();
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

    /// Makes attempts in the order of the list, as one job.
    async fn acquire(&self, claims: &[&Claim]) -> Result<Vec<Acquired>> {
        let guard = AttemptGuard(Arc::default());
        let copies = claims.iter().map(|claim| Arc::new((*claim).clone())).collect();
        self.call("acquire", |reply| Job::Acquire(copies, guard.0.clone(), reply))
            .await
    }

    /// Releases claims as one job.
    async fn release(&self, claims: &[&Claim], keep: Duration) -> Result<Vec<Released>> {
        let copies = claims.iter().map(|claim| (*claim).clone()).collect();
        self.call("release", |reply| Job::Release(copies, keep, reply)).await
    }
}

#[async_trait]
impl<W: Wakeup> Engine for SqlEngine<W> {
    fn describe(&self) -> Description {
        Description {
            address: self.store.address.clone(),
            detector: self.waiters.detector(),
            has_shares: true,
            ..Description::new(self.store.engine, true)
        }
    }

    /// Makes all attempts in one transaction. If that fails, makes each in its own. After a retryable error of a claim of a single name the
    /// later ones get the same error and are not made: they would enter the queue before it.
    async fn try_acquire_all(&self, claims: &[&Claim], answer: &mut Answers<'_, Acquired>) {
        match self.acquire(claims).await {
            Ok(answers) => answer_all(answers.into_iter().map(Ok), answer),
            Err(error) if claims.len() == 1 => answer(0, Err(error)),
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

    async fn renew_all(&self, renewals: &[Renewal<'_>], answer: &mut Answers<'_, Renewed>) {
        let renew = |Renewal { claim, ttl }: &Renewal<'_>| {
            let (claim, ttl) = ((*claim).clone(), *ttl);
            self.call("renew", move |reply| Job::Renew(claim, ttl, reply))
        };
        answer_each(renewals.iter().map(renew), answer).await;
    }

    async fn transfer(&self, claim: &Claim, to: &OwnerToken) -> Result<Renewed> {
        self.call("transfer", |reply| Job::Transfer(claim.clone(), to.clone(), reply))
            .await
    }

    /// Makes all releases in one transaction. If that fails, makes each in its own.
    async fn release_all(&self, claims: &[&Claim], keep: Duration, answer: &mut Answers<'_, Released>) {
        match self.release(claims, keep).await {
            Ok(answers) => answer_all(answers.into_iter().map(Ok), answer),
            Err(error) if claims.len() == 1 => answer(0, Err(error)),
            Err(_) => answer_each(claims.iter().map(|claim| EngineExt::release(self, claim, keep)), answer).await,
        }
    }

    async fn subscribe(&self, claim: &Claim, _key: &Key) -> Result<Box<dyn Subscription>> {
        Ok(self.waiters.subscribe(claim).await)
    }

    async fn read(&self, what: Read<'_>) -> Result<Vec<LockInfo>> {
        let StoreAddress {
            engine,
            address,
            prefix: of_all,
        } = &self.store;
        let list: fn(Page, Reply<PageOfLocks>) -> Job = Job::List;
        let (op, job, first, is_shared, page_timeout) = match what {
            Read::Prefix { prefix, page_timeout } => ("list", list, Page::first(of_all, prefix), false, page_timeout),
            Read::Name { key, .. } => {
                let first = Page::of_name(stored_name(of_all, key), key.is_shared());
                ("inspect", Job::Inspect as _, first, key.is_shared(), Duration::MAX)
            }
        };
        let mut found = Vec::new();
        let mut next = Some(first);
        while let Some(page) = next {
            let answer = self.call(op, |reply| job(page, reply));
            let (leases, after) = timeout(page_timeout, answer)
                .await
                .unwrap_or_else(|_| Err(EngineError::no_answer(engine, address, op, page_timeout)))?;
            // Another store in the same tables may have shared names whose prefix begins with this one.
            found.extend(leases.into_iter().filter(|info| info.share.is_some() == is_shared));
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

fn answer_all<T>(answers: impl Iterator<Item = Result<T>>, answer: &mut Answers<'_, T>) {
    answers.enumerate().for_each(|(index, outcome)| answer(index, outcome));
}
