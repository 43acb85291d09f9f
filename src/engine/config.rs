//! Parses a target (a URL, a list of URLs, nothing) and connects to its engine. The only match over engines.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;

use super::settings::{DEFAULT_TABLE, Settings};
use super::{Engine, SharedEngine};
use crate::backoff::Backoff;
use crate::error::{EngineError, LockError};

/// A parsed target: the store, and how to connect to it.
#[derive(Clone)]
pub struct EngineConfig {
    engine: &'static str,
    /// For messages.
    address: String,
    open: Arc<dyn Fn() -> BoxFuture<'static, super::Result<SharedEngine>> + Send + Sync>,
}

impl fmt::Debug for EngineConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.engine, self.address)
    }
}

const RULE: &str = "must be a URL that starts with memory:, sqlite:, redis://, rediss://, redis+unix://, redis+sentinel://, \
                    rediss+sentinel://, redis+cluster://, rediss+cluster:// (valkey may replace redis), mongodb://, \
                    mongodb+srv://, postgres://, postgresql://, mysql://, mariadb://, etcd://, etcds://, \
                    zookeeper:// or zookeepers://";

/// Stands for the scheme of a list of URLs. No scheme has a space.
const LIST: &str = "a list";

impl EngineConfig {
    /// Parses a target.
    ///
    /// # Behavior
    /// Without a URL, the target is the embedded store in the user's state folder. The caller reads `HOLDFAST_URL`.
    ///
    /// # Errors
    /// `LOCK_INVALID_ARGUMENT` for an invalid target or setting. Messages never contain the password of a URL.
    pub fn parse(urls: &[String], settings: &Settings) -> Result<Self, LockError> {
        let urls: Vec<String> = urls.iter().map(|url| of_valkey(url)).collect();
        if let Some(got) = urls.iter().find_map(|url| without_scheme(url)) {
            return Err(LockError::invalid("target", RULE, got));
        }
        if urls.iter().any(|url| has_several(url)) {
            let rule = "must be an array for several servers: ['redis://A', 'redis://B', 'redis://C']";
            return Err(LockError::invalid("target", rule, "one text with several URLs"));
        }
        let (scheme, url) = match &urls[..] {
            [] => ("sqlite", ""),
            [url] => (scheme_of(url), url.as_str()),
            _ => (LIST, ""),
        };
        let config = match scheme {
            #[cfg(feature = "memory")]
            "memory" => {
                // One store per name and prefix.
                let prefix = settings.key_prefix.as_deref().unwrap_or_default();
                let name = format!("{}\0{prefix}", &url["memory:".len()..]);
                let open = async |name: String| Ok(super::memory::MemoryEngine::named(&name));
                Self::new("memory", String::new(), name, open)
            }
            #[cfg(feature = "sqlite")]
            "sqlite" => {
                let config = match url {
                    "" => super::sql::SqliteConfig::in_state_folder(settings)?,
                    url => super::sql::SqliteConfig::parse(url, settings)?,
                };
                let path = config.path().display().to_string();
                Self::new("sqlite", path, config, super::sql::SqliteEngine::connect)
            }
            #[cfg(feature = "redis")]
            "redis" | "rediss" | "redis+unix" | "redis+sentinel" | "rediss+sentinel" | "redis+cluster"
            | "rediss+cluster" => {
                let config = super::redis::RedisConfig::parse(url, settings)?;
                Self::new("redis", config.address(), config, super::redis::RedisEngine::connect)
            }
            #[cfg(feature = "redis")]
            LIST => {
                let config = super::redis::QuorumConfig::parse(&urls, settings)?;
                Self::new("redis", config.address(), config, super::redis::QuorumEngine::connect)
            }
            #[cfg(feature = "etcd")]
            "etcd" | "etcds" => {
                let config = super::etcd::EtcdConfig::parse(url, settings)?;
                Self::new("etcd", config.servers.to_string(), config, super::etcd::connect)
            }
            #[cfg(feature = "mongodb")]
            "mongodb" | "mongodb+srv" => {
                let config = super::mongodb::MongodbConfig::parse(url, settings)?;
                let connect = super::mongodb::MongodbEngine::connect;
                Self::new("mongodb", config.address(), config, connect)
            }
            #[cfg(feature = "mysql")]
            "mysql" | "mariadb" => {
                let config = super::sql::MysqlConfig::parse(url, settings)?;
                Self::new("mysql", config.server.clone(), config, super::sql::mysql::connect)
            }
            #[cfg(feature = "postgres")]
            "postgres" | "postgresql" => {
                let config = super::sql::PostgresConfig::parse(url, settings)?;
                Self::new("postgres", config.server.clone(), config, super::sql::postgres::connect)
            }
            #[cfg(feature = "zookeeper")]
            "zookeeper" | "zookeepers" => {
                let config = super::zookeeper::ZookeeperConfig::parse(url, settings)?;
                let servers = config.servers.to_string();
                Self::new("zookeeper", servers, config, super::zookeeper::connect)
            }
            other => {
                // The message does not contain a text without a scheme: it may be a password.
                let got = match other {
                    "" => "a string without a scheme".to_owned(),
                    LIST => "a list of URLs".to_owned(),
                    scheme => format!("the scheme \"{scheme}:\""),
                };
                return Err(LockError::invalid("target", RULE, got));
            }
        };
        check(scheme, settings)?;
        Ok(config)
    }

