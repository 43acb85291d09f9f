//! The one task that uses the connection.
//!
//! A call is a job for it and an answer, so that a dropped caller never leaves an incomplete transaction. Jobs that wait at the
//! same time share a transaction. `sql/jobs.rs` has their order.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout_at};

use super::file::{File, data_version};
use super::statements::Transaction;
use super::verbs::{Call, Verbs};
use crate::engine::sql::failure::{Failure, Kind};
use crate::engine::sql::jobs::{Job, Receiver};
use crate::engine::sql::udp_wakeup::Address;
use crate::event_loop::unless_it_panics;

/// The time without a call after which the writer removes expired rows. Calls remove some of them, too.
const SWEEP_PAUSE: Duration = Duration::from_secs(60);
/// The pause between two sweeps while there is more to remove.
const SWEEP_AGAIN: Duration = Duration::from_millis(50);

/// How often the writer checks for commits of others while calls of this engine wait. In another container than theirs it
/// receives no datagrams.
const CHECK_PAUSE: Duration = Duration::from_millis(50);
const FAILED_CHECK_PAUSE: Duration = Duration::from_millis(500);

/// The connection and what the calls need.
pub(super) struct Writer {
    pub file: File,
    pub verbs: Arc<Verbs>,
    /// The version of the data at the last check of the waiters.
    pub version: Option<i64>,
}

impl Writer {
    /// Executes jobs until the last sender is gone, then closes the file.
    pub(super) async fn run(mut self, mut jobs: Receiver) {
        let (mut batch, mut pause) = (Vec::new(), SWEEP_PAUSE);
        let (mut sweep_at, mut check_at) = (Instant::now() + pause, Instant::now());
        loop {
            let checks = self.verbs.wakeup.has_waiters();
            let until = if checks { check_at.min(sweep_at) } else { sweep_at };
            let next = tokio::select! {
                biased;
                () = self.file.outdated() => {
                    self.file.reopen().await;
                    continue;
                }
                next = timeout_at(until, jobs.next(&mut batch)) => next,
            };
            match next {
                Ok(true) => {
                    let step = self.execute(&mut batch);
                    if unless_it_panics(pin!(step)).await.is_none() {
                        batch.clear();
                        self.file.close().await;
                    }
                    sweep_at = Instant::now() + pause;
                }
                Ok(false) => break,
                Err(_) if sweep_at <= Instant::now() => {
                    let swept = unless_it_panics(pin!(self.sweep())).await;
                    if swept.is_none() {
                        self.file.close().await;
                    }
                    pause = if swept == Some(true) { SWEEP_AGAIN } else { SWEEP_PAUSE };
                    sweep_at = Instant::now() + pause;
                }
                Err(_) => {}
            }
            if checks && check_at <= Instant::now() {
                let began = Instant::now();
                let checked = unless_it_panics(pin!(self.check())).await;
                if checked.is_none() {
                    self.file.close().await;
                }
                let pause = if checked == Some(true) {
                    CHECK_PAUSE
                } else {
                    FAILED_CHECK_PAUSE
                };
                check_at = Instant::now() + pause.max(began.elapsed() * 10);
            }
        }
        self.file.close().await;
    }

    /// Wakes the waiters of this engine that are next, if another connection has committed since the last check. `false`: it
    /// failed.
    async fn check(&mut self) -> bool {
        let Ok(connection) = self.file.connection().await else {
            return false;
        };
        let checked = async {
            let version = Some(data_version(connection).await?);
            if std::mem::replace(&mut self.version, version) == version {
                return Ok(Vec::new());
            }
            self.verbs.next_waiters(connection).await
        };
        match checked.await {
            Ok(next) => {
                self.verbs.wakeup.wake(&next).await;
                true
            }
            Err(error) => {
                self.version = None;
                let failure = self.file.failed(error).await;
                tracing::debug!(error = %failure, "a check of the waiters failed");
                false
            }
        }
    }

    /// Removes some expired rows. Returns whether there may be more.
    async fn sweep(&mut self) -> bool {
        let Ok(connection) = self.file.connection().await else {
            return false;
        };
        match self.verbs.sweep(&mut Transaction::new(connection)).await {
            Ok(more) => more,
            Err(error) => {
                let failure = self.file.failed(error).await;
                tracing::debug!(error = %failure, "a sweep failed");
                false
            }
        }
    }

    async fn execute(&mut self, batch: &mut Vec<Job>) {
        let outcome = self.transact(batch).await;
        if batch.len() > 1 && outcome.as_ref().is_err_and(may_be_of_one_call) {
            // One job may be the cause: execute each on its own, so that the others do not fail with it.
            for mut job in batch.drain(..) {
                let outcome = self.transact(std::slice::from_mut(&mut job)).await;
                self.answer(std::iter::once(job), outcome).await;
            }
        } else {
            self.answer(batch.drain(..), outcome).await;
        }
    }

    async fn answer(&self, jobs: impl Iterator<Item = Job>, outcome: Result<Vec<Address>, Failure>) {
        let failure = outcome.as_ref().err();
        jobs.for_each(|job| job.answer(failure));
        if let Ok(to_wake) = outcome {
            self.verbs.wakeup.wake(&to_wake).await;
        }
    }

    /// Executes a batch as one transaction. Returns the addresses of the waiters to wake.
    async fn transact(&mut self, batch: &mut [Job]) -> Result<Vec<Address>, Failure> {
        let connection = self.file.connection().await?;
        let mut to_wake = Vec::new();
        let outcome = async {
            let mut transaction = Transaction::new(connection);
            let count = batch.len();
            for (index, job) in batch.iter_mut().enumerate() {
                let call = Call {
                    transaction: &mut transaction,
                    last: index + 1 == count,
                    to_wake: &mut to_wake,
                };
                run(job, &self.verbs, call).await?;
            }
            transaction.finish().await
        };
        match outcome.await {
            Ok(()) => self.file.confirm().map(|()| to_wake),
            Err(error) => Err(self.file.failed(error).await),
        }
    }
}

/// Executes the job as a part of a transaction, unless it is cancelled.
async fn run(job: &mut Job, verbs: &Verbs, mut call: Call<'_, '_>) -> sqlx::Result<()> {
    if !job.start() {
        return Ok(());
    }
    match job {
        Job::Acquire(claims, _, reply) => {
            let mut answers = Vec::with_capacity(claims.len());
            for (index, claim) in claims.iter().enumerate() {
                let part = call.part(index + 1 == claims.len());
                answers.push(verbs.try_acquire(part, claim).await?);
            }
            reply.set(answers);
        }
        Job::Renew(claim, ttl, reply) => reply.set(verbs.renew(call, claim, *ttl, &claim.owner).await?),
        Job::Transfer(claim, to, reply) => reply.set(verbs.renew(call, claim, claim.ttl, to).await?),
        Job::Release(claims, keep, reply) => reply.set(verbs.release(call, claims, *keep).await?),
        Job::ForceRelease(key, reply) => reply.set(verbs.force_release(call, key).await?),
        Job::Inspect(page, reply) | Job::List(page, reply) => reply.set(verbs.list(call.transaction, page).await?),
    }
    Ok(())
}

/// Whether one call of a transaction may be the cause, for example one that needs more space than the disk has.
fn may_be_of_one_call(failure: &Failure) -> bool {
    matches!(failure.kind(), Kind::Refused | Kind::Permanent)
}
