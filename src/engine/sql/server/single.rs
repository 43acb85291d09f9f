//! The task that receives all calls, and executes those that are one statement. Attempts, whose commits wait for the disk,
//! renewals and releases, and reads do not wait for each other: those that are under way at the same time have a connection each,
//! if there are as many.
//!
//! A statement is a transaction of its own, of several calls of a kind for names without a queue. On PostgreSQL a release also hands
//! its name off. Calls that a statement does not answer go to the transactions (`worker.rs`): of several names, for a name with a
//! queue, of waiters that found the name busy, and where another transaction has locked the row.

use std::borrow::Borrow;
use std::collections::{HashMap, HashSet};
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::{Arc, Weak};
use std::task::Poll;

use parking_lot::Mutex;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::Outcome;
use super::pool::Pool;
use super::single_calls::{
    Granted, PageRead, QueuedNames, ReleasedNames, RenewedOwners, SingleChanges, answer_attempts, answer_reads,
    answer_releases, answer_renewals, attempts, pages,
};
use super::transaction::{CheckedNames, Prefix};
use super::upkeep::SWEEP_INTERVAL;
use super::waiters::Waiters;
use super::worker::LockedNames;
use crate::clock::Moment;
use crate::engine::core::ledger::StoredName;
use crate::engine::sql::Page;
use crate::engine::sql::failure::{Failure, Kind};
use crate::engine::sql::jobs::{ATTEMPTS, CHANGES, Job, READS, Receiver, Sender, StartState};
use crate::event_loop::{Task, unless_it_panics};
use crate::model::{Claim, Key, OwnerToken};

/// The attempts in the queue of the transactions, or in one, by owner. The releases of an owner have to follow them.
#[derive(Default)]
pub(super) struct ForwardedOwners(Mutex<HashMap<OwnerToken, Weak<StartState>>>);

impl ForwardedOwners {
    fn add(&self, claims: &[Arc<Claim>], attempt: &Arc<StartState>) {
        let mut attempts = self.0.lock();
        if attempts.len() + claims.len() > attempts.capacity() {
            attempts.retain(|_, attempt| attempt.strong_count() > 0);
            let most = attempts.len() + claims.len();
            attempts.reserve(most);
        }
        // Of several attempts of an owner the last one is executed last.
        attempts.extend(
            claims
                .iter()
                .map(|claim| (claim.owner.clone(), Arc::downgrade(attempt))),
        );
    }

    fn has(&self, owner: &OwnerToken) -> bool {
        let attempts = self.0.lock();
        attempts.get(owner).is_some_and(|attempt| attempt.strong_count() > 0)
    }
}

/// What the statements of the calls need.
pub(super) struct Shared {
    pub pool: Arc<Pool>,
    pub prefix: Prefix,
    pub waiters: Arc<Waiters>,
    /// The queue of the transactions.
    pub transactions: Sender,
    pub names: mpsc::UnboundedSender<CheckedNames>,
    pub locked: Arc<LockedNames>,
    pub forwarded: ForwardedOwners,
    pub queued: QueuedNames,
    pub timers: Timers,
}

/// The due times of the heartbeat and of the sweep. `None`: not yet.
#[derive(Default)]
pub(super) struct Timers {
    pub heartbeat_at: Mutex<Option<Instant>>,
    /// The next sweep. A process without calls sends nothing.
    pub sweep_at: Mutex<Option<Instant>>,
    /// The last name that a sweep has read.
    pub swept_to: Mutex<StoredName>,
}

/// Statements under way.
type Running<'a> = Option<Pin<Box<dyn Future<Output = ()> + Send + 'a>>>;

/// The task, and what it needs.
pub(super) struct SingleWorker {
    pub shared: Shared,
    /// The names whose waiters need a check.
    pub checks: mpsc::UnboundedReceiver<Vec<Key>>,
    /// The task of the transactions.
    pub worker: Task,
}

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
}

/// Starts statements. If they panic, their connection is closed.
fn started<'a>(statements: impl Future<Output = ()> + Send + 'a) -> Running<'a> {
    Some(Box::pin(async move { _ = unless_it_panics(pin!(statements)).await }))
}

