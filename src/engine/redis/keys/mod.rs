//! The keys in Redis, and the way back from a key to a name.
//!
//! | what | key |
//! |---|---|
//! | lock | `<prefix><name>`: the owner's token and nothing else, the same as `SET key token NX PX` of other tools |
//! | fence companion | `holdfast:fence:{<lock key>}`: `<fence> <token> <since ms> <pid> <host>`, on a node of a quorum with `<pid>:<round>` |
//! | metadata companion | `holdfast:metadata:{<lock key>}`: `<token> <JSON>` |
//! | last token | `holdfast:last`: the last fencing token of all names. A cluster has no such key |
//! | counter | `holdfast:last:<number>`: on a node of a quorum, the last fencing token of all names with this number (see [`COUNTERS`]): a sorted set whose only member `last` has it as its score |
//! | queue | `holdfast:queue:{<lock key>}`: a sorted set, described in `queue.lua` |
//! | channel | `holdfast:to:<process>`: the channel on which the waiters of a process are notified |
//!
//! **One hash slot.** A companion key has to be in the slot of its lock key, or no script could use both in a cluster. The slot
//! is the CRC16 of the text between the first `{` and the next `}` if that is not empty, else of the whole key ("Hash tags" in
//! the Redis Cluster specification). So the lock key is put in braces, unless it contains a `}` itself. Then its own hash tag
//! comes first, `{<tag>}<lock key>`. If it contains a `}` but no hash tag (`a}b`, `{}a`), a short number from a table with the
//! same slot comes first: `{<number>}<lock key>`. The lock key can be read back from each of the three forms (in the first one
//! nothing follows the `}`), so no two locks share a companion key.
//!
//! **No collision.** Locks whose key would begin with `holdfast:` (possible with an empty prefix, or with one that begins so)
//! are moved to `holdfast:lock:<prefix><name>`, where no companion key is. Only such locks are not shared with other tools.

pub(super) mod slots;

use std::fmt::Write;

use self::slots::{hash_tag, slot, tag_for_slot};

/// The last fencing token of a server: one permanent key for all names.
pub(super) const LAST: &str = "holdfast:last";
/// The prefix of the channel of a process.
pub(super) const CHANNEL_PREFIX: &str = "holdfast:to:";
/// The channel of a lock on the nodes of a quorum is this prefix and the lock key. The scripts build the same text.
pub(super) const FREE_CHANNEL: &str = "holdfast:free:";
/// How long the last fencing token of a name outlives its last lease in a cluster, in ms: a day, less the hour for which
/// renewals may leave it unchanged. After that, only the server's clock makes the tokens grow.
pub(super) const FENCE_KEPT_MS: u64 = 24 * 60 * 60 * 1000;
/// How long the record of a lease outlives it, in ms, where the tokens grow from a key for all names, or on the nodes of a
/// quorum from shared counters. It is for `inspect` only, and has to outlast the hour for which renewals may leave it
/// unchanged.
pub(super) const RECORD_KEPT_MS: u64 = 61 * 60 * 1000;
/// The number of counters on a node of a quorum. Names share them, by the CRC16 of the lock key, so that their number is
/// bounded. They are many, so that two names that are acquired at the same time rarely share one.
const COUNTERS: u16 = 1024;
/// The namespace of this engine.
const NAMESPACE: &str = "holdfast:";
/// The prefix of locks whose own key begins with the namespace.
const MOVED: &str = "holdfast:lock:";

/// A kind of key that belongs to a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    /// The lock itself.
    Lock,
    /// The last fencing token, and its holder.
    Fence,
    /// The holder's metadata.
    Metadata,
    /// The queue of the waiters.
    Queue,
    /// On a node of a quorum: the last fencing token of the names that share this counter.
    Counter,
}

/// Converts names to keys and back.
#[derive(Debug, Clone)]
pub(super) struct Layout {
    prefix: Box<str>,
    /// Whether the fencing tokens come from one key for all names.
    counts: bool,
}

