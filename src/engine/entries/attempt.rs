//! Attempts.
//!
//! A claim of several names waits for one name at a time. It keeps its entries in the names before that one, where they are the
//! oldest, so that other callers that keep each of the names busy do not starve it. All claims wait for names in the same order, so
//! that they cannot deadlock.

use std::time::Duration;

use super::engine::{Core, OwnClaim, ROUNDS};
use super::record::{Seen, Stored, new_token, now_ms};
use super::store::{Failure, Outcome};
use crate::clock::Moment;
use crate::engine::Acquired;
use crate::model::{Claim, Fence, Key, Ttl};

/// How long a waiter without a subscription keeps its position after its last attempt, unless its ttl is shorter.
const LIVENESS: Duration = Duration::from_millis(4500);
/// The time from a grant until its fencing token is written. Most locks are released before.
pub(super) const RECORD_DELAY: Duration = Duration::from_millis(50);

/// Returns when a position ends without a further attempt.
pub(super) fn end_of_position(ttl: Ttl) -> Moment {
    Moment::now() + ttl.duration().min(LIVENESS)
}

impl Core {
    /// Makes one attempt to acquire all names of a claim.
    ///
    /// # Behavior
    /// Each round compares what was read of the names with what the claim wants: no entries if a name is busy and it does not wait, entries in
    /// the names up to the busy one if it waits, else entries in all names. It changes what differs, and the next round reads again. The
    /// attempt ends when nothing differs: with a busy name, or with the grant, if no entry has changed in between.
    pub(super) async fn acquire(&self, claim: &Claim) -> Outcome<Acquired> {
        let (names, owner, began) = (claim.keys(), &claim.owner, Moment::now());
        // A deletion of its entries that is in progress could be executed after the attempt.
        self.wait_for_deletions(owner).await;
        // The first step of a claim whose entry is gone is that of a new one.
        let is_gone = claim.waiting && names.len() == 1 && !self.local.waits(owner);
        let known = self.claims.get(owner);
        let mut seen = match known.filter(|own| own.fence.is_some() || !is_gone) {
            None => self.store.change(claim, names, &[], true).await?,
            Some(_) => {
                claim.mark_sent();
                self.store.read(names, Some(owner)).await?
            }
        };
        for _ in 0..ROUNDS {
            let busy = seen.iter().position(|seen| seen.is_busy(claim));
            let wanted = match busy {
                Some(_) if !claim.waiting => 0,
                Some(busy) => busy + 1,
                None => names.len(),
            };
            let is_missing = |(_, seen): &(&Key, &Seen)| seen.own.is_none();
            let missing = names.iter().zip(&seen).take(wanted).filter(is_missing);
            let create: Vec<Key> = missing.map(|(name, _)| name.clone()).collect();
            let own_entries = |seen: &[Seen]| seen.iter().filter_map(|seen| seen.own.clone()).collect::<Vec<_>>();
            let remove = own_entries(&seen[wanted..]);
            if let (Some(index), 0) = (busy, wanted) {
                if remove.is_empty() || self.store.delete(&remove).await? {
                    self.forget(owner);
                    return Ok(is_held(&names[index], &seen[index]));
                }
                seen = self.store.read(names, Some(owner)).await?;
                continue;
            }
            if !create.is_empty() || !remove.is_empty() {
                seen = self.store.change(claim, &create, &remove, false).await?;
                continue;
            }
            let mut entries = own_entries(&seen[..wanted]);
            if let Some(index) = busy {
                if names.len() > 1 && entries.iter().any(Stored::holds) {
                    // They have the data of a lease: they were created when all names seemed to be free.
                    let Some(marked) = self.write(owner, as_set(entries), Some(owner), claim.ttl).await? else {
                        seen = self.store.read(names, Some(owner)).await?;
                        continue;
                    };
                    entries = marked;
                }
                let Some(entered) = entries.last().map(Stored::mirrored) else {
                    continue;
                };
                let own = OwnClaim {
                    entries,
                    fence: None,
                    needs_token: claim.needs_token,
                };
                self.claims.insert(owner.clone(), own, end_of_position(claim.ttl));
                self.local.enter(owner, &names[index], entered);
                return Ok(is_held(&names[index], &seen[index]));
            }
            if let Some(fence) = self.grant(claim, began, entries, new_token(&seen)).await? {
                return Ok(Acquired::Granted { fence });
            }
            seen = self.store.read(names, Some(owner)).await?;
        }
        Err(Failure::contended())
    }

    /// Turns the entries of a claim, each the oldest one of its name, into its lease. Returns the fencing token: `new` for a new
    /// lease. `None`: an entry has changed.
    async fn grant(
        &self,
        claim: &Claim,
        began: Moment,
        mut entries: Vec<Stored>,
        new: Fence,
    ) -> Outcome<Option<Fence>> {
        let owner = &claim.owner;
        // The service counts its lease from then.
        let sent = claim.sent_at().map_or(began, |sent| sent.max(began));
        let known = self.claims.get(owner);
        let waited = known.as_ref().is_some_and(|own| own.fence.is_none());
        // A retry after a lost reply keeps its token: the one that this process knows, or the one that is written. New entries have a
        // new one: the name may have had another holder.
        let positions = |entries: &[Stored]| entries.iter().map(|entry| entry.position).collect::<Vec<_>>();
        let known = known.filter(|own| positions(&own.entries) == positions(&entries));
        let known = known.and_then(|own| own.fence).filter(|fence| *fence != Fence::NONE);
        let written = entries.iter().map(Stored::fence).collect::<Option<Vec<_>>>();
        let has_token = written.is_some();
        let fence = known.or(written.into_iter().flatten().max()).unwrap_or(new);
        let is_lease = entries.iter().all(|entry| self.store.is_lease(entry, claim.ttl));
        if waited {
            let records = entries.iter_mut().filter_map(|entry| entry.record.as_mut());
            records.for_each(|record| _ = record.since.get_or_insert_with(now_ms));
        }
        if !is_lease {
            let leases = entries.into_iter().map(|entry| of_lease(entry, claim.ttl, fence));
            let Some(written) = self.write(owner, leases.collect(), Some(owner), claim.ttl).await? else {
                return Ok(None);
            };
            entries = written;
        }
        if !self.hold(owner, entries.clone(), fence, sent, claim.needs_token) {
            self.wait_for_deletions(owner).await;
            return Ok(None);
        }
        if is_lease && !has_token {
            self.records.insert(owner.clone(), (), Moment::now() + RECORD_DELAY);
        }
        let is_kept = self.store.keep(&entries, sent, claim.ttl).await?;
        Ok(is_kept.then_some(fence))
    }
}

/// Returns an entry with the data of a lease, whose ttl is not shorter than before.
pub(super) fn of_lease(mut entry: Stored, ttl: Ttl, fence: Fence) -> Stored {
    if let Some(record) = &mut entry.record {
        record.set = false;
        record.ttl = record.ttl.max(ttl.as_millis());
        record.since.get_or_insert(entry.created_ms);
        record.fence = Some(fence.0);
    }
    entry
}

/// Returns entries with the data of a claim that does not hold all of its names.
fn as_set(mut entries: Vec<Stored>) -> Vec<Stored> {
    let records = entries.iter_mut().filter_map(|entry| entry.record.as_mut());
    records.for_each(|record| record.set = true);
    entries
}

fn is_held(name: &Key, seen: &Seen) -> Acquired {
    Acquired::Held {
        key: name.clone(),
        retry_after: seen.granted.iter().filter_map(Stored::ttl).min().map(Ttl::duration),
    }
}
