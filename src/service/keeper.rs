//! The keeper: one task that looks after every held lease of a service, in the order in which something is due, and has
//! those renewed together that are due at about the same time.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;

use super::Inner;
use super::lease::{Lease, renew_together};
use super::options::WATCH_INTERVAL;
use crate::clock::Moment;

/// How many leases make a batch that waits for no more. Thousands of leases renew in many batches over their window, not
/// in one at its beginning.
const BATCH: usize = 256;

/// How long the task looks on after the last lease is gone. Leases often come one by one, and to wake it for each would
/// cost more than the lease.
const LINGER: Duration = Duration::from_secs(1);

/// When something is due, and which lease it is due for: where that lies in memory tells it from the others.
type Slot = (Moment, usize);

fn slot(at: Moment, lease: &Lease) -> Slot {
    (at, std::ptr::from_ref(lease).addr())
}

/// Every held lease, by when it must be looked at next.
#[derive(Debug, Default)]
pub(super) struct Keeper {
    schedule: Mutex<BTreeMap<Slot, Arc<Lease>>>,
    earlier: Notify,
    /// When the task looks next in any case, in nanoseconds of the local clock.
    wakes_at: AtomicU64,
}

impl Keeper {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<Slot, Arc<Lease>>> {
        self.schedule.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts a lease where it belongs now; a lease that is over is dropped.
    pub(super) fn schedule(&self, lease: &Arc<Lease>) {
        let mut schedule = self.lock();
        if let Some(before) = lease.slot() {
            schedule.remove(&slot(before, lease));
        }
        let next = lease.next_event();
        lease.set_slot(next);
        if let Some(at) = next {
            schedule.insert(slot(at, lease), lease.clone());
            if at.to_nanos() < self.wakes_at.load(Relaxed) {
                self.earlier.notify_one();
            }
        }
    }

    /// Drops a lease that is over.
    pub(super) fn forget(&self, lease: &Lease) {
        let mut schedule = self.lock();
        if let Some(at) = lease.slot() {
            schedule.remove(&slot(at, lease));
            lease.set_slot(None);
        }
    }

    /// Every lease that is held.
    pub(super) fn held(&self) -> Vec<Arc<Lease>> {
        self.lock().values().cloned().collect()
    }

    /// Takes what is due off the schedule, and with a renewal those that may go along.
    fn take_due(&self) -> Vec<Arc<Lease>> {
        let now = Moment::now();
        let mut schedule = self.lock();
        let later = schedule.split_off(&(now, usize::MAX));
        let mut due: Vec<Arc<Lease>> = std::mem::replace(&mut *schedule, later).into_values().collect();
        if due.iter().any(|lease| lease.may_be_renewed(now)) {
            // Those that are due next come first. Windows overlap, so that some of them are not open yet.
            let next = schedule.iter().take(2 * BATCH);
            let open = next
                .filter(|(_, lease)| lease.may_be_renewed(now))
                .map(|(slot, _)| *slot);
            let along: Vec<Slot> = open.take(BATCH.saturating_sub(due.len())).collect();
            due.extend(along.iter().filter_map(|slot| schedule.remove(slot)));
        }
        // They stay on the schedule while they are looked at, under another key: a close must find them.
        let last = Moment::from_nanos(u64::MAX);
        for lease in &due {
            lease.set_slot(Some(last));
            schedule.insert(slot(last, lease), lease.clone());
        }
        due
    }

    /// Does what is due.
    fn look_after(inner: &Arc<Inner>) {
        let mut batches: Vec<(Duration, Vec<Arc<Lease>>)> = Vec::new();
        for lease in inner.keeper.take_due() {
            let limit = lease.look_after(inner);
            inner.keeper.schedule(&lease);
            let Some(limit) = limit else { continue };
            // Answers are waited for together, so only leases that can wait as long share a batch.
            match batches.iter_mut().find(|batch| batch.0 == limit) {
                Some((_, batch)) => batch.push(lease),
                None => batches.push((limit, vec![lease])),
            }
        }
        for (limit, batch) in batches {
            // A task of its own, so that a store that hangs keeps no later batch waiting.
            inner.background.spawn(renew_together(inner.clone(), batch, limit));
        }
    }

    /// Looks after the leases until a close has ended them all.
    ///
    /// Timers stand still while a machine sleeps, so the task wakes up at least every [`WATCH_INTERVAL`] while anything
    /// is held, and compares with a clock that does not.
    pub(super) async fn run(inner: Arc<Inner>) {
        let mut idle_since = None;
        loop {
            Self::look_after(&inner);
            let pause = {
                let schedule = inner.keeper.lock();
                let now = Moment::now();
                let pause = match schedule.keys().next() {
                    Some((at, _)) => {
                        idle_since = None;
                        Some(at.remaining().min(WATCH_INTERVAL))
                    }
                    None if idle_since.get_or_insert(now).elapsed() < LINGER => Some(WATCH_INTERVAL),
                    None => None,
                };
                // Under the lock: a lease that comes after this look knows of it.
                let wakes_at = pause.map_or(u64::MAX, |pause| (now + pause).to_nanos());
                inner.keeper.wakes_at.store(wakes_at, Relaxed);
                pause
            };
            let pause = async {
                match pause {
                    Some(pause) => tokio::time::sleep(pause).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = inner.keeper.earlier.notified() => {}
                () = inner.ended.cancelled() => return,
                () = pause => {}
            }
        }
    }
}
