//! The entries of claims, and their data.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::mirror::Entry;
use crate::model::{Claim, Fence, Holder, Key, LockInfo, OwnerToken, Process, Share, Sums, Ttl};

/// The version of an entry whose data is being written, or may have been written.
pub(in crate::engine) const UNKNOWN: i64 = -1;

/// The data of an entry, as JSON.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(in crate::engine) struct Record {
    /// The owner token, if it is not the one in the id of the entry.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// Whether it belongs to a claim of several names that does not hold all of them yet.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub set: bool,
    /// In milliseconds. Of an entry that keeps a name busy: for how long.
    pub ttl: u64,
    pub host: String,
    pub pid: u32,
    /// The time of the grant, by the holder's clock: milliseconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<u64>,
    /// The fencing token of the grant. 0: the holder needed none. `None` with `since`: the number of the entry's creation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fence: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<String>,
    /// The permits and the limit of a share.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share: Option<(u32, u32)>,
}

impl Record {
    /// Returns the data of a claim that is not granted yet.
    pub(in crate::engine) fn new(claim: &Claim) -> Self {
        Record {
            set: claim.keys().len() > 1,
            ttl: claim.ttl.as_millis(),
            host: claim.process.host.clone(),
            pid: claim.process.pid,
            metadata: claim.metadata.as_deref().map(str::to_owned),
            share: claim.share.map(|share| (share.permits(), share.limit())),
            ..Record::default()
        }
    }

    pub(in crate::engine) fn ttl(&self) -> Ttl {
        Ttl::clamped(Duration::from_millis(self.ttl))
    }

    pub(in crate::engine) fn to_json(&self) -> Vec<u8> {
        // A record has no map with keys that are not texts.
        serde_json::to_vec(self).unwrap_or_default()
    }
}

/// An entry in the store.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::engine) struct Stored {
    pub name: Key,
    /// Identifies the entry in its name.
    pub id: Arc<str>,
    /// The number that the store gave to its creation.
    pub position: u64,
    /// The version of its data, or [`UNKNOWN`].
    pub version: i64,
    /// What it ends with: a session or an etcd lease. 0: nothing.
    pub session: i64,
    /// `None`: another program wrote it.
    pub owner: Option<OwnerToken>,
    pub record: Option<Record>,
    /// When it was created, where the store says that, else now: milliseconds since 1970.
    pub created_ms: u64,
}

impl Stored {
    pub(in crate::engine) fn is_of(&self, owner: &OwnerToken) -> bool {
        self.owner.as_ref() == Some(owner)
    }

    /// Returns what it has of its name. An entry that another program wrote has all of it.
    pub(in crate::engine) fn share(&self) -> Share {
        let share = self.record.as_ref().and_then(|record| record.share);
        let share = share.and_then(|(permits, limit)| Share::new(permits, limit));
        share.unwrap_or(Share::LOCK)
    }

    /// Returns the entry for the mirror of the name.
    pub(in crate::engine) fn mirrored(&self) -> Entry {
        Entry {
            id: self.id.clone(),
            position: self.position,
            share: self.share(),
        }
    }

    /// Whether it holds its name if it is granted. `false`: it belongs to a claim that waits for more names.
    pub(super) fn holds(&self) -> bool {
        self.record.as_ref().is_none_or(|record| !record.set)
    }

    /// Returns the fencing token of a lease. `None`: it is not written yet, or there is none.
    pub(super) fn fence(&self) -> Option<Fence> {
        let record = self.record.as_ref()?;
        let of_creation = record.since.map(|_| self.position);
        record
            .fence
            .or(of_creation)
            .map(Fence)
            .filter(|fence| *fence != Fence::NONE)
    }

    /// Whether it holds its name, and its fencing token is not written yet.
    pub(super) fn awaits_token(&self) -> bool {
        let awaits = |record: &Record| record.fence.is_none() && record.since.is_none();
        self.holds() && self.record.as_ref().is_some_and(awaits)
    }

    /// Returns the ttl that its process asked for. `None`: another program wrote it.
    pub(in crate::engine) fn ttl(&self) -> Option<Ttl> {
        self.record.as_ref().map(Record::ttl)
    }
}

