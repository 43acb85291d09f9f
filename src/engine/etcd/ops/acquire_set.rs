//! Attempts of claims of several names.
//!
//! If all names are free, one transaction grants them. Otherwise a waiter has an entry at the first busy name, and entries at the
//! free names before it, which block later claims. The names are sorted, so that such claims cannot wait for each other in a
//! circle. Its entries end after its ttl, and each attempt extends them.

use std::sync::Arc;
use std::time::Duration;

use super::super::client::Outcome;
use super::super::client::messages::{Compare, Op};
use super::super::core::{Core, Held};
use super::super::entry::{Record, Stored, fence};
use super::super::leases::Class;
use super::acquire::busy;
use super::rewrite::Rewritten;
use super::txn::{Seen, delete, is_empty, is_unchanged, put, revision, txn};
use crate::clock::Moment;
use crate::engine::Acquired;
use crate::model::Claim;

/// The part of the ttl after which a waiter extends its entries.
const PART: u32 = 3;

/// What a claim finds at one of its names.
enum Place<'a> {
    Free,
    /// The claim has the oldest entry.
    Own(&'a Stored),
    /// Another claim has the oldest entry.
    Busy {
        oldest: &'a Stored,
        own: Option<&'a Stored>,
    },
}

impl<'a> Place<'a> {
    fn of(seen: &'a Seen, owner: &str) -> Self {
        match (&seen.oldest, &seen.own) {
            (None, _) => Place::Free,
            (Some(oldest), _) if oldest.is_owned_by(owner) => Place::Own(oldest),
            (Some(oldest), own) => Place::Busy {
                oldest,
                own: own.as_ref(),
            },
        }
    }

    fn own(&self) -> Option<&'a Stored> {
        match self {
            Place::Free => None,
            Place::Own(own) => Some(own),
            Place::Busy { own, .. } => *own,
        }
    }
}

impl Core {
    /// Makes one attempt of a claim of several names.
    pub(in super::super) async fn acquire_set(self: &Arc<Self>, claim: &Claim) -> Outcome<Acquired> {
        let owner = claim.owner.as_str();
        let free: Vec<Place> = claim.keys().iter().map(|_| Place::Free).collect();
        if let Some(granted) = self.complete(claim, &free, None).await? {
            return Ok(granted);
        }
        let mut last = busy(&claim.keys()[0], None);
        for _ in 0..super::ATTEMPTS {
            let (at, seen) = self.look(claim.keys(), owner).await?;
            let places: Vec<Place> = seen.iter().map(|seen| Place::of(seen, owner)).collect();
            let index = places.iter().position(|place| matches!(place, Place::Busy { .. }));
            let Some(index) = index else {
                if let Some(granted) = self.complete(claim, &places, Some(at)).await? {
                    return Ok(granted);
                }
                continue;
            };
            let Place::Busy { oldest, .. } = &places[index] else {
                continue;
            };
            let poll = claim.ttl.duration() / PART;
            let after = oldest.ttl().map(|ttl| if claim.waiting { ttl.min(poll) } else { ttl });
            last = busy(&claim.keys()[index], after);
            if self.stay(claim, &places, index).await? {
                return Ok(last);
            }
        }
        Ok(last)
    }

