//! When the names of the waiters are checked: at the end of a lease, with each heartbeat, and when their engine says so.

use std::collections::HashSet;
use std::time::Duration;

use tokio::time::Instant;

use super::{HEARTBEAT_INTERVAL, LocalWaiters, Waiter};
use crate::model::Key;
use crate::model::OwnerToken;

/// A name with waiters in this process.
pub(super) struct WaitedName<H> {
    /// The number of waiters.
    pub(super) waiters: usize,
    /// When to check the name: the end of the current lease, as far as it is known.
    pub(super) check_at: Instant,
    /// When the time of the check was set.
    pub(super) set_at: Instant,
    /// Maximum number of waiters of other processes ahead of those of this one.
    pub(super) ahead: usize,
    /// Whether its waiters poll, because no message says when it is free.
    pub(super) polls: bool,
    /// What the engine keeps for the name, from the last attempt.
    pub(super) _resource: Option<H>,
}

impl<H> WaitedName<H> {
    pub(super) fn set_check(&mut self, check_at: Instant) {
        self.check_at = check_at;
        self.set_at = Instant::now();
    }
}

impl<H> LocalWaiters<H> {
    /// Returns the names for whose next check more than half of the time has passed.
    pub(in crate::engine) fn due_soon(&self) -> Vec<Key> {
        let (now, state) = (Instant::now(), self.state.lock());
        let names = state.names.iter();
        let due = names.filter(|(_, name)| now > name.set_at + (name.check_at - name.set_at) / 2);
        due.map(|(key, _)| key.clone()).collect()
    }

    /// Records that the current lease on a name ends after `left`.
    pub(in crate::engine) fn set_lease_end(&self, key: &Key, left: Option<Duration>) {
        let check_at = check_time(left);
        let mut state = self.state.lock();
        let next_check = state.next_check;
        if let Some(name) = state.names.get_mut(key) {
            name.set_check(check_at);
            if next_check.is_some_and(|next| check_at < next) {
                self.rescheduled.notify_one();
            }
        }
    }

    /// Calls `send` with all names every [`HEARTBEAT_INTERVAL`], and with each name at the end of the current lease on it.
    /// Returns when there are no waiters. `send` must not block.
    ///
    /// # Behavior
    /// Leaves out names whose waiters cannot use a grant, because the event loop has not responded for a third of their ttls. Their
    /// positions expire, and they enter the queue again with their numbers.
    pub(in crate::engine) async fn run_heartbeats(&self, mut send: impl FnMut(Vec<Key>)) {
        let mut heartbeat_at = Instant::now() + HEARTBEAT_INTERVAL;
        loop {
            let next = {
                let mut state = self.state.lock();
                let first = state.names.values().map(|name| name.check_at).min();
                state.next_check = first.map(|first| first.min(heartbeat_at));
                let Some(next) = state.next_check else { return };
                next
            };
            tokio::select! {
                () = tokio::time::sleep_until(next) => {}
                () = self.rescheduled.notified() => continue,
            }
            let now = Instant::now();
            let is_heartbeat = now >= heartbeat_at;
            let names: Vec<Key> = {
                let mut state = self.state.lock();
                let names = state.names.iter_mut();
                let due = names.filter(|(_, name)| is_heartbeat || name.check_at <= now);
                due.map(|(key, name)| {
                    // The answer sets the time of the next check.
                    name.set_check(now + HEARTBEAT_INTERVAL);
                    key.clone()
                })
                .collect()
            };
            let names = self.responsive(names);
            if is_heartbeat {
                heartbeat_at = now + HEARTBEAT_INTERVAL;
                self.stall_detector.get().inspect(|detector| detector.ping());
            }
            if !names.is_empty() {
                send(names);
            }
        }
    }

    /// Returns the waiters that cannot use a grant, because the event loop has not responded for a third of their ttls.
    pub(in crate::engine) fn stalled(&self) -> Vec<OwnerToken> {
        let Some(detector) = self.stall_detector.get() else {
            return Vec::new();
        };
        let state = self.state.lock();
        let is_stalled = |waiter: &Waiter| waiter.ttl.is_some_and(|ttl| detector.is_stalled(ttl));
        let stalled = state.waiters.iter().filter(|(_, waiter)| is_stalled(waiter));
        stalled.map(|(owner, _)| owner.clone()).collect()
    }

    /// Returns those of the names for which a waiter can use a grant.
    fn responsive(&self, mut names: Vec<Key>) -> Vec<Key> {
        let stalled = self
            .stall_detector
            .get()
            .filter(|detector| !detector.stalled_for().is_zero());
        if let Some(detector) = stalled {
            let state = self.state.lock();
            let responsive = |waiter: &&Waiter| waiter.ttl.is_none_or(|ttl| !detector.is_stalled(ttl));
            let waited_for: HashSet<&Key> = state
                .waiters
                .values()
                .filter(responsive)
                .filter_map(Waiter::name)
                .collect();
            names.retain(|name| waited_for.contains(name));
        }
        names
    }
}

/// Returns when to check a name whose current lease ends after `left`.
///
/// # Behavior
/// The check comes a little later than the store's answer says, so that the lease has ended by the store's clock. Jitter
/// separates the processes. A lock that never expires is checked with each heartbeat.
pub(super) fn check_time(left: Option<Duration>) -> Instant {
    let jitter = Duration::from_micros(fastrand::u64(500..3_000));
    Instant::now() + left.unwrap_or(HEARTBEAT_INTERVAL).min(Duration::from_secs(3600)) + jitter
}
