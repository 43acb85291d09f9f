//! Claims that are released without a caller: of calls that timed out or were cancelled, of lost leases, and of leases that are
//! held when the service closes.
//!
//! Each service has one list and one task. The task releases the oldest claims first, in batches, with one backoff for all. A few
//! batches may be in progress, so that a release without an answer does not delay the others. Claims whose release failed are
//! retried after those that were not tried yet. After an outage, the clean-up thus costs the store few commands, and its size is
//! bounded by the number of claims.

use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::OptionFuture;
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt};
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};

use super::Shared;
use super::lease::Lease;
use crate::backoff::Backoff;
use crate::clock::Moment;
use crate::engine::{Acquired, EngineExt, Released, answer_each};
use crate::error::EngineError;
use crate::model::{Claim, OwnerToken, Ttl};

/// Maximum number of claims in one call of the engine.
const BATCH: usize = 256;

/// Maximum number of calls of the engine in progress.
const BATCHES: usize = 8;
/// Maximum number of calls in progress for a retry or a repeat to start: half of them stay free for first releases.
const BATCHES_OF_RETRIES: usize = 4;
/// Minimum time between the starts of two batches, beyond those that may be in progress because earlier ones were answered: a store
/// that does not answer gets few commands.
const HEAD_START: Duration = Duration::from_millis(250);
/// Minimum time for which a release is retried. A store that hangs may execute an attempt long after the call ended, and the
/// lease begins only then.
const MIN_EFFORT: Duration = Duration::from_secs(300);
/// Maximum number of claims that were not released yet. Beyond it the oldest are left to their ttl.
const MAX_UNRELEASED: usize = 200_000;

/// Delays of the repeats of a doubtful release. Bytes that a broken connection left in a buffer are executed or lost within
/// about a minute.
const REPEATS: [Duration; 3] = [
    Duration::from_millis(500),
    Duration::from_secs(5),
    Duration::from_secs(60),
];
/// Delay of the first release of a claim whose attempt had no answer: it must not overtake the attempt.
const UNANSWERED_DELAY: Duration = Duration::from_millis(100);
/// Repeats that are due within this time share a batch.
const TOGETHER: Duration = Duration::from_millis(100);
/// Maximum number of claims that wait for a repeat. Beyond it the next ones are repeated early.
const MAX_REPEATS: usize = 150_000;

/// A claim to release.
#[derive(Debug)]
pub(super) struct AbandonedClaim {
    claim: Claim,
    /// When the retries end.
    ends: Moment,
    /// The names stay busy until this moment (`minHoldMs`), for this owner if the lease has expired.
    min_hold: Option<(Moment, OwnerToken)>,
    /// An attempt failed, and the store may still execute it: the release is repeated.
    doubtful: bool,
    /// The number of repeats that were scheduled. Zero: the store has not answered a release.
    repeats: usize,
    /// The lease that a close ended. The store's answer becomes its last event.
    lease: Option<Arc<Lease>>,
}

impl AbandonedClaim {
    /// Creates an entry. `claim.ttl` is the longest time for which the store may keep the claim.
    pub(super) fn new(mut claim: Claim, doubtful: bool) -> Self {
        let ends = Moment::now() + claim.ttl.duration().max(MIN_EFFORT);
        // A release needs to know whether there is metadata, but not its text.
        claim.metadata = claim.metadata.map(|_| Arc::default());
        AbandonedClaim {
            claim,
            ends,
            min_hold: None,
            doubtful,
            repeats: 0,
            lease: None,
        }
    }

    /// Keeps the names busy until `until`.
    pub(super) fn min_hold_until(mut self, until: Option<Moment>) -> Self {
        self.min_hold = until.map(|until| (until, OwnerToken::fresh()));
        self
    }

    /// Reports the store's answer to `lease`.
    pub(super) fn of_lease(mut self, lease: &Arc<Lease>) -> Self {
        self.lease = Some(lease.clone());
        self
    }
}

/// The list of abandoned claims of one service.
#[derive(Debug, Default)]
pub(super) struct AbandonedClaims {
    lists: Mutex<Lists>,
    /// Notified when a claim was added.
    added: Notify,
    /// Number of claims that have not been released once.
    unreleased: watch::Sender<usize>,
}

/// Claims by the time of their next release, and in order of arrival.
type Queue = BTreeMap<(Moment, u64), AbandonedClaim>;

#[derive(Debug, Default)]
struct Lists {
    /// The queues, in the order in which they are served.
    queues: [Queue; 3],
    /// The number of the newest entry of a queue.
    last_number: u64,
    /// The service is closed: claims that come now are left to their ttl.
    is_closed: bool,
}

/// The queue of claims that were not tried yet.
const FIRST: usize = 0;
/// The queue of claims whose release failed.
const RETRIES: usize = 1;
/// The queue of released claims whose release is repeated.
const REPEATED: usize = 2;

