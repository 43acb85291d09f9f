//! The fencing token of a grant: a value of the server's logical clock (the cluster time).
//!
//! `docs/proofs/mongodb-tokens.md` proves that each token is larger than every earlier one of its name, although a release deletes
//! the document with the last one. The token comes from one of three places:
//!
//! - **The insert** (replica set, leases of 5 s and longer): `operationTime` of the reply to an insert with the full write concern. It
//!   counts only if this very command made the insert, and the estimated end fits (`clock_offset.rs`).
//! - **The stamp**, a second write: `{ $currentDate: { fence: { $type: "timestamp" } } }`, which the server evaluates within the storage
//!   transaction that writes it. A pipeline cannot: it reads its values when the command starts.
//! - **A hand-off**: the last token + 1, in the releasing write or in the one that confirms a reservation. After [`MAX_HAND_OFFS`] of them a
//!   stamp follows all the same, so that the tokens of a second suffice.
//!
//! The token of a replica set is `seconds × 10⁶ + increment`. The logical clock of a standalone server starts with the process, so its token
//! is `seconds × 10⁶ + millisecond × 500 + increment`, and its stamp is marked ([`OF_PROCESS`]).

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
