//! Reads the servers and logins from the text of a URL.

use std::sync::Arc;

use redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo, ProtocolVersion, RedisConnectionInfo};
use url::Url;

use super::hosts::{HostList, decoded};
use super::prepare;
use crate::engine::url_options::unknown_option;
use crate::engine::{Settings, TlsFiles};
use crate::error::LockError;

const RULE: &str = "must be redis://[user[:password]@]host[:port][/database][?sharded=true] or rediss://…, special characters percent-encoded";
/// The options of `redis+unix://`.
const SOCKET_OPTIONS: [&str; 3] = ["db", "user", "pass"];
/// The options of `redis+sentinel://`. The last one is for `rediss+sentinel://`.
const SENTINEL_OPTIONS: [&str; 3] = ["sentinelUsername", "sentinelPassword", "sentinelTls"];
const SENTINEL_RULE: &str = "must be redis+sentinel://[user[:password]@]sentinel[:port],sentinel[:port]/master[/database] \
                             or rediss+sentinel://…, special characters percent-encoded";

const CLUSTER_RULE: &str = "must be redis+cluster://[user[:password]@]node[:port],node[:port] or rediss+cluster://…, \
                            special characters percent-encoded";
const UNIX_RULE: &str =
    "must be redis+unix:///PATH[?db=DATABASE&user=USER&pass=PASSWORD], special characters percent-encoded";
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

impl Source {
    /// Reads a URL: the server, its login, and the source of its address.
    ///
    /// # Errors
    /// `LOCK_INVALID_ARGUMENT` naming `target`. No part of the URL is shown.
    pub(in super::super) fn read(url: &str, settings: &Settings) -> Result<(ConnectionInfo, Self), LockError> {
        let invalid = |rule, got: String| LockError::invalid("target", rule, got);
        let (scheme, rest) = url.split_once(':').unwrap_or((url, ""));
        let rest = rest.strip_prefix("//").unwrap_or_default();
        match scheme {
            "redis+sentinel" | "rediss+sentinel" => {
                let secure = scheme.starts_with("rediss");
                let (server, mut sentinels) =
                    read_sentinels(secure, rest, settings).map_err(|got| invalid(SENTINEL_RULE, got))?;
                for sentinel in &mut sentinels.sentinels {
                    *sentinel = prepare(sentinel.clone(), ProtocolVersion::RESP2, settings)?;
                }
                Ok((server, Source::Sentinels(Arc::new(sentinels))))
            }
            "redis+cluster" | "rediss+cluster" => {
                let secure = scheme.starts_with("rediss");
                let servers = read_cluster(secure, rest).map_err(|got| invalid(CLUSTER_RULE, got))?;
                let mut seeds = Vec::with_capacity(servers.len());
                for server in &servers {
                    seeds.push(
                        prepare(server.clone(), ProtocolVersion::RESP3, settings)?
                            .addr()
                            .clone(),
                    );
                }
                Ok((servers[0].clone(), Source::Cluster(seeds.into())))
            }
            "redis+unix" => {
                let server = read_socket(url).map_err(|got| invalid(UNIX_RULE, got))?;
                Ok((server, Source::Url))
            }
            "redis" if rest.starts_with('/') && rest.split('?').next().is_some_and(|path| path.ends_with(".sock")) => {
                let server = read_socket(&format!("redis+unix://{rest}")).map_err(|got| invalid(UNIX_RULE, got))?;
                Ok((server, Source::Url))
            }
            _ => {
                let (server, is_sharded) = read_node(url).map_err(|got| invalid(RULE, got))?;
                Ok((server, if is_sharded { Source::Sharded } else { Source::Url }))
            }
        }
    }
}

/// The server of `redis://` and `rediss://`, and whether it is one address of several servers.
fn read_node(url: &str) -> Result<(ConnectionInfo, bool), String> {
    let mut parsed = Url::parse(url).map_err(|error| format!("a URL that does not parse ({error})"))?;
    if parsed.host_str().is_none_or(str::is_empty) {
        return Err("a URL without a host".into());
    }
    let is_sharded = parsed.query() == Some("sharded=true");
    if parsed.fragment().is_some() || parsed.query().is_some() && !is_sharded {
        return Err("a URL with something after a \"?\" (other than sharded=true) or a \"#\"".into());
    }
    parsed.set_query(None);
    if !is_database(parsed.path().strip_prefix('/').unwrap_or_default()) {
        return Err("a URL whose path is not the number of a database".into());
    }
    if !matches!(parsed.scheme(), "redis" | "rediss") {
        return Err("another scheme".into());
    }
    let server = parsed.into_connection_info().map_err(|error| error.to_string())?;
    Ok((server, is_sharded))
}

/// The server of `redis+unix://`: a Unix socket.
fn read_socket(url: &str) -> Result<ConnectionInfo, String> {
    let parsed = Url::parse(url).map_err(|error| format!("a URL that does not parse ({error})"))?;
    if parsed.host_str().is_some_and(|host| !host.is_empty()) || parsed.path().len() < 2 {
        return Err("a URL without an absolute path".into());
    }
    for (name, value) in parsed.query_pairs() {
        if !SOCKET_OPTIONS.contains(&&*name) || (name == "db" && !is_database(&value)) {
            return Err(unknown_option(
                &name,
                parsed.query().unwrap_or_default(),
                &SOCKET_OPTIONS,
            ));
        }
    }
    parsed.into_connection_info().map_err(|error| error.to_string())
}

/// The login at the master and the sentinels of `redis+sentinel://` and `rediss+sentinel://`.
fn read_sentinels(secure: bool, rest: &str, settings: &Settings) -> Result<(ConnectionInfo, Sentinels), String> {
    let list = HostList::parse(rest)?;
    let (master, database) = match list.path[..] {
        [master] => (decoded(master), ""),
        [master, database] if is_database(database) => (decoded(master), database),
        [] => return Err("a URL without the name of a master".into()),
        _ => return Err("a URL whose path is not a master's name and the number of a database".into()),
    };
    let mut login = RedisConnectionInfo::default();
    let mut sentinels_secure = secure;
    for (name, value) in list.options() {
        login = match (&*name, &*value) {
            ("sentinelUsername", _) => login.set_username(value),
            ("sentinelPassword", _) => login.set_password(value),
            ("sentinelTls", "true" | "false") if secure => {
                sentinels_secure = value == "true";
                login
            }
            _ => return Err(unknown_option(&name, "", &SENTINEL_OPTIONS)),
        };
    }
    let servers = list.servers(secure, SENTINEL_PORT, database)?;
    let server = servers[0].clone();
    let sentinels = list
        .servers(sentinels_secure, SENTINEL_PORT, "")?
        .into_iter()
        .map(|sentinel| sentinel.set_redis_settings(login.clone()))
        .collect();
    let sentinels = Sentinels {
        master: master.into(),
        sentinels,
        tls: sentinels_secure.then(|| settings.tls.clone()),
    };
    Ok((server, sentinels))
}

/// The nodes of `redis+cluster://` and `rediss+cluster://`.
fn read_cluster(secure: bool, rest: &str) -> Result<Vec<ConnectionInfo>, String> {
    let list = HostList::parse(rest)?;
    if !matches!(list.path[..], [] | ["0"]) {
        return Err("a URL with a path: a cluster has no databases but 0".into());
    }
    if list.options().next().is_some() {
        return Err("a URL with an option".into());
    }
    list.servers(secure, PORT, "")
}

fn is_database(text: &str) -> bool {
    text.len() <= 9 && text.bytes().all(|b| b.is_ascii_digit())
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
