//! Reads locks: one by its name, or all with a prefix.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::join_all;
use redis::{Cmd, Value};

use crate::engine::redis::RedisEngine;
use crate::engine::redis::connection::Link;
use crate::engine::redis::error::{ENGINE, Failure};
use crate::engine::redis::keys::{KeyBuffer, Layout, Part};
use crate::engine::redis::scripts::{INSPECT, Script};
use crate::error::EngineError;
use crate::model::{Fence, Holder, LockInfo, OwnerToken, Process};

/// The number of keys per SCAN, which bounds how long one SCAN blocks the server.
const SCANNED_AT_ONCE: usize = 1000;
/// The number of locks that are read at the same time.
pub(in super::super) const READ_AT_ONCE: usize = 100;
/// The keys of `inspect.lua` on a node of a quorum.
pub(in super::super) const WITHOUT_QUEUE: [Part; 3] = [Part::Lock, Part::Fence, Part::Metadata];
/// The keys of `inspect.lua`.
const ALL: [Part; 4] = [Part::Lock, Part::Fence, Part::Metadata, Part::Queue];

/// The record of a lock may be written a moment after the grant (`ops/acquire_plain.rs`): a reader in between reads again
/// after these pauses.
pub(in super::super) const RECORD_UNDER_WAY: [Duration; 3] = [
    Duration::from_millis(10),
    Duration::from_millis(25),
    Duration::from_millis(50),
];

/// Reads, and reads again while a record is missing.
pub(in super::super) async fn read_until_recorded<T, E, F>(
    look: impl Fn() -> F,
    is_unrecorded: impl Fn(&T) -> bool,
) -> Result<T, E>
where
    F: Future<Output = Result<T, E>>,
{
    let mut seen = look().await?;
    for pause in RECORD_UNDER_WAY {
        if !is_unrecorded(&seen) {
            break;
        }
        tokio::time::sleep(pause).await;
        seen = look().await?;
    }
    Ok(seen)
}

impl RedisEngine {
    /// Reads one name.
    pub(in super::super) async fn inspect_name(&self, name: &str) -> Result<Option<LockInfo>, Failure> {
        self.write_records();
        let is_unrecorded = |seen: &Option<LockInfo>| seen.as_ref().is_some_and(|info| self.is_unrecorded(info));
        read_until_recorded(|| self.read(name), is_unrecorded).await
    }

    /// Whether it looks like a lock of this engine, and has no record (yet).
    fn is_unrecorded(&self, info: &LockInfo) -> bool {
        self.counts && info.fence.is_none() && info.holder.is_some()
    }

    async fn read(&self, name: &str) -> Result<Option<LockInfo>, Failure> {
        let call = INSPECT.call(&self.layout, &ALL, std::iter::once(name));
        let slot = self.route.slot(&self.layout, name);
        let mut smaller = INSPECT.call(&self.layout, &ALL[..1], std::iter::once(name));
        let mut room = KeyBuffer::default();
        let (_, companions) = room.keys(&self.layout, name, [Part::Fence, Part::Metadata]);
        smaller.arg(&companions[..]);
        let scripts: [(&Script, &Cmd); 2] = [(&INSPECT, &call), (&INSPECT, &smaller)];
        let row = self.route.run_first(&scripts, slot, None).await?;
        if row == Value::Nil {
            return Ok(None);
        }
        let (_, info) = info(name, &row).ok_or(Failure::Unexpected("inspect.lua"))?;
        Ok(Some(info))
    }

    /// Reads every name with a prefix, sorted. Each page has `page_timeout`.
    pub(in super::super) async fn list_names(
        &self,
        prefix: &str,
        page_timeout: Duration,
    ) -> crate::engine::Result<Vec<LockInfo>> {
        self.write_records();
        let names = self.scan(prefix, page_timeout).await?;
        let mut found = self.read_all(names, page_timeout).await?;
        for pause in RECORD_UNDER_WAY {
            let unrecorded: Vec<String> = found
                .iter()
                .filter(|info| self.is_unrecorded(info))
                .map(|info| info.name.clone())
                .collect();
            if unrecorded.is_empty() {
                break;
            }
            tokio::time::sleep(pause).await;
            found.retain(|info| !self.is_unrecorded(info));
            found.extend(self.read_all(unrecorded, page_timeout).await?);
            found.sort_by(|a, b| a.name.cmp(&b.name));
        }
        Ok(found)
    }

