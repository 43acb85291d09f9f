//! The task that uses the connection of single statements, and receives all calls.
//!
//! A statement is a transaction of its own, of up to 64 calls of a kind for names without a queue. Calls that it does not answer
//! go to the transactions (`worker.rs`): of several names, for a name with a queue, of waiters that found the name busy, and where
//! another transaction has locked the row.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::error::Kind;
use super::single_calls::{SingleCalls, answer_attempts, answer_reads, answer_releases, answer_renewals};
use super::slot::Slot;
use super::transaction::Prefix;
use super::waiters::Waiters;
use super::worker::{Names, cause};
use super::{Outcome, Server, Session};
use crate::engine::sql::jobs::{Job, Receiver, Sender};
use crate::model::{Claim, Key, OwnerToken};

/// The time between two sweeps of a process that makes calls; a random part is added.
const SWEEP_PAUSE: Duration = Duration::from_secs(300);

/// The owners of attempts in the queue of the transactions, or in one. Their releases have to follow them.
#[derive(Default)]
struct Forwarded(Mutex<HashMap<OwnerToken, usize>>);

/// Attempts of the transactions. Dropping it forgets their owners.
struct ForwardedAttempts {
    forwarded: Arc<Forwarded>,
    owners: Vec<OwnerToken>,
}

impl Drop for ForwardedAttempts {
    fn drop(&mut self) {
        let mut attempts = self.forwarded.0.lock();
        for owner in &self.owners {
            if let Some(count) = attempts.get_mut(owner) {
                *count -= 1;
                if *count == 0 {
                    attempts.remove(owner);
                }
            }
        }
    }
}

impl Forwarded {
    fn add(self: &Arc<Self>, claims: &[Arc<Claim>]) -> ForwardedAttempts {
        let owners: Vec<OwnerToken> = claims.iter().map(|claim| claim.owner.clone()).collect();
        let mut attempts = self.0.lock();
        for owner in &owners {
            *attempts.entry(owner.clone()).or_default() += 1;
        }
        drop(attempts);
        ForwardedAttempts {
            forwarded: self.clone(),
            owners,
        }
    }

    fn has(&self, owner: &OwnerToken) -> bool {
        self.0.lock().contains_key(owner)
    }
}

/// The connection and what the calls need.
pub(super) struct SingleWorker<S: Server> {
    pub slot: Slot<S>,
    pub prefix: Prefix,
    pub waiters: Arc<Waiters<S>>,
    /// The names whose waiters need a check.
    pub checks: mpsc::UnboundedReceiver<Vec<Key>>,
    /// The queue of the transactions.
    pub transactions: Sender,
    pub names: mpsc::UnboundedSender<Names>,
    /// The task of the transactions.
    pub worker: JoinHandle<()>,
    pub forwarded: ForwardedOwners,
    pub heartbeat_at: Option<Instant>,
    pub store_timeout: Duration,
}

/// The attempts that a [`SingleWorker`] has forwarded.
#[derive(Default)]
pub(super) struct ForwardedOwners(Arc<Forwarded>);

/// The jobs of a batch by what executes them.
#[derive(Default)]
struct Batch {
    reads: Vec<Job>,
    releases: Vec<Job>,
    renewals: Vec<Job>,
    /// Attempts for different names.
    attempts: Vec<Job>,
    /// Attempts for names of `attempts`.
    repeated: Vec<Job>,
    transactions: Vec<Job>,
}

