//! Explains a connection to Redis that failed or has no answer by the kind of the server (`engine/probe.rs`).
//!
//! A TLS handshake with a server without TLS, and a command to a server with TLS, have no answer that says so.

use redis::{ConnectionAddr, ErrorKind};

use crate::engine::probe::{HANDSHAKE, Peer, identify};
use crate::engine::redis::config::{RedisConfig, show_address};
use crate::engine::redis::error::{Failure, io_error};

const WITH_TLS: &str =
    "expects TLS: begin the URL with rediss instead of redis (or set the option tls), or use the port without TLS";
const WITHOUT_TLS: &str = "is a Redis server without TLS: begin the URL with redis instead of rediss (or omit the option tls), or use the port with TLS";
const HTTP: &str = "is an HTTP server, not Redis: check the host and the port in the URL";
const MONGODB: &str = "is a MongoDB server, not Redis: begin the URL with mongodb://, or check the port";

/// Runs a handshake. Where it fails or has no answer because the URL is for another kind of server, the error says so.
///
/// # Errors
/// Those of the handshake; [`Failure::WrongServer`].
pub(in super::super) async fn explained<T>(
    config: &RedisConfig,
    handshake: impl Future<Output = Result<T, Failure>>,
) -> Result<T, Failure> {
    let mut handshake = std::pin::pin!(handshake);
    tokio::select! {
        biased;
        outcome = &mut handshake => match outcome {
            Err(failure) if may_be_wrong_server(&failure) => match wrong_server(config).await {
                // A proxy that routes by the first bytes answers the probe with HTTP, and the handshake not at all.
                Some(what) if what != HTTP || is_garbled(&failure) => Err(wrong(config, what)),
                _ => Err(failure),
            },
            outcome => outcome,
        },
        what = async {
            tokio::time::sleep(HANDSHAKE).await;
            // The server may be slow. Only a mix-up of TLS has no answer at all.
            match wrong_server(config).await {
                Some(what @ (WITH_TLS | WITHOUT_TLS)) => what,
                _ => std::future::pending().await,
            }
        } => Err(wrong(config, what)),
    }
}

/// Whether another kind of server may be the reason of a failure.
fn may_be_wrong_server(failure: &Failure) -> bool {
    match failure {
        Failure::Connect { error, .. } | Failure::Call(error) => match error.kind() {
            ErrorKind::Io => {
                use std::io::ErrorKind::{ConnectionRefused, TimedOut};
                io_error(error).is_none_or(|io| !matches!(io.kind(), ConnectionRefused | TimedOut))
            }
            kind => kind == ErrorKind::Parse,
        },
        Failure::NoMaster(_) | Failure::Unexpected(_) => true,
        _ => false,
    }
}

/// Whether the handshake had an answer that was neither Redis's protocol nor TLS.
fn is_garbled(failure: &Failure) -> bool {
    let (Failure::Connect { error, .. } | Failure::Call(error)) = failure else {
        return false;
    };
    let is_invalid = |io: &std::io::Error| io.kind() == std::io::ErrorKind::InvalidData;
    error.kind() == ErrorKind::Parse || io_error(error).is_some_and(is_invalid)
}

/// Probes the server of a URL. `None`: it fits the URL, or did not answer.
async fn wrong_server(config: &RedisConfig) -> Option<&'static str> {
    let address = config.first_address();
    let (host, port, secure) = match address {
        ConnectionAddr::Tcp(host, port) => (host, *port, false),
        ConnectionAddr::TcpTls { host, port, .. } => (host, *port, true),
        _ => return None,
    };
    Some(match (identify(host, port).await?, secure) {
        (Peer::Redis, true) => WITHOUT_TLS,
        (Peer::Tls, false) => WITH_TLS,
        (Peer::Http, _) => HTTP,
        (Peer::Mongodb, _) => MONGODB,
        (Peer::Redis, false) | (Peer::Tls, true) => return None,
    })
}

fn wrong(config: &RedisConfig, what: &'static str) -> Failure {
    Failure::WrongServer(format!("{} {what}", show_address(config.first_address())))
}
