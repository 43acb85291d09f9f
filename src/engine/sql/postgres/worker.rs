//! The one task that uses the connection of the transactions.
//!
//! A call is a job for it and an answer, so that a dropped caller never leaves an incomplete transaction. Jobs that wait at the
//! same time share a transaction. `sql/jobs.rs` has their order.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;

use super::error::{Failure, Kind};
use super::session::{Server, Slot};
use super::statements::Sql;
use super::transaction::{self, Checked, EXPIRED_POSITION_KEPT_MS, Plan, Prefix, get, micros, transact};
use super::waiters::Waiters;
use crate::engine::WAITER_LIVENESS;
use crate::engine::local_waiters::{HEARTBEAT_INTERVAL, RESERVATION};
use crate::engine::sql::Page;
use crate::engine::sql::jobs::{Failed, Job, Receiver};
use crate::engine::sql::ledger::StoredName;
use crate::model::{Key, LockInfo};

/// The time between two sweeps of a process that makes calls, and its random part.
const SWEEP_PAUSE: Duration = Duration::from_secs(300);
/// How long a free name keeps its row, and its last fencing token, in seconds.
const FREE_ROW_KEPT_S: i64 = 3600;
/// Maximum number of rows that one statement of a sweep removes.
const SWEEP_LIMIT: i64 = 500;
/// Maximum number of names of one transaction of a sweep.
const SWEEP_NAMES: i64 = 64;

type Outcome<T> = Result<T, Failure>;

/// The connection and what the calls need.
pub(super) struct Worker {
    pub server: Arc<Server>,
    pub slot: Slot,
    pub prefix: Prefix,
    pub waiters: Arc<Waiters>,
    /// The names whose waiters need a check.
    pub checks: mpsc::UnboundedReceiver<Vec<Key>>,
    heartbeat_at: Option<Instant>,
}

impl Worker {
    pub(super) fn new(
        server: Arc<Server>,
        slot: Slot,
        prefix: Prefix,
        waiters: Arc<Waiters>,
        checks: mpsc::UnboundedReceiver<Vec<Key>>,
    ) -> Self {
        Worker {
            server,
            slot,
            prefix,
            waiters,
            checks,
            heartbeat_at: None,
        }
    }

