//! The jobs of the task that uses a connection, and the queue in which they wait.
//!
//! The queue has three parts: renewals and releases; reads; and attempts to acquire. Each transaction takes jobs from them in this order, up
//! to the maximum of the queue. It takes [`SHARE`] claims of each part even where the parts before it fill the batch. So renewals and
//! releases go before everything else, and no part stops another one. In their part renewals go before releases, except that the last
//! [`SHARE`] claims go to releases first. A job whose caller was dropped is skipped.
//! `parts.rs`: where each part has statements of its own.
//!
//! `overload_queue.rs` decides which attempt is next.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use super::Page;
use super::failure::Failure;
use crate::engine::overload_queue::OverloadQueue;
use crate::engine::{Acquired, Released, Renewed, Result};
use crate::model::{Claim, Key, LockInfo, OwnerToken, Ttl};

/// Maximum number of claims in a transaction of several statements, unless one job has more; half of it on MySQL and MariaDB. They share
/// its begin and its commit. Other processes wait while it lasts.
pub(super) const BATCH: usize = 64;
/// The parts of the queue: renewals and releases; reads; attempts.
pub(super) const CHANGES: usize = 0;
pub(super) const READS: usize = 1;
pub(super) const ATTEMPTS: usize = 2;
/// Number of claims of each part of the queue, and of releases behind renewals, that a transaction executes, if that many wait.
const SHARE: usize = 16;

/// Number of names of one claim that count as one claim.
const NAMES_PER_CLAIM: usize = 8;

