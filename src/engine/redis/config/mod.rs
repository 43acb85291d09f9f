//! From a URL and the settings to everything that a connection needs.

mod hosts;
mod tls;
mod url;

use std::sync::Arc;
use std::time::Duration;

#[cfg(unix)]
use redis::io::tcp::socket2;
use redis::io::tcp::{TcpSettings, socket2::TcpKeepalive};
use redis::{Client, ConnectionAddr, ConnectionInfo, ErrorKind, ProtocolVersion, RedisError, RedisResult};
use rustls::pki_types::ServerName;

use self::tls::certificates;
use self::url::Source;
use super::error::Failure;
use super::keys::Layout;
use super::topology::sentinel::Sentinels;
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

/// A Redis deployment that was understood from a URL.
///
/// # Behavior
/// `Debug` shows neither the password nor key material.
#[derive(Debug, Clone)]
pub struct RedisConfig {
    /// Where the server is, unless somebody else tells, and how to log in.
    pub(super) server: ConnectionInfo,
    source: Source,
    pub(super) tls: Option<TlsFiles>,
    pub(super) layout: Layout,
    /// The longest that a connection may take to open, and that a call on it may go without any reply.
    pub(super) limit: Duration,
    /// How many replicas have to acknowledge a grant before it counts.
    pub(super) min_replicas: u32,
    /// Where the calls come from, if that has an event loop to serve a socket.
    #[cfg(unix)]
    pub(super) home: Option<Arc<dyn crate::event_loop::EventLoop>>,
}

impl RedisConfig {
    /// Understands `redis://[user[:password]@]host[:port][/database]`, `redis+sentinel://…` (a list of sentinels in the
    /// place of the host, and the master's name before the database), and both with `rediss` for TLS.
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
                "must begin with rediss:// or rediss+ when TLS is set up",
                "a URL without TLS",
            ));
        }
        let config = RedisConfig {
            server: prepare(server, ProtocolVersion::RESP3, settings)?,
            source,
            tls: secure.then(|| settings.tls.clone()),
            layout: Layout::new(settings.key_prefix.as_deref().unwrap_or(DEFAULT_PREFIX)),
            limit: settings.store_timeout,
            min_replicas: settings.min_replicas,
            #[cfg(unix)]
            home: settings.event_loop.clone(),
        };
        if let Some(files) = &config.tls {
            certificates(files).map_err(|wrong| LockError::invalid(wrong.setting, "must be a PEM file", wrong.how))?;
        }
        client(config.server.clone(), config.tls.as_ref())
            .map_err(|error| LockError::invalid("tls", "must be made of PEM files", error))?;
        Ok(config)
    }

    /// Where the server is now.
    pub(super) async fn locate(&self) -> Result<ConnectionInfo, Failure> {
        let Source::Sentinels(sentinels) = &self.source else {
            return Ok(self.server.clone());
        };
        let (host, port) = sentinels.ask(self.limit / 4).await.map_err(Failure::NoMaster)?;
        Ok(self.server.clone().set_addr(self.at(host, port)))
    }

    /// The address of another server of the same kind.
    pub(super) fn at(&self, host: String, port: u16) -> ConnectionAddr {
        match self.tls {
            None => ConnectionAddr::Tcp(host, port),
            Some(TlsFiles { insecure, .. }) => ConnectionAddr::TcpTls {
                host,
                port,
                insecure,
                tls_params: None,
            },
        }
    }

    /// The same for a node of the cluster.
    pub(super) fn node(&self, (host, port): &(String, u16)) -> Self {
        RedisConfig {
            server: self.server.clone().set_addr(self.at(host.clone(), *port)),
            ..self.clone()
        }
    }

    /// The nodes of the cluster that the URL names. Empty where it names none.
    pub(super) fn seeds(&self) -> &[ConnectionAddr] {
        match &self.source {
            Source::Cluster(seeds) => seeds,
            _ => &[],
        }
    }

    pub(super) fn sentinels(&self) -> Option<&Arc<Sentinels>> {
        match &self.source {
            Source::Sentinels(sentinels) => Some(sentinels),
            Source::Url | Source::Cluster(_) => None,
        }
    }

    /// The longest that a connection may take to open. Less than the whole limit where the server may have been
    /// replaced by another meanwhile: a hung one must not use up the time in which that could be found.
    pub(super) fn opening_limit(&self) -> Duration {
        match self.source {
            Source::Url => self.limit,
            Source::Sentinels(_) | Source::Cluster(_) => self.limit / 2,
        }
    }

    /// A connection for the fast lane. `None` where the server is not the URL's own, or not reached by plain TCP.
    #[cfg(unix)]
    pub(super) async fn lane(&self) -> RedisResult<Option<Arc<super::fast_path::Lane>>> {
        let (Source::Url, ConnectionAddr::Tcp(host, port)) = (&self.source, self.server.addr()) else {
            return Ok(None);
        };
        let stream = tokio::net::TcpStream::connect((&**host, *port)).await?;
        stream.set_nodelay(true)?;
        let socket = socket2::SockRef::from(&stream);
        socket.set_tcp_keepalive(&keepalive())?;
        #[cfg(any(target_os = "linux", target_os = "android"))]
        socket.set_tcp_user_timeout(Some(PEER_SILENCE))?;
        let settings = self.server.redis_settings();
        // Also without a password: a server that refuses the connection says so now, and not to the first call.
        let mut hello = redis::cmd("HELLO");
        hello.arg(2);
        if let Some(password) = settings.password() {
            hello
                .arg("AUTH")
                .arg(settings.username().unwrap_or("default"))
                .arg(password);
        }
        let mut login = vec![hello];
        if settings.db() != 0 {
            let mut select = redis::cmd("SELECT");
            select.arg(settings.db());
            login.push(select);
        }
        super::fast_path::Lane::open(stream, &login, self.layout.clone(), 2 * self.limit)
            .await
            .map(Some)
    }

    /// Host and port, for messages.
    pub(super) fn address(&self) -> String {
        match &self.source {
            Source::Url | Source::Cluster(_) => show_address(self.server.addr()),
            Source::Sentinels(sentinels) => sentinels.to_string(),
        }
    }
}

/// The driver's client, with TLS files as they are now.
pub(super) fn client(server: ConnectionInfo, tls: Option<&TlsFiles>) -> RedisResult<Client> {
    let Some(files) = tls else {
        return Client::open(server);
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
    Client::build_with_tls(server, certificates)
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

fn keepalive() -> TcpKeepalive {
    TcpKeepalive::new()
        .with_time(KEEPALIVE_IDLE)
        .with_interval(KEEPALIVE_INTERVAL)
}

/// What the driver's own defaults lack.
///
/// RESP3 where there are pushes on the connection of the commands. No CLIENT SETINFO: one permission less to grant.
pub(super) fn prepare(
    server: ConnectionInfo,
    protocol: ProtocolVersion,
    settings: &Settings,
) -> Result<ConnectionInfo, LockError> {
    let mut login = server
        .redis_settings()
        .clone()
        .set_protocol(protocol)
        .set_skip_set_lib_name();
    if login.username().is_some() && login.password().is_none() {
        login = login.set_password("");
    }
    // The driver leaves Nagle's algorithm on: a second small request would wait for the first one's acknowledgement.
    let tcp = TcpSettings::default().set_nodelay(true).set_keepalive(keepalive());
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
