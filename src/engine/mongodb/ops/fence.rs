//! The source of the fencing tokens.
//!
//! # Requirement
//! A token is larger than every earlier one of the name, although a release deletes the document with the last token. So it
//! comes from a clock, and the moment at which the clock is read matters.
//!
//! # Why the first write of an attempt cannot create it
//! The first write is an insert or a `findAndModify` with a pipeline. All values that a pipeline can read, `$$NOW` and
//! `$$CLUSTER_TIME`, are fixed when the command *starts*. Between the start and the write the command waits for a ticket and
//! for locks, and write conflicts are retried with the old values (measured: a command that a conflict delayed by a second
//! wrote a cluster time that was a second old). Another client can acquire and release the name in between, which leaves
//! nothing in the collection. The delayed command would then be granted the *smaller* token. Besides, `$$NOW` has a resolution
//! of a millisecond, in which a name can be acquired, released and acquired again. A zero `Timestamp`, which an insert replaces
//! with the current time, stays zero in a pipeline, and an insert replaces it before it waits, too. The `operationTime` of the
//! reply would be right, but it is not in the document, where `inspect` and a retry read it.
//!
//! # The stamp
//! So a second write follows when the owner has the name: `{ $currentDate: { fence: { $type: "timestamp" } } }`. The server
//! evaluates it *within* the storage transaction that writes it (and again after each write conflict), by a tick of its logical
//! clock, which never returns a value twice and never goes back. Hence, for two grants of one name: the earlier stamp was
//! written before the earlier holder could release the name, the release came before the later first write, and that came
//! before the later stamp. The first write needs the primary's acknowledgement only. The stamp waits for the write concern (by
//! default the majority), and the first write precedes it in the oplog, so it has that write concern then, too.
//!
//! # After a hand-off
//! A name that is handed off to a waiter (`queue/pipelines.rs`) keeps its document with the last token. The waiter gets the next
//! token in the write that confirms the hand-off, without a second step. Such a token is never ahead of the cluster time of its
//! own write: the last token was not ahead of *its* write, and the clock ticks at least once for every write. So every token
//! that is drawn later, after the document is deleted, is larger. After many hand-offs a waiter gets a stamp all the same, so
//! that a name that is always handed off does not use up the tokens of a second.
//!
//! # Failover and rollback (replica set, sharded cluster)
//! The logical clock is the cluster time. Every oplog entry and every message carries it, and a member's clock is never behind
//! the entries that it has applied. A new primary has everything that the majority acknowledged, so its ticks are beyond every
//! stamp that was ever granted, whatever its wall clock says. A stamp that is rolled back was never granted. (With `w=1` in the
//! URL a granted one can be rolled back, together with the lock: the user's choice.) On a sharded cluster the router passes each
//! shard's cluster time to the others before the stamp is drawn, so the order also covers names on other shards. The token is
//! `seconds × 10⁶ + increment`. The increment counts the writes within a second, and no cluster makes a million of them. But the
//! second does not advance, and the increment grows, while the primary's wall clock is behind the cluster time (it was set
//! back, or the earlier primary's clock was ahead). When the increment reaches a million, nothing is granted until the clock
//! advances. This error is transient.
//!
//! # A standalone server
//! It has the same clock, but initializes it from the wall clock, in whole seconds, when the process starts. Two processes within
//! a second would both begin at 1, and a restart takes 0.7 s (measured; a value was repeated). So the token includes the
//! milliseconds of the wall clock, which the same `$currentDate` writes into `holder.since`:
//! `seconds × 10⁶ + millisecond × 500 + increment`. Here the increment counts stamps, not all writes, and stays below 500 per
//! millisecond of down time. Within a second neither part decreases and the increment always grows, so the sum grows, too.
//! When the wall clock and the logical clock are in different seconds (the server reads a coarser clock for the latter, or the
//! wall clock was set back and the logical clock waits for it), the millisecond counts as 999. The fields are written in the
//! order of their names, so `holder.since` is never the older of the two unless the wall clock was set back. One case remains: a
//! wall clock that is set back across a restart, or within a second, on a server without a replica. Leases end by the same
//! clock, so it must be kept steady there anyway.

use mongodb::bson::{Bson, DateTime, Document, Timestamp, doc};

use crate::engine::mongodb::documents::{FENCE, HOLDER, SINCE};
use crate::engine::mongodb::queue::pipelines::HANDED;
use crate::model::Fence;

/// The data that the server writes into a document when its owner is granted the name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stamp {
    /// The logical clock's tick.
    pub tick: Timestamp,
    /// The wall clock, read after it.
    pub since: DateTime,
    /// Number of hand-offs since the stamp.
    pub handed: u32,
}

/// Number of tokens in a second.
const SECOND: u64 = 1_000_000;

/// The formula of the token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Clock {
    /// The logical clock outlives the process: replica sets and sharded clusters.
    Cluster,
    /// The logical clock starts with the process: a standalone server.
    Process,
}

impl Stamp {
    /// Returns the update that draws a stamp.
    pub(crate) fn draw() -> Document {
        doc! {
            "$currentDate": { FENCE: { "$type": "timestamp" }, SINCE: true },
            "$unset": { HANDED: "" },
        }
    }

    /// Returns the update that copies this stamp to the other names of a claim.
    pub(crate) fn copy(&self) -> Document {
        doc! { "$set": { FENCE: self.tick, SINCE: self.since }, "$unset": { HANDED: "" } }
    }

    /// Reads the stamp of a document. `None`: it has none (yet).
    pub(crate) fn of(document: &Document) -> Option<Self> {
        let tick = document.get_timestamp(FENCE).ok()?;
        let since = *document.get_document(HOLDER).ok()?.get_datetime("since").ok()?;
        let handed = match document.get(HANDED) {
            Some(Bson::Int32(times)) => u32::try_from(*times).ok()?,
            Some(Bson::Int64(times)) => u32::try_from(*times).ok()?,
            _ => 0,
        };
        Some(Stamp { tick, since, handed })
    }

    /// Returns the fencing token. `None`: the clock did not advance, and its second has no more tokens.
    pub(crate) fn fence(&self, clock: Clock) -> Option<Fence> {
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

/// Returns a stamp as a value for a comparison with the field `fence`. A missing field equals null.
pub(crate) fn observed(stamp: Option<Stamp>) -> Bson {
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
        // After a failover to a member whose wall clock is behind.
        assert!(fence(Clock::Cluster, T, 8, T_MS + 100) > first);
        assert!(fence(Clock::Cluster, T + 1, 1, T_MS + 100) > first);
        assert_eq!(first, u64::from(T) * 1_000_000 + 7);
        assert!(first < 1 << 53);
    }

    #[test]
    fn a_clock_that_does_not_advance_has_no_more_tokens() {
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
    fn tokens_grow_across_a_restart_of_a_standalone_within_a_second() {
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