    /// Executes jobs until the last sender is gone, then closes the connection.
    pub(super) async fn run(mut self, mut jobs: Receiver) {
        let mut batch = Vec::new();
        // A process without calls sends nothing.
        let mut sweep_at: Option<Instant> = None;
        loop {
            let sweep = async {
                match sweep_at {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                Some(names) = self.checks.recv() => self.check(names).await,
                next = jobs.next(&mut batch) => {
                    if !next {
                        break;
                    }
                    self.execute(&mut batch).await;
                    sweep_at = sweep_at.or_else(|| Some(Instant::now() + SWEEP_PAUSE.mul_f64(1.0 + fastrand::f64())));
                }
                () = sweep => {
                    sweep_at = None;
                    if let Err(failure) = self.sweep().await {
                        tracing::debug!(%failure, "a sweep failed");
                    }
                }
            }
        }
    }

    async fn execute(&mut self, batch: &mut Vec<Job>) {
        let is_read = |job: &mut Job| matches!(job, Job::Inspect(..) | Job::List(..));
        for mut job in batch.extract_if(.., is_read) {
            let outcome = self.read(&mut job).await;
            job.answer(cause(&outcome));
        }
        let outcome = self.transact_twice(batch, Checked::None).await;
        if batch.len() > 1 && outcome.as_ref().is_err_and(|failure| failure.kind() == Kind::Permanent) {
            // One job may be the cause: execute each on its own, so that the others do not fail with it.
            for mut job in batch.drain(..) {
                let outcome = self.transact_twice(std::slice::from_mut(&mut job), Checked::None).await;
                job.answer(cause(&outcome));
            }
        } else {
            batch.drain(..).for_each(|job| job.answer(cause(&outcome)));
        }
    }

    /// Executes jobs as one transaction, again if another transaction was in the way.
    async fn transact_twice(&mut self, batch: &mut [Job], checked: Checked<'_>) -> Outcome<()> {
        match self.transact(batch, checked).await {
            Err(failure) if failure.kind() == Kind::Conflict => self.transact(batch, checked).await,
            outcome => outcome,
        }
    }

    async fn transact(&mut self, batch: &mut [Job], checked: Checked<'_>) -> Outcome<()> {
        let session = self.slot.session().await?;
        let plan = Plan::new(batch, checked, &self.prefix);
        if plan.is_empty() {
            return Ok(());
        }
        let process = self.waiters.process.as_str();
        let transaction = transact(session, &self.server, &self.prefix, process, &plan, batch);
        let outcome = session.within_limit(transaction).await;
        let effects = self.slot.settle(outcome)?;
        self.waiters.apply(effects);
        Ok(())
    }

    /// Executes a job that only reads.
    async fn read(&mut self, job: &mut Job) -> Outcome<()> {
        if job.is_cancelled() {
            return Ok(());
        }
        match job {
            Job::Inspect(key, reply) => {
                let page = Page::of_name(self.prefix.stored(key));
                reply.set(self.list(&page).await?.0.pop());
            }
            Job::List(page, reply) => reply.set(self.list(page).await?),
            _ => {}
        }
        Ok(())
    }

    async fn list(&mut self, page: &Page) -> Outcome<(Vec<LockInfo>, Option<Page>)> {
        let session = self.slot.session().await?;
        let reading = transaction::list(session, &self.server, &self.prefix, page);
        let outcome = session.within_limit(reading).await;
        self.slot.settle(outcome)
    }

    /// Sends the heartbeat of this process if it is due, and checks what its waiters wait for.
    async fn check(&mut self, mut names: Vec<Key>) {
        while let Ok(more) = self.checks.try_recv() {
            names.extend(more);
        }
        names.sort_unstable();
        names.dedup();
        if let Err(failure) = self.check_names(&names).await {
            // Each waiter makes an attempt, gets the error itself, and knows its own deadline.
            tracing::debug!(%failure, "a heartbeat failed");
            names.iter().for_each(|key| self.waiters.known.wake(key));
        }
    }

    async fn check_names(&mut self, names: &[Key]) -> Outcome<()> {
        let now = Instant::now();
        let is_due = self
            .heartbeat_at
            .is_none_or(|at| now - at >= HEARTBEAT_INTERVAL * 3 / 4);
        let stored: Vec<StoredName> = names.iter().map(|key| self.prefix.stored(key)).collect();
        let process = &self.waiters.process;
        let session = self.slot.session().await?;
        let statements = async {
            let liveness = WAITER_LIVENESS.as_millis() as i64;
            let heartbeat = async {
                match is_due {
                    true => session.query(Sql::Heartbeat, &[process, &liveness]).await,
                    false => Ok(Vec::new()),
                }
            };
            let (heartbeat, called, checked) = tokio::join!(
                biased;
                heartbeat,
                async { session.query(Sql::Called, &[process]).await },
                async { session.query(Sql::Check, &[&stored]).await },
            );
            heartbeat?;
            Ok((called?, checked?))
        };
        let outcome = session.within_limit(statements).await;
        let (called, checked) = self.slot.settle(outcome)?;
        if is_due {
            self.heartbeat_at = Some(now);
        }
        for row in &called {
            self.waiters.notify(get(&self.server, row, 0)?);
        }
        let mut free = Vec::new();
        for row in &checked {
            let name: StoredName = get(&self.server, row, 0)?;
            let Some(key) = stored.iter().position(|one| *one == name).map(|index| &names[index]) else {
                continue;
            };
            let lease: Option<i64> = get(&self.server, row, 1)?;
            let first: Option<i64> = get(&self.server, row, 2)?;
            let is_called: Option<bool> = get(&self.server, row, 3)?;
            match (lease, first, is_called) {
                (Some(left), ..) | (None, Some(left), Some(true)) => {
                    self.waiters.known.set_lease_end(key, Some(micros(left)));
                }
                (None, Some(_), _) => {
                    self.waiters.known.set_lease_end(key, Some(RESERVATION));
                    free.push(name);
                }
                // The positions of this process have expired: its waiters enter the queue again.
                (None, None, _) => self.waiters.known.wake(key),
            }
        }
        match free.is_empty() {
            true => Ok(()),
            false => self.transact_twice(&mut [], Checked::Free(&free)).await,
        }
    }

    /// Removes rows of names that have been free for long, and positions of waiters that ended long ago.
    async fn sweep(&mut self) -> Outcome<()> {
        loop {
            let session = self.slot.session().await?;
            let statements = async {
                let swept = session.query(Sql::Sweep, &[&FREE_ROW_KEPT_S, &SWEEP_LIMIT]).await?;
                let abandoned = session.query(Sql::Abandoned, &[&EXPIRED_POSITION_KEPT_MS, &SWEEP_NAMES]);
                Ok((swept.len() as i64, abandoned.await?))
            };
            let outcome = session.within_limit(statements).await;
            let (swept, abandoned) = self.slot.settle(outcome)?;
            let names: Outcome<Vec<StoredName>> = abandoned.iter().map(|row| get(&self.server, row, 0)).collect();
            let names = names?;
            self.transact_twice(&mut [], Checked::Pruned(&names)).await?;
            if swept < SWEEP_LIMIT && (names.len() as i64) < SWEEP_NAMES {
                return Ok(());
            }
        }
    }
}

/// Returns the failure of a transaction for its jobs.
fn cause<T>(outcome: &Outcome<T>) -> Option<&dyn Failed> {
    outcome.as_ref().err().map(|failure| failure as &dyn Failed)
}
