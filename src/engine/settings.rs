//! The settings of an engine besides its URL, as the caller gives them.

use std::collections::HashMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;

use super::credentials::Credentials;
use super::warnings::Warnings;
use crate::event_loop::EventLoop;

/// The default name of the collection, and of the table.
pub(super) const DEFAULT_TABLE: &str = "locks";

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

/// The DNS records of a name, for one service.
pub struct Records {
    /// Host and port of each SRV record.
    pub servers: Vec<(String, u16)>,
    /// The TXT records of the name.
    pub texts: Vec<String>,
}

/// Resolves a service and a name: JavaScript has a resolver. The error is text. A name without records is no error.
pub type Resolver = dyn Fn(&str, &str) -> BoxFuture<'static, Result<Records, String>> + Send + Sync;

/// The TLS settings: paths of PEM files, or their text.
///
/// # Behavior
/// `Debug` shows no text: it may contain a private key.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificate authorities, instead of the system's.
    pub ca_file: Option<PathBuf>,
    /// The client's certificate. It may have the private key, too.
    pub cert_file: Option<PathBuf>,
    /// The client's private key.
    pub key_file: Option<PathBuf>,
    /// The text of `ca_file`, instead of the file.
    pub ca: Option<String>,
    /// The text of `cert_file`, instead of the file.
    pub cert: Option<String>,
    /// The text of `key_file`, instead of the file.
    pub key: Option<String>,
    /// Redis: the name in the server's certificate, instead of the host of the URL.
    pub server_name: Option<String>,
    /// Accepts any certificate. For tests only.
    pub insecure: bool,
}

impl TlsFiles {
    /// Rejects `tls.servername`, which only Redis has. `advice` is appended to the error.
    pub(super) fn reject_server_name(&self, advice: &str) -> Result<(), crate::error::LockError> {
        match self.server_name {
            Some(_) => Err(crate::error::LockError::invalid(
                "tls.servername",
                &format!("is for Redis: {advice}"),
                "a name",
            )),
            None => Ok(()),
        }
    }
}

impl fmt::Debug for TlsFiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsFiles").finish_non_exhaustive()
    }
}
