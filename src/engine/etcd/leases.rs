//! The etcd leases of this process: at most one for each class of ttls, one for its waiters, and one for each name that is kept busy.
//!
//! An etcd lease has whole seconds, and costs the server a commit. So the entries of all locks with similar ttls share one, and one
//! request keeps them all alive. If `kept` is the time of the sending of the last answered request of a class that lasts `C`, its
//! etcd lease lasts until `kept + C` at least. A lease that was requested at `sent` needs `sent + ttl`. So a request goes out when
//! `kept < sent + ttl - C`. Every class is at least a second longer than its ttls, so that such a request is rare.
//!
//! **A request counts only in the term in which its etcd lease was granted**: a read that a majority confirms must show that term after the
//! answer. In a later term entries get new etcd leases. `docs/proofs/etcd-terms.md` has the reason: a deposed leader that continues.
//!
//! A hand-off has the etcd lease of the waiters. The first renewal puts the entry under its class and writes the token.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use futures_util::future::join_all;

use parking_lot::Mutex;

use super::client::messages::{Header, LeaseGrantRequest, LeaseRequest, LeaseResponse, RangeRequest};
use super::client::{Client, Outcome};
use crate::clock::Moment;
use crate::model::Ttl;

const GRANT: &str = "/etcdserverpb.Lease/LeaseGrant";
const KEEP_ALIVE: &str = "/etcdserverpb.Lease/LeaseKeepAlive";
const REVOKE: &str = "/etcdserverpb.Lease/LeaseRevoke";

/// The length of the etcd lease of the waiters, in seconds: a dead waiter blocks the next ones for as long.
const OF_WAITERS: u64 = 5;
/// By how much an etcd lease is longer than the leases of its class, at least.
const RESERVE: Duration = Duration::from_secs(1);
/// The maximum number of etcd leases of waiters: after each election the waiters from before keep their old one.
const MOST_OF_WAITERS: usize = 8;

/// Which etcd lease an entry has: that of the waiters, or that of a class of ttls, by its seconds.
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
    /// The term in which it was granted.
    term: u64,
    /// How long it lasts after a request that kept it alive.
    length: Duration,
    /// When the last such request that counts was sent.
    kept: Mutex<Moment>,
    /// When the last such request with an answer was sent.
    answered: Mutex<Moment>,
    /// Held during such a request.
    keeping: tokio::sync::Mutex<()>,
}

impl Lease {
    /// Returns when it ends at the earliest.
    pub(super) fn ends(&self) -> Moment {
        *self.kept.lock() + self.length
    }

    /// Whether it may have expired.
    fn may_have_expired(&self) -> bool {
        (*self.answered.lock() + self.length).is_past()
    }
}

/// The etcd leases of one engine.
pub(super) struct Leases {
    client: Arc<Client>,
    /// A key that the login may read.
    key: Vec<u8>,
    /// The last one of a class is for new entries.
    leases: Mutex<Vec<Arc<Lease>>>,
    /// The last known term.
    term: AtomicU64,
    /// Held while an etcd lease is granted.
    granting: tokio::sync::Mutex<()>,
}

impl Leases {
    pub(super) fn new(client: Arc<Client>, key: Vec<u8>) -> Self {
        Leases {
            client,
            key,
            leases: Mutex::default(),
            term: AtomicU64::new(0),
            granting: tokio::sync::Mutex::default(),
        }
    }

    /// Returns the etcd lease of a class. Grants one if there is none, if it may have expired, or if it is of an earlier term.
    pub(super) async fn get(&self, class: Class) -> Outcome<Arc<Lease>> {
        if let Some(lease) = self.known(class) {
            return Ok(lease);
        }
        let _granting = self.granting.lock().await;
        if let Some(lease) = self.known(class) {
            return Ok(lease);
        }
        let lease = self.grant(class).await?;
        self.insert(lease.clone());
        Ok(lease)
    }

    /// Grants a separate etcd lease for an entry that keeps a name busy for `ttl` after its release. Nothing keeps it alive, and a close
    /// does not revoke it.
    pub(super) async fn get_kept(&self, ttl: Ttl) -> Outcome<Arc<Lease>> {
        let seconds = ttl.duration().as_nanos().div_ceil(1_000_000_000) as u64;
        self.grant(Class::Seconds(seconds)).await
    }

