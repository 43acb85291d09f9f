//! One HTTP/2 connection to a member.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use bytes::{Bytes, BytesMut};
use futures_util::FutureExt;
use h2::client::{ResponseFuture, SendRequest};
use h2::{RecvStream, SendStream};
use http::{Method, Request, Version};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::framing::Frames;
use super::liveness::{HEALTH, close_when_silent};
use super::status::{Kind, Status};
use crate::clock::Moment;
use crate::engine::TlsFiles;
use crate::engine::entries::servers::NEEDS_CERTIFICATE;
use crate::engine::target::Server;
use crate::model::{Claim, OwnerToken};

/// An open connection. Dropping it closes it after its last request.
pub(in crate::engine::etcd) struct Connection {
    pub(super) server: Server,
    sender: SendRequest<Bytes>,
    is_secure: bool,
    state: Arc<State>,
}

pub(super) struct State {
    pub closed: CancellationToken,
    requests: watch::Sender<Requests>,
    /// Whether it was closed because the server did not answer.
    pub is_silent: AtomicBool,
}

/// The requests without an answer, with the times of their sending, and the owners of attempts.
#[derive(Default)]
struct Requests {
    last: u64,
    sent: BTreeMap<u64, (Moment, Option<OwnerToken>)>,
}

impl State {
    /// Returns when the oldest request without an answer was sent.
    pub(super) fn oldest(&self) -> Option<Moment> {
        self.requests.borrow().sent.values().next().map(|(sent, _)| *sent)
    }

    /// Waits until there is a request without an answer.
    pub(super) async fn begun(&self) {
        let _ = self
            .requests
            .subscribe()
            .wait_for(|requests| !requests.sent.is_empty())
            .await;
    }
}

/// A request without an answer. Dropping it removes it from the list.
struct Sent(Arc<State>, u64);

impl Drop for Sent {
    fn drop(&mut self) {
        self.0
            .requests
            .send_modify(|requests| _ = requests.sent.remove(&self.1));
    }
}

impl Connection {
    /// Connects to a member. `is_alone`: there is no other one, so that a late answer is no reason to leave it.
    pub(super) async fn open(server: &Server, tls: Option<&TlsFiles>, is_alone: bool) -> Result<Self, Status> {
        let io = server.connect(tls, Some("h2")).boxed().await;
        let io = io.map_err(|failure| match failure.passes {
            true => Status::broken(failure.text),
            false => Status::wrong(failure.text),
        })?;
        let (sender, connection) = h2::client::Builder::new()
            .initial_window_size(1 << 20)
            .initial_connection_window_size(4 << 20)
            .max_header_list_size(64 << 10)
            .enable_push(false)
            .handshake::<_, Bytes>(io)
            .await
            .map_err(|error| broken(&error))?;
        let state = Arc::new(State {
            closed: CancellationToken::new(),
            requests: watch::Sender::default(),
            is_silent: AtomicBool::new(false),
        });
        let closed = state.closed.clone();
        let driver = async move {
            tokio::select! {
                ended = connection => if let Err(error) = ended {
                    tracing::debug!(%error, "a connection to etcd broke");
                },
                () = closed.cancelled() => {}
            }
            closed.cancel();
        };
        tokio::spawn(driver.boxed());
        let connection = Connection {
            server: server.clone(),
            sender,
            is_secure: tls.is_some(),
            state,
        };
        let head = connection.request(HEALTH, None)?;
        let checking = close_when_silent(connection.sender.clone(), head, connection.state.clone(), is_alone);
        tokio::spawn(checking.boxed());
        Ok(connection)
    }

    pub(super) fn is_closed(&self) -> bool {
        self.state.closed.is_cancelled()
    }

    pub(super) fn close(&self) {
        self.state.closed.cancel();
    }

    fn request(&self, path: &str, token: Option<&str>) -> Result<Request<()>, Status> {
        let scheme = if self.is_secure { "https" } else { "http" };
        let mut request = Request::builder()
            .method(Method::POST)
            .version(Version::HTTP_2)
            .uri(format!("{scheme}://{}{path}", self.server))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            // A member without a leader answers at once.
            .header("hasleader", "true");
        // An empty token is refused even without authentication.
        if let Some(token) = token.filter(|token| !token.is_empty()) {
            request = request.header("token", token);
        }
        request.body(()).map_err(|error| Status::wrong(error.to_string()))
    }

    /// Waits until a request can be sent.
    async fn ready(&self) -> Result<SendRequest<Bytes>, Status> {
        tokio::select! {
            biased;
            () = self.state.closed.cancelled() => Err(closed()),
            sender = self.sender.clone().ready() => sender.map_err(|error| broken(&error)),
        }
    }

    fn begin(&self, mut sender: SendRequest<Bytes>, path: &str, token: Option<&str>) -> Result<Stream, Status> {
        let request = self.request(path, token)?;
        let (answer, sender) = sender.send_request(request, false).map_err(|error| broken(&error))?;
        Ok(Stream {
            sender,
            receiver: Receiver::Opening(answer),
            frames: Frames::default(),
            closed: self.state.closed.clone(),
        })
    }

