//! The servers of a URL, and their sockets.

use std::sync::Arc;
use std::time::Duration;
use std::{fmt, io};

use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::store::Failure;
use crate::engine::errors::render;
use crate::engine::target::{Server, Target};
use crate::engine::tls::{self, Pem, Verified, client_config};
use crate::engine::{Settings, TlsFiles};
use crate::error::{LockError, is_passing_of_network};

/// The servers of a URL, and how to connect to them.
///
/// # Behavior
/// `Debug` and `Display` show no login.
#[derive(Clone)]
pub(in crate::engine) struct Servers {
    /// Without repeats: at least one.
    pub list: Vec<Server>,
    /// The user name and the password, decoded.
    pub login: Option<(String, String)>,
    /// `None`: no TLS.
    pub tls: Option<TlsFiles>,
    /// The longest time in which a call without an answer is repeated.
    pub store_timeout: Duration,
}

impl fmt::Display for Servers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list: Vec<String> = self.list.iter().map(ToString::to_string).collect();
        f.write_str(&list.join(", "))
    }
}

impl fmt::Debug for Servers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// What a URL of one store must be like.
pub(in crate::engine) struct Rule {
    pub text: &'static str,
    /// The ports of servers where the URL has none, without and with TLS.
    pub ports: [u16; 2],
}

impl Rule {
    pub(in crate::engine) fn broken(&self, got: &str) -> LockError {
        LockError::invalid("target", self.text, got)
    }
}

impl Servers {
    /// Parses a URL. Returns its path, as it was written, with the servers.
    ///
    /// # Errors
    /// `LOCK_INVALID_ARGUMENT` for the URL or a TLS setting. No message contains a part of the URL.
    pub(in crate::engine) fn parse(url: &str, settings: &Settings, rule: &Rule) -> Result<(Self, String), LockError> {
        let target = Target::parse(url, rule.ports).map_err(|got| rule.broken(&got))?;
        let _ = target.options(&[]).map_err(|got| rule.broken(&got))?;
        target.servers().map_err(|got| rule.broken(&got))?;
        let login = match target.login {
            None => None,
            Some((_, None)) => return Err(rule.broken("a URL with a user name and no password")),
            Some((user, _)) if user.is_empty() => return Err(rule.broken("a password without a user name")),
            Some((user, Some(password))) => Some((user, password)),
        };
        let tls = &settings.tls;
        tls.reject_server_name("use a host of the URL that is in the server's certificate")?;
        if target.has_tls {
            Pem::read(tls)?;
        } else if *tls != TlsFiles::default() {
            let scheme = url.split(':').next().unwrap_or_default();
            let rule = format!("must be absent for {scheme}:// ({scheme}s:// uses TLS)");
            return Err(LockError::invalid("tls", &rule, "settings"));
        }
        let servers = Servers {
            list: target.servers,
            login,
            tls: target.has_tls.then(|| tls.clone()),
            store_timeout: settings.store_timeout,
        };
        Ok((servers, target.path))
    }
}

/// A socket, with or without TLS.
pub(in crate::engine) trait Io: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

impl Server {
    /// Connects. `protocol`: the one that TLS must negotiate (ALPN).
    pub(in crate::engine) async fn connect(
        &self,
        tls: Option<&TlsFiles>,
        protocol: Option<&str>,
    ) -> Result<Box<dyn Io>, Failure> {
        let cannot =
            |error: io::Error| Failure::not_sent(format!("cannot connect: {error}"), is_passing_of_network(&error));
        let socket = TcpStream::connect((self.host.as_str(), self.port))
            .await
            .map_err(cannot)?;
        socket.set_nodelay(true).map_err(cannot)?;
        let Some(files) = tls else { return Ok(Box::new(socket)) };
        let wrong = |text: String| Failure::not_sent(text, false);
        let mut config = client_config(files, Verified::Full).map_err(|error| wrong(error.to_string()))?;
        config.alpn_protocols = protocol.into_iter().map(Into::into).collect();
        let name = ServerName::try_from(self.host.clone());
        let name = name.map_err(|error| wrong(format!("the host cannot be the name in a certificate: {error}")))?;
        let connecting = TlsConnector::from(Arc::new(config)).connect(name, socket);
        let stream = connecting.await.map_err(|error| of_tls(&error))?;
        match protocol {
            Some(protocol) if stream.get_ref().1.alpn_protocol() != Some(protocol.as_bytes()) => Err(wrong(format!(
                "the server does not offer {protocol} with TLS: it is not etcd 3.4 or later"
            ))),
            _ => Ok(Box::new(stream)),
        }
    }
}

/// The reason when a server ends a connection after the client's handshake.
pub(in crate::engine) const NEEDS_CERTIFICATE: &str =
    "a server that requires a client certificate needs tls.certFile and tls.keyFile";

fn of_tls(error: &io::Error) -> Failure {
    let text = format!("TLS failed: {error}");
    let advice = tls::advice(&text, [""; 2]).unwrap_or_else(|| {
        let advice = match text.contains("fatal alert") {
            true => NEEDS_CERTIFICATE,
            false => {
                "check that this port uses TLS (ZooKeeper: secureClientPort); without TLS use etcd:// or zookeeper://"
            }
        };
        advice.to_owned()
    });
    Failure::not_sent(render(text, &advice), is_passing_of_network(error))
}
