//! The keys and values of entries.
//!
//! An entry has the key `<keyPrefix><name>/<id>`: in the name, every byte except `A–Z a–z 0–9 _ . : -` is `%XX`. The id is the
//! first owner token, so that a transfer keeps the key and thereby the position. A shared name begins with `%FF`. The value is JSON.
//! Keys of this form without such a value are those of other tools (`etcdctl lock`, Go's `concurrency.Mutex`), and count as entries of
//! unknown holders.

use super::client::messages::KeyValue;
use crate::engine::entries::names::{decoded, encoded, marker};
use crate::engine::entries::{Record, Stored, now_ms};
use crate::model::{Key, OwnerToken};

/// The keys of a prefix.
#[derive(Debug, Clone)]
pub(super) struct Layout(pub String);

impl Layout {
    /// Returns the range of the entries of a name.
    pub(super) fn range(&self, name: &Key) -> (Vec<u8>, Vec<u8>) {
        let mut start = format!("{}{}{}", self.0, marker(name), encoded(name.as_str())).into_bytes();
        let mut end = start.clone();
        start.push(b'/');
        end.push(b'/' + 1);
        (start, end)
    }

    /// Returns the range of the entries of all names that begin with a text.
    pub(super) fn names(&self, prefix: &str) -> (Vec<u8>, Vec<u8>) {
        let start = format!("{}{}", self.0, encoded(prefix)).into_bytes();
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

    /// Returns the name of an entry. `None`: its key has another form, or the name is shared.
    pub(super) fn name_of(&self, key: &[u8]) -> Option<Key> {
        let key = std::str::from_utf8(key).ok()?.strip_prefix(&self.0)?;
        let (name, _) = key.rsplit_once('/')?;
        Key::new(&decoded(name)?).ok()
    }

    /// Reads an entry of a name. Every key below the name counts as one.
    pub(super) fn entry(&self, name: &Key, kv: &KeyValue) -> Stored {
        let (start, _) = self.range(name);
        let id = String::from_utf8_lossy(kv.key.get(start.len()..).unwrap_or_default());
        let position = kv.create_revision.max(0) as u64;
        let mut record: Option<Record> = serde_json::from_slice(&kv.value).ok();
        if let (Some(record), true) = (&mut record, name.is_shared()) {
            record.fence = Some(position);
        }
        let owner = record.as_ref().map(|record| record.owner.as_deref().unwrap_or(&id));
        Stored {
            name: name.clone(),
            position,
            version: kv.mod_revision,
            session: kv.lease,
            owner: owner.and_then(|owner| OwnerToken::parse(owner).ok()),
            id: id.into(),
            record,
            created_ms: now_ms(),
        }
    }
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
            assert_eq!(layout.name_of(&stored), Some(key(name)));
            assert_eq!(&*layout.entry(&key(name), &kv(&stored, b"")).id, "0123");
        }
        assert_eq!(layout.key(&key("a/é"), "x"), b"p/a%2F%C3%A9/x");
        assert_eq!(layout.range(&key("a")), (b"p/a/".to_vec(), b"p/a0".to_vec()));
        assert_eq!(layout.key(&key("é").shared(), "x"), b"p/%FF%C3%A9/x");
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
            assert!(layout.name_of(other).is_none(), "{other:?}");
        }
        let other = layout.entry(&key("a"), &kv(b"p/a/00112233445566778899aabbccddeeff", b"\xff"));
        assert_eq!((other.owner, other.record, other.position), (None, None, 5));
    }

    #[test]
    fn an_entry_belongs_to_its_first_owner_or_that_of_a_transfer() {
        let layout = Layout("p/".into());
        let [first, next] = [OwnerToken::fresh(), OwnerToken::fresh()];
        let owner = |more: String| {
            let value = format!(r#"{{"ttl":9,"host":"h","pid":1{more}}}"#);
            let stored = layout.key(&key("a"), first.as_str());
            layout.entry(&key("a"), &kv(&stored, value.as_bytes())).owner.unwrap()
        };
        assert_eq!(owner(String::new()), first);
        assert_eq!(owner(format!(r#","owner":"{}""#, next.as_str())), next);
    }
}
