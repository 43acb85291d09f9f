//! The estimate of the server's clock.
//!
//! A plain insert cannot read the server's clock. So the end of a lease that begins with one is an estimate. It is verified before
//! anything is granted: by the time of the insert, with a margin, or by the stamp that follows (`fence.rs`), which reads the
//! server's clock and corrects an end that does not fit. The estimate never decides whether a lease has expired; the server does.
//!
//! # The estimate
//! The server reads its clock between the sending of a request and its answer. So its clock is ahead of the local one by at
//! most the time that it returned minus the time of the sending. The smallest such difference is wrong by no more than the
//! shortest latency to the server. It is never too small while both clocks run at the same speed, and a lease must not count
//! from a moment before the sending. Between two readings the clocks may drift apart by [`DRIFT`]. NTP selects the best of its
//! samples in the same way (RFC 5905, section 10, "clock filter").

use std::time::Duration;

use mongodb::bson::{DateTime, Timestamp};
use parking_lot::Mutex;

use crate::clock::Moment;
use crate::model::Ttl;

const MILLI: i64 = 1_000_000;
/// The server returns whole milliseconds, rounded down.
const RESOLUTION: i64 = MILLI;
/// Maximum drift between the two clocks: one part in ten thousand. The stamp detects a larger one.
const DRIFT: i64 = 10_000;
/// The difference by which a reading may contradict the estimate.
const TOLERANCE: i64 = MILLI;
/// The part of the ttl that a reading may take to the server. If it takes longer, the end counts as wrong, because the clock may
/// have been set ahead.
const LATENCY_SHARE: i64 = 200;

/// How much later than the estimate a lease ends whose grant is one write (`fence.rs`).
const MARGIN: Duration = Duration::from_secs(2);
/// The shortest such lease.
pub(crate) const SHORTEST_WITH_MARGIN: Duration = Duration::from_secs(5);
/// The server takes the seconds of its timestamps from a clock that is a few milliseconds late.
const COARSE_MS: i64 = 100;
/// How long a reading of the server's clock counts as recent.
const RECENT: Duration = Duration::from_secs(60);
/// How long no end has [`MARGIN`] after a timestamp refused one. While the cluster time is ahead of the primary's clock, it refuses
/// all of them, and each would cost two more writes: the stamp and the correction of the end.
const SUSPENSION: Duration = Duration::from_secs(1);

/// How far the server's clock is ahead of the local one.
pub(crate) struct ClockOffset(Mutex<Offset>);

#[derive(Clone, Copy)]
struct Offset {
    nanos: i64,
    /// When the server's clock was last read.
    read_at: Moment,
    /// When a timestamp last refused an end with a margin.
    refused_at: Option<Moment>,
}

/// An end that was computed from the estimate.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EstimatedEnd {
    pub began: DateTime,
    pub expires_at: DateTime,
    /// The estimate, in nanoseconds.
    offset: i64,
    /// The time that a reading may take to the server, in nanoseconds.
    max_latency: i64,
    /// Whether it is later than the estimate, by [`MARGIN`].
    has_margin: bool,
}

/// A reading of the server's clock.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ClockReading {
    pub time: DateTime,
    /// When the request was sent that returned the time.
    pub sent: Moment,
    pub answered: Moment,
}

impl ClockReading {
    /// Returns an upper bound of the difference between the clocks.
    fn offset(&self) -> Offset {
        Offset {
            nanos: nanos(self.time)
                .saturating_add(RESOLUTION)
                .saturating_sub(local(self.sent)),
            read_at: self.answered,
            refused_at: None,
        }
    }

    /// Whether the server's clock can have had this time if its offset is `offset` and it was read no later than `latest`.
    fn agrees_with(&self, offset: i64, latest: i64) -> bool {
        let earliest = local(self.sent)
            .saturating_add(offset)
            .saturating_sub(RESOLUTION + TOLERANCE);
        let latest = latest.saturating_add(offset).saturating_add(TOLERANCE);
        (earliest..=latest).contains(&nanos(self.time))
    }
}

impl ClockOffset {
    /// Creates the estimate from a first reading.
    pub(crate) fn new(reading: ClockReading) -> Self {
        ClockOffset(Mutex::new(reading.offset()))
    }

    /// Improves the estimate by another reading.
    pub(crate) fn update(&self, reading: ClockReading) {
        let new = reading.offset();
        let mut offset = self.0.lock();
        let drift = (local(new.read_at) - local(offset.read_at)).max(0) / DRIFT;
        *offset = Offset {
            // A slow reading adds no information. One that contradicts the estimate means that a clock was set.
            nanos: match reading.agrees_with(offset.nanos, local(reading.answered)) {
                true => new.nanos.min(offset.nanos.saturating_add(drift)),
                false => new.nanos,
            },
            read_at: new.read_at.max(offset.read_at),
            refused_at: offset.refused_at,
        };
    }

