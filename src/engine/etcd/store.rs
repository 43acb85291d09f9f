//! The entries of claims as keys.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::try_join_all;
use tokio::sync::Notify;
use tokio::time::timeout;

use super::client::messages::{DeleteRequest, Event, KeyValue, Op, RangeRequest, RangeResponse};
use super::client::{Client, Kind, Watches};
use super::config::EtcdConfig;
use super::layout::Layout;
use super::leases::{Class, Leases};
use super::txn::{range_of, revision, txn};
use crate::clock::Moment;
use crate::engine::entries::{Change, Failure, LocalEntries, Outcome, Record, Seen, Store, Stored};
use crate::model::{Claim, Fence, Key, OwnerToken, Ttl};

pub(super) const NAME: &str = "etcd";

/// The maximum number of keys in one answer. With the largest metadata, which are JSON in JSON, they have 8 MiB.
const PAGE: i64 = 250;
/// The time for the last requests of a close.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// The range of the keys of a name.
pub(super) type Range = (Vec<u8>, Vec<u8>);

/// A client with the etcd leases of its entries.
pub(super) struct Etcd {
    pub client: Arc<Client>,
    pub leases: Leases,
    pub layout: Layout,
    pub local: Arc<LocalEntries>,
    watches: Watches,
    /// Notified when an attempt may have made a claim a waiter.
    pub(super) waiting: Notify,
}

impl Etcd {
    pub(super) fn new(config: EtcdConfig, local: Arc<LocalEntries>, watches: Watches) -> Self {
        let key = format!("{}/", config.prefix).into_bytes();
        let client = Arc::new(Client::new(config.servers));
        Etcd {
            leases: Leases::new(client.clone(), key),
            client,
            layout: Layout(config.prefix),
            local,
            watches,
            waiting: Notify::new(),
        }
    }

    /// Reads the keys in a range, by pages of one revision, each within `page_timeout`. Returns the revision, too.
    async fn keys(&self, range: Range, keys_only: bool, page_timeout: Duration) -> Outcome<(Vec<KeyValue>, i64)> {
        let (mut keys, mut at, mut rest) = (Vec::new(), 0, Some(range));
        while let Some((key, range_end)) = rest {
            let request = RangeRequest {
                key,
                range_end: range_end.clone(),
                limit: PAGE,
                revision: at,
                keys_only,
                ..RangeRequest::default()
            };
            let reading = async { Ok(self.client.range(&request).await?) };
            let answer = Failure::after(page_timeout, self.address(), reading).await?;
            if at == 0 {
                at = answer.header.map_or(0, |header| header.revision);
            }
            let last = answer.kvs.last().filter(|_| answer.more);
            rest = last.map(|last| ([&last.key[..], &[0]].concat(), range_end));
            keys.extend(answer.kvs);
        }
        Ok((keys, at))
    }

    async fn watched(&self, name: &Key) -> Outcome<Infallible> {
        const DELETED: i32 = 1;
        let (key, range_end) = self.layout.range(name);
        let mut watch = self.watches.open(key, range_end);
        loop {
            let message = watch.next().await?;
            if message.created && self.local.begin_read(name) {
                let (keys, at) = self.keys(self.layout.range(name), false, Duration::MAX).await?;
                let entries = keys.iter().map(|kv| self.layout.entry(name, kv).mirrored());
                self.local.opened(name, at as u64, entries);
            }
            // One revision may delete several entries: no claim between them was granted.
            let revision_of = |event: &Event| event.kv.as_ref().map_or(0, |kv| kv.mod_revision);
            for events in message
                .events
                .chunk_by(|one, next| revision_of(one) == revision_of(next))
            {
                let change = |event: &Event| {
                    let kv = event.kv.as_ref()?;
                    let entry = self.layout.entry(name, kv);
                    match event.kind {
                        DELETED => Some(Change::Deleted(entry.id)),
                        // Not a new record of an entry.
                        _ => (kv.create_revision == kv.mod_revision).then(|| Change::Created(entry.mirrored())),
                    }
                };
                let changes = events.iter().filter_map(change).collect();
                self.local.changed(name, revision_of(&events[0]) as u64, changes);
            }
        }
    }

    /// Keeps the etcd lease of the waiters alive while there are some.
    pub(super) async fn keep_waiters(self: Arc<Self>) {
        loop {
            self.waiting.notified().await;
            while let Some(delay) = self.leases.keep_waiters().await {
                tokio::time::sleep(delay).await;
                if self.local.is_empty() {
                    break;
                }
            }
        }
    }
}

