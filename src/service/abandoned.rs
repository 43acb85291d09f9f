//! Claims that are to be released without a caller: of calls that timed out or were cancelled, of lost leases, of leases that
//! are held when the service closes.
//!
//! One list per service and one task: the oldest first, in batches, with one backoff for all. What a service that failed to
//! reach its store has to clean up is thus bounded by the number of claims, and costs the store few commands.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

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

/// Delays of the repeats of a doubtful release. Bytes that a broken connection left in a buffer are executed or lost within
/// about a minute.
const REPEATS: [Duration; 3] = [
    Duration::from_millis(500),
    Duration::from_secs(5),
    Duration::from_secs(60),
];
/// Repeats that are due within this time share a batch.
const TOGETHER: Duration = Duration::from_millis(100);
/// Maximum number of claims that wait for the same repeat. Beyond it the oldest are repeated early.
const MOST_REPEATS: usize = 50_000;

/// A claim to release.
#[derive(Debug)]
pub(super) struct AbandonedClaim {
    claim: Claim,
    /// When the claim has expired at the store.
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
    pub(super) fn new(claim: Claim, doubtful: bool) -> Self {
        let ends = Moment::now() + claim.ttl.duration().max(Duration::from_secs(1));
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
    /// Claims that have not been released once, oldest first.
    unreleased: VecDeque<AbandonedClaim>,
    /// Released claims with the time of their next release, one list for each repeat.
    repeats: [VecDeque<(Moment, AbandonedClaim)>; REPEATS.len()],
    /// Whether the task runs.
    is_served: bool,
}

/// The next step of the task.
enum Step {
    /// Releases claims. The number is the index of their repeat; `None` for first releases.
    Release(Vec<AbandonedClaim>, Option<usize>),
    /// Waits until this moment.
    Wait(Moment),
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
    pub(super) fn clear(&self) {
        let mut lists = self.lock();
        lists.unreleased.clear();
        lists.repeats = Default::default();
        drop(lists);
        self.unreleased.send_replace(0);
        self.added.notify_one();
    }
}

impl Lists {
    fn next(&mut self, closing: bool) -> Step {
        if !self.unreleased.is_empty() {
            let batch = self.unreleased.len().min(BATCH);
            return Step::Release(self.unreleased.drain(..batch).collect(), None);
        }
        if !closing {
            let soon = Moment::now() + TOGETHER;
            let mut next = None;
            for (number, list) in self.repeats.iter_mut().enumerate() {
                let early = list.len().saturating_sub(MOST_REPEATS);
                let due = list.iter().take(BATCH).take_while(|(at, _)| *at <= soon).count();
                let batch = due.max(early.min(BATCH));
                if batch > 0 {
                    let claims = list.drain(..batch).map(|(_, claim)| claim).collect();
                    return Step::Release(claims, Some(number));
                }
                let first = list.front().map(|(at, _)| *at);
                next = match (next, first) {
                    (Some(next), Some(first)) => Some(first.min(next)),
                    (next, first) => next.or(first),
                };
            }
            if let Some(at) = next {
                return Step::Wait(at);
            }
        }
        *self = Lists::default();
        Step::End
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
        lists.unreleased.push_back(claim);
        self.abandoned.unreleased.send_modify(|count| *count += 1);
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
        loop {
            let closing = self.closing.is_cancelled();
            let step = self.abandoned.lock().next(closing);
            match step {
                Step::End => return,
                Step::Wait(at) => tokio::select! {
                    () = self.abandoned.added.notified() => {}
                    () = self.closing.cancelled() => {}
                    () = tokio::time::sleep(at.remaining()) => {}
                },
                Step::Release(claims, repeated) => {
                    if self.release_batch(claims, repeated).await {
                        backoff = Backoff::for_store();
                    } else {
                        tokio::time::sleep(backoff.pause()).await;
                    }
                }
            }
        }
    }

    /// Releases a batch. Returns whether the store answered every release.
    async fn release_batch(self: &Arc<Self>, batch: Vec<AbandonedClaim>, repeated: Option<usize>) -> bool {
        let claims: Vec<Claim> = batch.iter().map(|abandoned| abandoned.claim.clone()).collect();
        let mut answers: Vec<Option<Result<Released, EngineError>>> = batch.iter().map(|_| None).collect();
        let (kept, plain): (Vec<usize>, Vec<usize>) =
            (0..batch.len()).partition(|index| batch[*index].kept_until.is_some());
        let _ = tokio::time::timeout(self.store_timeout, async {
            if kept.is_empty() {
                let mut answer = |index: usize, released| answers[index] = Some(released);
                return self.engine.release_all(&claims, &mut answer).await;
            }
            let others: Vec<Claim> = plain.iter().map(|index| claims[*index].clone()).collect();
            let mut answer = |index: usize, released| answers[plain[index]] = Some(released);
            self.engine.release_all(&others, &mut answer).await;
            for index in kept {
                let keep = batch[index].kept_until.map_or(Duration::ZERO, Moment::remaining);
                answers[index] = Some(self.engine.release(&claims[index], keep).await);
            }
        })
        .await;
        let mut again = Vec::new();
        let (mut done, mut failed) = (0, false);
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
                    failed = true;
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
        {
            let mut lists = self.abandoned.lock();
            for abandoned in again.into_iter().rev() {
                lists.unreleased.push_front(abandoned);
            }
        }
        if repeated.is_none() {
            self.abandoned
                .unreleased
                .send_modify(|count| *count = count.saturating_sub(done));
        }
        !failed
    }

    /// Schedules the next repeat of a doubtful claim.
    fn repeat(&self, abandoned: AbandonedClaim, number: usize) {
        let Some(pause) = REPEATS.get(number).filter(|_| abandoned.doubtful) else {
            return;
        };
        let at = Moment::now() + (*pause).min(abandoned.claim.ttl.duration());
        self.abandoned.lock().repeats[number].push_back((at, abandoned));
    }
}