    /// Acquires the names, which are free or have the claim's entry as the oldest one. `at`: the revision at which they were read; without
    /// one all are free. `None`: one has changed.
    async fn complete(&self, claim: &Claim, places: &[Place<'_>], at: Option<u64>) -> Outcome<Option<Acquired>> {
        // A claim that holds all of them has a token. If all are free, the token follows from the revision of their creation.
        let holds = |place: &Place<'_>| place.own().filter(|own| own.holds()).and_then(Stored::fence);
        let held: Option<Vec<_>> = places.iter().map(holds).collect();
        let token = held
            .and_then(|tokens| tokens.into_iter().max())
            .or(at.map(|at| fence(at, 0)));
        let now = Record::of_holder(claim, token);
        let entries = claim.keys().iter().zip(places).map(|(name, place)| match place.own() {
            None => Rewritten::new(
                name,
                self.layout.key(name, claim.owner.as_str()),
                &claim.owner,
                now.clone(),
            ),
            Some(stored) => {
                let before = stored.record.clone().unwrap_or_default();
                let record = Record {
                    set: false,
                    ttl: before.ttl.max(now.ttl),
                    since: before.since.or(now.since),
                    fence: now.fence,
                    ..before
                };
                let (name, stored) = (name.clone(), stored.clone());
                Rewritten { name, stored, record }
            }
        });
        let done = self
            .rewrite(entries.collect(), &claim.owner, claim.ttl, Some(claim))
            .await?;
        Ok(done.map(|at| {
            self.entries.leave(&claim.owner);
            let fence = token.unwrap_or(fence(at, 0));
            Acquired::Granted { fence }
        }))
    }

    /// Makes a waiter wait at the busy name `index`, with entries at the names before it. Another claim leaves nothing. `false`: a
    /// name has changed.
    async fn stay(self: &Arc<Self>, claim: &Claim, places: &[Place<'_>], index: usize) -> Outcome<bool> {
        let names = claim.keys().iter().zip(places).enumerate();
        let (mut compare, mut ops) = (Vec::new(), Vec::new());
        let lease = match claim.waiting {
            true => Some(self.leases.get(Class::Waiters).await?),
            false => None,
        };
        let record = Record::of_waiter(claim);
        let mut stays = Vec::new();
        for (at, (name, place)) in names {
            match (place.own(), &lease) {
                // A name that the claim is granted as a part.
                (Some(own), Some(_)) if at <= index => {
                    compare.push(is_unchanged(own.kv.key.clone(), own.kv.mod_revision));
                    stays.push((name, Some(own)));
                }
                (Some(own), _) => {
                    compare.push(is_unchanged(own.kv.key.clone(), own.kv.mod_revision));
                    ops.push(delete(own.kv.key.clone()));
                }
                (None, Some(lease)) if at <= index => {
                    if at < index {
                        compare.push(is_empty(self.layout.range(name)));
                    }
                    ops.push(put(self.layout.key(name, claim.owner.as_str()), &record, lease.id));
                    stays.push((name, None));
                }
                (None, _) => {}
            }
        }
        let mut created = 0;
        if !ops.is_empty() {
            let answer = self.txn_of_set(claim, compare, ops).await;
            let answer = answer.inspect_err(|failure| {
                lease.iter().for_each(|lease| self.lease_failed(failure, lease));
            });
            match answer? {
                Some(at) => created = at,
                None => return Ok(false),
            }
        }
        let Some(lease) = lease else {
            return Ok(true);
        };
        let end = Moment::now() + claim.ttl.duration().max(Duration::from_millis(1));
        for (name, own) in stays {
            let held = match own {
                Some(own) => Held::of(own, Class::Waiters, claim.ttl),
                None => Held::new(claim, (created as u64, 0), lease.id, Class::Waiters),
            };
            self.held.insert((name.clone(), held.id.clone()), held, end);
        }
        let name = &claim.keys()[index];
        let granted = self.entries.enter(&claim.owner, name, &claim.owner.as_str().into());
        self.keep_waiters();
        self.granted(granted);
        Ok(true)
    }

    /// Executes a transaction of an attempt. Returns its revision. `None`: a comparison was false.
    async fn txn_of_set(&self, claim: &Claim, compare: Vec<Compare>, ops: Vec<Op>) -> Outcome<Option<i64>> {
        let begin = || Some(self.attempts.begin(std::iter::once(claim.owner.clone())));
        let answer = self.txn_of_attempt(&txn(compare, ops, Vec::new()), &begin).await?;
        Ok(answer.succeeded.then(|| revision(&answer) as i64))
    }
}
