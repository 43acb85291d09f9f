//! The source of the fencing tokens.
//!
//! # Requirement
//! A token is larger than every earlier one of the name, although a release deletes the document with the last token. So it
//! comes from a clock, and the moment at which the clock is read matters. There are two ways: the time of the insert, and the
//! stamp. Both use the cluster time, the logical clock of a replica set: every oplog entry has a timestamp of it, no value is
//! used twice, and later writes have larger values.
//!
//! # The time of the insert (replica set, leases of 5 s and longer)
//! The reply to a write has `operationTime`: the timestamp of the write's own oplog entry (`ReplClientInfo::getLastOp` of the
//! connection; `tests/tokens.rs` compares the two under load). An insert of all names of a claim with the full write concern
//! (by default the majority) is the whole grant, and its `operationTime` is the token. With several names it is the timestamp of
//! the last insert. For two grants of one name: the document of the earlier one was deleted before the later insert, and inserted
//! before that. The oplog has the writes of one document in their order, because other members apply them in that order. So the
//! later timestamp is larger.
//!
//! The reply proves this only if this very command made the insert:
//! - A duplicate key is no grant. A reply after which the driver repeated the command is none either: the server may answer the
//!   repetition from its record, with the time of its *last* write of any client, and the name may have another owner by then. The
//!   driver does not report repetitions, so `connection/checkouts.rs` counts them. Then a stamp follows, which needs the document
//!   to be unchanged.
//! - A retry of the attempt finds the document of this owner, and gets a stamp. So does every attempt of a claim whose earlier one
//!   had a command without an answer: it may be a rollback, which the server would execute later on a document without a stamp.
//! - The end of the lease is an estimate, with a margin of 2 s. The timestamp verifies it: the primary takes the seconds of
//!   timestamps from its wall clock, and never goes back, so that clock was below the next second. If the estimate is too early
//!   by more than the margin, or ahead of that second, a stamp follows, which corrects it. Only a wall clock that was set back is
//!   not detected, because the cluster time does not go back. So a stamp reads the wall clock once a minute. (Every lease that
//!   began before the clock was set back ends later, too.)
//! - While the cluster time is ahead of the wall clock, no estimate is verified. So after a refusal all grants of the next second
//!   have two writes from the beginning, and not three.
//!
//! The token is not in the document at first. `unwritten_tokens.rs` writes it and removes the margin, unless the lease is released
//! before. A hand-off without it leads to a stamp. A holder that dies before that blocks the name for its ttl and up to 3 s.
//!
//! # Why no other first write can create the token
//! A `findAndModify` with a pipeline acquires an expired document. All values that a pipeline can read, `$$NOW` and
//! `$$CLUSTER_TIME`, are fixed when the command *starts*. Between the start and the write the command waits for a ticket and
//! for locks, and write conflicts are retried with the old values (measured: a command that a conflict delayed by a second
//! wrote a cluster time that was a second old). Another client can acquire and release the name in between, which leaves
//! nothing in the collection. The delayed command would then be granted the *smaller* token. Besides, `$$NOW` has a resolution
//! of a millisecond, in which a name can be acquired, released and acquired again. A zero `Timestamp`, which an insert replaces
//! with the current time, stays zero in a pipeline, and an insert replaces it before it waits, too. Its `operationTime` has not
//! been verified, because such a grant is rare. On a sharded cluster the router makes the reply. A standalone server has no
//! `operationTime`.
//!
//! # The stamp
//! In these cases a second write follows when the owner has the name: `{ $currentDate: { fence: { $type: "timestamp" } } }`. The
//! server evaluates it *within* the storage transaction that writes it (and again after each write conflict), by a tick of its
//! logical clock. Hence, for two grants of one name: the earlier stamp was written before the earlier holder could release the
//! name, the release came before the later first write, and that came before the later stamp. The first write needs the primary's
//! acknowledgement only. The stamp waits for the write concern, and the first write precedes it in the oplog, so it has that
//! write concern then, too.
//!
//! # Both ways for one name
//! Each token is a value of the logical clock that was drawn between the first write of its grant and the reply to the last one,
//! and no value is drawn twice. The release of the earlier grant came after that reply, and before the first write of the later
//! grant. So the later token is larger, whichever way each of them came. This covers an owner that was granted the name by an
//! insert, and whose document another owner gets by a hand-off without a token: that one draws a stamp.
//!
//! # Grants without a token (standalone server)
//! A claim that needs no token (`acquireLock`) gets none: an insert with the full write concern is its only write. A reading of the
//! server's clock follows, which verifies the end as the stamp does; concurrent grants share it. The document has no stamp. A later
//! stamp of the name is larger than every token that was given out, because it is drawn later from the same clock, whatever the
//! document of an earlier grant had.
//!
//! # After a hand-off
//! A name that is handed off to a waiter (`queue/hand_off.rs`) keeps its document with the last token. The waiter gets the next
//! token, last + 1, in one write, without a stamp: in the releasing write, if that is a grant, and otherwise in the write that
//! confirms the reservation. Both come after the last grant, so the token is larger than every earlier one. It is never ahead of the
//! cluster time of its own write: the last token was not ahead of a write of *its* grant, and the clock ticks at least once for every
//! later write. So every token that is drawn later, after the document is deleted, is larger.
//!
//! A releasing write needs the last token. It is in the document (the stamp, and in `handed` the number of hand-offs since), or it
//! is the unwritten token of an insert. The releasing process has it in both cases, with the claim that it was granted (`Claim::fence`).
//! The filter of the command selects only documents of that claim's owner, and no other command gives that owner another token. So
//! the process computes the next token, for the event, and the pipeline adds one to `handed`, for the document. Where there is
//! no stamp, it writes that of the claim, which has no hand-offs. A process that does not have the token (of an expired lease, of a
//! forced release, of a lease that it restored from a text) reserves the name. The confirmation draws a stamp if the document has none.
//!
//! After many hand-offs a waiter gets a stamp all the same, so that a name that is always handed off does not use up the tokens of a
//! second: the release then reserves the name, and so it does at the last token of a second. A transfer keeps the token.
//!
//! # Failover and rollback (replica set, sharded cluster)
//! The logical clock is the cluster time. Every oplog entry and every message carries it, and a member's clock is never behind
//! the entries that it has applied. A new primary has everything that the majority acknowledged, so its ticks are beyond every
//! token that was ever granted, whatever its wall clock says. An insert or a stamp that is rolled back was never granted. (With
//! `w=1` in the URL a granted one can be rolled back, together with the lock: the user's choice.) On a sharded cluster the router
//! passes each shard's cluster time to the others before the stamp is drawn, so the order also covers names on other shards. The
//! token is `seconds × 10⁶ + increment`. The increment counts the writes within a second, and no cluster makes a million of them.
//! But the second does not advance, and the increment grows, while the primary's wall clock is behind the cluster time (it was
//! set back, or the earlier primary's clock was ahead). When the increment reaches a million, nothing is granted until the clock
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
//!
//! # A standalone server that becomes a replica set, or the other way round
//! A service may run meanwhile. So the formula is not that of the server at `connect`: the reply to a stamp shows which clock drew
//! it, because only a replica set returns the time of a write (`operationTime`). The stamp of a standalone server is marked in its
//! document. Where the reply contradicts the mark, the engine draws another stamp with the right one. No token after a hand-off is
//! computed from a marked stamp: the waiter draws one. A server that becomes a replica set has stopped, started, and elected its
//! primary, so its clock is in a later second than the last stamp before, and the token is larger. In the other direction the
//! second may be the same, and the milliseconds make the token larger, as after a restart.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use mongodb::bson::{Bson, DateTime, Document, Timestamp, doc};

