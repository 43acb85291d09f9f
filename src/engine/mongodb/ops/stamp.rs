//! The last step of an attempt: the stamp, which creates the fencing token. `fence.rs` says why this is a separate step.

use mongodb::bson::{Bson, DateTime, Document, Timestamp, doc};
use mongodb::options::ReturnDocument;

use crate::clock::Moment;
use crate::engine::Renewed;
use crate::engine::mongodb::documents::{self, EXPIRES_AT, FENCE, SINCE};
use crate::engine::mongodb::error::Failure;
use crate::engine::mongodb::ops::clock_offset::{ClockReading, EstimatedEnd};
use crate::engine::mongodb::ops::fence::{Stamp, observed};
use crate::engine::mongodb::{Core, Outcome};
use crate::model::{Claim, Fence};

/// Number of hand-offs after which a name gets a new stamp, so that its tokens stay within the second of the stamp.
const MAX_HAND_OFFS: u32 = 100_000;

/// A name that this owner holds without a confirmed stamp.
#[derive(Default)]
pub(crate) struct Unstamped {
    /// The stamp that the document has.
    pub(crate) stamp: Option<Stamp>,
    /// Whether it was written with the full write concern.
    pub(crate) is_settled: bool,
    /// The end of the lease, if it is an estimate.
    pub(crate) estimated: Option<EstimatedEnd>,
}

impl Core {
    /// Gives one fencing token to all names of the claim, which this owner holds after `acquire_names`.
    ///
    /// # Behavior
    /// `None`: at least one name changed since then, and nothing is granted. Updates `newest` with the new stamp.
    pub(crate) async fn stamp_all(
        &self,
        claim: &Claim,
        names: &[Unstamped],
        newest: &mut Option<Timestamp>,
    ) -> Outcome<Option<Fence>> {
        if let [Unstamped { stamp: Some(first), .. }, others @ ..] = names
            && others.iter().all(|other| other.stamp == Some(*first))
            && first.handed < MAX_HAND_OFFS
        {
            // Handed off, or granted by an earlier attempt whose answer was lost: the same token. The renewal gives the stamp
            // the full write concern.
            let is_granted =
                names.iter().all(|name| name.is_settled) || self.extend(claim, claim.ttl).await? == Renewed::Extended;
            return match is_granted {
                true => self.fence(first).map(Some),
                false => Ok(None),
            };
        }
        let ids = self.ids(claim);
        let mut unchanged = documents::owned(&ids[..1], &claim.owner);
        unchanged.insert(FENCE, observed(names[0].stamp));
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
        let reading = ClockReading {
            time: stamp.since,
            sent,
            answered,
        };
        self.clock_offset.update(reading);
        *newest = Some(stamp.tick).max(*newest);
        if !self.correct_ends(claim, &ids, names, reading).await? {
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

    /// Corrects the estimated ends that contradict the server's clock. `false`: at least one of the names was gone.
    ///
    /// Matches only ends that this attempt wrote: a correction that arrives late must not shorten a lease that was extended.
    async fn correct_ends(
        &self,
        claim: &Claim,
        ids: &[String],
        names: &[Unstamped],
        reading: ClockReading,
    ) -> Outcome<bool> {
        let estimated = ids
            .iter()
            .zip(names)
            .filter_map(|(id, name)| Some((id, name.estimated?)));
        let (wrong, ends): (Vec<String>, Vec<DateTime>) = estimated
            .filter(|(_, end)| !end.agrees_with(reading))
            .map(|(id, end)| (id.clone(), end.expires_at))
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
pub(crate) fn not_newer(mut filter: Document, tick: Timestamp) -> Document {
    filter.insert(FENCE, doc! { "$not": { "$gt": Bson::Timestamp(tick) } });
    filter
}
