//! One HTTP/2 connection to a member.

use std::collections::BTreeMap;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use h2::client::{ResponseFuture, SendRequest};
use h2::{RecvStream, SendStream};
use http::{Method, Request, Version};
use parking_lot::Mutex;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio_rustls::TlsConnector;
use tokio_util::sync::CancellationToken;

use super::Unanswered;
use super::framing::{Frames, MAX_MESSAGE};
use super::status::Status;
use crate::clock::Moment;
use crate::engine::TlsFiles;
use crate::engine::entries::target::Server;
use crate::engine::tls::{CertificateFault, Verified, client_config};

/// The interval of the checks whether a server still answers.
const TICK: Duration = Duration::from_millis(300);
/// A request without an answer for this long makes the connection suspect.
const SILENCE: Duration = Duration::from_secs(1);
/// Each of two waits for the answer to a probe, three times as long without another member. After a stall of this process the first
/// one may be over at once.
const PROBE: Duration = Duration::from_millis(500);
/// The request of a probe: a server without it answers with an error.
const HEALTH: &str = "/grpc.health.v1.Health/Check";

trait Io: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

/// An open connection. Dropping it closes it after its last request.
pub(in crate::engine::etcd) struct Connection {
    pub(super) server: Server,
    sender: SendRequest<Bytes>,
    is_secure: bool,
    state: Arc<State>,
}

struct State {
    closed: CancellationToken,
    requests: Mutex<Requests>,
    /// There are requests.
    begun: Notify,
}

/// The requests without an answer, with the times of their sending.
#[derive(Default)]
struct Requests {
    last: u64,
    sent: BTreeMap<u64, Moment>,
}

/// A request without an answer. Dropping it removes it from the list.
struct Sent(Arc<State>, u64);

impl Drop for Sent {
    fn drop(&mut self) {
        self.0.requests.lock().sent.remove(&self.1);
    }
}

impl Connection {
    /// Connects to a member. `is_alone`: there is no other one, so that a late answer is no reason to leave it.
    pub(super) async fn open(server: &Server, tls: Option<&TlsFiles>, is_alone: bool) -> Result<Self, Status> {
        let cannot = |error: io::Error| Status::Broken(format!("cannot connect: {error}"));
        let socket = TcpStream::connect((server.host.as_str(), server.port))
            .await
            .map_err(cannot)?;
        socket.set_nodelay(true).map_err(cannot)?;
        let io: Box<dyn Io> = match tls {
            None => Box::new(socket),
            Some(files) => secured(server, files, socket).await?,
        };
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
            requests: Mutex::default(),
            begun: Notify::new(),
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
        request.body(()).map_err(|error| Status::Wrong(error.to_string()))
    }

    async fn begin(&self, path: &str, token: Option<&str>) -> Result<(SendRequest<Bytes>, Request<()>), Status> {
        let request = self.request(path, token)?;
        let ready = self.sender.clone().ready();
        tokio::select! {
            biased;
            () = self.state.closed.cancelled() => Err(closed()),
            sender = ready => Ok((sender.map_err(|error| broken(&error))?, request)),
        }
    }

    /// Makes a request with one message and one answer. Calls `begin` before the first byte can be sent. If it returns a value, the
    /// answer is awaited even when this future is dropped.
    pub(super) async fn unary(
        self: &Arc<Self>,
        path: &str,
        token: Option<&str>,
        message: Bytes,
        begin: &(dyn Fn() -> Option<Unanswered> + Sync),
    ) -> Result<BytesMut, Status> {
        let (mut sender, request) = self.begin(path, token).await?;
        let unanswered = begin();
        let sent = {
            let mut requests = self.state.requests.lock();
            requests.last += 1;
            let number = requests.last;
            if requests.sent.is_empty() {
                self.state.begun.notify_one();
            }
            requests.sent.insert(number, Moment::now());
            Sent(self.state.clone(), number)
        };
        let (answer, mut stream) = sender.send_request(request, false).map_err(|error| broken(&error))?;
        stream.send_data(message, true).map_err(|error| broken(&error))?;
        let connection = self.clone();
        let is_continued = unanswered.is_some();
        let answer = async move {
            let _guards = (unanswered, sent);
            tokio::select! {
                biased;
                answer = read_answer(answer) => answer,
                () = connection.state.closed.cancelled() => Err(closed()),
            }
        };
        Continued {
            future: Some(answer.boxed()),
            is_continued,
        }
        .await
    }

    /// Opens a stream of messages in both directions.
    pub(super) async fn stream(&self, path: &str, token: Option<&str>) -> Result<Stream, Status> {
        let (mut sender, request) = self.begin(path, token).await?;
        let (answer, sender) = sender.send_request(request, false).map_err(|error| broken(&error))?;
        Ok(Stream {
            sender,
            receiver: Receiver::Opening(answer),
            frames: Frames::default(),
            closed: self.state.closed.clone(),
        })
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.close();
    }
}

/// A future that a task completes when it is dropped.
struct Continued<T: Send + 'static> {
    future: Option<BoxFuture<'static, T>>,
    is_continued: bool,
}

impl<T: Send + 'static> Future for Continued<T> {
    type Output = T;
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        let Some(future) = &mut self.future else {
            return Poll::Pending;
        };
        let answer = std::task::ready!(future.poll_unpin(context));
        self.future = None;
        Poll::Ready(answer)
    }
}

