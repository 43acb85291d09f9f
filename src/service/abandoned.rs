//! Claims that are to be released without a caller: of calls that timed out or were cancelled, of lost leases, of leases that
//! are held when the service closes.
//!
//! One list per service and one task: the oldest first, in batches, with one backoff for all. A few batches may be in progress,
//! so that a release without an answer holds up no other; claims whose release failed come again behind those that were not
//! tried yet. What a service that failed to reach its store has to clean up is thus bounded by the number of claims, and
//! costs the store few commands.

use std::collections::VecDeque;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt};
use tokio::sync::{Notify, watch};

use super::Inner;
use super::backoff::Backoff;
use super::lease::Lease;
use crate::clock::Moment;
use crate::engine::Released;
use crate::error::EngineError;
use crate::model::Claim;

/// Maximum number of claims in one call of the engine.
const BATCH: usize = 256;

/// Maximum number of calls of the engine in progress.
const BATCHES: usize = 8;
/// Maximum number of them when the next claims failed before: half of them stay free for claims that were not tried yet.
const BATCHES_OF_FAILED: usize = 4;
/// How long a batch has the store for itself: a silent store is asked seldom.
const HEAD_START: Duration = Duration::from_millis(250);
/// The shortest time for which a release is tried. A store that stands still may carry out an attempt long after its caller
/// gave up, and only then does the lease begin.
const SHORTEST_EFFORT: Duration = Duration::from_secs(300);
/// Maximum number of claims that were not released yet. Beyond it the oldest are left to their ttl.
const MOST_UNRELEASED: usize = 200_000;

/// Delays of the repeats of a doubtful release. Bytes that a broken connection left in a buffer are executed or lost within
/// about a minute.
const REPEATS: [Duration; 3] = [
    Duration::from_millis(500),
    Duration::from_secs(5),
    Duration::from_secs(60),
];
/// Delay of the first release of a claim whose attempt had no answer: it must not overtake what is on its way.
const UNANSWERED: Duration = Duration::from_millis(100);
/// Repeats that are due within this time share a batch.
const TOGETHER: Duration = Duration::from_millis(100);
/// Maximum number of claims that wait for the same repeat. Beyond it the oldest are repeated early.
const MOST_REPEATS: usize = 50_000;

/// A claim to release.
#[derive(Debug)]
pub(super) struct AbandonedClaim {
    claim: Claim,
    /// When the release is given up.
    ends: Moment,
    /// The names stay busy until this moment (`minHoldMs`).
    kept_until: Option<Moment>,
    /// An attempt failed that the store may still carry out: the release is repeated.
    doubtful: bool,
    /// The lease that a close ended. The store's answer becomes its last event.
    lease: Option<Arc<Lease>>,
}

impl AbandonedClaim {
    /// Creates an entry. `claim.ttl` is the longest time for which the store may keep the claim.
    pub(super) fn new(mut claim: Claim, doubtful: bool) -> Self {
        let ends = Moment::now() + claim.ttl.duration().max(SHORTEST_EFFORT);
        // A release needs to know that there is metadata, and not which.
        claim.metadata = claim.metadata.map(|_| Arc::default());
        AbandonedClaim {
            claim,
            ends,
            kept_until: None,
            doubtful,
            lease: None,
        }
    }

    /// Keeps the names busy until `until`.
    pub(super) fn kept_until(mut self, until: Option<Moment>) -> Self {
        self.kept_until = until;
        self
    }

    /// Reports the store's answer to `lease`.
    pub(super) fn of_lease(mut self, lease: &Arc<Lease>) -> Self {
        self.lease = Some(lease.clone());
        self
    }
}

/// The list of abandoned claims of one service.
#[derive(Debug)]
pub(super) struct AbandonedClaims {
    lists: Mutex<Lists>,
    /// Notified when a claim was added.
    added: Notify,
    /// Number of claims that have not been released once.
    unreleased: watch::Sender<usize>,
}

#[derive(Debug, Default)]
struct Lists {
    /// Claims that were not tried yet, oldest first.
    fresh: VecDeque<AbandonedClaim>,
    /// Claims whose attempt had no answer, with the time from which they are fresh.
    unanswered: VecDeque<(Moment, AbandonedClaim)>,
    /// Claims whose release failed, with the time of the next one.
    failed: VecDeque<(Moment, AbandonedClaim)>,
    /// Released claims with the time of their next release, one list for each repeat.
    repeats: [VecDeque<(Moment, AbandonedClaim)>; REPEATS.len()],
    /// Whether the task runs.
    is_served: bool,
    /// The service is closed: claims that come now are left to their ttl.
    is_closed: bool,
}

