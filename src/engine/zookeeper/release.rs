//! Releases, and what they find out about entries that this engine does not know.

use std::time::Duration;

use super::Store;
use super::acquire::{ROUNDS, deleted};
use super::client::{Answer, Failure, Kind, Part, Request, Stat, code};
use super::layout::Child;
use super::own::{Node, Own, Phase};
use super::record::{Record, Use};
use super::sets::NameState;
use crate::clock::Moment;
use crate::engine::Released;
use crate::model::{Claim, Fence, Key, OwnerToken, Ttl};

/// An entry as another engine, or an earlier session, may have written it.
pub(super) struct Seen {
    pub node: Node,
    /// `None`: the data is that of another program.
    pub record: Option<Record>,
    pub stat: Stat,
    pub folder: Stat,
    /// Whether it is the oldest of its name, and no set that waits.
    pub is_holder: bool,
}

impl Seen {
    /// Whether it holds the name, and its fencing token is not written yet.
    pub(super) fn awaits_token(&self) -> bool {
        let awaits = |record: &Record| record.fence.is_none() && record.r#use == Use::Claim;
        self.is_holder && self.record.as_ref().is_some_and(awaits)
    }
}

impl Store {
    /// Reads the entries of several names, after everything that the leader had committed.
    pub(super) async fn look(&self, keys: &[Key]) -> Answer<Vec<NameState>> {
        let synced = self.client.call(Request::sync("/"));
        let read = self.client.call(self.name_reads(keys));
        synced.await?;
        self.name_states(keys, &read.await?.parts()?)
    }

