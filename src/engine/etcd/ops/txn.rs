//! Transactions on entries.

use super::super::client::Outcome;
use super::super::client::messages::{
    Compare, DeleteRequest, KeyValue, Op, OpAnswer, PutRequest, RangeRequest, RangeResponse, ResponseOp, TxnRequest,
    TxnResponse,
};
use super::super::core::Core;
use super::super::entry::{Record, Stored};
use super::super::unanswered::Unanswered;
use crate::model::Key;

const TXN: &str = "/etcdserverpb.KV/Txn";
const RANGE: &str = "/etcdserverpb.KV/Range";

/// The range of the keys of a name.
type Range = (Vec<u8>, Vec<u8>);

/// The comparison that is true for a range without keys.
pub(in super::super) fn is_empty((key, range_end): Range) -> Compare {
    Compare {
        target: 1,
        key,
        range_end,
        create_revision: Some(0),
        ..Compare::default()
    }
}

/// The comparison that is true while a key does not exist.
pub(in super::super) fn is_absent(key: Vec<u8>) -> Compare {
    is_empty((key, Vec::new()))
}

/// The comparison that is true while a key has not been written since a revision.
pub(in super::super) fn is_unchanged(key: Vec<u8>, revision: i64) -> Compare {
    Compare {
        target: 2,
        key,
        mod_revision: Some(revision),
        ..Compare::default()
    }
}

pub(in super::super) fn put(key: Vec<u8>, record: &Record, lease: i64) -> Op {
    let value = record.to_json();
    Op::Put(PutRequest { key, value, lease })
}

pub(in super::super) fn delete(key: Vec<u8>) -> Op {
    Op::Delete(DeleteRequest { key })
}

pub(in super::super) fn get(key: Vec<u8>) -> Op {
    Op::Range(RangeRequest {
        key,
        ..RangeRequest::default()
    })
}

/// Reads the oldest entry of a name, and the number of its entries.
pub(in super::super) fn oldest(range: Range) -> RangeRequest {
    let (key, range_end) = range;
    RangeRequest {
        key,
        range_end,
        limit: 1,
        sort_order: 1,
        sort_target: 2,
        ..RangeRequest::default()
    }
}

/// Returns a transaction.
pub(in super::super) fn txn(compare: Vec<Compare>, success: Vec<Op>, failure: Vec<Op>) -> TxnRequest {
    TxnRequest {
        compare,
        success: success.into_iter().map(Into::into).collect(),
        failure: failure.into_iter().map(Into::into).collect(),
    }
}

/// Returns the revision of the store after a transaction.
pub(in super::super) fn revision(answer: &TxnResponse) -> u64 {
    answer.header.as_ref().map_or(0, |header| header.revision.max(0) as u64)
}

/// Returns the answer to a read in a transaction. Empty for the answer to anything else.
pub(in super::super) fn range_of(answer: Option<ResponseOp>) -> RangeResponse {
    match answer.and_then(|answer| answer.op) {
        Some(OpAnswer::Range(range)) => range,
        _ => RangeResponse::default(),
    }
}

/// What a name contains, as far as an owner is concerned.
#[derive(Debug)]
pub(in super::super) struct Seen {
    pub oldest: Option<Stored>,
    /// The entry of the owner. It may be the oldest one.
    pub own: Option<Stored>,
}

impl Seen {
    /// Returns the entry of the owner if it holds the name.
    pub(in super::super) fn held(&self, owner: &str) -> Option<&Stored> {
        self.oldest
            .as_ref()
            .filter(|oldest| oldest.is_owned_by(owner) && oldest.holds())
    }
}

impl Core {
    /// Executes a transaction.
    pub(in super::super) async fn txn(&self, request: &TxnRequest) -> Outcome<TxnResponse> {
        self.client.call(TXN, request, &|| None).await
    }

    /// Executes a transaction of an attempt. Calls `begin` before it can be sent.
    pub(in super::super) async fn txn_of_attempt(
        &self,
        request: &TxnRequest,
        begin: &(dyn Fn() -> Option<Unanswered> + Sync),
    ) -> Outcome<TxnResponse> {
        self.client.call(TXN, request, begin).await
    }

    pub(in super::super) async fn range(&self, request: &RangeRequest) -> Outcome<RangeResponse> {
        self.client.call(RANGE, request, &|| None).await
    }

    /// Reads a key.
    pub(in super::super) async fn read(&self, key: Vec<u8>) -> Outcome<RangeResponse> {
        let request = RangeRequest {
            key,
            ..RangeRequest::default()
        };
        self.range(&request).await
    }

    /// Reads what names contain, and the revision of the store.
    pub(in super::super) async fn look(&self, names: &[Key], owner: &str) -> Outcome<(u64, Vec<Seen>)> {
        let reads = names.iter().flat_map(|name| {
            let first = Op::Range(oldest(self.layout.range(name)));
            [first, get(self.layout.key(name, owner))]
        });
        let mut answer = self.txn(&txn(Vec::new(), reads.collect(), Vec::new())).await?;
        let revision = revision(&answer);
        let mut answers = answer.responses.drain(..);
        let mut seen = Vec::with_capacity(names.len());
        for name in names {
            let [first, own] = [answers.next(), answers.next()].map(range_of);
            seen.push(Seen {
                oldest: self.first_of(name, first.kvs).await?,
                own: self.stored(name, own.kvs).filter(|own| own.is_owned_by(owner)),
            });
        }
        Ok((revision, seen))
    }

    fn stored(&self, name: &Key, kvs: Vec<KeyValue>) -> Option<Stored> {
        let read = kvs.into_iter().map(|kv| self.layout.read_of(name, kv));
        read.min_by_key(Stored::place)
    }

    /// Returns the oldest entry of a name. The server does not order the entries of one transaction: they are read.
    pub(in super::super) async fn first_of(&self, name: &Key, kvs: Vec<KeyValue>) -> Outcome<Option<Stored>> {
        let first = self.stored(name, kvs);
        let Some(found) = first.as_ref().filter(|first| first.has_siblings()) else {
            return Ok(first);
        };
        let revision = found.kv.create_revision;
        let siblings = RangeRequest {
            limit: 0,
            min_create_revision: revision,
            max_create_revision: revision,
            ..oldest(self.layout.range(name))
        };
        let siblings = self.range(&siblings).await?;
        Ok(self.stored(name, siblings.kvs).or(first))
    }
}