/// The bytes of metadata that count as one claim. This limits the metadata of a statement of 256 claims to about 1 MiB, unless one job has more.
const METADATA_PER_CLAIM: usize = 4 * 1024;

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

    /// Stores the answer.
    pub(super) fn set(&mut self, answer: T) {
        self.answer = Some(answer);
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
#[derive(Default)]
pub(super) struct StartState(AtomicU8);

const QUEUED: u8 = 0;
const STARTED: u8 = 1;
const CANCELLED: u8 = 2;

impl StartState {
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

/// The leases of a page, and the page after it.
pub(super) type PageOfLocks = (Vec<LockInfo>, Option<Page>);

/// What the task executes.
pub(super) enum Job {
    Acquire(Vec<Arc<Claim>>, Arc<StartState>, Reply<Vec<Acquired>>),
    Renew(Claim, Ttl, Reply<Renewed>),
    Transfer(Claim, OwnerToken, Reply<Renewed>),
    Release(Vec<Claim>, Duration, Reply<Vec<Released>>),
    ForceRelease(Key, Reply<bool>),
    Inspect(Page, Reply<PageOfLocks>),
    List(Page, Reply<PageOfLocks>),
}

impl Job {
    /// Returns how many claims the job counts as: several for a page of a list and for many names, which take longer, and for much metadata,
    /// because the size of a packet is limited.
    pub(super) fn claims(&self) -> usize {
        let names = |claim: &Claim| claim.keys().len().div_ceil(NAMES_PER_CLAIM);
        let metadata = |claim: &Arc<Claim>| {
            claim
                .metadata
                .as_ref()
                .map_or(0, |text| text.len() * claim.keys().len())
        };
        match self {
            Job::Acquire(claims, ..) => {
                let metadata = claims.iter().map(metadata).sum::<usize>();
                claims.iter().map(|claim| names(claim)).sum::<usize>() + metadata / METADATA_PER_CLAIM
            }
            Job::Release(claims, ..) => claims.iter().map(names).sum(),
            Job::Renew(claim, ..) | Job::Transfer(claim, ..) => names(claim),
            Job::List(..) => SHARE,
            Job::ForceRelease(..) | Job::Inspect(..) => 1,
        }
    }

    /// Whether the caller was dropped. A release is never cancelled.
    pub(super) fn is_cancelled(&self) -> bool {
        match self {
            Job::Acquire(_, start_state, reply) => start_state.is_cancelled() || reply.sender.is_closed(),
            Job::Renew(_, _, reply) | Job::Transfer(_, _, reply) => reply.sender.is_closed(),
            Job::Release(..) => false,
            Job::ForceRelease(_, reply) => reply.sender.is_closed(),
            Job::Inspect(_, reply) | Job::List(_, reply) => reply.sender.is_closed(),
        }
    }

    pub(super) fn is_attempt(&self) -> bool {
        matches!(self, Job::Acquire(..))
    }

    /// Whether the job has several claims. If it fails, its caller sends each claim as its own job.
    pub(super) fn is_divisible(&self) -> bool {
        match self {
            Job::Acquire(claims, ..) => claims.len() > 1,
            Job::Release(claims, ..) => claims.len() > 1,
            _ => false,
        }
    }

    /// Returns the names that it may change.
    pub(super) fn keys(&self) -> Vec<&Key> {
        match self {
            Job::Acquire(claims, ..) => claims.iter().flat_map(|claim| claim.keys()).collect(),
            Job::Renew(claim, ..) | Job::Transfer(claim, ..) => claim.keys().iter().collect(),
            Job::Release(claims, ..) => claims.iter().flat_map(Claim::keys).collect(),
            Job::ForceRelease(key, _) => vec![key],
            Job::Inspect(..) | Job::List(..) => Vec::new(),
        }
    }

    /// Starts the job. `false`: its caller was dropped.
    pub(super) fn start(&self) -> bool {
        if self.is_cancelled() {
            return false;
        }
        let Job::Acquire(claims, start_state, _) = self else {
            return true;
        };
        // Mark before the start: a caller that can no longer cancel reads the marks.
        claims.iter().for_each(|claim| claim.mark_sent());
        start_state.start()
    }

    /// Whether the job has its answer, or its caller was dropped.
    pub(super) fn is_answered(&self) -> bool {
        match self {
            Job::Acquire(_, _, reply) => reply.answer.is_some() || reply.sender.is_closed(),
            Job::Renew(_, _, reply) | Job::Transfer(_, _, reply) => reply.answer.is_some() || reply.sender.is_closed(),
            Job::Release(_, _, reply) => reply.answer.is_some(),
            Job::ForceRelease(_, reply) => reply.answer.is_some(),
            Job::Inspect(_, reply) | Job::List(_, reply) => reply.answer.is_some(),
        }
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
pub(super) struct Sender(mpsc::UnboundedSender<Arrival>);

/// A job, and its arrival.
type Arrival = (Instant, Job);

/// The receiving half of the queue.
pub(super) struct Receiver {
    arrivals: mpsc::UnboundedReceiver<Arrival>,
    renewals: VecDeque<Job>,
    /// Releases, forced releases and transfers.
    releases: VecDeque<Job>,
    reads: VecDeque<Job>,
    attempts: OverloadQueue<Job>,
    limit: Limit,
    /// The number of jobs of each part in its last batch, without renewals.
    counted_in_batch: [usize; 3],
    /// The moving average of the time of a statement of attempts.
    statement_time: Duration,
}

/// The size of a transaction, or of a statement, unless one job is larger.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limit {
    pub claims: usize,
    /// How many renewals count as one claim.
    pub renewals_per_claim: usize,
}

/// Creates a queue. `limit`: the maximum size of a transaction, or of a statement.
pub(super) fn queue(limit: Limit) -> (Sender, Receiver) {
    let (sender, arrivals) = mpsc::unbounded_channel();
    let receiver = Receiver {
        arrivals,
        renewals: VecDeque::new(),
        releases: VecDeque::new(),
        reads: VecDeque::new(),
        attempts: OverloadQueue::default(),
        limit,
        counted_in_batch: [0; 3],
        statement_time: parts::MAX_STATEMENT_TIME,
    };
    (Sender(sender), receiver)
}

impl Limit {
    /// A limit for all kinds of jobs.
    pub(super) const fn claims(claims: usize) -> Self {
        Limit {
            claims,
            renewals_per_claim: 1,
        }
    }
}

impl Sender {
    /// Appends a job. When the task has ended, the job and its reply are dropped.
    pub(super) fn send(&self, job: Job) {
        let _ = self.0.send((Instant::now(), job));
    }
}

impl Receiver {
    /// Waits for jobs and moves those of one transaction to `batch`. `false`: the queue is empty and has no sender.
    ///
    /// # Cancellation
    /// Cancel-safe: no job is lost.
    pub(super) async fn next(&mut self, batch: &mut Vec<Job>) -> bool {
        if !self.have_jobs([true; 3]).await {
            return false;
        }
        let unit = self.limit.renewals_per_claim;
        let mut size = 0;
        for part in 0..3 {
            let most = (self.limit.claims * unit).max(size + SHARE * unit);
            size += self.take(part, (usize::MAX, most - size), batch);
        }
        true
    }

    /// Removes the next job of a part. `renewals_first`: a renewal before a release, otherwise a release before a renewal.
    fn next_of(&mut self, part: usize, renewals_first: bool) -> Option<Job> {
        match part {
            CHANGES if renewals_first => self.renewals.pop_front().or_else(|| self.releases.pop_front()),
            CHANGES => self.releases.pop_front().or_else(|| self.renewals.pop_front()),
            READS => self.reads.pop_front(),
            _ => {
                // The oldest attempts time out first. Remove them when they are cancelled: otherwise they stay behind the newest ones
                // during an overload.
                self.attempts.drop_oldest_while(Job::is_cancelled);
                self.attempts.pop()
            }
        }
    }

    /// Appends a job to its part.
    fn enter(&mut self, (since, job): Arrival) {
        match &job {
            Job::Renew(..) => self.renewals.push_back(job),
            Job::Transfer(..) | Job::Release(..) | Job::ForceRelease(..) => self.releases.push_back(job),
            Job::Inspect(..) | Job::List(..) => self.reads.push_back(job),
            Job::Acquire(claims, ..) => {
                let name = claims[0].keys()[0].clone();
                self.attempts.push(since, name, job);
            }
        }
    }
}

mod parts;
#[cfg(test)]
mod tests;
