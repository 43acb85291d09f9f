//! Parses a target (a URL, a list of URLs, nothing) and connects to its engine. The only match over engines.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use super::{Credentials, Resolver, SharedEngine, TlsFiles, Warnings};
use crate::backoff::Backoff;
use crate::error::LockError;
use crate::event_loop::EventLoop;

/// The settings of an engine besides its URL.
///
/// They have no `Debug`: another URL and the environment may contain passwords.
#[derive(Clone)]
pub struct Settings {
    /// The prefix of every name in the store. `None`: the engine's default (`lock:` on Redis, `holdfast/` on etcd, empty elsewhere).
    pub key_prefix: Option<String>,
    /// MongoDB: the collection. Default `locks`.
    pub collection: String,
    /// SQL: the table. Default `locks`.
    pub table: String,
    /// The timeout of connecting. Default 5 s.
    pub store_timeout: Duration,
    /// Redis: the number of replicas that must acknowledge a grant. Default 0.
    pub min_replicas: u32,
    /// PostgreSQL, MySQL, MariaDB: the maximum number of connections. Default 5 on PostgreSQL, 4 on MySQL and MariaDB.
    pub max_connections: Option<u32>,
    /// ZooKeeper: the session timeout. `None`: 10 s.
    pub session_timeout: Option<Duration>,
    /// The certificates for `rediss://`, `etcds://` and `zookeepers://`, and for MongoDB and PostgreSQL with TLS.
    pub tls: TlsFiles,
    /// Redis, PostgreSQL: the source of the logins of new connections, instead of the URL.
    pub credentials: Option<Arc<Credentials>>,
    /// MongoDB: resolves the name of a `mongodb+srv` URL.
    pub resolver: Option<Arc<Resolver>>,
    /// PostgreSQL: the URL of the servers without the pooler, for notifications.
    pub listen_url: Option<String>,
    /// PostgreSQL: the variables of the environment whose names begin with `PG`, for what the URL leaves out.
    pub environment: HashMap<String, String>,
    /// Receives the warnings of the engine. `None`: there are no warnings.
    pub warnings: Option<Arc<Warnings>>,
    /// How long `connect` tries again while the store cannot be reached. Default 0: one attempt.
    pub connect_for: Duration,
    /// The caller's event loop, if it can poll an engine's socket.
    pub event_loop: Option<Arc<dyn EventLoop>>,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            key_prefix: None,
            collection: DEFAULT_TABLE.into(),
            table: DEFAULT_TABLE.into(),
            store_timeout: Duration::from_secs(5),
            min_replicas: 0,
            max_connections: None,
            session_timeout: None,
            tls: TlsFiles::default(),
            credentials: None,
            resolver: None,
            listen_url: None,
            environment: HashMap::new(),
            warnings: None,
            connect_for: Duration::ZERO,
            event_loop: None,
        }
    }
}

/// A parsed target: the engine and its settings.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum EngineConfig {
    /// A store in this process, by name.
    #[cfg(feature = "memory")]
    Memory(String),
    /// A SQLite file.
    #[cfg(feature = "sqlite")]
    Sqlite(super::sql::SqliteConfig),
    /// One Redis node, a master under Sentinel, or a cluster.
    #[cfg(feature = "redis")]
    Redis(Box<super::redis::RedisConfig>),
    /// A quorum of independent Redis nodes.
    #[cfg(feature = "redis")]
    Quorum(Box<super::redis::QuorumConfig>),
    /// An etcd cluster.
    #[cfg(feature = "etcd")]
    Etcd(Box<super::etcd::EtcdConfig>),
    /// A ZooKeeper ensemble.
    #[cfg(feature = "zookeeper")]
    Zookeeper(Box<super::zookeeper::ZookeeperConfig>),
    /// A MongoDB deployment.
    #[cfg(feature = "mongodb")]
    Mongodb(Box<super::mongodb::MongodbConfig>),
    /// A MySQL or MariaDB database.
    #[cfg(feature = "mysql")]
    Mysql(Box<super::sql::MysqlConfig>),
    /// A PostgreSQL database.
    #[cfg(feature = "postgres")]
    Postgres(Box<super::sql::PostgresConfig>),
}

