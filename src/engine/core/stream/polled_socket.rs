//! A socket that the caller's event loop polls.
//!
//! The loop wakes the task of the connection when data arrives. While the loop's thread is blocked, the watchdog wakes the task, which then runs
//! on the thread of the runtime.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;
use tokio::io::ReadBuf;
use tokio::net::TcpStream;
pub(super) use tokio::net::UnixStream as LocalStream;

use super::Replies;
use crate::event_loop::Socket;

/// A non-blocking socket.
pub(super) struct PolledSocket {
    socket: socket2::Socket,
    /// Counts what waits for messages.
    receivers: Replies,
    replies: Replies,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Wakes the task of the connection when data arrives.
    reader: Option<Waker>,
    /// Wakes the task of the connection when the socket accepts more data.
    writer: Option<Waker>,
    /// Whether the socket's buffer was full at the last write.
    is_blocked: bool,
    /// Whether the last read returned all data, and no event has followed.
    is_drained: bool,
    is_closed: bool,
}

impl PolledSocket {
    pub(super) fn of_tcp(stream: TcpStream, receivers: Replies, replies: Replies) -> io::Result<Arc<Self>> {
        Ok(Self::new(stream.into_std()?.into(), receivers, replies))
    }

    pub(super) fn of_local(stream: LocalStream, receivers: Replies, replies: Replies) -> io::Result<Arc<Self>> {
        Ok(Self::new(stream.into_std()?.into(), receivers, replies))
    }

    fn new(socket: OwnedFd, receivers: Replies, replies: Replies) -> Arc<Self> {
        Arc::new(PolledSocket {
            socket: socket.into(),
            receivers,
            replies,
            state: Mutex::default(),
        })
    }

    pub(super) fn poll_read(&self, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let mut state = self.state.lock();
        // The same on every thread: while the loop's thread is blocked, the watchdog calls `readable`.
        if !state.is_drained {
            let space = buffer.initialize_unfilled();
            let size = space.len();
            match retried(|| (&self.socket).read(space)) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
                Ok(count) => {
                    // A read of 0 bytes is the end of the stream, and is repeated. A closed socket has no further events.
                    state.is_drained = count > 0 && count < size && !state.is_closed;
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
                state.is_blocked = false;
                Poll::Ready(written)
            }
        }
    }

    /// Wakes the task that waits, if there is one. `false`: the connection is closed.
    fn wake(&self, waiting: impl FnOnce(&mut State) -> Option<Waker>) -> bool {
        let mut state = self.state.lock();
        let (waker, is_open) = (waiting(&mut state), !state.is_closed);
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
        is_open
    }

    pub(super) fn shutdown(&self) -> io::Result<()> {
        self.socket.shutdown(Shutdown::Write)
    }

    /// Closes the connection. The loop stops polling the socket.
    pub(super) fn close(&self) {
        self.state.lock().is_closed = true;
        // Fails if the peer has already closed the connection.
        let _ = self.socket.shutdown(Shutdown::Both);
    }
}

/// Repeats a system call while a signal interrupts it.
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
        self.wake(|state| {
            state.is_drained = false;
            state.reader.take()
        })
    }

    fn flush(&self) -> bool {
        self.wake(|state| {
            // Without a writer: the task has been polled, and had nothing more to write.
            state.is_blocked &= state.writer.is_some();
            state.writer.take()
        })
    }

    fn awaits(&self) -> bool {
        self.replies.are_awaited()
    }

    fn is_busy(&self) -> bool {
        self.replies.are_pending() || self.is_blocked()
    }

    fn is_watched(&self) -> bool {
        self.receivers.are_pending() || self.is_busy()
    }

    fn is_blocked(&self) -> bool {
        self.state.lock().is_blocked
    }

    fn end(&self) {
        self.close();
        self.readable();
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
    use std::task::Wake;

    use super::*;

    #[derive(Default)]
    struct Wakes(AtomicUsize);

    impl Wake for Wakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Relaxed);
        }
    }

    impl Wakes {
        fn take(&self) -> usize {
            self.0.swap(0, Relaxed)
        }
    }

    fn pair() -> (Arc<PolledSocket>, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        (
            PolledSocket::new(ours.into(), Replies::default(), Replies::default()),
            theirs,
        )
    }

    fn read(socket: &PolledSocket, wakes: &Arc<Wakes>, size: usize) -> Poll<Vec<u8>> {
        let mut space = vec![0; size];
        let mut buffer = ReadBuf::new(&mut space);
        let waker = wakes.clone().into();
        let polled = socket.poll_read(&mut Context::from_waker(&waker), &mut buffer);
        polled.map(|done| done.map(|()| buffer.filled().to_vec()).unwrap())
    }

    #[test]
    fn data_wakes_the_reader_and_after_a_short_read_the_next_one_waits_for_an_event() {
        let (socket, mut theirs) = pair();
        let wakes = Arc::default();
        assert_eq!(read(&socket, &wakes, 8), Poll::Pending);
        theirs.write_all(b"abc").unwrap();
        assert!(socket.readable());
        assert_eq!(wakes.take(), 1);
        assert_eq!(read(&socket, &wakes, 2), Poll::Ready(b"ab".to_vec()));
        assert_eq!(read(&socket, &wakes, 2), Poll::Ready(b"c".to_vec()));
        theirs.write_all(b"d").unwrap();
        assert_eq!(read(&socket, &wakes, 2), Poll::Pending, "without a system call");
        assert!(socket.readable());
        assert_eq!(read(&socket, &wakes, 2), Poll::Ready(b"d".to_vec()));
    }

    #[test]
    fn a_write_waits_until_the_socket_accepts_more() {
        let (socket, mut theirs) = pair();
        let wakes: Arc<Wakes> = Arc::default();
        let waker = wakes.clone().into();
        let mut context = Context::from_waker(&waker);
        let chunk = [0; 1 << 16];
        let mut sent = 0;
        while let Poll::Ready(count) = socket.poll_write(&mut context, &chunk) {
            sent += count.unwrap();
        }
        assert!(socket.is_blocked());
        assert!(socket.flush() && socket.is_blocked());
        assert_eq!(wakes.take(), 1);
        // The task was polled, and its request was removed meanwhile: the loop does not wait for space any more.
        assert!(socket.flush() && !socket.is_blocked());
        let mut received = vec![0; sent];
        theirs.read_exact(&mut received).unwrap();
        assert!(socket.poll_write(&mut context, &chunk).is_ready());
        assert!(!socket.is_blocked());
    }

    #[test]
    fn the_loop_stops_polling_a_closed_socket_and_the_reader_reads_to_the_end() {
        let (socket, mut theirs) = pair();
        let wakes = Arc::default();
        assert_eq!(read(&socket, &wakes, 8), Poll::Pending);
        theirs.write_all(b"abc").unwrap();
        socket.end();
        assert_eq!(wakes.take(), 1);
        assert!(!socket.readable() && !socket.flush());
        assert_eq!(
            read(&socket, &wakes, 8),
            Poll::Ready(b"abc".to_vec()),
            "data that arrived before the end"
        );
        assert_eq!(read(&socket, &wakes, 8), Poll::Ready(Vec::new()));
        assert_eq!(theirs.read(&mut [0; 8]).unwrap(), 0);
    }
}
