//! The rows of shared names.
//!
//! A shared name has a row without an owner, which keeps its fencing token, and a row for each share that is held of it: its stored name
//! is that of the shared name and the owner. So a renewal, and the end of a lease, are those of any row.

use std::borrow::Cow;

use super::{Ledger, Row, StoredName};
use crate::model::{Claim, Key, Share, Sums};

/// Stands before a shared name, and between it and an owner. UTF-8 does not have this byte.
pub(in crate::engine) const SHARED: u8 = 0xFF;

/// Returns a name as it is stored.
pub(in crate::engine) fn stored_name(prefix: &str, key: &Key) -> StoredName {
    let mut stored = prefix.as_bytes().to_vec();
    stored.extend(key.is_shared().then_some(SHARED));
    stored.extend_from_slice(key.as_str().as_bytes());
    stored
}

/// Whether a stored name is that of a shared name, or of a share.
pub(in crate::engine) fn is_shared(name: &[u8]) -> bool {
    name.contains(&SHARED)
}

/// Whether a stored name is that of a share.
pub(in crate::engine) fn is_share(name: &[u8]) -> bool {
    name.iter().filter(|byte| **byte == SHARED).count() > 1
}

/// Returns the share that a store has in two columns. `None`: another row than that of a share.
pub(in crate::engine) fn stored_share<T: TryInto<u32>>(permits: Option<T>, limit: Option<T>) -> Option<Share> {
    Share::new(permits?.try_into().ok()?, limit?.try_into().ok()?)
}

/// Returns the stored name of an owner's share.
pub(in crate::engine) fn share_name(shared: &StoredName, owner: &str) -> StoredName {
    [shared, &[SHARED][..], owner.as_bytes()].concat()
}

/// Returns the shared name of a share, and the same for any other name.
pub(in crate::engine) fn without_owner(name: &StoredName) -> &[u8] {
    let mut marks = name.iter().enumerate().filter(|(_, byte)| **byte == SHARED);
    match (marks.next(), marks.next()) {
        (Some(_), Some((owner, _))) => &name[..owner],
        _ => name,
    }
}

/// Returns the bounds of the shares of a name, the second one not included.
pub(in crate::engine) fn bounds(shared: &StoredName) -> (StoredName, StoredName) {
    // Owners begin with a hexadecimal digit.
    (share_name(shared, ""), share_name(shared, "g"))
}

/// Returns the stored names of the rows that a claim holds, if `names` are its names.
pub(in crate::engine) fn held_names<'n>(claim: &Claim, names: &'n [StoredName]) -> Cow<'n, [StoredName]> {
    match claim.share {
        Some(_) => Cow::Owned(vec![share_name(&names[0], claim.owner.as_str())]),
        None => Cow::Borrowed(names),
    }
}

impl Ledger {
    /// Returns the rows of the shares of a name, with their stored names.
    pub(in crate::engine) fn shares(&self, shared: &StoredName) -> impl Iterator<Item = (&StoredName, &Row)> {
        let (first, end) = bounds(shared);
        self.rows.range(first..end)
    }

    /// Returns the last fencing token of a name, as far as it is known. A shared name may have been removed before its shares.
    pub(super) fn last_fence_of(&self, name: &StoredName) -> i64 {
        let row = self.rows.get(name).into_iter();
        let shares = is_shared(name).then(|| self.shares(name).map(|(_, row)| row));
        let fences = row.chain(shares.into_iter().flatten()).map(|row| row.fence);
        fences.max().unwrap_or_default()
    }

    /// Returns the live shares of a name that other owners have, and the next end of one.
    pub(super) fn shares_of_others(&self, shared: &StoredName, owner: &str) -> (Sums, Option<i64>) {
        let own = share_name(shared, owner);
        let others = || {
            let live = self.shares(shared).filter(|(_, row)| row.is_live(self.now_us));
            live.filter(|(name, _)| **name != own).map(|(_, row)| row)
        };
        let next_end = others().map(|row| row.expires_us).min();
        (others().filter_map(|row| row.share).collect(), next_end)
    }
}
