//! The one task that uses the connection.
//!
//! A call is a job for it and an answer, so that a dropped caller never leaves an incomplete transaction. Jobs that wait at the
//! same time share a transaction. `sql/jobs.rs` has their order.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::timeout;

use super::error::{Failure, Kind};
use super::file::File;
use super::statements::Transaction;
use super::verbs::{Call, Verbs};
use crate::engine::sql::jobs::{Failed, Job, Receiver};
use crate::engine::sql::udp_wakeup::Address;

/// The time without a call after which the writer removes expired rows. Calls remove some of them, too.
const SWEEP_PAUSE: Duration = Duration::from_secs(60);
/// The pause between two sweeps while there is more to remove.
const SWEEP_AGAIN: Duration = Duration::from_millis(50);

/// The connection and what the calls need.
pub(super) struct Writer {
    pub file: File,
    pub verbs: Arc<Verbs>,
}

impl Writer {
    /// Executes jobs until the last sender is gone, then closes the file.
    pub(super) async fn run(mut self, mut jobs: Receiver) {
        let mut batch = Vec::new();
        let mut pause = SWEEP_PAUSE;
        loop {
            let next = tokio::select! {
                biased;
                () = self.file.outdated() => {
                    self.file.reopen().await;
                    continue;
                }
                next = timeout(pause, jobs.next(&mut batch)) => next,
            };
            match next {
                Ok(true) => self.execute(&mut batch).await,
                Ok(false) => break,
                Err(_) => pause = if self.sweep().await { SWEEP_AGAIN } else { SWEEP_PAUSE },
            }
        }
        self.file.close().await;
    }

    /// Removes some expired rows. Returns whether there may be more.
    async fn sweep(&mut self) -> bool {
        let swept = match self.file.connection().await {
            Ok((connection, fresh)) => {
                self.verbs.wake_all_if(fresh);
                self.verbs.sweep(&mut Transaction::new(connection)).await
            }
            Err(_) => return false,
        };
        match swept {
            Ok(more) => more,
            Err(error) => {
                let failure = self.file.failure(error);
                tracing::debug!(error = %failure, "a sweep failed");
                self.file.recover(&failure).await;
                false
            }
        }
    }

    async fn execute(&mut self, batch: &mut Vec<Job>) {
        let outcome = self.transact(batch).await;
        if batch.len() > 1 && outcome.as_ref().is_err_and(|failure| failure.kind() == Kind::Permanent) {
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
        let failure = outcome.as_ref().err().map(|failure| failure as &dyn Failed);
        jobs.for_each(|job| job.answer(failure));
        if let Ok(to_wake) = outcome {
            self.verbs.wakeup.wake(&to_wake).await;
        }
    }

    /// Executes a batch as one transaction. Returns the addresses of the waiters to wake.
    async fn transact(&mut self, batch: &mut [Job]) -> Result<Vec<Address>, Failure> {
        let (connection, fresh) = self.file.connection().await?;
        self.verbs.wake_all_if(fresh);
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
            Err(error) => {
                let failure = self.file.failure(error);
                self.file.recover(&failure).await;
                Err(failure)
            }
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
        Job::Renew(claim, ttl, reply) => reply.set(verbs.renew(call, claim, *ttl).await?),
        Job::Transfer(claim, to, reply) => reply.set(verbs.transfer(call, claim, to).await?),
        Job::Release(claims, keep, reply) => reply.set(verbs.release(call, claims, *keep).await?),
        Job::ForceRelease(key, reply) => reply.set(verbs.force_release(call, key).await?),
        Job::Inspect(key, reply) => reply.set(verbs.inspect(call.transaction, key).await?),
        Job::List(page, reply) => reply.set(verbs.list(call.transaction, page).await?),
    }
    Ok(())
}
