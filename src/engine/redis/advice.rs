//! Explains why a connection failed, and what to do about it.

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;

use redis::{RedisError, Value};
use rustls::{AlertDescription, Error as TlsError};

use crate::engine::tls::CertificateFault;

/// A server that is not what the URL says.
#[derive(Debug, Clone)]
pub(super) struct WrongServer {
    pub(super) address: Arc<str>,
    pub(super) kind: Kind,
}

/// The kind of a server that the URL does not fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// A server with TLS, for a URL without it.
    WithTls,
    /// A Redis server without TLS, for a URL with it.
    WithoutTls,
    Http,
    Mongodb,
    /// A sentinel, for the URL of a server.
    Sentinel,
    /// A node of a cluster, for the URL of a server.
    ClusterNode,
    /// A server, for the URL of a cluster.
    NotInCluster,
}

impl fmt::Display for WrongServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self.kind {
            Kind::WithTls => {
                "expects TLS: begin the URL with rediss instead of redis (or set the option tls), or use the port without TLS"
            }
            Kind::WithoutTls => {
                "is a Redis server without TLS: begin the URL with redis instead of rediss (or omit the option tls), or use the port with TLS"
            }
            Kind::Http => "is an HTTP server, not Redis: check the host and the port in the URL",
            Kind::Mongodb => "is a MongoDB server, not Redis: begin the URL with mongodb://, or check the port",
            Kind::Sentinel => {
                "is a Redis Sentinel, which stores no locks: use redis+sentinel://HOST:PORT/MASTER, with the name of the \
                 master, or the address of the Redis server"
            }
            Kind::NotInCluster => "is not a node of a Redis Cluster: use redis://HOST:PORT",
            Kind::ClusterNode => {
                "is a node of a Redis Cluster, and serves only a part of the names: use redis+cluster://HOST:PORT"
            }
        };
        write!(f, "{} {text}", self.address)
    }
}

const NO_PASSWORD: &str = "the server requires a login: put it into the URL (redis://USER:PASSWORD@HOST), or set the \
                           options username and password";
const WRONG_PASSWORD: &str = "check the user name and the password; in a URL, special characters are percent-encoded";
const NO_SENTINEL_PASSWORD: &str = "this sentinel requires a login of its own: add ?sentinelPassword=PASSWORD to the URL, and \
                                    sentinelUsername if it has users";
const WRONG_SENTINEL_PASSWORD: &str = "check sentinelUsername and sentinelPassword in the URL, the login at the sentinels; special \
                                       characters are percent-encoded";
const NO_DATABASE: &str = "the server does not have the database in the URL; its setting \"databases\" is the number of \
                           databases, which are numbered from 0";
const NO_HELLO: &str = "Redis 6.2 or newer with the command HELLO is needed, which this server does not have: remove rename-command for \
                        HELLO in its configuration";
const NO_COMMAND: &str = "locks need this command: remove its rename-command in the configuration of the server";
const NO_KEYS: &str = "the user needs the keys that begin with the keyPrefix and those that begin with holdfast:, by default ~lock:* \
                       and ~holdfast:*";
const NO_CHANNELS: &str = "the user needs the channels that begin with holdfast:, &holdfast:*";
const NO_SENTINEL: &str = "the server is no Redis Sentinel: use the address of a Sentinel (default port 26379), or use redis://HOST:PORT for the server itself";
const UNTRUSTED: &str = "the certificate of the server is from an authority that is not trusted here: set tls.caFile or \
                         tls.ca to the certificate of that authority";
const OTHER_NAME: &str = "the certificate of the server is for another host name: use that name in the URL, or set \
                          tls.servername to it";
const NO_CERTIFICATE: &str = "the server requires a client certificate that it trusts: set tls.certFile and tls.keyFile (or tls.cert and tls.key)";