impl<T: Send + 'static> Drop for Continued<T> {
    fn drop(&mut self) {
        if let Some(future) = self.future.take().filter(|_| self.is_continued)
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            runtime.spawn(future.map(drop));
        }
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
    pub(super) fn send(&mut self, message: Bytes) -> Result<(), Status> {
        self.sender.send_data(message, false).map_err(|error| broken(&error))
    }

    /// Waits for the next message. May be dropped and called again.
    pub(super) async fn next(&mut self) -> Result<BytesMut, Status> {
        loop {
            if let Some(message) = self.frames.next()? {
                return Ok(message);
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
                match data(body).await? {
                    Some(bytes) => Ok(bytes),
                    None => Err(status_of(body).await?.err().unwrap_or_else(closed)),
                }
            };
            let bytes = tokio::select! {
                biased;
                bytes = more => bytes?,
                () = self.closed.cancelled() => return Err(closed()),
            };
            self.frames.push(&bytes);
        }
    }
}

async fn read_answer(answer: ResponseFuture) -> Result<BytesMut, Status> {
    let (head, mut body) = answer.await.map_err(|error| broken(&error))?.into_parts();
    checked(&head)?;
    let mut frames = Frames::default();
    while let Some(bytes) = data(&mut body).await? {
        frames.push(&bytes);
        if frames.len() > 2 * MAX_MESSAGE {
            return Err(Status::protocol("more than one message"));
        }
    }
    status_of(&mut body).await??;
    frames.next()?.ok_or_else(|| Status::protocol("no message"))
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
            true => Status::Broken(format!("a proxy answered {}", head.status)),
            false => Status::Wrong(format!("HTTP status {}: it is not etcd 3.4 or later", head.status)),
        });
    }
    match head.headers.get("content-type").is_some_and(is_grpc) {
        true => Ok(()),
        false => Err(Status::Wrong(
            "it does not speak gRPC: it is not etcd 3.4 or later".into(),
        )),
    }
}

/// Closes a connection whose server does not answer a probe, and one whose member answers no requests while there are others. (etcd
/// closes a connection with more than one HTTP/2 ping in 5 s, so that the probe is a request.)
async fn close_when_silent(sender: SendRequest<Bytes>, head: Request<()>, state: Arc<State>, is_alone: bool) {
    let mut is_suspect = false;
    let patience = if is_alone { 3 * PROBE } else { PROBE };
    loop {
        let oldest = state.requests.lock().sent.values().next().copied();
        let pause = async {
            match oldest {
                Some(_) => tokio::time::sleep(TICK).await,
                None => state.begun.notified().await,
            }
        };
        tokio::select! {
            () = state.closed.cancelled() => return,
            () = pause => {}
        }
        let Some(age) = oldest.map(Moment::elapsed).filter(|age| *age >= 2 * TICK) else {
            is_suspect = false;
            continue;
        };
        let probe = async {
            let (answer, mut stream) = sender.clone().ready().await?.send_request(head.clone(), false)?;
            stream.send_data(Bytes::from_static(&[0; 5]), true)?;
            answer.await.map(drop)
        };
        tokio::pin!(probe);
        let mut is_answered = false;
        for _ in 0..2 {
            tokio::select! {
                () = state.closed.cancelled() => return,
                answered = tokio::time::timeout(patience, &mut probe) => if answered.is_ok() {
                    is_answered = true;
                    break;
                },
            }
        }
        let is_stuck = age >= SILENCE && std::mem::replace(&mut is_suspect, age >= SILENCE) && !is_alone;
        if !is_answered || is_stuck {
            tracing::debug!(is_answered, "a member of etcd does not answer");
            break;
        }
    }
    state.closed.cancel();
}

/// Sets up TLS with HTTP/2.
async fn secured(server: &Server, files: &TlsFiles, socket: TcpStream) -> Result<Box<dyn Io>, Status> {
    let mut config = client_config(files, Verified::Full).map_err(|error| Status::Wrong(error.to_string()))?;
    config.alpn_protocols = vec![b"h2".to_vec()];
    let name = ServerName::try_from(server.host.clone()).map_err(|error| Status::Wrong(error.to_string()))?;
    let connecting = TlsConnector::from(Arc::new(config)).connect(name, socket);
    let stream = connecting.await.map_err(tls_error)?;
    if stream.get_ref().1.alpn_protocol() != Some(b"h2") {
        return Err(Status::Wrong(
            "the server has TLS without HTTP/2: it is not etcd".into(),
        ));
    }
    Ok(Box::new(stream))
}

fn tls_error(error: io::Error) -> Status {
    let of_tls = error.get_ref().and_then(|error| error.downcast_ref::<rustls::Error>());
    let Some(of_tls) = of_tls else {
        return Status::Broken(format!("TLS failed: {error}"));
    };
    let advice = match CertificateFault::of(of_tls) {
        Some(CertificateFault::Untrusted) => {
            "; its authority is not trusted here: set tls.caFile or tls.ca to the certificate of that authority"
        }
        Some(CertificateFault::OtherName) => "; use the name in the certificate of the server as the host of the URL",
        Some(CertificateFault::Expired) => {
            return Status::Wrong(format!("TLS failed: {of_tls}; {}", CertificateFault::EXPIRED));
        }
        None if matches!(of_tls, rustls::Error::InvalidMessage(_)) => {
            "; does the server have TLS? Without it the URL begins with etcd://"
        }
        None if matches!(of_tls, rustls::Error::AlertReceived(_)) => {
            "; a server that requires a client certificate needs tls.certFile and tls.keyFile"
        }
        None => "",
    };
    Status::Wrong(format!("TLS failed: {of_tls}{advice}"))
}

fn broken(error: &h2::Error) -> Status {
    Status::Broken(format!("the connection broke: {error}"))
}

fn closed() -> Status {
    Status::Broken("the connection was closed, because the server did not answer".into())
}