impl Layout {
    /// Creates the layout. `counts`: the fencing tokens come from one key for all names, which several servers cannot have.
    pub(super) fn new(prefix: &str, counts: bool) -> Self {
        Layout {
            prefix: prefix.into(),
            counts,
        }
    }

    /// Returns the key of the last fencing token of all names, if there is one.
    pub(super) fn last(&self) -> Option<&'static str> {
        self.counts.then_some(LAST)
    }

    /// Returns how long a fence companion outlasts a release, in ms. 0: it goes with it.
    pub(super) fn fences_outlast(&self) -> u64 {
        if self.counts { 0 } else { FENCE_KEPT_MS }
    }

    /// Replaces `out` by the lock key of a name.
    pub(super) fn lock(&self, name: &str, out: &mut String) {
        out.clear();
        out.push_str(&self.prefix);
        out.push_str(name);
        if out.starts_with(NAMESPACE) {
            out.insert_str(0, MOVED);
        }
    }

    /// Returns the pattern of `SCAN` that finds every name with this literal prefix, and perhaps other keys.
    pub(super) fn pattern(&self, prefix: &str) -> String {
        let mut start = String::new();
        self.lock(prefix, &mut start);
        let mut pattern = String::with_capacity(start.len() + 8);
        for character in start.chars() {
            if matches!(character, '*' | '?' | '[' | ']' | '\\' | '^') {
                pattern.push('\\');
            }
            pattern.push(character);
        }
        pattern.push('*');
        pattern
    }

    /// Returns the name of a lock key. `None` for companion keys and foreign keys.
    pub(super) fn name_of<'k>(&self, key: &'k str) -> Option<&'k str> {
        let plain = match key.strip_prefix(MOVED) {
            Some(moved) => Some(moved).filter(|moved| moved.starts_with(NAMESPACE))?,
            None if key.starts_with(NAMESPACE) => return None,
            None => key,
        };
        plain.strip_prefix(&*self.prefix).filter(|name| !name.is_empty())
    }
}

/// Replaces `out` by the companion key of a lock key.
pub(super) fn companion(part: Part, lock: &str, out: &mut String) {
    out.clear();
    out.push_str(match part {
        Part::Lock => return out.push_str(lock),
        Part::Fence => "holdfast:fence:{",
        Part::Metadata => "holdfast:metadata:{",
        Part::Queue => "holdfast:queue:{",
        Part::Counter => {
            // Writing to a string cannot fail.
            let _ = write!(out, "{LAST}:{}", slot(lock.as_bytes()) % COUNTERS);
            return;
        }
    });
    match hash_tag(lock) {
        Some(tag) => {
            out.push_str(tag);
            out.push('}');
            out.push_str(lock);
        }
        None if !lock.contains('}') => {
            out.push_str(lock);
            out.push('}');
        }
        None => {
            // Writing to a string cannot fail.
            let _ = write!(out, "{}}}{lock}", tag_for_slot(slot(lock.as_bytes())));
        }
    }
}

/// A buffer for the keys of one name, reused for the next one.
#[derive(Default)]
pub(super) struct KeyBuffer {
    lock: String,
    companions: [String; 2],
}