impl<S: Server> SingleWorker<S> {
    /// Executes jobs until the last sender is gone, then closes the connections.
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
            // In a random order: frequent checks must not stop the calls, nor these the checks.
            tokio::select! {
                Some(names) = self.checks.recv() => self.check(names).await,
                next = jobs.next(&mut batch) => {
                    if !next {
                        break;
                    }
                    let batch = self.sorted(batch.drain(..));
                    self.execute(batch).await;
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
        drop((self.transactions, self.names));
        let _ = self.worker.await;
    }

    /// Sorts the jobs of a batch by what executes them. Starts the attempts of single statements.
    fn sorted(&self, jobs: impl Iterator<Item = Job>) -> Batch {
        let mut batch = Batch::default();
        let mut names: Vec<Key> = Vec::new();
        for job in jobs {
            let part = match &job {
                Job::Inspect(..) | Job::List(..) => &mut batch.reads,
                Job::Renew(claim, ..) if claim.keys().len() == 1 => &mut batch.renewals,
                Job::Release(claims, keep, _)
                    if keep.is_zero()
                        && matches!(&claims[..], [claim] if claim.keys().len() == 1)
                        && !self.has_waiters(&claims[0])
                        && !self.forwarded.0.has(&claims[0].owner) =>
                {
                    &mut batch.releases
                }
                Job::Acquire(claims, ticket, _)
                    if matches!(&claims[..], [claim] if claim.keys().len() == 1)
                        && !(claims[0].waiting && self.has_waiters(&claims[0])) =>
                {
                    // Mark before the start: a caller that can no longer cancel reads the marks.
                    claims[0].mark_sent();
                    if !ticket.start() {
                        continue;
                    }
                    let name = &claims[0].keys()[0];
                    if names.contains(name) {
                        &mut batch.repeated
                    } else {
                        names.push(name.clone());
                        &mut batch.attempts
                    }
                }
                _ => &mut batch.transactions,
            };
            part.push(job);
        }
        batch
    }

    /// Whether a single statement would certainly find a queue.
    fn has_waiters(&self, claim: &Claim) -> bool {
        self.waiters.known.is_waited_for(&claim.keys()[0])
    }

    /// Sends a job to the transactions.
    fn forward(&self, job: Job) {
        if let Job::Acquire(claims, ticket, _) = &job {
            ticket.attach(self.forwarded.0.add(claims));
        }
        self.transactions.send(job);
    }

    async fn execute(&mut self, mut batch: Batch) {
        batch.transactions.drain(..).for_each(|job| self.forward(job));
        let session = match self.slot.session().await {
            Ok(session) => session,
            Err(failure) => {
                let Batch {
                    reads,
                    releases,
                    renewals,
                    attempts,
                    repeated,
                    ..
                } = batch;
                let all = [reads, releases, renewals, attempts, repeated].into_iter().flatten();
                return all.for_each(|job| job.answer(Some(&failure)));
            }
        };
        let calls = SingleCalls::new(
            &self.prefix,
            &batch.releases,
            &batch.renewals,
            &batch.attempts,
            &batch.reads,
        );
        let answers = session.single(&calls).await;
        let prefix = &self.prefix;
        let released = self.slot.settle(answers.released);
        let released = released.map(|released| answer_releases(&mut batch.releases, prefix, released));
        let renewed = self.slot.settle(answers.renewed);
        let renewed = renewed.map(|renewed| answer_renewals(&mut batch.renewals, &renewed));
        let granted = self.slot.settle(answers.granted);
        let (attempts, repeated) = (&mut batch.attempts, &mut batch.repeated);
        let granted = granted.map(|granted| answer_attempts(attempts, repeated, prefix, granted));
        let read = self.slot.settle(answers.read);
        let read = read.map(|read| answer_reads(&mut batch.reads, prefix, read));
        batch.attempts.append(&mut batch.repeated);
        self.finish(batch.releases, &released);
        self.finish(batch.renewals, &renewed);
        self.finish(batch.attempts, &granted);
        batch.reads.into_iter().for_each(|job| job.answer(cause(&read)));
    }

    /// Answers jobs. Those without an answer go to the transactions.
    fn finish(&self, jobs: Vec<Job>, outcome: &Outcome<()>) {
        // A transaction reads committed rows, and executes each job on its own if one is the cause.
        let is_final = outcome
            .as_ref()
            .is_err_and(|failure| !matches!(failure.kind(), Kind::Conflict | Kind::Permanent));
        for job in jobs {
            if job.is_answered() || is_final {
                job.answer(cause(outcome));
            } else {
                self.forward(job);
            }
        }
    }
}
