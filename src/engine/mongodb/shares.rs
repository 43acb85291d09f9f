//! The operations on shared names: semaphores and read/write locks. The engine calls these functions for claims with a share.
//!
//! Each is one command for all of its claims of one name (`queue/shares.rs`). The server's clock decides, and the server draws the token:
//! there are no estimated ends and no unwritten tokens. An attempt has one write, with the full write concern, in a session (`ops/attempts.rs`).

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use mongodb::bson::{Document, doc};
use mongodb::options::ReturnDocument;

pub(super) use super::queue::shares::id;
use crate::engine::mongodb::connection::pool::Class;
use crate::engine::mongodb::connection::session::journaled;
use crate::engine::mongodb::documents::{self, is_answer};
use crate::engine::mongodb::error::Failure;
use crate::engine::mongodb::ops::acquire::held;
use crate::engine::mongodb::ops::attempts::Caller;
use crate::engine::mongodb::ops::batch::{POSITIONS, numbers_in, owned};
use crate::engine::mongodb::queue::{pipelines, shares};
use crate::engine::mongodb::{Core, Outcome};
use crate::engine::{Acquired, Released, Renewed, Result};
use crate::model::{Claim, Fence, Key, LockInfo, Ttl};

/// Returns the indexes of claims by command: the shares of each name together, and the locks, each alone or all together.
pub(super) fn by_command<'c>(claims: impl Iterator<Item = &'c Claim>, each_lock_alone: bool) -> Vec<Vec<usize>> {
    let mut groups: HashMap<_, Vec<usize>> = HashMap::new();
    for (index, claim) in claims.enumerate() {
        let shared = claim.share.map(|_| &claim.keys()[0]);
        let alone = if shared.is_none() && each_lock_alone { index } else { 0 };
        groups.entry((shared, alone)).or_default().push(index);
    }
    groups.into_values().collect()
}

fn owners<'c>(claims: impl IntoIterator<Item = &'c Claim>) -> Vec<&'c str> {
    claims.into_iter().map(|claim| claim.owner.as_str()).collect()
}

/// Returns an answer for each owner: the first one if it is a holder in an answer to [`shares::fields`].
fn answers<T: Copy>(owners: &[&str], found: Option<Document>, [held, not_held]: [T; 2]) -> Vec<T> {
    let found = found.unwrap_or_default();
    let tokens = numbers_in(&found, shares::HELD, "fence");
    let answer = |owner| if tokens.contains_key(owner) { held } else { not_held };
    owners.iter().map(answer).collect()
}

impl Core {
    /// Makes the attempts of these claims of one shared name, in their order. A claim that has a number already enters with it, in a command
    /// of its own.
    pub(super) async fn attempt_shares_in_order(
        self: &Arc<Self>,
        claims: &[&Claim],
        answer: &mut (dyn FnMut(usize, Outcome<Acquired>) + Send),
    ) {
        let number = |claim: &Claim| self.queue.as_ref().map_or(0, |queue| queue.known.number(&claim.owner));
        let mut done = 0;
        while done < claims.len() {
            let new = claims[done + 1..].iter().take_while(|claim| number(claim) == 0).count();
            for outcome in self.attempt_shares(&claims[done..=done + new]).await {
                answer(done, outcome);
                done += 1;
            }
        }
    }

    /// Makes the attempts of these claims of one shared name, with one connection. Only the first one may have a number.
    async fn attempt_shares(self: &Arc<Self>, claims: &[&Claim]) -> Vec<Outcome<Acquired>> {
        let (batch, copies) = (owned(claims), owned(claims));
        let steps = |core: Arc<Core>, caller| async move { core.acquire_shares(&copies, &caller).await };
        let outcome = self.in_attempt(batch, steps).await;
        let failed = |failure: Failure| claims.iter().map(|_| Err(failure.clone())).collect();
        outcome.map_or_else(failed, |all| all.into_iter().map(Ok).collect())
    }

    /// Makes the attempts of these claims. A new call that waits opens the change stream only if the name is busy.
    async fn acquire_shares(&self, claims: &[Arc<Claim>], caller: &Caller) -> Outcome<Vec<Acquired>> {
        let (queue, first) = (self.queue.as_ref().ok_or_else(Failure::shutdown)?, &claims[0]);
        let (key, owners) = (&first.keys()[0], owners(claims.iter().map(|claim| &**claim)));
        let mut fields = shares::fields(&owners);
        fields.insert(POSITIONS, pipelines::positions_of(&owners));
        let number = queue.known.number(&first.owner);
        let mut enters = number > 0 || claims.len() > 1;
        loop {
            let open = match enters {
                true => caller.while_here(queue.open_stream()).await?,
                false => None,
            };
            let steps = shares::attempt(claims, &queue.waiter(number, &open), enters);
            let sent = self.send_attempt(self.name_of(first), steps, fields.clone(), true, caller);
            // The answer to a repeated command has no calculated fields.
            let Some(document) = sent.await?.filter(is_answer) else {
                continue;
            };
            let tokens = numbers_in(&document, shares::HELD, "fence");
            if first.waiting && !enters && tokens.is_empty() {
                enters = true;
                continue;
            }
            let positions = numbers_in(&document, POSITIONS, "at");
            let left = documents::remaining(&document);
            let outcome = |claim: &Arc<Claim>| {
                let owner = claim.owner.as_str();
                if let Some(fence) = tokens.get(owner) {
                    self.leave_queue(claim);
                    self.index.check_if_due();
                    return Acquired::Granted { fence: Fence(*fence) };
                }
                if let Some(at) = positions.get(owner) {
                    queue.enter(claim, key, *at, left, open.clone(), false);
                }
                held(key, left)
            };
            return Ok(claims.iter().map(outcome).collect());
        }
    }

