//! The data of an entry.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::client::Stat;
use crate::model::{Claim, Fence, Holder, LockInfo, Process, Ttl};

/// What an entry stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Use {
    /// A claim: if the entry is the oldest one, it holds the name.
    #[default]
    Claim,
    /// A claim of several names that waits for a later one.
    Set,
    /// A released name that stays busy for some time.
    Kept,
}

/// The data of an entry as JSON.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Record {
    #[serde(default)]
    pub r#use: Use,
    /// In milliseconds.
    pub ttl: u64,
    pub host: String,
    pub pid: u32,
    /// The fencing token of the grant. Written a moment after it. 0: the holder needed none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fence: Option<u64>,
    /// The time of the grant, by the holder's clock, where it is not that of the entry's creation: milliseconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<String>,
}

impl Record {
    pub(super) fn new(claim: &Claim) -> Self {
        Record {
            r#use: Use::Claim,
            ttl: claim.ttl.as_millis(),
            host: claim.process.host.clone(),
            pid: claim.process.pid,
            fence: None,
            since: None,
            metadata: claim.metadata.as_deref().map(str::to_owned),
        }
    }

    /// Reads the data of a node. `None`: another program wrote it.
    pub(super) fn parse(data: &[u8]) -> Option<Self> {
        serde_json::from_slice(data).ok()
    }

    pub(super) fn to_json(&self) -> Vec<u8> {
        // A record has no map with keys that are not texts.
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// Returns the fencing token. `None`: it is not written yet, or the holder needed none.
    pub(super) fn fence(&self) -> Option<Fence> {
        self.fence.map(Fence).filter(|fence| *fence != Fence::NONE)
    }

    pub(super) fn ttl(&self) -> Ttl {
        Ttl::clamped(Duration::from_millis(self.ttl))
    }
}

/// Describes the holder of a name by the data of its entry.
pub(super) fn info(name: &str, record: Option<Record>, stat: &Stat, waiting: usize) -> LockInfo {
    let remaining = record.as_ref().map(|record| record.ttl().duration());
    let fence = record.as_ref().and_then(Record::fence);
    let (holder, metadata) = record.map_or((None, None), |record| {
        let process = Process {
            host: record.host,
            pid: record.pid,
        };
        let since_ms = record.since.unwrap_or(stat.created_ms.max(0) as u64);
        (Some(Holder { process, since_ms }), record.metadata)
    });
    LockInfo {
        name: name.to_owned(),
        remaining,
        fence,
        holder,
        metadata,
        waiting: Some(waiting as u64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_read_back_and_other_data_is_no_record() {
        let record = Record {
            r#use: Use::Set,
            ttl: 5000,
            host: "h".into(),
            pid: 7,
            fence: Some(1 << 40),
            since: None,
            metadata: Some(r#"{"a":"é"}"#.into()),
        };
        assert_eq!(Record::parse(&record.to_json()), Some(record.clone()));
        let short = Record::parse(br#"{"ttl":1,"host":"h","pid":7,"more":[]}"#).unwrap();
        assert_eq!((short.r#use, short.fence, short.metadata), (Use::Claim, None, None));
        for other in [
            &b""[..],
            b"10.0.0.1",
            b"{}",
            b"\xff",
            br#"{"ttl":-1,"host":"h","pid":7}"#,
        ] {
            assert_eq!(Record::parse(other), None, "{other:?}");
        }
    }
}
