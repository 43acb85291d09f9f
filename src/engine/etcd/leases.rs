//! The etcd leases of this process: at most one for each class of ttls, and one for its waiters.
//!
//! An etcd lease has whole seconds, and costs the server a commit. So the entries of all locks with similar ttls share one, and one
//! request keeps them all alive. If `kept` is the time of the sending of the last answered request of a class that lasts `C`, its
//! etcd lease lasts until `kept + C` at least. A lease that was requested at `sent` needs `sent + ttl`. So a request goes out when
//! `kept < sent + ttl - C`. Every class is at least a second longer than its ttls, so that such a request is rare.
//!
//! A new leader of the members begins all etcd leases again, and adds an election timeout. A deposed one may answer for one more
//! election timeout, which that covers.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::client::messages::{LeaseGrantRequest, LeaseRequest, LeaseResponse};
use super::client::{Client, Outcome};
use crate::clock::Moment;
use crate::model::Ttl;

const GRANT: &str = "/etcdserverpb.Lease/LeaseGrant";
const KEEP_ALIVE: &str = "/etcdserverpb.Lease/LeaseKeepAlive";
const REVOKE: &str = "/etcdserverpb.Lease/LeaseRevoke";

/// The length of the etcd lease of the waiters: a dead one blocks the next ones for as long.
const OF_WAITERS: u64 = 5;
/// The length that an etcd lease has more than the leases of its class.
const RESERVE: Duration = Duration::from_secs(1);

/// Which etcd lease an entry has: of the waiters, or of a class, by its seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Class {
    Waiters,
    Seconds(u64),
}

impl Class {
    /// Returns the class of a ttl: the smallest of 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, … seconds that is at least one second
    /// longer.
    pub(super) fn of(ttl: Ttl) -> Self {
        let least = (ttl.duration() + RESERVE).as_nanos().div_ceil(1_000_000_000).max(2) as u64;
        // Four steps for each power of two.
        let step = (1 << least.ilog2().saturating_sub(2)).max(1);
        Class::Seconds(least.next_multiple_of(step))
    }

    /// Whether it is long enough for a ttl.
    pub(super) fn is_for(self, ttl: Ttl) -> bool {
        matches!(self, Class::Seconds(_)) && self.seconds() >= Class::of(ttl).seconds()
    }

    fn seconds(self) -> u64 {
        match self {
            Class::Waiters => OF_WAITERS,
            Class::Seconds(seconds) => seconds,
        }
    }
}

/// An etcd lease.
pub(super) struct Lease {
    pub id: i64,
    pub class: Class,
    /// How long it lasts after a request that kept it alive.
    length: Duration,
    /// When the last answered one of these was sent.
    kept: Mutex<Moment>,
    /// Held during such a request.
    keeping: tokio::sync::Mutex<()>,
}

impl Lease {
    /// Returns when it ends at the earliest.
    pub(super) fn ends(&self) -> Moment {
        *self.kept.lock() + self.length
    }
}

/// The etcd leases of one engine.
pub(super) struct Leases {
    client: Arc<Client>,
    leases: Mutex<HashMap<Class, Arc<Lease>>>,
    /// Held while an etcd lease is granted.
    granting: tokio::sync::Mutex<()>,
}

impl Leases {
    pub(super) fn new(client: Arc<Client>) -> Self {
        Leases {
            client,
            leases: Mutex::default(),
            granting: tokio::sync::Mutex::default(),
        }
    }

    /// Returns the etcd lease of a class. Grants one if there is none, or if it may have expired.
    pub(super) async fn get(&self, class: Class) -> Outcome<Arc<Lease>> {
        if let Some(lease) = self.known(class) {
            return Ok(lease);
        }
        let _granting = self.granting.lock().await;
        if let Some(lease) = self.known(class) {
            return Ok(lease);
        }
        let sent = Moment::now();
        let ttl = class.seconds() as i64;
        let answer: LeaseResponse = self.client.call(GRANT, &LeaseGrantRequest { ttl }, None).await?;
        let lease = Arc::new(Lease {
            id: answer.id,
            class,
            // Members with long election timeouts grant more.
            length: Duration::from_secs(answer.ttl.max(0) as u64),
            kept: Mutex::new(sent),
            keeping: tokio::sync::Mutex::default(),
        });
        self.leases.lock().insert(class, lease.clone());
        Ok(lease)
    }