/// The next step of the task.
enum Step {
    Release(Vec<AbandonedClaim>),
    /// Waits until this moment, for the end of a batch, or for a claim.
    Wait(Option<Moment>),
}

impl AbandonedClaims {
    /// Whether no claim waits for its first release.
    pub(super) fn is_empty(&self) -> bool {
        self.unreleased() == 0
    }

    /// Returns the number of claims that wait for their first release.
    pub(super) fn unreleased(&self) -> usize {
        *self.unreleased.borrow()
    }

    /// Waits until no claim waits for its first release.
    pub(super) async fn emptied(&self) {
        // The sender lives as long as `self`.
        let _ = self.unreleased.subscribe().wait_for(|count| *count == 0).await;
    }

    /// Empties the list, because the service and its engine close.
    pub(super) fn close(&self) {
        *self.lists.lock() = Lists {
            is_closed: true,
            ..Lists::default()
        };
        self.unreleased.send_replace(0);
        self.added.notify_one();
    }
}

impl Lists {
    fn push(&mut self, queue: usize, due: Moment, claim: AbandonedClaim) {
        self.last_number += 1;
        self.queues[queue].insert((due, self.last_number), claim);
    }

    /// Removes up to [`BATCH`] claims that are due at `now`, and those in excess of `limit`.
    fn take(&mut self, queue: usize, now: Moment, limit: usize) -> Vec<AbandonedClaim> {
        let queue = &mut self.queues[queue];
        let excess = queue.len().saturating_sub(limit);
        let mut batch = Vec::new();
        while batch.len() < BATCH
            && let Some(entry) = queue.first_entry()
            && (entry.key().0 <= now || batch.len() < excess)
        {
            batch.push(entry.remove());
        }
        batch
    }

    /// Returns the next step while `running` batches are in progress, of which the last began at `began`. `at_once`: how many may
    /// be in progress without a head start.
    fn next(&mut self, running: usize, at_once: usize, began: Moment, closing: bool) -> Step {
        let now = Moment::now();
        if closing {
            self.queues[REPEATED].clear();
        }
        let is_idle = self.queues.iter().all(Queue::is_empty);
        let head_start = began + HEAD_START;
        if is_idle || running > 0 && (running >= at_once && head_start > now || running >= BATCHES) {
            return Step::Wait((running < BATCHES && !is_idle).then_some(head_start));
        }
        let first_due = if closing { Moment::from_nanos(u64::MAX) } else { now };
        let queues = [
            (first_due, usize::MAX),
            (now, usize::MAX),
            (now + TOGETHER, MAX_REPEATS),
        ];
        let served = if running < BATCHES_OF_RETRIES { queues.len() } else { 1 };
        for (queue, (due, limit)) in queues.into_iter().enumerate().take(served) {
            let batch = self.take(queue, due, limit);
            if !batch.is_empty() {
                return Step::Release(batch);
            }
        }
        let next = self.queues[..served].iter().filter_map(Queue::first_key_value);
        Step::Wait(next.map(|((due, _), _)| *due).min())
    }
}

impl Shared {
    /// Releases a claim in the background if a command of it may have left this process.
    pub(super) fn abandon(self: &Arc<Self>, claim: &Claim) {
        if claim.was_sent() {
            self.release_in_background(AbandonedClaim::new(claim.clone(), true));
        }
    }

    /// Releases a claim in the background.
    pub(super) fn release_in_background(self: &Arc<Self>, claim: AbandonedClaim) {
        let mut lists = self.abandoned.lists.lock();
        if lists.is_closed {
            return;
        }
        if lists.queues[FIRST].len() + lists.queues[RETRIES].len() < MAX_UNRELEASED {
            self.abandoned.unreleased.send_modify(|count| *count += 1);
        } else if lists.queues[RETRIES].pop_first().is_none() {
            lists.queues[FIRST].pop_first();
        }
        let delay = if claim.doubtful {
            UNANSWERED_DELAY
        } else {
            Duration::ZERO
        };
        lists.push(FIRST, Moment::now() + delay, claim);
        drop(lists);
        self.abandoned.added.notify_one();
    }

    /// Releases the claims on the list until it is closed.
    pub(super) async fn release_abandoned(self: Arc<Self>) {
        let mut backoff = Backoff::for_store();
        let mut batches = FuturesUnordered::new();
        let mut began = Moment::now();
        // Each batch that the store answers allows one more: a distant store needs several to release many claims in time.
        let mut at_once = 1;
        loop {
            let step = {
                let mut lists = self.abandoned.lists.lock();
                if lists.is_closed {
                    return;
                }
                lists.next(batches.len(), at_once, began, self.closing.is_cancelled())
            };
            let due = match step {
                Step::Release(batch) => {
                    began = Moment::now();
                    batches.push(self.release_batch(batch));
                    continue;
                }
                Step::Wait(until) => until.map(|at| tokio::time::sleep(at.remaining())),
            };
            if batches.is_empty() && due.is_none() {
                at_once = 1;
                backoff.reset();
            }
            let is_closing = self.closing.is_cancelled();
            tokio::select! {
                Some(failed) = batches.next() => {
                    if failed.is_empty() {
                        backoff.reset();
                        at_once = BATCHES.min(at_once + 1);
                    } else {
                        at_once = 1;
                        let due = Moment::now() + backoff.delay();
                        let mut lists = self.abandoned.lists.lock();
                        failed.into_iter().for_each(|claim| lists.push(RETRIES, due, claim));
                    }
                }
                () = self.abandoned.added.notified() => {}
                () = self.closing.cancelled(), if !is_closing => {}
                Some(()) = OptionFuture::from(due) => {}
            }
        }
    }

