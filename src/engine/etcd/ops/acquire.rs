//! Attempts of claims of one name.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::super::client::Outcome;
use super::super::client::messages::{Op, OpAnswer, ResponseOp, TxnRequest};
use super::super::core::{Core, Held, never};
use super::super::entry::{Record, Stored, fence};
use super::super::leases::{Class, Lease};
use super::rewrite::Rewritten;
use super::txn::{get, is_absent, is_empty, oldest, put, range_of, revision, txn};
use crate::clock::Moment;
use crate::engine::Acquired;
use crate::model::{Claim, Fence, Key};

impl Core {
    /// Makes attempts of claims of one name, in one transaction: if the name is free, it grants the first one, and the others enter
    /// the queue. Claims that wait enter if they have no entry.
    pub(in super::super) async fn acquire(self: &Arc<Self>, claims: &[&Claim]) -> Outcome<Vec<Acquired>> {
        let Some(first) = claims.first() else {
            return Ok(Vec::new());
        };
        let name = first.keys()[0].clone();
        for attempt in 1..=super::ATTEMPTS {
            let lease = self.leases.get(Class::of(first.ttl)).await?;
            let of_waiters = match claims.iter().any(|claim| claim.waiting) {
                true => Some(self.leases.get(Class::Waiters).await?),
                false => None,
            };
            for claim in claims.iter().filter(|claim| claim.waiting) {
                self.entries.begin_attempt(&claim.owner, &name);
            }
            let request = self.request(claims, &name, &lease, of_waiters.as_deref());
            let sent = Moment::now();
            // A request that waits for a connection is sent later.
            let sent_at = AtomicU64::new(sent.to_nanos());
            let begin = || {
                sent_at.store(Moment::now().to_nanos(), Relaxed);
                claims.iter().for_each(|claim| claim.mark_sent());
                Some(self.attempts.begin(claims.iter().map(|claim| claim.owner.clone())))
            };
            let (answer, kept) = tokio::join!(
                self.txn_of_attempt(&request, &begin),
                self.leases.keep_until(&lease, sent + first.ttl.duration()),
            );
            let mut answer = match answer {
                Err(failure) if failure.status.is_lease_gone() && attempt < super::ATTEMPTS => {
                    [Some(&lease), of_waiters.as_ref()]
                        .into_iter()
                        .flatten()
                        .for_each(|lease| self.leases.forget(lease.id));
                    continue;
                }
                answer => answer?,
            };
            let at = revision(&answer);
            if answer.succeeded {
                if !kept? {
                    // The entry has ended with its etcd lease.
                    continue;
                }
                let end = Moment::from_nanos(sent_at.load(Relaxed)) + first.ttl.duration();
                if !self.leases.keep_until(&lease, end).await? {
                    continue;
                }
                let held = Held {
                    has_siblings: claims.len() > 1,
                    ..Held::new(first, (at, 0), lease.id, Class::of(first.ttl))
                };
                self.held.insert((name.clone(), held.id.clone()), held, end);
                self.entries.leave(&first.owner);
                let mut answers = vec![Acquired::Granted { fence: fence(at, 0) }];
                for (n, claim) in claims.iter().enumerate().skip(1) {
                    if let Some(lease) = &of_waiters {
                        let held = Held::new(claim, (at, n as u32), lease.id, Class::Waiters);
                        self.enter(claim, &name, true, held);
                    }
                    answers.push(busy(&name, Some(first.ttl.duration())));
                }
                return Ok(answers);
            }
            let range = range_of(answer.responses.pop());
            let Some(first) = self.first_of(&name, range.kvs).await? else {
                continue;
            };
            let mut answers = Vec::with_capacity(claims.len());
            let mut entered = answer.responses.into_iter();
            let mut is_stale = false;
            for (n, claim) in claims.iter().enumerate() {
                let entry = if claim.waiting { entered.next() } else { None };
                if first.is_owned_by(claim.owner.as_str()) {
                    match self.confirm(claim, &name, first.clone(), at).await? {
                        Some(fence) => answers.push(Acquired::Granted { fence }),
                        None => is_stale = true,
                    }
                    continue;
                }
                if let (Some(lease), true) = (&of_waiters, claim.waiting) {
                    let (has_siblings, held) = match self.own_entry(&name, entry) {
                        Some(own) => (own.has_siblings(), Held::of(&own, Class::Waiters, claim.ttl)),
                        None => (
                            claims.len() > 1,
                            Held::new(claim, (at, n as u32), lease.id, Class::Waiters),
                        ),
                    };
                    self.enter(claim, &name, has_siblings, held);
                }
                answers.push(busy(&name, first.ttl()));
            }
            if !is_stale {
                return Ok(answers);
            }
        }
        Ok(claims.iter().map(|_| busy(&name, None)).collect())
    }

