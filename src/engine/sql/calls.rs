//! The calls of an engine: jobs for the task that uses its connection.

use std::borrow::Borrow;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::timeout;

use super::Page;
use super::dropped_calls::DroppedCalls;
use super::jobs::{Job, Reply, Sender, StartState};
use crate::engine::{Acquired, Attempts, Released, Releases, Renewed, Result};
use crate::error::EngineError;
use crate::event_loop::Task;
use crate::model::{Claim, Key, LockInfo, OwnerToken, Ttl};

/// The sending side of an engine. The methods are those of [`crate::engine::Engine`].
pub(super) struct Calls {
    engine: &'static str,
    /// The task. `None` once closed.
    running: Mutex<Option<Running>>,
    dropped: Arc<DroppedCalls>,
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

impl Calls {
    /// Creates the calls that `task` executes.
    pub(super) fn new(engine: &'static str, jobs: Sender, task: Task, dropped: Arc<DroppedCalls>) -> Self {
        Calls {
            engine,
            running: Mutex::new(Some(Running { jobs, task })),
            dropped,
        }
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
            Err(EngineError::new(self.engine, op, is_open, text))
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

    pub(super) async fn try_acquire(&self, claim: &Claim) -> Result<Acquired> {
        let copies = vec![Arc::new(claim.clone())];
        let answers = self.acquire(std::slice::from_ref(claim), copies).await?;
        self.one(answers, "acquire")
    }

    /// # Behavior
    /// Makes all attempts in one transaction. If that fails, makes each in its own.
    pub(super) async fn try_acquire_in_order(&self, claims: &[Arc<Claim>], answer: &mut Attempts<'_>) {
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

    pub(super) async fn renew(&self, claim: &Claim, ttl: Ttl) -> Result<Renewed> {
        self.call("renew", |reply| Job::Renew(claim.clone(), ttl, reply)).await
    }

    pub(super) async fn transfer(&self, claim: &Claim, to: &OwnerToken) -> Result<Renewed> {
        self.call("transfer", |reply| Job::Transfer(claim.clone(), to.clone(), reply))
            .await
    }

    pub(super) async fn release(&self, claim: &Claim, keep: Duration) -> Result<Released> {
        let answers = self.release_in_one(std::slice::from_ref(claim), keep).await?;
        self.one(answers, "release")
    }

    /// # Behavior
    /// Makes all releases in one transaction. If that fails, makes each in its own.
    pub(super) async fn release_all(&self, claims: &[Claim], answer: &mut Releases<'_>) {
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

    pub(super) async fn inspect(&self, key: &Key) -> Result<Option<LockInfo>> {
        self.call("inspect", |reply| Job::Inspect(key.clone(), reply)).await
    }

    /// `address`: the store's, for errors.
    pub(super) async fn list(&self, first: Page, page_timeout: Duration, address: &str) -> Result<Vec<LockInfo>> {
        let mut found = Vec::new();
        let mut next = Some(first);
        while let Some(page) = next {
            let answer = self.call("list", |reply| Job::List(page, reply));
            let (leases, after) = timeout(page_timeout, answer)
                .await
                .unwrap_or_else(|_| Err(EngineError::no_answer(self.engine, address, "list", page_timeout)))?;
            found.extend(leases);
            next = after;
        }
        Ok(found)
    }

    pub(super) async fn force_release(&self, key: &Key) -> Result<bool> {
        self.call("forceRelease", |reply| Job::ForceRelease(key.clone(), reply))
            .await
    }

    /// Ends the task after it has answered the earlier jobs.
    pub(super) async fn close(&self) {
        let running = self.running.lock().take();
        if let Some(Running { jobs, task }) = running {
            drop(jobs);
            task.ended().await;
        }
    }

    /// Returns the answer of a job with one claim.
    fn one<T>(&self, answers: Vec<T>, op: &'static str) -> Result<T> {
        let answer = answers.into_iter().next();
        answer.ok_or_else(|| EngineError::new(self.engine, op, false, "the job has no answer"))
    }
}
