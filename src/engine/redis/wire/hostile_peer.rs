//! A peer that sends what no server sends: its calls have the same outcomes with and without TLS.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::join_all;
use redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ServerConfig, ServerConnection, StreamOwned};

use super::resp_check::tests::{damage, push, reply};
use super::{Opened, Push, Wire, drive};
use crate::engine::TlsFiles;
use crate::engine::core::stream::Replies;
use crate::engine::redis::connection::dial::Dialed;
use crate::engine::redis::connection::liveness::Health;
use crate::engine::redis::keys::Layout;
use crate::engine::redis::tests::security::Certificates;

/// The number of calls, and of bytes of each request.
const CALLS: usize = 8;
const REQUEST: usize = "*1\r\n$4\r\nPING\r\n".len();
/// The number of bytes before them.
const SUBSCRIBE: usize = "*2\r\n$9\r\nSUBSCRIBE\r\n$2\r\nto\r\n".len();

/// The TLS of the peer, and what its clients trust.
struct Factory {
    _files: Certificates,
    trust: TlsFiles,
    config: Arc<ServerConfig>,
}

impl Factory {
    /// Returns `None`, after a message, if there is no `openssl`.
    fn new() -> Option<Self> {
        let files = Certificates::make()?;
        let chain = CertificateDer::pem_file_iter(files.path("server.pem")).unwrap();
        let key = PrivateKeyDer::from_pem_file(files.path("server.key")).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(rustls::ALL_VERSIONS)
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(chain.map(Result::unwrap).collect(), key)
            .unwrap();
        let trust = TlsFiles {
            ca_file: Some(files.path("ca.pem")),
            server_name: Some("localhost".to_owned()),
            ..TlsFiles::default()
        };
        Some(Factory {
            _files: files,
            trust,
            config: Arc::new(config),
        })
    }
}

/// Reads all requests, sends the parts one by one, and ends the connection. Then it reads what still arrives: otherwise the system
/// would discard what the other side has not read.
fn answer(mut stream: impl Read + Write, parts: &[Vec<u8>], mut socket: TcpStream) {
    let mut requests = [0; SUBSCRIBE + CALLS * REQUEST];
    stream.read_exact(&mut requests).unwrap();
    for part in parts {
        // The other side may have ended the connection.
        if stream.write_all(part).and_then(|()| stream.flush()).is_err() {
            return;
        }
    }
    // As above.
    let _ = socket.shutdown(Shutdown::Write);
    let _ = std::io::copy(&mut socket, &mut std::io::sink());
}

/// Returns the outcome of each call to a peer that sends these parts, as text, and the pushes that no call caused.
async fn outcomes(tls: Option<&Factory>, parts: Vec<Vec<u8>>) -> Vec<String> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let config = tls.map(|factory| factory.config.clone());
    let peer = std::thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        stream.set_nodelay(true).unwrap();
        let socket = stream.try_clone().unwrap();
        match config {
            None => answer(stream, &parts, socket),
            Some(config) => {
                let session = ServerConnection::new(config).unwrap();
                answer(StreamOwned::new(session, stream), &parts, socket);
            }
        }
    });
    let server: ConnectionInfo = ConnectionAddr::Tcp("127.0.0.1".to_owned(), port)
        .into_connection_info()
        .unwrap();
    let dialed = Dialed::connect(&server, tls.map(|factory| &factory.trust))
        .await
        .unwrap();
    let opened = Opened {
        io: dialed.io,
        tls_records: u64::MAX,
        replies: Replies::default(),
        version: Some(7),
    };
    let wire = Wire::new(opened, Arc::new(Health::new()), Layout::new("lock:", true), None);
    let pushes = Arc::new(Mutex::new(Vec::new()));
    let received = pushes.clone();
    let receive = move |push: Push| received.lock().unwrap().push(format!("{push:?}"));
    let driver = tokio::spawn(drive(Arc::downgrade(&wire), receive));
    let ping = redis::cmd("PING");
    let calls = async {
        let subscribed = async {
            wire.change_subscription("SUBSCRIBE", "to")
                .await
                .map(|()| "subscribed".into())
        };
        let calls = join_all((0..CALLS).map(|_| wire.call(&ping, false, None)));
        let (subscribed, calls) = tokio::join!(subscribed, calls);
        [subscribed]
            .into_iter()
            .chain(calls.into_iter().map(|call| call.map(|value| format!("{value:?}"))))
    };
    let outcomes = tokio::time::timeout(Duration::from_secs(60), calls)
        .await
        .expect("an outcome for each call");
    wire.end();
    driver.await.unwrap();
    peer.join().unwrap();
    let shown = outcomes.map(|outcome| match outcome {
        Ok(value) => value,
        // How a connection ends differs.
        Err(error) if error.is_io_error() => "broken".to_owned(),
        Err(error) => format!("{error:?}"),
    });
    shown.chain(std::mem::take(&mut *pushes.lock().unwrap())).collect()
}

#[tokio::test]
async fn what_a_peer_sends_has_the_same_outcome_with_and_without_tls() {
    let Some(factory) = Factory::new() else { return };
    let mut random = fastrand::Rng::with_seed(5);
    let (mut whole, mut broken, mut pushes) = (0, 0, 0);
    for round in 0..150 {
        let mut bytes = random
            .choice([
                &b">3\r\n$9\r\nsubscribe\r\n$2\r\nto\r\n:1\r\n"[..],
                b"-ERR no\r\n",
                b"+OK\r\n",
            ])
            .unwrap()
            .to_vec();
        for _ in 0..random.usize(..CALLS + 2) {
            reply(&mut random, 3, &mut bytes);
            (0..random.usize(..3)).for_each(|_| push(&mut random, 1, &mut bytes));
        }
        if random.u8(..4) == 0 {
            // Longer than the buffers.
            let size = random.usize(50_000..300_000);
            bytes.extend(format!("${size}\r\n{}\r\n", "x".repeat(size)).into_bytes());
        }
        for _ in 0..random.usize(..3) {
            damage(&mut random, &mut bytes);
        }
        let (mut parts, mut rest) = (Vec::new(), &bytes[..]);
        while !rest.is_empty() {
            let (part, more) = rest.split_at(random.usize(1..=rest.len()));
            parts.push(part.to_vec());
            rest = more;
        }
        let plain = outcomes(None, parts.clone()).await;
        let secure = outcomes(Some(&factory), parts).await;
        assert_eq!(plain, secure, "round {round}");
        let count = plain.iter().filter(|outcome| *outcome == "broken").count();
        broken += count;
        whole += 1 + CALLS - count;
        pushes += plain.len() - 1 - CALLS;
    }
    assert!(
        whole > 100 && broken > 100 && pushes > 20,
        "{whole} replies, {broken} broken calls, {pushes} pushes"
    );
}