use crate::engine::mongodb::fields::{FENCE, HANDED, HOLDER, SINCE};
use crate::model::Fence;

/// The data that the server writes into a document when its owner is granted the name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stamp {
    /// The logical clock's tick.
    pub tick: Timestamp,
    /// The wall clock, read after it.
    pub since: DateTime,
    /// The field `handed`: the number of hand-offs since the stamp, and for a standalone server its mark.
    pub handed: u32,
}

/// The order of the tokens of stamps: the logical clock's tick, and the number of hand-offs since.
pub(crate) type StampOrder = (Timestamp, u32);

/// Number of hand-offs after which a name gets a new stamp, so that its tokens stay within the second of the stamp.
pub(crate) const MAX_HAND_OFFS: u32 = 100_000;

/// Marks a stamp whose token has the formula of a standalone server. It is a part of the field `handed`, and beyond
/// [`MAX_HAND_OFFS`]: no token is computed from such a stamp after a hand-off, and the next holder draws one.
const OF_PROCESS: u32 = 1 << 30;

/// Number of tokens in a second.
const SECOND: u64 = 1_000_000;

/// The logical clock of the server, which decides the formula of the token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Clock {
    /// The logical clock outlives the process: replica sets and sharded clusters.
    Cluster,
    /// The logical clock starts with the process: a standalone server.
    Process,
}

