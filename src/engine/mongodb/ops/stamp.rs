//! The last step of an attempt: the fencing token. It is the time of the insert, or a stamp (`fence.rs`).

use mongodb::bson::{DateTime, Document, Timestamp, doc};
use mongodb::options::ReturnDocument;

use crate::clock::Moment;
use crate::engine::Renewed;
use crate::engine::mongodb::connection::session::Session;
use crate::engine::mongodb::documents;
use crate::engine::mongodb::error::Failure;
use crate::engine::mongodb::fields::{EXPIRES_AT, FENCE, HANDED, SINCE};
use crate::engine::mongodb::ops::attempts::Caller;
use crate::engine::mongodb::ops::clock_offset::{ClockReading, EstimatedEnd};
use crate::engine::mongodb::ops::fence::{Clock, MAX_HAND_OFFS, Stamp, StampOrder, observed};
use crate::engine::mongodb::{Core, Outcome};
use crate::model::{Claim, Fence};

/// A name that this owner holds without a confirmed stamp.
#[derive(Default)]
pub(crate) struct Unstamped {
    /// The stamp that the document has.
    pub(crate) stamp: Option<Stamp>,
    /// Whether it was written with the full write concern.
    pub(crate) is_settled: bool,
    /// The end of the lease, if it is an estimate.
    pub(crate) estimated: Option<EstimatedEnd>,
    /// The timestamp of the insert of all names, if it was confirmed with the full write concern.
    pub(crate) inserted_at: Option<Timestamp>,
    /// Whether the insert of all names had the full write concern, for a claim that needs no token. Only the end is verified.
    pub(crate) needs_no_stamp: bool,
}

impl Core {
    /// Gives one fencing token to all names of the claim, which this owner holds after `acquire_names`.
    ///
    /// # Behavior
    /// `None`: at least one name changed since then, and nothing is granted. Updates `newest` with the new stamp.
    pub(crate) async fn stamp_all(
        &self,
        claim: &Claim,
        caller: &Caller,
        names: &[Unstamped],
        newest: &mut Option<StampOrder>,
    ) -> Outcome<Option<Fence>> {
        if let [Unstamped { stamp: Some(first), .. }, others @ ..] = names
            && others.iter().all(|other| other.stamp == Some(*first))
            && first.hand_offs() < MAX_HAND_OFFS
            && first.clock() == self.clock.get()
            && first.fence().is_some()
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
        if names.iter().all(|name| name.needs_no_stamp) {
            let reading = self.reading.next(&self.pool).await?;
            self.clock_offset.update(reading);
            let is_granted = self.correct_ends(claim, &ids, names, reading).await?;
            return Ok(is_granted.then_some(Fence::NONE));
        }
        if let Some(stamp) = self.stamp_of_insert(names)
            && let Some(unwritten) = &self.unwritten
        {
            let fence = self.fence(&stamp)?;
            unwritten.write_later(claim, ids, stamp.tick);
            return Ok(Some(fence));
        }
        let mut unchanged = documents::owned(&ids[..1], &claim.owner);
        unchanged.insert(FENCE, observed(names[0].stamp));
        let Some((stamp, reading, drawn_by)) = self.draw_stamp(unchanged, caller).await? else {
            return Ok(None);
        };
        self.clock_offset.update(reading);
        *newest = Some(stamp.order()).max(*newest);
        // Where the mark is wrong, the next round draws another stamp.
        if drawn_by != stamp.clock() || !self.correct_ends(claim, &ids, names, reading).await? {
            return Ok(None);
        }
        let others = &ids[1..];
        if !others.is_empty() {
            let not_newer = not_newer(documents::owned(others, &claim.owner), Some(stamp.order()));
            let copied = self.locks().update_many(not_newer, stamp.copy()).await?;
            if copied.matched_count < others.len() as u64 {
                return Ok(None);
            }
        }
        self.fence(&stamp).map(Some)
    }

    /// Draws the stamp of a document, and finds out which clock drew it. `None`: the document has changed.
    async fn draw_stamp(&self, unchanged: Document, caller: &Caller) -> Outcome<Option<(Stamp, ClockReading, Clock)>> {
        let clock = self.clock.get();
        let mut session = caller.session(&self.pool).await?;
        let Session { connected, session } = &mut *session;
        let sent = Moment::now();
        let document: Option<Document> = connected
            .locks
            .find_one_and_update(unchanged, Stamp::draw(clock))
            .return_document(ReturnDocument::After)
            .projection(doc! { FENCE: 1, SINCE: 1, HANDED: 1 })
            .session(&mut *session)
            .await?;
        let answered = Moment::now();
        let Some(stamp) = document.as_ref().and_then(Stamp::of) else {
            return Ok(None);
        };
        let is_of_cluster = session.operation_time().is_some_and(|time| time >= stamp.tick);
        let drawn_by = if is_of_cluster { Clock::Cluster } else { Clock::Process };
        if drawn_by != clock {
            self.clock.set(drawn_by);
            tracing::warn!(
                address = self.address,
                ?drawn_by,
                "the server is of another kind than before"
            );
        }
        let reading = ClockReading {
            time: stamp.since,
            sent,
            answered,
        };
        Ok(Some((stamp, reading, drawn_by)))
    }

    /// Returns the stamp of names that one write inserted, if it proves the token and the end of the lease.
    fn stamp_of_insert(&self, names: &[Unstamped]) -> Option<Stamp> {
        let first = names.first()?;
        let (tick, end) = (first.inserted_at?, first.estimated?);
        let is_one_write = names.iter().all(|name| name.inserted_at == Some(tick));
        (is_one_write && self.clock_offset.is_verified(&end, tick)).then_some(Stamp {
            tick,
            since: end.began,
            handed: 0,
        })
    }

    fn fence(&self, stamp: &Stamp) -> Outcome<Fence> {
        stamp.fence().ok_or_else(Failure::without_tokens)
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

/// Narrows a filter to documents without a stamp, or with one up to `newest`. `None`: to documents without one.
pub(crate) fn not_newer(mut filter: Document, newest: Option<StampOrder>) -> Document {
    let (tick, handed) = newest.unwrap_or((Timestamp { time: 0, increment: 0 }, 0));
    let newer = doc! { FENCE: { "$gt": tick } };
    let handed_off_since = doc! { FENCE: tick, HANDED: { "$gt": i64::from(handed) } };
    filter.insert("$nor", vec![newer, handed_off_since]);
    filter
}
