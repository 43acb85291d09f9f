//! The task of the transactions.
//!
//! A call is a job for it and an answer, so that a dropped caller never leaves an incomplete transaction. Jobs that wait at the
//! same time share a transaction. `sql/jobs.rs` has their order.
//!
//! A transaction that finds a locked row ends after [`LOCK_WAIT`](super::LOCK_WAIT). The jobs with locked rows then wait until these are
//! unlocked, which is read every [`RETRY`], within the store timeout. The others are executed again without them. Some locks cannot be
//! read: those of rows that are not committed, and of gaps between rows. Jobs that may have found one are executed alone: each in a
//! transaction of its own, in which an attempt waits only briefly for a lock, until [`RETRY`] has passed. The remaining ones are executed
//! with the next retry.

use std::collections::{HashSet, VecDeque};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};

use super::pool::Pool;
use super::transaction::{CheckedNames, Plan, Prefix, transact};
use super::waiters::Waiters;
use super::{BRIEF_LOCK_WAIT, Outcome};
use crate::engine::core::ledger::StoredName;
use crate::engine::sql::failure::{Failure, Kind};
use crate::engine::sql::jobs::{Job, Receiver};
use crate::event_loop::unless_it_panics;
use crate::model::Key;

/// How often the task reads which rows are still locked.
const RETRY: Duration = Duration::from_millis(100);

/// The connections, and what the calls need.
pub(super) struct Worker {
    pub pool: Arc<Pool>,
    pub prefix: Prefix,
    pub waiters: Arc<Waiters>,
    pub names: mpsc::UnboundedReceiver<CheckedNames>,
    /// Jobs that wait for a locked row, and later jobs that must follow one of them, in the order of their arrival.
    pub waiting: VecDeque<WaitingJob>,
    pub locked: Arc<LockedNames>,
    /// The last failure because of a locked row.
    pub failure: Option<Failure>,
}

/// The names whose rows another transaction had locked at the last reading. Single statements leave attempts for these names to the
/// transactions.
#[derive(Default)]
pub(super) struct LockedNames(Mutex<HashSet<StoredName>>);

impl LockedNames {
    pub(super) fn is_empty(&self) -> bool {
        self.0.lock().is_empty()
    }

    pub(super) fn contains(&self, name: &StoredName) -> bool {
        self.0.lock().contains(name)
    }

    fn all(&self) -> Vec<StoredName> {
        self.0.lock().iter().cloned().collect()
    }

    fn add(&self, names: Vec<StoredName>) {
        self.0.lock().extend(names);
    }

    fn replace(&self, names: Vec<StoredName>) {
        *self.0.lock() = names.into_iter().collect();
    }
}

/// A job, and since when it has been executed or waited.
pub(super) struct WaitingJob {
    job: Job,
    since: Instant,
    /// Whether it is executed alone: it may have found a lock that cannot be read.
    is_alone: bool,
}

impl WaitingJob {
    fn new(job: Job, since: Instant) -> Self {
        WaitingJob {
            job,
            since,
            is_alone: false,
        }
    }

    fn is_attempt(&self) -> bool {
        matches!(self.job, Job::Acquire(..))
    }
}

/// What the task executes next.
enum Work {
    Names(CheckedNames),
    /// The next batch.
    Jobs,
    /// There are no more jobs.
    End,
}

async fn next(names: &mut mpsc::UnboundedReceiver<CheckedNames>, jobs: &mut Receiver, batch: &mut Vec<Job>) -> Work {
    tokio::select! {
        Some(names) = names.recv() => Work::Names(names),
        is_batch = jobs.next(batch) => if is_batch { Work::Jobs } else { Work::End },
    }
}

impl Worker {
    /// Executes jobs until the last sender is gone, then closes the connection.
    pub(super) async fn run(mut self, mut jobs: Receiver) {
        let mut batch = Vec::new();
        let mut is_closed = false;
        let mut retry_at = Instant::now();
        while !is_closed || !self.waiting.is_empty() {
            let finds_locked = !self.waiting.is_empty() || !self.locked.is_empty();
            let work = tokio::select! {
                biased;
                () = sleep_until(retry_at), if finds_locked => None,
                work = next(&mut self.names, &mut jobs, &mut batch), if !is_closed => Some(work),
            };
            let step = async {
                match work {
                    None => {
                        let has_more = self.retry().await;
                        retry_at = Instant::now() + if has_more { Duration::from_millis(1) } else { RETRY };
                    }
                    Some(Work::Names(names)) => self.hand_off(names).await,
                    Some(Work::Jobs) => {
                        let since = Instant::now();
                        let jobs = batch.drain(..).map(|job| WaitingJob::new(job, since));
                        let ready = self.park_blocked(jobs.collect());
                        self.execute(ready).await;
                    }
                    Some(Work::End) => is_closed = true,
                }
            };
            // A panic closes the connection in use.
            _ = unless_it_panics(pin!(step)).await;
        }
    }