    async fn read_all(&self, names: Vec<String>, page_timeout: Duration) -> crate::engine::Result<Vec<LockInfo>> {
        let mut found = Vec::with_capacity(names.len());
        for some in names.chunks(READ_AT_ONCE) {
            // One script per name, sent together: one script for all names would block the server for longer, and would not
            // work in a cluster.
            let reading = join_all(some.iter().map(|name| self.read(name))).map(Ok);
            for outcome in self.in_time(page_timeout, reading).await? {
                match outcome {
                    Ok(seen) => found.extend(seen),
                    // It has another type since the scan.
                    Err(failure) if failure.is_wrong_type() => {}
                    Err(failure) => return Err(failure.during("list")),
                }
            }
        }
        Ok(found)
    }

    /// Returns the names of all keys that may be locks with a prefix, sorted, without repeats: SCAN returns some keys twice,
    /// and a slot that moves may be seen on two servers.
    async fn scan(&self, prefix: &str, page_timeout: Duration) -> crate::engine::Result<Vec<String>> {
        let mut names = Vec::new();
        for server in self.in_time(page_timeout, self.route.servers()).await? {
            let mut cursor = Some(b"0".to_vec());
            while let Some(from) = cursor {
                let page = scan_page(&server, &self.layout, prefix, &from, &mut names);
                cursor = self.in_time(page_timeout, page).await?;
            }
        }
        names.sort_unstable();
        names.dedup();
        Ok(names)
    }

    /// Waits for one page, for `limit` at most.
    async fn in_time<T>(
        &self,
        limit: Duration,
        page: impl Future<Output = Result<T, Failure>>,
    ) -> crate::engine::Result<T> {
        match tokio::time::timeout(limit, page).await {
            Ok(answer) => answer.map_err(|failure| failure.during("list")),
            Err(_) => Err(EngineError::no_answer(ENGINE, &self.route.address(), "list", limit)),
        }
    }
}

/// Reads one page of the keys that may be locks with a prefix. Returns the cursor of the next page, if there is one.
pub(in super::super) async fn scan_page(
    link: &Arc<Link>,
    layout: &Layout,
    prefix: &str,
    cursor: &[u8],
    names: &mut Vec<String>,
) -> Result<Option<Vec<u8>>, Failure> {
    let mut cmd = redis::cmd("SCAN");
    cmd.arg(cursor)
        .arg("MATCH")
        .arg(layout.pattern(prefix))
        .arg("COUNT")
        .arg(SCANNED_AT_ONCE)
        .arg("TYPE")
        .arg("string");
    let page = link.call(&cmd).await?.into_sequence().ok();
    let Some([Value::BulkString(next), Value::Array(keys)]) = page.as_deref() else {
        return Err(Failure::Unexpected("SCAN"));
    };
    // Names are UTF-8: any other key is no lock of this engine.
    let keys = keys.iter().filter_map(text).filter_map(|key| layout.name_of(key));
    names.extend(keys.filter(|name| name.starts_with(prefix)).map(str::to_owned));
    Ok((next != b"0").then(|| next.clone()))
}

