//! Where things lie in the keyspace, and how to find the way back from a key to a name.
//!
//! | what | key |
//! |---|---|
//! | lock | `<prefix><name>`: the owner's token and nothing else, the same as `SET key token NX PX` of other tools |
//! | fence companion | `holdfast:fence:{<lock key>}`: `<fence> <token> <since ms> <pid> <host>`, on a node of a quorum with `<pid>:<attempt>` |
//! | metadata companion | `holdfast:metadata:{<lock key>}`: `<token> <JSON>` |
//! | last token | `holdfast:last`: the last fence of all, on a server of its own; a cluster has none |
//! | counter | `holdfast:last:<number>`: on a node of a quorum, the last fence of all names with this number (see [`COUNTERS`]): a sorted set whose only member `last` has it as its score |
//! | queue | `holdfast:queue:{<lock key>}`: a sorted set, told in `queue.lua` |
//! | mailbox | `holdfast:to:<process>`: the channel on which a process's waiters are told |
//!
//! **One hash slot.** A companion has to lie in the slot of its lock key, or no script could touch both in a cluster. The
//! slot is the CRC16 of what stands between the first `{` and the next `}`, if that is not empty, else of the whole key
//! ("Hash tags" in the Redis Cluster specification). Wrapping the lock key in braces is therefore right unless the key
//! has a `}` itself. Then its own hash tag goes in front, `{<tag>}<lock key>`; and where it has a `}` but no hash tag
//! (`a}b`, `{}a`), a short number from a table whose slot is the same: `{<number>}<lock key>`. The lock key can be read
//! back from each of the three forms (in the first nothing follows the `}`), so no two locks share a companion.
//!
//! **No collision.** Locks that would lie under `holdfast:` themselves (possible with an empty prefix, or with one that
//! begins so) are moved to `holdfast:lock:<prefix><name>`, where no companion ever is. Only such locks are not shared
//! with other tools.

pub(super) mod slots;

use std::fmt::Write;

use self::slots::{hash_tag, slot, tag_for_slot};

/// The last fence that a server has given out. It is there to stay, one key for all names.
pub(super) const LAST: &str = "holdfast:last";
/// In front of a process's name, the name of its channel.
pub(super) const CHANNEL_PREFIX: &str = "holdfast:to:";
/// How long the last fence of a name outlives its last lease in a cluster: a day, less the hour for which renewals may
/// leave it alone. After that, the server's clock alone keeps fences growing.
pub(super) const FENCE_KEPT_MS: u64 = 24 * 60 * 60 * 1000;
/// The same on a server of its own, where the fences grow from a key for all names, and at a quorum's nodes, where they
/// grow from counters that names share: there the name's own is for inspection only, and has to outlast the hour for which
/// renewals may leave it alone.
pub(super) const RECORD_KEPT_MS: u64 = 61 * 60 * 1000;
/// How many counters a node of a quorum has for its fences. Names share them, by the CRC16 of the lock key, so that their
/// number has a bound; that there are many keeps two names that are taken at the same moment from meeting in one.
const COUNTERS: u16 = 1024;
/// What this engine keeps for itself.
const NAMESPACE: &str = "holdfast:";
/// Where locks go whose own key begins with the namespace.
const MOVED: &str = "holdfast:lock:";

/// A kind of key that belongs to a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    /// The lock itself.
    Lock,
    /// The last fence, and who it was granted to.
    Fence,
    /// The holder's metadata.
    Metadata,
    /// The places of those who wait.
    Queue,
    /// On a node of a quorum: the last fence of this name and of those that share its counter.
    Counter,
}

/// The way from names to keys and back.
#[derive(Debug, Clone)]
pub(super) struct Layout {
    prefix: Box<str>,
}

impl Layout {
    pub(super) fn new(prefix: &str) -> Self {
        Layout { prefix: prefix.into() }
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

    /// The pattern of `SCAN` that finds every name with this prefix (literal text), and perhaps other keys.
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

    /// The name that has this lock key. `None` for companions and for whatever is not ours.
    pub(super) fn name_of<'k>(&self, key: &'k str) -> Option<&'k str> {
        let plain = match key.strip_prefix(MOVED) {
            Some(moved) => Some(moved).filter(|moved| moved.starts_with(NAMESPACE))?,
            None if key.starts_with(NAMESPACE) => return None,
            None => key,
        };
        plain.strip_prefix(&*self.prefix).filter(|name| !name.is_empty())
    }
}

/// Replaces `out` by the companion of a lock key.
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

/// Room for the keys of one name, which is used again for the next.
#[derive(Default)]
pub(super) struct KeyBuffer {
    lock: String,
    companions: [String; 2],
}

impl KeyBuffer {
    /// The lock key of a name, and some of its companions, two at the most.
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
            let layout = Layout::new(prefix);
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
        let layout = Layout::new("lock:");
        assert_eq!(lock(&layout, "job:7"), "lock:job:7");
        let mut key = String::new();
        companion(Part::Fence, "lock:job:7", &mut key);
        assert_eq!(key, "holdfast:fence:{lock:job:7}");
        companion(Part::Metadata, "lock:{a}b", &mut key);
        assert_eq!(key, "holdfast:metadata:{a}lock:{a}b");
        assert_eq!(
            lock(&Layout::new(""), "holdfast:fence:{a}"),
            "holdfast:lock:holdfast:fence:{a}"
        );
    }

    #[test]
    fn foreign_keys_have_no_name() {
        let layout = Layout::new("lock:");
        for key in [
            "lock",
            "lock:",
            "other:a",
            "holdfast:lock:lock:a",
            "holdfast:free:lock:a",
        ] {
            assert_eq!(layout.name_of(key), None, "{key}");
        }
        assert_eq!(Layout::new("").name_of("holdfast:lock:a"), None);
    }

    #[test]
    fn patterns_take_every_character_literally() {
        assert_eq!(Layout::new("lock:").pattern(""), "lock:*");
        assert_eq!(Layout::new("").pattern("a*?[b]\\^c"), "a\\*\\?\\[b\\]\\\\\\^c*");
        assert_eq!(Layout::new("").pattern("holdfast:x"), "holdfast:lock:holdfast:x*");
    }
}
