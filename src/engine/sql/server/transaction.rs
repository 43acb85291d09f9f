//! The transactions: what they read, what the calls in them change, and what they write.
//!
//! A transaction is two packets. The first one locks the rows of all names in their order, and reads them and their queues. The calls
//! are then made in `core/ledger/`, and the second packet writes the result.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::waiters::{Effects, InQueue, Waiters};
use super::{Outcome, Session};
use crate::clock::Moment;
use crate::engine::Acquired;
use crate::engine::core::ledger::{
    MOST_HAND_OFFS, Notification, Row, SHARED, StoredName, bounds, is_shared, stored_name,
};
use crate::engine::sql::jobs::Job;
use crate::model::{Claim, Key};

/// The names and owners of the calls of a transaction.
#[derive(Default)]
pub(in crate::engine::sql) struct Plan {
    /// Each name, and whether its row is created.
    pub names: BTreeMap<StoredName, bool>,
    pub owners: Vec<String>,
    /// Whether the transaction waits only briefly for a lock: 10 ms on PostgreSQL, not at all on MariaDB. MySQL does not wait for a row that is
    /// already locked, otherwise 1 s, its minimum.
    pub is_brief: bool,
    /// Whether each job is a part of it.
    includes: Vec<bool>,
    /// The names that a check found free.
    free: Vec<StoredName>,
    /// The names whose positions are counted again.
    recounted: Vec<StoredName>,
}

/// Names that need a transaction without a call.
pub(super) struct CheckedNames {
    pub names: Vec<StoredName>,
    /// `true`: the names are free, and are handed off. `false`: they have positions that expired more than a minute ago, which are removed.
    pub are_free: bool,
}

/// The prefix of the names of a store.
#[derive(Debug, Clone)]
pub(in crate::engine::sql) struct Prefix(pub String);

impl Prefix {
    /// Returns a name as it is stored.
    pub(super) fn stored(&self, key: &Key) -> StoredName {
        stored_name(&self.0, key)
    }

    /// Returns a name from its stored form.
    fn key(&self, name: &StoredName) -> Option<Key> {
        let name = name.strip_prefix(self.0.as_bytes())?;
        let shared = name.strip_prefix(&[SHARED]);
        let key = Key::new(std::str::from_utf8(shared.unwrap_or(name)).ok()?).ok()?;
        Some(if shared.is_some() { key.shared() } else { key })
    }

    fn all(&self, claim: &Claim) -> Vec<StoredName> {
        claim.keys().iter().map(|key| self.stored(key)).collect()
    }

    /// Returns the names that a job may change.
    pub(super) fn names(&self, job: &Job) -> impl Iterator<Item = StoredName> {
        job.keys().into_iter().map(|key| self.stored(key))
    }
}

impl Plan {
    /// Starts the attempts of a batch. Leaves out cancelled jobs.
    pub(super) fn new(batch: &[Job], checked: Option<&CheckedNames>, prefix: &Prefix) -> Self {
        let mut plan = Plan::default();
        for job in batch {
            let is_part = job.start() && plan.add(job, prefix);
            plan.includes.push(is_part);
        }
        if let Some(CheckedNames { names, are_free }) = checked {
            let list = if *are_free { &mut plan.free } else { &mut plan.recounted };
            // The row of a name with waiters may have been deleted by hand.
            plan.names.extend(names.iter().map(|name| (name.clone(), true)));
            list.extend_from_slice(names);
        }
        plan
    }

    pub(super) fn is_empty(&self) -> bool {
        self.names.is_empty()
    }

    /// Whether a row that was created is not among those that were read. Its name would count as free.
    pub(in crate::engine::sql) fn lacks_row(&self, found: &BTreeMap<StoredName, Row>) -> bool {
        let mut names = self.names.iter();
        names.any(|(name, is_created)| *is_created && !found.contains_key(name))
    }

    /// Returns how many positions of a name are read: one for each call, which removes one at most, and two more; of a shared name
    /// [`MOST_HAND_OFFS`] more.
    pub(in crate::engine::sql) fn front(&self, name: &StoredName) -> usize {
        self.owners.len() + if is_shared(name) { MOST_HAND_OFFS } else { 2 }
    }

    /// Returns the bounds of the shares of each shared name.
    pub(in crate::engine::sql) fn shares(&self) -> impl Iterator<Item = (StoredName, StoredName)> {
        self.names.keys().filter(|name| is_shared(name)).map(bounds)
    }