    /// Makes a request with one message and one answer, which is awaited even when this future is dropped. `attempt`: the claim of an
    /// attempt, which is marked as sent.
    pub(super) async fn unary(
        &self,
        path: &str,
        token: Option<&str>,
        message: Bytes,
        attempt: Option<&Claim>,
    ) -> Result<BytesMut, Status> {
        let sender = self.ready().await?;
        attempt.inspect(|claim| claim.mark_sent());
        let mut sent = Sent(self.state.clone(), 0);
        self.state.requests.send_modify(|requests| {
            requests.last += 1;
            sent.1 = requests.last;
            let owner = attempt.map(|claim| claim.owner.clone());
            requests.sent.insert(requests.last, (Moment::now(), owner));
        });
        let mut stream = self.begin(sender, path, token)?;
        stream.send(message, true)?;
        let answering = async move {
            match stream.only().await {
                Err(Status { kind: Kind::Broken, .. }) if sent.0.is_silent.load(Relaxed) => {
                    Err(Status::broken("the server did not answer"))
                }
                answer => answer,
            }
        };
        tokio::spawn(answering.boxed()).await.unwrap_or_else(|_| Err(closed()))
    }

    /// Adds what the reason may be if the connection broke. For servers that have never answered.
    pub(super) fn explained(&self, status: Status) -> Status {
        let advice = match self.is_secure {
            _ if status.kind != Kind::Broken || self.state.is_silent.load(Relaxed) => return status,
            true => NEEDS_CERTIFICATE,
            false => "check the port: the server may need TLS (etcds://), or may not be etcd",
        };
        Status::broken(format!("{status}; {advice}"))
    }

    /// Waits until no attempt of an owner is without an answer: etcd executes the requests of a connection in any order.
    pub(super) async fn wait_for_answers(&self, owner: &OwnerToken) {
        let is_of = |(_, sent): &(Moment, Option<OwnerToken>)| sent.as_ref() == Some(owner);
        let are_answered = |requests: &Requests| !requests.sent.values().any(is_of);
        let _ = self.state.requests.subscribe().wait_for(are_answered).await;
    }

    /// Opens a stream of messages in both directions.
    pub(super) async fn stream(&self, path: &str, token: Option<&str>) -> Result<Stream, Status> {
        self.begin(self.ready().await?, path, token)
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.close();
    }
}

/// A stream of messages in both directions. Dropping it ends it.
pub(in crate::engine::etcd) struct Stream {
    sender: SendStream<Bytes>,
    receiver: Receiver,
    frames: Frames,
    closed: CancellationToken,
}

enum Receiver {
    Opening(ResponseFuture),
    Open(RecvStream),
}

impl Stream {
    pub(super) fn send(&mut self, message: Bytes, is_last: bool) -> Result<(), Status> {
        self.sender.send_data(message, is_last).map_err(|error| broken(&error))
    }

    /// Waits for the only message of an answer.
    async fn only(mut self) -> Result<BytesMut, Status> {
        let mut only = None;
        while let Some(message) = self.next().await? {
            if only.replace(message).is_some() {
                return Err(Status::protocol("more than one message"));
            }
        }
        only.ok_or_else(|| Status::protocol("no message"))
    }

    /// Waits for the next message. `None`: there are no more. May be dropped and called again.
    pub(super) async fn next(&mut self) -> Result<Option<BytesMut>, Status> {
        loop {
            if let Some(message) = self.frames.next()? {
                return Ok(Some(message));
            }
            let more = async {
                if let Receiver::Opening(answer) = &mut self.receiver {
                    let (head, body) = answer.await.map_err(|error| broken(&error))?.into_parts();
                    checked(&head)?;
                    self.receiver = Receiver::Open(body);
                }
                let Receiver::Open(body) = &mut self.receiver else {
                    return Err(closed());
                };
                let bytes = data(body).await?;
                if bytes.is_none() {
                    status_of(body).await??;
                }
                Ok(bytes)
            };
            let bytes = tokio::select! {
                biased;
                bytes = more => bytes?,
                () = self.closed.cancelled() => return Err(closed()),
            };
            match bytes {
                Some(bytes) => self.frames.push(&bytes),
                None => return Ok(None),
            }
        }
    }
}

/// Reads the next bytes of a body. `None`: it has ended.
async fn data(body: &mut RecvStream) -> Result<Option<Bytes>, Status> {
    let Some(bytes) = body.data().await.transpose().map_err(|error| broken(&error))? else {
        return Ok(None);
    };
    // An error means that the stream has ended, which the next call returns.
    let _ = body.flow_control().release_capacity(bytes.len());
    Ok(Some(bytes))
}

/// Reads the status behind a body.
async fn status_of(body: &mut RecvStream) -> Result<Result<(), Status>, Status> {
    let trailers = body.trailers().await.map_err(|error| broken(&error))?;
    let status = trailers.as_ref().and_then(Status::read);
    status.ok_or_else(|| Status::protocol("no status"))
}

/// Checks the head of an answer, which has the status if there is no body.
fn checked(head: &http::response::Parts) -> Result<(), Status> {
    if let Some(status) = Status::read(&head.headers) {
        return status;
    }
    let is_grpc = |value: &http::HeaderValue| value.as_bytes().starts_with(b"application/grpc");
    if head.status != 200 {
        return Err(match head.status.is_server_error() {
            true => Status::broken(format!("a proxy answered {}", head.status)),
            false => Status::wrong(format!("HTTP status {}: it is not etcd 3.4 or later", head.status)),
        });
    }
    match head.headers.get("content-type").is_some_and(is_grpc) {
        true => Ok(()),
        false => Err(Status::wrong("it does not speak gRPC: it is not etcd 3.4 or later")),
    }
}

fn broken(error: &h2::Error) -> Status {
    Status::broken(format!("the connection broke: {error}"))
}

pub(super) fn closed() -> Status {
    Status::broken("the connection was closed")
}