impl KeyBuffer {
    /// Returns the lock key of a name, and at most two of its companion keys.
    pub(super) fn keys<const N: usize>(&mut self, layout: &Layout, name: &str, parts: [Part; N]) -> (&str, [&str; N]) {
        const { assert!(N <= 2) };
        layout.lock(name, &mut self.lock);
        for (part, out) in parts.into_iter().zip(&mut self.companions) {
            companion(part, &self.lock, out);
        }
        (&self.lock, std::array::from_fn(|i| &*self.companions[i]))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::slots::tests::slot_by_the_book;
    use super::*;

    fn lock(layout: &Layout, name: &str) -> String {
        let mut key = String::new();
        layout.lock(name, &mut key);
        key
    }

    fn odd_names() -> Vec<String> {
        let mut names: Vec<String> = [
            "a",
            "a b",
            "{a}",
            "{}",
            "{}a",
            "{}{a}",
            "a{",
            "a}",
            "}a{",
            "}{",
            "{",
            "}",
            "{{a}",
            "{{}}",
            "{a}b",
            "a{b}c{d}e",
            "a}b{c}",
            "{a",
            "a}}",
            "{}}",
            "\u{0}",
            "\n",
            "*",
            "日本",
            "{日本}x",
            "é}",
            "holdfast:fence:{a}",
            "holdfast:metadata:{a}b",
            "holdfast:lock:x",
            "holdfast:lock:holdfast:x",
            "holdfast:",
            "holdfast",
            "lock:a",
        ]
        .map(str::to_owned)
        .into();
        names.push("x".repeat(512));
        names.push("}".repeat(512));
        let mut random = fastrand::Rng::with_seed(7);
        for _ in 0..2000 {
            names.push(
                (0..random.usize(1..9))
                    .map(|_| random.choice(['{', '}', 'a', ':', 'é']).unwrap())
                    .collect(),
            );
        }
        names.sort();
        names.dedup();
        names
    }

    #[test]
    fn companions_share_the_slot_and_no_two_locks_share_a_companion() {
        for prefix in ["lock:", "", "{app}:", "a}b:", "holdfast:", "holdfast:fence:{", "{"] {
            let layout = Layout::new(prefix, true);
            let mut seen = HashSet::new();
            for name in odd_names() {
                let key = lock(&layout, &name);
                assert!(seen.insert(key.clone()), "{prefix:?} {name:?}: {key:?} is taken");
                for part in [Part::Fence, Part::Metadata, Part::Queue] {
                    let mut other = String::new();
                    companion(part, &key, &mut other);
                    assert_eq!(
                        slot_by_the_book(&other),
                        slot_by_the_book(&key),
                        "{prefix:?} {name:?}: {other:?}"
                    );
                    assert!(other.contains(&key), "{other:?}");
                    assert!(seen.insert(other.clone()), "{prefix:?} {name:?}: {other:?} is taken");
                    assert_eq!(layout.name_of(&other), None, "{other:?}");
                }
                assert_eq!(layout.name_of(&key), Some(&*name), "{prefix:?} {key:?}");
            }
        }
    }

    #[test]
    fn ordinary_keys_look_as_documented() {
        let layout = Layout::new("lock:", true);
        assert_eq!(lock(&layout, "job:7"), "lock:job:7");
        let mut key = String::new();
        companion(Part::Fence, "lock:job:7", &mut key);
        assert_eq!(key, "holdfast:fence:{lock:job:7}");
        companion(Part::Metadata, "lock:{a}b", &mut key);
        assert_eq!(key, "holdfast:metadata:{a}lock:{a}b");
        assert_eq!(
            lock(&Layout::new("", true), "holdfast:fence:{a}"),
            "holdfast:lock:holdfast:fence:{a}"
        );
    }

    #[test]
    fn foreign_keys_have_no_name() {
        let layout = Layout::new("lock:", true);
        for key in [
            "lock",
            "lock:",
            "other:a",
            "holdfast:lock:lock:a",
            "holdfast:free:lock:a",
        ] {
            assert_eq!(layout.name_of(key), None, "{key}");
        }
        assert_eq!(Layout::new("", true).name_of("holdfast:lock:a"), None);
    }

    #[test]
    fn patterns_take_every_character_literally() {
        assert_eq!(Layout::new("lock:", true).pattern(""), "lock:*");
        assert_eq!(Layout::new("", true).pattern("a*?[b]\\^c"), "a\\*\\?\\[b\\]\\\\\\^c*");
        assert_eq!(Layout::new("", true).pattern("holdfast:x"), "holdfast:lock:holdfast:x*");
    }
}
