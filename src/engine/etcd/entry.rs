//! The keys and values of entries.
//!
//! An entry has the key `<keyPrefix><name>/<id>`: in the name, every byte except `A–Z a–z 0–9 _ . : -` is `%XX`. The id is the
//! first owner token, so that a transfer keeps the key and thereby the place. The value is JSON. Keys of this form without such a
//! value are those of other tools (`etcdctl lock`, Go's `concurrency.Mutex`), and count as entries of unknown holders.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::client::messages::KeyValue;
use crate::engine::entries::{Place, Share};
use crate::model::{Claim, Fence, Holder, Key, LockInfo, OwnerToken, Process, Ttl};

/// The maximum number of entries that one transaction creates: the factor between revisions and fencing tokens.
pub(super) const MOST_ENTRIES: u64 = 64;

/// The value of an entry.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Record {
    /// The owner token, if it is not the id.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// Its index among the entries of its transaction.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub n: u32,
    /// Whether its transaction created several entries of its name.
    #[serde(default, skip_serializing_if = "is_false")]
    pub several: bool,
    /// Whether it belongs to a claim of several names that does not hold all of them yet.
    #[serde(default, skip_serializing_if = "is_false")]
    pub set: bool,
    /// The ttl in milliseconds.
    pub ttl: u64,
    pub host: String,
    pub pid: u32,
    /// When the lease was granted, in milliseconds since 1970, by the clock of its process. `None`: it was a waiter.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since: Option<u64>,
    /// `None`: the token follows from the revision of the creation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fence: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metadata: Option<String>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn is_zero(number: &u32) -> bool {
    *number == 0
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn is_false(flag: &bool) -> bool {
    !*flag
}

impl Record {
    /// Returns the record of a waiter, or of a part of an incomplete claim.
    pub(super) fn of_waiter(claim: &Claim) -> Self {
        Record {
            set: claim.keys().len() > 1,
            ttl: claim.ttl.as_millis(),
            host: claim.process.host.clone(),
            pid: claim.process.pid,
            metadata: claim.metadata.as_deref().map(str::to_owned),
            ..Record::default()
        }
    }

    /// Returns the record of a lease that is granted now.
    pub(super) fn of_holder(claim: &Claim, fence: Option<Fence>) -> Self {
        Record {
            set: false,
            since: Some(now_ms()),
            fence: fence.map(|fence| fence.0),
            ..Record::of_waiter(claim)
        }
    }

    pub(super) fn to_json(&self) -> Vec<u8> {
        // A record has no maps, so that this cannot fail.
        serde_json::to_vec(self).unwrap_or_default()
    }
}

/// An entry in the store.
#[derive(Debug, Clone)]
pub(super) struct Stored {
    pub kv: KeyValue,
    pub id: String,
    /// `None`: another tool wrote it.
    pub record: Option<Record>,
}

impl Stored {
    fn n(&self) -> u32 {
        self.record.as_ref().map_or(0, |record| record.n)
    }

    pub(super) fn place(&self) -> Place {
        (self.kv.create_revision.max(0) as u64, self.n())
    }

    pub(super) fn share(&self) -> Share {
        Share::LOCK
    }

    pub(super) fn is_owned_by(&self, owner: &str) -> bool {
        self.record
            .as_ref()
            .is_some_and(|record| record.owner.as_deref().unwrap_or(&self.id) == owner)
    }

    /// Whether it holds its name if it is the oldest entry: it is no part of an incomplete claim.
    pub(super) fn holds(&self) -> bool {
        !self.record.as_ref().is_some_and(|record| record.set)
    }

    /// Whether other entries of its name may have the same revision.
    pub(super) fn has_siblings(&self) -> bool {
        self.record.as_ref().is_some_and(|record| record.several)
    }

    /// Returns the fencing token of a lease. `None`: it is not written yet.
    pub(super) fn fence(&self) -> Option<Fence> {
        let record = self.record.as_ref()?;
        record.since?;
        Some(record.fence.map_or_else(|| fence(self.place().0, record.n), Fence))
    }

