//! The socket of a connection. The runtime polls it during the login. After that the caller's event loop polls it, if there is one.

#[cfg_attr(not(unix), path = "stream/polled_socket/unsupported.rs")]
mod polled_socket;

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::task::{Context, Poll};
use std::time::Duration;

use parking_lot::Mutex;
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use self::polled_socket::{LocalStream, PolledSocket};
use crate::event_loop::EventLoop;

/// The idle time before the first keepalive probe of a TCP connection, and the interval between two probes.
const KEEPALIVE: (Duration, Duration) = (Duration::from_secs(15), Duration::from_secs(5));

/// One network address of a server.
#[derive(Debug, Clone)]
pub(in crate::engine) enum Endpoint {
    Tcp {
        address: SocketAddr,
        has_keepalives: bool,
        /// How long sent data may remain unacknowledged.
        timeout: Duration,
    },
    /// The path of a Unix socket.
    Local(PathBuf),
}

/// The stream of a connection. Dropping it closes the connection.
pub(in crate::engine) struct Stream(Arc<Mutex<Io>>);

/// The socket of a stream.
pub(in crate::engine) struct StreamHandle(Arc<Mutex<Io>>);

/// Counts what is pending at a connection: requests without a reply, or channels with receivers. Clones count together.
#[derive(Clone, Default)]
pub(in crate::engine) struct Replies(Arc<Counts>);

#[derive(Default)]
struct Counts {
    pending: AtomicUsize,
    /// How many of the last requests were sent by other threads than the event loop's.
    of_others: AtomicUsize,
}

/// A statement without an answer. Dropping it removes it from the count.
pub(in crate::engine) struct PendingReply(Replies);

impl Replies {
    pub(in crate::engine) fn expect(&self) -> PendingReply {
        self.0.pending.fetch_add(1, SeqCst);
        PendingReply(self.clone())
    }

    /// Replaces the count.
    pub(in crate::engine) fn set(&self, count: usize) {
        self.0.pending.store(count, SeqCst);
    }

    /// Replaces the count of the last requests that were sent by other threads than the event loop's.
    pub(in crate::engine) fn set_of_others(&self, count: usize) {
        self.0.of_others.store(count, SeqCst);
    }

    pub(in crate::engine) fn are_pending(&self) -> bool {
        self.0.pending.load(SeqCst) > 0
    }

    /// Whether a request of the event loop's thread is among them.
    pub(in crate::engine) fn are_awaited(&self) -> bool {
        self.0.pending.load(SeqCst) > self.0.of_others.load(SeqCst)
    }
}

impl Drop for PendingReply {
    fn drop(&mut self) {
        self.0.0.pending.fetch_sub(1, SeqCst);
    }
}

/// The socket, by what polls it.
enum Io {
    Tcp(TcpStream),
    Local(LocalStream),
    EventLoop(Arc<PolledSocket>),
    Closed,
}

impl Stream {
    pub(in crate::engine) async fn connect(endpoint: &Endpoint) -> io::Result<Self> {
        let io = match endpoint {
            Endpoint::Tcp {
                address,
                has_keepalives,
                timeout,
            } => {
                let stream = TcpStream::connect(address).await?;
                stream.set_nodelay(true)?;
                let socket = SockRef::from(&stream);
                #[cfg(target_os = "linux")]
                socket.set_tcp_user_timeout(Some(*timeout))?;
                #[cfg(not(target_os = "linux"))]
                let _ = timeout;
                if *has_keepalives {
                    let (idle, interval) = KEEPALIVE;
                    socket.set_tcp_keepalive(&TcpKeepalive::new().with_time(idle).with_interval(interval))?;
                }
                Io::Tcp(stream)
            }
            Endpoint::Local(path) => Io::Local(LocalStream::connect(path).await?),
        };
        Ok(Stream(Arc::new(Mutex::new(io))))
    }

    pub(in crate::engine) fn handle(&self) -> StreamHandle {
        StreamHandle(self.0.clone())
    }
}

impl StreamHandle {
    /// Passes the socket to an event loop, which polls it from then on. Called while nothing polls the stream. `receivers`: what waits
    /// for messages, which arrive without a request.
    pub(in crate::engine) fn serve_on(
        &self,
        event_loop: &Arc<dyn EventLoop>,
        receivers: &Replies,
        replies: &Replies,
    ) -> io::Result<()> {
        let mut io = self.0.lock();
        let socket = match std::mem::replace(&mut *io, Io::Closed) {
            Io::Tcp(stream) => PolledSocket::of_tcp(stream, receivers.clone(), replies.clone())?,
            Io::Local(stream) => PolledSocket::of_local(stream, receivers.clone(), replies.clone())?,
            Io::EventLoop(socket) => socket,
            Io::Closed => return Err(io::ErrorKind::NotConnected.into()),
        };
        *io = Io::EventLoop(socket.clone());
        drop(io);
        event_loop.watch(Arc::downgrade(&socket) as _);
        event_loop.serve(socket);
        Ok(())
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Io::EventLoop(socket) = &*self.0.lock() {
            socket.close();
        }
    }
}

impl AsyncRead for Stream {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match &mut *self.0.lock() {
            Io::Tcp(stream) => Pin::new(stream).poll_read(context, buffer),
            Io::Local(stream) => Pin::new(stream).poll_read(context, buffer),
            Io::EventLoop(socket) => socket.poll_read(context, buffer),
            Io::Closed => closed(),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match &mut *self.0.lock() {
            Io::Tcp(stream) => Pin::new(stream).poll_write(context, bytes),
            Io::Local(stream) => Pin::new(stream).poll_write(context, bytes),
            Io::EventLoop(socket) => socket.poll_write(context, bytes),
            Io::Closed => closed(),
        }
    }

    /// The socket has no buffer of its own.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut *self.0.lock() {
            Io::Tcp(stream) => Pin::new(stream).poll_shutdown(context),
            Io::Local(stream) => Pin::new(stream).poll_shutdown(context),
            Io::EventLoop(socket) => Poll::Ready(socket.shutdown()),
            Io::Closed => closed(),
        }
    }
}

fn closed<T>() -> Poll<io::Result<T>> {
    Poll::Ready(Err(io::ErrorKind::NotConnected.into()))
}
