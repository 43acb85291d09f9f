//! The watches of the names with waiters: one stream for all of them.

use std::collections::HashMap;
use std::sync::Arc;

use futures_util::FutureExt;
use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use tokio::sync::mpsc::UnboundedReceiver;

use super::client::messages::{Event, WatchCancelRequest, WatchCreateRequest, WatchOp, WatchRequest, WatchResponse};
use super::client::{Outcome, Status, WatchStream};
use super::store::Etcd;
use crate::backoff::Backoff;
use crate::engine::entries::{Change, Entry, Share, Stored, Watch};
use crate::model::Key;

/// The kind of an event that deletes a key.
const DELETED: i32 = 1;

/// The entries of a name, their revision, and the id of the watch that waits for them.
type Read = BoxFuture<'static, (Key, i64, Outcome<(u64, Vec<Entry>)>)>;

/// Opens and closes watches as they are requested, and reports the changes of their names. Ends with the engine.
pub(super) async fn run(store: Arc<Etcd>, mut requests: UnboundedReceiver<Watch>) {
    let mut backoff = Backoff::for_store();
    let mut last_id = 0;
    loop {
        if store.local.is_empty() && requests.recv().await.is_none() {
            return;
        }
        let (failure, was_read) = match store.client.watch().await {
            Ok(stream) => {
                let mut watches = Watches::new(&store, stream, last_id);
                let status = watches.serve(&mut requests, &mut backoff).await;
                last_id = watches.last_id;
                (store.client.watch_failed(watches.stream, status), watches.was_read)
            }
            Err(failure) => (failure, false),
        };
        tracing::debug!(failure = ?failure.failure(), "the watches were lost");
        for name in store.local.names() {
            store.local.lost(&name);
            // Attempts of the waiters report an outage, or a missing permission.
            if !was_read {
                store.local.wake_name(&name);
            }
        }
        tokio::time::sleep(backoff.delay()).await;
    }
}

/// The watches on one stream.
struct Watches<'a> {
    store: &'a Arc<Etcd>,
    stream: WatchStream,
    names: HashMap<i64, Key>,
    ids: HashMap<Key, i64>,
    last_id: i64,
    reads: FuturesUnordered<Read>,
    /// Whether the entries of a name were read.
    was_read: bool,
}

impl<'a> Watches<'a> {
    fn new(store: &'a Arc<Etcd>, stream: WatchStream, last_id: i64) -> Self {
        Watches {
            store,
            stream,
            names: HashMap::new(),
            ids: HashMap::new(),
            last_id,
            reads: FuturesUnordered::new(),
            was_read: false,
        }
    }

    /// Serves the names until the stream fails. Returns why.
    async fn serve(&mut self, requests: &mut UnboundedReceiver<Watch>, backoff: &mut Backoff) -> Status {
        for name in self.store.local.names() {
            if let Err(status) = self.open(name) {
                return status;
            }
        }
        loop {
            let done = tokio::select! {
                message = self.stream.next() => message.and_then(|message| self.receive(message)),
                Some((name, id, read)) = self.reads.next() => {
                    backoff.reset();
                    self.opened(&name, id, read)
                }
                Some(request) = requests.recv() => match request {
                    Watch::Open(name) => self.open(name),
                    Watch::Close(name) => self.close(&name),
                },
            };
            if let Err(status) = done {
                return status;
            }
        }
    }

    fn open(&mut self, name: Key) -> Result<(), Status> {
        if self.ids.contains_key(&name) {
            return Ok(());
        }
        self.last_id += 1;
        let (key, range_end) = self.store.layout.range(&name);
        self.names.insert(self.last_id, name.clone());
        self.ids.insert(name, self.last_id);
        self.send(WatchOp::Create(WatchCreateRequest {
            key,
            range_end,
            watch_id: self.last_id,
        }))
    }

    fn close(&mut self, name: &Key) -> Result<(), Status> {
        let Some(watch_id) = self.ids.remove(name) else {
            return Ok(());
        };
        self.names.remove(&watch_id);
        self.send(WatchOp::Cancel(WatchCancelRequest { watch_id }))
    }

    fn send(&mut self, op: WatchOp) -> Result<(), Status> {
        self.stream.send(&WatchRequest { op: Some(op) })
    }

    fn receive(&mut self, message: WatchResponse) -> Result<(), Status> {
        // Messages of a watch that was closed may still arrive.
        let Some(name) = self.names.get(&message.watch_id) else {
            return Ok(());
        };
        if message.canceled {
            return Err(Status::cancelled(&message.cancel_reason));
        }
        if message.created {
            if self.store.local.begin_read(name) {
                self.reads
                    .push(read(self.store.clone(), name.clone(), message.watch_id).boxed());
            }
            return Ok(());
        }
        let mut events = message.events.into_iter().peekable();
        let revision_of = |event: &Event| event.kv.as_ref().map_or(0, |kv| kv.mod_revision);
        while let Some(event) = events.next() {
            let revision = revision_of(&event);
            let mut changes = Vec::new();
            let mut event = Some(event);
            // One revision may delete several entries: no claim between them was granted.
            while let Some(next) = event.or_else(|| events.next_if(|next| revision_of(next) == revision)) {
                changes.extend(self.change(name, next));
                event = None;
            }
            self.store.local.changed(name, revision.max(0) as u64, changes);
        }
        Ok(())
    }

    /// Returns what an event changes. `None`: a new record of an entry.
    fn change(&self, name: &Key, event: Event) -> Option<Change> {
        let kv = event.kv?;
        if event.kind != DELETED && kv.create_revision != kv.mod_revision {
            return None;
        }
        let stored = self.store.layout.entry(name, &kv);
        Some(match event.kind {
            DELETED => Change::Deleted(stored.id),
            _ => Change::Created(entry(stored)),
        })
    }

    fn opened(&mut self, name: &Key, id: i64, read: Outcome<(u64, Vec<Entry>)>) -> Result<(), Status> {
        if self.ids.get(name) != Some(&id) {
            return Ok(());
        }
        let (revision, entries) = read.map_err(|failure| failure.status)?;
        self.was_read = true;
        self.store.local.opened(name, revision, entries);
        Ok(())
    }
}

fn entry(stored: Stored) -> Entry {
    Entry {
        place: stored.place,
        share: Share::LOCK,
        id: stored.id,
    }
}

/// Reads all entries of a name.
async fn read(store: Arc<Etcd>, name: Key, id: i64) -> (Key, i64, Outcome<(u64, Vec<Entry>)>) {
    let (mut entries, mut at) = (Vec::new(), 0);
    let mut rest = Some(store.layout.range(&name));
    while let Some(range) = rest {
        match store.page(range, at, false).await {
            Ok((kvs, revision, more)) => {
                entries.extend(kvs.iter().map(|kv| entry(store.layout.entry(&name, kv))));
                (at, rest) = (revision, more);
            }
            Err(failure) => return (name, id, Err(failure)),
        }
    }
    (name, id, Ok((at.max(0) as u64, entries)))
}