    /// Returns the ttl that its process asked for. `None`: another tool wrote it.
    pub(super) fn ttl(&self) -> Option<Duration> {
        let record = self.record.as_ref()?;
        Some(Ttl::clamped(Duration::from_millis(record.ttl)).duration())
    }

    /// Returns the holder, the rest of whose etcd lease is `lease`.
    pub(super) fn info(&self, name: &Key, lease: Option<Duration>, waiting: u64) -> LockInfo {
        let record = self.record.as_ref();
        let holder = record.map(|record| Holder {
            process: Process {
                host: record.host.clone(),
                pid: record.pid,
            },
            // A waiter whose process has not noted the grant yet.
            since_ms: record.since.unwrap_or_else(now_ms),
        });
        LockInfo {
            name: name.as_str().to_owned(),
            remaining: [self.ttl(), lease].into_iter().flatten().min(),
            fence: self.fence(),
            // A waiter whose process has not noted the grant yet.
            holder: holder.map(|holder| {
                if holder.since_ms == 0 {
                    Holder::unknown()
                } else {
                    holder
                }
            }),
            metadata: record.and_then(|record| record.metadata.clone()),
            waiting: Some(waiting),
        }
    }
}

fn now_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    now.as_millis() as u64
}

/// Returns the fencing token of an entry that was granted at a revision.
pub(super) fn fence(revision: u64, n: u32) -> Fence {
    Fence(revision.saturating_mul(MOST_ENTRIES).saturating_add(n.into()))
}

/// The keys of a prefix.
#[derive(Debug, Clone)]
pub(super) struct Layout(pub String);

impl Layout {
    /// Returns the range of the entries of a name.
    pub(super) fn range(&self, name: &Key) -> (Vec<u8>, Vec<u8>) {
        let mut start = self.start(name.as_str());
        let mut end = start.clone();
        start.push(b'/');
        end.push(b'/' + 1);
        (start, end)
    }

    fn start(&self, name: &str) -> Vec<u8> {
        let mut key = self.0.as_bytes().to_vec();
        for &byte in name.as_bytes() {
            if byte.is_ascii_alphanumeric() || b"_.:-".contains(&byte) {
                key.push(byte);
            } else {
                key.extend_from_slice(format!("%{byte:02X}").as_bytes());
            }
        }
        key
    }

    /// Returns the range of the entries of all names that begin with a text.
    pub(super) fn names(&self, prefix: &str) -> (Vec<u8>, Vec<u8>) {
        let start = self.start(prefix);
        let mut end = start.clone();
        while end.pop_if(|byte| *byte == u8::MAX).is_some() {}
        match end.last_mut() {
            Some(last) => *last += 1,
            // All keys: etcd's form of an open end, and of the first key.
            None => return (if start.is_empty() { vec![0] } else { start }, vec![0]),
        }
        (start, end)
    }

    /// Returns the key of an entry.
    pub(super) fn key(&self, name: &Key, id: &str) -> Vec<u8> {
        let (mut key, _) = self.range(name);
        key.extend_from_slice(id.as_bytes());
        key
    }

    /// Reads an entry of any name. `None`: its key has another form.
    pub(super) fn read(&self, kv: KeyValue) -> Option<(Key, Stored)> {
        let key = std::str::from_utf8(&kv.key).ok()?.strip_prefix(&self.0)?;
        let (name, _) = key.rsplit_once('/')?;
        let name = Key::new(&decoded(name)?).ok()?;
        let stored = self.read_of(&name, kv);
        Some((name, stored))
    }

    /// Reads an entry of a name. Every key below the name counts as one.
    pub(super) fn read_of(&self, name: &Key, kv: KeyValue) -> Stored {
        let (start, _) = self.range(name);
        let id = kv.key.get(start.len()..).unwrap_or_default();
        let id = String::from_utf8_lossy(id).into_owned();
        let record = serde_json::from_slice::<Record>(&kv.value).ok();
        Stored { kv, id, record }
    }
}

