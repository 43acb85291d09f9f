//! Releases.

use std::sync::Arc;
use std::time::Duration;

use super::super::client::Outcome;
use super::super::core::Core;
use super::super::entry::{Record, Stored, kept};
use super::super::leases::Class;
use super::rewrite::Rewritten;
use super::txn::{delete, is_unchanged, txn};
use crate::engine::Released;
use crate::model::{Claim, Key, Ttl};

impl Core {
    /// Releases the names that a claim holds, and removes its entries. With `keep` over zero the held names stay busy for that time.
    pub(in super::super) async fn release(&self, claim: &Claim, keep: Duration) -> Outcome<Released> {
        self.attempts.answered(&claim.owner).await;
        self.entries.leave(&claim.owner);
        if keep.is_zero()
            && let Some(released) = self.release_known(claim).await?
        {
            return Ok(released);
        }
        for _ in 0..super::ATTEMPTS {
            let (_, seen) = self.look(claim.keys(), claim.owner.as_str()).await?;
            let held: Vec<Option<&Stored>> = seen.iter().map(|seen| seen.held(claim.owner.as_str())).collect();
            let own = seen
                .iter()
                .zip(&held)
                .map(|(seen, held)| held.or(seen.own.as_ref()))
                .collect::<Vec<_>>();
            let answer = match held.iter().all(Option::is_some) {
                true => Released::Freed,
                false => Released::NotHeld,
            };
            let (mut deleted, mut stay) = (Vec::new(), Vec::new());
            for ((name, own), held) in claim.keys().iter().zip(own).zip(&held) {
                match (own, held.and_then(|held| held.record.clone())) {
                    (Some(own), Some(record)) if !keep.is_zero() => stay.push(Rewritten {
                        name: name.clone(),
                        stored: own.clone(),
                        record: Record {
                            owner: Some(kept(&claim.owner)),
                            ttl: Ttl::clamped(keep).as_millis(),
                            ..record
                        },
                    }),
                    (Some(own), _) => deleted.push((own.kv.key.clone(), own.kv.mod_revision)),
                    (None, _) => {}
                }
            }
            let is_done = (deleted.is_empty() || self.delete_unchanged(deleted).await?)
                && (stay.is_empty()
                    || self
                        .rewrite(stay, &claim.owner, Ttl::clamped(keep), None)
                        .await?
                        .is_some());
            if is_done {
                self.forget(claim);
                return Ok(answer);
            }
        }
        Err(self.client.contended())
    }

    /// Deletes the entries that this process knows. `None`: it does not know all of them, or one has changed.
    async fn release_known(&self, claim: &Claim) -> Outcome<Option<Released>> {
        let owner: Arc<str> = claim.owner.as_str().into();
        let mut entries = Vec::with_capacity(1);
        let mut answer = Released::Freed;
        for name in claim.keys() {
            let Some((_, held)) = self.held.get(&(name.clone(), owner.clone())) else {
                return Ok(None);
            };
            // Of a claim that holds no other name.
            if held.is_waiter || held.class == Class::Waiters && claim.keys().len() > 1 {
                answer = Released::NotHeld;
            }
            entries.push((self.layout.key(name, &held.id), held.revision));
        }
        let removed = self.delete_unchanged(entries).await?;
        if removed {
            self.forget(claim);
        }
        Ok(removed.then_some(answer))
    }

    fn forget(&self, claim: &Claim) {
        let owner: Arc<str> = claim.owner.as_str().into();
        for name in claim.keys() {
            self.held.remove(&(name.clone(), owner.clone()));
        }
    }

    /// Deletes entries, by their keys and the revisions of their last changes, if none has changed. `false`: one has.
    pub(in super::super) async fn delete_unchanged(&self, entries: Vec<(Vec<u8>, i64)>) -> Outcome<bool> {
        let compare = entries
            .iter()
            .map(|(key, revision)| is_unchanged(key.clone(), *revision));
        let compare = compare.collect();
        let deletions = entries.into_iter().map(|(key, _)| delete(key));
        let answer = self.txn(&txn(compare, deletions.collect(), Vec::new())).await?;
        Ok(answer.succeeded)
    }

    /// Deletes the entry that holds a name. `false`: it is free.
    pub(in super::super) async fn force_release(&self, name: &Key) -> Outcome<bool> {
        for _ in 0..super::ATTEMPTS {
            let (_, seen) = self.look(std::slice::from_ref(name), "").await?;
            let oldest = seen.into_iter().next().and_then(|seen| seen.oldest);
            let Some(oldest) = oldest.filter(Stored::holds) else {
                return Ok(false);
            };
            if self
                .delete_unchanged(vec![(oldest.kv.key, oldest.kv.mod_revision)])
                .await?
            {
                return Ok(true);
            }
        }
        Err(self.client.contended())
    }
}
