//! A TLS session that reads and writes a socket without blocking.
//!
//! # Behavior
//! rustls does no I/O itself. One read of the socket takes all records that have arrived, up to [`RECEIVED`]; one write sends all
//! records of a flush. Memory is bounded in both directions: plaintext is decrypted when there is room for it, and encrypted
//! only when the socket has taken all earlier records. So a request that the socket has not taken can be removed, as without TLS
//! (`unsent.rs`).
//!
//! Session tickets and key updates of the server arrive between the replies, and rustls handles them. It ends a session whose
//! peer sends too many of them. A read of the socket that contains no reply ends the tick, so that a peer cannot keep the
//! event loop busy with them.

use std::io::{self, ErrorKind, Read, Write};

use rustls::{ClientConnection, Error, ProtocolVersion};

use super::Arrived;

/// How much is read from the socket at once: two of the largest records.
const RECEIVED: usize = 32 * 1024;
/// The most plaintext in a record.
const RECORD: usize = 16 * 1024;
/// After how many records a session of TLS 1.2, which cannot update its keys, ends. rustls discards what is written after 2^24.
const RECORDS: u64 = 1 << 23;

/// A TLS session after its handshake, and the records that were read from the socket.
pub(super) struct Session {
    pub(super) tls: ClientConnection,
    /// What was read from the socket, and from where on and up to where rustls does not have it yet.
    received: Box<[u8]>,
    at: usize,
    end: usize,
    /// Why the session has ended. What was decrypted before is read first.
    ended: Option<Error>,
    /// How many records TLS 1.2 may still have.
    pub(super) records_left: u64,
}

impl Session {
    pub(super) fn new(tls: ClientConnection) -> Self {
        Session {
            tls,
            received: vec![0; RECEIVED].into(),
            at: 0,
            end: 0,
            ended: None,
            records_left: RECORDS,
        }
    }

    /// Reads replies. Decrypts what is here before it reads the socket, once.
    pub(super) fn read(&mut self, socket: &mut (impl Read + Write), into: &mut [u8]) -> io::Result<Arrived> {
        let arrived = self.decrypt(socket, into);
        match arrived {
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            arrived => return arrived,
        }
        self.at = 0;
        self.end = 0;
        self.end = socket.read(&mut self.received)?;
        if self.end == 0 {
            // The end of the stream, which rustls has to see: it knows whether the server announced it.
            self.tls.read_tls(&mut io::empty())?;
        }
        let is_full = self.end == self.received.len();
        let mut arrived = self.decrypt(socket, into)?;
        arrived.more |= is_full;
        Ok(arrived)
    }

    /// Decrypts what was read from the socket, until there is no more of it or `into` is full.
    ///
    /// # Errors
    /// `WouldBlock` if there is no whole record with a reply.
    fn decrypt(&mut self, socket: &mut impl Write, into: &mut [u8]) -> io::Result<Arrived> {
        let mut count = 0;
        while count < into.len() {
            match self.tls.reader().read(&mut into[count..]) {
                // The server announced the end.
                Ok(0) => break,
                Ok(read) => count += read,
                Err(error) if error.kind() != ErrorKind::WouldBlock => match count {
                    0 => return Err(error),
                    _ => break,
                },
                Err(nothing) if self.at == self.end || self.ended.is_some() => match (count, &self.ended) {
                    (0, Some(error)) => return Err(broken(error)),
                    (0, None) => return Err(nothing),
                    (_, ended) => {
                        return Ok(Arrived {
                            count,
                            more: ended.is_some(),
                        });
                    }
                },
                Err(_) => {
                    let mut rest = &self.received[self.at..self.end];
                    self.tls.read_tls(&mut rest)?;
                    self.at = self.end - rest.len();
                    if let Err(error) = self.tls.process_new_packets() {
                        // The alert for the server.
                        let _ = self.tls.write_tls(socket);
                        self.ended = Some(error);
                    }
                }
            }
        }
        Ok(Arrived { count, more: count > 0 })
    }

    /// Encrypts and writes requests, if the socket has taken all earlier records. Returns how many bytes are encrypted: these are
    /// never encrypted again. An error of their write is that of the next one.
    pub(super) fn write(&mut self, socket: &mut impl Write, bytes: &[u8]) -> io::Result<usize> {
        self.send(socket)?;
        if self.tls.protocol_version() == Some(ProtocolVersion::TLSv1_2) {
            let records = bytes.len().div_ceil(RECORD) as u64;
            let left = self.records_left.checked_sub(records);
            let used_up = || io::Error::new(ErrorKind::BrokenPipe, "the keys of the TLS 1.2 session are used up");
            self.records_left = left.ok_or_else(used_up)?;
        }
        let mut count = self.tls.writer().write(bytes)?;
        if count == 0 {
            // rustls has updated the keys in the place of the first record.
            count = self.tls.writer().write(bytes)?;
        }
        let _ = self.send(socket);
        Ok(count)
    }

    /// Writes the records as far as the socket takes them.
    pub(super) fn flush(&mut self, socket: &mut impl Write) -> io::Result<()> {
        match self.send(socket) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(()),
            sent => sent,
        }
    }

    /// Writes all records.
    ///
    /// # Errors
    /// `WouldBlock` if the socket does not take all of them.
    fn send(&mut self, socket: &mut impl Write) -> io::Result<()> {
        while self.tls.wants_write() {
            match self.tls.write_tls(socket) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    pub(super) fn is_blocked(&self) -> bool {
        self.tls.wants_write()
    }

    /// Announces the end to the server, if the socket has taken all requests. Those that it has not taken are dropped: their
    /// callers know them as broken.
    pub(super) fn close(&mut self, socket: &mut impl Write) {
        if !self.tls.wants_write() {
            self.tls.send_close_notify();
            let _ = self.send(socket);
        }
    }
}

/// Returns the error of a session that has ended. It says nothing about certificates, which the handshake has checked, so it is
/// the error of a broken connection.
fn broken(error: &Error) -> io::Error {
    let text = match error {
        Error::AlertReceived(alert) => format!("the server ended the TLS session with the alert {alert:?}"),
        error => format!("the server sent data that is no part of the TLS session: {error}"),
    };
    io::Error::new(ErrorKind::BrokenPipe, text)
}
