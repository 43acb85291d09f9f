//! The keeper: one task that looks after every held lease of a service, in the order in which something is due.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use super::Inner;
use super::lease::Lease;
use super::options::WATCH_INTERVAL;
use crate::clock::Moment;

/// Every held lease, by when it must be looked at next.
#[derive(Debug, Default)]
pub(super) struct Keeper {
    schedule: Mutex<BTreeMap<(u64, u64), Arc<Lease>>>,
    sequence: AtomicU64,
    earlier: Notify,
}

impl Keeper {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<(u64, u64), Arc<Lease>>> {
        self.schedule.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts a lease where it belongs now; a lease that is over is dropped.
    pub(super) fn schedule(&self, lease: &Arc<Lease>) {
        let mut schedule = self.lock();
        if let Some(slot) = lease.slot() {
            schedule.remove(&slot);
        }
        let slot = lease
            .next_event()
            .map(|at| (at.to_nanos(), self.sequence.fetch_add(1, Relaxed)));
        lease.set_slot(slot);
        if let Some(slot) = slot {
            schedule.insert(slot, lease.clone());
            if schedule.keys().next() == Some(&slot) {
                self.earlier.notify_one();
            }
        }
    }

    /// Drops a lease that is over.
    pub(super) fn forget(&self, lease: &Lease) {
        let mut schedule = self.lock();
        if let Some(slot) = lease.slot() {
            schedule.remove(&slot);
            lease.set_slot(None);
        }
    }

    /// Every lease that is held.
    pub(super) fn held(&self) -> Vec<Arc<Lease>> {
        self.lock().values().cloned().collect()
    }

    fn take_due(&self) -> Vec<Arc<Lease>> {
        let mut schedule = self.lock();
        let later = schedule.split_off(&(Moment::now().to_nanos() + 1, 0));
        let due = std::mem::replace(&mut *schedule, later);
        due.into_values().inspect(|lease| lease.set_slot(None)).collect()
    }

    /// Looks after the leases until the service closes.
    ///
    /// Timers stand still while a machine sleeps, so the task wakes up at least every [`WATCH_INTERVAL`] while anything
    /// is held, and compares with a clock that does not.
    pub(super) async fn run(inner: Arc<Inner>) {
        loop {
            for lease in inner.keeper.take_due() {
                lease.look_after(&inner);
                inner.keeper.schedule(&lease);
            }
            let next = inner.keeper.lock().keys().next().map(|(at, _)| Moment::from_nanos(*at));
            let pause = async {
                match next {
                    Some(at) => tokio::time::sleep(at.remaining().min(WATCH_INTERVAL)).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = inner.keeper.earlier.notified() => {}
                () = inner.closing.cancelled() => return,
                () = pause => {}
            }
        }
    }
}
