//! A session against a server in memory, whose records are cut, mixed with other messages, and damaged.

use std::io::{self, ErrorKind, Read, Write};
use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConnection, ServerConfig, ServerConnection};

use super::super::resp;
use super::super::resp_check::tests::{damage, reply};
use super::Arrived;
use super::session::Session;
use crate::engine::TlsFiles;
use crate::engine::redis::config::tls_config;
use crate::engine::redis::tests::security::Certificates;

/// A socket in memory.
#[derive(Default)]
struct Wire {
    to_client: Vec<u8>,
    to_server: Vec<u8>,
    /// How many bytes `to_server` takes.
    room: usize,
    /// The most bytes that one read returns.
    most: usize,
    is_closed: bool,
    /// The number of reads.
    reads: usize,
    /// The error of the writes that begin when there is no room, in place of `WouldBlock`.
    error: Option<ErrorKind>,
}

impl Read for Wire {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.reads += 1;
        let count = self.to_client.len().min(into.len()).min(self.most);
        if count == 0 && !self.is_closed {
            return Err(ErrorKind::WouldBlock.into());
        }
        into[..count].copy_from_slice(&self.to_client[..count]);
        self.to_client.drain(..count);
        Ok(count)
    }
}

impl Write for Wire {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = bytes.len().min(self.room);
        if count == 0 {
            return Err(self.error.unwrap_or(ErrorKind::WouldBlock).into());
        }
        self.room -= count;
        self.to_server.extend_from_slice(&bytes[..count]);
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Passes bytes to one side. (A read of no bytes would be the end of the stream.)
macro_rules! feed {
    ($side:expr, $bytes:expr) => {{
        let mut rest = &$bytes[..];
        while !rest.is_empty() {
            $side.read_tls(&mut rest).unwrap();
            $side.process_new_packets().unwrap();
        }
    }};
}

/// A session after its handshake, and its server.
struct Peers {
    session: Session,
    server: ServerConnection,
    wire: Wire,
}

/// Makes pairs of a session and its server.
pub(super) struct Factory {
    _files: Certificates,
    pub(super) trust: TlsFiles,
    pub(super) config: Arc<ServerConfig>,
}

impl Factory {
    /// Returns `None`, after a message, if there is no `openssl`.
    pub(super) fn new() -> Option<Self> {
        Self::of(rustls::ALL_VERSIONS)
    }

    /// As `new`, with a server that speaks these versions of TLS.
    fn of(versions: &[&'static rustls::SupportedProtocolVersion]) -> Option<Self> {
        let files = Certificates::make()?;
        let chain = CertificateDer::pem_file_iter(files.path("server.pem")).unwrap();
        let key = PrivateKeyDer::from_pem_file(files.path("server.key")).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(versions)
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(chain.map(Result::unwrap).collect(), key)
            .unwrap();
        let trust = TlsFiles {
            ca_file: Some(files.path("ca.pem")),
            ..TlsFiles::default()
        };
        Some(Factory {
            _files: files,
            trust,
            config: Arc::new(config),
        })
    }

    /// Shakes hands. `early`: what the server sends together with its handshake.
    fn peers(&self, early: &[u8]) -> Peers {
        let name = "localhost".try_into().unwrap();
        let mut client = ClientConnection::new(tls_config(&self.trust).unwrap(), name).unwrap();
        let mut server = ServerConnection::new(self.config.clone()).unwrap();
        while client.is_handshaking() || server.is_handshaking() || client.wants_write() {
            let mut bytes = Vec::new();
            while client.wants_write() {
                client.write_tls(&mut bytes).unwrap();
            }
            feed!(server, bytes);
            bytes.clear();
            while server.wants_write() {
                server.write_tls(&mut bytes).unwrap();
            }
            feed!(client, bytes);
        }
        let mut peers = Peers {
            session: Session::new(client),
            server,
            wire: Wire {
                room: usize::MAX,
                most: usize::MAX,
                ..Wire::default()
            },
        };
        if !early.is_empty() {
            peers.say(early);
            let bytes = std::mem::take(&mut peers.wire.to_client);
            feed!(peers.session.tls, bytes);
        }
        peers
    }
}

impl Peers {
    /// Lets the server send bytes, in records of its own.
    fn say(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let count = self.server.writer().write(bytes).unwrap();
            bytes = &bytes[count..];
            self.send();
        }
    }

