//! The task that uses the connection of the transactions.
//!
//! A call is a job for it and an answer, so that a dropped caller never leaves an incomplete transaction. Jobs that wait at the
//! same time share a transaction. `sql/jobs.rs` has their order.
//!
//! A transaction that finds a locked row ends after [`LOCK_WAIT`](super::LOCK_WAIT), and each of its jobs is executed on its own. Jobs whose
//! rows are still locked are executed one after the other: one try after each batch of other jobs, within the store timeout.

use std::collections::VecDeque;
use std::sync::Arc;

use tokio::sync::mpsc;
use tokio::time::Instant;

use super::error::{Failure, Kind};
use super::slot::Slot;
use super::transaction::{CheckedNames, Plan, Prefix, transact};
use super::waiters::Waiters;
use super::{Outcome, Server, Session};
use crate::engine::sql::jobs::{Failed, Job, Receiver};

/// The connection and what the calls need.
pub(super) struct Worker<S: Server> {
    pub slot: Slot<S>,
    pub prefix: Prefix,
    pub waiters: Arc<Waiters<S>>,
    pub names: mpsc::UnboundedReceiver<CheckedNames>,
    /// Jobs that found a locked row, and later jobs with the same names, except renewals.
    pub locked: VecDeque<LockedJob>,
}

/// A job that waits for a locked row, and since when.
pub(super) struct LockedJob {
    job: Job,
    since: Instant,
}

impl<S: Server> Worker<S> {
    /// Executes jobs until the last sender is gone, then closes the connection.
    pub(super) async fn run(mut self, mut jobs: Receiver) {
        let mut batch = Vec::new();
        loop {
            tokio::select! {
                biased;
                Some(names) = self.names.recv() => {
                    if let Err(failure) = self.transact_twice(&mut [], Some(&names)).await {
                        // The next check finds the names again.
                        tracing::debug!(%failure, "names could not be handed off");
                    }
                }
                next = jobs.next(&mut batch) => {
                    if !next && self.locked.is_empty() {
                        break;
                    }
                    self.execute(&mut batch).await;
                }
                () = std::future::ready(()), if !self.locked.is_empty() => {}
            }
            if let Some(locked) = self.locked.pop_front() {
                let again = self.execute_alone(locked).await;
                again.into_iter().for_each(|locked| self.locked.push_front(locked));
            }
        }
    }

    async fn execute(&mut self, batch: &mut Vec<Job>) {
        let since = Instant::now();
        let with_time = |job| LockedJob { job, since };
        if !self.locked.is_empty() {
            // Keeps the order of the jobs of each name: a release must follow the attempt before it.
            for job in std::mem::take(batch) {
                match self.has_locked_name(&job) {
                    true => self.locked.push_back(with_time(job)),
                    false => batch.push(job),
                }
            }
        }
        let outcome = self.transact_twice(batch, None).await;
        match outcome.as_ref().map_err(Failure::kind) {
            // One job may be the cause: execute each on its own, so that the others do not fail with it.
            Err(Kind::Permanent | Kind::Locked) if batch.len() > 1 => {
                for job in batch.drain(..).map(with_time) {
                    let locked = match self.has_locked_name(&job.job) {
                        true => Some(job),
                        false => self.execute_alone(job).await,
                    };
                    self.locked.extend(locked);
                }
            }
            Err(Kind::Locked) => self.locked.extend(batch.drain(..).map(with_time)),
            _ => batch.drain(..).for_each(|job| job.answer(cause(&outcome))),
        }
    }

    /// Executes a job. Returns it if a row is still locked within the store timeout.
    async fn execute_alone(&mut self, mut locked: LockedJob) -> Option<LockedJob> {
        let outcome = self.transact_twice(std::slice::from_mut(&mut locked.job), None).await;
        let is_locked = outcome.as_ref().is_err_and(|failure| failure.kind() == Kind::Locked);
        if is_locked && locked.since.elapsed() < self.slot.store_timeout() {
            return Some(locked);
        }
        locked.job.answer(cause(&outcome));
        None
    }

    /// Whether a job must wait behind a job that found a locked row: it has one of its names and is not a renewal.
    fn has_locked_name(&self, job: &Job) -> bool {
        if matches!(job, Job::Renew(..)) {
            return false;
        }
        let keys = job.keys();
        let mut locked = self.locked.iter().flat_map(|locked| locked.job.keys());
        locked.any(|key| keys.contains(&key))
    }

    /// Executes jobs as one transaction, and once more after a conflict.
    async fn transact_twice(&mut self, batch: &mut [Job], names: Option<&CheckedNames>) -> Outcome<()> {
        match self.transact(batch, names).await {
            Err(failure) if failure.kind() == Kind::Conflict => self.transact(batch, names).await,
            outcome => outcome,
        }
    }

    async fn transact(&mut self, batch: &mut [Job], names: Option<&CheckedNames>) -> Outcome<()> {
        let session = self.slot.session().await?;
        let plan = Plan::new(batch, names, &self.prefix);
        if plan.is_empty() {
            return Ok(());
        }
        let connection = session.connection().clone();
        let transaction = transact(session, &self.prefix, &self.waiters, &plan, batch);
        let outcome = connection.within_limit(transaction).await;
        let effects = self.slot.settle(outcome)?;
        self.waiters.apply(effects);
        Ok(())
    }
}

/// Returns the failure of a transaction for its jobs.
pub(super) fn cause<T>(outcome: &Outcome<T>) -> Option<&dyn Failed> {
    outcome.as_ref().err().map(|failure| failure as &dyn Failed)
}
