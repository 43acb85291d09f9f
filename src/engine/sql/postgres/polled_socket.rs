//! A socket that the caller's event loop polls.
//!
//! The loop wakes the task of the connection when data arrives. While the loop's thread is blocked, that task may run on another one,
//! which reads and writes the socket by itself.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;
use tokio::io::ReadBuf;

use crate::event_loop::{EventLoop, Socket};

/// A socket. It does not block.
pub(super) struct PolledSocket {
    socket: socket2::Socket,
    event_loop: Arc<dyn EventLoop>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Wakes the task of the connection when data arrives.
    reader: Option<Waker>,
    /// Wakes it when the socket takes more.
    writer: Option<Waker>,
    /// The socket did not take the last write.
    is_blocked: bool,
    /// The last read returned all data, and no more has arrived.
    is_drained: bool,
    /// Something was sent after the last read.
    awaits: bool,
    is_closed: bool,
}

impl PolledSocket {
    pub(super) fn new(socket: socket2::Socket, event_loop: Arc<dyn EventLoop>) -> Arc<Self> {
        let state = Mutex::default();
        Arc::new(PolledSocket {
            socket,
            event_loop,
            state,
        })
    }

    pub(super) fn poll_read(&self, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let mut state = self.state.lock();
        // Another thread has to look for itself: the loop may be blocked.
        if !(state.is_drained && self.event_loop.is_here()) {
            let space = buffer.initialize_unfilled();
            let size = space.len();
            match retried(|| (&self.socket).read(space)) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
                Ok(count) => {
                    // At the end of the stream there is more to read: the end.
                    state.is_drained = count > 0 && count < size;
                    state.awaits = false;
                    buffer.advance(count);
                    return Poll::Ready(Ok(()));
                }
            }
        }
        state.is_drained = true;
        state.reader = Some(context.waker().clone());
        Poll::Pending
    }

    pub(super) fn poll_write(&self, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let mut state = self.state.lock();
        match retried(|| (&self.socket).write(bytes)) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                state.writer = Some(context.waker().clone());
                state.is_blocked = true;
                Poll::Pending
            }
            written => {
                (state.awaits, state.is_blocked) = (true, false);
                Poll::Ready(written)
            }
        }
    }

    pub(super) fn shutdown(&self) -> io::Result<()> {
        self.socket.shutdown(Shutdown::Write)
    }

    /// Closes the connection. The loop stops polling the socket.
    pub(super) fn close(&self) {
        self.state.lock().is_closed = true;
        // A peer that has already closed the connection makes no difference.
        let _ = self.socket.shutdown(Shutdown::Both);
    }
}

/// Repeats a call of the system that a signal interrupts.
fn retried<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            done => return done,
        }
    }
}

impl Socket for PolledSocket {
    fn descriptor(&self) -> RawFd {
        self.socket.as_raw_fd()
    }

    fn readable(&self) -> bool {
        let mut state = self.state.lock();
        state.is_drained = false;
        let reader = state.reader.take();
        let is_open = !state.is_closed;
        drop(state);
        if let Some(reader) = reader {
            reader.wake();
        }
        is_open
    }

    fn flush(&self) -> bool {
        let mut state = self.state.lock();
        let writer = state.writer.take();
        let is_open = !state.is_closed;
        drop(state);
        if let Some(writer) = writer {
            writer.wake();
        }
        is_open
    }

    fn awaits(&self) -> bool {
        self.state.lock().awaits
    }

    fn is_blocked(&self) -> bool {
        self.state.lock().is_blocked
    }

    fn end(&self) {
        self.close();
        self.readable();
    }
}