/// Returns what to do about an error of a connection, if that is known.
pub(super) fn advice(error: &RedisError) -> Option<&'static str> {
    if let Some(tls) = tls_error(error) {
        return of_tls(tls);
    }
    let detail = error.detail().unwrap_or_default();
    match error.code().unwrap_or_default() {
        "NOAUTH" => Some(NO_PASSWORD),
        "WRONGPASS" => Some(WRONG_PASSWORD),
        _ if detail.contains("DB index is out of range") => Some(NO_DATABASE),
        _ if ["access a key", "access one of the keys"]
            .iter()
            .any(|text| detail.contains(text)) =>
        {
            Some(NO_KEYS)
        }
        _ if detail.contains("access a channel") => Some(NO_CHANNELS),
        _ if error.kind() == redis::ErrorKind::RESP3NotSupported => Some(NO_HELLO),
        _ if detail.starts_with("unknown command") => match detail.to_ascii_uppercase() {
            command if command.contains("SENTINEL") => Some(NO_SENTINEL),
            command if command.contains("HELLO") => Some(NO_HELLO),
            _ => Some(NO_COMMAND),
        },
        _ => None,
    }
}

fn of_tls(error: &TlsError) -> Option<&'static str> {
    use AlertDescription::{BadCertificate, CertificateRequired, UnknownCA};
    match (CertificateFault::of(error), error) {
        (Some(CertificateFault::Untrusted), _) => Some(UNTRUSTED),
        (Some(CertificateFault::OtherName), _) => Some(OTHER_NAME),
        (Some(CertificateFault::Expired), _) => Some(CertificateFault::EXPIRED),
        (None, TlsError::AlertReceived(CertificateRequired | UnknownCA | BadCertificate)) => Some(NO_CERTIFICATE),
        (None, _) => None,
    }
}

/// Returns the error of TLS under an error of the driver.
pub(super) fn tls_error(error: &RedisError) -> Option<&TlsError> {
    super::error::io_error(error)?.get_ref()?.downcast_ref()
}

/// Returns an error without the arguments of the refused command, which the server repeats for an unknown one: they may be a
/// login. Every error of the driver passes through here before it is shown or becomes the cause of another one.
pub(super) fn without_arguments(error: RedisError) -> RedisError {
    let repeats = |detail: &str| detail.find("with args beginning with");
    let (Some(code), Some(detail)) = (error.code(), error.detail()) else {
        return error;
    };
    let Some(at) = repeats(detail) else { return error };
    let line = format!("-{code} {}\r\n", detail[..at].trim_end_matches([' ', ',']));
    let cut = redis::parse_redis_value(line.as_bytes()).and_then(Value::extract_error);
    // A line that begins with a minus sign is an error.
    cut.err().unwrap_or_else(super::error::broken)
}

/// Writes an error of the driver or of the server in its own words, and what to do about it.
pub(super) fn explain(error: &RedisError, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    said(error, f)?;
    match advice(error) {
        Some(advice) => write!(f, " ({advice})"),
        None => Ok(()),
    }
}

/// Writes an error of a sentinel like [`explain`]. Its login is not that of the server.
pub(super) fn explain_sentinel(error: &RedisError, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    if error.code() == Some("NOAUTH") {
        said(error, f)?;
        return write!(f, " ({NO_SENTINEL_PASSWORD})");
    }
    // With RESP2 the driver does not keep the server's words.
    if error.kind() == redis::ErrorKind::AuthenticationFailed {
        return write!(f, "refuses the login ({WRONG_SENTINEL_PASSWORD})");
    }
    explain(error, f)
}

/// Writes the error of a server in its own words. The driver shows the names of its variants instead.
fn said(error: &RedisError, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let server = error
        .source()
        .and_then(|source| source.downcast_ref::<redis::ServerError>());
    match (server, error.detail()) {
        (Some(server), _) => write!(f, "{} {}", server.code(), server.details().unwrap_or_default()),
        // An error that the driver made from the server's words.
        (None, Some(detail)) => f.write_str(detail),
        (None, None) => fmt::Display::fmt(error, f),
    }
}