/// Waits for the end of statements. Returns their part of the queue.
async fn ended(running: &mut [Running<'_>; 3]) -> usize {
    poll_fn(|context| {
        for (part, statements) in running.iter_mut().enumerate() {
            if statements
                .as_mut()
                .is_some_and(|one| one.as_mut().poll(context).is_ready())
            {
                *statements = None;
                return Poll::Ready(part);
            }
        }
        Poll::Pending
    })
    .await
}

impl SingleWorker {
    /// Executes jobs until the last sender is gone, then closes the connections.
    pub(super) async fn run(self, jobs: Receiver) {
        serve(&self.shared, self.checks, jobs).await;
        let pool = self.shared.pool.clone();
        drop(self.shared);
        self.worker.ended().await;
        pool.close();
    }
}

/// Executes the jobs of a queue.
async fn serve(shared: &Shared, mut checks: mpsc::UnboundedReceiver<Vec<Key>>, mut jobs: Receiver) {
    // By part of the queue.
    let mut running: [Running<'_>; 3] = [None, None, None];
    // The owners of the attempts under way, and releases that have to follow one of them.
    let (mut owners, mut held_back): (Vec<OwnerToken>, Vec<Job>) = (Vec::new(), Vec::new());
    let (mut batch, mut started_at) = (Vec::new(), Instant::now());
    loop {
        let free = running.each_ref().map(Option::is_none);
        let [_, can_check, can_attempt] = free;
        if can_attempt {
            owners.clear();
            held_back.drain(..).for_each(|job| shared.transactions.send(job));
        }
        // `select!` polls in random order, so that neither checks nor calls starve.
        tokio::select! {
            part = ended(&mut running) => {
                if part == ATTEMPTS {
                    jobs.took(started_at.elapsed());
                }
            }
            Some(names) = checks.recv(), if can_check => {
                let mut all = names;
                while let Ok(more) = checks.try_recv() {
                    all.extend(more);
                }
                running[READS] = started(shared.check(all));
            }
            () = shared.timers.sweep_due(), if can_check => running[READS] = started(shared.sweep()),
            next = jobs.next_of_parts(&mut batch, free), if free != [false; 3] => {
                if !next {
                    if free == [true; 3] {
                        break;
                    }
                    // Other parts of the queue may have jobs.
                    ended(&mut running).await;
                    continue;
                }
                let sorted = shared.sorted(batch.drain(..), &owners, &mut held_back);
                if !(sorted.releases.is_empty() && sorted.renewals.is_empty()) {
                    running[CHANGES] = started(shared.change(sorted.releases, sorted.renewals));
                }
                if !sorted.attempts.is_empty() {
                    owners.extend(sorted.attempts.iter().chain(&sorted.repeated).filter_map(owner));
                    started_at = Instant::now();
                    running[ATTEMPTS] = started(shared.attempt(sorted.attempts, sorted.repeated));
                }
                if !sorted.reads.is_empty() {
                    running[READS] = started(shared.read(sorted.reads));
                }
                shared.timers.start();
            }
        }
    }
}

/// Whether a job of these claims may be a single statement: one claim of one name, which is not shared. (A renewal of a share is that of a
/// row.)
fn is_of_one_lock(claims: &[impl Borrow<Claim>]) -> bool {
    matches!(claims, [claim] if claim.borrow().keys().len() == 1 && claim.borrow().share.is_none())
}

/// Returns the owner of an attempt for one name.
fn owner(job: &Job) -> Option<OwnerToken> {
    match job {
        Job::Acquire(claims, ..) => claims.first().map(|claim| claim.owner.clone()),
        _ => None,
    }
}

impl Timers {
    /// Starts the time to the next sweep.
    fn start(&self) {
        let next = || Instant::now() + SWEEP_INTERVAL.mul_f64(1.0 + fastrand::f64());
        self.sweep_at.lock().get_or_insert_with(next);
    }

    /// Waits until a sweep is due.
    async fn sweep_due(&self) {
        let at = *self.sweep_at.lock();
        match at {
            Some(at) => tokio::time::sleep_until(at).await,
            None => std::future::pending().await,
        }
    }
}

impl Shared {
    /// Sorts the jobs of a batch by what executes them. Sends those of the transactions on.
    fn sorted(&self, jobs: impl Iterator<Item = Job>, attempting: &[OwnerToken], held_back: &mut Vec<Job>) -> Batch {
        let mut batch = Batch::default();
        // A statement has each name once, and renews each lease once.
        let (mut names, mut released): (Vec<Key>, Vec<Key>) = (Vec::new(), Vec::new());
        let mut renewed = HashSet::new();
        for job in jobs {
            let part = match &job {
                Job::Inspect(..) | Job::List(..) => &mut batch.reads,
                Job::Renew(claim, ..) if claim.keys().len() == 1 && renewed.insert(claim.owner.clone()) => {
                    &mut batch.renewals
                }
                Job::Release(claims, ..) if claims.iter().any(|claim| attempting.contains(&claim.owner)) => {
                    held_back.push(job);
                    continue;
                }
                Job::Release(claims, keep, _)
                    if keep.is_zero()
                        && is_of_one_lock(claims)
                        && (self.waiters.server.hands_off_in_one() || !self.has_waiters(&claims[0]))
                        && !released.contains(&claims[0].keys()[0])
                        && !self.forwarded.has(&claims[0].owner) =>
                {
                    released.push(claims[0].keys()[0].clone());
                    &mut batch.releases
                }
                Job::Acquire(claims, ..)
                    if is_of_one_lock(claims)
                        && !(claims[0].waiting && self.has_waiters(&claims[0]))
                        && !self.is_locked(&claims[0]) =>
                {
                    let name = &claims[0].keys()[0];
                    if names.contains(name) {
                        &mut batch.repeated
                    } else {
                        names.push(name.clone());
                        &mut batch.attempts
                    }
                }
                _ => {
                    self.forward(job);
                    continue;
                }
            };
            part.push(job);
        }
        batch
    }

    /// Whether a single statement would certainly find a queue.
    fn has_waiters(&self, claim: &Claim) -> bool {
        self.waiters.known.is_waited_for(&claim.keys()[0])
    }

    /// Whether another program may have locked the row of the name: the other calls of a statement would wait for it.
    fn is_locked(&self, claim: &Claim) -> bool {
        let name = std::iter::once_with(|| self.prefix.stored(&claim.keys()[0]));
        self.locked.has_one_of(name)
    }

    /// Whether the name of a release is likely to have a queue.
    fn expects_queue(&self, release: &Job) -> bool {
        match release {
            Job::Release(claims, ..) => self.has_waiters(&claims[0]) || self.queued.contain(&claims[0].keys()[0]),
            _ => false,
        }
    }

    /// Sends a job to the transactions.
    fn forward(&self, job: Job) {
        if let Job::Acquire(claims, start_state, _) = &job {
            self.forwarded.add(claims, start_state);
        }
        self.transactions.send(job);
    }

    /// Makes attempts. `repeated`: attempts for the same names.
    async fn attempt(&self, mut first: Vec<Job>, mut repeated: Vec<Job>) {
        let granted = self.granted(&mut first, &mut repeated).await;
        let granted = granted.map(|granted| answer_attempts(&mut first, &mut repeated, &self.prefix, granted));
        first.append(&mut repeated);
        self.finish(first, &granted);
    }

    /// Executes attempts. Removes cancelled ones.
    async fn granted(&self, first: &mut Vec<Job>, repeated: &mut Vec<Job>) -> Outcome<Granted> {
        let mut checkout = self.pool.checkout().await?;
        first.retain(Job::start);
        repeated.retain(Job::start);
        if first.is_empty() {
            return Ok(Granted::default());
        }
        let granted = checkout.session()?.attempt(&attempts(&self.prefix, first)).await;
        checkout.settle(granted)
    }

    /// Makes releases and renewals.
    async fn change(&self, mut releases: Vec<Job>, mut renewals: Vec<Job>) {
        let prefix = &self.prefix;
        let sent = Moment::now();
        let (released, renewed) = match self.changed(&releases, &renewals).await {
            Ok(outcomes) => outcomes,
            Err(failure) => (Err(failure.clone()), Err(failure)),
        };
        let released = released.map(|released| {
            let effects = answer_releases(&mut releases, prefix, released, &self.queued);
            self.waiters.apply_hand_offs(sent, effects);
        });
        let renewed = renewed.map(|renewed| answer_renewals(&mut renewals, &renewed));
        self.finish(releases, &released);
        self.finish(renewals, &renewed);
    }

    /// Executes releases and renewals.
    async fn changed(&self, releases: &[Job], renewals: &[Job]) -> Outcome<(ReleasedNames, RenewedOwners)> {
        let mut checkout = self.pool.checkout().await?;
        let mut changes = SingleChanges::new(&self.prefix, releases, renewals);
        changes.expects_queue = releases.iter().any(|job| self.expects_queue(job));
        let (released, renewed) = checkout.session()?.change(&self.waiters.process, &changes).await;
        Ok((checkout.settle(released), checkout.settle(renewed)))
    }

    /// Makes calls that only read.
    async fn read(&self, mut jobs: Vec<Job>) {
        let read = self.read_pages(&pages(&jobs)).await;
        let read = read.map(|read| answer_reads(&mut jobs, &self.prefix, read));
        jobs.into_iter().for_each(|job| job.answer(read.as_ref().err()));
    }

    async fn read_pages(&self, pages: &[Page]) -> Outcome<Vec<PageRead>> {
        let mut checkout = self.pool.checkout().await?;
        let read = checkout.session()?.read(pages).await;
        checkout.settle(read)
    }

    /// Answers the jobs of a statement. Those without an answer go to the transactions.
    fn finish(&self, jobs: Vec<Job>, outcome: &Outcome<()>) {
        // A transaction reads committed rows, and is divided if a locked row or one of the jobs is the cause.
        let kind = outcome.as_ref().err().map(Failure::kind);
        let is_final = kind.is_some_and(|kind| !kind.is_left_to_transactions());
        if kind == Some(Kind::Locked) {
            self.locked.record_wait();
        }
        for job in jobs {
            if job.is_answered() || is_final {
                job.answer(outcome.as_ref().err());
            } else {
                self.forward(job);
            }
        }
    }
}