    fn send(&mut self) {
        while self.server.wants_write() {
            self.server.write_tls(&mut self.wire.to_client).unwrap();
        }
    }

    fn read(&mut self, into: &mut [u8]) -> io::Result<Arrived> {
        self.session.read(&mut self.wire, into)
    }

    /// Reads until nothing more arrives, as the fast path does, into a buffer of this size each time.
    fn read_all(&mut self, size: usize) -> io::Result<Vec<u8>> {
        let (mut all, mut into) = (Vec::new(), vec![0; size]);
        loop {
            match self.read(&mut into) {
                Ok(Arrived { count: 0, .. }) => return Err(ErrorKind::ConnectionAborted.into()),
                Ok(Arrived { count, more }) => {
                    all.extend_from_slice(&into[..count]);
                    // Else the event loop waits for the socket.
                    if !more && self.wire.to_client.is_empty() {
                        return Ok(all);
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock && !self.wire.to_client.is_empty() => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(all),
                Err(error) => return Err(error),
            }
        }
    }

    /// Returns what has arrived at the server.
    fn heard(&mut self) -> Vec<u8> {
        let mut heard = Vec::new();
        let bytes = std::mem::take(&mut self.wire.to_server);
        let mut bytes = &bytes[..];
        while !bytes.is_empty() {
            self.server.read_tls(&mut bytes).unwrap();
            self.server.process_new_packets().unwrap();
            match self.server.reader().read_to_end(&mut heard) {
                Err(error) if error.kind() != ErrorKind::WouldBlock => panic!("{error}"),
                _ => {}
            }
        }
        heard
    }
}

/// Writes some replies, with a few that are longer than a record.
fn replies(random: &mut fastrand::Rng) -> Vec<u8> {
    let mut bytes = Vec::new();
    for _ in 0..random.usize(1..6) {
        if random.u8(..8) == 0 {
            let size = random.usize(..70_000);
            bytes.extend_from_slice(format!("${size}\r\n{}\r\n", "x".repeat(size)).as_bytes());
        } else {
            reply(random, 3, &mut bytes);
        }
    }
    bytes
}

#[test]
fn replies_are_the_same_wherever_records_and_reads_are_cut() {
    let Some(factory) = Factory::new() else { return };
    let mut random = fastrand::Rng::with_seed(1);
    for round in 0..300 {
        let mut expected = replies(&mut random);
        // What the handshake has already decrypted fits into one record.
        expected.truncate(if round % 3 == 0 { 4000 } else { expected.len() });
        let mut peers = factory.peers(if round % 3 == 0 { &expected } else { b"" });
        if round % 3 != 0 {
            let mut rest = &expected[..];
            while !rest.is_empty() {
                let (part, more) = rest.split_at(random.usize(1..=rest.len()));
                peers.say(part);
                rest = more;
                if random.bool() {
                    peers.server.refresh_traffic_keys().unwrap();
                    peers.send();
                }
            }
        }
        peers.wire.most = random.usize(1..40_000);
        let size = *random.choice(&[1, 7, 100, 16_384, 65_536]).unwrap();
        let read = peers.read_all(size).unwrap();
        assert!(
            read == expected,
            "round {round}: {} of {} bytes",
            read.len(),
            expected.len()
        );
        // A key update of the server is answered, and requests arrive.
        assert_eq!(peers.session.write(&mut peers.wire, b"PING").unwrap(), 4);
        assert_eq!(peers.heard(), b"PING");
    }
}

#[test]
fn damaged_records_end_the_session_and_are_never_read_as_replies() {
    let Some(factory) = Factory::new() else { return };
    let mut random = fastrand::Rng::with_seed(2);
    let mut refused = 0;
    for round in 0..300 {
        let expected = replies(&mut random);
        let mut peers = factory.peers(b"");
        peers.say(&expected);
        for _ in 0..random.usize(1..4) {
            damage(&mut random, &mut peers.wire.to_client);
        }
        peers.wire.most = random.usize(1..40_000);
        peers.wire.is_closed = true;
        let mut read = Vec::new();
        let mut into = [0; 1000];
        let error = loop {
            match peers.read(&mut into) {
                Ok(Arrived { count: 0, .. }) => panic!("round {round}: no end was announced"),
                Ok(Arrived { count, .. }) => read.extend_from_slice(&into[..count]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => break error,
            }
        };
        assert!(expected.starts_with(&read), "round {round}: {read:?}");
        refused += usize::from(error.to_string().contains("no part of the TLS session"));
        // What was read of the replies is split as without TLS.
        if let Ok(Some(length)) = resp::length(&read) {
            assert_eq!(resp::length(&expected).unwrap(), Some(length));
        }
    }
    assert!(refused > 100, "{refused}");
}

#[test]
fn arbitrary_bytes_after_the_handshake_end_the_session() {
    let Some(factory) = Factory::new() else { return };
    let mut random = fastrand::Rng::with_seed(3);
    for _ in 0..300 {
        let mut peers = factory.peers(b"");
        // With the head of a record, too: rustls waits for the rest of the largest one only.
        let head: &[u8] = random
            .choice([&b""[..], &[23, 3, 3], &[22, 3, 3, 0, 9], &[21, 3, 3, 0, 2]])
            .unwrap();
        peers.wire.to_client = head.to_vec();
        peers.wire.to_client.extend((0..20_000).map(|_| random.u8(..)));
        let error = peers.read_all(100).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::BrokenPipe, "{error}");
        assert!(peers.read_all(100).is_err(), "it stays ended");
    }
}

#[test]
fn an_announced_end_comes_after_the_last_reply_and_another_end_is_an_error() {
    let Some(factory) = Factory::new() else { return };
    let mut into = [0; 100];
    let mut peers = factory.peers(b"");
    peers.say(b"+OK\r\n");
    peers.server.send_close_notify();
    peers.send();
    assert_eq!(peers.read(&mut into).unwrap(), Arrived { count: 5, more: true });
    assert_eq!(peers.read(&mut into).unwrap(), Arrived { count: 0, more: false });
    let mut peers = factory.peers(b"");
    peers.say(b"+OK\r\n");
    peers.wire.is_closed = true;
    assert_eq!(peers.read(&mut into).unwrap().count, 5);
    assert_eq!(peers.read(&mut into).unwrap_err().kind(), ErrorKind::UnexpectedEof);
}

#[test]
fn an_alert_is_an_error_that_names_it() {
    let Some(factory) = Factory::new() else { return };
    let mut peers = factory.peers(b"");
    // The server cannot read this record, and says so.
    peers
        .server
        .read_tls(&mut &[&[23, 3, 3, 0, 40][..], &[0; 40]].concat()[..])
        .unwrap();
    assert!(peers.server.process_new_packets().is_err());
    peers.send();
    let error = peers.read(&mut [0; 100]).unwrap_err();
    assert_eq!(
        (error.kind(), &*error.to_string()),
        (
            ErrorKind::BrokenPipe,
            "the server ended the TLS session with the alert BadRecordMac"
        )
    );
}

#[test]
fn a_reply_before_a_damaged_record_is_read() {
    let Some(factory) = Factory::new() else { return };
    let mut peers = factory.peers(b"");
    peers.say(b"+OK\r\n");
    peers.wire.to_client.extend([&[23, 3, 3, 0, 40][..], &[0; 40]].concat());
    let mut into = [0; 100];
    assert_eq!(peers.read(&mut into).unwrap(), Arrived { count: 5, more: true });
    assert_eq!(peers.read(&mut into).unwrap_err().kind(), ErrorKind::BrokenPipe);
}

#[test]
fn what_is_encrypted_when_a_write_fails_is_not_encrypted_again() {
    let Some(factory) = Factory::new() else { return };
    let mut peers = factory.peers(b"");
    (peers.wire.room, peers.wire.error) = (0, Some(ErrorKind::Other));
    assert_eq!(peers.session.write(&mut peers.wire, b"SET").unwrap(), 3);
    let failed = peers.session.write(&mut peers.wire, b"GET").unwrap_err();
    assert_eq!(failed.kind(), ErrorKind::Other);
    peers.wire.room = usize::MAX;
    peers.session.flush(&mut peers.wire).unwrap();
    assert_eq!(peers.heard(), b"SET");
}

#[test]
fn requests_that_the_socket_has_not_taken_at_the_end_are_not_sent() {
    let Some(factory) = Factory::new() else { return };
    let mut peers = factory.peers(b"");
    peers.wire.room = 10;
    assert_eq!(peers.session.write(&mut peers.wire, b"SET").unwrap(), 3);
    peers.wire.room = usize::MAX;
    peers.session.close(&mut peers.wire);
    assert_eq!((peers.wire.to_server.len(), peers.heard()), (10, Vec::new()));
}

#[test]
fn a_session_of_tls_1_2_ends_before_rustls_discards_requests() {
    let Some(factory) = Factory::of(&[&rustls::version::TLS12]) else {
        return;
    };
    let mut peers = factory.peers(b"");
    peers.session.records_left = 2;
    assert_eq!(peers.session.write(&mut peers.wire, &[0; 20_000]).unwrap(), 20_000);
    let error = peers.session.write(&mut peers.wire, b"SET").unwrap_err();
    assert_eq!(error.to_string(), "the keys of the TLS 1.2 session are used up");
    assert_eq!(peers.heard().len(), 20_000);
}

#[test]
fn what_a_full_socket_does_not_take_stays_in_order_and_within_bounds() {
    let Some(factory) = Factory::new() else { return };
    let mut random = fastrand::Rng::with_seed(4);
    let mut peers = factory.peers(b"");
    let sent: Vec<u8> = (0..1_000_000).map(|_| random.u8(..)).collect();
    let (mut at, mut heard, mut blocked) = (0, Vec::new(), 0);
    while heard.len() < sent.len() {
        peers.wire.room = random.usize(..40_000);
        match peers.session.write(&mut peers.wire, &sent[at..]) {
            Ok(count) => at += count,
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
        }
        if at == sent.len() {
            peers.session.flush(&mut peers.wire).unwrap();
        }
        if peers.session.is_blocked() {
            blocked += 1;
            // Nothing is encrypted before the socket has taken all of what is.
            let room = std::mem::take(&mut peers.wire.room);
            let refused = peers.session.write(&mut peers.wire, b"more").unwrap_err();
            assert_eq!((refused.kind(), room), (ErrorKind::WouldBlock, 0));
        }
        heard.extend(peers.heard());
        assert!(
            at - heard.len() <= 64 * 1024,
            "{} bytes are encrypted and not sent",
            at - heard.len()
        );
    }
    assert!(heard == sent && blocked > 10, "{blocked}");
}

#[test]
fn messages_without_a_reply_cost_one_read_per_tick_and_too_many_of_them_end_the_session() {
    let Some(factory) = Factory::new() else { return };
    let mut peers = factory.peers(b"");
    let mut into = [0; 100];
    let error = (0..1000)
        .find_map(|_| {
            peers.server.refresh_traffic_keys().unwrap();
            peers.send();
            let before = peers.wire.reads;
            let error = peers.read(&mut into).unwrap_err();
            assert_eq!(peers.wire.reads, before + 1);
            (error.kind() != ErrorKind::WouldBlock).then_some(error)
        })
        .expect("a limit");
    assert!(error.to_string().contains("no part of the TLS session"), "{error}");
}
