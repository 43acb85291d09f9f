//! Finds out what kind of server is at an address, to explain a connection that failed or has no answer.
//!
//! A handshake with another kind of server often has no answer that says so: the server waits for more bytes, or closes the
//! connection.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// The time after which the server of a handshake without an answer is probed.
pub(super) const HANDSHAKE: Duration = Duration::from_millis(250);
/// The longest time for one answer to the probe.
const ANSWER: Duration = Duration::from_millis(250);
/// Redis answers it with an error, HTTP servers and MongoDB with an HTTP response. It has no effect.
const REQUEST: &[u8] = b"GET / HTTP/1.0\r\n\r\n";
/// The first message of a TLS 1.2 handshake (RFC 5246, 7.4.1.2): three cipher suites, the signature algorithms and the groups. A
/// server with TLS answers it with its part of the handshake or with an alert.
const CLIENT_HELLO: &[u8] = b"\x16\x03\x01\x00\x49\x01\x00\x00\x45\x03\x03holdfast probes what is here....\x00\
      \x00\x06\xc0\x2f\xc0\x2b\x00\x2f\x01\x00\x00\x16\x00\x0d\x00\x08\x00\x06\x04\x03\x08\x04\x04\x01\
      \x00\x0a\x00\x06\x00\x04\x00\x1d\x00\x17";
/// The types of the TLS records that answer a handshake.
const TLS_ALERT: u8 = 0x15;
const TLS_HANDSHAKE: u8 = 0x16;

/// What answers at an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Peer {
    Redis,
    Tls,
    Http,
    Mongodb,
}

/// Returns what answers at an address. `None`: no answer, or an unknown one.
pub(super) async fn identify(host: &str, port: u16) -> Option<Peer> {
    let answer = ask(host, port, REQUEST).await.unwrap_or_default();
    match answer.first() {
        Some(b'+' | b'-') => Some(Peer::Redis),
        Some(&TLS_ALERT) => Some(Peer::Tls),
        Some(_) if answer.starts_with(b"HTTP/") => {
            let text = String::from_utf8_lossy(&answer);
            Some(if text.contains("MongoDB") {
                Peer::Mongodb
            } else {
                Peer::Http
            })
        }
        Some(_) => None,
        None => speaks_tls(host, port).await.then_some(Peer::Tls),
    }
}

/// Whether a server answers a TLS handshake.
pub(super) async fn speaks_tls(host: &str, port: u16) -> bool {
    let answer = ask(host, port, CLIENT_HELLO).await.unwrap_or_default();
    matches!(answer.first(), Some(&(TLS_HANDSHAKE | TLS_ALERT)))
}

/// Sends bytes on a new connection, and returns the beginning of the answer. `None`: no connection. Empty: no answer.
async fn ask(host: &str, port: u16, bytes: &[u8]) -> Option<Vec<u8>> {
    let connecting = tokio::time::timeout(ANSWER, TcpStream::connect((host, port)));
    let mut stream = connecting.await.ok()?.ok()?;
    let mut answer = Vec::new();
    let exchange = async {
        stream.write_all(bytes).await?;
        // An HTTP response may arrive in several parts.
        while answer.len() < 512 && stream.read_buf(&mut answer).await? > 0 {
            if !answer.starts_with(b"H") {
                break;
            }
        }
        std::io::Result::Ok(())
    };
    // Without an answer in time, or with an error, what has arrived counts.
    let _ = tokio::time::timeout(ANSWER, exchange).await;
    Some(answer)
}
