//! The version and the mode of a server.

use std::sync::Arc;

use redis::Value;

use super::Link;
use crate::engine::redis::error::Failure;

/// The oldest supported version of Redis.
const OLDEST: (u32, u32) = (6, 2);
/// The oldest supported version of a cluster: earlier ones have no sharded channels.
const OLDEST_IN_CLUSTER: (u32, u32) = (7, 0);

/// What a server says of itself.
pub(super) struct Greeting {
    mode: Option<String>,
    version: Option<String>,
}

impl Greeting {
    /// Reads the reply to `HELLO`. `None`: it is none.
    pub(super) fn read(reply: &Value) -> Option<Self> {
        let Value::Map(fields) = reply else { return None };
        let text_of = |what: &str| {
            fields.iter().find_map(|field| match field {
                (Value::BulkString(name), Value::BulkString(text)) if name == what.as_bytes() => {
                    String::from_utf8(text.clone()).ok()
                }
                _ => None,
            })
        };
        let [mode, version] = ["mode", "version"].map(text_of);
        Some(Greeting { mode, version })
    }

    /// Returns the major and the minor version, which may be missing.
    pub(super) fn version(&self) -> Option<(u32, u32)> {
        let mut numbers = self.version.as_deref()?.split('.').map(str::parse);
        Some((numbers.next()?.ok()?, numbers.next().and_then(Result::ok).unwrap_or(0)))
    }
}

/// Checks the mode and the version of a server.
///
/// # Errors
/// [`Failure::WrongServer`] for a sentinel, for an old server, and outside of a cluster for a node of one.
pub(in super::super) async fn check_server(link: &Arc<Link>, in_cluster: bool) -> Result<(), Failure> {
    let connection = link.connection().await?;
    let Some(greeting) = &connection.greeting else {
        return Err(Failure::Unexpected("HELLO"));
    };
    let wrong = match greeting.mode.as_deref() {
        Some("sentinel") => Some(
            "is a Redis Sentinel, which stores no locks: use redis+sentinel://HOST:PORT/MASTER, with the name of the master, or the \
             address of the Redis server",
        ),
        Some("cluster") if !in_cluster && !link.config().is_sharded() => {
            Some("is a node of a Redis Cluster, and serves only a part of the names: use redis+cluster://HOST:PORT")
        }
        _ => None,
    };
    if let Some(what) = wrong {
        return Err(Failure::WrongServer(format!("{} {what}", link.address)));
    }
    let oldest = if in_cluster { OLDEST_IN_CLUSTER } else { OLDEST };
    match &greeting.version {
        Some(version) if greeting.version().is_some_and(|version| version < oldest) => {
            let text = format!("Redis 6.2 or newer is needed, and 7.0 for a cluster; this is {version}");
            Err(Failure::WrongServer(text))
        }
        // A server without a version is assumed to speak RESP3.
        _ => Ok(()),
    }
}
