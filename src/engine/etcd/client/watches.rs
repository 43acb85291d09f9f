//! The watches of a client: one stream for all of them. A server allows a limited number of streams (some 250 with TLS).

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};

use tokio::sync::mpsc::{self, Receiver, Sender, UnboundedReceiver, UnboundedSender};

use super::connection::{Connection, Stream, closed};
use super::framing::{decoded, encoded};
use super::messages::{WatchCancelRequest, WatchCreateRequest, WatchOp, WatchRequest, WatchResponse};
use super::{Client, Failure, Outcome, Status};

const WATCH: &str = "/etcdserverpb.Watch/Watch";
/// The number of messages that a watch takes before the other ones wait for it.
const BUFFERED: usize = 64;

/// A change of the set of watches.
#[derive(Debug)]
pub(in crate::engine::etcd) enum Change {
    Open(WatchCreateRequest, Sender<Outcome<WatchResponse>>),
    Close(i64),
}

/// Opens watches.
pub(in crate::engine::etcd) struct Watches {
    last: AtomicI64,
    changes: UnboundedSender<Change>,
}

/// A watch. Dropping it ends it.
pub(in crate::engine::etcd) struct Watch {
    id: i64,
    messages: Receiver<Outcome<WatchResponse>>,
    changes: UnboundedSender<Change>,
}

impl Drop for Watch {
    fn drop(&mut self) {
        let _ = self.changes.send(Change::Close(self.id));
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
        let last = AtomicI64::new(0);
        (Watches { last, changes }, receiver)
    }

    /// Watches the keys from `key` to before `range_end`.
    pub(in crate::engine::etcd) fn open(&self, key: Vec<u8>, range_end: Vec<u8>) -> Watch {
        let id = self.last.fetch_add(1, Relaxed) + 1;
        let (sender, messages) = mpsc::channel(BUFFERED);
        let request = WatchCreateRequest { key, range_end, id };
        let _ = self.changes.send(Change::Open(request, sender));
        let changes = self.changes.clone();
        Watch { id, messages, changes }
    }
}

/// The open watches, by their ids.
type Open = HashMap<i64, (WatchCreateRequest, Sender<Outcome<WatchResponse>>)>;

impl Client {
    /// Keeps a stream open while there are watches. All of them fail with it.
    pub(in crate::engine::etcd) async fn serve_watches(&self, mut changes: UnboundedReceiver<Change>) {
        let mut open = Open::new();
        while let Some(change) = changes.recv().await {
            let Change::Open(request, messages) = change else {
                continue;
            };
            open.insert(request.id, (request, messages));
            let ended = self.watch(&mut open, &mut changes).await;
            for (_, (_, messages)) in open.drain() {
                if let Err(failure) = &ended {
                    // Without space the watch fails by the end of the channel.
                    let _ = messages.try_send(Err(failure.clone()));
                }
            }
        }
    }

    /// Serves watches by one stream, until there are no more.
    async fn watch(&self, open: &mut Open, changes: &mut UnboundedReceiver<Change>) -> Outcome<()> {
        let connection = self.connection().await?;
        let token = self.token(&connection).await?;
        let served = serve(&connection, token.as_deref(), open, changes).await;
        served.map_err(|status| {
            if status.needs_login() {
                self.forget_token(token.as_ref());
            }
            self.failed(&connection, status)
        })
    }
}

async fn serve(
    connection: &Arc<Connection>,
    token: Option<&str>,
    open: &mut Open,
    changes: &mut UnboundedReceiver<Change>,
) -> Result<(), Status> {
    let mut stream = connection.stream(WATCH, token).await?;
    for (request, _) in open.values() {
        send(&mut stream, WatchOp::Create(request.clone()))?;
    }
    while !open.is_empty() {
        tokio::select! {
            change = changes.recv() => match change {
                Some(Change::Open(request, messages)) => {
                    send(&mut stream, WatchOp::Create(request.clone()))?;
                    open.insert(request.id, (request, messages));
                }
                Some(Change::Close(id)) => {
                    if open.remove(&id).is_some() {
                        send(&mut stream, WatchOp::Cancel(WatchCancelRequest { id }))?;
                    }
                }
                None => return Ok(()),
            },
            message = stream.next() => {
                let message: WatchResponse = decoded(message?.ok_or_else(closed)?)?;
                let status = message.canceled.then(|| Status::cancelled(&message.cancel_reason));
                if let Some(status) = status.clone().filter(Status::needs_login) {
                    return Err(status);
                }
                if let Some((_, messages)) = open.get(&message.id) {
                    let message = match status {
                        Some(status) => Err(Failure::of(connection, status)),
                        None => Ok(message),
                    };
                    let _ = messages.send(message).await;
                }
            }
        }
    }
    Ok(())
}

fn send(stream: &mut Stream, op: WatchOp) -> Result<(), Status> {
    stream.send(encoded(&WatchRequest { op: Some(op) }), false)
}