    /// Releases a batch. Returns the claims to retry.
    async fn release_batch(&self, mut batch: Vec<AbandonedClaim>) -> Vec<AbandonedClaim> {
        batch.sort_by_key(|abandoned| abandoned.min_hold.is_some());
        let mut answers: Vec<Option<Result<Released, EngineError>>> = batch.iter().map(|_| None).collect();
        let plain = batch.partition_point(|abandoned| abandoned.min_hold.is_none());
        let (plain, kept) = batch.split_at(plain);
        let (answers_to_plain, answers_to_kept) = answers.split_at_mut(plain.len());
        let claims: Vec<&Claim> = plain.iter().map(|abandoned| &abandoned.claim).collect();
        let mut answer = |index: usize, released| answers_to_plain[index] = Some(released);
        let mut answer_kept = |index: usize, released| answers_to_kept[index] = Some(released);
        let releasing = async {
            let plain = async {
                if !claims.is_empty() {
                    self.engine.release_all(&claims, Duration::ZERO, &mut answer).await;
                }
            };
            let kept = kept.iter().map(|abandoned| self.release_kept(abandoned));
            tokio::join!(plain, answer_each(kept, &mut answer_kept));
        };
        // A panic in the engine counts as no answer. The task continues.
        let releasing = AssertUnwindSafe(releasing).catch_unwind();
        drop(tokio::time::timeout(self.store_timeout, releasing).await);
        let (mut failed, mut done) = (Vec::new(), 0);
        for (mut abandoned, answer) in batch.into_iter().zip(answers) {
            let is_first = abandoned.repeats == 0;
            match answer {
                Some(Ok(released)) => {
                    for key in abandoned.claim.keys() {
                        self.local_fifos.wake_first(key);
                    }
                    if let Some(lease) = abandoned.lease.take() {
                        lease.emit_released(self, released == Released::Freed);
                    }
                    self.schedule_repeat(abandoned);
                }
                // A permanent error is not retried.
                Some(Err(error)) if !error.retryable => {
                    tracing::debug!(%error, "an abandoned claim could not be released; it expires with its ttl");
                }
                Some(Err(_)) | None => {
                    abandoned.doubtful = true;
                    if !is_first {
                        // The claim was released before: wait for its next repeat.
                        self.schedule_repeat(abandoned);
                    } else if !abandoned.ends.is_past() {
                        failed.push(abandoned);
                        continue;
                    }
                }
            }
            done += usize::from(is_first);
        }
        self.abandoned
            .unreleased
            .send_modify(|count| *count = count.saturating_sub(done));
        failed
    }

    /// Releases a claim with a minimum hold. Makes its names busy again if the lease expired before this release, in an outage of the
    /// store. They are busy already if an earlier release was executed, and had no answer.
    async fn release_kept(&self, abandoned: &AbandonedClaim) -> Result<Released, EngineError> {
        let (claim, min_hold) = (&abandoned.claim, abandoned.min_hold.as_ref());
        let keep = min_hold.map_or(Duration::ZERO, |(until, _)| until.remaining());
        let released = self.engine.release(claim, keep).await?;
        if let (Released::NotHeld, 0, Some((_, owner))) = (released, abandoned.repeats, min_hold) {
            // An earlier attempt may have been executed: this one has its owner.
            let hold = Claim::new(claim.keys(), owner.clone(), Ttl::clamped(keep), claim.process.clone());
            if keep.is_zero() || matches!(self.engine.try_acquire(&hold).await?, Acquired::Granted { .. }) {
                // On ZooKeeper, the lease ends with this process.
                self.engine.release(&hold, keep).await?;
            }
        }
        Ok(released)
    }

    /// Schedules the next repeat of a doubtful claim.
    fn schedule_repeat(&self, mut abandoned: AbandonedClaim) {
        let Some(delay) = REPEATS.get(abandoned.repeats).filter(|_| abandoned.doubtful) else {
            return;
        };
        abandoned.repeats += 1;
        let mut lists = self.abandoned.lists.lock();
        if !lists.is_closed {
            lists.push(REPEATED, Moment::now() + *delay, abandoned);
        }
    }
}
