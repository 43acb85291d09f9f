//! What a service does beside its calls: the heartbeat, the checks of its waiters, and the sweep.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use tokio::time::Instant;

use super::Outcome;
use super::single::Shared;
use super::transaction::CheckedNames;
use super::waiters::CheckedLease;
use crate::clock::Moment;
use crate::engine::core::ledger::{StoredName, without_owner};
use crate::engine::local_waiters::{HEARTBEAT_INTERVAL, RESERVATION};
use crate::engine::{EXPIRED_POSITION_KEPT, WAITER_LIVENESS};
use crate::model::{Key, OwnerToken, Share, Sums};

/// [`WAITER_LIVENESS`] in milliseconds.
pub(in crate::engine::sql) const LIVENESS_MS: i64 = WAITER_LIVENESS.as_millis() as i64;
/// [`EXPIRED_POSITION_KEPT`] in milliseconds.
pub(in crate::engine::sql) const EXPIRED_POSITION_KEPT_MS: i64 = EXPIRED_POSITION_KEPT.as_millis() as i64;
/// How long a free name keeps its row, and its last fencing token, in seconds.
pub(in crate::engine::sql) const FREE_ROW_KEPT_S: i64 = 3600;
/// The time between two sweeps of a table. The first process that claims a sweep makes it. A process that makes calls tries to
/// claim one after this time and a random part of it.
pub(in crate::engine::sql) const SWEEP_INTERVAL: Duration = Duration::from_secs(300);
/// The name of the row whose lease ends when the next sweep is due. No lock has it: names are not empty.
pub(in crate::engine::sql) const SWEEP_ROW: &[u8] = b"";
/// Maximum number of rows that one statement of a sweep reads.
pub(in crate::engine::sql) const SWEEP_LIMIT: i64 = 1000;
/// The pause between two statements of a sweep, in which calls may use the connection.
const SWEEP_STATEMENT_PAUSE: Duration = Duration::from_millis(20);
/// Maximum number of names of one transaction of a sweep.
pub(in crate::engine::sql) const SWEEP_NAMES: i64 = 64;

/// Maximum number of names of one check. MySQL reads 32 per packet: with a round trip below 250 ms, a check ends within [`HEARTBEAT_INTERVAL`].
const CHECK_LIMIT: usize = 256;

/// What a check reads.
pub(in crate::engine::sql) struct Checked {
    /// The server's clock.
    pub now_us: Option<i64>,
    /// The owners of the positions that a heartbeat has kept alive.
    pub kept: HashSet<String>,
    pub names: Vec<CheckedName>,
    /// Of the shared names, the shares, and the first live waiter of each.
    pub shares: Vec<CheckedShare>,
}

/// A share, or the first waiter of a shared name.
pub(in crate::engine::sql) struct CheckedShare {
    /// The stored name.
    pub name: StoredName,
    pub share: Option<Share>,
    /// `None`: it is a waiter.
    pub lease: Option<CheckedLease>,
}

/// What a statement of a sweep has read.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::engine::sql) struct Swept {
    /// The last name. `None`: there are no more.
    pub last: Option<StoredName>,
    /// Names with positions that expired more than a minute ago.
    pub with_expired: Vec<StoredName>,
}

/// The lease and the queue of a name.
pub(in crate::engine::sql) struct CheckedName {
    pub name: StoredName,
    /// `None`: the name is free.
    pub lease: Option<CheckedLease>,
    /// Whether a free name has live waiters.
    pub has_waiters: bool,
    /// The number of live waiters of other processes ahead of the first one of this process, `AHEAD` at most.
    pub ahead: u64,
}

/// Returns the share of a name that ends next, with the age of the last one. `None`: the first waiter fits, or there is none.
fn lease_in_the_way(shares: Vec<CheckedShare>) -> Option<CheckedLease> {
    let is_waited_for = shares.iter().any(|share| share.lease.is_none());
    let all: Sums = shares.iter().filter_map(|share| share.share).collect();
    let leases = shares.into_iter().filter_map(|share| share.lease);
    let sooner = |one: CheckedLease, other: CheckedLease| {
        let age = one.age.min(other.age);
        let next = if other.remaining < one.remaining { other } else { one };
        CheckedLease { age, ..next }
    };
    leases
        .reduce(sooner)
        .filter(|_| is_waited_for && !all.is_within_limits())
}

impl Shared {
    /// Sends the heartbeat of this process if it is due, and checks the lease and the queue of each name.
    pub(super) async fn check(&self, mut names: Vec<Key>) {
        // One check for several names, instead of one for each.
        names.extend(self.waiters.due_soon());
        let mut seen = HashSet::new();
        names.retain(|name| seen.insert(name.clone()));
        let (names, later) = names.split_at(names.len().min(CHECK_LIMIT));
        if !later.is_empty() {
            self.waiters.check(later.to_vec());
        }
        if let Err(failure) = self.check_names(names, &seen).await {
            // Each waiter makes an attempt, gets the error itself, and knows its own deadline.
            tracing::debug!(%failure, "a heartbeat failed");
            let names: HashSet<&Key> = names.iter().collect();
            self.waiters.known.wake_where(|name, _| names.contains(name));
        }
    }

