//! The version of a server.

use std::sync::Arc;

use redis::Value;

use super::Link;
use crate::engine::redis::error::Failure;

/// The oldest supported version of Redis.
pub(in super::super) const OLDEST: (u32, u32) = (6, 2);
/// The oldest supported version of a cluster: earlier ones have no sharded channels.
pub(in super::super) const OLDEST_IN_CLUSTER: (u32, u32) = (7, 0);

/// Checks the version of a server. Returns whether it belongs to a cluster. The login sent `HELLO` before, but the driver
/// does not expose the reply.
pub(in super::super) async fn check_version(link: &Arc<Link>, oldest: (u32, u32)) -> Result<bool, Failure> {
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
    match text_of("version") {
        Some(version) if is_older(version, oldest) => Err(Failure::TooOld(version.to_owned())),
        // A server without a version is assumed to speak RESP3.
        _ => Ok(text_of("mode") == Some("cluster")),
    }
}

fn is_older(version: &str, oldest: (u32, u32)) -> bool {
    let mut numbers = version.split('.').map(str::parse::<u32>);
    matches!((numbers.next(), numbers.next()), (Some(Ok(major)), Some(Ok(minor))) if (major, minor) < oldest)
}
