//! Explains why a connection failed, and what to do about it.

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;

use redis::RedisError;
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
const NO_CLUSTER: &str = "the server is not in a cluster: use redis://HOST:PORT";
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
        _ if detail.contains("cluster support disabled") => Some(NO_CLUSTER),
        _ if detail.starts_with("unknown command") && detail.to_ascii_uppercase().contains("SENTINEL") => {
            Some(NO_SENTINEL)
        }
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

fn tls_error(error: &RedisError) -> Option<&TlsError> {
    super::error::io_error(error)?.get_ref()?.downcast_ref()
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
