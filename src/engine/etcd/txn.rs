//! The transactions on entries.

use std::sync::Arc;

use super::client::messages::{
    Compare, DeleteRequest, KeyValue, Op, OpAnswer, PutRequest, RangeRequest, RangeResponse, ResponseOp, TxnRequest,
    TxnResponse,
};
use super::client::{Kind, Outcome as Answer};
use super::leases::{Class, Lease};
use super::store::{Etcd, Range};
use crate::clock::Moment;
use crate::engine::entries::{Record, Seen, Stored, granted, now_ms};
use crate::model::{Claim, Key, OwnerToken};

const TXN: &str = "/etcdserverpb.KV/Txn";
/// The number of entries of a shared name that an attempt reads, unless all of these are granted.
const MOST_SHARES: usize = 64;

/// The comparison that is true for a range without keys.
pub(super) fn is_empty((key, range_end): Range) -> Compare {
    Compare {
        target: 1, // CREATE
        key,
        range_end,
        create_revision: Some(0),
        ..Compare::default()
    }
}

pub(super) fn txn(compare: Vec<Compare>, success: Vec<Op>, failure: Vec<Op>) -> TxnRequest {
    TxnRequest {
        compare,
        success: success.into_iter().map(Into::into).collect(),
        failure: failure.into_iter().map(Into::into).collect(),
    }
}

/// Returns the revision of the store after a transaction.
pub(super) fn revision(answer: &TxnResponse) -> i64 {
    answer.header.as_ref().map_or(0, |header| header.revision)
}

/// Returns the answer to a read in a transaction. Empty for the answer to anything else.
pub(super) fn range_of(answer: Option<ResponseOp>) -> RangeResponse {
    match answer.and_then(|answer| answer.op) {
        Some(OpAnswer::Range(range)) => range,
        _ => RangeResponse::default(),
    }
}

impl Etcd {
    pub(super) async fn txn(&self, request: &TxnRequest, attempt: Option<&Claim>) -> Answer<TxnResponse> {
        self.client.call(TXN, request, attempt).await
    }

    pub(super) fn key(&self, entry: &Stored) -> Vec<u8> {
        self.layout.key(&entry.name, &entry.id)
    }

    /// Returns the comparison that is true while an entry has not changed.
    pub(super) fn is_unchanged(&self, entry: &Stored) -> Compare {
        Compare {
            target: 2, // MOD
            key: self.key(entry),
            mod_revision: Some(entry.version),
            ..Compare::default()
        }
    }

    pub(super) fn put(&self, entry: &Stored, lease: &Lease) -> Op {
        let value = entry.record.as_ref().map(Record::to_json).unwrap_or_default();
        let (key, lease) = (self.key(entry), lease.id);
        Op::Put(PutRequest { key, value, lease })
    }

    /// Returns the entry that a claim gets at a name.
    pub(super) fn new_entry(&self, claim: &Claim, name: &Key, record: &Record) -> Stored {
        let kv = KeyValue {
            key: self.layout.key(name, claim.owner.as_str()),
            ..KeyValue::default()
        };
        Stored {
            owner: Some(claim.owner.clone()),
            record: Some(record.clone()),
            ..self.layout.entry(name, &kv)
        }
    }

    /// Returns the reads of the oldest entries of a name, of a shared one at most `most` (0: all), and of that of an owner.
    pub(super) fn reads(&self, name: &Key, owner: Option<&OwnerToken>, most: usize) -> impl Iterator<Item = Op> {
        let (key, range_end) = self.layout.range(name);
        let oldest = RangeRequest {
            key,
            range_end,
            limit: if name.is_shared() { most as i64 } else { 1 },
            sort_order: 1,  // ASCEND
            sort_target: 2, // CREATE
            ..RangeRequest::default()
        };
        let own = owner.map(|owner| RangeRequest {
            key: self.layout.key(name, owner.as_str()),
            ..RangeRequest::default()
        });
        [Some(oldest), own].into_iter().flatten().map(Op::Range)
    }

    /// Reads the answers to [`Etcd::reads`] of several names.
    fn seen(
        &self,
        names: &[Key],
        owner: Option<&OwnerToken>,
        at: i64,
        mut answers: impl Iterator<Item = ResponseOp>,
    ) -> Vec<Seen> {
        let seen = names.iter().map(|name| {
            let oldest = range_of(answers.next());
            let own = owner.map(|_| range_of(answers.next()));
            let entry = |kv: &KeyValue| self.layout.entry(name, kv);
            let count = usize::try_from(oldest.count).unwrap_or_default();
            let mut entries: Vec<Stored> = oldest.kvs.iter().map(entry).collect();
            let (held, sums) = granted(entries.iter().map(Stored::share));
            entries.truncate(held);
            let is_own = |entry: &Stored| owner.is_some_and(|owner| entry.is_of(owner));
            let of_granted = entries.iter().find(|entry| is_own(entry)).cloned();
            Seen {
                at: at as u64,
                own: of_granted.or_else(|| own?.kvs.first().map(entry).filter(is_own)),
                granted: entries,
                sums,
                waiting: count.saturating_sub(held),
            }
        });
        seen.collect()
    }

