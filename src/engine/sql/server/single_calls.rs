//! The calls of one name each that are executed as single statements, and their answers.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::Outcome;
use super::transaction::Prefix;
use super::waiters::Effects;
use crate::engine::core::ledger::{Notification, StoredName, held_names};
use crate::engine::sql::jobs::Job;
use crate::engine::sql::{Lease, Page};
use crate::engine::{Acquired, Released, Renewed};
use crate::model::{Claim, Fence, Key, LockInfo, OwnerToken, Ttl};

/// An attempt for one name.
pub(in crate::engine::sql) type Attempt = (StoredName, Arc<Claim>);

/// The releases and the renewals of a batch, each for one name.
#[derive(Default)]
pub(in crate::engine::sql) struct SingleChanges {
    pub releases: Vec<(StoredName, OwnerToken)>,
    /// Whether a name of the releases is likely to have a queue.
    pub expects_queue: bool,
    pub renewals: Vec<(StoredName, OwnerToken, Ttl)>,
}

/// The names that were released. Releases without an answer need a transaction.
pub(in crate::engine::sql) type ReleasedNames = Outcome<HashMap<StoredName, ReleaseAnswer>>;

/// The owners whose leases were extended. Renewals without an answer need a transaction.
pub(in crate::engine::sql) type RenewedOwners = Outcome<HashSet<String>>;

/// The names that their last release handed off: they are likely to have a queue again.
#[derive(Default)]
pub(super) struct QueuedNames(Mutex<HashSet<Key>>);

/// The answer to a release.
pub(in crate::engine::sql) struct ReleaseAnswer {
    /// Whether the lease had not expired.
    pub is_live: bool,
    pub is_handed_off: bool,
    /// The notification for a waiter of this process that the name was handed off to.
    pub next: Option<Notification>,
}

/// The answers to attempts. Those without an answer need a transaction.
#[derive(Default)]
pub(in crate::engine::sql) struct Granted {
    /// The fencing token of each grant.
    pub fences: HashMap<StoredName, i64>,
    /// The owners of busy names, and the remaining times of their leases.
    pub held: HashMap<StoredName, (String, Duration)>,
}

/// The leases of a page, sorted by name.
pub(in crate::engine::sql) struct PageRead {
    pub leases: Vec<Lease>,
    /// The page after it.
    pub next: Option<Page>,
}

impl ReleaseAnswer {
    pub(in crate::engine::sql) fn without_queue(is_live: bool) -> Self {
        let (is_handed_off, next) = (false, None);
        ReleaseAnswer {
            is_live,
            is_handed_off,
            next,
        }
    }
}

impl QueuedNames {
    /// The most names. Beyond them all are forgotten: those that this process does not release again would stay.
    const MOST: usize = 1024;

    fn record(&self, key: &Key, is_handed_off: bool) {
        let mut names = self.0.lock();
        if !is_handed_off {
            names.remove(key);
            return;
        }
        if names.len() >= Self::MOST {
            names.clear();
        }
        names.insert(key.clone());
    }

    pub(super) fn contain(&self, key: &Key) -> bool {
        self.0.lock().contains(key)
    }
}

impl SingleChanges {
    /// Returns the changes of jobs with one name each.
    pub(super) fn new(prefix: &Prefix, releases: &[Job], renewals: &[Job]) -> Self {
        let stored = |claim: &Claim| prefix.stored(&claim.keys()[0]);
        let release = |job: &Job| match job {
            Job::Release(claims, ..) => claims.first().map(|claim| (stored(claim), claim.owner.clone())),
            _ => None,
        };
        let renewal = |job: &Job| match job {
            Job::Renew(claim, ttl, _) => {
                let name = held_names(claim, &[stored(claim)])[0].clone();
                Some((name, claim.owner.clone(), *ttl))
            }
            _ => None,
        };
        SingleChanges {
            releases: releases.iter().filter_map(release).collect(),
            expects_queue: false,
            renewals: renewals.iter().filter_map(renewal).collect(),
        }
    }
}

/// Returns the attempts of jobs with one name each.
pub(super) fn attempts(prefix: &Prefix, jobs: &[Job]) -> Vec<Attempt> {
    let attempt = |job: &Job| match job {
        Job::Acquire(claims, ..) => {
            let claim = claims.first()?;
            Some((prefix.stored(&claim.keys()[0]), claim.clone()))
        }
        _ => None,
    };
    jobs.iter().filter_map(attempt).collect()
}

/// Returns the pages of jobs that only read.
pub(super) fn pages(jobs: &[Job]) -> Vec<Page> {
    let page = |job: &Job| match job {
        Job::Inspect(page, _) | Job::List(page, _) => Some(page.clone()),
        _ => None,
    };
    jobs.iter().filter_map(page).collect()
}

/// Stores the answers to releases. Returns what follows for the waiters of this process.
pub(super) fn answer_releases(
    jobs: &mut [Job],
    prefix: &Prefix,
    mut released: HashMap<StoredName, ReleaseAnswer>,
    queued: &QueuedNames,
) -> Effects {
    let mut effects = Effects::default();
    for job in jobs {
        if let Job::Release(claims, _, reply) = job
            && let key = &claims[0].keys()[0]
            && let Some(ReleaseAnswer {
                is_live,
                is_handed_off,
                next,
            }) = released.remove(&prefix.stored(key))
        {
            queued.record(key, is_handed_off);
            reply.set(vec![if is_live { Released::Freed } else { Released::NotHeld }]);
            effects.left.push(claims[0].owner.clone());
            effects.notifications.extend(next);
        }
    }
    effects
}

/// Stores the answers to renewals.
pub(super) fn answer_renewals(jobs: &mut [Job], extended: &HashSet<String>) {
    for job in jobs {
        if let Job::Renew(claim, _, reply) = job
            && extended.contains(claim.owner.as_str())
        {
            reply.set(Renewed::Extended);
        }
    }
}

/// Stores the answers to attempts, and to `repeated` ones for the same names.
pub(super) fn answer_attempts(jobs: &mut [Job], repeated: &mut [Job], prefix: &Prefix, granted: Granted) {
    let Granted { mut fences, held } = granted;
    for job in jobs.iter_mut().chain(repeated) {
        let Job::Acquire(claims, _, reply) = job else { continue };
        let claim = &claims[0];
        let key = &claim.keys()[0];
        let name = prefix.stored(key);
        if let Some(fence) = fences.remove(&name) {
            // The first job of each name.
            reply.set(vec![Acquired::Granted {
                fence: Fence(fence.unsigned_abs()),
            }]);
        } else if let Some((owner, left)) = held.get(&name)
            && !claim.waiting
            && owner != claim.owner.as_str()
        {
            let (key, retry_after) = (key.clone(), Some(*left));
            reply.set(vec![Acquired::Held { key, retry_after }]);
        }
    }
}

/// Stores the answers to jobs that only read. `read`: the leases of each, sorted by name.
pub(super) fn answer_reads(jobs: &mut [Job], prefix: &Prefix, read: Vec<PageRead>) {
    for (job, PageRead { leases, next }) in jobs.iter_mut().zip(read) {
        let found: Vec<LockInfo> = leases.into_iter().map(|lease| lease.info(&prefix.0)).collect();
        match job {
            Job::Inspect(_, reply) | Job::List(_, reply) => reply.set((found, next)),
            _ => {}
        }
    }
}

/// Returns a span of microseconds, zero when it is negative.
pub(in crate::engine::sql) fn micros(span: i64) -> Duration {
    Duration::from_micros(span.max(0).unsigned_abs())
}
