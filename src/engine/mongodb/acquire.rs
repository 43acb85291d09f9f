//! One try: take every name, then stamp what was taken. `fence.rs` says why that is two steps.

use std::time::Duration;

use mongodb::bson::{Bson, Document, Timestamp, doc};
use mongodb::options::{Acknowledgment, ReturnDocument, WriteConcern};

use super::documents::{self, FENCE, SINCE};
use super::failure::Failure;
use super::fence::{Stamp, observed};
use super::{MongodbEngine, Outcome};
use crate::engine::{Acquired, Renewed};
use crate::model::{Claim, Fence, Key};

/// How often a try starts over when what it took was gone, or changed by an earlier try of the same claim, before it was
/// stamped. Leases shorter than a round trip get there, and a call that was given up and is still under way.
const ROUNDS: usize = 3;
/// When to try again when it is not known how long the holder lasts: somebody got or freed the name just now.
const SOON: Duration = Duration::from_millis(1);

/// What became of one name.
enum Taken {
    /// It is this owner's: newly taken (no stamp), or held since an earlier try.
    Ours(Option<Stamp>),
    /// It is somebody else's, for so long.
    Busy(Option<Duration>),
}

impl MongodbEngine {
    /// The engine's `try_acquire`.
    pub(super) async fn acquire(&self, claim: &Claim) -> Outcome<Acquired> {
        for _ in 0..ROUNDS {
            let stamps = match self.take_all(claim).await? {
                Ok(stamps) => stamps,
                Err(held) => return Ok(held),
            };
            if let Some(fence) = self.stamp_all(claim, &stamps).await? {
                return Ok(Acquired::Granted { fence });
            }
        }
        self.locks
            .delete_many(documents::owned(&self.ids(claim), &claim.owner))
            .await?;
        Ok(held(&claim.keys()[0], Some(SOON)))
    }

    /// Takes the names one by one in their order, so that two claims that overlap meet at the first they share. Frees
    /// what it took when one is busy.
    async fn take_all(&self, claim: &Claim) -> Outcome<Result<Vec<Option<Stamp>>, Acquired>> {
        let mut stamps = Vec::with_capacity(claim.keys().len());
        for key in claim.keys() {
            match self.take(key, claim).await {
                Ok(Taken::Ours(stamp)) => stamps.push(stamp),
                Ok(Taken::Busy(retry_after)) => {
                    self.give_back(claim, &stamps).await?;
                    return Ok(Err(held(key, retry_after)));
                }
                Err(failure) => {
                    // As good as it gets: what cannot be given back expires.
                    let _ = self.give_back(claim, &stamps).await;
                    return Err(failure);
                }
            }
        }
        Ok(Ok(stamps))
    }

    /// One round trip for one name.
    ///
    /// The primary's own acknowledgement is enough: nothing is granted before the stamp, which lies behind this write in
    /// the oplog, has the full write concern. A busy answer, which promises nothing, need not wait for other members.
    async fn take(&self, key: &Key, claim: &Claim) -> Outcome<Taken> {
        let id = self.id(key);
        let answer = self
            .locks
            .find_one_and_update(documents::one_or_none(&id), documents::take(claim))
            .upsert(true)
            .return_document(ReturnDocument::After)
            .projection(documents::seen())
            .write_concern(WriteConcern::builder().w(Acknowledgment::Nodes(1)).build())
            .await
            .map_err(Failure::from);
        let document = match answer {
            Ok(document) => document,
            Err(failure) if failure.is_duplicate_key() => {
                // Somebody inserted the document while this try was about to.
                self.locks
                    .find_one(documents::busy(doc! { "_id": id }))
                    .projection(documents::seen())
                    .await?
            }
            Err(failure) => return Err(failure),
        };
        Ok(match document {
            Some(document) if documents::is_owned_by(&document, &claim.owner) => Taken::Ours(Stamp::of(&document)),
            Some(document) => Taken::Busy(documents::remaining(&document)),
            None => Taken::Busy(Some(SOON)),
        })
    }

    /// Gives one fence to all names of the claim, which `take_all` left in this owner's hands.
    ///
    /// # Behavior
    /// `None`: at least one of them changed since then, and nothing is granted.
    async fn stamp_all(&self, claim: &Claim, stamps: &[Option<Stamp>]) -> Outcome<Option<Fence>> {
        if let [Some(first), others @ ..] = stamps
            && others.iter().all(|other| *other == Some(*first))
        {
            // Granted by an earlier try whose answer was lost: the same fence again. Renewing makes sure that the
            // extension has the full write concern, too.
            let renewed = self.extend(claim, claim.ttl).await?;
            return Ok((renewed == Renewed::Extended).then(|| first.fence(self.clock)));
        }
        let ids = self.ids(claim);
        let mut unchanged = documents::owned(&ids[..1], &claim.owner);
        unchanged.insert(FENCE, observed(stamps[0]));
        let document: Option<Document> = self
            .locks
            .find_one_and_update(unchanged, Stamp::draw())
            .return_document(ReturnDocument::After)
            .projection(doc! { FENCE: 1, SINCE: 1 })
            .await?;
        let Some(stamp) = document.as_ref().and_then(Stamp::of) else {
            return Ok(None);
        };
        let others = &ids[1..];
        if !others.is_empty() {
            let not_newer = not_newer(documents::owned(others, &claim.owner), stamp.tick);
            let copied = self.locks.update_many(not_newer, stamp.copy()).await?;
            if copied.matched_count < others.len() as u64 {
                return Ok(None);
            }
        }
        Ok(Some(stamp.fence(self.clock)))
    }

    /// Frees the first names of the claim, as many as there are stamps.
    ///
    /// A command that is still on its way when its answer is given up may arrive during a later try of the same claim.
    /// It must not free what that one was granted: hence only documents with the stamps seen here, or none.
    async fn give_back(&self, claim: &Claim, stamps: &[Option<Stamp>]) -> Outcome<()> {
        if stamps.is_empty() {
            return Ok(());
        }
        let newest = stamps
            .iter()
            .flatten()
            .map(|stamp| stamp.tick)
            .max()
            .unwrap_or(Timestamp { time: 0, increment: 0 });
        let owned = documents::owned(&self.ids(claim)[..stamps.len()], &claim.owner);
        self.locks.delete_many(not_newer(owned, newest)).await?;
        Ok(())
    }
}

/// Narrows a filter to documents without a stamp, or with one up to `tick`.
fn not_newer(mut filter: Document, tick: Timestamp) -> Document {
    filter.insert(FENCE, doc! { "$not": { "$gt": Bson::Timestamp(tick) } });
    filter
}

fn held(key: &Key, retry_after: Option<Duration>) -> Acquired {
    Acquired::Held {
        key: key.clone(),
        retry_after,
    }
}
