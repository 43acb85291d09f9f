//! The pages of a list.

use std::time::Duration;

use crate::engine::core::ledger::{SHARED, bounds};
use crate::model::{Fence, Holder, LockInfo, Process, Share};

/// The names of one page of a list.
#[derive(Debug, Clone)]
pub(super) struct Page {
    /// The first name, as stored.
    pub(super) start: Vec<u8>,
    /// The first name after the range.
    pub(super) end: Vec<u8>,
}

/// A lease, as a page has it.
pub(super) struct Lease {
    /// The name, as stored.
    pub name: Vec<u8>,
    pub remaining: Duration,
    pub fence: i64,
    pub host: Option<String>,
    pub pid: Option<i64>,
    pub since_ms: Option<i64>,
    pub metadata: Option<String>,
    pub waiting: i64,
    pub share: Option<Share>,
}

impl Page {
    /// Maximum number of rows in a page. On a server those of free names count, too: they stay for an hour. Other jobs run between two
    /// pages.
    pub(super) const SIZE: i64 = 2000;

    /// Returns the first page of the stored names with a prefix.
    pub(super) fn first(store_prefix: &str, prefix: &str) -> Self {
        let start = [store_prefix.as_bytes(), prefix.as_bytes()].concat();
        // UTF-8 does not have this byte.
        let end = [&start[..], &[SHARED]].concat();
        Page { start, end }
    }

    /// Returns the page of one stored name, or the first page of its shares.
    pub(super) fn of_name(name: Vec<u8>, is_shared: bool) -> Self {
        let (start, end) = if is_shared {
            bounds(&name)
        } else {
            let end = after(&name);
            (name, end)
        };
        Page { start, end }
    }

    /// Returns the page after this one, which has `rows` rows, the last one of the name `last`. `None`: this is the last page.
    pub(super) fn next(&self, last: Option<&[u8]>, rows: usize) -> Option<Self> {
        let last = last.filter(|_| rows as i64 == Self::SIZE)?;
        Some(Page {
            start: after(last),
            end: self.end.clone(),
        })
    }
}

/// Returns the next name in byte order.
fn after(name: &[u8]) -> Vec<u8> {
    [name, &[0]].concat()
}

impl Lease {
    /// Returns the lease for the caller. `prefix`: that of every stored name.
    pub(super) fn info(self, prefix: &str) -> LockInfo {
        let process = Process {
            host: self.host.unwrap_or_default(),
            pid: self.pid.unwrap_or_default() as u32,
        };
        let name = self.name.get(prefix.len()..).unwrap_or_default();
        let mut parts = name.split(|byte| *byte == SHARED);
        let text = parts.find(|part| !part.is_empty()).unwrap_or_default();
        let since_ms = self.since_ms.unwrap_or_default().unsigned_abs();
        LockInfo {
            name: String::from_utf8_lossy(text).into_owned(),
            remaining: Some(self.remaining),
            fence: Some(Fence(self.fence.unsigned_abs())),
            holder: Some(Holder { process, since_ms }),
            metadata: self.metadata,
            share: self.share,
            waiting: Some(self.waiting.unsigned_abs()),
        }
    }
}
