//! From a `redis://` URL and the settings to everything that a connection needs.

use std::time::Duration;

use redis::io::tcp::{TcpSettings, socket2::TcpKeepalive};
use redis::{
    Client, ConnectionAddr, ConnectionInfo, ErrorKind, IntoConnectionInfo, ProtocolVersion, RedisError, RedisResult,
};
use rustls::pki_types::ServerName;
use url::Url;

use super::keys::Layout;
use super::tls::certificates;
use crate::engine::{Settings, TlsFiles};
use crate::error::LockError;

const DEFAULT_PREFIX: &str = "lock:";
/// An idle connection is probed after so long, and is given up when nothing comes back: firewalls
/// and NAT tables forget idle connections without telling.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(15);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
/// The longest that the other side's kernel may leave bytes without an acknowledgement. Linux's own limit is some 15
/// minutes, for which a call in flight would wait.
#[cfg(any(target_os = "linux", target_os = "android"))]
const PEER_SILENCE: Duration = Duration::from_secs(30);

const RULE: &str =
    "must be redis://[user[:password]@]host[:port][/database] or rediss://…, special characters percent-encoded";

/// A Redis server that was understood from a URL.
///
/// # Behavior
/// `Debug` shows neither the password nor key material.
#[derive(Debug, Clone)]
pub struct RedisConfig {
    pub(super) server: ConnectionInfo,
    tls: Option<TlsFiles>,
    pub(super) layout: Layout,
    /// The longest that a connection may take to open, and that a call on it may go without any reply.
    pub(super) limit: Duration,
}

impl RedisConfig {
    /// Understands `redis://[user[:password]@]host[:port][/database]`, and `rediss://` for TLS.
    ///
    /// # Behavior
    /// Port 6379 and database 0 where the URL names none. A user without a password logs in with an empty one, as ACL
    /// users with `nopass` do. TLS files are read here once to find mistakes early, and again whenever a connection is
    /// opened, so that renewed certificates are taken up.
    ///
    /// # Errors
    /// `LOCK_INVALID_ARGUMENT` naming `target` or the TLS setting. Nothing of the URL is shown: a password with a
    /// special character that was not encoded may turn up anywhere in it.
    pub fn parse(url: &str, settings: &Settings) -> Result<Self, LockError> {
        let refuse = |got: &str| LockError::invalid("target", RULE, got);
        let parsed = Url::parse(url).map_err(|error| refuse(&format!("a URL that does not parse ({error})")))?;
        if parsed.host_str().is_none_or(str::is_empty) {
            return Err(refuse("a URL without a host"));
        }
        if parsed.query().is_some() || parsed.fragment().is_some() {
            return Err(refuse("a URL with something after a \"?\" or \"#\""));
        }
        let database = parsed.path().strip_prefix('/').unwrap_or_default();
        if !database.bytes().all(|b| b.is_ascii_digit()) || database.len() > 9 {
            return Err(refuse("a URL whose path is not the number of a database"));
        }
        let secure = match parsed.scheme() {
            "redis" => false,
            "rediss" => true,
            _ => return Err(refuse("another scheme")),
        };
        if !secure && settings.tls != TlsFiles::default() {
            return Err(LockError::invalid(
                "target",
                "must begin with rediss:// when TLS is set up",
                "redis://",
            ));
        }
        let server = parsed
            .into_connection_info()
            .map_err(|error| refuse(&error.to_string()))?;
        let config = RedisConfig {
            server: prepare(server, settings)?,
            tls: secure.then(|| settings.tls.clone()),
            layout: Layout::new(settings.key_prefix.as_deref().unwrap_or(DEFAULT_PREFIX)),
            limit: settings.store_timeout,
        };
        if let Some(files) = &config.tls {
            certificates(files).map_err(|wrong| LockError::invalid(wrong.setting, "must be a PEM file", wrong.how))?;
        }
        config
            .client()
            .map_err(|error| LockError::invalid("tls", "must be made of PEM files", error))?;
        Ok(config)
    }

