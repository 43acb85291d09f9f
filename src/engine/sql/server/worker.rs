//! The task that executes calls as transactions (`transaction.rs`), several in one. `sql/jobs.rs` has their order.
//!
//! The first transaction that finds a locked row waits for [`LOCK_WAIT`], unless a single statement has just waited for it. Its calls are
//! then made by one that skips locked rows: calls that need one of them fail with a retryable error, and the service repeats them. Until a
//! transaction finds the row unlocked, those with a call for its name skip locked rows at once.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::pool::Pool;
use super::recent_names::RecentNames;
use super::transaction::{Plan, Prefix, transact};
use super::waiters::Waiters;
use super::{LOCK_WAIT, Outcome};
use crate::engine::core::ledger::StoredName;
use crate::engine::sql::failure::{Failure, Kind};
use crate::engine::sql::jobs::{Job, Receiver};
use crate::event_loop::unless_it_panics;

/// How long calls that are executed one by one, because their transaction has failed, may fail for other reasons than the call. After that
/// the others fail, too.
const ONE_BY_ONE: Duration = Duration::from_millis(300);

/// The connections, and what the calls need.
pub(super) struct Worker {
    pub pool: Arc<Pool>,
    pub prefix: Prefix,
    pub waiters: Arc<Waiters>,
    pub locked: Arc<LockedNames>,
}

/// The names whose rows another transaction has locked. Single statements leave attempts for these names to the transactions.
#[derive(Default)]
pub(super) struct LockedNames {
    pub names: RecentNames,
    /// The failure of the last statement that waited for a locked row, and when.
    last_wait: Mutex<Option<(Instant, Failure)>>,
}

impl LockedNames {
    /// Records that a statement has waited for a locked row. The calls that it leaves to the transactions have waited long enough.
    pub(super) fn record_wait(&self, failure: &Failure) {
        *self.last_wait.lock() = Some((Instant::now(), failure.clone().with_kind(Kind::Locked)));
    }

    fn has_just_waited(&self) -> bool {
        let last_wait = self.last_wait.lock();
        last_wait.as_ref().is_some_and(|(at, _)| at.elapsed() < LOCK_WAIT)
    }

    /// Returns the failure of calls for locked names.
    fn failure(&self) -> Option<Failure> {
        self.last_wait.lock().as_ref().map(|(_, failure)| failure.clone())
    }
}

impl Worker {
    /// Executes jobs until the last sender is gone.
    pub(super) async fn run(self, mut jobs: Receiver) {
        let mut batch = Vec::new();
        while jobs.next(&mut batch).await {
            // A panic closes the connection in use.
            _ = unless_it_panics(pin!(self.execute(std::mem::take(&mut batch)))).await;
        }
    }

    /// Executes jobs as one transaction. If that fails because of one of them, executes each in its own.
    async fn execute(&self, mut batch: Vec<Job>) {
        let may_be_locked = |job: &Job| self.locked.names.have_one_of(self.prefix.names(job));
        let skips_locked = self.locked.has_just_waited() || batch.iter().any(may_be_locked);
        let mut outcome = self.transact(&mut batch, skips_locked).await;
        if let Err(failure) = &outcome
            && matches!(failure.kind(), Kind::Locked | Kind::Cancelled)
            && !skips_locked
        {
            self.locked.record_wait(failure);
            outcome = self.transact(&mut batch, true).await;
        }
        let kind = outcome.as_ref().err().map(Failure::kind);
        if !matches!(kind, Some(Kind::Locked | Kind::Cancelled | Kind::Permanent)) || batch.len() == 1 {
            return self.answer(batch, &outcome);
        }
        batch.sort_by_key(Job::is_attempt);
        let mut waited = Duration::ZERO;
        for mut job in batch {
            if waited >= ONE_BY_ONE {
                self.answer(vec![job], &outcome);
                continue;
            }
            let began = Instant::now();
            let of_job = self.transact(std::slice::from_mut(&mut job), true).await;
            self.answer(vec![job], &of_job);
            if of_job.as_ref().is_err_and(|failure| failure.kind() != Kind::Permanent) {
                waited += began.elapsed();
                outcome = of_job;
            }
        }
    }

    /// Answers jobs. `outcome`: that of their transaction, or the names whose rows it has skipped.
    fn answer(&self, jobs: Vec<Job>, outcome: &Outcome<Vec<StoredName>>) {
        let last_wait = self.locked.failure();
        for job in jobs {
            let failure = match outcome {
                Ok(locked) => {
                    let is_locked = self.prefix.names(&job).any(|name| locked.contains(&name));
                    last_wait.as_ref().filter(|_| is_locked)
                }
                Err(failure) => Some(failure),
            };
            job.answer(failure);
        }
    }

    /// Executes jobs as one transaction, and once more after a conflict. Returns the names whose rows it has skipped.
    async fn transact(&self, batch: &mut [Job], skips_locked: bool) -> Outcome<Vec<StoredName>> {
        match self.transact_once(batch, skips_locked).await {
            Err(failure) if failure.kind() == Kind::Conflict => self.transact_once(batch, skips_locked).await,
            outcome => outcome,
        }
    }

    async fn transact_once(&self, batch: &mut [Job], skips_locked: bool) -> Outcome<Vec<StoredName>> {
        let mut checkout = self.pool.checkout().await?;
        let plan = Plan::new(batch, skips_locked, &self.prefix);
        if plan.is_empty() {
            return Ok(Vec::new());
        }
        let session = checkout.session()?;
        let connection = session.connection().clone();
        let transaction = async {
            let outcome = transact(session, &self.prefix, &self.waiters, &plan, batch).await;
            if outcome.as_ref().is_err_and(|failure| failure.kind() != Kind::Broken) {
                // A transaction without an end would become a part of the next one.
                let ended = session.roll_back().await;
                ended.map_err(|failure| failure.with_kind(Kind::Broken))?;
            }
            outcome
        };
        let outcome = connection.within_limit(transaction).await;
        let (effects, locked) = checkout.settle(outcome)?;
        drop(checkout);
        let record = |name| self.locked.names.record(name, locked.contains(name));
        plan.names.keys().for_each(record);
        self.waiters.apply(effects);
        Ok(locked)
    }
}
