//! The task that executes calls as transactions (`transaction.rs`), several in one. `sql/jobs.rs` has their order.
//!
//! A transaction that finds a locked row ends after [`LOCK_WAIT`](super::LOCK_WAIT). Its calls are then executed alone: each in a transaction
//! of its own, which waits only briefly for a lock. A call that still finds one fails with a retryable error, and the service repeats it. Until a
//! call for its names succeeds, later calls for them are executed alone at once, so that the others do not wait for the same lock again.

use std::collections::HashSet;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use parking_lot::Mutex;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::Outcome;
use super::pool::Pool;
use super::transaction::{CheckedNames, Plan, Prefix, transact};
use super::waiters::Waiters;
use crate::engine::core::ledger::StoredName;
use crate::engine::sql::failure::{Failure, Kind};
use crate::engine::sql::jobs::{Job, Receiver};
use crate::event_loop::unless_it_panics;

/// How long the calls of a batch that are executed alone wait for locks together. After that the remaining ones fail.
const ALONE_LOCK_WAIT: Duration = Duration::from_millis(500);

/// The connections, and what the calls need.
pub(super) struct Worker {
    pub pool: Arc<Pool>,
    pub prefix: Prefix,
    pub waiters: Arc<Waiters>,
    pub names: mpsc::UnboundedReceiver<CheckedNames>,
    pub locked: Arc<LockedNames>,
}

/// The names whose rows another transaction may have locked. Single statements leave attempts for these names to the transactions.
#[derive(Default)]
pub(super) struct LockedNames(Mutex<HashSet<StoredName>>);

impl LockedNames {
    /// The most names. Beyond them all are forgotten: those for which this process makes no more calls would stay.
    const MOST: usize = 1024;

    pub(super) fn has_one_of(&self, mut names: impl Iterator<Item = StoredName>) -> bool {
        let locked = self.0.lock();
        !locked.is_empty() && names.any(|name| locked.contains(&name))
    }

    pub(super) fn record(&self, names: impl IntoIterator<Item = StoredName>, are_locked: bool) {
        let mut locked = self.0.lock();
        if are_locked && locked.len() >= Self::MOST {
            locked.clear();
        }
        for name in names {
            match are_locked {
                true => _ = locked.insert(name),
                false => _ = locked.remove(&name),
            }
        }
    }
}

impl Worker {
    /// Executes jobs until the last sender is gone.
    pub(super) async fn run(mut self, mut jobs: Receiver) {
        let (mut batch, mut is_open) = (Vec::new(), true);
        while is_open {
            let step = tokio::select! {
                Some(names) = self.names.recv() => self.hand_off(names).boxed(),
                is_batch = jobs.next(&mut batch) => {
                    is_open = is_batch;
                    self.execute(std::mem::take(&mut batch)).boxed()
                }
            };
            // A panic closes the connection in use.
            _ = unless_it_panics(pin!(step)).await;
        }
    }

    /// Executes jobs in one transaction, and alone those whose rows may be locked.
    async fn execute(&self, batch: Vec<Job>) {
        let may_be_locked = |job: &Job| self.locked.has_one_of(self.prefix.names(job));
        let (alone, mut together): (Vec<Job>, Vec<Job>) = batch.into_iter().partition(may_be_locked);
        if !together.is_empty() {
            let outcome = self.transact_twice(&mut together, None, false).await;
            let is_divided = match outcome.as_ref().map_err(Failure::kind) {
                Err(Kind::Locked | Kind::Cancelled) => true,
                // One job may be the cause.
                Err(Kind::Permanent) => together.len() > 1,
                _ => false,
            };
            if !is_divided {
                let jobs = std::mem::take(&mut together);
                jobs.into_iter().for_each(|job| job.answer(outcome.as_ref().err()));
            }
        }
        self.execute_alone(together.into_iter().chain(alone)).await;
    }

    /// Executes each job in its own transaction.
    async fn execute_alone(&self, batch: impl Iterator<Item = Job> + Send) {
        let (mut found, mut waited) = (None, Duration::ZERO);
        let locked = LockedNames::default();
        for mut job in batch.filter(|job| !job.is_cancelled()) {
            let outcome = match &found {
                Some(failure) if waited >= ALONE_LOCK_WAIT || locked.has_one_of(self.prefix.names(&job)) => {
                    Err(Failure::clone(failure))
                }
                _ => {
                    let began = Instant::now();
                    let outcome = self.transact_twice(std::slice::from_mut(&mut job), None, true).await;
                    let is_locked = outcome.as_ref().is_err_and(|failure| failure.kind() == Kind::Locked);
                    self.locked.record(self.prefix.names(&job), is_locked);
                    if is_locked {
                        waited += began.elapsed();
                        locked.record(self.prefix.names(&job), true);
                        found = outcome.as_ref().err().cloned();
                    }
                    outcome
                }
            };
            job.answer(outcome.as_ref().err());
        }
    }

    /// Changes checked names in one transaction, or each in its own if one of them may be locked. The next check finds the names again that
    /// have a locked row.
    async fn hand_off(&self, checked: CheckedNames) {
        if !self.locked.has_one_of(checked.names.iter().cloned()) {
            match self.transact_twice(&mut [], Some(&checked), false).await {
                Err(failure) if failure.kind() == Kind::Locked => {}
                outcome => {
                    return outcome.unwrap_or_else(|failure| tracing::debug!(%failure, "names were not handed off"));
                }
            }
        }
        for name in checked.names {
            let (names, are_free) = (vec![name.clone()], checked.are_free);
            let alone = CheckedNames { names, are_free };
            let outcome = self.transact_twice(&mut [], Some(&alone), true).await;
            let is_locked = outcome.is_err_and(|failure| failure.kind() == Kind::Locked);
            self.locked.record([name], is_locked);
        }
    }

    /// Executes jobs as one transaction, and once more after a conflict. `is_brief`: it waits for a lock only briefly.
    async fn transact_twice(&self, batch: &mut [Job], names: Option<&CheckedNames>, is_brief: bool) -> Outcome<()> {
        match self.transact(batch, names, is_brief).await {
            Err(failure) if failure.kind() == Kind::Conflict => self.transact(batch, names, is_brief).await,
            outcome => outcome,
        }
    }

    async fn transact(&self, batch: &mut [Job], names: Option<&CheckedNames>, is_brief: bool) -> Outcome<()> {
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
