//! Where the entries of a name are: Curator's layout, `<chroot>/<name>/_c_<uuid>-lock-<number>`. The folder of a shared name has `%FF`
//! before the name, and the names of its entries have the share, `_c_<uuid>-<permits>-<limit>-lock-<number>`: a mirror knows only names.

use super::client::Access;
use crate::engine::entries::Entry;
use crate::engine::entries::names::{SHARED, decoded, encoded, marker};
use crate::model::{Key, OwnerToken, Share};

/// The digits of the number that the server appends to the name of an entry.
const NUMBER_DIGITS: usize = 10;
/// What follows the UUID in the name of an entry that keeps a name busy. Curator orders by what is behind the last `lock-`.
const KEPT: &str = "-kept-lock-";
/// The length of a UUID.
const UUID: usize = 36;

/// The paths of an engine.
#[derive(Debug, Clone)]
pub(super) struct Layout {
    /// An empty text or a path without a slash at its end.
    pub chroot: String,
    /// The prefix of every name.
    pub prefix: String,
    /// The clients that may use the nodes.
    pub access: Access,
}

impl Layout {
    /// Returns the folder of all names.
    pub(super) fn root(&self) -> &str {
        if self.chroot.is_empty() { "/" } else { &self.chroot }
    }

    /// Returns the folder of a name's entries.
    pub(super) fn folder(&self, key: &Key) -> String {
        let name = format!("{}{}", self.prefix, key.as_str());
        let folder = match name.as_str() {
            _ if key.is_shared() => encoded(&self.prefix) + marker(key) + &encoded(key.as_str()),
            "." | ".." => name.replacen('.', "%2E", 1),
            "zookeeper" => "%7Aookeeper".to_owned(),
            name => encoded(name),
        };
        format!("{}/{folder}", self.chroot)
    }

    /// Returns the path of an entry.
    pub(super) fn entry(&self, key: &Key, child: &str) -> String {
        format!("{}/{child}", self.folder(key))
    }

    /// Returns the name of a folder below the chroot. `None`: it is no folder of this engine.
    pub(super) fn name_of(&self, folder: &str) -> Option<Key> {
        if let Some((prefix, name)) = folder.split_once(SHARED) {
            let key = Key::new(&decoded(name)?).ok()?;
            return (prefix == encoded(&self.prefix)).then(|| key.shared());
        }
        let name = decoded(folder)?;
        Key::new(name.strip_prefix(&self.prefix)?).ok()
    }

    /// Splits the path of an entry into the name and the entry. `None`: it is the path of something else.
    pub(super) fn split<'p>(&self, path: &'p str) -> Option<(Key, &'p str)> {
        let (folder, child) = path.strip_prefix(&self.chroot)?.strip_prefix('/')?.split_once('/')?;
        Some((self.name_of(folder)?, child))
    }
}

/// An entry of a name. Entries of other programs have no owner token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Child {
    pub name: String,
    pub owner: Option<OwnerToken>,
    /// The share of the claim; that of a lock, if the name of the node has none.
    pub share: Share,
    /// Its position. A transfer creates an entry with the number of the old one, before it deletes that.
    pub number: u64,
}

impl Child {
    /// Reads the name of a node. `None`: it is not sequential, so it is no entry.
    pub(super) fn parse(name: &str) -> Option<Self> {
        let digits = name.get(name.len().checked_sub(NUMBER_DIGITS)?..)?;
        if !digits.bytes().all(|byte| byte.is_ascii_digit()) {
            return None;
        }
        let number = digits.parse().ok()?;
        let head = name.strip_prefix("_c_").and_then(|rest| rest.split_once("-lock-"));
        let (uuid, share) = head.and_then(|(head, _)| head.split_at_checked(UUID)).unzip();
        let owner = uuid.and_then(|uuid| OwnerToken::parse(&uuid.replace('-', "")).ok());
        let share = share.and_then(Child::parse_share);
        Some(Child {
            name: name.to_owned(),
            owner: owner.filter(|owner| name.starts_with(&Child::prefix_of(owner, share))),
            share: share.unwrap_or(Share::LOCK),
            number,
        })
    }

    /// Reads what is behind the UUID of a share.
    fn parse_share(text: &str) -> Option<Share> {
        let share = text.strip_suffix("-kept").unwrap_or(text).strip_prefix('-')?;
        let (permits, limit) = share.split_once('-')?;
        Share::new(permits.parse().ok()?, limit.parse().ok()?)
    }

    /// Reads the entries of a folder, the oldest first.
    pub(super) fn all(names: &[String]) -> Vec<Self> {
        let mut children: Vec<Self> = names.iter().filter_map(|name| Child::parse(name)).collect();
        children.sort_by(|one, other| (one.number, &one.name).cmp(&(other.number, &other.name)));
        children
    }

    /// Returns the name of a new entry, without the number that the server appends.
    pub(super) fn prefix_of(owner: &OwnerToken, share: Option<Share>) -> String {
        let share = share.map_or_else(String::new, |share| format!("-{}-{}", share.permits(), share.limit()));
        let [one, two, three, four, five] = [0..8, 8..12, 12..16, 16..20, 20..32].map(|digits| &owner.as_str()[digits]);
        format!("_c_{one}-{two}-{three}-{four}-{five}{share}-lock-")
    }

    /// Returns the name of an entry of another owner of a lock with the same number. `None`: of one that keeps the name busy.
    pub(super) fn replaced(name: &str, owner: Option<&OwnerToken>) -> String {
        let number = name.len().saturating_sub(NUMBER_DIGITS);
        match owner {
            Some(owner) => Self::prefix_of(owner, None) + name.get(number..).unwrap_or_default(),
            None => name.replacen("-lock-", KEPT, 1),
        }
    }