impl EngineConfig {
    /// Parses a target.
    ///
    /// # Behavior
    /// Without a URL, the target is the embedded store in the user's state folder. The caller reads `HOLDFAST_URL`.
    ///
    /// # Errors
    /// `LOCK_INVALID_ARGUMENT` for an invalid target or setting. Messages never contain the password of a URL.
    pub fn parse(urls: &[String], settings: &Settings) -> Result<Self, LockError> {
        let urls: &[String] = &urls.iter().map(|url| of_valkey(url)).collect::<Vec<_>>();
        if settings.credentials.is_some() {
            let can_ask = |url: &String| url.starts_with("redis") || url.starts_with("postgres");
            if urls.is_empty() || !urls.iter().all(can_ask) {
                let rule = "must be absent for a store other than Redis and PostgreSQL (on MongoDB a client certificate, with \
                            authMechanism=MONGODB-X509, needs no password)";
                return Err(LockError::invalid("credentials", rule, "a function"));
            }
        }
        if settings.listen_url.is_some() && !urls.iter().any(|url| url.starts_with("postgres")) {
            let rule = "must be absent for a store other than PostgreSQL";
            return Err(LockError::invalid("listenUrl", rule, "a URL"));
        }
        let scheme = match urls {
            [one] => one.split(':').next(),
            _ => None,
        };
        check_tables(urls.is_empty(), scheme, settings)?;
        let prefix_bytes = settings.key_prefix.as_ref().map_or(0, String::len);
        if prefix_bytes > MAX_PREFIX_BYTES {
            let got = format_args!("{prefix_bytes} bytes");
            return Err(LockError::invalid("keyPrefix", "must be at most 512 bytes", got));
        }
        if settings.min_replicas > 0 && !scheme.is_some_and(|scheme| REPLICATED.contains(&scheme)) {
            let rule = "must be 0 or absent for a store other than one of redis://, rediss://, redis+sentinel:// and \
                        rediss+sentinel://";
            return Err(LockError::invalid("minReplicas", rule, settings.min_replicas));
        }
        let has_sessions = |scheme: &str| ["memory", "zookeeper", "zookeepers"].contains(&scheme);
        if let Some(timeout) = settings.session_timeout
            && !scheme.is_some_and(has_sessions)
        {
            let rule = "must be absent for a store other than ZooKeeper";
            let got = format_args!("{} ms", timeout.as_millis());
            return Err(LockError::invalid("sessionTimeoutMs", rule, got));
        }
        let is_server = |scheme: &str| ["memory", "postgres", "postgresql", "mysql", "mariadb"].contains(&scheme);
        if let Some(number) = settings.max_connections
            && !scheme.is_some_and(is_server)
        {
            let rule = "must be absent for a store other than PostgreSQL, MySQL and MariaDB (MongoDB has maxPoolSize in the URL)";
            return Err(LockError::invalid("maxConnections", rule, number));
        }
        if settings.max_connections == Some(0) {
            return Err(LockError::invalid("maxConnections", "must be at least 1", 0));
        }
        let url = match urls {
            #[cfg(feature = "sqlite")]
            [] => {
                return Ok(EngineConfig::Sqlite(super::sql::SqliteConfig::in_state_folder(
                    settings,
                )?));
            }
            #[cfg(not(feature = "sqlite"))]
            [] => {
                return Err(LockError::invalid(
                    "target",
                    "is required: this build has no embedded store",
                    "nothing",
                ));
            }
            [one] => one.as_str(),
            #[cfg(feature = "redis")]
            many => {
                let config = super::redis::QuorumConfig::parse(many, settings)?;
                return Ok(EngineConfig::Quorum(Box::new(config)));
            }
            #[cfg(not(feature = "redis"))]
            many => {
                let rule = "must be one URL: this build does not include Redis";
                return Err(LockError::invalid("target", rule, format_args!("{} URLs", many.len())));
            }
        };
        let scheme = url.split(':').next().unwrap_or_default();
        match scheme {
            #[cfg(feature = "memory")]
            "memory" => {
                // One store per name and prefix.
                let prefix = settings.key_prefix.as_deref().unwrap_or_default();
                Ok(EngineConfig::Memory(format!("{}\0{prefix}", &url["memory:".len()..])))
            }
            #[cfg(feature = "sqlite")]
            "sqlite" => Ok(EngineConfig::Sqlite(super::sql::SqliteConfig::parse(url, settings)?)),
            #[cfg(feature = "redis")]
            "redis" | "rediss" | "redis+unix" | "redis+sentinel" | "rediss+sentinel" | "redis+cluster"
            | "rediss+cluster" => {
                let config = super::redis::RedisConfig::parse(url, settings)?;
                Ok(EngineConfig::Redis(Box::new(config)))
            }
            #[cfg(feature = "etcd")]
            "etcd" | "etcds" => {
                let config = super::etcd::EtcdConfig::parse(url, settings)?;
                Ok(EngineConfig::Etcd(Box::new(config)))
            }
            #[cfg(feature = "mongodb")]
            "mongodb" | "mongodb+srv" => Ok(EngineConfig::Mongodb(Box::new(super::mongodb::MongodbConfig::parse(
                url, settings,
            )?))),
            #[cfg(feature = "mysql")]
            "mysql" | "mariadb" => {
                let config = super::sql::MysqlConfig::parse(url, settings)?;
                Ok(EngineConfig::Mysql(Box::new(config)))
            }
            #[cfg(feature = "postgres")]
            "postgres" | "postgresql" => {
                let config = super::sql::PostgresConfig::parse(url, settings)?;
                Ok(EngineConfig::Postgres(Box::new(config)))
            }
            #[cfg(feature = "zookeeper")]
            "zookeeper" | "zookeepers" => {
                let config = super::zookeeper::ZookeeperConfig::parse(url, settings)?;
                Ok(EngineConfig::Zookeeper(Box::new(config)))
            }
            _ if !url.contains(':') => {
                // The message does not contain the text: without a scheme, it may be a password.
                Err(LockError::invalid("target", RULE, "a string without a scheme"))
            }
            other => Err(LockError::invalid(
                "target",
                RULE,
                format_args!("the scheme \"{other}:\""),
            )),
        }
    }
}

