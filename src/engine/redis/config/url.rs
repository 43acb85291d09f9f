//! Reads the servers and logins from a URL.

use std::sync::Arc;

use redis::{ConnectionAddr, ConnectionInfo, RedisConnectionInfo};
use rustls::pki_types::ServerName;

use super::{address, connection};
use crate::engine::target::{Known, LIST, Server, Target, Values, decoded, is_database};
use crate::engine::{Settings, TlsFiles};
use crate::error::LockError;

const RULE: &str = "must be redis://[user[:password]@]host[:port][/database][?sharded=true] or rediss://…, special characters percent-encoded";
const ONE_HOST: &str =
    "must have one host: for several hosts use redis+cluster://, redis+sentinel://, or an array of URLs (a quorum)";
const SENTINEL_RULE: &str = "must be redis+sentinel://[user[:password]@]sentinel[:port],sentinel[:port]/master[/database] \
                             or rediss+sentinel://…, special characters percent-encoded";
const CLUSTER_RULE: &str = "must be redis+cluster://[user[:password]@]node[:port],node[:port] or rediss+cluster://…, \
                            special characters percent-encoded";
const UNIX_RULE: &str =
    "must be redis+unix:///PATH[?db=DATABASE&user=USER&pass=PASSWORD], special characters percent-encoded";
/// The options of `redis+unix://`.
const SOCKET_OPTIONS: [Known; 3] = [("db", Values::Number), ("user", Values::Form), ("pass", Values::Form)];
/// The options of `redis+sentinel://`. The last one is for `rediss+sentinel://`.
const SENTINEL_OPTIONS: [Known; 3] = [
    ("sentinelUsername", Values::Text),
    ("sentinelPassword", Values::Text),
    ("sentinelTls", Values::OneOf(&["true", "false"])),
];
/// The port of a server where the URL has none.
const PORT: u16 = 6379;
/// The port of a sentinel where the URL has none.
const SENTINEL_PORT: u16 = 26379;

/// The sentinels of a master.
#[derive(Debug, Clone)]
pub(in super::super) struct Sentinels {
    /// The name of the master at its sentinels.
    pub(in super::super) master: Arc<str>,
    pub(in super::super) sentinels: Vec<ConnectionInfo>,
    /// The TLS files, if the sentinels use TLS.
    pub(in super::super) tls: Option<TlsFiles>,
}

/// The source of the server's address.
#[derive(Debug, Clone)]
pub(in super::super) enum Source {
    /// The URL.
    Url,
    /// The URL, which is one address of several servers with a part of the slots each.
    Sharded,
    /// Sentinels, asked for each connection.
    Sentinels(Arc<Sentinels>),
    /// The nodes of a cluster. The URL names some of them.
    Cluster(Arc<[ConnectionAddr]>),
}

/// The address of a server, its login, and the source of its address; or what is wrong with the URL.
type Read = Result<(ConnectionAddr, RedisConnectionInfo, Source), String>;

impl Source {
    /// Reads a URL: the server, its login, and the source of its address.
    ///
    /// # Errors
    /// `LOCK_INVALID_ARGUMENT` naming `target`. No part of the URL is shown.
    pub(in super::super) fn read(url: &str, settings: &Settings) -> Result<(ConnectionInfo, Self), LockError> {
        let path = url.split('?').next().unwrap_or_default().trim_end();
        let is_socket = path.starts_with("redis:///") && path.ends_with(".sock");
        let scheme = url.split(':').next().unwrap_or_default();
        let (rule, port, read): (_, _, fn(&Target, &TlsFiles) -> Read) = match scheme {
            "redis" if is_socket => (UNIX_RULE, PORT, read_socket),
            "redis+unix" => (UNIX_RULE, PORT, read_socket),
            "redis+sentinel" | "rediss+sentinel" => (SENTINEL_RULE, SENTINEL_PORT, read_sentinels),
            "redis+cluster" | "rediss+cluster" => (CLUSTER_RULE, PORT, read_cluster),
            "redis" | "rediss" => (RULE, PORT, read_node),
            _ => return Err(LockError::invalid("target", RULE, "another scheme")),
        };
        let read = Target::parse(url, [port; 2]).and_then(|target| {
            let (address, login, source) = read(&target, &settings.tls)?;
            Ok((connection(address, login)?, source))
        });
        read.map_err(|got| match got.as_str() {
            LIST => LockError::invalid("target", ONE_HOST, got),
            _ => LockError::invalid("target", rule, got),
        })
    }
}