    /// Makes the last reading an old one.
    #[cfg(test)]
    pub(crate) fn forget(&self) {
        let mut offset = self.0.lock();
        offset.read_at = offset.read_at - RECENT;
    }

    /// Replaces the estimate.
    #[cfg(test)]
    pub(crate) fn set(&self, reading: ClockReading) {
        *self.0.lock() = reading.offset();
    }

    /// Whether a timestamp can verify an end with [`MARGIN`]: the server's clock was read recently, and no timestamp refused such an
    /// end within [`SUSPENSION`]. (A server clock that was set back since the reading is not detected.)
    pub(crate) fn allows_margin(&self) -> bool {
        let offset = self.0.lock();
        let is_suspended = offset.refused_at.is_some_and(|at| at.elapsed() < SUSPENSION);
        offset.read_at.elapsed() < RECENT && !is_suspended
    }

    /// Whether a timestamp verifies an end with [`MARGIN`]. If not, the next ends have none.
    pub(crate) fn is_verified(&self, end: &EstimatedEnd, tick: Timestamp) -> bool {
        let is_verified = end.agrees_with_tick(tick);
        if !is_verified {
            self.0.lock().refused_at = Some(Moment::now());
        }
        is_verified
    }

    /// Estimates the end of a lease that begins now, if `has_margin` plus [`MARGIN`].
    pub(crate) fn end(&self, ttl: Ttl, has_margin: bool) -> EstimatedEnd {
        let offset = self.0.lock().nanos;
        let now = local(Moment::now()).saturating_add(offset).div_euclid(MILLI);
        let ttl = i64::try_from(ttl.as_millis()).unwrap_or(i64::MAX);
        let margin = if has_margin { MARGIN.as_millis() as i64 } else { 0 };
        EstimatedEnd {
            began: DateTime::from_millis(now),
            expires_at: DateTime::from_millis(now.saturating_add(ttl).saturating_add(margin)),
            offset,
            max_latency: ttl.saturating_mul(MILLI) / LATENCY_SHARE,
            has_margin,
        }
    }
}

impl EstimatedEnd {
    /// Whether a later reading of the server's clock confirms an end without [`MARGIN`]. It may be too early by a part of the
    /// margin that a lease has for the drift of clocks.
    pub(crate) fn agrees_with(&self, reading: ClockReading) -> bool {
        if self.has_margin {
            return false;
        }
        // The latency of the answer proves nothing: the stamp waits for the majority.
        reading.agrees_with(self.offset, local(reading.sent).saturating_add(self.max_latency))
    }

    /// Whether the timestamp of the oplog entry of the write confirms an end with [`MARGIN`].
    ///
    /// # Behavior
    /// The seconds of a timestamp are never behind the primary's wall clock. So that clock was below the next second when it
    /// wrote the document, and the lease ends at least its ttl later. An estimate that is ahead of that second is too late.
    fn agrees_with_tick(&self, tick: Timestamp) -> bool {
        if !self.has_margin {
            return false;
        }
        let began = self.began.timestamp_millis();
        let next_second = (i64::from(tick.time) + 1) * 1000;
        let latest = next_second + COARSE_MS;
        began + MARGIN.as_millis() as i64 >= latest && began <= latest
    }
}

fn nanos(time: DateTime) -> i64 {
    time.timestamp_millis().saturating_mul(MILLI)
}

