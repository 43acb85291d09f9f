//! The jobs of the writer task, and the queue in which they wait.
//!
//! The queue has three parts: renewals and releases, reads, and attempts to acquire. Each transaction takes jobs from them in
//! this order, up to [`BATCH`] claims. It takes [`SHARE`] claims of each part even where the parts before it fill the batch. So
//! renewals and releases go before everything else, and no part stops another one. A job whose caller was dropped is skipped.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};

use super::error::Failure;
use super::verbs::{Call, Page, Verbs};
use crate::engine::{Acquired, Released, Renewed, Result};
use crate::model::{Claim, Key, LockInfo, OwnerToken, Ttl};

/// Maximum number of claims in a transaction, unless one job has more. They share its begin and its commit. Other processes
/// wait while it lasts.
const BATCH: usize = 64;
/// Number of claims of each part of the queue that a transaction executes, if that many wait.
const SHARE: usize = 16;

/// The answer to a job: stored when the job is executed, sent after the commit.
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
            // The job was skipped because its caller was dropped.
            (None, None) => return,
        };
        let _ = self.sender.send(result);
    }
}

/// Decides once whether attempts are started or cancelled.
#[derive(Debug, Default)]
pub(super) struct Ticket(AtomicU8);

const QUEUED: u8 = 0;
const STARTED: u8 = 1;
const CANCELLED: u8 = 2;

impl Ticket {
    fn change(&self, to: u8) -> u8 {
        let changed = self.0.compare_exchange(QUEUED, to, Ordering::AcqRel, Ordering::Acquire);
        changed.map_or_else(|decided| decided, |_| to)
    }

    /// Starts the attempts. `false`: they were cancelled before.
    fn start(&self) -> bool {
        self.change(STARTED) == STARTED
    }

    /// Cancels the attempts. `false`: they were started before.
    pub(super) fn cancel(&self) -> bool {
        self.change(CANCELLED) == CANCELLED
    }

    fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Acquire) == CANCELLED
    }
}

/// What the writer executes.
pub(super) enum Job {
    Acquire(Vec<Arc<Claim>>, Arc<Ticket>, Reply<Vec<Acquired>>),
    Renew(Claim, Ttl, Reply<Renewed>),
    Transfer(Claim, OwnerToken, Reply<Renewed>),
    Release(Vec<Claim>, Duration, Reply<Vec<Released>>),
    ForceRelease(Key, Reply<bool>),
    Inspect(Key, Reply<Option<LockInfo>>),
    List(Page, Reply<(Vec<LockInfo>, Option<Page>)>),
}

impl Job {
    /// Returns the number of its claims. A page of a list takes as long as several.
    fn claims(&self) -> usize {
        match self {
            Job::Acquire(claims, ..) => claims.len(),
            Job::Release(claims, ..) => claims.len(),
            Job::List(..) => SHARE,
            _ => 1,
        }
    }

    /// Whether the caller was dropped. A release is never cancelled.
    fn is_cancelled(&self) -> bool {
        match self {
            Job::Acquire(_, ticket, reply) => ticket.is_cancelled() || reply.sender.is_closed(),
            Job::Renew(_, _, reply) | Job::Transfer(_, _, reply) => reply.sender.is_closed(),
            Job::Release(..) => false,
            Job::ForceRelease(_, reply) => reply.sender.is_closed(),
            Job::Inspect(_, reply) => reply.sender.is_closed(),
            Job::List(_, reply) => reply.sender.is_closed(),
        }
    }