/// The server of `redis://` and `rediss://`, which may be one address of several servers.
fn read_node(target: &Target, tls: &TlsFiles) -> Read {
    target.server()?;
    let address = addresses(target, target.has_tls, tls)?.swap_remove(0);
    let source = match target.query.as_str() {
        "" => Source::Url,
        "sharded=true" => Source::Sharded,
        _ => return Err("a URL with something after a \"?\" (other than sharded=true)".into()),
    };
    let database = target.path.strip_prefix('/').unwrap_or_default();
    if !database.is_empty() && !is_database(database) {
        return Err("a URL whose path is not the number of a database".into());
    }
    Ok((address, login_of(target, database), source))
}

/// The server of `redis+unix://`: a Unix socket.
fn read_socket(target: &Target, _: &TlsFiles) -> Read {
    if !target.servers.is_empty() || target.path.len() < 2 {
        return Err("a URL without an absolute path".into());
    }
    let options = target.options(&SOCKET_OPTIONS)?;
    let login = login(
        options.get("user"),
        options.get("pass"),
        options.get("db").unwrap_or_default(),
    );
    let address = ConnectionAddr::Unix(decoded(&target.path)?.into());
    Ok((address, login, Source::Url))
}

/// The master and the sentinels of `redis+sentinel://` and `rediss+sentinel://`.
fn read_sentinels(target: &Target, tls: &TlsFiles) -> Read {
    let (master, database) = match segments(target)[..] {
        [master] => (decoded(master)?, ""),
        [master, database] if is_database(database) => (decoded(master)?, database),
        [] => return Err("a URL without the name of a master".into()),
        _ => return Err("a URL whose path is not a master's name and the number of a database".into()),
    };
    let options = target.options(&SENTINEL_OPTIONS)?;
    let has_tls = match options.get("sentinelTls") {
        Some(_) if !target.has_tls => return Err("a URL with sentinelTls, which is for rediss+sentinel://".into()),
        Some(value) => value == "true",
        None => target.has_tls,
    };
    let of_sentinels = login(options.get("sentinelUsername"), options.get("sentinelPassword"), "");
    let sentinels = addresses(target, has_tls, tls)?.into_iter();
    let sentinels = sentinels.map(|address| connection(address, of_sentinels.clone()));
    let sentinels = Sentinels {
        master: master.into(),
        sentinels: sentinels.collect::<Result<_, _>>()?,
        tls: has_tls.then(|| tls.clone()),
    };
    let address = addresses(target, target.has_tls, tls)?.swap_remove(0);
    Ok((
        address,
        login_of(target, database),
        Source::Sentinels(Arc::new(sentinels)),
    ))
}

/// The nodes of `redis+cluster://` and `rediss+cluster://`.
fn read_cluster(target: &Target, tls: &TlsFiles) -> Read {
    if !matches!(segments(target)[..], [] | ["0"]) {
        return Err("a URL with a path: a cluster has no databases but 0".into());
    }
    if !target.query.is_empty() {
        return Err("a URL with an option".into());
    }
    let seeds = addresses(target, target.has_tls, tls)?;
    Ok((seeds[0].clone(), login_of(target, ""), Source::Cluster(seeds.into())))
}

/// The parts of the path between its slashes.
fn segments(target: &Target) -> Vec<&str> {
    target.path.split('/').filter(|part| !part.is_empty()).collect()
}

/// The addresses of the servers of a URL: at least one.
fn addresses(target: &Target, has_tls: bool, tls: &TlsFiles) -> Result<Vec<ConnectionAddr>, String> {
    let servers = target.servers()?.iter().map(|Server { host, port }| {
        if has_tls && ServerName::try_from(host.as_str()).is_err() {
            return Err("a URL with a host that a certificate cannot name".into());
        }
        if ["0.0.0.0", "::"].contains(&host.as_str()) {
            return Err("a URL with 0.0.0.0 or ::, which is the address of no server".into());
        }
        Ok(address(host.clone(), *port, has_tls.then_some(tls)))
    });
    servers.collect()
}

