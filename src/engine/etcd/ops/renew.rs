//! Renewals, and transfers.
//!
//! A renewal keeps the etcd lease alive and checks in a transaction without writes that the entries have not changed since this
//! process wrote them. Everything else reads the entries and writes them again: a longer ttl than that of the record, the first
//! renewal after a hand-off, a lease of another process.

use std::sync::Arc;

use futures_util::future::{join, join_all};
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt};

use super::super::client::Outcome;
use super::super::client::messages::{KeyValue, RangeResponse};
use super::super::core::{Core, Slot};
use super::super::entry::{Record, Stored, fence};
use super::super::leases::{Class, Lease};
use super::rewrite::Rewritten;
use super::txn::{get, is_unchanged, range_of, txn};
use crate::clock::Moment;
use crate::engine::{Answers, Renewal, Renewed};
use crate::error::EngineError;
use crate::model::{Claim, OwnerToken, Ttl};

/// The maximum number of comparisons in a transaction, and of operations (`--max-txn-ops`).
const MOST_COMPARES: usize = 128;

/// A lease that is renewed without a write.
struct Checked {
    index: usize,
    entries: Vec<(Vec<u8>, i64)>,
    leases: Vec<Arc<Lease>>,
    ttl: Ttl,
}

fn slots(claim: &Claim) -> impl Iterator<Item = Slot> {
    let owner: Arc<str> = claim.owner.as_str().into();
    claim.keys().iter().map(move |name| (name.clone(), owner.clone()))
}