    async fn grant(&self, class: Class) -> Outcome<Arc<Lease>> {
        loop {
            let term = self.read_term().await?;
            let sent = Moment::now();
            let ttl = class.seconds() as i64;
            let answer: LeaseResponse = self.client.call(GRANT, &LeaseGrantRequest { ttl }, None).await?;
            // After an election meanwhile the term of the grant is not known.
            if term_of(answer.header) == term {
                return Ok(Arc::new(Lease {
                    id: answer.id,
                    class,
                    term,
                    // Members with long election timeouts grant more.
                    length: Duration::from_secs(answer.ttl.max(0) as u64),
                    kept: Mutex::new(sent),
                    answered: Mutex::new(sent),
                    keeping: tokio::sync::Mutex::default(),
                }));
            }
        }
    }

    fn insert(&self, lease: Arc<Lease>) {
        let mut leases = self.leases.lock();
        leases.retain(|lease| !lease.may_have_expired());
        let mut of_waiters = leases.iter().filter(|lease| lease.class == Class::Waiters);
        if of_waiters.clone().count() >= MOST_OF_WAITERS
            && let Some(oldest) = of_waiters.next().map(|lease| lease.id)
        {
            leases.retain(|lease| lease.id != oldest);
        }
        leases.push(lease);
    }

    /// Returns the etcd lease of a class, unless it may have expired, or is of an earlier term.
    fn known(&self, class: Class) -> Option<Arc<Lease>> {
        let leases = self.leases.lock();
        let lease = leases
            .iter()
            .rfind(|lease| lease.class == class && self.is_of_term(lease))?;
        let reserve = RESERVE.min(lease.length / 4);
        (lease.ends() > Moment::now() + reserve).then(|| lease.clone())
    }

    pub(super) fn is_of_term(&self, lease: &Lease) -> bool {
        lease.term == self.term.load(Relaxed)
    }

    /// Reads the term. A majority confirms that there was no later one when the call began.
    async fn read_term(&self) -> Outcome<u64> {
        let request = RangeRequest {
            key: self.key.clone(),
            ..RangeRequest::default()
        };
        let term = term_of(self.client.range(&request).await?.header);
        self.term.fetch_max(term, Relaxed);
        Ok(term)
    }

    /// Returns an etcd lease by its id.
    pub(super) fn find(&self, id: i64) -> Option<Arc<Lease>> {
        self.leases.lock().iter().find(|lease| lease.id == id).cloned()
    }

    /// Returns when an etcd lease ends at the earliest, with a reserve for the clocks. `None`: it may have expired.
    pub(super) fn end_of(&self, id: i64) -> Option<Moment> {
        let lease = self.find(id).filter(|lease| !lease.may_have_expired())?;
        Some(lease.ends() - RESERVE)
    }

    /// Makes an etcd lease last until `end`, with a request only if it does not yet. `false`: it has expired, or is of an earlier term.
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
        *lease.answered.lock() = sent;
        let is_of_term = self.read_term().await? == lease.term;
        if is_of_term {
            *lease.kept.lock() = sent;
        }
        Ok(is_of_term)
    }

    /// Keeps the etcd leases of the waiters alive, also those of earlier terms. Returns the delay until the next time. `None`: there is
    /// none.
    pub(super) async fn keep_waiters(&self) -> Option<Duration> {
        const INTERVAL: Duration = Duration::from_millis(1500);
        const RETRY: Duration = Duration::from_millis(300);
        let mut leases = self.leases.lock().clone();
        leases.retain(|lease| lease.class == Class::Waiters);
        if leases.is_empty() {
            return None;
        }
        let keeping = leases
            .iter()
            .map(|lease| tokio::time::timeout(INTERVAL, self.keep(lease)));
        let kept = join_all(keeping).await;
        let are_kept = kept.iter().all(|kept| matches!(kept, Ok(Ok(_))));
        if !are_kept {
            tracing::debug!(?kept, "the lease of the waiters was not kept alive");
        }
        Some(if are_kept { INTERVAL } else { RETRY })
    }

    /// Forgets an etcd lease that has expired.
    pub(super) fn forget(&self, id: i64) {
        self.leases.lock().retain(|lease| lease.id != id);
    }

    /// Revokes the etcd leases without entries.
    pub(super) async fn close(&self, has_entries: impl Fn(i64) -> bool) {
        let leases: Vec<i64> = self.leases.lock().drain(..).map(|lease| lease.id).collect();
        for id in leases.into_iter().filter(|id| !has_entries(*id)) {
            let _: Outcome<LeaseResponse> = self.client.call(REVOKE, &LeaseRequest { id }, None).await;
        }
    }
}

fn term_of(header: Option<Header>) -> u64 {
    header.map_or(0, |header| header.raft_term)
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
