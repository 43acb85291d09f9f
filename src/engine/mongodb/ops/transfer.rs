//! A lease goes into other hands.
//!
//! One name is one update. Several are several documents, which no command changes as a whole, so they go one step after
//! the other, and go back when a step finds that one is missing. (A transaction would do without the way back, but a
//! standalone server has none, and a client that dies within one keeps everybody from its documents for a minute.)
//!
//! - First a look: what is missing already is `Lost` before anything has changed. So the way back is for what vanished
//!   within these few milliseconds.
//! - Then the first name alone, and only then the others: of two that were given the same token one gets the first name,
//!   and with it all, while the other is stopped there.
//! - The end of the lease moves last, so that names which go back, or whose new owner dies in between, end when they would
//!   have ended anyway.

use futures_util::TryStreamExt;
use mongodb::bson::{Document, doc};

use super::documents::{self, HOLDER, OWNER};
use super::{Core, Outcome};
use crate::engine::Renewed;
use crate::model::{Claim, OwnerToken};

impl Core {
    /// The engine's `transfer`.
    pub(super) async fn hand_over(&self, claim: &Claim, to: &OwnerToken) -> Outcome<Renewed> {
        let ids = self.ids(claim);
        let held = documents::held_by_either(&ids, [&claim.owner, to]);
        let mut hand_over = documents::hand_over(to, &documents::process(&claim.process));
        if ids.len() == 1 {
            hand_over.extend(documents::extend(claim.ttl));
            let updated = self.locks().update_one(held, hand_over).await?;
            return Ok(if updated.matched_count == 1 {
                Renewed::Extended
            } else {
                Renewed::Lost
            });
        }

        let found: Vec<Document> = self
            .locks()
            .find(held)
            .projection(doc! { OWNER: 1, HOLDER: 1 })
            .sort(doc! { "_id": 1 })
            .await?
            .try_collect()
            .await?;
        if found.len() < ids.len() {
            return Ok(Renewed::Lost);
        }
        // The rest went over with an earlier call, whose answer was lost.
        let theirs: Vec<&Document> = found
            .iter()
            .filter(|document| documents::is_owned_by(document, &claim.owner))
            .collect();
        let moving: Vec<String> = theirs
            .iter()
            .filter_map(|document| documents::id(document))
            .map(str::to_owned)
            .collect();
        let mut ours = claim.clone();
        ours.owner = to.clone();
        let (first, others) = moving.split_at(moving.len().min(1));
        if !self.moved(first, &claim.owner, &hand_over).await? {
            return Ok(Renewed::Lost);
        }
        if self.moved(others, &claim.owner, &hand_over).await?
            && self.extend(&ours, claim.ttl).await? == Renewed::Extended
        {
            return Ok(Renewed::Extended);
        }
        if let Some(document) = theirs.first() {
            let back = documents::hand_over(&claim.owner, &documents::process_of(document));
            self.locks().update_many(documents::owned(&moving, to), back).await?;
        }
        Ok(Renewed::Lost)
    }

    /// Hands over what `from` holds of these names, and says whether that is all of them.
    async fn moved(&self, ids: &[String], from: &OwnerToken, hand_over: &[Document]) -> Outcome<bool> {
        if ids.is_empty() {
            return Ok(true);
        }
        let held = documents::held_by(ids, from);
        let updated = self.locks().update_many(held, hand_over.to_vec()).await?;
        Ok(updated.matched_count == ids.len() as u64)
    }
}