impl Core {
    pub(in super::super) async fn renew_all(&self, renewals: &[Renewal<'_>], answer: &mut Answers<'_>) {
        let began = Moment::now();
        let mut calls = FuturesUnordered::new();
        let mut chunk: Vec<Checked> = Vec::new();
        let mut size = 0;
        for (index, renewal) in renewals.iter().enumerate() {
            let Some(checked) = self.checked(index, renewal, began) else {
                let renewing = self.renew_by_writing(renewal.claim, renewal.ttl);
                calls.push(renewing.map(move |renewed| vec![(index, renewed)]).boxed());
                continue;
            };
            if size + checked.entries.len() > MOST_COMPARES {
                calls.push(self.check(std::mem::take(&mut chunk), renewals, began).boxed());
                size = 0;
            }
            size += checked.entries.len();
            chunk.push(checked);
        }
        if !chunk.is_empty() {
            calls.push(self.check(chunk, renewals, began).boxed());
        }
        while let Some(answers) = calls.next().await {
            for (index, renewed) in answers {
                answer(index, renewed.map_err(|failure| failure.of("renew")));
            }
        }
    }

    /// Returns what to check of a lease that needs no write. The lease then ends later in this process: the store may answer soon.
    fn checked(&self, index: usize, renewal: &Renewal<'_>, began: Moment) -> Option<Checked> {
        let mut checked = Checked {
            index,
            entries: Vec::with_capacity(1),
            leases: Vec::with_capacity(1),
            ttl: renewal.ttl,
        };
        for slot in slots(renewal.claim) {
            let held = self.held.extend(&slot, began + renewal.ttl.duration())?;
            let (Class::Seconds(seconds), Class::Seconds(needed)) = (held.class, Class::of(renewal.ttl)) else {
                return None;
            };
            if held.is_waiter || held.ttl < renewal.ttl || seconds < needed {
                return None;
            }
            checked.leases.push(self.leases.current(held.lease)?);
            checked
                .entries
                .push((self.layout.key(&slot.0, &held.id), held.revision));
        }
        Some(checked)
    }

    /// Renews leases with one transaction that writes nothing.
    async fn check(
        &self,
        chunk: Vec<Checked>,
        renewals: &[Renewal<'_>],
        began: Moment,
    ) -> Vec<(usize, Outcome<Renewed>)> {
        let ends: Vec<(&Arc<Lease>, Moment)> = chunk
            .iter()
            .flat_map(|checked| {
                checked
                    .leases
                    .iter()
                    .map(|lease| (lease, began + checked.ttl.duration()))
            })
            .collect();
        // One request of a lease is enough for all.
        let keeping = join_all(ends.iter().map(|(lease, end)| self.leases.keep_until(lease, *end)));
        let entries = || chunk.iter().flat_map(|checked| &checked.entries);
        let compare = entries().map(|(key, revision)| is_unchanged(key.clone(), *revision));
        let reads = entries().map(|(key, _)| get(key.clone()));
        let request = txn(compare.collect(), Vec::new(), reads.collect());
        let reading = async {
            match self.txn(&request).await {
                // Reads are answered all the same.
                Err(failure) if failure.status.is_full() => {
                    let keys: Vec<Vec<u8>> = entries().map(|(key, _)| key.clone()).collect();
                    let read = join_all(keys.into_iter().map(|key| self.read(key))).await;
                    let read: Outcome<Vec<RangeResponse>> = read.into_iter().collect();
                    read.map(|read| (false, read))
                }
                answer => answer.map(|answer| {
                    let read = answer.responses.into_iter().map(|read| range_of(Some(read)));
                    (answer.succeeded, read.collect())
                }),
            }
        };
        let (kept, answer) = join(keeping, reading).await;
        let failure = kept.into_iter().find_map(Outcome::err);
        let (are_same, read) = match answer {
            Ok(answer) => answer,
            Err(failure) => {
                return chunk
                    .iter()
                    .map(|checked| (checked.index, Err(failure.clone())))
                    .collect();
            }
        };
        let mut read = read.into_iter();
        let mut renewed = Vec::with_capacity(chunk.len());
        for checked in &chunk {
            let mut is_same = true;
            for (_, revision) in &checked.entries {
                let kv = read.next().and_then(|mut read| read.kvs.pop());
                is_same &= are_same || kv.is_some_and(|kv| kv.mod_revision == *revision);
            }
            let end = began + checked.ttl.duration();
            let is_kept = checked.leases.iter().all(|lease| lease.ends() >= end);
            let failure = failure.clone().filter(|_| !is_kept);
            renewed.push(async move {
                let answer = match failure {
                    Some(failure) => Err(failure),
                    None if is_same && is_kept => Ok(Renewed::Extended),
                    None => self.renew_by_writing(renewals[checked.index].claim, checked.ttl).await,
                };
                (checked.index, answer)
            });
        }
        join_all(renewed).await
    }

    /// Renews a lease with a write: without a read for one that was handed off.
    async fn renew_by_writing(&self, claim: &Claim, ttl: Ttl) -> Outcome<Renewed> {
        if let Some(entry) = self.handed_off(claim)
            && self.rewrite(vec![entry], &claim.owner, ttl, None).await?.is_some()
        {
            return Ok(Renewed::Extended);
        }
        self.rewrite_held(claim, &claim.owner, ttl, |record, at, n| {
            let token = claim.fence.unwrap_or(fence(at, n));
            if record.since.is_none() {
                let now = Record::of_holder(claim, Some(token));
                (record.since, record.fence) = (now.since, now.fence);
            }
        })
        .await
    }

    /// Returns the entry of a claim of one name that was handed off to it and not renewed yet.
    fn handed_off(&self, claim: &Claim) -> Option<Rewritten> {
        let [name] = claim.keys() else { return None };
        let token = claim.fence?;
        let (_, held) = self.held.get(&slots(claim).next()?)?;
        if held.is_waiter || held.class != Class::Waiters {
            return None;
        }
        let record = Record {
            n: held.place.1,
            several: held.has_siblings,
            ..Record::of_holder(claim, Some(token))
        };
        let kv = KeyValue {
            key: self.layout.key(name, &held.id),
            create_revision: held.place.0 as i64,
            mod_revision: held.revision,
            ..KeyValue::default()
        };
        let stored = Stored {
            kv,
            id: held.id.to_string(),
            record: Some(record.clone()),
        };
        let name = name.clone();
        Some(Rewritten { name, stored, record })
    }

    /// Changes the records of the names that a claim holds, all or none of them. `change` gets each record, and the revision of the
    /// read and the index for a fencing token. `also`: another owner that may hold a name.
    async fn rewrite_held(
        &self,
        claim: &Claim,
        also: &OwnerToken,
        ttl: Ttl,
        change: impl Fn(&mut Record, u64, u32),
    ) -> Outcome<Renewed> {
        for _ in 0..super::ATTEMPTS {
            let (at, seen) = self.look(claim.keys(), claim.owner.as_str()).await?;
            let mut entries = Vec::with_capacity(seen.len());
            for (name, seen) in claim.keys().iter().zip(&seen) {
                let held = seen.held(claim.owner.as_str()).or_else(|| seen.held(also.as_str()));
                let Some((stored, record)) = held.and_then(|held| Some((held, held.record.clone()?))) else {
                    slots(claim).for_each(|slot| drop(self.held.remove(&slot)));
                    return Ok(Renewed::Lost);
                };
                let mut record = Record {
                    ttl: record.ttl.max(ttl.as_millis()),
                    ..record
                };
                change(&mut record, at, stored.place().1);
                let (name, stored) = (name.clone(), stored.clone());
                entries.push(Rewritten { name, stored, record });
            }
            if self.rewrite(entries, also, ttl, None).await?.is_some() {
                return Ok(Renewed::Extended);
            }
        }
        Err(self.client.contended())
    }

    /// Transfers every name of a claim to another owner.
    pub(in super::super) async fn transfer(&self, claim: &Claim, to: &OwnerToken) -> Result<Renewed, EngineError> {
        let transferred = self
            .rewrite_held(claim, to, claim.ttl, |record, at, n| {
                let token = record.fence.unwrap_or(fence(at, n).0);
                // The token of an entry that was granted at once follows from its revision.
                if record.since.is_none() {
                    let now = Record::of_holder(claim, None);
                    (record.since, record.fence) = (now.since, Some(token));
                }
                record.owner = Some(to.as_str().to_owned());
                record.host.clone_from(&claim.process.host);
                record.pid = claim.process.pid;
            })
            .await;
        if let Ok(Renewed::Extended) = transferred {
            slots(claim).for_each(|slot| drop(self.held.remove(&slot)));
        }
        transferred.map_err(|failure| failure.of("transfer"))
    }
}
