//! The watches of a client: one stream for all of them. A server allows a limited number of streams (some 250 with TLS).
//!
//! The server numbers the watches, and a refused one may have any number (-1 since etcd 3.5.6). So they are created one after the
//! other, and an answer to a creation is that of the last one.

use std::collections::{BTreeMap, HashMap};
use std::mem::take;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};

use super::connection::{Connection, Stream, closed};
use super::framing::{decoded, encoded};
use super::messages::{WatchCancelRequest, WatchCreateRequest, WatchOp, WatchRequest, WatchResponse};
use super::{Client, Failure, Outcome, Status};

const WATCH: &str = "/etcdserverpb.Watch/Watch";

type Messages = UnboundedSender<Outcome<WatchResponse>>;

/// A change of the set of watches, which have numbers of this process.
#[derive(Debug)]
pub(in crate::engine::etcd) enum Change {
    Open(u64, WatchCreateRequest, Messages),
    Close(u64),
}

/// Opens watches.
pub(in crate::engine::etcd) struct Watches {
    last: AtomicU64,
    changes: UnboundedSender<Change>,
}

/// A watch. Dropping it ends it.
pub(in crate::engine::etcd) struct Watch {
    number: u64,
    messages: UnboundedReceiver<Outcome<WatchResponse>>,
    changes: UnboundedSender<Change>,
}

impl Drop for Watch {
    fn drop(&mut self) {
        let _ = self.changes.send(Change::Close(self.number));
    }
}

impl Watch {
    /// Waits for the next message.
    pub(in crate::engine::etcd) async fn next(&mut self) -> Outcome<WatchResponse> {
        let message = self.messages.recv().await;
        message.unwrap_or_else(|| Err(Failure::not_sent(closed(), String::new())))
    }
}

impl Watches {
    /// Creates the watches of a client. [`Client::serve_watches`] gets the changes.
    pub(in crate::engine::etcd) fn new() -> (Self, UnboundedReceiver<Change>) {
        let (changes, receiver) = mpsc::unbounded_channel();
        let last = AtomicU64::new(0);
        (Watches { last, changes }, receiver)
    }

    /// Watches the keys from `key` to before `range_end`.
    pub(in crate::engine::etcd) fn open(&self, key: Vec<u8>, range_end: Vec<u8>) -> Watch {
        let number = self.last.fetch_add(1, Relaxed) + 1;
        let (sender, messages) = mpsc::unbounded_channel();
        let request = WatchCreateRequest { key, range_end };
        let _ = self.changes.send(Change::Open(number, request, sender));
        let changes = self.changes.clone();
        Watch {
            number,
            messages,
            changes,
        }
    }
}

/// The watches of one stream.
#[derive(Default)]
struct Open {
    /// By their numbers, with the ids of the created ones.
    watches: BTreeMap<u64, (WatchCreateRequest, Messages, Option<i64>)>,
    ids: HashMap<i64, u64>,
    /// The last one whose creation was sent, and whether there is no answer to it yet.
    last: (u64, bool),
}

impl Open {
    /// Returns the id of a watch that is to be ended.
    fn apply(&mut self, change: Change) -> Option<i64> {
        match change {
            Change::Open(number, request, messages) => {
                self.watches.insert(number, (request, messages, None));
                None
            }
            Change::Close(number) => self.remove(number).and_then(|(_, id)| id),
        }
    }

    fn remove(&mut self, number: u64) -> Option<(Messages, Option<i64>)> {
        let (_, messages, id) = self.watches.remove(&number)?;
        id.inspect(|id| _ = self.ids.remove(id));
        Some((messages, id))
    }

    /// Sends the next creation, if the one before it has an answer.
    fn create(&mut self, stream: &mut Stream) -> Result<(), Status> {
        if let (last, false) = self.last
            && let Some((number, (request, ..))) = self.watches.range(last + 1..).next()
        {
            self.last = (*number, true);
            send(stream, WatchOp::Create(request.clone()))?;
        }
        Ok(())
    }

