//! From a target (URL, list of URLs, nothing) to a connected engine: the only match over engines.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::SharedEngine;
use crate::error::LockError;
use crate::event_loop::EventLoop;

/// What every engine may be told beside its URL.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Put in front of every name in the store. `None`: the engine's own default (`lock:` on Redis, nothing elsewhere).
    pub key_prefix: Option<String>,
    /// MongoDB: the collection. Default `locks`.
    pub collection: String,
    /// SQL: the table. Default `locks`.
    pub table: String,
    /// The longest that connecting may take. Default 5 s.
    pub store_timeout: Duration,
    /// Redis: how many replicas have to acknowledge a grant before it counts. Default 0.
    pub min_replicas: u32,
    /// Certificates for `rediss://` and for MongoDB with TLS.
    pub tls: TlsFiles,
    /// The event loop of the thread that the calls come from, if it can serve an engine's socket.
    pub event_loop: Option<Arc<dyn EventLoop>>,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            key_prefix: None,
            collection: "locks".into(),
            table: "locks".into(),
            store_timeout: Duration::from_secs(5),
            min_replicas: 0,
            tls: TlsFiles::default(),
            event_loop: None,
        }
    }
}

/// Paths of PEM files, and whether to believe any certificate.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TlsFiles {
    /// The authorities to trust instead of the system's.
    pub ca_file: Option<PathBuf>,
    /// The client's certificate (MongoDB: certificate and key in one file).
    pub cert_file: Option<PathBuf>,
    /// The client's private key.
    pub key_file: Option<PathBuf>,
    /// Accept any certificate. For tests only.
    pub insecure: bool,
}

/// A target that was understood: which engine, and where it is.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum EngineConfig {
    /// This process only. One store per name.
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
    /// A MongoDB deployment.
    #[cfg(feature = "mongodb")]
    Mongodb(Box<super::mongodb::MongodbConfig>),
}

impl EngineConfig {
    /// Understands a target.
    ///
    /// # Behavior
    /// No URL at all means the embedded store in the user's state folder. `HOLDFAST_URL` is the caller's business.
    ///
    /// # Errors
    /// `LOCK_INVALID_ARGUMENT` naming `target` (or the setting) for whatever cannot be understood. A password in the
    /// URL is never part of a message.
    pub fn parse(urls: &[String], settings: &Settings) -> Result<Self, LockError> {
        if settings.min_replicas > 0 {
            let scheme = match urls {
                [one] => one.split(':').next(),
                _ => None,
            };
            if !scheme.is_some_and(|scheme| REPLICATED.contains(&scheme)) {
                return Err(LockError::invalid(
                    "minReplicas",
                    "must be 0 or absent for a store other than one of redis://, rediss://, redis+sentinel:// and \
                     rediss+sentinel://",
                    settings.min_replicas,
                ));
            }
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
                    "is needed: this build has no embedded store",
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
                let rule = "must be one URL: this build has no Redis";
                return Err(LockError::invalid("target", rule, format_args!("{} URLs", many.len())));
            }
        };
        let scheme = url.split(':').next().unwrap_or_default();
        match scheme {
            #[cfg(feature = "memory")]
            "memory" => {
                // One store per name and prefix: a prefix keeps apart what has the same name.
                let prefix = settings.key_prefix.as_deref().unwrap_or_default();
                Ok(EngineConfig::Memory(format!("{}\0{prefix}", &url["memory:".len()..])))
            }
            #[cfg(feature = "sqlite")]
            "sqlite" => Ok(EngineConfig::Sqlite(super::sql::SqliteConfig::parse(url, settings)?)),
            #[cfg(feature = "redis")]
            "redis" | "rediss" | "redis+sentinel" | "rediss+sentinel" | "redis+cluster" | "rediss+cluster" => Ok(
                EngineConfig::Redis(Box::new(super::redis::RedisConfig::parse(url, settings)?)),
            ),
            #[cfg(feature = "mongodb")]
            "mongodb" | "mongodb+srv" => Ok(EngineConfig::Mongodb(Box::new(super::mongodb::MongodbConfig::parse(
                url, settings,
            )?))),
            _ if !url.contains(':') => {
                // Without a scheme the whole text may be anything, a password included: it is not shown.
                Err(LockError::invalid("target", RULE, "a text without a scheme"))
            }
            other => Err(LockError::invalid(
                "target",
                RULE,
                format_args!("the scheme \"{other}:\""),
            )),
        }
    }
}

const RULE: &str = "must be a URL that starts with memory:, sqlite:, redis://, rediss://, redis+sentinel://, \
                    rediss+sentinel://, redis+cluster://, rediss+cluster://, mongodb:// or mongodb+srv://";
/// The targets that `min_replicas` has a meaning for.
const REPLICATED: [&str; 4] = ["redis", "rediss", "redis+sentinel", "rediss+sentinel"];

/// Connects, and talks to the store once before it returns.
///
/// # Errors
/// `LOCK_STORE` when the store cannot be reached or refuses, within `settings.store_timeout`.
#[cfg_attr(
    not(any(feature = "sqlite", feature = "redis", feature = "mongodb")),
    allow(unused_variables)
)]
pub async fn connect(config: EngineConfig, settings: &Settings) -> Result<SharedEngine, LockError> {
    let limit = settings.store_timeout;
    match config {
        #[cfg(feature = "memory")]
        EngineConfig::Memory(name) => Ok(super::memory::MemoryEngine::named(&name)),
        #[cfg(feature = "sqlite")]
        EngineConfig::Sqlite(config) => within("sqlite", limit, super::sql::SqliteEngine::connect(config)).await,
        #[cfg(feature = "redis")]
        EngineConfig::Redis(config) => within("redis", limit, super::redis::RedisEngine::connect(*config)).await,
        #[cfg(feature = "redis")]
        EngineConfig::Quorum(config) => within("redis", limit, super::redis::QuorumEngine::connect(*config)).await,
        #[cfg(feature = "mongodb")]
        EngineConfig::Mongodb(config) => {
            within("mongodb", limit, super::mongodb::MongodbEngine::connect(*config)).await
        }
    }
}

/// Opens an engine within `limit`.
#[cfg(any(feature = "sqlite", feature = "redis", feature = "mongodb"))]
async fn within<E: super::Engine + 'static>(
    engine: &'static str,
    limit: Duration,
    opening: impl Future<Output = super::Result<std::sync::Arc<E>>>,
) -> Result<SharedEngine, LockError> {
    match tokio::time::timeout(limit, opening).await {
        Ok(Ok(engine)) => Ok(engine),
        Ok(Err(error)) => Err(LockError::store(error)),
        Err(_) => Err(LockError::store(crate::error::EngineError::no_answer(
            engine, "connect", limit,
        ))),
    }
}