    /// Adds a job. `false`: it only reads.
    fn add(&mut self, job: &Job, prefix: &Prefix) -> bool {
        match job {
            Job::Acquire(claims, ..) => claims.iter().for_each(|claim| self.add_claim(claim, prefix, true)),
            Job::Renew(claim, ..) | Job::Transfer(claim, ..) => self.add_claim(claim, prefix, false),
            Job::Release(claims, ..) => claims.iter().for_each(|claim| self.add_claim(claim, prefix, false)),
            Job::ForceRelease(key, _) => self.add_name(key, prefix, false),
            Job::Inspect(..) | Job::List(..) => return false,
        }
        true
    }

    fn add_claim(&mut self, claim: &Claim, prefix: &Prefix, is_created: bool) {
        self.owners.push(claim.owner.as_str().to_owned());
        claim
            .keys()
            .iter()
            .for_each(|key| self.add_name(key, prefix, is_created));
    }

    /// Adds a name. The row of a shared one is always created: its lock is that of all shares.
    fn add_name(&mut self, key: &Key, prefix: &Prefix, is_created: bool) {
        *self.names.entry(prefix.stored(key)).or_default() |= is_created || key.is_shared();
    }
}

/// Executes the jobs of a plan as one transaction, and stores their answers.
pub(super) async fn transact(
    session: &mut dyn Session,
    prefix: &Prefix,
    waiters: &Waiters,
    plan: &Plan,
    batch: &mut [Job],
) -> Outcome<Effects> {
    let process = waiters.process.as_str();
    let sent = Moment::now();
    let mut ledger = session.begin(process, plan).await?;
    waiters.read_clock(sent, ledger.now_us());
    ledger.recount(&plan.recounted);
    let mut effects = Effects::default();
    let mut waiting: Vec<(Arc<Claim>, Key)> = Vec::new();
    for (job, _) in batch.iter_mut().zip(&plan.includes).filter(|(_, is_part)| **is_part) {
        match job {
            Job::Acquire(claims, _, reply) => {
                let mut answers = Vec::with_capacity(claims.len());
                for claim in claims.iter() {
                    let ticket = waiters.known.number(&claim.owner);
                    if ticket > 0 {
                        ledger.remember(&claim.owner, ticket);
                    }
                    let acquired = ledger.attempt(claim, &prefix.all(claim));
                    match &acquired {
                        Acquired::Held { key, .. } if claim.waiting => waiting.push((claim.clone(), key.clone())),
                        _ => effects.left.push(claim.owner.clone()),
                    }
                    answers.push(acquired);
                }
                reply.set(answers);
            }
            Job::Renew(claim, ttl, reply) => reply.set(ledger.renew(claim, &prefix.all(claim), *ttl)),
            Job::Transfer(claim, to, reply) => reply.set(ledger.transfer(claim, &prefix.all(claim), to)),
            Job::Release(claims, keep, reply) => {
                let release = |claim: &Claim| ledger.release(claim, &prefix.all(claim), *keep);
                reply.set(claims.iter().map(release).collect());
                effects.left.extend(claims.iter().map(|claim| claim.owner.clone()));
            }
            Job::ForceRelease(key, reply) => reply.set(ledger.force_release(&prefix.stored(key))),
            Job::Inspect(..) | Job::List(..) => {}
        }
    }
    let mut changes = ledger.finish();
    let mut tickets = session.commit(process, &changes).await?;
    effects.unfinished = changes.unfinished.iter().filter_map(|name| prefix.key(name)).collect();
    effects.notifications = std::mem::take(&mut changes.notifications);
    effects
        .notifications
        .retain(|notification| notification.engine.is_none());
    // The new holder may be a waiter of a dead process: the names are checked again when their hand-offs end.
    let handed = |name: &StoredName| Some((prefix.key(name)?, ledger.busy_for(name)?));
    effects.handed = plan.free.iter().filter_map(handed).collect();
    for (claim, name) in waiting {
        let owner = claim.owner.clone();
        match tickets.remove(owner.as_str()) {
            Some(ticket) => effects.entered.push(InQueue {
                busy_for: ledger.busy_for(&prefix.stored(&name)),
                ttl: claim.ttl.duration(),
                owner,
                name,
                ticket,
            }),
            // The name was handed off to this waiter, or its ticket belongs to another waiter because the tables were created again.
            None => {
                effects.notifications.push(Notification::may_be_free(&owner));
                effects.left.push(owner);
            }
        }
    }
    Ok(effects)
}