    /// The driver's client, with TLS files as they are now.
    pub(super) fn client(&self) -> RedisResult<Client> {
        let Some(files) = &self.tls else {
            return Client::open(self.server.clone());
        };
        // rustls has no crypto of its own, and refuses to choose. A second call finds the first one's choice: that is fine.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let certificates = certificates(files).map_err(|wrong| {
            RedisError::from((
                ErrorKind::Io,
                "a TLS file cannot be used",
                format!("{}: {}", wrong.setting, wrong.how),
            ))
        })?;
        Client::build_with_tls(self.server.clone(), certificates)
    }

    /// Host and port, for messages.
    pub(super) fn address(&self) -> String {
        match self.server.addr() {
            ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } if host.contains(':') => {
                format!("[{host}]:{port}")
            }
            address => address.to_string(),
        }
    }
}

/// What the driver's own defaults lack.
fn prepare(server: ConnectionInfo, settings: &Settings) -> Result<ConnectionInfo, LockError> {
    // RESP3, or there would be no pushes on the connection of the commands. No CLIENT SETINFO: one permission less to grant.
    let mut login = server
        .redis_settings()
        .clone()
        .set_protocol(ProtocolVersion::RESP3)
        .set_skip_set_lib_name();
    if login.username().is_some() && login.password().is_none() {
        login = login.set_password("");
    }
    // The driver leaves Nagle's algorithm on: a second small request would wait for the first one's acknowledgement.
    let tcp = TcpSettings::default().set_nodelay(true).set_keepalive(
        TcpKeepalive::new()
            .with_time(KEEPALIVE_IDLE)
            .with_interval(KEEPALIVE_INTERVAL),
    );
    #[cfg(any(target_os = "linux", target_os = "android"))]
    let tcp = tcp.set_user_timeout(PEER_SILENCE);

    let mut address = server.addr().clone();
    if let ConnectionAddr::TcpTls { host, insecure, .. } = &mut address {
        if ServerName::try_from(host.as_str()).is_err() {
            return Err(LockError::invalid(
                "target",
                "must have a host that a certificate can name",
                "another one",
            ));
        }
        *insecure = settings.tls.insecure;
    }
    Ok(server.set_addr(address).set_redis_settings(login).set_tcp_settings(tcp))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Code;

    fn parse(url: &str) -> Result<RedisConfig, LockError> {
        RedisConfig::parse(url, &Settings::default())
    }

    #[test]
    fn urls_are_understood() {
        let config = parse("redis://localhost").unwrap();
        assert_eq!(config.address(), "localhost:6379");
        assert_eq!(config.server.redis_settings().db(), 0);
        assert_eq!(config.server.redis_settings().password(), None);
        assert_eq!(config.limit, Duration::from_secs(5));

        let config = parse("redis://us%40er:p%40ss%2Fw%23%25rd@[::1]:7000/12").unwrap();
        assert_eq!(config.address(), "[::1]:7000");
        let login = config.server.redis_settings();
        assert_eq!(
            (login.username(), login.password(), login.db()),
            (Some("us@er"), Some("p@ss/w#%rd"), 12)
        );

        let login = parse("redis://:secret@h/").unwrap().server.redis_settings().clone();
        assert_eq!((login.username(), login.password()), (None, Some("secret")));
        let login = parse("redis://user@h").unwrap().server.redis_settings().clone();
        assert_eq!(
            (login.username(), login.password()),
            (Some("user"), Some("")),
            "a user with nopass"
        );
        assert!(matches!(
            parse("rediss://h").unwrap().server.addr(),
            ConnectionAddr::TcpTls { insecure: false, .. }
        ));
    }

    #[test]
    fn what_is_not_understood_is_refused_without_showing_it() {
        for url in [
            "redis://",
            "redis:secret",
            "redis:///secret",
            "redis://:secret@",
            "redis://h:secret",
            "redis://user:sec#secret@h",
            "redis://user:sec/secret@h",
            "redis://user:sec?secret@h",
            "redis://secret/secret@h",
            "redis://h/secret",
            "redis://h/1/secret",
            "redis://h/-1",
            "redis://h/99999999999",
            "redis://h?secret=1",
            "redis://h#secret",
            "redis://:secret%ff@h",
            "rediss://not a host:secret@h h",
            "http://secret@h",
        ] {
            let error = parse(url).unwrap_err();
            assert_eq!(error.code, Code::InvalidArgument, "{url}");
            assert!(error.message.starts_with("target "), "{url}: {}", error.message);
            assert!(!error.message.contains("secret"), "{url}: {}", error.message);
        }
    }

    #[test]
    fn debug_shows_no_password() {
        let shown = format!("{:?}", parse("redis://user:secret@h").unwrap());
        assert!(!shown.contains("secret"), "{shown}");
    }
}
