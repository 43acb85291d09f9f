//! Attempts of claims with one name.

use std::time::Duration;

use super::Store;
use super::client::{Answer, Failure, Kind, Reply, Request, Stat, code};
use super::layout::Child;
use super::own::{Node, Own, Phase};
use super::record::Record;
use super::watches::{RECORD_DELAY, liveness};
use crate::clock::Moment;
use crate::engine::Acquired;
use crate::engine::entries::Granted;
use crate::model::{Claim, Fence, Key};

/// How often an attempt begins again because a folder or an entry was deleted in the meantime.
pub(super) const ROUNDS: usize = 5;

/// What an attempt has found for one claim.
enum Found {
    Granted(Fence, i64),
    Busy,
    /// Its entry is gone.
    Gone,
}

impl Store {
    /// Makes one attempt for each claim. All have the name `key` only.
    ///
    /// # Behavior
    /// The creation of the entries and the read are sent together. An entry of the same owner that exists already, from a request
    /// whose reply was lost or of another engine, is the one that counts.
    pub(super) async fn attempt(&self, key: &Key, claims: &[&Claim]) -> Answer<Vec<Acquired>> {
        for claim in claims {
            claim.mark_sent();
            if claim.waiting {
                self.entries.begin_attempt(&claim.owner, key);
            }
        }
        let sent = Moment::now();
        let folder = self.layout.folder(key);
        for _ in 0..ROUNDS {
            let creations: Vec<_> = claims
                .iter()
                .map(|claim| {
                    let is_known = self.own.get(&claim.owner).is_some();
                    (!is_known).then(|| self.client.call(self.creation(key, claim)))
                })
                .collect();
            let list = self.client.call(Request::children(&folder));
            let mut created = Vec::with_capacity(claims.len());
            for creation in creations {
                created.push(match creation {
                    Some(creation) => Some(creation.await),
                    None => None,
                });
            }
            let list = list.await;
            let is_missing = |answer: &Answer| matches!(answer, Err(Failure::Refused(code::NO_NODE)));
            if is_missing(&list) || created.iter().flatten().any(is_missing) {
                self.create_folder(key).await?;
                continue;
            }
            let list = list?;
            let (names, stat) = list.children()?;
            let children = self.children(key, &names);
            let mut found = Vec::with_capacity(claims.len());
            for (claim, created) in claims.iter().zip(created) {
                if let Some(Err(failure)) = created {
                    return Err(failure);
                }
                found.push(self.find(key, claim, sent, &children, (&stat, list.session)).await?);
            }
            if !found.iter().any(|found| matches!(found, Found::Gone)) {
                return self.finish(key, claims, sent, found, &children).await;
            }
        }
        Err(Failure::Refused(code::NO_NODE))
    }

    fn creation(&self, key: &Key, claim: &Claim) -> Request {
        let path = self.layout.entry(key, &Child::prefix_of(&claim.owner));
        Request::create(
            &path,
            &Record::new(claim).to_json(),
            self.layout.access,
            Kind::EphemeralSequential,
        )
    }

    /// Finds the entry of a claim among the entries of its name.
    async fn find(
        &self,
        key: &Key,
        claim: &Claim,
        sent: Moment,
        children: &[Child],
        (stat, session): (&Stat, i64),
    ) -> Answer<Found> {
        let mut mine = children.iter().filter(|child| child.is_of(&claim.owner));
        let Some(first) = mine.next() else {
            self.forget_entry(claim);
            return Ok(Found::Gone);
        };
        let is_granted = children.first() == Some(first);
        let more: Vec<&Child> = mine.collect();
        let is_repeated = !more.is_empty();
        if is_repeated {
            // The creation was a repeated one.
            for child in more {
                self.delete_entry(key, child).await?;
            }
            if let Some(fence) = self.adopt(claim, claim.ttl).await? {
                return Ok(Found::Granted(fence, session));
            }
        }
        let known = self.own.get(&claim.owner).map(|own| own.phase);
        let phase = match known {
            Some(Phase::Held(fence)) if fence != Fence::NONE => Phase::Held(fence),
            _ if is_granted => Phase::Held(Fence(stat.last_child_change as u64)),
            _ => Phase::Waiting,
        };
        if known.is_some() {
            self.own.update(&claim.owner, |own| own.set_phase(phase));
        } else {
            // The data of an entry that an earlier request has created may have changed.
            let version = if is_repeated { -1 } else { 0 };
            let nodes = vec![Node {
                key: key.clone(),
                child: first.clone(),
                version,
            }];
            let record = Record::new(claim);
            let (is_set, needs_token) = (false, claim.needs_token);
            self.own.insert(
                &claim.owner,
                Own {
                    nodes,
                    phase,
                    record,
                    session,
                    is_set,
                    needs_token,
                },
            );
        }
        Ok(match phase {
            Phase::Held(fence) => {
                self.begin_lease(claim, sent);
                Found::Granted(fence, session)
            }
            _ => Found::Busy,
        })
    }