#[async_trait]
impl Store for Etcd {
    fn name(&self) -> &'static str {
        NAME
    }

    fn address(&self) -> String {
        self.client.address()
    }

    async fn change(&self, claim: &Claim, create: &[Key], remove: &[Stored], is_first: bool) -> Outcome<Vec<Seen>> {
        let mut is_repeated = false;
        loop {
            let changed = match is_first {
                true => self.attempt_first(claim, create).await,
                false => self.change_entries(claim, create, remove).await,
            };
            match changed {
                // An etcd lease has expired: there is a new one now.
                Err(refusal) if refusal.status.kind == Kind::LeaseGone && !is_repeated => is_repeated = true,
                changed => return Ok(changed?),
            }
        }
    }

    async fn read(&self, names: &[Key], owner: Option<&OwnerToken>) -> Outcome<Vec<Seen>> {
        Ok(self.read_in_one(names, owner).await?)
    }

    async fn write(
        &self,
        mut entries: Vec<Stored>,
        owner: Option<&OwnerToken>,
        ttl: Ttl,
    ) -> Outcome<Option<Vec<Stored>>> {
        let ttls = entries.iter().filter_map(Stored::ttl);
        let lease = match owner {
            Some(_) => self.leases.get(Class::of(ttls.fold(ttl, Ttl::max))).await?,
            None => self.leases.get_kept(ttl).await?,
        };
        let fresh = OwnerToken::fresh();
        let owner = owner.unwrap_or(&fresh);
        for entry in &mut entries {
            let is_first = *entry.id == *owner.as_str();
            if let Some(record) = &mut entry.record {
                record.owner = (!is_first).then(|| owner.as_str().to_owned());
            }
            entry.owner = Some(owner.clone());
        }
        let compare = entries.iter().map(|entry| self.is_unchanged(entry)).collect();
        let puts = entries.iter().map(|entry| self.put(entry, &lease)).collect();
        let answer = self.txn(&txn(compare, puts, Vec::new()), None).await;
        let answer = self.of_lease(answer, [&lease])?;
        let version = revision(&answer);
        let written = entries.into_iter().map(|entry| Stored {
            version,
            session: lease.id,
            ..entry
        });
        Ok(answer.succeeded.then(|| written.collect()))
    }

    async fn delete(&self, entries: &[Stored]) -> Outcome<bool> {
        let compare = entries.iter().map(|entry| self.is_unchanged(entry));
        let deletions = entries
            .iter()
            .map(|entry| Op::Delete(DeleteRequest { key: self.key(entry) }));
        let request = txn(compare.collect(), deletions.collect(), Vec::new());
        Ok(self.txn(&request, None).await?.succeeded)
    }

    async fn check(&self, entries: &[&Stored]) -> Outcome<Vec<bool>> {
        let read = |entry: &&Stored| RangeRequest {
            key: self.key(entry),
            ..RangeRequest::default()
        };
        let compare = entries.iter().map(|entry| self.is_unchanged(entry));
        let reads = entries.iter().map(read).map(Op::Range);
        let ranges: Vec<RangeResponse> = match self
            .txn(&txn(compare.collect(), Vec::new(), reads.collect()), None)
            .await
        {
            Ok(answer) if answer.succeeded => return Ok(vec![true; entries.len()]),
            Ok(answer) => answer.responses.into_iter().map(|read| range_of(Some(read))).collect(),
            // Reads are answered all the same.
            Err(refusal) if refusal.status.kind == Kind::Full => {
                let requests: Vec<RangeRequest> = entries.iter().map(read).collect();
                try_join_all(requests.iter().map(|request| self.client.range(request))).await?
            }
            Err(refusal) => return Err(refusal.into()),
        };
        let is_same = |(entry, range): (&&Stored, &RangeResponse)| {
            let version = range.kvs.first().map(|kv| kv.mod_revision);
            version == Some(entry.version)
        };
        Ok(entries.iter().zip(&ranges).map(is_same).collect())
    }

    async fn keep(&self, entries: &[Stored], sent: Moment, ttl: Ttl) -> Outcome<bool> {
        for entry in entries {
            let Some(lease) = self.leases.find(entry.session) else {
                return Ok(false);
            };
            if !self.leases.keep_until(&lease, sent + ttl.duration()).await? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn is_lease(&self, entry: &Stored, ttl: Ttl) -> bool {
        let is_lease = |record: &Record| record.since.is_some() && !record.set && record.ttl() >= ttl;
        let lease = self
            .leases
            .find(entry.session)
            .filter(|lease| self.leases.is_of_term(lease));
        lease.is_some_and(|lease| lease.class.is_for(ttl)) && entry.record.as_ref().is_some_and(is_lease)
    }

    fn lasts_until(&self, session: i64) -> Option<Moment> {
        self.leases.end_of(session)
    }

    async fn token(&self, entry: &Stored, revision: u64) -> Outcome<Option<Fence>> {
        Ok(Some(Fence(match entry.name.is_shared() {
            true => entry.position,
            false => revision.max(entry.position),
        })))
    }

    async fn names(&self, prefix: &str, page_timeout: Duration) -> Outcome<Vec<Key>> {
        let (keys, _) = self.keys(self.layout.names(prefix), true, page_timeout).await?;
        let mut names: Vec<Key> = keys.iter().filter_map(|kv| self.layout.name_of(&kv.key)).collect();
        names.sort();
        names.dedup();
        Ok(names)
    }

    async fn watch(&self, name: &Key) -> Failure {
        let Err(failure) = self.watched(name).await;
        failure
    }

    async fn wait_for_answers(&self, owner: &OwnerToken) {
        self.client.wait_for_answers(owner).await;
    }

    async fn close(&self, has_entries: &(dyn for<'a> Fn(i64) -> bool + Sync)) {
        // Without an answer they expire.
        let _ = timeout(CLOSE_TIMEOUT, self.leases.close(has_entries)).await;
        self.client.close();
    }
}
