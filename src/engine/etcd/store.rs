//! The entries of claims as keys.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::Notify;
use tokio::time::timeout;

use super::client::messages::{
    DeleteRequest, Event, KeyValue, Op, RangeRequest, WatchCreateRequest, WatchOp, WatchRequest,
};
use super::client::{Client, Failure as Refusal, Outcome as Answer, Status, WatchStream};
use super::config::EtcdConfig;
use super::layout::Layout;
use super::leases::Leases;
use super::txn::txn;
use crate::clock::Moment;
use crate::engine::entries::{Change, Entry, Failure, LocalEntries, Outcome, Record, Seen, Share, Store, Stored};
use crate::model::{Claim, Fence, Key, OwnerToken, Ttl};

pub(super) const NAME: &str = "etcd";

/// The maximum number of keys in one answer.
const PAGE: i64 = 1000;
/// The time for the last requests at the end.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// The range of the keys of a name.
pub(super) type Range = (Vec<u8>, Vec<u8>);

/// A client with the etcd leases of its entries.
pub(super) struct Etcd {
    pub client: Arc<Client>,
    pub leases: Leases,
    pub layout: Layout,
    pub local: Arc<LocalEntries>,
    /// An attempt may have made a claim a waiter.
    pub(super) waiting: Notify,
}

impl Etcd {
    pub(super) fn new(config: EtcdConfig, local: Arc<LocalEntries>) -> Self {
        let client = Arc::new(Client::new(config.servers));
        Etcd {
            leases: Leases::new(client.clone()),
            client,
            layout: Layout(config.prefix),
            local,
            waiting: Notify::new(),
        }
    }

    async fn kept(&self, entries: &[Stored], end: Moment) -> Answer<bool> {
        for entry in entries {
            let Some(lease) = self.leases.current(entry.session) else {
                return Ok(false);
            };
            if !self.leases.keep_until(&lease, end).await? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Reads a page of the keys in a range. Returns the revision of the read, and the rest of the range.
    pub(super) async fn page(
        &self,
        (key, range_end): Range,
        revision: i64,
        keys_only: bool,
    ) -> Answer<(Vec<KeyValue>, i64, Option<Range>)> {
        let request = RangeRequest {
            key,
            range_end: range_end.clone(),
            limit: PAGE,
            revision,
            keys_only,
            ..RangeRequest::default()
        };
        let answer = self.range(&request).await?;
        // All pages show the same state.
        let at = answer.header.map_or(0, |header| header.revision);
        let last = answer.kvs.last().filter(|_| answer.more);
        let rest = last.map(|last| ([&last.key[..], &[0]].concat(), range_end));
        Ok((answer.kvs, if revision == 0 { at } else { revision }, rest))
    }

    async fn watched(&self, name: &Key, stream: &mut WatchStream) -> Result<Infallible, Lost> {
        const DELETED: i32 = 1;
        let (key, range_end) = self.layout.range(name);
        stream.send(&WatchRequest {
            op: Some(WatchOp::Create(WatchCreateRequest { key, range_end })),
        })?;
        loop {
            let message = stream.next().await?;
            if message.canceled {
                return Err(Status::cancelled(&message.cancel_reason).into());
            }
            if message.created && self.local.begin_read(name) {
                let (mut entries, mut at) = (Vec::new(), 0);
                let mut rest = Some(self.layout.range(name));
                while let Some(range) = rest {
                    let (kvs, revision, more) = self.page(range, at, false).await.map_err(Lost::Read)?;
                    entries.extend(kvs.iter().map(|kv| mirrored(self.layout.entry(name, kv))));
                    (at, rest) = (revision, more);
                }
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
                        DELETED => {
                            let owner = OwnerToken::parse(&entry.id).ok();
                            Some(Change::Deleted(entry.id, owner))
                        }
                        // Not a new record of an entry.
                        _ => (kv.create_revision == kv.mod_revision).then(|| Change::Created(mirrored(entry))),
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
        let change = async || match is_first {
            true => self.enter(claim, create).await,
            false => self.move_on(claim, create, remove).await,
        };
        match change().await {
            // An etcd lease has expired: there is a new one now.
            Err(refusal) if refusal.status.is_lease_gone() => Ok(change().await?),
            changed => Ok(changed?),
        }
    }

    async fn look(&self, names: &[Key], owner: Option<&OwnerToken>) -> Outcome<Vec<Seen>> {
        Ok(self.looked(names, owner).await?)
    }

    async fn write(&self, entries: Vec<Stored>, owner: &OwnerToken, ttl: Ttl) -> Outcome<Option<Vec<Stored>>> {
        Ok(self.written(entries, owner, ttl).await?)
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
        Ok(self.checked(entries).await?)
    }

    async fn keep(&self, entries: &[Stored], sent: Moment, ttl: Ttl) -> Outcome<bool> {
        Ok(self.kept(entries, sent + ttl.duration()).await?)
    }

    fn is_lease(&self, entry: &Stored, ttl: Ttl) -> bool {
        let is_lease = |record: &Record| record.since.is_some() && !record.set && record.ttl() >= ttl;
        let is_long = self
            .leases
            .class_of(entry.session)
            .is_some_and(|class| class.is_for(ttl));
        is_long && entry.record.as_ref().is_some_and(is_lease)
    }

    fn lasts_until(&self, session: i64) -> Option<Moment> {
        self.leases.end_of(session)
    }

    async fn token(&self, entry: &Stored, revision: u64) -> Outcome<Option<Fence>> {
        Ok(Some(Fence(revision.max(entry.place.0))))
    }

    async fn names(&self, prefix: &str, page_timeout: Duration) -> Option<Outcome<Vec<Key>>> {
        let (mut names, mut at) = (Vec::new(), 0);
        let mut rest = Some(self.layout.names(prefix));
        while let Some(range) = rest {
            match timeout(page_timeout, self.page(range, at, true)).await.ok()? {
                Ok((kvs, revision, more)) => {
                    names.extend(kvs.iter().filter_map(|kv| self.layout.name_of(&kv.key)));
                    (at, rest) = (revision, more);
                }
                Err(refusal) => return Some(Err(refusal.into())),
            }
        }
        names.sort();
        names.dedup();
        Some(Ok(names))
    }

    async fn watch(&self, name: &Key) -> Failure {
        let mut stream = match self.client.watch().await {
            Ok(stream) => stream,
            Err(refusal) => return refusal.into(),
        };
        match self.watched(name, &mut stream).await {
            Err(Lost::Read(refusal)) => refusal.into(),
            Err(Lost::Watch(status)) => self.client.watch_failed(stream, status).into(),
            Ok(never) => match never {},
        }
    }

    async fn answered(&self, owner: &OwnerToken) {
        self.client.answered(owner).await;
    }

    async fn close(&self, has_entries: &(dyn for<'a> Fn(i64) -> bool + Sync)) {
        // Without an answer they expire.
        let _ = timeout(CLOSE_TIMEOUT, self.leases.close(has_entries)).await;
        self.client.close();
    }
}

/// Why a watch has ended.
enum Lost {
    Watch(Status),
    /// The entries could not be read.
    Read(Refusal),
}

impl From<Status> for Lost {
    fn from(status: Status) -> Self {
        Lost::Watch(status)
    }
}

fn mirrored(entry: Stored) -> Entry {
    Entry {
        id: entry.id,
        place: entry.place,
        share: Share::LOCK,
    }
}