    /// Reads the first entry of each name that `selects` selects. An entry that is deleted meanwhile is left out.
    pub(super) async fn see(
        &self,
        keys: &[Key],
        names: &[NameState],
        selects: impl Fn(&Child) -> bool,
    ) -> Answer<Vec<Seen>> {
        let mut found = Vec::new();
        for (key, name) in keys.iter().zip(names) {
            if let (Some(child), Some(folder)) = (name.children.iter().find(|child| selects(child)), name.folder) {
                found.push((key, child, folder, name.children.first() == Some(child)));
            }
        }
        if found.is_empty() {
            return Ok(Vec::new());
        }
        let reads: Vec<_> = found
            .iter()
            .map(|(key, child, ..)| Request::data(&self.layout.entry(key, &child.name)))
            .collect();
        let parts = self.client.call(Request::multi_read(&reads)).await?.parts()?;
        let mut seen = Vec::with_capacity(found.len());
        for ((key, child, folder, is_first), part) in found.into_iter().zip(parts) {
            let (data, stat) = match part {
                Part::Data(data, stat) => (data, stat),
                Part::Failed(code::NO_NODE) => continue,
                Part::Failed(code) => return Err(Failure::Refused(code)),
                _ => return Err(Failure::Malformed),
            };
            let record = Record::parse(&data);
            let is_holder = is_first && record.as_ref().is_none_or(|record| record.r#use != Use::Set);
            let node = Node {
                key: key.clone(),
                child: child.clone(),
                version: stat.version,
            };
            seen.push(Seen {
                node,
                record,
                stat,
                folder,
                is_holder,
            });
        }
        Ok(seen)
    }

    /// Releases the names that a claim holds, and deletes its entries.
    pub(super) async fn release(&self, claim: &Claim, keep: Duration) -> Answer<Released> {
        let own = match self.forget(&claim.owner) {
            Some(own) if own.phase == Phase::Waiting || own.has_all(claim.keys()) => own,
            _ => match self.find_claim(claim).await? {
                Some(own) => own,
                None => return Ok(Released::NotHeld),
            },
        };
        let is_held = matches!(own.phase, Phase::Held(_)) && own.has_all(claim.keys());
        if is_held && !keep.is_zero() && self.keep(&own, keep).await? {
            return Ok(Released::Freed);
        }
        let path = |node: &Node| self.layout.entry(&node.key, &node.child.name);
        let deletions = own
            .nodes
            .iter()
            .map(|node| self.client.call_urgently(Request::delete(&path(node), -1)));
        let mut all_held = is_held;
        for deletion in deletions.collect::<Vec<_>>() {
            all_held &= deleted(deletion.await)?;
        }
        Ok(if all_held { Released::Freed } else { Released::NotHeld })
    }

    /// Finds the entries of a claim that this engine does not know. `None`: there are none.
    async fn find_claim(&self, claim: &Claim) -> Answer<Option<Own>> {
        let names = self.look(claim.keys()).await?;
        let mut seen = self
            .see(claim.keys(), &names, |child| child.is_of(&claim.owner))
            .await?;
        let is_held = seen.len() == claim.keys().len() && seen.iter().all(|seen| seen.is_holder);
        let Some(Seen { stat, .. }) = seen.first() else {
            return Ok(None);
        };
        let session = stat.session;
        let record = seen[0].record.take().unwrap_or_else(|| Record::new(claim));
        let phase = if is_held {
            Phase::Held(record.fence().unwrap_or(Fence::NONE))
        } else {
            Phase::Waiting
        };
        let nodes: Vec<Node> = seen.into_iter().map(|seen| seen.node).collect();
        self.delete_repeats(claim, &names).await?;
        Ok(Some(Own {
            nodes,
            phase,
            record,
            session,
            is_set: claim.keys().len() > 1,
            needs_token: false,
        }))
    }

    /// Deletes repeated entries of the owner: of requests whose replies were lost. Returns whether there were any.
    pub(super) async fn delete_repeats(&self, claim: &Claim, names: &[NameState]) -> Answer<bool> {
        let mut repeats = Vec::new();
        for (key, name) in claim.keys().iter().zip(names) {
            let mine = name.children.iter().filter(|child| child.is_of(&claim.owner));
            repeats.extend(mine.skip(1).map(|child| (key, child)));
        }
        for (key, child) in &repeats {
            self.delete_entry(key, child).await?;
        }
        Ok(!repeats.is_empty())
    }

    /// Replaces the entries of a holder by such that keep the names busy for some time. `false`: it no longer has all of them.
    async fn keep(&self, own: &Own, keep: Duration) -> Answer<bool> {
        let owner = OwnerToken::fresh();
        let mut record = own.record.clone();
        if let Phase::Held(fence) = own.phase
            && record.fence.is_none()
        {
            record.fence = Some(fence.0);
        }
        (record.r#use, record.ttl) = (Use::Kept, Ttl::clamped(keep).as_millis());
        let answer = self
            .client
            .call_urgently(self.replacement(&own.nodes, &owner, &record))
            .await?;
        if answer.parts()?.iter().any(|part| matches!(part, Part::Failed(_))) {
            return Ok(false);
        }
        let replaced = |node: &Node| {
            let child = Child::parse(&node.child.replaced(&owner))?;
            Some(Node {
                key: node.key.clone(),
                child,
                version: 0,
            })
        };
        let nodes = own.nodes.iter().filter_map(replaced).collect();
        let kept = Own {
            nodes,
            phase: Phase::Kept,
            record,
            session: answer.session,
            is_set: false,
            needs_token: false,
        };
        self.own.insert(&owner, kept);
        self.ends.insert(owner, (), Moment::now() + keep);
        Ok(true)
    }

    /// Returns a request that replaces entries by those of another owner in the same places.
    ///
    /// # Behavior
    /// The new entry is created first: a process that sees one change after the other never sees the name without a holder.
    pub(super) fn replacement(&self, nodes: &[Node], owner: &OwnerToken, record: &Record) -> Request {
        let data = record.to_json();
        let parts = nodes.iter().flat_map(|node| {
            let new = self.layout.entry(&node.key, &node.child.replaced(owner));
            let old = self.layout.entry(&node.key, &node.child.name);
            let create = Request::create(&new, &data, self.layout.access, Kind::Ephemeral);
            [create, Request::delete(&old, node.version)]
        });
        Request::multi(&parts.collect::<Vec<_>>())
    }

    /// Releases a name of any owner. `false`: it was free.
    pub(super) async fn force_release(&self, key: &Key) -> Answer<bool> {
        let keys = std::slice::from_ref(key);
        for _ in 0..ROUNDS * 4 {
            let names = self.look(keys).await?;
            let Some(oldest) = names[0].children.first() else {
                return Ok(false);
            };
            let seen = self.see(keys, &names, |child| child == oldest).await?;
            match seen.first() {
                None => {}
                Some(seen) if !seen.is_holder => return Ok(false),
                Some(seen) if self.delete_entry(key, &seen.node.child).await? => return Ok(true),
                Some(_) => {}
            }
        }
        Err(Failure::Refused(code::NO_NODE))
    }
}