    /// Executes jobs. Those with a locked row wait.
    async fn execute(&mut self, batch: Vec<WaitingJob>) {
        // While an attempt waits for a lock that cannot be read, the others may find the same lock.
        let has_alone = self.waiting.iter().chain(&batch).any(|job| job.is_alone);
        let (alone, together) = batch
            .into_iter()
            .partition(|job| job.is_alone || has_alone && job.is_attempt());
        let unclear = self.execute_together(together).await;
        self.execute_alone(unclear).await;
        self.execute_alone(alone).await;
    }

    /// Executes jobs in one transaction. Returns the jobs to execute alone after a failure.
    async fn execute_together(&mut self, mut batch: Vec<WaitingJob>) -> Vec<WaitingJob> {
        loop {
            let (mut jobs, since): (Vec<Job>, Vec<Instant>) = batch.into_iter().map(|job| (job.job, job.since)).unzip();
            if jobs.is_empty() {
                return Vec::new();
            }
            let outcome = self.transact_twice(&mut jobs, None, false).await;
            let (kind, count) = (outcome.as_ref().err().map(Failure::kind), jobs.len());
            batch = std::iter::zip(jobs, since)
                .map(|(job, since)| WaitingJob::new(job, since))
                .collect();
            match kind {
                Some(Kind::Locked | Kind::Cancelled) => {
                    self.failure = outcome.err();
                    match self.read_locked(&batch, Vec::new()).await {
                        Ok(locked) => self.locked.add(locked),
                        Err(failure) => {
                            batch.into_iter().for_each(|job| job.job.answer(Some(&failure)));
                            return Vec::new();
                        }
                    }
                    batch = self.park_blocked(batch);
                    if batch.len() == count {
                        // Another transaction has inserted a row or locked a gap between rows, which cannot be read. Or the server cancelled a slow
                        // statement.
                        return batch;
                    }
                }
                // One job may be the cause: execute each on its own, so that the others do not fail with it.
                Some(Kind::Permanent) if count > 1 => return batch,
                _ => {
                    batch.into_iter().for_each(|job| job.job.answer(outcome.as_ref().err()));
                    return Vec::new();
                }
            }
        }
    }

    /// Executes each job in its own transaction, attempts last. If one finds a lock, those that are left after [`RETRY`] are executed with the
    /// next retry.
    async fn execute_alone(&mut self, batch: Vec<WaitingJob>) {
        let (attempts, others): (Vec<_>, Vec<_>) = batch.into_iter().partition(WaitingJob::is_attempt);
        let (began, mut has_found_lock, mut later) = (Instant::now(), false, Vec::new());
        for job in others.into_iter().chain(attempts) {
            for mut job in self.park_blocked(vec![job]) {
                if has_found_lock && began.elapsed() >= RETRY {
                    later.push(job);
                    continue;
                }
                let outcome = self.transact_alone(&mut job).await;
                match &outcome {
                    Err(failure) if failure.kind() == Kind::Locked => {
                        has_found_lock = true;
                        self.failure = outcome.err();
                        job.is_alone = true;
                        self.waiting.push_back(job);
                    }
                    _ => job.job.answer(outcome.as_ref().err()),
                }
            }
        }
        later.into_iter().rev().for_each(|job| self.waiting.push_front(job));
    }

    /// Executes the jobs whose rows are no longer locked, as many as a transaction has. Answers those that have waited for too long.
    /// `true`: there are more.
    async fn retry(&mut self) -> bool {
        if self.waiting.is_empty() {
            self.locked.replace(Vec::new());
            return false;
        }
        let waiting = Vec::from(std::mem::take(&mut self.waiting));
        let store_timeout = self.pool.connections().store_timeout;
        let read = self.read_locked(&waiting, self.locked.all()).await;
        let read = read.map(|locked| self.locked.replace(locked));
        let (mut ready, mut claims, most) = (Vec::new(), 0, self.waiters.server.transaction_limit().claims);
        for job in waiting {
            if job.job.is_cancelled() {
                continue;
            }
            if job.since.elapsed() >= store_timeout {
                let failure = read.as_ref().err().cloned().unwrap_or_else(|| self.locked_row());
                job.job.answer(Some(&failure));
            } else if read.is_err() || claims >= most {
                self.waiting.push_back(job);
            } else {
                let free = self.park_blocked(vec![job]);
                claims += free.iter().map(|job| job.job.claims()).sum::<usize>();
                ready.extend(free);
            }
        }
        self.execute(ready).await;
        claims >= most
    }