fn local(moment: Moment) -> i64 {
    i64::try_from(moment.to_nanos()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SERVER: i64 = 1_800_000_000_000;

    /// Reads a clock that had `SERVER` at `began`, with a latency in milliseconds, all of it before the reading.
    async fn reading(began: Moment, set_by: i64, latency: u64) -> ClockReading {
        let sent = Moment::now();
        tokio::time::advance(Duration::from_millis(latency)).await;
        let answered = Moment::now();
        let time = DateTime::from_millis(SERVER + set_by + answered_after(began, answered));
        ClockReading { time, sent, answered }
    }

    fn answered_after(began: Moment, answered: Moment) -> i64 {
        (local(answered) - local(began)) / MILLI
    }

    fn began_at(end: EstimatedEnd, ttl: Ttl) -> i64 {
        end.expires_at.timestamp_millis() - ttl.as_millis() as i64
    }

    #[tokio::test(start_paused = true)]
    async fn the_best_reading_is_used() {
        let (began, ttl) = (Moment::now(), Ttl::new(Duration::from_secs(10)).unwrap());
        let offset = ClockOffset::new(reading(began, 0, 40).await);
        assert_eq!(
            began_at(offset.end(ttl, false), ttl),
            SERVER + 40 + 41,
            "no better than the latency"
        );
        offset.update(reading(began, 0, 0).await);
        let exact = offset.end(ttl, false);
        assert_eq!(began_at(exact, ttl), SERVER + 41);
        let slow = reading(began, 0, 20).await;
        assert!(exact.agrees_with(slow));
        offset.update(slow);
        let now = SERVER + answered_after(began, Moment::now());
        assert_eq!(
            began_at(offset.end(ttl, false), ttl),
            now + 1,
            "a slow reading changes nothing"
        );
        let slower = reading(began, 0, 500).await;
        assert!(!exact.agrees_with(slower), "the clock may have been set ahead");
        offset.update(slower);
        let now = SERVER + answered_after(began, Moment::now());
        assert_eq!(
            began_at(offset.end(ttl, false), ttl),
            now + 1,
            "a very slow reading changes nothing"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn clocks_that_drift_apart_are_followed() {
        let (began, ttl) = (Moment::now(), Ttl::new(Duration::from_secs(10)).unwrap());
        let offset = ClockOffset::new(reading(began, 0, 0).await);
        for minute in 1..=10 {
            tokio::time::advance(Duration::from_secs(60)).await;
            offset.update(reading(began, minute * 5, 7).await);
            let now = SERVER + minute * 5 + answered_after(began, Moment::now());
            let began = began_at(offset.end(ttl, false), ttl);
            assert!((now..=now + 9).contains(&began), "{began} and not {now}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_clock_that_was_set_is_detected() {
        for set_by in [-3_600_000, -4, 60, 3_600_000] {
            let (began, ttl) = (Moment::now(), Ttl::new(Duration::from_secs(10)).unwrap());
            let offset = ClockOffset::new(reading(began, 0, 0).await);
            let before = offset.end(ttl, false);
            let now = reading(began, set_by, 1).await;
            assert!(!before.agrees_with(now), "{set_by}");
            offset.update(now);
            let now = reading(began, set_by, 1).await;
            assert!(offset.end(ttl, false).agrees_with(now), "{set_by}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_end_with_a_margin_is_confirmed_by_a_timestamp_that_is_not_too_late() {
        let (began, ttl) = (Moment::now(), Ttl::new(Duration::from_secs(10)).unwrap());
        for (set_by, after, confirmed) in [
            (0, 0, true),
            // The write reached the server within the margin, or later.
            (0, 800, true),
            (0, 1900, false),
            // The server's clock was set ahead, or back.
            (1100, 0, false),
            (-1300, 0, false),
            (3_600_000, 0, false),
            (-3_600_000, 0, false),
        ] {
            let offset = ClockOffset::new(reading(began, 0, 0).await);
            let end = offset.end(ttl, true);
            let written = SERVER + answered_after(began, Moment::now()) + set_by + after;
            let tick = Timestamp {
                time: (written / 1000) as u32,
                increment: 1,
            };
            let lasts = end.expires_at.timestamp_millis() - written;
            assert_eq!(end.agrees_with_tick(tick), confirmed, "{set_by} {after}: {lasts}");
        }
    }

    /// The clock of the server may have any fraction of a second.
    #[tokio::test(start_paused = true)]
    async fn a_confirmed_end_is_at_least_the_ttl_after_the_write() {
        let (began, ttl) = (Moment::now(), Ttl::new(Duration::from_secs(10)).unwrap());
        let offset = ClockOffset::new(reading(began, 0, 0).await);
        let end = offset.end(ttl, true);
        for late in (-4000..4000).step_by(7) {
            let written = end.began.timestamp_millis() + late;
            let tick = Timestamp {
                time: (written / 1000) as u32,
                increment: 1,
            };
            let lasts = end.expires_at.timestamp_millis() - written;
            if end.agrees_with_tick(tick) {
                assert!((10_000..13_200).contains(&lasts), "{late}: {lasts}");
            } else {
                assert!(!(-90..900).contains(&late), "{late}");
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_reading_is_recent_for_a_minute() {
        let offset = ClockOffset::new(reading(Moment::now(), 0, 0).await);
        tokio::time::advance(RECENT - Duration::from_millis(1)).await;
        assert!(offset.allows_margin());
        tokio::time::advance(Duration::from_millis(1)).await;
        assert!(!offset.allows_margin());
        offset.update(reading(Moment::now(), 0, 0).await);
        assert!(offset.allows_margin());
    }

    /// A grant whose end is refused costs three writes, any other one with a stamp costs two.
    #[tokio::test(start_paused = true)]
    async fn a_cluster_time_that_is_ahead_refuses_one_end_per_second() {
        let (began, ttl) = (Moment::now(), Ttl::new(Duration::from_secs(10)).unwrap());
        let offset = ClockOffset::new(reading(began, 0, 0).await);
        let ahead = Timestamp {
            time: (SERVER / 1000) as u32 + 100,
            increment: 1,
        };
        let mut refused = 0;
        for _ in 0..1000 {
            if offset.allows_margin() {
                refused += u32::from(!offset.is_verified(&offset.end(ttl, true), ahead));
            }
            offset.update(reading(began, 0, 10).await);
        }
        assert_eq!(refused, 10, "in ten seconds");
    }
}
