//! Releases: a name with waiters is handed on to the first of them, any other document is deleted.

use std::time::Duration;

use futures_util::TryStreamExt;
use mongodb::bson::{Bson, Document, doc};
use mongodb::options::ReturnDocument;

use super::documents::{self, OWNER};
use super::queue::QUEUE;
use super::waiting::Line;
use super::{Core, Outcome, queue};
use crate::engine::Released;
use crate::model::{Claim, Key, OwnerToken};

impl Core {
    /// The engine's `release`.
    pub(super) async fn free(&self, claim: &Claim, keep: Duration) -> Outcome<Released> {
        let waits = self
            .line
            .as_ref()
            .is_some_and(|line| line.known.number(&claim.owner) > 0);
        let ids = self.ids(claim);
        let freed = match (waits, keep.is_zero()) {
            // What was handed on to it in the meantime goes on to the next.
            (true, _) => 0,
            (false, true) => self.free_held(claim, &ids).await?,
            (false, false) => self.let_go(&ids, &claim.owner, keep).await?,
        };
        if freed == ids.len() as u64 {
            return Ok(Released::Freed);
        }
        self.part_with_all(claim).await?;
        Ok(Released::NotHeld)
    }

    async fn let_go(&self, ids: &[String], owner: &OwnerToken, keep: Duration) -> Outcome<u64> {
        let held = documents::held_by(ids, owner);
        let let_go = documents::let_go(owner, keep);
        let updated = match ids.len() {
            1 => self.locks().update_one(held, let_go).await?,
            _ => self.locks().update_many(held, let_go).await?,
        };
        Ok(updated.matched_count)
    }

    /// Frees what the claim holds, and says how many names that were.
    async fn free_held(&self, claim: &Claim, ids: &[String]) -> Outcome<u64> {
        let held = documents::held_by(ids, &claim.owner);
        let Some(line) = &self.line else {
            return self.delete(ids, held).await;
        };
        let [id] = ids else {
            return self.part_with(ids, &claim.owner, held).await;
        };
        // Of the two ways the likelier one first. Most names are not waited for.
        if !line.known.is_waited_for(&claim.keys()[0]) {
            // Cheaper than to ask whether anybody in the queue is alive.
            let mut lonely = held.clone();
            lonely.insert(QUEUE, Bson::Null);
            let deleted = self.delete(ids, lonely).await?;
            if deleted == 1 {
                return Ok(1);
            }
        }
        let left = self
            .locks()
            .find_one_and_update(held, queue::part(&[claim.owner.as_str()], &line.process))
            .return_document(ReturnDocument::After)
            .projection(doc! { OWNER: 1 })
            .await?;
        let Some(left) = left else { return Ok(0) };
        if left.get_str(OWNER).is_ok_and(|owner| owner.ends_with(queue::FREED)) {
            self.delete_freed(std::slice::from_ref(id), &[claim.owner.as_str()])
                .await?;
        }
        Ok(1)
    }

    async fn delete(&self, ids: &[String], filter: Document) -> Outcome<u64> {
        // One name: a command that the driver sends again by itself after a fail-over.
        let locks = self.locks();
        let mut deletion = match ids.len() {
            1 => locks.delete_one(filter),
            _ => locks.delete_many(filter),
        };
        if let Some(concern) = &self.release_concern {
            deletion = deletion.write_concern(concern.clone());
        }
        Ok(deletion.await?.deleted_count)
    }

    /// Releases the documents of `filter`, which belong to this owner. Returns their number.
    pub(super) async fn part_with(&self, ids: &[String], owner: &OwnerToken, filter: Document) -> Outcome<u64> {
        let Some(line) = &self.line else {
            return Ok(self.locks().delete_many(filter).await?.deleted_count);
        };
        let deleted = self
            .locks()
            .delete_many(queue::narrowed(filter.clone(), false))
            .await?
            .deleted_count;
        let part = queue::part(&[owner.as_str()], &line.process);
        let parted = self.locks().update_many(filter, part).await?.matched_count;
        if parted > 0 {
            self.delete_freed(ids, &[owner.as_str()]).await?;
        }
        Ok(deleted + parted)
    }

