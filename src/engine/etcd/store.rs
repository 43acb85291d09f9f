//! The entries of claims as keys.

use std::convert::Infallible;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::try_join_all;
use tokio::sync::Notify;
use tokio::time::timeout;

use super::client::messages::{
    Compare, DeleteRequest, Event, KeyValue, Op, OpAnswer, PutRequest, RangeRequest, RangeResponse, ResponseOp,
    TxnRequest, TxnResponse, WatchCreateRequest, WatchOp, WatchRequest,
};
use super::client::{Client, Failure as Refusal, Outcome as Answer, Status, WatchStream};
use super::config::EtcdConfig;
use super::layout::Layout;
use super::leases::{Class, Lease, Leases};
use crate::clock::Moment;
use crate::engine::entries::{
    Change, Entry, Failure, LocalEntries, Outcome, Record, Seen, Share, Store, Stored, now_ms,
};
use crate::model::{Claim, Fence, Key, OwnerToken, Ttl};

pub(super) const NAME: &str = "etcd";

const TXN: &str = "/etcdserverpb.KV/Txn";
const RANGE: &str = "/etcdserverpb.KV/Range";

/// The maximum number of keys in one answer.
const PAGE: i64 = 1000;
/// The time for the last requests at the end.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// The range of the keys of a name.
type Range = (Vec<u8>, Vec<u8>);

/// A client with the etcd leases of its entries.
pub(super) struct Etcd {
    pub client: Arc<Client>,
    pub leases: Leases,
    pub layout: Layout,
    pub local: Arc<LocalEntries>,
    /// An attempt may have made a claim a waiter.
    waiting: Notify,
}

impl fmt::Debug for Etcd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Etcd").field("servers", &self.client.address()).finish()
    }
}

/// The comparison that is true for a range without keys.
fn is_empty((key, range_end): Range) -> Compare {
    Compare {
        target: 1,
        key,
        range_end,
        create_revision: Some(0),
        ..Compare::default()
    }
}

fn txn(compare: Vec<Compare>, success: Vec<Op>, failure: Vec<Op>) -> TxnRequest {
    TxnRequest {
        compare,
        success: success.into_iter().map(Into::into).collect(),
        failure: failure.into_iter().map(Into::into).collect(),
    }
}

/// Returns the revision of the store after a transaction.
fn revision(answer: &TxnResponse) -> i64 {
    answer.header.as_ref().map_or(0, |header| header.revision)
}

/// Returns the answer to a read in a transaction. Empty for the answer to anything else.
fn range_of(answer: Option<ResponseOp>) -> RangeResponse {
    match answer.and_then(|answer| answer.op) {
        Some(OpAnswer::Range(range)) => range,
        _ => RangeResponse::default(),
    }
}

impl Etcd {
    pub(super) fn new(config: EtcdConfig, local: Arc<LocalEntries>) -> Self {
        let layout = Layout(config.prefix.clone());
        let client = Arc::new(Client::new(Arc::new(config)));
        Etcd {
            leases: Leases::new(client.clone()),
            client,
            layout,
            local,
            waiting: Notify::new(),
        }
    }

    async fn txn(&self, request: &TxnRequest, attempt: Option<&Claim>) -> Answer<TxnResponse> {
        self.client.call(TXN, request, attempt).await
    }

    pub(super) async fn range(&self, request: &RangeRequest) -> Answer<RangeResponse> {
        self.client.call(RANGE, request, None).await
    }

    fn key(&self, entry: &Stored) -> Vec<u8> {
        self.layout.key(&entry.name, &entry.id)
    }

    /// Returns the comparison that is true while an entry has not changed.
    fn is_unchanged(&self, entry: &Stored) -> Compare {
        Compare {
            target: 2,
            key: self.key(entry),
            mod_revision: Some(entry.version),
            ..Compare::default()
        }
    }

    fn put(&self, entry: &Stored, lease: &Lease) -> Op {
        let value = entry.record.as_ref().map(Record::to_json).unwrap_or_default();
        let (key, lease) = (self.key(entry), lease.id);
        Op::Put(PutRequest { key, value, lease })
    }

