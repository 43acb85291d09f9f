//! The last step of an attempt: the stamp, which creates the fencing token. `fence.rs` says why it is a step of its own.

use mongodb::bson::{Bson, DateTime, Document, Timestamp, doc};
use mongodb::options::ReturnDocument;

use super::documents::{self, EXPIRES_AT, FENCE, SINCE};
use super::estimate::{Look, Written};
use super::failure::Failure;
use super::fence::{Stamp, observed};
use super::{Core, Outcome};
use crate::clock::Moment;
use crate::engine::Renewed;
use crate::model::{Claim, Fence};

/// Number of hand-offs after which a name gets a new stamp, so that its tokens stay within the second of the stamp.
const MOST_HANDED: u32 = 100_000;
/// A name that this owner holds without a confirmed stamp.
#[derive(Default)]
pub(super) struct Unstamped {
    /// The stamp that the document has.
    pub(super) stamp: Option<Stamp>,
    /// Whether it was written with the full write concern.
    pub(super) is_settled: bool,
    /// Its end, if the estimate wrote it.
    pub(super) written: Option<Written>,
}

impl Core {
    /// Gives one fence to all names of the claim, which this owner holds after `take_all`.
    ///
    /// # Behavior
    /// `None`: at least one of them changed since then, and nothing is granted. Updates `newest` with the new stamp.
    pub(super) async fn stamp_all(
        &self,
        claim: &Claim,
        taken: &[Unstamped],
        newest: &mut Option<Timestamp>,
    ) -> Outcome<Option<Fence>> {
        if let [Unstamped { stamp: Some(first), .. }, others @ ..] = taken
            && others.iter().all(|other| other.stamp == Some(*first))
            && first.handed < MOST_HANDED
        {
            // Handed on, or granted by an earlier try whose answer was lost: the same fence again. Renewing makes sure
            // that it has the full write concern, too.
            let is_granted =
                taken.iter().all(|taken| taken.is_settled) || self.extend(claim, claim.ttl).await? == Renewed::Extended;
            return match is_granted {
                true => self.fence(first).map(Some),
                false => Ok(None),
            };
        }
        let ids = self.ids(claim);
        let mut unchanged = documents::owned(&ids[..1], &claim.owner);
        unchanged.insert(FENCE, observed(taken[0].stamp));
        let sent = Moment::now();
        let document: Option<Document> = self
            .locks()
            .find_one_and_update(unchanged, Stamp::draw())
            .return_document(ReturnDocument::After)
            .projection(doc! { FENCE: 1, SINCE: 1 })
            .await?;
        let answered = Moment::now();
        let Some(stamp) = document.as_ref().and_then(Stamp::of) else {
            return Ok(None);
        };
        let look = Look {
            shown: stamp.since,
            sent,
            answered,
        };
        self.estimate.note(look);
        *newest = Some(stamp.tick).max(*newest);
        if !self.corrected(claim, &ids, taken, look).await? {
            return Ok(None);
        }
        let others = &ids[1..];
        if !others.is_empty() {
            let not_newer = not_newer(documents::owned(others, &claim.owner), stamp.tick);
            let copied = self.locks().update_many(not_newer, stamp.copy()).await?;
            if copied.matched_count < others.len() as u64 {
                return Ok(None);
            }
        }
        self.fence(&stamp).map(Some)
    }

    fn fence(&self, stamp: &Stamp) -> Outcome<Fence> {
        stamp.fence(self.clock).ok_or_else(Failure::without_tokens)
    }

    /// Corrects the ends that the estimate wrote, where the server's clock shows that they are wrong. `false`: at least one of
    /// the names was gone.
    ///
    /// Matches only ends that this attempt wrote: a correction that arrives late must not shorten a lease that was extended.
    async fn corrected(&self, claim: &Claim, ids: &[String], taken: &[Unstamped], look: Look) -> Outcome<bool> {
        let written = ids
            .iter()
            .zip(taken)
            .filter_map(|(id, taken)| Some((id, taken.written?)));
        let (wrong, ends): (Vec<String>, Vec<DateTime>) = written
            .filter(|(_, written)| !written.is_right(look))
            .map(|(id, written)| (id.clone(), written.expires_at))
            .unzip();
        if wrong.is_empty() {
            return Ok(true);
        }
        let mut ours = documents::owned(&wrong, &claim.owner);
        ours.insert(EXPIRES_AT, doc! { "$in": ends });
        let corrected = self.locks().update_many(ours, documents::ends(claim.ttl)).await?;
        Ok(corrected.matched_count == wrong.len() as u64)
    }
}

/// Narrows a filter to documents without a stamp, or with one up to `tick`.
pub(super) fn not_newer(mut filter: Document, tick: Timestamp) -> Document {
    filter.insert(FENCE, doc! { "$not": { "$gt": Bson::Timestamp(tick) } });
    filter
}