    /// Hands names off. The next check finds the names again that have a locked row.
    async fn hand_off(&mut self, names: CheckedNames) {
        for _ in 0..2 {
            let names = names.without(|name| self.locked.contains(name));
            if names.is_empty() {
                return;
            }
            let Err(failure) = self.transact_twice(&mut [], Some(&names), false).await else {
                return;
            };
            tracing::debug!(%failure, "names could not be handed off");
            if failure.kind() != Kind::Locked {
                return;
            }
            self.failure = Some(failure);
            match self.read_locked(&[], names.into_names()).await {
                Ok(locked) => self.locked.add(locked),
                Err(_) => return,
            }
        }
    }

    /// Returns the names of the jobs, and the other names, whose row another transaction has locked.
    async fn read_locked(&mut self, jobs: &[WaitingJob], others: Vec<StoredName>) -> Outcome<Vec<StoredName>> {
        let of_jobs = jobs.iter().flat_map(|job| job.job.keys());
        let mut names: Vec<StoredName> = of_jobs.map(|key| self.prefix.stored(key)).chain(others).collect();
        names.sort_unstable();
        names.dedup();
        let mut checkout = self.pool.checkout().await?;
        let session = checkout.session()?;
        let connection = session.connection().clone();
        let locked = connection.within_limit(session.locked_names(&names)).await;
        checkout.settle(locked)
    }

    /// Returns the jobs that can be executed. Parks those with a locked row, and those that must follow a parked job. A divisible one fails
    /// instead: its caller divides it.
    fn park_blocked(&mut self, jobs: Vec<WaitingJob>) -> Vec<WaitingJob> {
        let mut ready = Vec::new();
        for mut job in jobs {
            let is_locked = |key: &Key| self.locked.contains(&self.prefix.stored(key));
            let has_locked = job.job.keys().into_iter().any(is_locked);
            if !has_locked && !self.waiting.iter().any(|earlier| job.job.must_follow(&earlier.job)) {
                ready.push(job);
            } else if has_locked && job.job.is_divisible(is_locked) {
                job.job.answer(Some(&self.locked_row()));
            } else {
                // Its lock can be read.
                job.is_alone &= !has_locked;
                self.waiting.push_back(job);
            }
        }
        ready
    }

    /// Returns the failure of a job with a locked row.
    fn locked_row(&self) -> Failure {
        let message = "a row is locked by another transaction";
        let locked = || Failure::new(&self.pool.connections().place, Kind::Locked, message.to_owned());
        self.failure.clone().unwrap_or_else(locked)
    }

    /// Executes a job in its own transaction. An attempt waits for a lock only briefly, but is repeated for
    /// [`BRIEF_LOCK_WAIT`]: other services lock the row for milliseconds.
    async fn transact_alone(&mut self, job: &mut WaitingJob) -> Outcome<()> {
        let (began, is_brief) = (Instant::now(), job.is_attempt());
        loop {
            let outcome = self
                .transact_twice(std::slice::from_mut(&mut job.job), None, is_brief)
                .await;
            let is_locked = outcome.as_ref().is_err_and(|failure| failure.kind() == Kind::Locked);
            if !is_locked || began.elapsed() >= BRIEF_LOCK_WAIT {
                return outcome;
            }
            tokio::time::sleep(BRIEF_LOCK_WAIT / 5).await;
        }
    }

    /// Executes jobs as one transaction, and once more after a conflict. `is_brief`: it waits for a lock only briefly.
    async fn transact_twice(&mut self, batch: &mut [Job], names: Option<&CheckedNames>, is_brief: bool) -> Outcome<()> {
        match self.transact(batch, names, is_brief).await {
            Err(failure) if failure.kind() == Kind::Conflict => self.transact(batch, names, is_brief).await,
            outcome => outcome,
        }
    }

    async fn transact(&mut self, batch: &mut [Job], names: Option<&CheckedNames>, is_brief: bool) -> Outcome<()> {
        let mut checkout = self.pool.checkout().await?;
        let mut plan = Plan::new(batch, names, &self.prefix);
        plan.is_brief = is_brief;
        if plan.is_empty() {
            return Ok(());
        }
        let session = checkout.session()?;
        let connection = session.connection().clone();
        let transaction = transact(session, &self.prefix, &self.waiters, &plan, batch);
        let outcome = connection.within_limit(transaction).await;
        let effects = checkout.settle(outcome)?;
        drop(checkout);
        self.waiters.apply(effects);
        Ok(())
    }
}
