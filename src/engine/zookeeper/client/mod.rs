//! A client of ZooKeeper: one session, which moves to another server of the list when its connection breaks.
//!
//! # Behavior
//! The requests of all calls share one connection and are answered in order. A request whose caller was dropped is not sent. A
//! request that was sent when the connection broke fails: its server may have executed it. One that was not sent waits for the
//! next connection, and fails when no server of the list can be reached.
//!
//! Events and the answers to the reads of mirrors are handled on the client's task in their order, on which the mirrors depend. When a
//! server answers nothing for 1.5 s, the client moves its session to the next one.

mod connection;
mod evidence;
mod jute;
mod messages;
mod replies;
mod session;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot, watch};
use tokio_util::sync::CancellationToken;

pub(super) use self::jute::Malformed;
pub(super) use self::messages::{Access, Kind, Request, code};
pub(super) use self::replies::{Change, Part, Reply, Stat};
use self::session::Session;
use super::super::entries::Failure as ConnectFailure;
use crate::clock::Moment;
use crate::engine::entries::servers::Servers;

/// The longest request, in bytes. A server closes the connection for a longer one (`jute.maxbuffer`, 1 MiB by default).
pub(super) const MAX_REQUEST: usize = 1_000_000;

/// Why a request failed.
#[derive(Debug, Clone)]
pub(super) enum Failure {
    /// The server's error.
    Refused(i32),
    /// The connection broke before the answer.
    Broken(Arc<str>),
    /// No server could be reached. The request was not sent.
    Unreachable(ConnectFailure),
    /// The reply could not be read.
    Malformed,
    /// The request is longer than the server allows.
    TooLong,
    /// The reply is longer than this client reads. With what the list contains.
    LongReply(Arc<str>),
    /// The server has no more numbers for the entries of a name.
    NoNumbers,
    Closed,
}

impl From<Malformed> for Failure {
    fn from(_: Malformed) -> Self {
        Failure::Malformed
    }
}

pub(super) type Answer<T = Reply> = Result<T, Failure>;

/// Receives the changes of watched nodes and the answers on the task of the connection, in their order. It must not block.
pub(super) type EventSink = Box<dyn Fn(&str, Change) + Send + Sync>;
type AnswerSink = Box<dyn FnOnce(Answer) + Send>;

/// The receiver of an answer.
enum Sink {
    Call(oneshot::Sender<Answer>),
    Function(AnswerSink),
    /// A sync for the evidence, and when it was sent.
    Sync(Moment),
}

impl Sink {
    fn is_dropped(&self) -> bool {
        matches!(self, Sink::Call(call) if call.is_closed())
    }
}

struct Pending {
    request: Request,
    sink: Sink,
}

/// The state of the session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SessionState {
    /// 0: there was no session yet.
    pub id: i64,
    /// The session timeout that the server has chosen.
    pub timeout: Duration,
    /// The session certainly lasts until this moment (`evidence.rs`).
    pub until: Moment,
    /// Half of the longest session timeout so far: no lease was granted for longer without a renewal.
    pub longest: Duration,
}

/// What the client and the task of its connection share.
struct Shared {
    servers: Servers,
    /// The session timeout that is asked for.
    session_timeout: Duration,
    queue: Mutex<Queue>,
    wake: Notify,
    state: watch::Sender<SessionState>,
    events: OnceLock<EventSink>,
    /// The number of connections that have ended.
    ended_connections: watch::Sender<u64>,
    /// The server of the connection, or the last one.
    address: Mutex<String>,
    closing: CancellationToken,
    /// The task of the connection has ended.
    ended: CancellationToken,
}

#[derive(Default)]
struct Queue {
    /// Requests that go before the others.
    urgent: VecDeque<Pending>,
    requests: VecDeque<Pending>,
    is_closed: bool,
}

impl Shared {
    fn send(&self, request: Request, sink: Sink, is_urgent: bool) {
        let refusal = if request.length() > MAX_REQUEST {
            Failure::TooLong
        } else {
            let mut queue = self.queue.lock();
            if !queue.is_closed {
                let pending = Pending { request, sink };
                if is_urgent {
                    queue.urgent.push_back(pending)
                } else {
                    queue.requests.push_back(pending)
                }
                drop(queue);
                return self.wake.notify_one();
            }
            Failure::Closed
        };
        answer(sink, Err(refusal));
    }
}