    /// Releases everything that belongs to this owner, expired or not, and removes its place in a queue.
    ///
    /// # Behavior
    /// Expired documents are free for every holdfast process, but a gist process would wait for the TTL monitor.
    async fn part_with_all(&self, claim: &Claim) -> Outcome<()> {
        let ids = self.ids(claim);
        match &self.line {
            None => {
                self.locks().delete_many(documents::owned(&ids, &claim.owner)).await?;
                Ok(())
            }
            Some(line) => {
                line.known.leave(&claim.owner);
                self.release_touched(line, &ids, &[claim.owner.as_str()]).await
            }
        }
    }

    /// Releases what these owners hold of these names, and removes their places.
    async fn release_touched(&self, line: &Line, ids: &[String], owners: &[&str]) -> Outcome<()> {
        let touched = queue::touched_by(ids, owners);
        self.locks()
            .update_many(touched, queue::part(owners, &line.process))
            .await?;
        // In any case: an earlier call may have come no further than to mark it.
        self.delete_freed(ids, owners).await
    }

    async fn delete_freed(&self, ids: &[String], owners: &[&str]) -> Outcome<()> {
        self.locks().delete_many(queue::freed_by(ids, owners)).await?;
        Ok(())
    }

    /// Releases everything that these claims hold, and removes their places. Returns for each claim whether it held its names.
    ///
    /// # Behavior
    /// Needs one query, and one to three commands more where it finds something.
    pub(super) async fn release_claims(&self, claims: &[&Claim]) -> Outcome<Vec<Released>> {
        // Owner tokens are unique: an owner has documents and places only of the names of its own claim.
        let ids: Vec<String> = claims.iter().flat_map(|claim| self.ids(claim)).collect();
        let owners: Vec<&str> = claims.iter().map(|claim| claim.owner.as_str()).collect();
        if let Some(line) = &self.line {
            claims.iter().for_each(|claim| line.known.leave(&claim.owner));
        }
        let touched = queue::touched_by(&ids, &owners);
        let found = self.locks().find(touched).projection(documents::released()).await?;
        let found: Vec<Document> = found.try_collect().await?;
        let held = |claim: &&Claim| {
            let held = found
                .iter()
                .filter(|document| documents::is_held_by(document, &claim.owner));
            match held.count() == claim.keys().len() {
                true => Released::Freed,
                false => Released::NotHeld,
            }
        };
        let released = claims.iter().map(held).collect();
        if found.is_empty() {
            return Ok(released);
        }
        let has_queue = found.iter().any(|document| document.contains_key(QUEUE));
        if !has_queue {
            let owned = doc! { "_id": { "$in": &ids }, OWNER: { "$in": &owners }, QUEUE: Bson::Null };
            if self.delete(&ids, owned).await? == found.len() as u64 {
                return Ok(released);
            }
        }
        match &self.line {
            Some(line) => self.release_touched(line, &ids, &owners).await?,
            None => {
                let owned = doc! { "_id": { "$in": &ids }, OWNER: { "$in": &owners } };
                self.locks().delete_many(owned).await?;
            }
        }
        Ok(released)
    }

    /// The engine's `force_release`.
    pub(super) async fn force(&self, key: &Key) -> Outcome<bool> {
        let busy = documents::busy(doc! { "_id": self.id(key) });
        if self.line.is_none() {
            return Ok(self.locks().delete_one(busy).await?.deleted_count == 1);
        }
        let deleted = self.locks().delete_one(queue::narrowed(busy.clone(), false)).await?;
        if deleted.deleted_count == 1 {
            return Ok(true);
        }
        let wanted = queue::narrowed(busy, true);
        Ok(self.locks().update_one(wanted, queue::hand_on()).await?.matched_count == 1)
    }
}
