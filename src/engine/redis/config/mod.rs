//! Reads a URL and the settings: everything that a connection needs.

#[cfg(test)]
mod tests;
mod url;

use std::sync::Arc;
use std::time::Duration;

use redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo, RedisConnectionInfo};
use rustls::pki_types::ServerName;

pub(super) use self::url::Sentinels;
use self::url::Source;
use super::keys::Layout;
use crate::engine::tls::{Pem, Verified, client_config};
use crate::engine::{Credentials, Settings, TlsFiles, Warnings};
use crate::error::LockError;

const DEFAULT_PREFIX: &str = "lock:";
/// A Redis deployment that was understood from a URL.
///
/// # Behavior
/// `Debug` shows neither the password nor key material.
#[derive(Debug, Clone)]
pub struct RedisConfig {
    /// The address of the server, unless sentinels or nodes report it, and the login.
    pub(super) server: ConnectionInfo,
    source: Source,
    pub(super) tls: Option<TlsFiles>,
    /// The source of the logins of new connections, instead of the login of the URL.
    pub(super) credentials: Option<Arc<Credentials>>,
    pub(super) layout: Layout,
    /// The longest time to open a connection, and the longest time without a reply to a call on it.
    pub(super) limit: Duration,
    /// The number of replicas that have to acknowledge a grant.
    pub(super) min_replicas: u32,
    /// The event loop of the callers, if it can poll a socket.
    pub(super) event_loop: Option<Arc<dyn crate::event_loop::EventLoop>>,
    /// Receives the warnings.
    pub(super) warnings: Option<Arc<Warnings>>,
}

impl RedisConfig {
    /// Understands `redis://[user[:password]@]host[:port][/database][?sharded=true]`, `redis+unix:///path`, `redis+sentinel://…`
    /// (a list of sentinels in the place of the host, and the master's name before the database), and both with `rediss` for TLS.
    ///
    /// # Behavior
    /// Port 6379 (26379 for sentinels) and database 0 where the URL names none. A user without a password logs in with
    /// an empty one, as ACL users with `nopass` do. Sentinels have a login of their own: the URL's options
    /// `sentinelUsername` and `sentinelPassword`. They speak TLS like the servers, unless `sentinelTls=false`. TLS files
    /// are read here once to find mistakes early, and again whenever a connection is opened, so that renewed
    /// certificates are taken up.
    ///
    /// # Errors
    /// `LOCK_INVALID_ARGUMENT` naming `target` or the TLS setting. Nothing of the URL is shown: a password with a
    /// special character that was not encoded may turn up anywhere in it.
    pub fn parse(url: &str, settings: &Settings) -> Result<Self, LockError> {
        let (server, source) = Source::read(url, settings)?;
        let secure = url.starts_with("rediss");
        if !secure && settings.tls != TlsFiles::default() {
            return Err(LockError::invalid(
                "target",
                "must begin with rediss:// or rediss+ with the option tls",
                "a URL without TLS",
            ));
        }
        if let Some(name) = &settings.tls.server_name
            && ServerName::try_from(name.as_str()).is_err()
        {
            let rule = "must be the host name or the IP address in the certificate of the server";
            return Err(LockError::invalid("tls.servername", rule, "another text"));
        }
        let prefix = settings.key_prefix.as_deref().unwrap_or(DEFAULT_PREFIX);
        let layout = Layout::new(prefix, matches!(source, Source::Url | Source::Sentinels(_)));
        let config = RedisConfig {
            server,
            source,
            tls: secure.then(|| settings.tls.clone()),
            credentials: settings.credentials.clone(),
            layout,
            limit: settings.store_timeout,
            min_replicas: settings.min_replicas,
            event_loop: settings.event_loop.clone(),
            warnings: settings.warnings.clone(),
        };
        if let Some(files) = &config.tls {
            Pem::read(files)?;
            client_config(files, Verified::Full).map_err(|error| LockError::invalid("tls", "must be PEM", error))?;
        }
        Ok(config)
    }

    /// Returns the address of another server of the same kind.
    pub(super) fn at(&self, host: String, port: u16) -> ConnectionAddr {
        address(host, port, self.tls.as_ref())
    }

    /// Returns this configuration for a node of the cluster.
    pub(super) fn node(&self, (host, port): &(String, u16)) -> Self {
        RedisConfig {
            server: self.server.clone().set_addr(self.at(host.clone(), *port)),
            ..self.clone()
        }
    }

    /// Returns the nodes of the cluster that the URL names. Empty for other URLs.
    pub(super) fn seeds(&self) -> &[ConnectionAddr] {
        match &self.source {
            Source::Cluster(seeds) => seeds,
            _ => &[],
        }
    }

    /// Whether the server is one address of several servers, each with a part of the slots.
    pub(super) fn is_sharded(&self) -> bool {
        matches!(self.source, Source::Sharded)
    }

    pub(super) fn sentinels(&self) -> Option<&Arc<Sentinels>> {
        match &self.source {
            Source::Sentinels(sentinels) => Some(sentinels),
            _ => None,
        }
    }

    /// Returns the longest time to open a connection. Less than the limit if another server may have replaced this one: a
    /// server that hangs must not use up the time in which the other one could be found.
    pub(super) fn opening_limit(&self) -> Duration {
        match self.source {
            Source::Url | Source::Sharded => self.limit,
            Source::Sentinels(_) | Source::Cluster(_) => self.limit / 2,
        }
    }

    /// Returns the first server that the URL names: the server itself, a sentinel, or a node.
    pub(super) fn first_address(&self) -> &ConnectionAddr {
        self.sentinels()
            .map_or(self.server.addr(), |sentinels| sentinels.sentinels[0].addr())
    }

    /// Host and port, for messages.
    pub(in crate::engine) fn address(&self) -> String {
        self.sentinels()
            .map_or_else(|| show_address(self.server.addr()), |sentinels| sentinels.to_string())
    }
}

/// Host and port, for messages.
pub(super) fn show_address(address: &ConnectionAddr) -> String {
    match address {
        ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } if host.contains(':') => {
            format!("[{host}]:{port}")
        }
        address => address.to_string(),
    }
}

fn address(host: String, port: u16, tls: Option<&TlsFiles>) -> ConnectionAddr {
    match tls {
        None => ConnectionAddr::Tcp(host, port),
        Some(TlsFiles { insecure, .. }) => ConnectionAddr::TcpTls {
            host,
            port,
            insecure: *insecure,
            tls_params: None,
        },
    }
}

/// Returns a server with a login.
fn connection(address: ConnectionAddr, login: RedisConnectionInfo) -> Result<ConnectionInfo, String> {
    let server = address.into_connection_info().map_err(|error| error.to_string())?;
    Ok(server.set_redis_settings(login))
}
