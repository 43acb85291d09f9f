//! URLs with several servers: `scheme://user:password@h1,h2:2379/path`, and the sockets of these servers.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;
use std::{fmt, io};

use percent_encoding::percent_decode_str;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::store::Failure;
use crate::engine::errors::render;
use crate::engine::tls::{self, Pem, Verified, client_config};
use crate::engine::url_options::unknown_option;
use crate::engine::{Settings, TlsFiles};
use crate::error::{LockError, is_passing_of_network};

/// The largest number of servers in a URL.
const MAX_SERVERS: usize = 100;

/// A server: its host, without brackets, and its port.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(in crate::engine) struct Server {
    pub host: String,
    pub port: u16,
}

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "[{}]:{}", self.host, self.port),
            false => write!(f, "{}:{}", self.host, self.port),
        }
    }
}

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

/// The parts of a URL. It has no `Debug`: any part may be a password that was not encoded.
pub(in crate::engine) struct Target<'u> {
    pub servers: Servers,
    /// The path with its first slash, or an empty text, as it was written.
    pub path: &'u str,
    /// The options after the `?`, as they were written.
    query: &'u str,
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

impl<'u> Target<'u> {
    /// Parses a URL. One whose scheme ends with an "s" has TLS.
    ///
    /// # Errors
    /// `LOCK_INVALID_ARGUMENT` for the URL or a TLS setting. No message contains a part of the URL.
    pub(in crate::engine) fn parse(url: &'u str, settings: &Settings, rule: &Rule) -> Result<Self, LockError> {
        let (scheme, rest) = url
            .split_once("://")
            .ok_or_else(|| rule.broken("a URL without \"//\""))?;
        let (has_tls, tls) = (scheme.ends_with('s'), &settings.tls);
        let mut target = Target::split(rest, rule.ports[usize::from(has_tls)]).map_err(|got| rule.broken(got))?;
        if let Some((name, _)) = url::form_urlencoded::parse(target.query.as_bytes()).next() {
            return Err(rule.broken(&unknown_option(&name, target.query, &[])));
        }
        tls.reject_server_name("use a host of the URL that is in the server's certificate")?;
        if !has_tls && *tls != TlsFiles::default() {
            let rule = format!("must be absent for {scheme}:// ({scheme}s:// uses TLS)");
            return Err(LockError::invalid("tls", &rule, "settings"));
        }
        if has_tls {
            Pem::read(tls).map_err(|wrong| LockError::invalid(wrong.setting, wrong.rule, wrong.how))?;
        }
        target.servers.tls = has_tls.then(|| tls.clone());
        target.servers.store_timeout = settings.store_timeout;
        Ok(target)
    }

    /// Splits the text after the `://`. The error is what is wrong with it, without any of its text.
    fn split(rest: &'u str, port: u16) -> Result<Self, &'static str> {
        if rest.contains('#') {
            return Err("a URL with a \"#\"");
        }
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        // A "/" or "?" of a password that was not encoded.
        if path.contains('@') || query.contains('@') {
            return Err("a URL with an \"@\" behind its hosts");
        }
        let (login, hosts) = match authority.rsplit_once('@') {
            Some((login, hosts)) => (Some(login), hosts),
            None => (None, authority),
        };
        let login = match login.map(|login| login.split_once(':')) {
            None => None,
            Some(None) => return Err("a URL with a user name and no password"),
            Some(Some(("", _))) => return Err("a password without a user name"),
            Some(Some((user, password))) => Some((decoded(user)?, decoded(password)?)),
        };
        let mut list = Vec::new();
        for text in hosts.split(',') {
            let server = server(text.trim(), port)?;
            if !list.contains(&server) {
                list.push(server);
            }
        }
        if list.len() > MAX_SERVERS {
            return Err("a URL with more than 100 hosts");
        }
        // The caller sets the rest.
        let servers = Servers {
            list,
            login,
            tls: None,
            store_timeout: Duration::ZERO,
        };
        Ok(Target { servers, path, query })
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

fn server(text: &str, port: u16) -> Result<Server, &'static str> {
    let (host, rest) = match text.strip_prefix('[') {
        Some(text) => text.split_once(']').ok_or("a URL with an invalid host")?,
        None => text.split_at(text.find(':').unwrap_or(text.len())),
    };
    let of_host = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_');
    let is_host = match text.starts_with('[') {
        true => host.parse::<std::net::Ipv6Addr>().is_ok(),
        false => !host.is_empty() && host.bytes().all(of_host),
    };
    if !is_host {
        return Err("a URL with an empty or invalid host");
    }
    let port = match rest.strip_prefix(':') {
        Some(port) => port.parse().map_err(|_| "a URL with an invalid port")?,
        None if rest.is_empty() => port,
        None => return Err("a URL with an invalid host"),
    };
    Ok(Server {
        host: host.to_owned(),
        port,
    })
}

/// Decodes a user name or a password.
fn decoded(text: &str) -> Result<String, &'static str> {
    let text = percent_decode_str(text).decode_utf8().map(Cow::into_owned);
    text.map_err(|_| "a URL with a user name or password that is not UTF-8")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_is_split() {
        let target = Target::split("us%40er:p%2Cw:&=+@h1,h2:7000, [::1]:7001,h1:2379/a/b?x=1", 2379).unwrap();
        assert_eq!(target.servers.to_string(), "h1:2379, h2:7000, [::1]:7001");
        assert_eq!(target.servers.login, Some(("us@er".into(), "p,w:&=+".into())));
        assert_eq!((target.path, target.query), ("/a/b", "x=1"));
        let plain = Target::split("h", 1).unwrap();
        assert!(plain.servers.login.is_none() && plain.path.is_empty());
    }

    #[test]
    fn a_wrong_url_is_refused_without_its_text() {
        for rest in [
            "",
            "h,",
            ",h",
            "user:secret@",
            "user@h",
            "h1:secret,h2",
            "h1,h2 secret",
            "user:sec/secret@h",
            "user:sec?secret@h",
            "user:sec#secret@h",
            "user:%ff@h",
            "h:99999",
            "h:",
            "[::1",
            "[h]:1",
            "[::1]1",
            "sécret",
        ] {
            let problem = Target::split(rest, 1).err().unwrap_or_else(|| panic!("{rest}"));
            assert!(
                problem.starts_with("a URL with") && !problem.contains("secret"),
                "{rest}"
            );
        }
        let many: Vec<String> = (0..=MAX_SERVERS).map(|i| format!("h{i}")).collect();
        assert!(Target::split(&many.join(","), 1).is_err());
    }
}
