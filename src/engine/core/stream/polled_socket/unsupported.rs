//! Replaces `polled_socket.rs` on systems where no event loop polls a socket. Its types have no values.

use std::io;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use super::Replies;
use crate::event_loop::Socket;

/// A Unix socket. These systems have none.
pub(super) enum LocalStream {}

impl LocalStream {
    pub(super) async fn connect(_: &Path) -> io::Result<Self> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

impl AsyncRead for LocalStream {
    fn poll_read(self: Pin<&mut Self>, _: &mut Context<'_>, _: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match *self {}
    }
}

impl AsyncWrite for LocalStream {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, _: &[u8]) -> Poll<io::Result<usize>> {
        match *self {}
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        match *self {}
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        match *self {}
    }
}

/// A socket that cannot exist.
pub(super) enum PolledSocket {}

impl PolledSocket {
    pub(super) fn of_tcp(_: TcpStream, _: Replies, _: Replies) -> io::Result<Arc<Self>> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(super) fn of_local(stream: LocalStream, _: Replies, _: Replies) -> io::Result<Arc<Self>> {
        match stream {}
    }

    pub(super) fn poll_read(&self, _: &mut Context<'_>, _: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match *self {}
    }

    pub(super) fn poll_write(&self, _: &mut Context<'_>, _: &[u8]) -> Poll<io::Result<usize>> {
        match *self {}
    }

    pub(super) fn shutdown(&self) -> io::Result<()> {
        match *self {}
    }

    pub(super) fn close(&self) {
        match *self {}
    }
}

impl Socket for PolledSocket {
    fn readable(&self) -> bool {
        match *self {}
    }

    fn flush(&self) -> bool {
        match *self {}
    }

    fn is_busy(&self) -> bool {
        match *self {}
    }

    fn is_watched(&self) -> bool {
        match *self {}
    }

    fn awaits(&self) -> bool {
        match *self {}
    }

    fn is_blocked(&self) -> bool {
        match *self {}
    }

    fn end(&self) {
        match *self {}
    }
}
