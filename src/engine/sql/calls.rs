//! The calls of an engine: jobs for the task that uses its connection.

use std::borrow::Borrow;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use tokio::time::timeout;

use super::Page;
use super::dropped_calls::DroppedCalls;
use super::failure::Place;
use super::jobs::{Job, Reply, Sender, StartState};
use crate::engine::{Acquired, Attempts, Engine, Released, Releases, Renewed, Result, Subscription};
use crate::error::EngineError;
use crate::event_loop::Task;
use crate::model::{Claim, Key, LockInfo, OwnerToken, Ttl};
use crate::stall_detector::StallDetector;

/// An engine whose calls are jobs of a task.
#[async_trait]
pub(super) trait JobEngine: Send + Sync {
    fn calls(&self) -> &Calls;

    /// Subscribes to notifications for the owner of `claim`, whatever the name: a claim waits for one name at a time.
    async fn subscription(&self, claim: &Claim) -> Box<dyn Subscription>;

    /// See [`Engine::watch_event_loop`].
    fn watch(&self, _detector: &Arc<StallDetector>) {}

    /// Ends what does not belong to calls.
    fn end(&self) {}
}

/// The sending side of an engine.
pub(super) struct Calls {
    place: Place,
    /// The prefix of the stored names.
    prefix: String,
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
    pub(super) fn new(place: Place, prefix: String, jobs: Sender, task: Task, dropped: Arc<DroppedCalls>) -> Self {
        Calls {
            place,
            prefix,
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
            Err(EngineError::new(self.place.engine, op, is_open, text))
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
        answer.ok_or_else(|| EngineError::new(self.place.engine, op, false, "the job has no answer"))
    }
}

#[async_trait]
impl<E: JobEngine + fmt::Debug> Engine for E {
    fn name(&self) -> &'static str {
        self.calls().place.engine
    }

    fn address(&self) -> String {
        self.calls().place.address.to_string()
    }

    fn ordered(&self) -> bool {
        true
    }

    fn watch_event_loop(&self, detector: &Arc<StallDetector>) {
        self.watch(detector);
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Acquired> {
        let copies = vec![Arc::new(claim.clone())];
        let answers = self.calls().acquire(std::slice::from_ref(claim), copies).await?;
        self.calls().one(answers, "acquire")
    }

    /// # Behavior
    /// Makes all attempts in one transaction. If that fails, makes each in its own.
    async fn try_acquire_in_order(&self, claims: &[Arc<Claim>], answer: &mut Attempts<'_>) {
        match self.calls().acquire(claims, claims.to_vec()).await {
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
        self.calls()
            .call("renew", |reply| Job::Renew(claim.clone(), ttl, reply))
            .await
    }

    async fn transfer(&self, claim: &Claim, to: &OwnerToken) -> Result<Renewed> {
        self.calls()
            .call("transfer", |reply| Job::Transfer(claim.clone(), to.clone(), reply))
            .await
    }

    async fn release(&self, claim: &Claim, keep: Duration) -> Result<Released> {
        let answers = self.calls().release_in_one(std::slice::from_ref(claim), keep).await?;
        self.calls().one(answers, "release")
    }

    /// # Behavior
    /// Makes all releases in one transaction. If that fails, makes each in its own.
    async fn release_all(&self, claims: &[Claim], answer: &mut Releases<'_>) {
        let released = self.calls().release_in_one(claims, Duration::ZERO).await;
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
        Ok(self.subscription(claim).await)
    }

    async fn inspect(&self, key: &Key) -> Result<Option<LockInfo>> {
        self.calls()
            .call("inspect", |reply| Job::Inspect(key.clone(), reply))
            .await
    }

    async fn list(&self, prefix: &str, page_timeout: Duration) -> Result<Vec<LockInfo>> {
        let mut found = Vec::new();
        let mut next = Some(Page::first(&self.calls().prefix, prefix));
        while let Some(page) = next {
            let answer = self.calls().call("list", |reply| Job::List(page, reply));
            let (leases, after) = timeout(page_timeout, answer)
                .await
                .unwrap_or_else(|_| Err(self.no_answer("list", page_timeout)))?;
            found.extend(leases);
            next = after;
        }
        Ok(found)
    }

    async fn force_release(&self, key: &Key) -> Result<bool> {
        self.calls()
            .call("forceRelease", |reply| Job::ForceRelease(key.clone(), reply))
            .await
    }

    /// # Behavior
    /// Ends the task after it has answered the earlier jobs.
    async fn close(&self) {
        self.end();
        let running = self.calls().running.lock().take();
        if let Some(Running { jobs, task }) = running {
            drop(jobs);
            task.ended().await;
        }
    }
}
