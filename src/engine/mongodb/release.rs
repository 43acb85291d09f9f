//! Letting go: a name that somebody waits for goes straight on to the first, any other is deleted.

use std::time::Duration;

use mongodb::bson::{Bson, Document, doc};
use mongodb::options::ReturnDocument;

use super::documents::{self, OWNER};
use super::queue::QUEUE;
use super::{MongodbEngine, Outcome, queue};
use crate::engine::Released;
use crate::model::{Claim, Key, OwnerToken};

impl MongodbEngine {
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
            1 => self.locks.update_one(held, let_go).await?,
            _ => self.locks.update_many(held, let_go).await?,
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
            .locks
            .find_one_and_update(held, queue::part(&claim.owner))
            .return_document(ReturnDocument::After)
            .projection(doc! { OWNER: 1 })
            .await?;
        let Some(left) = left else { return Ok(0) };
        if left.get_str(OWNER).is_ok_and(|owner| owner.ends_with(queue::FREED)) {
            self.delete_freed(std::slice::from_ref(id), &claim.owner).await?;
        }
        Ok(1)
    }

    async fn delete(&self, ids: &[String], filter: Document) -> Outcome<u64> {
        // One name: a command that the driver sends again by itself after a fail-over.
        let mut deletion = match ids.len() {
            1 => self.locks.delete_one(filter),
            _ => self.locks.delete_many(filter),
        };
        if let Some(concern) = &self.release_concern {
            deletion = deletion.write_concern(concern.clone());
        }
        Ok(deletion.await?.deleted_count)
    }

    /// Lets go of the documents of `filter`, which are this owner's, and says how many that were.
    pub(super) async fn part_with(&self, ids: &[String], owner: &OwnerToken, filter: Document) -> Outcome<u64> {
        if self.line.is_none() {
            return Ok(self.locks.delete_many(filter).await?.deleted_count);
        }
        let deleted = self
            .locks
            .delete_many(queue::narrowed(filter.clone(), false))
            .await?
            .deleted_count;
        let parted = self.locks.update_many(filter, queue::part(owner)).await?.matched_count;
        if parted > 0 {
            self.delete_freed(ids, owner).await?;
        }
        Ok(deleted + parted)
    }

    /// Lets go of all that is this owner's, expired or not, and of its place in a queue.
    ///
    /// # Behavior
    /// What expired is free for everybody here, but a gist process would have to wait for the TTL monitor.
    pub(super) async fn part_with_all(&self, claim: &Claim) -> Outcome<()> {
        let ids = self.ids(claim);
        let Some(line) = &self.line else {
            self.locks.delete_many(documents::owned(&ids, &claim.owner)).await?;
            return Ok(());
        };
        // Whatever becomes of this, nobody waits any more.
        line.known.leaves(&claim.owner);
        let touched = queue::touched_by(&ids, &claim.owner);
        self.locks.update_many(touched, queue::part(&claim.owner)).await?;
        // In any case: an earlier call may have come no further than to mark it.
        self.delete_freed(&ids, &claim.owner).await
    }

    async fn delete_freed(&self, ids: &[String], owner: &OwnerToken) -> Outcome<()> {
        self.locks.delete_many(queue::freed_by(ids, owner)).await?;
        Ok(())
    }

    /// The engine's `force_release`.
    pub(super) async fn force(&self, key: &Key) -> Outcome<bool> {
        let busy = documents::busy(doc! { "_id": self.id(key) });
        if self.line.is_none() {
            return Ok(self.locks.delete_one(busy).await?.deleted_count == 1);
        }
        let deleted = self.locks.delete_one(queue::narrowed(busy.clone(), false)).await?;
        if deleted.deleted_count == 1 {
            return Ok(true);
        }
        let wanted = queue::narrowed(busy, true);
        Ok(self.locks.update_one(wanted, queue::hand_on()).await?.matched_count == 1)
    }
}
