//! Releases: a name with waiters is handed off to the first of them; any other document is deleted.
//!
//! The primary's acknowledgement is enough (`Namespace::release_concern`): the change stream announces a hand-off when the majority
//! has it. A hand-off waits for the journal, so that this is soon. Only a name that stays busy (`keep`) waits for the majority: its
//! lease may have ended earlier.

use std::time::Duration;

use futures_util::TryStreamExt;
use mongodb::bson::{Bson, Document, doc};
use mongodb::options::ReturnDocument;

use crate::engine::Released;
use crate::engine::mongodb::connection::session::journaled;
use crate::engine::mongodb::documents;
use crate::engine::mongodb::fields::{OWNER, QUEUE};
use crate::engine::mongodb::queue::pipelines;
use crate::engine::mongodb::{Core, Outcome};
use crate::model::{Claim, Fence, Key, OwnerToken};

impl Core {
    /// The engine's `release`.
    pub(crate) async fn release_one(&self, claim: &Claim, keep: Duration) -> Outcome<Released> {
        self.forget_tokens(&[claim]);
        let is_waiting = self
            .queue
            .as_ref()
            .is_some_and(|queue| queue.known.number(&claim.owner) > 0);
        let ids = self.ids(claim);
        let released = match (is_waiting, keep.is_zero()) {
            // The claim may have a reservation, which goes to the next waiter.
            (true, _) => 0,
            (false, true) => self.release_held(claim, &ids).await?,
            (false, false) => self.keep_busy(&ids, &claim.owner, keep).await?,
        };
        if released == ids.len() as u64 {
            return Ok(Released::Freed);
        }
        self.leave_queues(&[claim]);
        self.release_touched(&ids, &[claim.owner.as_str()]).await?;
        Ok(Released::NotHeld)
    }

    /// Keeps the names that this owner holds busy for `keep`, without an owner. Returns their number.
    async fn keep_busy(&self, ids: &[String], owner: &OwnerToken, keep: Duration) -> Outcome<u64> {
        let held = documents::held_by(ids, owner);
        let steps = documents::keep_busy(owner, keep);
        self.update(ids, held, steps).await
    }

    /// Releases the names that the claim holds. Returns their number.
    async fn release_held(&self, claim: &Claim, ids: &[String]) -> Outcome<u64> {
        let held = documents::held_by(ids, &claim.owner);
        let Some(queue) = &self.queue else {
            return self.delete(ids, held).await;
        };
        let [id] = ids else {
            return self.release_matching(ids, &claim.owner, held, claim.fence).await;
        };
        // The likelier case first: most names have no waiters.
        if !queue.known.is_waited_for(&claim.keys()[0]) {
            // Cheaper than a filter for live waiters.
            let mut without_queue = held.clone();
            without_queue.insert(QUEUE, Bson::Null);
            let deleted = self.delete(ids, without_queue).await?;
            if deleted == 1 {
                return Ok(1);
            }
        }
        let left = self
            .releases()
            .find_one_and_update(
                held,
                pipelines::release(&[claim.owner.as_str()], &queue.process, claim.fence),
            )
            .return_document(ReturnDocument::After)
            .projection(doc! { OWNER: 1 })
            .write_concern(journaled())
            .await?;
        let Some(left) = left else { return Ok(0) };
        if left.get_str(OWNER).is_ok_and(|owner| owner.ends_with(pipelines::FREED)) {
            self.delete_marked(std::slice::from_ref(id), &[claim.owner.as_str()])
                .await?;
        }
        Ok(1)
    }

    async fn delete(&self, ids: &[String], filter: Document) -> Outcome<u64> {
        // For one name a command that the driver retries after a failover.
        let locks = self.releases();
        let deletion = match ids.len() {
            1 => locks.delete_one(filter),
            _ => locks.delete_many(filter),
        };
        Ok(deletion.await?.deleted_count)
    }

