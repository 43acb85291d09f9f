//! Transfers of a lease to another owner.
//!
//! For one name this is one update. Several names are several documents, which no command changes atomically. So they are
//! transferred in steps, and rolled back when a step finds that one is missing. (A transaction would need no rollback, but a
//! standalone server has none, and a client that dies within one blocks its documents for a minute.)
//!
//! - First a query: if a name is missing, the answer is `Lost` and nothing has changed. So a rollback is only needed for names
//!   that disappear within the following milliseconds.
//! - Then the first name alone, and after it the others. Of two transfers of the same lease, one gets the first name and with it
//!   all others; the other one stops there.
//! - The end of the lease moves last, and the token of a new lease is written with it, because only a document without a token may
//!   have a margin. Names that are rolled back, or whose new owner dies in between, end as before.

use futures_util::TryStreamExt;
use mongodb::bson::{Document, doc};

use crate::engine::Renewed;
use crate::engine::mongodb::documents;
use crate::engine::mongodb::fields::{HOLDER, OWNER};
use crate::engine::mongodb::{Core, Outcome};
use crate::model::{Claim, OwnerToken};

impl Core {
    /// The engine's `transfer`.
    pub(crate) async fn transfer(&self, claim: &Claim, to: &OwnerToken) -> Outcome<Renewed> {
        let ids = self.ids(claim);
        let held = documents::held_by_either(&ids, [&claim.owner, to]);
        let tick = self.tick_of(claim);
        let transfer = documents::transfer(to, &documents::process(&claim.process));
        if ids.len() == 1 {
            let steps = [documents::extend(claim, claim.ttl, tick), transfer].concat();
            return Ok(match self.update(&ids, held, steps).await? {
                1 => Renewed::Extended,
                _ => Renewed::Lost,
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
        // The rest was transferred by an earlier call, whose answer was lost.
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
        if !self.moved(first, &claim.owner, &transfer).await? {
            return Ok(Renewed::Lost);
        }
        if self.moved(others, &claim.owner, &transfer).await?
            && self.extend_with(&ours, claim.ttl, tick).await? == Renewed::Extended
        {
            return Ok(Renewed::Extended);
        }
        if let Some(document) = theirs.first() {
            let back = documents::transfer(&claim.owner, &documents::process_of(document));
            self.locks().update_many(documents::owned(&moving, to), back).await?;
        }
        Ok(Renewed::Lost)
    }

    /// Transfers the names that `from` holds. Returns whether these are all of them.
    async fn moved(&self, ids: &[String], from: &OwnerToken, transfer: &[Document]) -> Outcome<bool> {
        if ids.is_empty() {
            return Ok(true);
        }
        let held = documents::held_by(ids, from);
        Ok(self.update(ids, held, transfer.to_vec()).await? == ids.len() as u64)
    }
}
