//! Renews the held leases of a service: one task wakes up for the next renewal or deadline, and renews leases that are due at
//! about the same time together.
//!
//! It also wakes up every 250 ms while a lease is held, because timers stop while the machine sleeps. All leases that are due are
//! renewed together. If they are fewer than [`BATCH`], leases whose window is open ([`RenewalWindow`](super::lease)) fill the batch. So a few leases of the same
//! age are one batch, and ten thousand that were acquired at the same time become a series of batches, which spread further with each
//! renewal. Leases with different timeouts share no call, and a batch that waits for a silent store does not delay later ones.

use std::collections::BTreeMap;
use std::ops::Bound::{Excluded, Unbounded};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::OptionFuture;
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::Shared;
use super::lease::{Lease, renew_batch};
use super::options::CLOCK_CHECK_INTERVAL;
use crate::clock::Moment;

/// The size at which a batch is sent without waiting for more leases. Thousands of leases are renewed in many batches over their
/// renewal window, not in one batch at its start.
const BATCH: usize = 256;

/// How long the task keeps polling after the last lease ended. A wake-up for each of many short leases would cost more than the
/// lease.
const IDLE_GRACE: Duration = Duration::from_secs(1);

/// The key of a lease in the schedule: its next event, and its address in memory, which is unique.
type Slot = (Moment, usize);

fn slot(at: Moment, lease: &Lease) -> Slot {
    (at, std::ptr::from_ref(lease).addr())
}

/// The held leases, by the time of their next event. Each with the moment at which its renewal window opens, or its deadline
/// if it is not renewed.
#[derive(Debug, Default)]
pub(super) struct RenewalScheduler {
    schedule: Mutex<BTreeMap<Slot, (Moment, Arc<Lease>)>>,
    /// Notified when an event is due before the task wakes up.
    rescheduled: Notify,
    /// When the task wakes up, in nanoseconds of the local clock.
    wakes_at: AtomicU64,
}

impl RenewalScheduler {
    /// Inserts a lease by its next event, or moves it there. Removes a lease that has ended.
    pub(super) fn schedule(&self, lease: &Arc<Lease>) {
        let mut schedule = self.schedule.lock();
        let (before, next) = lease.reschedule();
        if let Some(before) = before {
            schedule.remove(&slot(before, lease));
        }
        if let Some(next) = next {
            schedule.insert(slot(next.due, lease), (next.opens, lease.clone()));
            if next.due.to_nanos() < self.wakes_at.load(Relaxed) {
                self.rescheduled.notify_one();
            }
        }
    }

    /// Returns every held lease.
    pub(super) fn held(&self) -> Vec<Arc<Lease>> {
        let schedule = self.schedule.lock();
        schedule.values().map(|(_, lease)| lease.clone()).collect()
    }

    /// Whether any held lease satisfies a condition.
    pub(super) fn any_held(&self, condition: impl Fn(&Lease) -> bool) -> bool {
        self.schedule.lock().values().any(|(_, lease)| condition(lease))
    }

    /// Returns the leases with an event that is due. If there are any, adds those that may be renewed with them.
    fn due(&self, now: Moment) -> Vec<Arc<Lease>> {
        let schedule = self.schedule.lock();
        let end = (now, usize::MAX);
        let mut due: Vec<Arc<Lease>> = schedule.range(..=end).map(|(_, (_, lease))| lease.clone()).collect();
        if !due.is_empty() {
            // The leases are sorted by due time. Renewal windows overlap, so that some of the next ones are not open yet.
            let next = schedule.range((Excluded(end), Unbounded)).take(2 * BATCH);
            let open = next.filter(|(_, (opens, _))| *opens <= now);
            let room = BATCH.saturating_sub(due.len());
            due.extend(open.take(room).map(|(_, (_, lease))| lease.clone()));
        }
        due
    }

    /// Declares leases lost whose deadline has passed. Returns the leases to renew now, by the timeout of their renewal: a batch has
    /// one timeout.
    pub(super) fn due_batches(shared: &Arc<Shared>) -> Vec<(Duration, Vec<Arc<Lease>>)> {
        let mut batches: Vec<(Duration, Vec<Arc<Lease>>)> = Vec::new();
        let now = Moment::now();
        for lease in shared.scheduler.due(now) {
            let timeout = lease.renewal_due(shared, now);
            shared.scheduler.schedule(&lease);
            let Some(timeout) = timeout else { continue };
            match batches.iter_mut().find(|batch| batch.0 == timeout) {
                Some((_, batch)) => batch.push(lease),
                None => batches.push((timeout, vec![lease])),
            }
        }
        if !batches.is_empty() {
            shared.stall_detector.ping();
        }
        batches
    }

    /// Returns the time of the next renewal or deadline.
    pub(super) fn next_event(&self) -> Option<Moment> {
        self.schedule.lock().keys().next().map(|(at, _)| *at)
    }

    /// Moves the clock of the held leases forward (`testing.rs`).
    pub(super) fn advance(&self, by: Duration) {
        let mut schedule = self.schedule.lock();
        for (_, lease) in std::mem::take(&mut *schedule).into_values() {
            lease.advance(by);
            if let (_, Some(next)) = lease.reschedule() {
                schedule.insert(slot(next.due, &lease), (next.opens, lease));
            }
        }
        self.rescheduled.notify_one();
    }

    /// Runs until a close has ended all leases.
    ///
    /// # Behavior
    /// Timers stop while the machine is suspended. While leases are held, the task therefore wakes up at least every
    /// [`CLOCK_CHECK_INTERVAL`] and reads a clock that does not stop.
    pub(super) async fn run(shared: Arc<Shared>) {
        let mut idle_since = None;
        loop {
            for (timeout, batch) in Self::due_batches(&shared) {
                // Each batch has a task: a batch without an answer does not delay later ones.
                shared
                    .background
                    .spawn(renew_batch(shared.clone(), batch, timeout).boxed());
            }
            let sleep = {
                let schedule = shared.scheduler.schedule.lock();
                let now = Moment::now();
                let sleep = match schedule.keys().next() {
                    Some((at, _)) => {
                        idle_since = None;
                        Some(at.remaining().min(CLOCK_CHECK_INTERVAL))
                    }
                    None if idle_since.get_or_insert(now).elapsed() < IDLE_GRACE => Some(CLOCK_CHECK_INTERVAL),
                    None => None,
                };
                // Under the lock: `schedule` compares later leases with this time.
                let wakes_at = sleep.map_or(u64::MAX, |sleep| (now + sleep).to_nanos());
                shared.scheduler.wakes_at.store(wakes_at, Relaxed);
                sleep
            };
            tokio::select! {
                () = shared.scheduler.rescheduled.notified() => {}
                () = shared.ended.cancelled() => return,
                Some(()) = OptionFuture::from(sleep.map(tokio::time::sleep)) => {}
            }
        }
    }
}
