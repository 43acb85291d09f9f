//! Carries the bytes of a fast path on its socket: as they are, or in TLS records.

#[cfg(test)]
mod hostile_peer;
mod session;
#[cfg(test)]
mod tests;

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsRawFd, RawFd};

use parking_lot::Mutex;
use rustls::ClientConnection;

use self::session::Session;

/// The socket of a fast path. It does not block.
pub(super) struct Transport {
    socket: TcpStream,
    /// With TLS. Used under the lock of the fast path's state, except at its end.
    session: Option<Mutex<Session>>,
}

/// What a read has returned.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Arrived {
    /// In bytes. 0: the peer has closed the connection.
    pub(super) count: usize,
    /// Another read may return more at once.
    pub(super) more: bool,
}

impl Transport {
    /// `session`: the TLS session on this socket, after its handshake.
    pub(super) fn new(socket: TcpStream, session: Option<ClientConnection>) -> Self {
        let session = session.map(|session| Mutex::new(Session::new(session)));
        Transport { socket, session }
    }

    /// Reads what has arrived, with at most one read of the socket. `into` is not empty.
    ///
    /// # Errors
    /// `WouldBlock` if nothing has arrived.
    pub(super) fn read(&self, into: &mut [u8]) -> io::Result<Arrived> {
        match &self.session {
            None => {
                let count = (&self.socket).read(into)?;
                let more = count == into.len();
                Ok(Arrived { count, more })
            }
            Some(session) => session.lock().read(&mut &self.socket, into),
        }
    }

    /// Writes a part of `bytes`, and returns its length. That part can no longer be removed.
    ///
    /// # Errors
    /// `WouldBlock` if the socket takes nothing now.
    pub(super) fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        match &self.session {
            None => (&self.socket).write(bytes),
            Some(session) => session.lock().write(&mut &self.socket, bytes),
        }
    }

    /// Writes the records that the socket did not take earlier, as far as it takes them now.
    ///
    /// # Errors
    /// As of the socket, except `WouldBlock`.
    pub(super) fn flush(&self) -> io::Result<()> {
        self.session
            .as_ref()
            .map_or(Ok(()), |session| session.lock().flush(&mut &self.socket))
    }

    /// Whether there are records that the socket did not take.
    pub(super) fn is_blocked(&self) -> bool {
        self.session.as_ref().is_some_and(|session| session.lock().is_blocked())
    }

    /// Ends the connection in both directions.
    pub(super) fn close(&self) {
        if let Some(session) = &self.session {
            session.lock().close(&mut &self.socket);
        }
        // A peer that has already closed the connection makes no difference.
        let _ = self.socket.shutdown(Shutdown::Both);
    }
}

impl AsRawFd for Transport {
    fn as_raw_fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}