    /// `address`: for messages.
    fn new<C, E, F>(
        engine: &'static str,
        address: String,
        config: C,
        connect: impl Fn(C) -> F + Send + Sync + 'static,
    ) -> Self
    where
        C: Clone + Send + Sync + 'static,
        E: Engine + 'static,
        F: Future<Output = super::Result<Arc<E>>> + Send + 'static,
    {
        let open = Arc::new(move || -> BoxFuture<'static, super::Result<SharedEngine>> {
            let opening = connect(config.clone());
            Box::pin(async move { Ok(opening.await? as SharedEngine) })
        });
        EngineConfig { engine, address, open }
    }

    /// Connects to the store once, and sends one command to it.
    async fn connect_once(&self, timeout: Duration) -> Result<SharedEngine, LockError> {
        let opened = tokio::time::timeout(timeout, (self.open)()).await;
        let late = |_| Err(EngineError::no_answer(self.engine, &self.address, "connect", timeout));
        opened.unwrap_or_else(late).map_err(LockError::store)
    }
}

/// Returns the URL with the scheme of Redis, if it has one of Valkey.
fn of_valkey(url: &str) -> String {
    match url.strip_prefix("valkey") {
        Some(rest) => format!("redis{rest}"),
        None => url.to_owned(),
    }
}

/// Describes a list of hosts with ports, and the URL that is probably meant. `None`: the text is something else.
fn without_scheme(text: &str) -> Option<String> {
    let (http, rest) = match text.split_once("://") {
        Some((scheme @ ("http" | "https"), rest)) => (Some(scheme), rest),
        _ => (None, text),
    };
    let hosts = rest.split('/').next()?.rsplit('@').next()?;
    let ports: Option<Vec<u16>> = hosts
        .split(',')
        .map(|host| host.split_once(':')?.1.parse().ok())
        .collect();
    let ports = ports?;
    let first = ports.first()?;
    let (scheme, path) = match first {
        _ if ["memory:", "sqlite:"].iter().any(|path| text.starts_with(path)) => return None,
        2379 if http == Some("https") => ("etcds", ""),
        2379 => ("etcd", ""),
        27017 => ("mongodb", ""),
        2181 => ("zookeeper", ""),
        3306 => ("mysql", "/DATABASE"),
        5432 => ("postgres", "/DATABASE"),
        _ if ports.len() > 1 => ("redis+cluster", ""),
        _ => ("redis", ""),
    };
    let host = match scheme {
        "redis" | "redis+cluster" => "HOST:PORT".to_owned(),
        _ => format!("HOST:{first}"),
    };
    let hosts = vec![host; ports.len().min(2)].join(",");
    let got = match http {
        None => "a host and a port without a scheme",
        Some(_) => "the scheme of HTTP",
    };
    Some(format!("{got} (did you mean {scheme}://{hosts}{path}?)"))
}

/// Whether a text has several URLs of Redis.
fn has_several(text: &str) -> bool {
    let is_url =
        |part: &str| part.contains("://") && ["redis", "valkey"].iter().any(|one| scheme_of(part).starts_with(one));
    text.split(',').skip(1).any(|part| is_url(part.trim_start()))
}

/// Returns the scheme of a URL. It is empty for a text that has none, which may be a password.
pub(super) fn scheme_of(url: &str) -> &str {
    let scheme = url.split_once(':').map_or("", |(scheme, _)| scheme);
    let is_of_scheme = |byte: u8| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte);
    if scheme.bytes().all(is_of_scheme) { scheme } else { "" }
}

/// Maximum length of the prefix of names in bytes. An index of PostgreSQL, and a column of MySQL, have room for it and the
/// longest name.
const MAX_PREFIX_BYTES: usize = 512;

