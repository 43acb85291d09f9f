//! Writes the records of entries again: for a longer ttl, another owner, or another process.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use super::super::client::messages::KeyValue;
use super::super::client::{Failure, Outcome};
use super::super::core::{Core, Held};
use super::super::entry::{Record, Stored};
use super::super::leases::{Class, Lease};
use super::txn::{is_empty, is_unchanged, put, revision, txn};
use crate::clock::Moment;
use crate::model::{Claim, Key, OwnerToken, Ttl};

/// An entry, and its new record.
pub(super) struct Rewritten {
    pub name: Key,
    pub stored: Stored,
    pub record: Record,
}

impl Rewritten {
    /// Returns an entry that does not exist yet, of a name that must be free.
    pub(super) fn new(name: &Key, key: Vec<u8>, owner: &OwnerToken, record: Record) -> Self {
        let kv = KeyValue {
            key,
            ..KeyValue::default()
        };
        let stored = Stored {
            kv,
            id: owner.as_str().to_owned(),
            record: Some(record.clone()),
        };
        let name = name.clone();
        Rewritten { name, stored, record }
    }
}

impl Core {
    /// Puts records under an etcd lease of this process, if no entry has changed. They then last for `ttl`, and in this process for the
    /// ttls of their records. `owner`: of the records without one. `attempt`: its claim, whose release waits for the answer. Returns the
    /// revision. `None`: an entry has changed.
    pub(super) async fn rewrite(
        &self,
        entries: Vec<Rewritten>,
        owner: &OwnerToken,
        ttl: Ttl,
        attempt: Option<&Claim>,
    ) -> Outcome<Option<u64>> {
        let ttl_of = |record: &Record| ttl.max(Ttl::clamped(Duration::from_millis(record.ttl)));
        let longest = entries.iter().map(|entry| ttl_of(&entry.record)).max().unwrap_or(ttl);
        let class = Class::of(longest);
        let lease = self.leases.get(class).await?;
        let compare = entries.iter().map(|entry| match entry.stored.kv.mod_revision {
            0 => is_empty(self.layout.range(&entry.name)),
            revision => is_unchanged(entry.stored.kv.key.clone(), revision),
        });
        let puts = entries
            .iter()
            .map(|entry| put(entry.stored.kv.key.clone(), &entry.record, lease.id));
        let request = txn(compare.collect(), puts.collect(), Vec::new());
        // A request that waits for a connection is sent later.
        let sent_at = AtomicU64::new(0);
        let begin = || {
            sent_at.store(Moment::now().to_nanos(), Relaxed);
            let claim = attempt?;
            claim.mark_sent();
            Some(self.attempts.begin(std::iter::once(claim.owner.clone())))
        };
        let answer = self.txn_of_attempt(&request, &begin).await;
        let answer = answer.inspect_err(|failure| self.lease_failed(failure, &lease))?;
        if !answer.succeeded {
            return Ok(None);
        }
        let (at, sent) = (revision(&answer), Moment::from_nanos(sent_at.load(Relaxed)));
        for Rewritten { name, stored, record } in entries {
            let place = match stored.place() {
                (0, n) => (at, n),
                place => place,
            };
            let held = Held {
                place,
                revision: at as i64,
                lease: lease.id,
                ..Held::of(&stored, class, ttl_of(&record))
            };
            let end = sent + held.ttl.duration();
            let owner = record.owner.as_deref().unwrap_or(owner.as_str()).into();
            self.held.insert((name, owner), held, end);
        }
        let is_kept = self.leases.keep_until(&lease, sent + longest.duration()).await?;
        Ok(is_kept.then_some(at))
    }

    /// Forgets an etcd lease that the server does not know any more.
    pub(super) fn lease_failed(&self, failure: &Failure, lease: &Arc<Lease>) {
        if failure.status.is_lease_gone() {
            self.leases.forget(lease.id);
        }
    }
}