    /// Makes the first attempt: if all names are free, it grants them; otherwise a claim of one name that waits enters.
    pub(super) async fn attempt_first(&self, claim: &Claim, names: &[Key]) -> Answer<Vec<Seen>> {
        let owner = Some(&claim.owner);
        let lease = self.leases.get(Class::of(claim.ttl)).await?;
        let record = Record::new(claim);
        let granted = Record {
            set: false,
            since: Some(now_ms()),
            ..record.clone()
        };
        let entries: Vec<Stored> = names.iter().map(|name| self.new_entry(claim, name, &granted)).collect();
        let compare = names.iter().map(|name| is_empty(self.layout.range(name)));
        let puts = entries.iter().map(|entry| self.put(entry, &lease));
        let mut busy = Vec::new();
        let mut waiters = None;
        if let ([name], true) = (names, claim.waiting) {
            let lease = self.leases.get(Class::Waiters).await?;
            let entry = self.new_entry(claim, name, &record);
            let is_absent = is_empty((self.key(&entry), Vec::new()));
            busy.push(Op::Txn(txn(
                vec![is_absent],
                vec![self.put(&entry, &lease)],
                Vec::new(),
            )));
            self.waiting.notify_one();
            waiters = Some(lease);
        }
        let enters = busy.len();
        busy.extend(names.iter().flat_map(|name| self.reads(name, owner, MOST_SHARES)));
        let request = txn(compare.collect(), puts.collect(), busy);
        let end = Moment::now() + claim.ttl.duration();
        let (answer, kept) = tokio::join!(self.txn(&request, Some(claim)), self.leases.keep_until(&lease, end));
        let answer = self.of_lease(answer, waiters.iter().chain([&lease]))?;
        let at = revision(&answer);
        if answer.succeeded {
            kept?;
            let created = entries.into_iter().map(|entry| self.created(entry, at, &lease));
            return Ok(created.collect());
        }
        let seen = self.seen(names, owner, at, answer.responses.into_iter().skip(enters));
        self.completed(names, owner, seen).await
    }

    /// Describes a name with one entry, which was created at a revision.
    pub(super) fn created(&self, entry: Stored, at: i64, lease: &Lease) -> Seen {
        let entry = Stored {
            position: at as u64,
            version: at,
            session: lease.id,
            ..entry
        };
        Seen {
            at: at as u64,
            sums: [entry.share()].into_iter().collect(),
            granted: vec![entry.clone()],
            own: Some(entry),
            waiting: 0,
        }
    }

    /// Creates entries of a claim and deletes others, in one transaction, and then reads all names of the claim.
    ///
    /// # Behavior
    /// The entries are those of a waiter, except that of a share that does not wait: it is granted unless another one was faster.
    pub(super) async fn change_entries(&self, claim: &Claim, create: &[Key], remove: &[Stored]) -> Answer<Vec<Seen>> {
        let owner = Some(&claim.owner);
        let is_granted = claim.share.is_some() && !claim.waiting;
        let class = if is_granted {
            Class::of(claim.ttl)
        } else {
            Class::Waiters
        };
        let lease = self.leases.get(class).await?;
        let record = Record {
            since: is_granted.then(now_ms),
            ..Record::new(claim)
        };
        let compare = remove.iter().map(|entry| self.is_unchanged(entry)).collect();
        let puts = create
            .iter()
            .map(|name| self.put(&self.new_entry(claim, name, &record), &lease));
        let deletions = remove
            .iter()
            .map(|entry| Op::Delete(DeleteRequest { key: self.key(entry) }));
        let changes = puts.chain(deletions).collect();
        self.waiting.notify_one();
        let changed = self.txn(&txn(compare, changes, Vec::new()), Some(claim)).await;
        self.of_lease(changed, [&lease])?;
        self.read_in_one(claim.keys(), owner).await
    }

    /// Reads names in one transaction.
    pub(super) async fn read_in_one(&self, names: &[Key], owner: Option<&OwnerToken>) -> Answer<Vec<Seen>> {
        let most = if owner.is_some() { MOST_SHARES } else { 0 };
        let seen = self.read_most(names, owner, most).await?;
        self.completed(names, owner, seen).await
    }

    /// Reads a shared name again if more of its entries may be granted than were read.
    async fn completed(&self, names: &[Key], owner: Option<&OwnerToken>, seen: Vec<Seen>) -> Answer<Vec<Seen>> {
        let may_be_more = |seen: &Seen| seen.granted.len() == MOST_SHARES && seen.waiting > 0;
        match seen.iter().any(may_be_more) {
            true => Box::pin(self.read_most(names, owner, 0)).await,
            false => Ok(seen),
        }
    }

    async fn read_most(&self, names: &[Key], owner: Option<&OwnerToken>, most: usize) -> Answer<Vec<Seen>> {
        let reads = names.iter().flat_map(|name| self.reads(name, owner, most));
        let answer = self.txn(&txn(Vec::new(), reads.collect(), Vec::new()), None).await?;
        Ok(self.seen(names, owner, revision(&answer), answer.responses.into_iter()))
    }

    /// Forgets etcd leases that the server does not know any more.
    pub(super) fn of_lease<'l, T>(
        &self,
        answer: Answer<T>,
        leases: impl IntoIterator<Item = &'l Arc<Lease>>,
    ) -> Answer<T> {
        answer.inspect_err(|refusal| {
            if refusal.status.kind == Kind::LeaseGone {
                leases.into_iter().for_each(|lease| self.leases.forget(lease.id));
            }
        })
    }
}