    /// Starts the time of a lease that was granted to an attempt which was sent at `sent`.
    pub(super) fn begin_lease(&self, claim: &Claim, sent: Moment) {
        let end = sent + claim.ttl.duration();
        if self.ends.extend(&claim.owner, end).is_none() {
            self.ends.insert(claim.owner.clone(), (), end);
        }
        if self.own.get(&claim.owner).is_some_and(|own| own.record.fence.is_none()) {
            self.records
                .insert(claim.owner.clone(), (), Moment::now() + RECORD_DELAY);
        }
        self.entries.leave(&claim.owner);
    }

    /// Makes the busy claims that wait wait, removes the entries of the others, and reads when the name may be free.
    async fn finish(
        &self,
        key: &Key,
        claims: &[&Claim],
        sent: Moment,
        found: Vec<Found>,
        children: &[Child],
    ) -> Answer<Vec<Acquired>> {
        let mut deletions = Vec::new();
        for (claim, found) in claims.iter().zip(&found) {
            if !matches!(found, Found::Busy) {
                continue;
            }
            if claim.waiting {
                self.wait(claim, key);
            } else if let Some(own) = self.forget(&claim.owner) {
                let delete = |node: &Node| Request::delete(&self.layout.entry(&node.key, &node.child.name), -1);
                deletions.extend(own.nodes.iter().map(|node| self.client.call(delete(node))));
            }
        }
        let is_busy = found.iter().any(|found| matches!(found, Found::Busy));
        let retry_after = match children.first().filter(|_| is_busy) {
            Some(oldest) => self.lease_of(key, oldest).await?,
            None => None,
        };
        for deletion in deletions {
            let _ = deleted(deletion.await)?;
        }
        let mut answers = Vec::with_capacity(claims.len());
        for (claim, found) in claims.iter().zip(found) {
            answers.push(match found {
                Found::Granted(fence, session) => {
                    self.confirm(session, sent, claim.ttl).await?;
                    Acquired::Granted { fence }
                }
                Found::Busy | Found::Gone => Acquired::Held {
                    key: key.clone(),
                    retry_after,
                },
            });
        }
        Ok(answers)
    }

    /// Makes a claim wait for `key` with its entry there.
    pub(super) fn wait(&self, claim: &Claim, key: &Key) {
        self.ends
            .insert(claim.owner.clone(), (), Moment::now() + liveness(claim.ttl));
        let granted: Vec<Granted> = self.entries.enter(&claim.owner, key, &claim.owner.as_str().into());
        // The name became free after the read: the waiter makes another attempt.
        granted.iter().for_each(|granted| self.entries.wake(&granted.owner));
    }

    /// Reads the ttl of an entry: for so long its lease lasts without a renewal. `None`: another program's entry has none.
    pub(super) async fn lease_of(&self, key: &Key, child: &Child) -> Answer<Option<Duration>> {
        match self
            .client
            .call(Request::data(&self.layout.entry(key, &child.name)))
            .await
        {
            Ok(reply) => Ok(Record::parse(reply.data()?.0).map(|record| record.ttl().duration())),
            Err(Failure::Refused(code::NO_NODE)) => Ok(Some(Duration::ZERO)),
            Err(failure) => Err(failure),
        }
    }

    /// Deletes an entry. `false`: it was gone.
    pub(super) async fn delete_entry(&self, key: &Key, child: &Child) -> Answer<bool> {
        let path = self.layout.entry(key, &child.name);
        deleted(self.client.call(Request::delete(&path, -1)).await)
    }

    /// Removes what is known about the entry of a claim that is gone. The claim stays a waiter.
    pub(super) fn forget_entry(&self, claim: &Claim) {
        self.ends.remove(&claim.owner);
        self.records.remove(&claim.owner);
        self.own.remove(&claim.owner);
    }
}

/// Whether a deletion has deleted the node. `false`: it was gone.
pub(super) fn deleted(answer: Answer<Reply>) -> Answer<bool> {
    match answer {
        Ok(_) => Ok(true),
        Err(Failure::Refused(code::NO_NODE)) => Ok(false),
        Err(failure) => Err(failure),
    }
}