    /// Returns the etcd lease of a class, unless it may have expired.
    fn known(&self, class: Class) -> Option<Arc<Lease>> {
        let leases = self.leases.lock();
        let lease = leases.get(&class)?;
        let reserve = RESERVE.min(lease.length / 4);
        (lease.ends() > Moment::now() + reserve).then(|| lease.clone())
    }

    /// Returns an etcd lease that new entries get, by its id.
    pub(super) fn current(&self, id: i64) -> Option<Arc<Lease>> {
        self.leases.lock().values().find(|lease| lease.id == id).cloned()
    }

    /// Returns when an etcd lease ends at the earliest, with a reserve for the clocks.
    pub(super) fn end_of(&self, id: i64) -> Option<Moment> {
        Some(self.current(id)?.ends() - RESERVE)
    }

    /// Makes an etcd lease last until `end`, with a request only if it does not yet. `false`: it has expired.
    pub(super) async fn keep_until(&self, lease: &Lease, end: Moment) -> Outcome<bool> {
        if lease.ends() >= end {
            return Ok(true);
        }
        let _keeping = lease.keeping.lock().await;
        // Another call's request may have been enough.
        if lease.ends() >= end {
            return Ok(true);
        }
        self.keep(lease).await
    }

    async fn keep(&self, lease: &Lease) -> Outcome<bool> {
        let sent = Moment::now();
        let request = LeaseRequest { id: lease.id };
        let answer: LeaseResponse = self.client.call(KEEP_ALIVE, &request, None).await?;
        if answer.ttl <= 0 {
            self.forget(lease.id);
            return Ok(false);
        }
        *lease.kept.lock() = sent;
        Ok(true)
    }

    /// Keeps the etcd lease of the waiters alive. Returns the delay until the next time. `None`: there is none.
    pub(super) async fn keep_waiters(&self) -> Option<Duration> {
        const INTERVAL: Duration = Duration::from_millis(1500);
        const RETRY: Duration = Duration::from_millis(300);
        let lease = self.leases.lock().get(&Class::Waiters).cloned()?;
        let keeping = tokio::time::timeout(INTERVAL, self.keep(&lease));
        match keeping.await {
            Ok(Ok(true)) => Some(INTERVAL),
            Ok(Ok(false)) => None,
            Ok(Err(failure)) => {
                tracing::debug!(?failure, "the lease of the waiters was not kept alive");
                Some(RETRY)
            }
            Err(_) => Some(RETRY),
        }
    }

    /// Forgets an etcd lease that has expired.
    pub(super) fn forget(&self, id: i64) {
        self.leases.lock().retain(|_, lease| lease.id != id);
    }

    /// Revokes the etcd leases without entries.
    pub(super) async fn close(&self, has_entries: impl Fn(i64) -> bool) {
        let leases: Vec<i64> = self.leases.lock().drain().map(|(_, lease)| lease.id).collect();
        for id in leases.into_iter().filter(|id| !has_entries(*id)) {
            let _: Outcome<LeaseResponse> = self.client.call(REVOKE, &LeaseRequest { id }, None).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_is_a_second_longer_and_at_most_a_quarter_more() {
        let of = |ms| match Class::of(Ttl::clamped(Duration::from_millis(ms))) {
            Class::Seconds(seconds) => seconds,
            Class::Waiters => 0,
        };
        let classes: Vec<u64> = (1..=40).map(|s| of(s * 1000)).collect();
        let mut distinct = classes.clone();
        distinct.dedup();
        assert_eq!(distinct, [2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48]);
        assert_eq!((of(1), of(1000), of(1001), of(30_000)), (2, 2, 3, 32));
        for ms in (1..100_000).chain([3_600_000, 1 << 31]) {
            let least = ms + 1000;
            let class = of(ms) * 1000;
            assert!(class >= least && class <= (least + 1000) * 5 / 4, "{ms}: {class}");
        }
    }
}