    /// Releases the documents of `filter`, which belong to this owner. Returns their number. `last`: the token of the owner, if it
    /// holds them.
    pub(crate) async fn release_matching(
        &self,
        ids: &[String],
        owner: &OwnerToken,
        filter: Document,
        last: Option<Fence>,
    ) -> Outcome<u64> {
        let Some(queue) = &self.queue else {
            return Ok(self.releases().delete_many(filter).await?.deleted_count);
        };
        let deleted = self
            .releases()
            .delete_many(pipelines::narrowed(filter.clone(), false))
            .await?
            .deleted_count;
        let steps = pipelines::release(&[owner.as_str()], &queue.process, last);
        let locks = self.releases();
        let update = locks.update_many(filter, steps).write_concern(journaled());
        let released = update.await?.matched_count;
        if released > 0 {
            self.delete_marked(ids, &[owner.as_str()]).await?;
        }
        Ok(deleted + released)
    }

    /// Releases everything that belongs to these owners of these names, expired or not, and removes their positions.
    ///
    /// # Behavior
    /// Expired documents are free for every holdfast process, but a gist process would wait for the TTL monitor.
    async fn release_touched(&self, ids: &[String], owners: &[&str]) -> Outcome<()> {
        let Some(queue) = &self.queue else {
            let owned = doc! { "_id": { "$in": ids }, OWNER: { "$in": owners } };
            self.releases().delete_many(owned).await?;
            return Ok(());
        };
        let touched = pipelines::touched_by(ids, owners);
        self.releases()
            .update_many(touched, pipelines::release(owners, &queue.process, None))
            .write_concern(journaled())
            .await?;
        // Even without a match: an earlier call may have ended after it marked a document.
        self.delete_marked(ids, owners).await
    }

    /// Deletes the documents that a release by these owners marked for deletion.
    async fn delete_marked(&self, ids: &[String], owners: &[&str]) -> Outcome<()> {
        self.releases()
            .delete_many(pipelines::marked_freed(ids, owners))
            .await?;
        Ok(())
    }

    /// Releases everything that these claims hold, and removes their positions. Returns for each claim whether it held its names.
    ///
    /// # Behavior
    /// Makes one query, and one to three more commands where it finds something.
    pub(crate) async fn release_claims(&self, claims: &[&Claim]) -> Outcome<Vec<Released>> {
        self.forget_tokens(claims);
        // Owner tokens are unique: an owner has documents and positions only of the names of its own claim.
        let ids: Vec<String> = claims.iter().flat_map(|claim| self.ids(claim)).collect();
        let owners: Vec<&str> = claims.iter().map(|claim| claim.owner.as_str()).collect();
        self.leave_queues(claims);
        let touched = pipelines::touched_by(&ids, &owners);
        let found = self
            .locks()
            .find(touched)
            .projection(documents::release_fields())
            .await?;
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
        self.release_touched(&ids, &owners).await?;
        Ok(released)
    }

    /// Forgets the positions of the claims.
    fn leave_queues(&self, claims: &[&Claim]) {
        if let Some(queue) = &self.queue {
            claims.iter().for_each(|claim| queue.known.leave(&claim.owner));
        }
    }

    /// The engine's `force_release`.
    pub(crate) async fn force_release(&self, key: &Key) -> Outcome<bool> {
        let busy = documents::busy(doc! { "_id": self.id(key) });
        if self.queue.is_none() {
            return Ok(self.releases().delete_one(busy).await?.deleted_count == 1);
        }
        let deleted = self
            .releases()
            .delete_one(pipelines::narrowed(busy.clone(), false))
            .await?;
        if deleted.deleted_count == 1 {
            return Ok(true);
        }
        let with_waiters = pipelines::narrowed(busy, true);
        Ok(self
            .releases()
            .update_one(with_waiters, pipelines::hand_off())
            .write_concern(journaled())
            .await?
            .matched_count
            == 1)
    }
}
