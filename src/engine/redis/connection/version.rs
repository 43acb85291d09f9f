//! The version of a server.

use std::sync::Arc;

use redis::Value;

use super::Link;
use crate::engine::redis::error::Failure;

/// The oldest Redis that will do.
pub(in super::super) const OLDEST: (u32, u32) = (6, 2);
/// The same for a cluster: before, channels had no slots.
pub(in super::super) const OLDEST_IN_CLUSTER: (u32, u32) = (7, 0);

/// Asks for the version, and whether the server is a cluster's. The login has said `HELLO` already, but the driver keeps
/// the answer to itself.
pub(in super::super) async fn check_version(link: &Arc<Link>, oldest: (u32, u32)) -> Result<bool, Failure> {
    let mut hello = redis::cmd("HELLO");
    hello.arg(3);
    let Value::Map(fields) = link.call(&hello).await? else {
        return Err(Failure::Unexpected("of HELLO"));
    };
    let told = |what: &str| {
        fields.iter().find_map(|field| match field {
            (Value::BulkString(name), Value::BulkString(told)) if name == what.as_bytes() => {
                std::str::from_utf8(told).ok()
            }
            _ => None,
        })
    };
    match told("version") {
        Some(version) if is_older(version, oldest) => Err(Failure::TooOld(version.to_owned())),
        // What calls itself otherwise is taken at its word that it speaks RESP3.
        _ => Ok(told("mode") == Some("cluster")),
    }
}

fn is_older(version: &str, oldest: (u32, u32)) -> bool {
    let mut numbers = version.split('.').map(str::parse::<u32>);
    matches!((numbers.next(), numbers.next()), (Some(Ok(major)), Some(Ok(minor))) if (major, minor) < oldest)
}
