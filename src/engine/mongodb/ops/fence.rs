//! Where a fencing token comes from.
//!
//! # What it must be
//! Larger than every earlier one of the name, although a release deletes the document and takes the last one with it.
//! So it has to come from a clock, and the clock has to be read at the right moment.
//!
//! # Why not in the try itself
//! The try is an insert, or a `findAndModify` with a pipeline, and all that a pipeline can read is fixed when the command
//! *starts*: `$$NOW` and `$$CLUSTER_TIME` alike. Between the start and the write lie the queue for a ticket, locks, and write
//! conflicts that are tried again with the old values (measured: a try held up for a second by a conflict wrote a
//! cluster time a second old). Another client's whole acquire and release fits in between, and it leaves nothing behind
//! for the late writer to see: the late one would then be granted the *smaller* token. `$$NOW` has a resolution of a
//! millisecond besides, in which a name can be taken, freed and taken again. A zero `Timestamp`, which an insert
//! replaces with the present, stays zero in a pipeline, and an insert replaces it before it queues, too. The
//! `operationTime` of the reply would be right, but it is not in the document, where `inspect` and a retry look.
//!
//! # The stamp
//! So a try that took a name is followed by a second write, now that the name is this owner's:
//! `{ $currentDate: { fence: { $type: "timestamp" } } }`. The server evaluates it *within* the storage transaction that
//! writes it (and again after each write conflict), by ticking its logical clock, which never gives a value twice and
//! never goes back. Hence, for two grants of one name: the earlier stamp was written before the earlier holder could
//! release, that before the later try could take the name, and that before the later stamp was drawn. The first write
//! asks for no more than the primary's own acknowledgement; the stamp waits for the write concern (by default the
//! majority), and since it lies behind the first write in the oplog, so does that then.
//!
//! # Handed on
//! A name that goes straight on to a waiter (`queue.rs`) keeps its document, and with it the last token: the waiter gets the
//! one behind it, in the write that confirms, and needs no second step. Such a token is never ahead of the cluster time of
//! its own write: the last one was not ahead of *its* write, and the clock ticks at least once for every write. So
//! whatever is drawn later, after the document is gone, is larger. Now and then a waiter is given a stamp all the same, so
//! that a name that never comes to rest does not run out of the tokens of a second.
//!
//! # Fail-over and rollback (replica set, sharded cluster)
//! The logical clock is the cluster time: every write's place in the oplog comes from it, every message carries it, and
//! a member's is never behind what it has applied. A new primary has what the majority acknowledged, so it ticks on from
//! beyond every stamp that was ever granted, whatever its wall clock says. A stamp that is rolled back was never
//! granted. (With `w=1` in the URL a granted one can be rolled back, with the lock itself: the user's choice.) On a
//! sharded cluster the shards learn each other's cluster time through the router before the stamp is drawn, so it also
//! covers names that another shard keeps. The token is `seconds × 10⁶ + increment`. The increment counts the writes within a
//! second, and no cluster makes a million of them; but the second stands still, and the increment goes on, while the
//! primary's wall clock is behind the cluster time (it was set back, or the primary before had one that was ahead). Should
//! it come to a million then, nothing is granted until the clock goes on: an error that passes by itself.
//!
//! # A standalone server
//! It has the same clock, but starts it anew from the wall clock, in whole seconds, when the process starts: two
//! processes within a second would both begin at 1, and a restart takes 0.7 s (measured, and seen to repeat a value).
//! So the wall clock's milliseconds, which the same `$currentDate` writes into `holder.since`, come in as well:
//! `seconds × 10⁶ + millisecond × 500 + increment`, where the increment (here: of stamps, not of all writes) stays
//! below 500 per millisecond of down time. Both parts grow within a second and the increment strictly, so the sum does,
//! too. When the wall clock and the logical one disagree on the second (the server reads a coarser clock for the
//! latter, or the wall clock was set back and the logical one waits for it), the millisecond counts as 999: the fields
//! are written in the order of their names, so `holder.since` is never the older of the two unless it was set back.
//! What is left is a wall clock that is set back across a restart, or within a second, on a server without a replica.
//! Leases end by that same clock, so it has to be kept steady there anyway.

use mongodb::bson::{Bson, DateTime, Document, Timestamp, doc};

use super::documents::{FENCE, HOLDER, SINCE};
use super::queue::HANDED;
use crate::model::Fence;

/// What the server wrote into a document when its holder was granted the name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stamp {
    /// The logical clock's tick.
    pub tick: Timestamp,
    /// The wall clock, read after it.
    pub since: DateTime,
    /// How often the name has gone on to a waiter since.
    pub handed: u32,
}

/// The tokens of a second.
const SECOND: u64 = 1_000_000;

