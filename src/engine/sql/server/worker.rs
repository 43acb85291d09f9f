//! The task that executes calls as transactions (`transaction.rs`), several in one. `sql/jobs.rs` has their order.
//!
//! The first transaction that finds a locked row waits for [`LOCK_WAIT`], unless a single statement has just waited for
//! it. Its calls are then divided: into attempts and others, then into halves, with transactions that wait only briefly for a lock. The
//! others go first. A call that still finds a lock when it is alone fails with a retryable error, and the service repeats it. Until a call
//! for its name succeeds, later calls for the name do not share a transaction with the others, so that these do not wait for the same lock
//! again.

use std::collections::HashSet;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use parking_lot::Mutex;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::pool::Pool;
use super::transaction::{CheckedNames, Plan, Prefix, transact};
use super::waiters::Waiters;
use super::{LOCK_WAIT, Outcome};
use crate::engine::core::ledger::StoredName;
use crate::engine::sql::failure::{Failure, Kind};
use crate::engine::sql::jobs::{Job, Receiver};
use crate::event_loop::unless_it_panics;

/// How long the parts of a batch wait for locks together. Once a locked row is found, the remaining calls fail after this time.
const BRIEF_WAITS: Duration = Duration::from_millis(300);

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
pub(super) struct LockedNames {
    names: Mutex<HashSet<StoredName>>,
    /// When a statement of several calls last found a locked row.
    found_at: Mutex<Option<Instant>>,
}

impl LockedNames {
    /// Maximum number of names. A full set is cleared: names without further calls would stay.
    const MOST: usize = 1024;

    pub(super) fn has_one_of(&self, mut names: impl Iterator<Item = StoredName>) -> bool {
        let locked = self.names.lock();
        !locked.is_empty() && names.any(|name| locked.contains(&name))
    }

    /// Records that a statement has waited for a locked row. The calls that it leaves to the transactions have waited long enough.
    pub(super) fn record_wait(&self) {
        *self.found_at.lock() = Some(Instant::now());
    }

    fn has_just_waited(&self) -> bool {
        self.found_at.lock().is_some_and(|at| at.elapsed() < LOCK_WAIT)
    }

    fn add(&self, names: impl Iterator<Item = StoredName>) {
        let mut locked = self.names.lock();
        if locked.len() >= Self::MOST {
            locked.clear();
        }
        locked.extend(names);
    }

    fn remove(&self, names: impl Iterator<Item = StoredName>) {
        let mut locked = self.names.lock();
        if !locked.is_empty() {
            names.for_each(|name| _ = locked.remove(&name));
        }
    }
}

/// Divides the jobs of a transaction that failed: into attempts and others, or into halves. The first part is executed last.
fn divided(mut batch: Vec<Job>) -> [Vec<Job>; 2] {
    let mut last: Vec<Job> = batch.extract_if(.., |job| job.is_attempt()).collect();
    if batch.is_empty() {
        batch = last.drain(..last.len() / 2).collect();
    } else if last.is_empty() {
        last = batch.split_off(batch.len() / 2);
    }
    [last, batch]
}

impl Worker {
    /// Executes jobs until the last sender is gone.
    pub(super) async fn run(mut self, mut jobs: Receiver) {
        let (mut batch, mut is_open) = (Vec::new(), true);
        while is_open {
            let step = tokio::select! {
                Some(names) = self.names.recv() => self.change_checked(names).boxed(),
                is_batch = jobs.next(&mut batch) => {
                    is_open = is_batch;
                    self.execute(std::mem::take(&mut batch)).boxed()
                }
            };
            // A panic closes the connection in use.
            _ = unless_it_panics(pin!(step)).await;
        }
    }