    fn request(&self, claims: &[&Claim], name: &Key, lease: &Lease, of_waiters: Option<&Lease>) -> TxnRequest {
        let several = claims.len() > 1;
        let key = |claim: &Claim| self.layout.key(name, claim.owner.as_str());
        let (mut granted, mut busy) = (Vec::new(), Vec::new());
        for (n, claim) in claims.iter().enumerate() {
            let with_place = |record: Record| Record {
                n: n as u32,
                several,
                ..record
            };
            if n == 0 {
                let record = with_place(Record::of_holder(claim, None));
                granted.push(put(key(claim), &record, lease.id));
            }
            if let Some(of_waiters) = of_waiters.filter(|_| claim.waiting) {
                let enter = put(key(claim), &with_place(Record::of_waiter(claim)), of_waiters.id);
                if n > 0 {
                    granted.push(enter.clone());
                }
                let absent = vec![is_absent(key(claim))];
                busy.push(Op::Txn(txn(absent, vec![enter], vec![get(key(claim))])));
            }
        }
        busy.push(Op::Range(oldest(self.layout.range(name))));
        txn(vec![is_empty(self.layout.range(name))], granted, busy)
    }

    /// Returns the entry that a claim had before. `None`: the transaction has created it.
    fn own_entry(&self, name: &Key, answer: Option<ResponseOp>) -> Option<Stored> {
        let Some(OpAnswer::Txn(mut answer)) = answer?.op else {
            return None;
        };
        let kv = range_of(answer.responses.pop()).kvs.pop()?;
        Some(self.layout.read_of(name, kv))
    }

    /// Makes a claim a waiter.
    fn enter(self: &Arc<Self>, claim: &Claim, name: &Key, has_siblings: bool, held: Held) {
        let id = held.id.clone();
        let held = Held {
            has_siblings,
            is_waiter: true,
            ..held
        };
        self.held.insert((name.clone(), id.clone()), held, never());
        let granted = self.entries.enter(&claim.owner, name, &id);
        self.keep_waiters();
        self.granted(granted);
    }

    /// Makes the oldest entry of a name, which a claim owns, its lease. Returns its fencing token. `None`: it has changed.
    async fn confirm(&self, claim: &Claim, name: &Key, stored: Stored, at: u64) -> Outcome<Option<Fence>> {
        let (_, n) = stored.place();
        let token = stored.fence().unwrap_or(fence(at, n));
        let Some(record) = &stored.record else {
            return Ok(None);
        };
        let now = Record::of_holder(claim, Some(token));
        let record = Record {
            set: false,
            ttl: record.ttl.max(claim.ttl.as_millis()),
            since: record.since.or(now.since),
            fence: Some(token.0),
            ..record.clone()
        };
        let entry = Rewritten {
            name: name.clone(),
            stored,
            record,
        };
        let is_done = self
            .rewrite(vec![entry], &claim.owner, claim.ttl, Some(claim))
            .await?
            .is_some();
        if is_done {
            self.entries.leave(&claim.owner);
        }
        Ok(is_done.then_some(token))
    }
}

pub(super) fn busy(name: &Key, retry_after: Option<std::time::Duration>) -> Acquired {
    Acquired::Held {
        key: name.clone(),
        retry_after,
    }
}