    /// Passes a message to its watch, with its failure if it ends the watch. Returns the id of a watch that is to be ended.
    fn receive(&mut self, message: WatchResponse, failure: Option<Failure>) -> Option<i64> {
        let number = match message.created {
            true => take(&mut self.last.1).then_some(self.last.0),
            false => self.ids.get(&message.id).copied(),
        };
        let watch = number.and_then(|number| Some((number, self.watches.get_mut(&number)?)));
        match (watch, failure) {
            (Some((number, (_, messages, id))), None) => {
                if message.created {
                    *id = Some(message.id);
                    self.ids.insert(message.id, number);
                }
                let _ = messages.send(Ok(message));
            }
            (Some((number, _)), Some(failure)) => {
                let removed = self.remove(number);
                removed.inspect(|(messages, _)| _ = messages.send(Err(failure)));
            }
            // It was closed meanwhile.
            (None, None) if message.created => return Some(message.id),
            (None, _) => {}
        }
        None
    }
}

impl Client {
    /// Keeps a stream open while there are watches. All of them fail with it.
    pub(in crate::engine::etcd) async fn serve_watches(&self, mut changes: UnboundedReceiver<Change>) {
        let mut open = Open::default();
        while let Some(change) = changes.recv().await {
            open.apply(change);
            if open.watches.is_empty() {
                continue;
            }
            if let Err(failure) = self.watch(&mut open, &mut changes).await {
                // Those that were opened meanwhile, too: each of them would wait for a connection of its own.
                while let Ok(change) = changes.try_recv() {
                    open.apply(change);
                }
                for (_, messages, _) in take(&mut open).watches.into_values() {
                    let _ = messages.send(Err(failure.clone()));
                }
            }
            open = Open::default();
        }
    }

    /// Serves watches by one stream, until there are no more.
    async fn watch(&self, open: &mut Open, changes: &mut UnboundedReceiver<Change>) -> Outcome<()> {
        let connection = self.connection().await?;
        let token = self.token(&connection).await?;
        let served = self.serve(&connection, token.as_ref(), open, changes).await;
        served.map_err(|status| {
            if status.needs_login() {
                self.forget_token(token.as_ref());
            }
            self.failed(&connection, status)
        })
    }

    async fn serve(
        &self,
        connection: &Arc<Connection>,
        token: Option<&Arc<str>>,
        open: &mut Open,
        changes: &mut UnboundedReceiver<Change>,
    ) -> Result<(), Status> {
        let mut stream = connection.stream(WATCH, token.map(|token| &**token)).await?;
        while !open.watches.is_empty() {
            open.create(&mut stream)?;
            let ended = tokio::select! {
                change = changes.recv() => match change {
                    Some(change) => open.apply(change),
                    None => return Ok(()),
                },
                message = stream.next() => {
                    let message: WatchResponse = decoded(message?.ok_or_else(closed)?)?;
                    // Not the answer to a request to end a watch.
                    let is_failed = message.canceled && (message.created || open.ids.contains_key(&message.id));
                    let status = is_failed.then(|| Status::cancelled(&message.cancel_reason));
                    // The stream has the token with which it was opened.
                    let is_old = || token.is_some() && self.state.lock().token.as_ref() != token;
                    if let Some(status) = status.clone().filter(|status| status.needs_login() || is_old()) {
                        return Err(status);
                    }
                    open.receive(message, status.map(|status| Failure::of(connection, status)))
                }
            };
            if let Some(id) = ended {
                send(&mut stream, WatchOp::Cancel(WatchCancelRequest { id }))?;
            }
        }
        Ok(())
    }
}

fn send(stream: &mut Stream, op: WatchOp) -> Result<(), Status> {
    stream.send(encoded(&WatchRequest { op: Some(op) }), false)
}
