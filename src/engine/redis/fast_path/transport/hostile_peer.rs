//! A peer that sends what no server sends: its calls have the same outcomes with and without TLS.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::join_all;
use rustls::{ServerConnection, StreamOwned};
use tokio_rustls::TlsConnector;

use super::super::FastPath;
use super::super::resp_check::tests::{damage, push, reply};
use super::tests::Factory;
use crate::engine::redis::config::tls_config;
use crate::engine::redis::keys::Layout;
use crate::event_loop::Socket;

/// The number of calls, and of bytes of each request.
const CALLS: usize = 8;
const REQUEST: usize = "*1\r\n$4\r\nPING\r\n".len();
/// The number of bytes before them.
const HELLO: usize = "*4\r\n$5\r\nHELLO\r\n$1\r\n3\r\n$7\r\nSETNAME\r\n$18\r\nholdfast-fast-path\r\n".len();

/// Reads all requests, sends the parts one by one, and ends the connection. Then it reads what still arrives: otherwise the system
/// would discard what the other side has not read.
fn answer(mut stream: impl Read + Write, parts: &[Vec<u8>], mut socket: TcpStream) {
    let mut requests = [0; HELLO + CALLS * REQUEST];
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

/// Returns the outcome of each call to a peer that sends these parts, as text, and the messages of the channel.
async fn outcomes(tls: Option<&Factory>, parts: Vec<Vec<u8>>) -> Vec<String> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
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
    let stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let (stream, session) = match tls {
        None => (stream, None),
        Some(factory) => {
            let connector = TlsConnector::from(tls_config(&factory.trust).unwrap());
            let stream = connector
                .connect("localhost".try_into().unwrap(), stream)
                .await
                .unwrap();
            let (stream, session) = stream.into_inner();
            (stream, Some(session))
        }
    };
    let limit = Duration::from_secs(60);
    let fast_path = FastPath::new(stream, session, Some(7), Layout::new("lock:", true), limit).unwrap();
    let messages = Arc::new(Mutex::new(Vec::new()));
    let received = messages.clone();
    let handler = move |message: &[u8]| received.lock().unwrap().push(format!("message {message:?}"));
    fast_path.subscribe(|| ("to".to_owned(), Arc::new(handler)));
    let ping = redis::cmd("PING");
    let calls = join_all((0..CALLS).map(|_| fast_path.call(&ping)));
    let event_loop = async {
        while fast_path.flush() && fast_path.readable() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        std::future::pending::<()>().await;
    };
    let outcomes = tokio::select! {
        outcomes = calls => outcomes,
        () = event_loop => unreachable!(),
        () = tokio::time::sleep(limit) => panic!("a call has no outcome"),
    };
    fast_path.end();
    peer.join().unwrap();
    let shown = outcomes.into_iter().map(|outcome| match outcome {
        Ok(value) => format!("{value:?}"),
        // How a connection ends differs.
        Err(error) if error.is_io_error() => "broken".to_owned(),
        Err(error) => format!("{error:?}"),
    });
    shown.chain(std::mem::take(&mut *messages.lock().unwrap())).collect()
}

#[tokio::test]
async fn what_a_peer_sends_has_the_same_outcome_with_and_without_tls() {
    let Some(factory) = Factory::new() else { return };
    let mut random = fastrand::Rng::with_seed(5);
    let (mut whole, mut broken, mut messages) = (0, 0, 0);
    for round in 0..150 {
        let mut bytes = random
            .choice([&b"%0\r\n"[..], b"-ERR no\r\n", b"+OK\r\n"])
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
        whole += CALLS - count;
        messages += plain.len() - CALLS;
    }
    assert!(
        whole > 100 && broken > 100 && messages > 20,
        "{whole} replies, {broken} broken calls, {messages} messages"
    );
}
