//! Renewals, transfers and releases.

use std::time::Duration;

use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt};

use super::attempt::of_lease;
use super::engine::{Core, OwnClaim, ROUNDS, TOKEN_POLL, TOKEN_POLLS};
use super::record::{Seen, Stored, UNKNOWN, new_token};
use super::store::{Failure, Outcome};
use crate::clock::Moment;
use crate::engine::{Released, Renewal, Renewed};
use crate::model::{Claim, Fence, OwnerToken, Ttl};

/// The number of entries in one check (etcd's `--max-txn-ops` is 128).
const CHECK_SIZE: usize = 100;

impl Core {
    /// Renews leases.
    ///
    /// # Behavior
    /// A check shows that no entry has changed, and the session certainly lasts for the leases. Nothing is written, unless a lease gets
    /// a longer ttl than before, was handed off, or is that of another process.
    pub(super) async fn renew_all(
        &self,
        renewals: &[Renewal<'_>],
        answer: &mut (dyn FnMut(usize, Outcome<Renewed>) + Send),
    ) {
        let began = Moment::now();
        let mut calls = FuturesUnordered::new();
        let mut chunk: Vec<(usize, Vec<Stored>)> = Vec::new();
        let mut size = 0;
        for (index, renewal) in renewals.iter().enumerate() {
            let Some(entries) = self.unwritten(renewal, began) else {
                let Renewal { claim, ttl } = *renewal;
                calls.push(async move { vec![(index, self.rewrite(claim, &claim.owner, ttl).await)] }.boxed());
                continue;
            };
            if size + entries.len() > CHECK_SIZE {
                calls.push(self.check(std::mem::take(&mut chunk), renewals, began).boxed());
                size = 0;
            }
            size += entries.len();
            chunk.push((index, entries));
        }
        if !chunk.is_empty() {
            calls.push(self.check(chunk, renewals, began).boxed());
        }
        while let Some(answers) = calls.next().await {
            answers.into_iter().for_each(|(index, renewed)| answer(index, renewed));
        }
    }

    /// Returns the entries of a lease whose renewal needs no write. Moves the end of the lease in this process first: the entries must
    /// not be deleted before the store answers.
    fn unwritten(&self, Renewal { claim, ttl }: &Renewal<'_>, began: Moment) -> Option<Vec<Stored>> {
        let is_unwritten = |entry: &Stored| entry.version != UNKNOWN && self.store.is_lease(entry, *ttl);
        let mut unwritten = None;
        self.claims.update(&claim.owner, |end, own| {
            if !own.holds(claim) || !own.entries.iter().all(is_unwritten) {
                return None;
            }
            unwritten = Some(own.entries.clone());
            Some(end.max(began + ttl.duration()))
        });
        unwritten
    }

    /// Renews leases by one check.
    async fn check(
        &self,
        chunk: Vec<(usize, Vec<Stored>)>,
        renewals: &[Renewal<'_>],
        began: Moment,
    ) -> Vec<(usize, Outcome<Renewed>)> {
        let entries: Vec<&Stored> = chunk.iter().flat_map(|(_, entries)| entries).collect();
        let keeping = chunk
            .iter()
            .map(|(index, entries)| self.store.keep(entries, began, renewals[*index].ttl));
        let (checked, kept) = tokio::join!(self.store.check(&entries), join_all(keeping));
        let mut checked = checked.map(Vec::into_iter);
        let answers = chunk.iter().zip(kept).map(|((index, entries), kept)| {
            let are_same = checked.as_mut().map_err(|failure| failure.clone()).map(|checked| {
                let checked = checked.by_ref().take(entries.len());
                checked.filter(|is_same| *is_same).count() == entries.len()
            });
            let Renewal { claim, ttl } = renewals[*index];
            async move {
                let renewed = match (are_same, kept) {
                    (Ok(true), Ok(true)) => Ok(Renewed::Extended),
                    (Err(failure), _) | (Ok(true), Err(failure)) => Err(failure),
                    _ => self.rewrite(claim, &claim.owner, ttl).await,
                };
                (*index, renewed)
            }
        });
        join_all(answers).await
    }

    /// Writes the entries of a lease again, for a longer ttl or for another owner or process.
    pub(super) async fn rewrite(&self, claim: &Claim, to: &OwnerToken, ttl: Ttl) -> Outcome<Renewed> {
        for _ in 0..ROUNDS {
            let sent = Moment::now();
            let own = self.claims.get(&claim.owner);
            let is_ending = self.ending.borrow().contains(&claim.owner);
            let held = match is_ending {
                true => None,
                false => self.held(claim, to, own.is_some()).await?,
            };
            let Some((mut entries, at)) = held else {
                self.forget(&claim.owner);
                return Ok(Renewed::Lost);
            };
            let written = entries.iter().filter_map(Stored::fence).max();
            let fence = own.and_then(|own| own.fence).filter(|fence| *fence != Fence::NONE);
            let fence = fence.or(written).or(claim.fence).unwrap_or(at);
            if *to != claim.owner {
                for record in entries.iter_mut().filter_map(|entry| entry.record.as_mut()) {
                    (record.host, record.pid) = (claim.process.host.clone(), claim.process.pid);
                }
            }
            let leases = entries.into_iter().map(|entry| of_lease(entry, ttl, fence));
            let Some(entries) = self.write(&claim.owner, leases.collect(), Some(to), ttl).await? else {
                continue;
            };
            if *to != claim.owner {
                self.forget(&claim.owner);
            }
            if !self.hold(to, entries.clone(), fence, sent, claim.needs_token) {
                return Ok(Renewed::Lost);
            }
            if self.store.keep(&entries, sent, ttl).await? {
                return Ok(Renewed::Extended);
            }
        }
        Err(Failure::contended())
    }

    /// Records a lease. `false`: it has ended meanwhile, and its entries are deleted.
    pub(super) fn hold(
        &self,
        owner: &OwnerToken,
        entries: Vec<Stored>,
        fence: Fence,
        sent: Moment,
        needs_token: bool,
    ) -> bool {
        let ttl = entries.iter().filter_map(Stored::ttl).max();
        let end = ttl.map_or(sent, |ttl| sent + ttl.duration());
        let own = OwnClaim {
            entries,
            fence: Some(fence),
            needs_token,
        };
        let ending = self.ending.borrow();
        if ending.contains(owner) {
            return false;
        }
        self.claims.insert(owner.clone(), own, end);
        self.local.leave(owner);
        true
    }

    /// Reads the entries of a claim, if each of its names is held by `claim.owner` or `other`, and a fencing token for them. `None`: one
    /// is not.
    ///
    /// # Behavior
    /// Waits for a fencing token that another process has not written yet. `is_known`: the lease is of this process, which knows its token.
    async fn held(&self, claim: &Claim, other: &OwnerToken, is_known: bool) -> Outcome<Option<(Vec<Stored>, Fence)>> {
        for poll in 0.. {
            let seen = self.store.read(claim.keys(), Some(&claim.owner)).await?;
            let is_mine = |entry: &&Stored| entry.record.is_some() && (entry.is_of(&claim.owner) || entry.is_of(other));
            let holders = seen.iter().map(|seen| seen.holders().find(is_mine).cloned());
            let Some(holders) = holders.collect::<Option<Vec<_>>>() else {
                return Ok(None);
            };
            // No task of this process writes the token of a lease that it does not know.
            let waits = |entry: &Stored| entry.awaits_token() && self.store.lasts_until(entry.session).is_none();
            if is_known || poll >= TOKEN_POLLS || !holders.iter().any(waits) {
                return Ok(Some((holders, new_token(&seen))));
            }
            tokio::time::sleep(TOKEN_POLL).await;
        }
        Ok(None)
    }

    /// Writes entries of `owner`. Their versions are unknown until the answer: the store may have executed the write.
    pub(super) async fn write(
        &self,
        owner: &OwnerToken,
        entries: Vec<Stored>,
        to: Option<&OwnerToken>,
        ttl: Ttl,
    ) -> Outcome<Option<Vec<Stored>>> {
        self.claims.update(owner, |_, own| {
            own.entries.iter_mut().for_each(|entry| entry.version = UNKNOWN);
            None
        });
        self.store.write(entries, to, ttl).await
    }

    /// Releases the names that a claim holds, and deletes its entries. With `keep` over zero, the names of a lease stay busy for that
    /// time.
    pub(super) async fn release(&self, claim: &Claim, keep: Duration) -> Outcome<Released> {
        let owner = &claim.owner;
        self.store.wait_for_answers(owner).await;
        self.wait_for_deletions(owner).await;
        self.local.leave(owner);
        self.records.remove(owner);
        if let Some(own) = self.claims.get(owner)
            && keep.is_zero()
            && (own.fence.is_none() || own.holds(claim))
            && own.entries.iter().all(|entry| entry.version != UNKNOWN)
            && self.store.delete(&own.entries).await?
        {
            self.forget(owner);
            return Ok(if own.holds(claim) {
                Released::Freed
            } else {
                Released::NotHeld
            });
        }
        for _ in 0..ROUNDS {
            let sent = Moment::now();
            let seen = self.store.read(claim.keys(), Some(owner)).await?;
            let holds = |seen: &Seen| seen.holders().any(|holder| holder.is_of(owner));
            let is_held = seen.iter().all(holds);
            let new = new_token(&seen);
            let entries: Vec<Stored> = seen.into_iter().filter_map(|seen| seen.own).collect();
            let is_done = if is_held && !keep.is_zero() {
                let known = self.claims.get(owner).and_then(|own| own.fence);
                let fence = known
                    .or_else(|| entries.iter().filter_map(Stored::fence).max())
                    .unwrap_or(new);
                let ttl = Ttl::clamped(keep);
                let leases = entries.into_iter().map(|entry| {
                    let mut lease = of_lease(entry, ttl, fence);
                    lease.record.iter_mut().for_each(|record| record.ttl = ttl.as_millis());
                    lease
                });
                match self.write(owner, leases.collect(), None, ttl).await? {
                    Some(entries) => self.hold(&OwnerToken::fresh(), entries, fence, sent, false),
                    None => false,
                }
            } else {
                entries.is_empty() || self.store.delete(&entries).await?
            };
            if is_done {
                self.forget(owner);
                return Ok(if is_held { Released::Freed } else { Released::NotHeld });
            }
        }
        Err(Failure::contended())
    }

    /// Removes what is known about a claim.
    pub(super) fn forget(&self, owner: &OwnerToken) {
        self.claims.remove(owner);
        self.records.remove(owner);
        self.local.leave(owner);
    }
}

impl OwnClaim {
    /// Whether it is a lease of all names of a claim.
    fn holds(&self, claim: &Claim) -> bool {
        self.fence.is_some() && self.entries.iter().map(|entry| &entry.name).eq(claim.keys())
    }
}