    /// Returns the entry that a claim gets at a name.
    fn new_entry(&self, claim: &Claim, name: &Key, record: &Record) -> Stored {
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

    /// Returns the reads of the oldest entry of a name, and of that of an owner.
    fn reads(&self, name: &Key, owner: Option<&OwnerToken>) -> impl Iterator<Item = Op> {
        let (key, range_end) = self.layout.range(name);
        let oldest = RangeRequest {
            key,
            range_end,
            limit: 1,
            sort_order: 1,
            sort_target: 2,
            ..RangeRequest::default()
        };
        let own = owner.map(|owner| RangeRequest {
            key: self.layout.key(name, owner.as_str()),
            ..RangeRequest::default()
        });
        [Some(oldest), own].into_iter().flatten().map(Op::Range)
    }

    /// Reads the answers to [`Etcd::reads`].
    fn seen(
        &self,
        name: &Key,
        owner: Option<&OwnerToken>,
        at: i64,
        answers: &mut impl Iterator<Item = ResponseOp>,
    ) -> Seen {
        let oldest = range_of(answers.next());
        let own = owner.map(|_| range_of(answers.next()));
        let entry = |range: &RangeResponse| range.kvs.first().map(|kv| self.layout.entry(name, kv));
        let count = usize::try_from(oldest.count).unwrap_or_default();
        let oldest = entry(&oldest);
        let is_own = |entry: &Stored| owner.is_some_and(|owner| entry.is_of(owner));
        let of_oldest = oldest.clone().filter(is_own);
        Seen {
            at: at as u64,
            own: of_oldest.or_else(|| entry(&own?).filter(is_own)),
            oldest,
            count,
        }
    }

    /// Makes the first attempt: if all names are free, it grants them; otherwise a claim of one name that waits enters.
    async fn enter(&self, claim: &Claim, names: &[Key]) -> Answer<Vec<Seen>> {
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
        busy.extend(names.iter().flat_map(|name| self.reads(name, owner)));
        let request = txn(compare.collect(), puts.collect(), busy);
        let end = Moment::now() + claim.ttl.duration();
        let (answer, kept) = tokio::join!(self.txn(&request, Some(claim)), self.leases.keep_until(&lease, end));
        let answer = self.of_lease(answer, [Some(&lease), waiters.as_ref()])?;
        let at = revision(&answer);
        if answer.succeeded {
            kept?;
            let created = entries.into_iter().map(|entry| self.created(entry, at, &lease));
            return Ok(created.collect());
        }
        let mut answers = answer.responses.into_iter().skip(enters);
        Ok(names
            .iter()
            .map(|name| self.seen(name, owner, at, &mut answers))
            .collect())
    }

    /// Describes a name with one entry, which was created at a revision.
    fn created(&self, entry: Stored, at: i64, lease: &Lease) -> Seen {
        let entry = Stored {
            place: (at as u64, 0),
            version: at,
            session: lease.id,
            ..entry
        };
        Seen {
            at: at as u64,
            oldest: Some(entry.clone()),
            own: Some(entry),
            count: 1,
        }
    }

    async fn move_on(&self, claim: &Claim, create: &[Key], remove: &[Stored]) -> Answer<Vec<Seen>> {
        let owner = Some(&claim.owner);
        let lease = self.leases.get(Class::Waiters).await?;
        let record = Record::new(claim);
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
        self.of_lease(changed, [Some(&lease), None])?;
        self.looked(claim.keys(), owner).await
    }

    async fn looked(&self, names: &[Key], owner: Option<&OwnerToken>) -> Answer<Vec<Seen>> {
        let reads = names.iter().flat_map(|name| self.reads(name, owner));
        let answer = self.txn(&txn(Vec::new(), reads.collect(), Vec::new()), None).await?;
        let at = revision(&answer);
        let mut answers = answer.responses.into_iter();
        Ok(names
            .iter()
            .map(|name| self.seen(name, owner, at, &mut answers))
            .collect())
    }

    async fn written(&self, entries: Vec<Stored>, owner: &OwnerToken, ttl: Ttl) -> Answer<Option<Vec<Stored>>> {
        let ttls = entries.iter().filter_map(|entry| Some(entry.record.as_ref()?.ttl()));
        let class = Class::of(ttls.fold(ttl, Ttl::max));
        let lease = self.leases.get(class).await?;
        let with_owner = entries.into_iter().map(|mut entry| {
            let is_first = *entry.id == *owner.as_str();
            let record = entry.record.as_mut();
            record
                .into_iter()
                .for_each(|record| record.owner = (!is_first).then(|| owner.as_str().to_owned()));
            entry.owner = Some(owner.clone());
            entry
        });
        let entries: Vec<Stored> = with_owner.collect();
        let compare = entries.iter().map(|entry| self.is_unchanged(entry)).collect();
        let puts = entries.iter().map(|entry| self.put(entry, &lease)).collect();
        let answer = self.txn(&txn(compare, puts, Vec::new()), None).await;
        let answer = self.of_lease(answer, [Some(&lease), None])?;
        let version = revision(&answer);
        let written = entries.into_iter().map(|entry| Stored {
            version,
            session: lease.id,
            ..entry
        });
        Ok(answer.succeeded.then(|| written.collect()))
    }

    /// Forgets etcd leases that the server does not know any more.
    fn of_lease<T>(&self, answer: Answer<T>, leases: [Option<&Arc<Lease>>; 2]) -> Answer<T> {
        answer.inspect_err(|refusal| {
            if refusal.status.is_lease_gone() {
                leases
                    .into_iter()
                    .flatten()
                    .for_each(|lease| self.leases.forget(lease.id));
            }
        })
    }

    async fn checked(&self, entries: &[&Stored]) -> Answer<Vec<bool>> {
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
            Err(refusal) if refusal.status.is_full() => {
                let requests: Vec<RangeRequest> = entries.iter().map(read).collect();
                try_join_all(requests.iter().map(|request| self.range(request))).await?
            }
            Err(refusal) => return Err(refusal),
        };
        let is_same = |(entry, range): (&&Stored, &RangeResponse)| {
            let version = range.kvs.first().map(|kv| kv.mod_revision);
            version == Some(entry.version)
        };
        Ok(entries.iter().zip(&ranges).map(is_same).collect())
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
                        DELETED => Some(Change::Deleted(entry.id)),
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
