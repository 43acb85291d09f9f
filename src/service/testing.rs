//! What `holdfast/testing` does to a store and to the services on it: moves their clock, and ends a lease in the store.
//!
//! # Behavior
//! The clock of a process is not changed. To advance, the store moves its own clock, and the services make the moments of their
//! leases earlier. Waits (`waitMs`, the poll of a waiter) are not leases, and continue in real time.
//!
//! Both functions run on the I/O thread of the services, between the tasks of the services.

use std::sync::Arc;
use std::time::Duration;

use super::lease::renew_batch;
use super::renewal_scheduler::RenewalScheduler;
use super::{Locks, Shared};
use crate::engine::MovableClock;
use crate::error::LockError;
use crate::model::Key;

/// How often the calls and the releases in progress are checked, and how many times at most: for one second.
const SETTLE_INTERVAL: Duration = Duration::from_millis(1);
const MOST_CHECKS: usize = 1000;

/// Moves the clock of a store forward, and the clock of the leases of these services, which are connected to it.
///
/// # Behavior
/// The clock moves from one event to the next: the renewal of a lease, its deadline, its end in the store. After each one, leases
/// are renewed or lost, waiters get the names that became free, and `deliver` completes: it delivers losses and grants to the
/// callers.
///
/// # Errors
/// `LOCK_INVALID_ARGUMENT`: a store whose clock cannot be moved.
pub async fn advance<F: Future<Output = ()>>(
    services: &[Locks],
    by: Duration,
    deliver: impl Fn() -> F,
) -> Result<(), LockError> {
    let services: Vec<_> = services.iter().map(|locks| &locks.shared).collect();
    let clock = clock_of(&services)?;
    let mut left = by;
    loop {
        // Renewals that are in progress end.
        tokio::task::yield_now().await;
        let events = services.iter().filter_map(|shared| shared.scheduler.next_event());
        let next = events.chain(clock.next_expiry()).min();
        let step = next.map_or(left, |at| at.remaining().min(left));
        // First the services: a lease ends there before it ends in the store.
        for shared in &services {
            shared.scheduler.advance(step);
        }
        clock.advance(step);
        for shared in &services {
            for (timeout, batch) in RenewalScheduler::due_batches(shared) {
                renew_batch((*shared).clone(), batch, timeout).await;
            }
        }
        settle(&*clock, &services).await;
        deliver().await;
        left -= step;
        if left.is_zero() {
            return Ok(());
        }
    }
}

/// Ends the lease of a name in the store, or all of a shared name, and declares them lost to their holders. Returns whether the name was
/// held.
///
/// # Errors
/// `LOCK_INVALID_ARGUMENT`: a store whose clock cannot be moved. `LOCK_STORE`.
pub async fn lose(services: &[Locks], name: &Key) -> Result<bool, LockError> {
    let services: Vec<_> = services.iter().map(|locks| &locks.shared).collect();
    let clock = clock_of(&services)?;
    for shared in &services {
        for lease in shared.scheduler.held() {
            lease.lose_name(shared, name);
        }
    }
    let was_held = match services.first() {
        Some(shared) => shared.engine.force_release(name).await.map_err(LockError::store)?,
        None => false,
    };
    settle(&*clock, &services).await;
    Ok(was_held)
}

/// Returns the clock of the store of these services.
fn clock_of(services: &[&Arc<Shared>]) -> Result<Arc<dyn MovableClock>, LockError> {
    let store = services.first().map(|shared| &shared.store);
    let clock = store.and_then(|store| store.clock.clone());
    clock.ok_or_else(|| {
        let name = store.map_or("none", |store| store.name);
        LockError::invalid("the store", "must be memory:", name)
    })
}

/// Waits until the waiters have their grants, and abandoned claims are released.
async fn settle(clock: &dyn MovableClock, services: &[&Arc<Shared>]) {
    for _ in 0..MOST_CHECKS {
        if clock.is_settled() && services.iter().all(|shared| shared.abandoned.is_empty()) {
            return;
        }
        tokio::time::sleep(SETTLE_INTERVAL).await;
    }
}
