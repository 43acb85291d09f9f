//! Releases.

use std::sync::Arc;
use std::time::Duration;

use super::super::client::Outcome;
use super::super::core::{Core, Held};
use super::super::entry::{Record, Stored, kept};
use super::super::leases::Class;
use super::txn::{delete, is_unchanged, put, revision, txn};
use crate::clock::Moment;
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
            let entries = claim.keys().iter().zip(own).zip(&held);
            let entries: Vec<_> = entries
                .filter_map(|((name, own), held)| Some((name, own?, held.is_some())))
                .collect();
            if entries.is_empty() || self.remove(claim, &entries, keep).await? {
                self.forget(claim);
                return Ok(answer);
            }
        }
        Err(self.client.contended())
    }

    /// Deletes the entries that this process knows. `None`: it does not know all of them, or one has changed.
    async fn release_known(&self, claim: &Claim) -> Outcome<Option<Released>> {
        let owner: Arc<str> = claim.owner.as_str().into();
        let (mut compare, mut ops) = (Vec::new(), Vec::new());
        let mut answer = Released::Freed;
        for name in claim.keys() {
            let Some((_, held)) = self.held.get(&(name.clone(), owner.clone())) else {
                return Ok(None);
            };
            // Of a claim that holds no other name.
            if held.is_waiter || held.class == Class::Waiters && claim.keys().len() > 1 {
                answer = Released::NotHeld;
            }
            let key = self.layout.key(name, &held.id);
            compare.push(is_unchanged(key.clone(), held.revision));
            ops.push(delete(key));
        }
        let removed = self.txn(&txn(compare, ops, Vec::new())).await?.succeeded;
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

    /// Deletes entries, or keeps those busy that hold, if none has changed. `false`: one has.
    async fn remove(&self, claim: &Claim, entries: &[(&Key, &Stored, bool)], keep: Duration) -> Outcome<bool> {
        let (ttl, owner) = (Ttl::clamped(keep), kept(&claim.owner));
        let class = Class::of(ttl);
        let lease = match keep.is_zero() {
            true => None,
            false => Some(self.leases.get(class).await?),
        };
        let sent = Moment::now();
        let (mut compare, mut ops) = (Vec::new(), Vec::new());
        let mut stay = Vec::new();
        for (name, stored, holds) in entries {
            let key = || stored.kv.key.clone();
            compare.push(is_unchanged(key(), stored.kv.mod_revision));
            match (&lease, &stored.record) {
                (Some(lease), Some(record)) if *holds => {
                    let record = Record {
                        owner: Some(owner.clone()),
                        ttl: ttl.as_millis(),
                        ..record.clone()
                    };
                    ops.push(put(key(), &record, lease.id));
                    stay.push((*name, *stored));
                }
                _ => ops.push(delete(key())),
            }
        }
        let answer = self.txn(&txn(compare, ops, Vec::new())).await;
        let answer = answer.inspect_err(|failure| {
            lease.iter().for_each(|lease| self.lease_failed(failure, lease));
        })?;
        if let Some(lease) = lease.filter(|_| answer.succeeded) {
            for (name, stored) in stay {
                let held = Held {
                    id: stored.id.as_str().into(),
                    place: stored.place(),
                    has_siblings: stored.has_siblings(),
                    revision: revision(&answer) as i64,
                    lease: lease.id,
                    class,
                    ttl,
                    is_waiter: false,
                };
                self.held
                    .insert((name.clone(), owner.as_str().into()), held, sent + keep);
            }
            self.leases.keep_until(&lease, sent + keep).await?;
        }
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
            let compare = vec![is_unchanged(oldest.kv.key.clone(), oldest.kv.mod_revision)];
            let request = txn(compare, vec![delete(oldest.kv.key)], Vec::new());
            if self.txn(&request).await?.succeeded {
                return Ok(true);
            }
        }
        Err(self.client.contended())
    }
}