    /// Checks `names`. `all`: those with a waiter whose position the heartbeat must have kept alive.
    async fn check_names(&self, names: &[Key], all: &HashSet<Key>) -> Outcome<()> {
        let now = Instant::now();
        let last = *self.timers.heartbeat_at.lock();
        let is_due = last.is_none_or(|at| now - at >= HEARTBEAT_INTERVAL * 3 / 4);
        let stored: Vec<StoredName> = names.iter().map(|key| self.prefix.stored(key)).collect();
        let process = &self.waiters.process;
        let mut checkout = self.pool.checkout().await?;
        let session = checkout.session()?;
        let connection = session.connection().clone();
        // The positions of stalled waiters expire, although other waiters keep the process alive.
        let stalled = is_due.then(|| self.waiters.known.stalled());
        let sent = Moment::now();
        // The positions of this process expire without a heartbeat.
        let limit = self.pool.connections().store_timeout.min(HEARTBEAT_INTERVAL);
        let outcome = connection
            .within(limit, session.check(process, &stored, stalled.as_deref()))
            .await;
        let checked = checkout.settle(outcome)?;
        drop(checkout);
        if let Some(now_us) = checked.now_us {
            self.waiters.read_clock(sent, now_us);
        }
        if is_due {
            *self.timers.heartbeat_at.lock() = Some(now);
            self.waiters.forget_short_hand_offs();
        }
        let keys: HashMap<&StoredName, &Key> = stored.iter().zip(names).collect();
        let (mut free, mut without_positions) = (Vec::new(), HashSet::new());
        let mut shares: HashMap<StoredName, Vec<CheckedShare>> = HashMap::new();
        for share in checked.shares {
            shares
                .entry(without_owner(&share.name).to_vec())
                .or_default()
                .push(share);
        }
        for checked in checked.names {
            let Some(key) = keys.get(&checked.name) else { continue };
            let shares = shares.remove(&checked.name).unwrap_or_default();
            for lease in shares.iter().filter_map(|share| share.lease.as_ref()) {
                self.waiters.notify_holder(key, lease);
            }
            match checked.lease.or_else(|| lease_in_the_way(shares)) {
                Some(lease) => {
                    self.waiters
                        .set_busy_for(key, lease.remaining, lease.age, checked.ahead);
                    // It may be a waiter of this process, whose message was lost.
                    self.waiters.notify_holder(key, &lease);
                }
                None if checked.has_waiters => {
                    // Check it again after `RESERVATION`: while another program has locked the row, each check would add another hand-off
                    // to the queue.
                    self.waiters.known.set_lease_end(key, Some(RESERVATION));
                    free.push(checked.name);
                }
                // The positions of this process have expired: its waiters enter the queue again.
                None => _ = without_positions.insert(*key),
            }
        }
        let known = &self.waiters.known;
        known.wake_where(|name, _| without_positions.contains(name));
        if is_due {
            let kept = checked.kept.iter().filter_map(|owner| OwnerToken::parse(owner).ok());
            let kept: HashSet<OwnerToken> = kept.collect();
            // The others received a name by a hand-off, and its message was lost.
            known.wake_where(|name, owner| all.contains(name) && !kept.contains(owner));
        }
        self.send_checked(free, true);
        Ok(())
    }

    /// Sends names to the transactions.
    fn send_checked(&self, names: Vec<StoredName>, are_free: bool) {
        if !names.is_empty() {
            let _ = self.names.send(CheckedNames { names, are_free });
        }
    }

    /// Removes some rows of names that have been free for long, and positions that expired more than a minute ago.
    pub(super) async fn sweep(&self) {
        let is_complete = self.sweep_some().await.unwrap_or_else(|failure| {
            tracing::debug!(%failure, "a sweep failed");
            true
        });
        // After a complete one, the next call starts the time to the next sweep.
        *self.timers.sweep_at.lock() = (!is_complete).then(|| Instant::now() + SWEEP_STATEMENT_PAUSE);
    }

    /// `true`: all rows were read.
    async fn sweep_some(&self) -> Outcome<bool> {
        let after = std::mem::take(&mut *self.timers.swept_to.lock());
        let mut checkout = self.pool.checkout().await?;
        let session = checkout.session()?;
        let connection = session.connection().clone();
        if after == SWEEP_ROW {
            let claimed = connection.within_limit(session.claim_sweep()).await;
            if !checkout.settle(claimed)? {
                return Ok(true);
            }
            let slow = connection.within_limit(checkout.session()?.slowness_warning()).await;
            if let Some(warning) = checkout.settle(slow)? {
                self.waiters.warn(warning);
            }
        }
        let session = checkout.session()?;
        let outcome = connection.within_limit(session.sweep(&after)).await;
        let Swept { last, with_expired } = checkout.settle(outcome)?;
        drop(checkout);
        self.send_checked(with_expired, false);
        let is_complete = last.is_none();
        *self.timers.swept_to.lock() = last.unwrap_or_default();
        Ok(is_complete)
    }
}