    /// Executes jobs in one transaction, and separately those whose rows may be locked. Divides the jobs of a transaction that fails.
    async fn execute(&self, batch: Vec<Job>) {
        let may_be_locked = |job: &Job| self.locked.has_one_of(self.prefix.names(job));
        let (mut separate, together): (Vec<Job>, Vec<Job>) = batch.into_iter().partition(may_be_locked);
        // From a random job on: otherwise the last ones would never be tried while many rows are locked.
        let first = fastrand::usize(..=separate.len());
        separate.rotate_left(first);
        let (attempts, others): (Vec<Job>, Vec<Job>) = separate.into_iter().partition(Job::is_attempt);
        // Each part, and whether it waits only briefly. The last one of a list is the next one.
        let (mut attempts, mut others) = (
            vec![(true, attempts)],
            vec![(true, others), (self.locked.has_just_waited(), together)],
        );
        let (mut has_waited, mut waited, mut failure, locked_here) =
            (false, Duration::ZERO, None, LockedNames::default());
        while let Some((is_always_brief, mut part)) = others.pop().or_else(|| attempts.pop()) {
            part.retain(|job| !job.is_cancelled());
            if let Some(failure) = &failure {
                let fails = |job: &mut Job| waited >= BRIEF_WAITS || locked_here.has_one_of(self.prefix.names(job));
                part.extract_if(.., fails).for_each(|job| job.answer(Some(failure)));
            }
            let (began, is_brief) = (Instant::now(), has_waited || is_always_brief);
            let outcome = self.transact_twice(&mut part, None, is_brief).await;
            let kind = outcome.as_ref().err().map(Failure::kind);
            if let Some(Kind::Locked | Kind::Cancelled) = kind {
                waited += if is_brief { began.elapsed() } else { Duration::ZERO };
                has_waited = true;
            }
            if let Some(Kind::Locked | Kind::Cancelled | Kind::Permanent) = kind
                && part.len() > 1
            {
                for half in divided(part) {
                    let list = if half[0].is_attempt() {
                        &mut attempts
                    } else {
                        &mut others
                    };
                    list.push((is_always_brief, half));
                }
                continue;
            }
            let names = || part.iter().flat_map(|job| self.prefix.names(job));
            match kind {
                None => self.locked.remove(names()),
                Some(Kind::Locked) => {
                    let has_one_name = names().collect::<HashSet<_>>().len() == 1;
                    if has_one_name {
                        locked_here.add(names());
                    }
                    if has_one_name || !part[0].is_divisible() {
                        self.locked.add(names());
                    }
                    failure = outcome.as_ref().err().cloned();
                }
                Some(kind) if kind.is_left_to_transactions() => {}
                // The connection is broken, or the server refuses statements.
                Some(_) => (waited, failure) = (BRIEF_WAITS, outcome.as_ref().err().cloned()),
            }
            part.into_iter().for_each(|job| job.answer(outcome.as_ref().err()));
        }
    }

    /// Changes checked names in one transaction, and divides them if one of them is locked, within [`BRIEF_WAITS`]. The next check finds the
    /// names again that were not changed.
    async fn change_checked(&self, CheckedNames { names, are_free }: CheckedNames) {
        let is_locked = |name: &StoredName| self.locked.has_one_of(std::iter::once(name.clone()));
        let (separate, together): (Vec<StoredName>, Vec<StoredName>) = names.into_iter().partition(is_locked);
        let (mut parts, mut waited) = (vec![(true, separate), (false, together)], Duration::ZERO);
        while let Some((is_brief, mut names)) = parts.pop()
            && waited < BRIEF_WAITS
        {
            let (began, checked) = (Instant::now(), CheckedNames { names, are_free });
            let outcome = self.transact_twice(&mut [], Some(&checked), is_brief).await;
            names = checked.names;
            match outcome {
                Ok(()) => self.locked.remove(names.into_iter()),
                Err(failure) if failure.kind() == Kind::Locked => {
                    waited += if is_brief { began.elapsed() } else { Duration::ZERO };
                    if names.len() == 1 {
                        self.locked.add(names.into_iter());
                    } else {
                        let second = names.split_off(names.len() / 2);
                        parts.extend([(true, second), (true, names)]);
                    }
                }
                Err(failure) => return tracing::debug!(%failure, "checked names were not changed"),
            }
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
        if batch.is_empty() && names.is_none_or(|checked| checked.names.is_empty()) {
            return Ok(());
        }
        let mut checkout = self.pool.checkout().await?;
        let mut plan = Plan::new(batch, names, &self.prefix);
        plan.is_brief = is_brief;
        if plan.is_empty() {
            return Ok(());
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
        let effects = checkout.settle(outcome)?;
        drop(checkout);
        self.waiters.apply(effects);
        Ok(())
    }
}
