//! Releases: a name with waiters is handed off to the first of them; any other document is deleted.
//!
//! The primary's acknowledgement is enough (`Namespace::release_concern`): the change stream announces a hand-off when the majority
//! has it. A hand-off waits for the journal, so that this is soon. Only a name that stays busy (`keep`) waits for the majority: its
//! lease may have ended earlier.

use std::sync::Arc;
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
        if claim.share.is_some() {
            let released = self.release_shares(&[Arc::new(claim.clone())], keep).await?;
            return Ok(released[0]);
        }
        self.forget_token(claim);
        let queue = self.queue.as_ref();
        let is_waiting = queue.is_some_and(|queue| queue.known.number(&claim.owner) > 0);
        let ids = self.ids(claim);
        let held = documents::held_by(&ids, &claim.owner);
        let released = match (is_waiting, keep.is_zero()) {
            // The claim may have a reservation, which goes to the next waiter.
            (true, _) => 0,
            (false, true) => self.release_held(claim, &ids, held).await?,
            (false, false) => {
                self.update(&ids, held, documents::keep_busy(&claim.owner, keep))
                    .await?
            }
        };
        if released == ids.len() as u64 {
            return Ok(Released::Freed);
        }
        self.leave_queue(claim);
        let owners = [claim.owner.as_str()];
        self.end(&ids, &owners, self.touched_by(&ids, &owners), None).await?;
        Ok(Released::NotHeld)
    }

    /// Releases the names that the claim holds, the documents of `held`. Returns their number.
    async fn release_held(&self, claim: &Claim, ids: &[String], held: Document) -> Outcome<u64> {
        let Some(queue) = self.queue.as_ref().filter(|_| ids.len() == 1) else {
            return self.release_matching(ids, &claim.owner, held, claim.fence).await;
        };
        // The likelier case first: most names have no waiters.
        if !queue.known.is_waited_for(&claim.keys()[0]) {
            // Cheaper than a filter for live waiters.
            let mut without_queue = held.clone();
            without_queue.insert(QUEUE, Bson::Null);
            if self.delete(ids, without_queue).await? == 1 {
                return Ok(1);
            }
        }
        let owners = [claim.owner.as_str()];
        let left = self
            .releases()
            .find_one_and_update(held, pipelines::release(&owners, &queue.process, claim.fence))
            .return_document(ReturnDocument::After)
            .projection(doc! { OWNER: 1 })
            .write_concern(journaled())
            .await?;
        let Some(left) = left else { return Ok(0) };
        if left.get_str(OWNER).is_ok_and(|owner| owner.ends_with(pipelines::FREED)) {
            self.delete(ids, pipelines::marked_freed(ids, &owners)).await?;
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
        // Not retried by the driver: a rollback without an answer is a failure of its attempt, which the service repeats. What follows
        // for a single name may be retried: its filter has no later grant.
        let deletion = self
            .releases()
            .delete_many(self.without_waiters(filter.clone()))
            .await?;
        let deleted = deletion.deleted_count;
        if deleted == ids.len() as u64 || self.queue.is_none() {
            return Ok(deleted);
        }
        Ok(deleted + self.end(ids, &[owner.as_str()], filter, last).await?)
    }

    /// Narrows a filter to documents without live waiters.
    fn without_waiters(&self, filter: Document) -> Document {
        match &self.queue {
            Some(_) => pipelines::narrowed(filter, false),
            None => filter,
        }
    }

    /// Hands off or deletes the documents of `filter` that belong to these owners, expired or not, and removes the positions of the owners
    /// in the others. Returns their number. `last`: the token of the owner, if it holds them.
    ///
    /// # Behavior
    /// Expired documents are free for every holdfast process, but a gist process would wait for the TTL monitor.
    async fn end(&self, ids: &[String], owners: &[&str], filter: Document, last: Option<Fence>) -> Outcome<u64> {
        match &self.queue {
            Some(queue) => queue.end(ids, owners, filter, last).await,
            None => self.delete(ids, filter).await,
        }
    }

    /// Returns the filter of the documents of these names that a release of these owners concerns.
    fn touched_by(&self, ids: &[String], owners: &[&str]) -> Document {
        match &self.queue {
            Some(_) => pipelines::touched_by(ids, owners),
            None => doc! { "_id": { "$in": ids }, OWNER: { "$in": owners } },
        }
    }

    /// Releases all names that these claims hold, none of them a shared one, and removes their positions. Returns for each claim whether
    /// it held its names.
    ///
    /// # Behavior
    /// Makes one query, and one to three more commands where it finds something.
    pub(crate) async fn release_locks(&self, claims: &[Arc<Claim>]) -> Outcome<Vec<Released>> {
        // Owner tokens are unique: an owner has documents and positions only of the names of its own claim.
        let ids: Vec<String> = claims.iter().flat_map(|claim| self.ids(claim)).collect();
        let owners: Vec<&str> = claims.iter().map(|claim| claim.owner.as_str()).collect();
        for claim in claims {
            self.forget_token(claim);
            self.leave_queue(claim);
        }
        let touched = self.touched_by(&ids, &owners);
        let locks = self.locks();
        let found = locks.find(touched.clone()).projection(documents::release_fields());
        let found: Vec<Document> = found.await?.try_collect().await?;
        let held = |claim: &Arc<Claim>| {
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
        self.end(&ids, &owners, touched, None).await?;
        Ok(released)
    }

    /// Forgets the position of a claim.
    pub(crate) fn leave_queue(&self, claim: &Claim) {
        if let Some(queue) = &self.queue {
            queue.known.leave(&claim.owner);
        }
    }

    /// The engine's `force_release`.
    pub(crate) async fn force_release(&self, key: &Key) -> Outcome<bool> {
        if key.is_shared() {
            return self.force_release_shares(key).await;
        }
        let busy = documents::busy(doc! { "_id": self.id(key) });
        let locks = self.releases();
        let deleted = locks.delete_one(self.without_waiters(busy.clone())).await?;
        if deleted.deleted_count == 1 || self.queue.is_none() {
            return Ok(deleted.deleted_count == 1);
        }
        let handed_off = locks
            .update_one(pipelines::narrowed(busy, true), pipelines::hand_off())
            .write_concern(journaled())
            .await?;
        Ok(handed_off.matched_count == 1)
    }
}