/// Reads the answer of `inspect.lua`. Returns the value of the lock key, too.
pub(in super::super) fn info<'r>(name: &str, row: &'r Value) -> Option<(&'r [u8], LockInfo)> {
    let Value::Array(row) = row else { return None };
    let [
        Value::BulkString(value),
        Value::Int(left),
        record,
        metadata,
        waiting @ ..,
    ] = row.as_slice()
    else {
        return None;
    };
    let waiting = match waiting {
        [] => None,
        [Value::Int(waiting)] => u64::try_from(*waiting).ok(),
        _ => return None,
    };
    // The companion keys count only if they name the token that holds the lock: another tool may have acquired the name
    // since then. On a node of a quorum, the number of the attempt follows the token.
    let holds = |token: &str| {
        let rest = value.strip_prefix(token.as_bytes());
        rest.is_some_and(|rest| matches!(rest, b"" | b"-kept" | [b'.', ..]))
    };
    let grant = text(record).and_then(grant).filter(|(token, ..)| holds(token));
    let metadata = text(metadata)
        .and_then(|text| text.split_once(' '))
        .filter(|(token, _)| holds(token));
    let (fence, holder) = grant.map(|(_, fence, holder)| (fence, holder)).unzip();
    // Its process has not written the record, and perhaps never will.
    let holder = holder.or_else(|| is_ours(value).then(Holder::unknown));
    let info = LockInfo {
        name: name.to_owned(),
        remaining: u64::try_from(*left).ok().map(Duration::from_millis),
        fence,
        holder,
        metadata: metadata.map(|(_, json)| json.to_owned()),
        waiting,
    };
    Some((value, info))
}

/// Whether the value of a lock key has the form of an owner token, or of one that is kept for a minimum time.
fn is_ours(value: &[u8]) -> bool {
    let value = std::str::from_utf8(value).unwrap_or_default();
    OwnerToken::parse(value.strip_suffix("-kept").unwrap_or(value)).is_ok()
}

/// Reads a record: `<fence> <token> <since ms> <pid> <host>`, on a node of a quorum with the number of the round,
/// `<pid>:<round>`.
fn grant(record: &str) -> Option<(&str, Fence, Holder)> {
    let mut fields = record.splitn(5, ' ');
    let fence = Fence(fields.next()?.parse().ok()?);
    let token = fields.next()?;
    let since_ms = fields.next()?.parse().ok()?;
    let pid = fields.next()?.split(':').next()?.parse().ok()?;
    let host = fields.next()?.to_owned();
    Some((
        token,
        fence,
        Holder {
            process: Process { host, pid },
            since_ms,
        },
    ))
}

pub(in super::super) fn text(value: &Value) -> Option<&str> {
    match value {
        Value::BulkString(bytes) => std::str::from_utf8(bytes).ok(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bulk(text: &str) -> Value {
        Value::BulkString(text.into())
    }

    #[test]
    fn companions_are_believed_only_for_the_token_that_holds() {
        let record = bulk("17 abc 1700000000000 4711 a host");
        let metadata = bulk("abc {\"a\": 1}");
        for (value, ours) in [
            ("abc", true),
            ("abc-kept", true),
            ("abc.1", true),
            ("other", false),
            ("abcd", false),
            ("ab", false),
            ("", false),
        ] {
            let row = Value::Array(vec![
                bulk(value),
                Value::Int(1500),
                record.clone(),
                metadata.clone(),
                Value::Int(0),
            ]);
            let (_, info) = info("n", &row).unwrap();
            assert_eq!(info.remaining, Some(Duration::from_millis(1500)));
            assert_eq!(info.fence, ours.then_some(Fence(17)), "{value}");
            assert_eq!(info.metadata.as_deref(), ours.then_some("{\"a\": 1}"), "{value}");
            let holder = info
                .holder
                .map(|holder| (holder.process.host, holder.process.pid, holder.since_ms));
            assert_eq!(
                holder,
                ours.then(|| ("a host".into(), 4711, 1_700_000_000_000)),
                "{value}"
            );
        }
    }

    #[test]
    fn a_lock_without_expiry_or_companions_is_shown_as_such() {
        let row = Value::Array(vec![
            Value::BulkString(vec![0xff]),
            Value::Int(-1),
            Value::Nil,
            bulk("garbage"),
            Value::Int(2),
        ]);
        let expected = LockInfo {
            name: "n".into(),
            remaining: None,
            fence: None,
            holder: None,
            metadata: None,
            waiting: Some(2),
        };
        assert_eq!(info("n", &row), Some((&[0xff][..], expected)));
        assert_eq!(info("n", &Value::Nil), None);
    }
}