fn login_of(target: &Target, database: &str) -> RedisConnectionInfo {
    let (user, password) = target
        .login
        .as_ref()
        .map_or((None, None), |(user, password)| (Some(user), password.as_ref()));
    login(user.map(String::as_str), password.map(String::as_str), database)
}

/// A login and a database. A user without a password has an empty one, as ACL users with `nopass`.
fn login(user: Option<&str>, password: Option<&str>, database: &str) -> RedisConnectionInfo {
    let [user, password] = [user, password].map(|text| text.filter(|text| !text.is_empty()));
    let mut login = RedisConnectionInfo::default().set_db(database.parse().unwrap_or_default());
    if let Some(user) = user {
        login = login.set_username(user);
    }
    match password.or(user.map(|_| "")) {
        Some(password) => login.set_password(password),
        None => login,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::engine::redis::RedisConfig;
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

        let config =
            parse("redis+sentinel://us%40er:secret@h1,h2:7000,[::1]/my%20master/12?sentinelPassword=secret").unwrap();
        assert_eq!(
            config.address(),
            "the master \"my master\" of the sentinels h1:26379, h2:7000, [::1]:26379"
        );
        let login = config.server.redis_settings();
        assert_eq!(
            (login.username(), login.password(), login.db()),
            (Some("us@er"), Some("secret"), 12)
        );
        assert!(!format!("{config:?}").contains("secret"), "{config:?}");
        let sentinels = parse("redis+sentinel://h/m?sentinelUsername=a%2Bb+c&sentinelPassword=d%2Be+f").unwrap();
        let Source::Sentinels(sentinels) = &sentinels.source else {
            panic!("of sentinels")
        };
        let login = sentinels.sentinels[0].redis_settings();
        assert_eq!((login.username(), login.password()), (Some("a+b+c"), Some("d+e+f")));
        for url in [
            "redis://h/?sharded=true",
            "redis+sentinel://h/m",
            "rediss+sentinel://h/m?sentinelTls=false",
            "redis+sentinel://h/m/",
            "redis+cluster://h",
            "redis+cluster://h/",
            "rediss+cluster://u:p@h1,h2:7000/0",
        ] {
            assert!(parse(url).is_ok(), "{url}");
        }
    }

    #[test]
    fn a_list_of_hosts_is_refused() {
        let message = parse("redis://:secret@a,b").unwrap_err().message;
        assert!(message.contains(ONE_HOST) && !message.contains("secret"), "{message}");
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
            "redis://h?sharded=true&secret=1",
            "redis://h?sharded=secret",
            "redis://h#secret",
            "redis://:secret%ff@h",
            "rediss://not a host:secret@h h",
            "http://secret@h",
            "redis+sentinel:",
            "redis+sentinel://",
            "redis+sentinel://secret",
            "redis+sentinel://h1,h2",
            "redis+sentinel://h1,h2/",
            "redis+sentinel://h1,,h2/m",
            "redis+sentinel://h:secret/m",
            "redis+sentinel://user:sec#secret@h/m",
            "redis+sentinel://user:sec/secret@h/m",
            "redis+sentinel://user/secret@h",
            "redis+sentinel://user:sec?secret@h/m",
            "redis+sentinel://h/m/secret",
            "redis+sentinel://h/m/1/secret",
            "redis+sentinel://h/m?secret=1&x=y@z",
            "redis+sentinel://h/m?name=secret",
            "redis+sentinel://h/m?sentinelTls=false",
            "rediss+sentinel://h/m?sentinelTls=secret",
            "redis+sentinel://h/m#secret",
            "redis+cluster:",
            "redis+cluster://",
            "redis+cluster://h/1",
            "redis+cluster://h1,h2/secret",
            "redis+cluster://h:secret",
            "redis+cluster://user:sec/secret@h",
            "redis+cluster://h?secret=1",
            "redis+cluster://h#secret",
        ] {
            let error = parse(url).unwrap_err();
            assert_eq!(error.code, Code::InvalidArgument, "{url}");
            assert!(
                error.message.starts_with("target must be redis"),
                "{url}: {}",
                error.message
            );
            assert!(!error.message.contains("secret"), "{url}: {}", error.message);
        }
    }

    #[test]
    fn debug_shows_no_password() {
        let shown = format!("{:?}", parse("redis://user:secret@h").unwrap());
        assert!(!shown.contains("secret"), "{shown}");
    }
}