    /// Whether an entry keeps its name busy after a release.
    pub(super) fn is_kept(name: &str) -> bool {
        name.contains(KEPT)
    }

    pub(super) fn is_of(&self, owner: &OwnerToken) -> bool {
        self.owner.as_ref() == Some(owner)
    }

    /// Returns the entry for the mirror of the name.
    pub(super) fn mirrored(&self) -> Entry {
        Entry {
            id: self.name.as_str().into(),
            position: self.number,
            share: self.share,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(chroot: &str, prefix: &str) -> Layout {
        Layout {
            chroot: chroot.into(),
            prefix: prefix.into(),
            access: Access::Everyone,
        }
    }

    #[test]
    fn a_folder_leads_back_to_its_name() {
        let layout = layout("/a/b", "p:");
        for name in [
            "a",
            "a/b",
            "é💥",
            "%41",
            "..",
            ".",
            "a\0",
            "zookeeper",
            &"x".repeat(512),
        ] {
            let key = Key::new(name).unwrap();
            let path = layout.entry(&key, "child");
            assert!(path.is_ascii() && path.starts_with("/a/b/p:"), "{path}");
            assert_eq!(layout.split(&path), Some((key, "child")));
        }
    }

    #[test]
    fn shared_names_and_shares_are_read_back() {
        let owner = OwnerToken::parse("00112233445566778899aabbccddeeff").unwrap();
        let share = Share::new(2, 15).unwrap();
        let name = Child::prefix_of(&owner, Some(share)) + "0000000007";
        assert_eq!(name, "_c_00112233-4455-6677-8899-aabbccddeeff-2-15-lock-0000000007");
        let child = Child::parse(&name).unwrap();
        assert_eq!((child.is_of(&owner), child.share, child.number), (true, share, 7));
        let kept = Child::parse(&Child::replaced(&name, None)).unwrap();
        assert_eq!((kept.owner, kept.share, kept.number), (None, share, 7));
        assert!(Child::is_kept(&kept.name));
        for other in ["-0-1", "-2-1", "-1", "-1-", "-1-2-3", "-x-1", "-kept", ""] {
            let name = format!("_c_00112233-4455-6677-8899-aabbccddeeff{other}-lock-0000000007");
            assert_eq!(Child::parse(&name).unwrap().share, Share::LOCK, "{other}");
        }
        let [with, without] = [layout("/a", "p:/"), layout("/a", "")];
        for name in ["n", "%FF", "é/", "zookeeper"] {
            let key = Key::new(name).unwrap().shared();
            let [one, other] = [&with, &without].map(|layout| layout.folder(&key));
            assert!(
                one.starts_with("/a/p:%2F%FF") && other.starts_with("/a/%FF"),
                "{one} {other}"
            );
            let name_of = |layout: &Layout, folder: &str| layout.name_of(&folder["/a/".len()..]);
            assert_eq!(
                (name_of(&with, &one), name_of(&without, &other)),
                (Some(key.clone()), Some(key))
            );
            assert_eq!((name_of(&without, &one), name_of(&with, &other)), (None, None));
        }
    }

    #[test]
    fn reserved_names_are_escaped() {
        let layout = layout("", "");
        for (name, folder) in [
            (".", "/%2E"),
            ("..", "/%2E."),
            ("zookeeper", "/%7Aookeeper"),
            ("a b", "/a%20b"),
        ] {
            let key = Key::new(name).unwrap();
            assert_eq!(layout.folder(&key), folder);
            assert_eq!(layout.name_of(&folder[1..]), Some(key));
        }
        for other in ["%", "%4", "%zz", "%ff", "", "%é1"] {
            assert_eq!(layout.name_of(other), None, "{other}");
        }
        for path in ["/zookeeper", "zookeeper", "/a", "", "/other"] {
            assert_eq!(layout.split(path), None, "{path}");
        }
    }

    #[test]
    fn entries_have_an_order_and_owners() {
        let owner = OwnerToken::parse("00112233445566778899aabbccddeeff").unwrap();
        let prefix = Child::prefix_of(&owner, None);
        assert_eq!(prefix, "_c_00112233-4455-6677-8899-aabbccddeeff-lock-");
        let names = [
            "other-0000000009".to_owned(),
            format!("{prefix}0000000007"),
            "config".into(),
            "-0000000001x".into(),
            "é000000000".into(),
            "_c_00112233-4455-6677-8899-aabbccddeeff__READ__0000000003".into(),
            "_c_00112233x4455-6677-8899-aabbccddeeff-lock-0000000004".into(),
        ];
        let children = Child::all(&names);
        let numbers: Vec<u64> = children.iter().map(|child| child.number).collect();
        assert_eq!(numbers, [3, 4, 7, 9]);
        let owned: Vec<u64> = children
            .iter()
            .filter(|child| child.is_of(&owner))
            .map(|child| child.number)
            .collect();
        assert_eq!(owned, [7]);
        // A repeated request has created a second one: the end of one is not that of the other.
        let ids = ["0000000007", "0000000008"]
            .map(|number| Child::parse(&format!("{prefix}{number}")).unwrap().mirrored().id);
        assert_ne!(ids[0], ids[1]);
        let next = OwnerToken::fresh();
        let replaced = Child::parse(&Child::replaced(&children[2].name, Some(&next))).unwrap();
        assert!(replaced.is_of(&next) && replaced.number == 7);
        let kept = Child::parse(&Child::replaced(&children[2].name, None)).unwrap();
        assert_eq!(
            kept.name,
            "_c_00112233-4455-6677-8899-aabbccddeeff-kept-lock-0000000007"
        );
        assert!(Child::is_kept(&kept.name) && !Child::is_kept(&children[2].name));
        assert_eq!((kept.owner, kept.number), (None, 7));
    }
}