/// Which of the two formulas holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Clock {
    /// The logical clock outlives the process: replica sets and sharded clusters.
    Cluster,
    /// It starts anew with the process: a standalone server.
    Process,
}

impl Stamp {
    /// The update that draws a stamp.
    pub(super) fn draw() -> Document {
        doc! {
            "$currentDate": { FENCE: { "$type": "timestamp" }, SINCE: true },
            "$unset": { HANDED: "" },
        }
    }

    /// The update that copies this one to the other names of a claim.
    pub(super) fn copy(&self) -> Document {
        doc! { "$set": { FENCE: self.tick, SINCE: self.since }, "$unset": { HANDED: "" } }
    }

    /// The stamp of a document. `None`: it has none (yet).
    pub(super) fn of(document: &Document) -> Option<Self> {
        let tick = document.get_timestamp(FENCE).ok()?;
        let since = *document.get_document(HOLDER).ok()?.get_datetime("since").ok()?;
        let handed = match document.get(HANDED) {
            Some(Bson::Int32(times)) => u32::try_from(*times).ok()?,
            Some(Bson::Int64(times)) => u32::try_from(*times).ok()?,
            _ => 0,
        };
        Some(Stamp { tick, since, handed })
    }

    /// The fencing token. `None`: the clock has stood still for so long that there are no more tokens in its second.
    pub(super) fn fence(&self, clock: Clock) -> Option<Fence> {
        let second = u64::from(self.tick.time);
        let increment = u64::from(self.tick.increment);
        let within = match clock {
            Clock::Cluster => increment,
            Clock::Process => {
                let wall = self.since.timestamp_millis();
                let same_second = wall.div_euclid(1000) == i64::from(self.tick.time);
                let millisecond = if same_second { wall.rem_euclid(1000) as u64 } else { 999 };
                millisecond * 500 + increment
            }
        };
        let within = within + u64::from(self.handed);
        (within < SECOND).then(|| Fence(second * SECOND + within))
    }
}

/// A stamp as a value to compare the field `fence` with: a missing field equals null.
pub(super) fn observed(stamp: Option<Stamp>) -> Bson {
    stamp.map_or(Bson::Null, |stamp| Bson::Timestamp(stamp.tick))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fence(clock: Clock, time: u32, increment: u32, since_ms: i64) -> u64 {
        Stamp {
            tick: Timestamp { time, increment },
            since: DateTime::from_millis(since_ms),
            handed: 0,
        }
        .fence(clock)
        .unwrap()
        .0
    }

    const T: u32 = 1_795_231_830;
    const T_MS: i64 = T as i64 * 1000;

    #[test]
    fn the_cluster_clock_counts_alone() {
        let first = fence(Clock::Cluster, T, 7, T_MS + 900);
        // After a fail-over to a member whose wall clock is behind.
        assert!(fence(Clock::Cluster, T, 8, T_MS + 100) > first);
        assert!(fence(Clock::Cluster, T + 1, 1, T_MS + 100) > first);
        assert_eq!(first, u64::from(T) * 1_000_000 + 7);
        assert!(first < 1 << 53);
    }

    #[test]
    fn a_clock_that_stands_still_runs_out_of_tokens() {
        let stamp = |increment, handed| Stamp {
            tick: Timestamp { time: T, increment },
            since: DateTime::from_millis(T_MS),
            handed,
        };
        assert!(stamp(999_999, 0).fence(Clock::Cluster).is_some());
        assert_eq!(stamp(1_000_000, 0).fence(Clock::Cluster), None);
        assert_eq!(stamp(999_999, 1).fence(Clock::Cluster), None);
    }

    #[test]
    fn a_standalone_that_restarts_within_a_second_goes_on() {
        let before = fence(Clock::Process, T, 900, T_MS + 187);
        assert!(fence(Clock::Process, T, 1, T_MS + 887) > before);
        assert!(fence(Clock::Process, T + 1, 1, T_MS + 1000) > before);
    }

    #[test]
    fn many_within_a_millisecond_keep_their_order() {
        let mut last = 0;
        for increment in 1..100_000 {
            let next = fence(Clock::Process, T, increment, T_MS + i64::from(increment) / 100);
            assert!(next > last);
            last = next;
        }
        assert!(fence(Clock::Process, T + 1, 1, T_MS + 1000) > last);
    }

    #[test]
    fn a_wall_clock_ahead_of_or_behind_the_logical_one_counts_as_the_end_of_its_second() {
        let usual = fence(Clock::Process, T, 5, T_MS + 998);
        let ahead = fence(Clock::Process, T, 6, T_MS + 1004);
        let set_back = fence(Clock::Process, T, 7, T_MS - 3_600_000);
        assert!(usual < ahead && ahead < set_back);
        assert!(set_back < fence(Clock::Process, T + 1, 1, T_MS + 1010));
    }
}