/// Decodes a name. `None`: no name is encoded like this.
fn decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        rest = after;
        if byte == b'%' {
            let digits = rest.get(..2)?;
            rest = &rest[2..];
            let digits = std::str::from_utf8(digits).ok()?;
            bytes.push(u8::from_str_radix(digits, 16).ok()?);
        } else if byte == b'/' {
            return None;
        } else {
            bytes.push(byte);
        }
    }
    String::from_utf8(bytes).ok()
}

/// Returns the owner of a name that a release keeps busy: no claim has such a token.
pub(super) fn kept(owner: &OwnerToken) -> String {
    format!("{}-kept", owner.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: &str) -> Key {
        Key::new(name).unwrap()
    }

    fn kv(key: &[u8], value: &[u8]) -> KeyValue {
        KeyValue {
            key: key.to_vec(),
            value: value.to_vec(),
            create_revision: 5,
            ..KeyValue::default()
        }
    }

    #[test]
    fn keys_and_names_are_each_others_inverse() {
        let layout = Layout("p/".into());
        for name in ["a", "a/b", "é💥", "%", "a\0", "A.b:c_d-e", "日本"] {
            let stored = layout.key(&key(name), "0123");
            let (read, stored) = layout.read(kv(&stored, b"")).unwrap();
            assert_eq!((read.as_str(), stored.id.as_str()), (name, "0123"));
        }
        assert_eq!(layout.key(&key("a/é"), "x"), b"p/a%2F%C3%A9/x");
        assert_eq!(layout.range(&key("a")), (b"p/a/".to_vec(), b"p/a0".to_vec()));
        assert_eq!(layout.names("a"), (b"p/a".to_vec(), b"p/b".to_vec()));
        assert_eq!(Layout(String::new()).names(""), (vec![0], vec![0]));
    }

    #[test]
    fn other_keys_and_values_are_no_entries_of_holdfast() {
        let layout = Layout("p/".into());
        for other in [
            &b"q/a/1"[..],
            b"p/a",
            b"p/%zz/1",
            b"p/%F/1",
            b"p//1",
            b"p/\xff/1",
            b"p/%FF/1",
            b"p/a/b/1",
            b"",
            b"p/%\xc3\xa9/1",
        ] {
            assert!(layout.read(kv(other, b"")).is_none(), "{other:?}");
        }
        for value in [
            &b""[..],
            b"{}",
            b"[]",
            b"{\"ttl\":-1}",
            b"\xff",
            b"{\"ttl\":1,\"host\":2,\"pid\":3}",
        ] {
            let (_, stored) = layout.read(kv(b"p/a/1", value)).unwrap();
            assert!(stored.record.is_none() && stored.holds() && stored.fence().is_none());
            let info = stored.info(&key("a"), Some(Duration::from_secs(3)), 0);
            assert_eq!((info.holder, info.remaining), (None, Some(Duration::from_secs(3))));
        }
    }

    #[test]
    fn a_record_keeps_what_it_is_given() {
        let process = std::sync::Arc::new(Process::current());
        let ttl = Ttl::clamped(Duration::from_secs(3));
        let mut claim = Claim::new(&[key("a")], OwnerToken::fresh(), ttl, process);
        claim.metadata = Some("{\"é\":\"\\n\"}".into());
        let record = Record::of_holder(&claim, None);
        let layout = Layout("p/".into());
        let entry = kv(&layout.key(&key("a"), claim.owner.as_str()), &record.to_json());
        let (_, stored) = layout.read(entry).unwrap();
        assert_eq!(stored.record.as_ref(), Some(&record));
        assert!(stored.is_owned_by(claim.owner.as_str()) && !stored.is_owned_by("other"));
        assert_eq!(stored.fence(), Some(Fence(5 * 64)));
        assert_eq!(
            stored.info(&key("a"), None, 2).metadata.as_deref(),
            claim.metadata.as_deref()
        );
        // Of a newer version.
        let newer = br#"{"ttl":9,"host":"h","pid":1,"since":7,"fence":3,"more":[1]}"#;
        let (_, stored) = layout.read(kv(b"p/a/1", newer)).unwrap();
        assert_eq!(
            (stored.fence(), stored.ttl()),
            (Some(Fence(3)), Some(Duration::from_millis(9)))
        );
    }
}