/// The clock that the server had when it last drew a stamp.
pub(crate) struct ServerClock(AtomicBool);

impl ServerClock {
    pub(crate) fn new(clock: Clock) -> Self {
        ServerClock(AtomicBool::new(clock == Clock::Cluster))
    }

    pub(crate) fn get(&self) -> Clock {
        match self.0.load(Relaxed) {
            true => Clock::Cluster,
            false => Clock::Process,
        }
    }

    pub(crate) fn set(&self, clock: Clock) {
        self.0.store(clock == Clock::Cluster, Relaxed);
    }
}

impl Stamp {
    /// Returns the update that draws a stamp of this clock.
    pub(crate) fn draw(clock: Clock) -> Document {
        let mut update = doc! { "$currentDate": { FENCE: { "$type": "timestamp" }, SINCE: true } };
        match clock {
            Clock::Cluster => update.insert("$unset", doc! { HANDED: "" }),
            Clock::Process => update.insert("$set", doc! { HANDED: OF_PROCESS as i32 }),
        };
        update
    }

    /// Returns the update that copies this stamp, which was drawn just now, to the other names of a claim.
    pub(crate) fn copy(&self) -> Document {
        let mut set = doc! { FENCE: self.tick, SINCE: self.since };
        match self.clock() {
            Clock::Cluster => doc! { "$set": set, "$unset": { HANDED: "" } },
            Clock::Process => {
                set.insert(HANDED, OF_PROCESS as i32);
                doc! { "$set": set }
            }
        }
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

    /// Returns the clock that drew it.
    pub(crate) fn clock(&self) -> Clock {
        match self.handed < OF_PROCESS {
            true => Clock::Cluster,
            false => Clock::Process,
        }
    }

    /// Returns the number of hand-offs since it was drawn.
    pub(crate) fn hand_offs(&self) -> u32 {
        self.handed % OF_PROCESS
    }

    pub(crate) fn order(&self) -> StampOrder {
        (self.tick, self.handed)
    }

    /// Returns the tick of a token without hand-offs. It is the token that a document without a stamp has on a replica set.
    pub(crate) fn tick_of(fence: Fence) -> Timestamp {
        Timestamp {
            time: u32::try_from(fence.0 / SECOND).unwrap_or(u32::MAX),
            increment: (fence.0 % SECOND) as u32,
        }
    }

    /// Returns the token of the next holder after a hand-off. `None`: the second of the token has no more tokens.
    pub(crate) fn after(fence: Fence) -> Option<Fence> {
        (fence.0 % SECOND + 1 < SECOND)
            .then(|| fence.0.checked_add(1).map(Fence))
            .flatten()
    }

    /// Returns the fencing token. `None`: the clock did not advance, and its second has no more tokens.
    pub(crate) fn fence(&self) -> Option<Fence> {
        let second = u64::from(self.tick.time);
        let increment = u64::from(self.tick.increment);
        let within = match self.clock() {
            Clock::Cluster => increment,
            Clock::Process => {
                let wall = self.since.timestamp_millis();
                let same_second = wall.div_euclid(1000) == i64::from(self.tick.time);
                let millisecond = if same_second { wall.rem_euclid(1000) as u64 } else { 999 };
                millisecond * 500 + increment
            }
        };
        let within = within + u64::from(self.hand_offs());
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
            handed: if clock == Clock::Process { OF_PROCESS } else { 0 },
        }
        .fence()
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
        assert!(stamp(999_999, 0).fence().is_some());
        assert_eq!(stamp(1_000_000, 0).fence(), None);
        assert_eq!(stamp(999_999, 1).fence(), None);
        assert_eq!(Stamp::after(Fence(7_999_998)), Some(Fence(7_999_999)));
        assert_eq!(Stamp::after(Fence(7_999_999)), None);
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