const RULE: &str = "must be a URL that starts with memory:, sqlite:, redis://, rediss://, redis+unix://, redis+sentinel://, \
                    rediss+sentinel://, redis+cluster://, rediss+cluster:// (valkey may replace redis), mongodb://, \
                    mongodb+srv://, postgres://, postgresql://, mysql://, mariadb://, etcd://, etcds://, \
                    zookeeper:// or zookeepers://";
/// Returns the URL with the scheme of Redis, if it has one of Valkey.
fn of_valkey(url: &str) -> String {
    match url.strip_prefix("valkey") {
        Some(rest) => format!("redis{rest}"),
        None => url.to_owned(),
    }
}

/// Maximum length of the prefix of names in bytes. An index of PostgreSQL, and a column of MySQL, have room for it and the
/// longest name.
const MAX_PREFIX_BYTES: usize = 512;

/// The default name of the collection, and of the table.
const DEFAULT_TABLE: &str = "locks";

/// The schemes for which `min_replicas` is allowed.
const REPLICATED: [&str; 4] = ["redis", "rediss", "redis+sentinel", "rediss+sentinel"];

/// Rejects the name of a collection for a store without collections, and that of a table likewise. The memory store may have both: in
/// tests it replaces any store.
fn check_tables(is_embedded: bool, scheme: Option<&str>, settings: &Settings) -> Result<(), LockError> {
    let has = |schemes: &[&str]| scheme.is_some_and(|scheme| scheme == "memory" || schemes.contains(&scheme));
    if settings.collection != DEFAULT_TABLE && !has(&["mongodb", "mongodb+srv"]) {
        let rule = "must be absent for a store other than MongoDB (SQL stores have a table)";
        return Err(LockError::invalid(
            "collection",
            rule,
            format_args!("{:?}", settings.collection),
        ));
    }
    let is_sql = is_embedded || has(&["sqlite", "postgres", "postgresql", "mysql", "mariadb"]);
    if settings.table != DEFAULT_TABLE && !is_sql {
        let rule = "must be absent for a store other than SQLite, PostgreSQL, MySQL and MariaDB (MongoDB has a collection, Redis a keyPrefix)";
        return Err(LockError::invalid("table", rule, format_args!("{:?}", settings.table)));
    }
    Ok(())
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
        let error = match connect_once(config.clone(), settings).await {
            Ok(engine) => {
                tracing::debug!(engine = engine.name(), "connected");
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

/// Connects to the store once, and sends one command to it.
#[cfg_attr(
    not(any(
        feature = "etcd",
        feature = "sqlite",
        feature = "redis",
        feature = "mongodb",
        feature = "mysql",
        feature = "postgres",
        feature = "zookeeper"
    )),
    allow(unused_variables)
)]
async fn connect_once(config: EngineConfig, settings: &Settings) -> Result<SharedEngine, LockError> {
    let limit = settings.store_timeout;
    match config {
        #[cfg(feature = "memory")]
        EngineConfig::Memory(name) => Ok(super::memory::MemoryEngine::named(&name)),
        #[cfg(feature = "sqlite")]
        EngineConfig::Sqlite(config) => {
            let place = ("sqlite", config.path().display().to_string());
            opened(place, limit, super::sql::SqliteEngine::connect(config)).await
        }
        #[cfg(feature = "redis")]
        EngineConfig::Redis(config) => {
            let place = ("redis", config.address());
            opened(place, limit, super::redis::RedisEngine::connect(*config)).await
        }
        #[cfg(feature = "redis")]
        EngineConfig::Quorum(config) => {
            let place = ("redis", config.address());
            opened(place, limit, super::redis::QuorumEngine::connect(*config)).await
        }
        #[cfg(feature = "etcd")]
        EngineConfig::Etcd(config) => {
            let place = ("etcd", config.servers.to_string());
            opened(place, limit, super::etcd::connect(*config)).await
        }
        #[cfg(feature = "mongodb")]
        EngineConfig::Mongodb(config) => {
            let place = ("mongodb", config.address());
            opened(place, limit, super::mongodb::MongodbEngine::connect(*config)).await
        }
        #[cfg(feature = "mysql")]
        EngineConfig::Mysql(config) => {
            let place = ("mysql", config.server.clone());
            opened(place, limit, super::sql::mysql::connect(*config)).await
        }
        #[cfg(feature = "postgres")]
        EngineConfig::Postgres(config) => {
            let place = ("postgres", config.server.clone());
            opened(place, limit, super::sql::postgres::connect(*config)).await
        }
        #[cfg(feature = "zookeeper")]
        EngineConfig::Zookeeper(config) => {
            let place = ("zookeeper", config.servers.to_string());
            opened(place, limit, super::zookeeper::connect(*config)).await
        }
    }
}

/// Opens an engine within `timeout`.
#[cfg(any(
    feature = "etcd",
    feature = "sqlite",
    feature = "redis",
    feature = "mongodb",
    feature = "mysql",
    feature = "postgres",
    feature = "zookeeper"
))]
async fn opened<E: super::Engine + 'static>(
    (engine, address): (&'static str, String),
    timeout: Duration,
    opening: impl Future<Output = super::Result<Arc<E>>>,
) -> Result<SharedEngine, LockError> {
    use crate::error::EngineError;
    let opened = tokio::time::timeout(timeout, opening).await;
    let late = |_| Err(EngineError::no_answer(engine, &address, "connect", timeout));
    Ok(opened.unwrap_or_else(late).map_err(LockError::store)?)
}