/// Rejects the settings of other stores. The memory store may have those of SQL, MongoDB and ZooKeeper: in tests it replaces any store.
fn check(scheme: &str, settings: &Settings) -> Result<(), LockError> {
    let prefix_bytes = settings.key_prefix.as_ref().map_or(0, String::len);
    if prefix_bytes > MAX_PREFIX_BYTES {
        let got = format_args!("{prefix_bytes} bytes");
        return Err(LockError::invalid("keyPrefix", "must be at most 512 bytes", got));
    }
    let name = |name: &String| (name != DEFAULT_TABLE).then(|| format!("{name:?}"));
    let timeout = settings.session_timeout;
    // The setting, its value if it is set, the beginnings of the schemes that have it, and their stores.
    let restricted = [
        (
            "credentials",
            settings.credentials.as_ref().map(|_| "a function".to_owned()),
            "redis postgres LIST",
            "Redis and PostgreSQL (on MongoDB a client certificate, with authMechanism=MONGODB-X509, needs no password)",
        ),
        (
            "listenUrl",
            settings.listen_url.as_ref().map(|_| "a URL".to_owned()),
            "postgres",
            "PostgreSQL",
        ),
        (
            "collection",
            name(&settings.collection),
            "memory mongodb",
            "MongoDB (SQL stores have a table)",
        ),
        (
            "table",
            name(&settings.table),
            "memory sqlite postgres mysql mariadb",
            "SQLite, PostgreSQL, MySQL and MariaDB (MongoDB has a collection, Redis a keyPrefix)",
        ),
        (
            "minReplicas",
            (settings.min_replicas > 0).then(|| settings.min_replicas.to_string()),
            "redis: rediss: redis+sentinel rediss+sentinel",
            "one of redis://, rediss://, redis+sentinel:// and rediss+sentinel://",
        ),
        (
            "sessionTimeoutMs",
            timeout.map(|timeout| format!("{} ms", timeout.as_millis())),
            "memory zookeeper",
            "ZooKeeper",
        ),
        (
            "maxConnections",
            settings.max_connections.map(|number| number.to_string()),
            "memory postgres mysql mariadb",
            "PostgreSQL, MySQL and MariaDB (MongoDB has maxPoolSize in the URL)",
        ),
    ];
    let scheme = format!("{scheme}:");
    for (setting, value, schemes, stores) in restricted {
        if let Some(got) = value
            && !schemes.split(' ').any(|start| scheme.starts_with(start))
        {
            let rule = format!("must be absent for a store other than {stores}");
            return Err(LockError::invalid(setting, &rule, got));
        }
    }
    match settings.max_connections {
        Some(0) => Err(LockError::invalid("maxConnections", "must be at least 1", 0)),
        _ => Ok(()),
    }
}

/// The backoff of `connect` while the store cannot be reached.
const RECONNECT: Backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(1));

/// Connects to the store, and sends one command to it. Tries again for `settings.connect_for` while the store cannot be
/// reached.
///
/// # Errors
/// `LOCK_STORE` when the store cannot be reached, refuses the connection, or does not answer within `settings.store_timeout`.
pub async fn connect(config: EngineConfig, settings: &Settings) -> Result<SharedEngine, LockError> {
    let end = tokio::time::Instant::now() + settings.connect_for;
    let mut backoff = RECONNECT;
    loop {
        let error = match config.connect_once(settings.store_timeout).await {
            Ok(engine) => {
                tracing::debug!(engine = config.engine, "connected");
                return Ok(engine);
            }
            Err(error) => error,
        };
        let now = tokio::time::Instant::now();
        if !error.retryable || now >= end {
            return Err(error);
        }
        tracing::debug!(%error, "cannot connect yet");
        // The last attempt begins at the deadline, however long the backoff is.
        tokio::time::sleep_until(end.min(now + backoff.delay())).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_that_is_no_url_is_explained() {
        let got = |text: &str| without_scheme(text).unwrap_or_default();
        assert!(got("redis:6379").ends_with("(did you mean redis://HOST:PORT?)"));
        assert!(got("a:2181,b:2181/c").ends_with("(did you mean zookeeper://HOST:2181,HOST:2181?)"));
        assert!(got("a:7000,b:7001").ends_with("(did you mean redis+cluster://HOST:PORT,HOST:PORT?)"));
        assert!(got("https://h:2379").ends_with("(did you mean etcds://HOST:2379?)"));
        assert!(got("http://h:2379").starts_with("the scheme of HTTP (did you mean etcd:"));
        assert!(got("http://u:p@h:2379").contains("etcd:"));
        for other in [
            "memory:5",
            "sqlite:2024/locks.db",
            "sqlite:3306",
            "redis://h:5",
            "user:5x",
            "http://u:p@h",
            "a:1,b",
            "",
            "h:",
        ] {
            assert_eq!(got(other), "");
        }
        for (text, scheme) in [
            ("etcds://h", "etcds"),
            ("hunter2@h:abc", ""),
            ("pass word:x", ""),
            ("memory", ""),
        ] {
            assert_eq!(scheme_of(text), scheme);
        }
        assert!(has_several("redis://a, valkey+cluster://b") && !has_several("mongodb://a,redis2/?x=://"));
    }
}