fn answer(sink: Sink, answer: Answer) {
    match sink {
        Sink::Call(call) => _ = call.send(answer),
        Sink::Function(function) => function(answer),
        Sink::Sync(_) => {}
    }
}

/// A client. Dropping it closes the session.
pub(super) struct Client {
    shared: Arc<Shared>,
    /// Held while a commit for [`Client::lasts`] is in progress.
    committing: tokio::sync::Mutex<()>,
}

impl Client {
    /// Opens a session. Tries each server once.
    ///
    /// # Errors
    /// When no server opens a session.
    pub(super) async fn connect(servers: Servers, session_timeout: Duration) -> Result<Self, ConnectFailure> {
        let now = Moment::now();
        let shared = Arc::new(Shared {
            servers,
            queue: Mutex::default(),
            wake: Notify::new(),
            state: watch::Sender::new(SessionState {
                id: 0,
                timeout: session_timeout,
                until: now,
                longest: Duration::ZERO,
            }),
            events: OnceLock::new(),
            ended_connections: watch::Sender::new(0),
            address: Mutex::default(),
            closing: CancellationToken::new(),
            ended: CancellationToken::new(),
            session_timeout,
        });
        let mut session = Session::new(shared.clone());
        let connection = session.open().await?;
        let mut state = shared.state.subscribe();
        // Dropped with this future, it closes the session.
        let committing = tokio::sync::Mutex::default();
        let client = Client { shared, committing };
        tokio::spawn(Box::pin(session.run(connection)));
        let _ = state.wait_for(|state| state.id != 0).await;
        Ok(client)
    }

    /// Sets the receiver of events. Called once, before the first watch.
    pub(super) fn set_events(&self, sink: EventSink) {
        let _ = self.shared.events.set(sink);
    }

    /// Returns a receiver of a change when the connection has ended, and with it its watches.
    pub(super) fn connection(&self) -> watch::Receiver<u64> {
        self.shared.ended_connections.subscribe()
    }

    /// Returns the address of the current server, or of the last one.
    pub(super) fn address(&self) -> String {
        self.shared.address.lock().clone()
    }

    /// Returns the state of the session.
    pub(super) fn state(&self) -> SessionState {
        *self.shared.state.borrow()
    }

    /// Queues a request at once. Requests are executed in the order of these calls.
    pub(super) fn call(&self, request: Request) -> impl Future<Output = Answer> + Send + use<> {
        self.enqueue(request, false)
    }

    /// Queues a request before all that are not urgent and were not sent yet.
    pub(super) fn call_urgently(&self, request: Request) -> impl Future<Output = Answer> + Send + use<> {
        self.enqueue(request, true)
    }

    fn enqueue(&self, request: Request, is_urgent: bool) -> impl Future<Output = Answer> + Send + use<> {
        let (sender, receiver) = oneshot::channel();
        self.shared.send(request, Sink::Call(sender), is_urgent);
        async move { receiver.await.unwrap_or(Err(Failure::Closed)) }
    }

    /// Queues a request whose answer is received in the order of the connection's events.
    pub(super) fn call_in_order(&self, request: Request, sink: impl FnOnce(Answer) + Send + 'static) {
        self.shared.send(request, Sink::Function(Box::new(sink)), false);
    }

    /// Waits until this session certainly lasts until `end`, with commits of the node `path` if it is not known yet. `false`: there is
    /// another session.
    pub(super) async fn lasts(&self, session: i64, end: Moment, path: &str) -> Answer<bool> {
        loop {
            let state = self.state();
            if state.id != session || state.until >= end {
                return Ok(state.id == session);
            }
            let _committing = self.committing.lock().await;
            if self.state() != state {
                continue;
            }
            let reply = self.call_urgently(Request::commit(path)).await?;
            if let [Part::Failed(code)] = reply.parts()?[..] {
                return Err(Failure::Refused(code));
            }
            if self.state() == state {
                tokio::time::sleep(evidence::interval(state.timeout)).await;
            }
        }
    }

    /// Ends the session: its ephemeral nodes are deleted. Waits for the end, at most for a second.
    pub(super) async fn close(&self) {
        self.shared.closing.cancel();
        let _ = tokio::time::timeout(Duration::from_secs(1), self.shared.ended.cancelled()).await;
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.shared.closing.cancel();
    }
}