/// The next step of the task.
enum Step {
    /// Releases claims. The number is the index of their repeat; `None` for first releases.
    Release(Vec<AbandonedClaim>, Option<usize>),
    /// Waits until this moment, or for the end of a batch.
    Wait(Option<Moment>),
    End,
}

impl Default for AbandonedClaims {
    fn default() -> Self {
        AbandonedClaims {
            lists: Mutex::default(),
            added: Notify::new(),
            unreleased: watch::Sender::new(0),
        }
    }
}

impl AbandonedClaims {
    fn lock(&self) -> MutexGuard<'_, Lists> {
        self.lists.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether no claim waits for its first release.
    pub(super) fn is_empty(&self) -> bool {
        *self.unreleased.borrow() == 0
    }

    /// Waits until no claim waits for its first release.
    pub(super) async fn emptied(&self) {
        // The sender lives as long as `self`.
        let _ = self.unreleased.subscribe().wait_for(|count| *count == 0).await;
    }

    /// Empties the list, because the service and its engine close.
    pub(super) fn close(&self) {
        *self.lock() = Lists {
            is_closed: true,
            ..Lists::default()
        };
        self.unreleased.send_replace(0);
        self.added.notify_one();
    }
}

/// Removes up to [`BATCH`] claims whose time has come, and those in excess of `most`.
fn due(list: &mut VecDeque<(Moment, AbandonedClaim)>, at: Moment, most: usize) -> Vec<AbandonedClaim> {
    let early = list.len().saturating_sub(most);
    let due = list.iter().take(BATCH).take_while(|(due, _)| *due <= at).count();
    list.drain(..due.max(early.min(BATCH)))
        .map(|(_, claim)| claim)
        .collect()
}

impl Lists {
    /// The next step while `running` batches are in progress, of which the last began at `began`.
    fn next(&mut self, running: usize, began: Moment, closing: bool) -> Step {
        let now = Moment::now();
        let at = if closing { Moment::from_nanos(u64::MAX) } else { now };
        while self.unanswered.front().is_some_and(|(due, _)| *due <= at) {
            self.fresh.extend(self.unanswered.pop_front().map(|(_, claim)| claim));
        }
        let head_start = began + HEAD_START;
        let is_idle = self.unanswered.is_empty()
            && self.fresh.is_empty()
            && self.failed.is_empty()
            && (closing || self.repeats.iter().all(VecDeque::is_empty));
        if running > 0 && (is_idle || head_start > now || running >= BATCHES) {
            return Step::Wait((running < BATCHES && !is_idle).then_some(head_start));
        }
        if is_idle {
            self.is_served = false;
            return Step::End;
        }
        if !self.fresh.is_empty() {
            let batch = self.fresh.len().min(BATCH);
            return Step::Release(self.fresh.drain(..batch).collect(), None);
        }
        if running >= BATCHES_OF_FAILED {
            return Step::Wait(self.unanswered.front().map(|(at, _)| *at));
        }
        let failed = due(&mut self.failed, now, usize::MAX);
        if !failed.is_empty() {
            return Step::Release(failed, None);
        }
        let repeats: &mut [_] = if closing { &mut [] } else { &mut self.repeats };
        for (number, list) in repeats.iter_mut().enumerate() {
            let claims = due(list, now + TOGETHER, MOST_REPEATS);
            if !claims.is_empty() {
                return Step::Release(claims, Some(number));
            }
        }
        let lists = repeats.iter().chain([&self.failed, &self.unanswered]);
        Step::Wait(lists.filter_map(|list| list.front()).map(|(at, _)| *at).min())
    }
}

impl Inner {
    /// Releases a claim in the background if a command of it may have left this process.
    pub(super) fn abandon(self: &Arc<Self>, claim: &Claim) {
        if claim.was_sent() {
            self.release_in_background(AbandonedClaim::new(claim.clone(), true));
        }
    }

    /// Releases a claim in the background.
    pub(super) fn release_in_background(self: &Arc<Self>, claim: AbandonedClaim) {
        let mut lists = self.abandoned.lock();
        if lists.is_closed {
            return;
        }
        if lists.unanswered.len() + lists.fresh.len() + lists.failed.len() < MOST_UNRELEASED {
            self.abandoned.unreleased.send_modify(|count| *count += 1);
        } else if lists.failed.pop_front().is_none() && lists.fresh.pop_front().is_none() {
            lists.unanswered.pop_front();
        }
        if claim.doubtful && !self.closing.is_cancelled() {
            lists.unanswered.push_back((Moment::now() + UNANSWERED, claim));
        } else {
            lists.fresh.push_back(claim);
        }
        let is_served = std::mem::replace(&mut lists.is_served, true);
        drop(lists);
        if is_served {
            self.abandoned.added.notify_one();
        } else if tokio::runtime::Handle::try_current().is_ok() {
            // Without a runtime the process or the worker is about to end.
            self.background.spawn(self.clone().release_abandoned());
        }
    }

