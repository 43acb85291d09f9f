//! The one task that uses the connection.
//!
//! A call is a message to it and an answer back, so that a caller that goes away never leaves a transaction half done,
//! and calls of one engine are carried out in the order in which they were made: a release cannot overtake its acquire.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use super::failure::{Failure, Kind};
use super::file::File;
use super::statements::Transaction;
use super::verbs::{Call, Verbs};
use crate::engine::sql::wake::Address;
use crate::engine::{Acquired, Released, Renewed, Result};
use crate::model::{Claim, Key, LockInfo, OwnerToken, Ttl};

/// How many calls share a transaction at most. They save each other its begin and its end; other processes wait for it.
const BATCH: usize = 64;

/// After so long without a call the writer looks for rows past their end. While calls come, they remove them.
const SWEEP_PAUSE: Duration = Duration::from_secs(60);
/// The pause between two sweeps while there is more to remove.
const SWEEP_AGAIN: Duration = Duration::from_millis(50);

/// The answer to a call: written when it was carried out, sent when that is committed.
pub(super) struct Reply<T> {
    answer: Option<T>,
    sender: oneshot::Sender<Result<T>>,
}

impl<T> Reply<T> {
    pub(super) fn new() -> (Self, oneshot::Receiver<Result<T>>) {
        let (sender, receiver) = oneshot::channel();
        (Reply { answer: None, sender }, receiver)
    }

    fn send(self, op: &'static str, failure: Option<&Failure>) {
        let result = match (failure, self.answer) {
            (Some(failure), _) => Err(failure.error(op)),
            (None, Some(answer)) => Ok(answer),
            // Unanswered and not failed: the caller sees the sender go away.
            (None, None) => return,
        };
        // Whoever asked may be gone.
        let _ = self.sender.send(result);
    }
}

/// A call and its answer.
pub(super) enum Job {
    TryAcquire(Claim, Reply<Acquired>),
    Renew(Claim, Ttl, Reply<Renewed>),
    Transfer(Claim, OwnerToken, Reply<Renewed>),
    Release(Claim, Duration, Reply<Released>),
    ForceRelease(Key, Reply<bool>),
    Inspect(Key, Reply<Option<LockInfo>>),
    List(String, Reply<Vec<LockInfo>>),
}

impl Job {
    async fn run(&mut self, verbs: &Verbs, call: Call<'_, '_>) -> sqlx::Result<()> {
        match self {
            Job::TryAcquire(claim, reply) => reply.answer = Some(verbs.try_acquire(call, claim).await?),
            Job::Renew(claim, ttl, reply) => reply.answer = Some(verbs.renew(call, claim, *ttl).await?),
            Job::Transfer(claim, to, reply) => reply.answer = Some(verbs.transfer(call, claim, to).await?),
            Job::Release(claim, keep, reply) => reply.answer = Some(verbs.release(call, claim, *keep).await?),
            Job::ForceRelease(key, reply) => reply.answer = Some(verbs.force_release(call, key).await?),
            Job::Inspect(key, reply) => reply.answer = Some(verbs.inspect(call.transaction, key).await?),
            Job::List(prefix, reply) => reply.answer = Some(verbs.list(call.transaction, prefix).await?),
        }
        Ok(())
    }

    fn settle(self, failure: Option<&Failure>) {
        match self {
            Job::TryAcquire(_, reply) => reply.send("acquire", failure),
            Job::Renew(_, _, reply) => reply.send("renew", failure),
            Job::Transfer(_, _, reply) => reply.send("transfer", failure),
            Job::Release(_, _, reply) => reply.send("release", failure),
            Job::ForceRelease(_, reply) => reply.send("forceRelease", failure),
            Job::Inspect(_, reply) => reply.send("inspect", failure),
            Job::List(_, reply) => reply.send("list", failure),
        }
    }
}

/// The connection and what the calls need.
pub(super) struct Writer {
    pub file: File,
    pub verbs: Arc<Verbs>,
}

impl Writer {
    /// Carries calls out until the last sender is gone, then closes the file.
    pub(super) async fn run(mut self, mut calls: mpsc::UnboundedReceiver<Job>) {
        let mut batch = Vec::with_capacity(BATCH);
        let mut pause = SWEEP_PAUSE;
        loop {
            match timeout(pause, calls.recv_many(&mut batch, BATCH)).await {
                Ok(0) => break,
                Ok(_) => self.settle(&mut batch).await,
                Err(_) => pause = if self.sweep().await { SWEEP_AGAIN } else { SWEEP_PAUSE },
            }
        }
        self.file.close().await;
    }

    /// Removes what nobody came by to remove, and says whether there may be more of it.
    async fn sweep(&mut self) -> bool {
        let swept = match self.file.connection().await {
            Ok((connection, fresh)) => {
                self.verbs.greet(fresh);
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

    async fn settle(&mut self, batch: &mut Vec<Job>) {
        let mut outcome = self.transact(batch).await;
        if batch.len() > 1 && outcome.as_ref().is_err_and(|failure| failure.kind() == Kind::Stuck) {
            // It may be the fault of one of them, which is no reason for the others to fail.
            for mut job in batch.drain(..) {
                let outcome = self.transact(std::slice::from_mut(&mut job)).await;
                self.answer(std::iter::once(job), outcome).await;
            }
            outcome = Ok(Vec::new());
        }
        self.answer(batch.drain(..), outcome).await;
    }

    async fn answer(&self, jobs: impl Iterator<Item = Job>, outcome: std::result::Result<Vec<Address>, Failure>) {
        jobs.for_each(|job| job.settle(outcome.as_ref().err()));
        if let Ok(told) = outcome {
            self.verbs.wakes.tell(&told).await;
        }
    }

    /// Carries a batch out as one transaction, and says whom to tell.
    async fn transact(&mut self, batch: &mut [Job]) -> std::result::Result<Vec<Address>, Failure> {
        let (connection, fresh) = self.file.connection().await?;
        self.verbs.greet(fresh);
        let mut told = Vec::new();
        let outcome = async {
            let mut transaction = Transaction::new(connection);
            let count = batch.len();
            for (index, job) in batch.iter_mut().enumerate() {
                let call = Call {
                    transaction: &mut transaction,
                    last: index + 1 == count,
                    told: &mut told,
                };
                job.run(&self.verbs, call).await?;
            }
            transaction.finish().await
        };
        match outcome.await {
            Ok(()) => Ok(told),
            Err(error) => {
                let failure = self.file.failure(error);
                self.file.recover(&failure).await;
                Err(failure)
            }
        }
    }
}