    /// Executes the job as a part of a transaction, unless it is cancelled.
    pub(super) async fn run(&mut self, verbs: &Verbs, mut call: Call<'_, '_>) -> sqlx::Result<()> {
        if self.is_cancelled() {
            return Ok(());
        }
        match self {
            Job::Acquire(claims, ticket, reply) => {
                // Mark before the start: a caller that can no longer cancel reads the marks.
                claims.iter().for_each(|claim| claim.mark_sent());
                if !ticket.start() {
                    return Ok(());
                }
                let mut answers = Vec::with_capacity(claims.len());
                for (index, claim) in claims.iter().enumerate() {
                    let part = call.part(index + 1 == claims.len());
                    answers.push(verbs.try_acquire(part, claim).await?);
                }
                reply.answer = Some(answers);
            }
            Job::Renew(claim, ttl, reply) => reply.answer = Some(verbs.renew(call, claim, *ttl).await?),
            Job::Transfer(claim, to, reply) => reply.answer = Some(verbs.transfer(call, claim, to).await?),
            Job::Release(claims, keep, reply) => reply.answer = Some(verbs.release(call, claims, *keep).await?),
            Job::ForceRelease(key, reply) => reply.answer = Some(verbs.force_release(call, key).await?),
            Job::Inspect(key, reply) => reply.answer = Some(verbs.inspect(call.transaction, key).await?),
            Job::List(page, reply) => reply.answer = Some(verbs.list(call.transaction, page).await?),
        }
        Ok(())
    }

    /// Sends the answer, or the failure of the transaction.
    pub(super) fn answer(self, failure: Option<&Failure>) {
        match self {
            Job::Acquire(_, _, reply) => reply.send("acquire", failure),
            Job::Renew(_, _, reply) => reply.send("renew", failure),
            Job::Transfer(_, _, reply) => reply.send("transfer", failure),
            Job::Release(_, _, reply) => reply.send("release", failure),
            Job::ForceRelease(_, reply) => reply.send("forceRelease", failure),
            Job::Inspect(_, reply) => reply.send("inspect", failure),
            Job::List(_, reply) => reply.send("list", failure),
        }
    }
}

/// The sending half of the queue.
pub(super) struct Sender {
    changes: mpsc::UnboundedSender<Job>,
    reads: mpsc::UnboundedSender<Job>,
    attempts: mpsc::UnboundedSender<Job>,
}

/// The receiving half of the queue.
pub(super) struct Receiver {
    changes: mpsc::UnboundedReceiver<Job>,
    reads: mpsc::UnboundedReceiver<Job>,
    attempts: mpsc::UnboundedReceiver<Job>,
}

pub(super) fn queue() -> (Sender, Receiver) {
    let (changes, changes_receiver) = mpsc::unbounded_channel();
    let (reads, reads_receiver) = mpsc::unbounded_channel();
    let (attempts, attempts_receiver) = mpsc::unbounded_channel();
    let sender = Sender {
        changes,
        reads,
        attempts,
    };
    let receiver = Receiver {
        changes: changes_receiver,
        reads: reads_receiver,
        attempts: attempts_receiver,
    };
    (sender, receiver)
}

impl Sender {
    /// Appends a job to its part. When the writer has ended, the job and its reply are dropped.
    pub(super) fn send(&self, job: Job) {
        let part = match job {
            Job::Renew(..) | Job::Transfer(..) | Job::Release(..) | Job::ForceRelease(..) => &self.changes,
            Job::Inspect(..) | Job::List(..) => &self.reads,
            Job::Acquire(..) => &self.attempts,
        };
        let _ = part.send(job);
    }
}

impl Receiver {
    /// Waits for jobs and moves those of one transaction to `batch`. `false`: the queue is empty and has no sender.
    ///
    /// # Cancellation
    /// Cancel-safe: no job is lost.
    pub(super) async fn next(&mut self, batch: &mut Vec<Job>) -> bool {
        let mut next = tokio::select! {
            biased;
            Some(job) = self.changes.recv() => Some(job),
            Some(job) = self.reads.recv() => Some(job),
            Some(job) = self.attempts.recv() => Some(job),
            else => return false,
        };
        let mut claims = 0;
        for part in [&mut self.changes, &mut self.reads, &mut self.attempts] {
            let most = BATCH.max(claims + SHARE);
            while claims < most
                && let Some(job) = next.take().or_else(|| part.try_recv().ok())
            {
                if !job.is_cancelled() {
                    claims += job.claims();
                    batch.push(job);
                }
            }
        }
        true
    }
}