/// What was read of a name for one owner.
#[derive(Debug)]
pub(in crate::engine) struct Seen {
    /// Larger than the number of every change before, and smaller than those after it: a fencing token for the oldest entry.
    pub at: u64,
    /// The granted entries, the oldest one first: one of a lock. For an owner some of a shared name may be missing, but never the oldest
    /// one nor that of the owner.
    pub granted: Vec<Stored>,
    /// The entry of the owner. It may be a granted one.
    pub own: Option<Stored>,
    /// The sums of all granted entries.
    pub sums: Sums,
    /// The number of the other entries.
    pub waiting: usize,
}

impl Seen {
    /// Whether a claim has to wait for the name.
    pub(super) fn is_busy(&self, claim: &Claim) -> bool {
        match &self.own {
            Some(_) => !self.granted.iter().any(|entry| entry.is_of(&claim.owner)),
            None => self.waiting > 0 || !self.sums.with(claim.share.unwrap_or(Share::LOCK)).is_within_limits(),
        }
    }

    /// Returns the entries that hold the name.
    pub(super) fn holders(&self) -> impl Iterator<Item = &Stored> {
        self.granted.iter().filter(|entry| entry.holds())
    }

    /// Describes the holders.
    pub(super) fn infos(&self) -> impl Iterator<Item = LockInfo> {
        self.holders().map(|holder| self.info(holder))
    }

    fn info(&self, holder: &Stored) -> LockInfo {
        let process = |record: &Record| Holder {
            process: Process {
                host: record.host.clone(),
                pid: record.pid,
            },
            since_ms: record.since.unwrap_or(holder.created_ms),
        };
        let record = holder.record.as_ref();
        LockInfo {
            name: holder.name.as_str().to_owned(),
            remaining: holder.ttl().map(Ttl::duration),
            fence: holder.fence(),
            holder: record.map(process),
            metadata: record.and_then(|record| record.metadata.clone()),
            share: holder.name.is_shared().then(|| holder.share()),
            waiting: Some(self.waiting as u64),
        }
    }
}

/// Returns a fencing token for the oldest entries of names.
pub(super) fn new_token(seen: &[Seen]) -> Fence {
    Fence(seen.iter().map(|seen| seen.at).max().unwrap_or_default())
}

pub(in crate::engine) fn now_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    now.as_millis() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(json: &[u8]) -> Stored {
        Stored {
            name: Key::new("n").unwrap(),
            id: "0123".into(),
            position: 5,
            version: 1,
            session: 1,
            owner: None,
            record: serde_json::from_slice(json).ok(),
            created_ms: 8,
        }
    }

    #[test]
    fn records_are_read_back_and_other_data_is_no_record() {
        let record = Record {
            owner: Some("o".into()),
            set: true,
            ttl: 5000,
            host: "h".into(),
            pid: 7,
            since: Some(9),
            fence: Some(1 << 40),
            metadata: Some(r#"{"a":"é"}"#.into()),
            share: Some((2, 5)),
        };
        assert_eq!(stored(&record.to_json()).record, Some(record));
        let short = br#"{"ttl":1,"host":"h","pid":7}"#;
        assert_eq!(stored(short).record.unwrap().to_json(), short);
        for other in [
            &b""[..],
            b"10.0.0.1",
            b"{}",
            b"[]",
            b"\xff",
            br#"{"ttl":-1,"host":"h","pid":7}"#,
            br#"{"ttl":1,"host":2,"pid":3}"#,
        ] {
            let other = stored(other);
            assert!(other.record.is_none() && other.holds() && other.fence().is_none() && !other.awaits_token());
        }
    }

    #[test]
    fn a_token_is_written_or_that_of_the_creation() {
        let fence = |more: &str| {
            let stored = stored(format!(r#"{{"ttl":1,"host":"h","pid":7,"more":[1]{more}}}"#).as_bytes());
            (stored.fence(), stored.awaits_token())
        };
        assert_eq!(fence(""), (None, true));
        assert_eq!(fence(r#","set":true"#), (None, false));
        assert_eq!(fence(r#","since":7"#), (Some(Fence(5)), false));
        assert_eq!(fence(r#","since":7,"fence":9"#), (Some(Fence(9)), false));
        assert_eq!(fence(r#","fence":0,"since":7"#), (None, false));
    }
}