    /// Extends one lock, or shares of one name.
    pub(super) async fn extend_together(&self, renewals: &[(Claim, Ttl)]) -> Outcome<Vec<Renewed>> {
        if renewals[0].0.share.is_none() {
            return Ok(vec![self.extend(&renewals[0].0, renewals[0].1).await?]);
        }
        let calls: Vec<(&Claim, Ttl)> = renewals.iter().map(|(claim, ttl)| (claim, *ttl)).collect();
        let (locks, owners) = (self.locks(), owners(renewals.iter().map(|(claim, _)| claim)));
        loop {
            let extend = locks.find_one_and_update(self.name_of(calls[0].0), shares::renew(&calls));
            let extend = extend.return_document(ReturnDocument::After);
            match extend.projection(shares::fields(&owners)).await? {
                // The answer to a repeated command has no calculated fields.
                Some(found) if !is_answer(&found) => {}
                found => return Ok(answers(&owners, found, [Renewed::Extended, Renewed::Lost])),
            }
        }
    }

    /// Releases shares of one name, and removes the positions of the claims. If permits stay in use, waits for the majority, as for a lock.
    pub(super) async fn release_shares(&self, claims: &[Arc<Claim>], keep: Duration) -> Outcome<Vec<Released>> {
        claims.iter().for_each(|claim| self.leave_queue(claim));
        let owners = owners(claims.iter().map(|claim| &**claim));
        let process = self.queue.as_ref().map_or("", |queue| &queue.process);
        let steps = shares::release(&owners, process, keep);
        let locks = if keep.is_zero() { self.releases() } else { self.locks() };
        let mut release = locks.find_one_and_update(self.name_of(&claims[0]), steps);
        if keep.is_zero() {
            release = release.write_concern(journaled());
        }
        // The document before the change.
        match release.projection(shares::fields(&owners)).await? {
            Some(before) if !is_answer(&before) => Ok(vec![Released::Freed; owners.len()]),
            before => Ok(answers(&owners, before, [Released::Freed, Released::NotHeld])),
        }
    }

    /// Releases everything that these claims hold, and removes their positions. Returns for each claim whether it held its names.
    pub(super) async fn release_claims(&self, claims: &[Arc<Claim>]) -> Outcome<Vec<Released>> {
        let mut released = vec![Released::NotHeld; claims.len()];
        for group in by_command(claims.iter().map(|claim| &**claim), false) {
            let some: Vec<Arc<Claim>> = group.iter().map(|index| claims[*index].clone()).collect();
            let answers = match some[0].share {
                Some(_) => self.release_shares(&some, Duration::ZERO).await?,
                None => self.release_locks(&some).await?,
            };
            let answers = group.iter().zip(answers);
            answers.for_each(|(index, answer)| released[*index] = answer);
        }
        Ok(released)
    }

    /// Releases all shares of a name.
    pub(super) async fn force_release_shares(&self, key: &Key) -> Outcome<bool> {
        let (locks, name) = (self.releases(), doc! { "_id": id(&self.prefix, key) });
        let release = locks.find_one_and_update(name, shares::release_all());
        let release = release.write_concern(journaled()).projection(shares::info_fields());
        let before = release.await?.unwrap_or_default();
        Ok(!shares::infos(key, &before).is_empty())
    }

    /// Reads the holders of a shared name.
    pub(super) async fn read_shares(&self, key: &Key) -> Result<Vec<LockInfo>> {
        let (locks, name) = (self.locks(), doc! { "_id": id(&self.prefix, key) });
        let read = || async move { Ok(locks.find_one(name).projection(shares::info_fields()).await?) };
        let document = self.pool.call(Class::Query, read).await;
        let document = document.map_err(|failure| failure.during("inspect"))?;
        Ok(shares::infos(key, &document.unwrap_or_default()))
    }

    /// Returns the filter of the document of a claim.
    fn name_of(&self, claim: &Claim) -> Document {
        doc! { "_id": id(&self.prefix, &claim.keys()[0]) }
    }
}