    /// Releases the claims on the list until it is empty.
    async fn release_abandoned(self: Arc<Self>) {
        let mut backoff = Backoff::for_store();
        let mut batches = FuturesUnordered::new();
        let mut began = Moment::now();
        loop {
            let step = {
                let mut lists = self.abandoned.lock();
                if lists.is_closed {
                    return;
                }
                lists.next(batches.len(), began, self.closing.is_cancelled())
            };
            let wait = match step {
                Step::End => return,
                Step::Release(claims, repeated) => {
                    began = Moment::now();
                    batches.push(self.release_batch(claims, repeated));
                    continue;
                }
                Step::Wait(until) => until,
            };
            let due = async {
                match wait {
                    Some(at) => tokio::time::sleep(at.remaining()).await,
                    None => std::future::pending().await,
                }
            };
            let is_closing = self.closing.is_cancelled();
            tokio::select! {
                Some(failed) = batches.next() => {
                    if failed.is_empty() {
                        backoff = Backoff::for_store();
                    } else {
                        let again = Moment::now() + backoff.pause();
                        let failed = failed.into_iter().map(|claim| (again, claim));
                        self.abandoned.lock().failed.extend(failed);
                    }
                }
                () = self.abandoned.added.notified() => {}
                () = self.closing.cancelled(), if !is_closing => {}
                () = due => {}
            }
        }
    }

    /// Releases a batch. Returns the claims to try again.
    async fn release_batch(&self, batch: Vec<AbandonedClaim>, repeated: Option<usize>) -> Vec<AbandonedClaim> {
        let mut answers: Vec<Option<Result<Released, EngineError>>> = batch.iter().map(|_| None).collect();
        let (kept, plain): (Vec<usize>, Vec<usize>) =
            (0..batch.len()).partition(|index| batch[*index].kept_until.is_some());
        let claims: Vec<Claim> = plain.iter().map(|index| batch[*index].claim.clone()).collect();
        let collected = Mutex::new(&mut answers);
        let collect = |index: usize, released| {
            collected.lock().unwrap_or_else(PoisonError::into_inner)[index] = Some(released);
        };
        let mut answer = |index: usize, released| collect(plain[index], released);
        let listed = &batch;
        let release_kept = kept.iter().map(|&index| async move {
            let keep = listed[index].kept_until.map_or(Duration::ZERO, Moment::remaining);
            (index, self.engine.release(&listed[index].claim, keep).await)
        });
        let releasing = async {
            let plain = async {
                if !claims.is_empty() {
                    self.engine.release_all(&claims, &mut answer).await;
                }
            };
            let mut release_kept: FuturesUnordered<_> = release_kept.collect();
            let kept = async {
                while let Some((index, released)) = release_kept.next().await {
                    collect(index, released);
                }
            };
            tokio::join!(plain, kept);
        };
        // A panic in the engine counts as no answer: the list goes on.
        let releasing = AssertUnwindSafe(releasing).catch_unwind();
        drop(tokio::time::timeout(self.store_timeout, releasing).await);
        let (mut again, mut done) = (Vec::new(), 0);
        for (mut abandoned, answer) in batch.into_iter().zip(answers) {
            match answer {
                Some(Ok(released)) => {
                    for key in abandoned.claim.keys() {
                        self.local_fifos.wake_first(key);
                    }
                    if let Some(lease) = abandoned.lease.take() {
                        lease.released(self, released == Released::Freed);
                    }
                    done += 1;
                    self.repeat(abandoned, repeated.map_or(0, |number| number + 1));
                }
                // A permanent error is not retried.
                Some(Err(error)) if !error.retryable => {
                    tracing::debug!(%error, "an abandoned claim could not be released; it expires with its ttl");
                    done += 1;
                }
                Some(Err(_)) | None => {
                    abandoned.doubtful = true;
                    match repeated {
                        // The claim was released before: wait for its next repeat.
                        Some(number) => self.repeat(abandoned, number + 1),
                        None if abandoned.ends.is_past() => done += 1,
                        None => again.push(abandoned),
                    }
                }
            }
        }
        if repeated.is_none() {
            self.abandoned
                .unreleased
                .send_modify(|count| *count = count.saturating_sub(done));
        }
        again
    }

    /// Schedules the next repeat of a doubtful claim.
    fn repeat(&self, abandoned: AbandonedClaim, number: usize) {
        let Some(pause) = REPEATS.get(number).filter(|_| abandoned.doubtful) else {
            return;
        };
        let at = Moment::now() + *pause;
        let mut lists = self.abandoned.lock();
        if !lists.is_closed {
            lists.repeats[number].push_back((at, abandoned));
        }
    }
}
