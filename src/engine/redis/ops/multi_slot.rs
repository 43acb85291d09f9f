//! Claims whose names are in several slots of a cluster: part by part, and nevertheless all or nothing.
//!
//! A script cannot use two slots. So the parts of a claim are acquired one after the other, in the order of their slots: two
//! claims that overlap compete for the first slot that they share. An attempt that finds a busy part rolls back the other parts.
//! A waiter in a queue holds the parts before the busy one, so that callers of single names do not starve it. Until the waiter has
//! all parts, each lease lasts at most [`WAITER_LIVENESS`]: if its process dies, these names are free soon.
//!
//! **One fencing token.** The token of the claim is the largest of its parts. Each part is granted with a token that is not
//! smaller than those before it. At the end, each part whose token is smaller is acquired again with the token of the claim, and
//! each one whose lease is short with the ttl of the claim. The claim is granted only then, so that the next token of each name is
//! larger than the claim's.

use std::collections::BTreeMap;
use std::time::Duration;

use futures_util::future::join_all;

use crate::engine::redis::RedisEngine;
use crate::engine::redis::error::Failure;
use crate::engine::{Acquired, Renewal, Renewed, WAITER_LIVENESS};
use crate::model::{Claim, Fence, Key, Ttl};

/// The number of rounds for a claim whose parts expire during the attempt.
const ROUNDS: usize = 3;

/// The ttl of a renewal that changes nothing, and shows whether the lease is held.
pub(super) fn least_ttl() -> Ttl {
    Ttl::clamped(Duration::from_millis(1))
}

/// Returns the part of a claim with these names.
pub(in super::super) fn part(claim: &Claim, keys: &[Key]) -> Claim {
    let mut part = Claim::new(keys, claim.owner.clone(), claim.ttl, claim.process.clone());
    part.waiting = claim.waiting;
    part.metadata.clone_from(&claim.metadata);
    part.is_part = claim.is_part || keys.len() < claim.keys().len();
    part
}

impl RedisEngine {
    /// Returns the parts of a claim, one for each slot. `None` if there is only one.
    pub(in super::super) fn parts(&self, claim: &Claim) -> Option<Vec<Claim>> {
        let keys = claim.keys();
        if keys.len() == 1 || !self.route.has_slots() {
            return None;
        }
        // By slot: all claims acquire their parts in the same order, which cannot deadlock.
        let mut slots: BTreeMap<u16, Vec<Key>> = BTreeMap::new();
        for key in keys {
            slots.entry(self.slot(key)).or_default().push(key.clone());
        }
        if slots.len() == 1 {
            return None;
        }
        Some(slots.into_values().map(|keys| part(claim, &keys)).collect())
    }

    /// Makes one attempt for all parts.
    pub(in super::super) async fn acquire_parts(&self, parts: &[Claim], whole: &Claim) -> Result<Acquired, Failure> {
        let mut fences = vec![0; parts.len()];
        let keeps = whole.waiting && self.waiters.known.number(&whole.owner) > 0;
        let is_short = keeps && whole.ttl.duration() > WAITER_LIVENESS;
        for _ in 0..ROUNDS {
            let mut largest = fences.iter().copied().max().unwrap_or_default();
            for (index, part) in parts.iter().enumerate() {
                let mut part = part.clone();
                if is_short {
                    part.ttl = Ttl::clamped(WAITER_LIVENESS);
                }
                match self.acquire(&part, whole, largest, false).await {
                    Ok(Acquired::Granted { fence: Fence(fence) }) => {
                        fences[index] = fence;
                        largest = largest.max(fence);
                    }
                    Ok(Acquired::Held { key, retry_after }) => {
                        // The next attempt of the waiter extends the kept parts.
                        let kept = if keeps { index } else { 0 };
                        self.roll_back_parts(&parts[kept..], index - kept).await?;
                        return Ok(Acquired::Held { key, retry_after });
                    }
                    Err(failure) => {
                        // This failure is the answer. The service releases the claim once more.
                        let _ = self.roll_back_parts(parts, index).await;
                        return Err(failure);
                    }
                }
            }
            let needs_update = |index: &usize| is_short || fences[*index] < largest;
            let outdated: Vec<usize> = (0..parts.len()).filter(needs_update).collect();
            let raise = |index: &usize| self.attempt(&parts[*index], whole, None, largest);
            let raised = join_all(outdated.iter().map(raise)).await;
            for (index, raised) in outdated.into_iter().zip(raised) {
                fences[index] = match raised? {
                    Acquired::Granted { fence: Fence(fence) } => fence,
                    // The part has expired, and has another holder.
                    Acquired::Held { .. } => 0,
                };
            }
            if fences.iter().all(|fence| *fence == largest) {
                return Ok(Acquired::Granted { fence: Fence(largest) });
            }
            // A part has expired meanwhile, and may have another holder: start again.
        }
        let _ = self.roll_back_parts(parts, parts.len()).await;
        Err(Failure::TooSlow)
    }

    /// Rolls back all parts except the busy one, with their positions in the queues. Rolls back all parts if none is busy.
    async fn roll_back_parts(&self, parts: &[Claim], busy: usize) -> Result<(), Failure> {
        let others = parts.iter().enumerate().filter(|(index, _)| *index != busy);
        // The parts after the busy one, too: an earlier round may have acquired or queued them.
        let freed = join_all(others.map(|(_, part)| self.release_part(part, Duration::ZERO))).await;
        freed.into_iter().try_for_each(|freed| freed.map(|_| ()))
    }

    /// Renews all parts, if all are still held.
    pub(in super::super) async fn renew_parts(&self, parts: &[Claim], ttl: Ttl) -> Result<Renewed, Failure> {
        for ttl in [least_ttl(), ttl] {
            for renewed in join_all(parts.iter().map(|claim| self.renew_part(Renewal { claim, ttl }))).await {
                if renewed? == Renewed::Lost {
                    return Ok(Renewed::Lost);
                }
            }
        }
        Ok(Renewed::Extended)
    }
}
