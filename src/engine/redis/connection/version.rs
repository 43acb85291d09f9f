//! The version and the mode of a server.

use std::sync::Arc;

use redis::Value;

use super::Link;
use crate::engine::redis::error::Failure;

/// The oldest supported version of Redis.
const OLDEST: (u32, u32) = (6, 2);
/// The oldest supported version of a cluster: earlier ones have no sharded channels.
const OLDEST_IN_CLUSTER: (u32, u32) = (7, 0);

/// Checks the mode and the version of a server.
///
/// # Errors
/// [`Failure::WrongServer`] for a sentinel, for an old server, and outside of a cluster for a node of one.
pub(in super::super) async fn check_server(link: &Arc<Link>, in_cluster: bool) -> Result<(), Failure> {
    let mut hello = redis::cmd("HELLO");
    hello.arg(3);
    let Value::Map(fields) = link.call(&hello).await? else {
        return Err(Failure::Unexpected("HELLO"));
    };
    let text_of = |what: &str| {
        fields.iter().find_map(|field| match field {
            (Value::BulkString(name), Value::BulkString(field)) if name == what.as_bytes() => {
                std::str::from_utf8(field).ok()
            }
            _ => None,
        })
    };
    let wrong = match text_of("mode") {
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
    match text_of("version") {
        Some(version) if is_older(version, oldest) => {
            let text = format!("Redis 6.2 or newer is needed, and 7.0 for a cluster; this is {version}");
            Err(Failure::WrongServer(text))
        }
        // A server without a version is assumed to speak RESP3.
        _ => Ok(()),
    }
}

fn is_older(version: &str, oldest: (u32, u32)) -> bool {
    let mut numbers = version.split('.').map(str::parse::<u32>);
    matches!((numbers.next(), numbers.next()), (Some(Ok(major)), Some(Ok(minor))) if (major, minor) < oldest)
}
