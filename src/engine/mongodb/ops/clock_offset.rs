//! The estimate of the server's clock.
//!
//! A plain insert cannot read the server's clock. So the end of a lease that begins with one is an estimate. The stamp that
//! follows (`fence.rs`) reads the server's clock and verifies it: an end that does not fit is corrected before anything is
//! granted. The estimate never decides whether a lease has expired; the server does.
//!
//! # The estimate
//! The server reads its clock between the sending of a request and its answer. So its clock is ahead of the local one by at
//! most the time that it returned minus the time of the sending. The smallest such difference is wrong by no more than the
//! shortest latency to the server. It is never too small while both clocks run at the same speed, and a lease must not count
//! from a moment before the sending. Between two readings the clocks may drift apart by [`DRIFT`]. NTP selects the best of its
//! samples in the same way (RFC 5905, section 10, "clock filter").

use mongodb::bson::DateTime;
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

/// How far the server's clock is ahead of the local one.
pub(crate) struct ClockOffset(Mutex<Offset>);

#[derive(Clone, Copy)]
struct Offset {
    nanos: i64,
    /// When the server's clock was last read.
    read_at: Moment,
}

/// An end that was computed from the estimate.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EstimatedEnd {
    pub began: DateTime,
    pub expires_at: DateTime,
    /// The estimate, in nanoseconds.
    offset: i64,
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
        };
    }

    /// Replaces the estimate.
    #[cfg(test)]
    pub(crate) fn set(&self, reading: ClockReading) {
        *self.0.lock() = reading.offset();
    }

    /// Estimates the end of a lease that begins now.
    pub(crate) fn end(&self, ttl: Ttl) -> EstimatedEnd {
        let offset = self.0.lock().nanos;
        let now = local(Moment::now()).saturating_add(offset).div_euclid(MILLI);
        let ttl = i64::try_from(ttl.as_millis()).unwrap_or(i64::MAX);
        EstimatedEnd {
            began: DateTime::from_millis(now),
            expires_at: DateTime::from_millis(now.saturating_add(ttl)),
            offset,
        }
    }
}

impl EstimatedEnd {
    /// Whether a later reading of the server's clock confirms the end. It may be too early by a part of the margin that a lease
    /// has for the drift of clocks.
    pub(crate) fn agrees_with(&self, reading: ClockReading) -> bool {
        let ttl = nanos(self.expires_at).saturating_sub(nanos(self.began));
        // The latency of the answer proves nothing: the stamp waits for the majority.
        reading.agrees_with(self.offset, local(reading.sent).saturating_add(ttl / LATENCY_SHARE))
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
    use std::time::Duration;

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
            began_at(offset.end(ttl), ttl),
            SERVER + 40 + 41,
            "no better than the latency"
        );
        offset.update(reading(began, 0, 0).await);
        let exact = offset.end(ttl);
        assert_eq!(began_at(exact, ttl), SERVER + 41);
        let slow = reading(began, 0, 20).await;
        assert!(exact.agrees_with(slow));
        offset.update(slow);
        let now = SERVER + answered_after(began, Moment::now());
        assert_eq!(
            began_at(offset.end(ttl), ttl),
            now + 1,
            "a slow reading changes nothing"
        );
        let slower = reading(began, 0, 500).await;
        assert!(!exact.agrees_with(slower), "the clock may have been set ahead");
        offset.update(slower);
        let now = SERVER + answered_after(began, Moment::now());
        assert_eq!(
            began_at(offset.end(ttl), ttl),
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
            let began = began_at(offset.end(ttl), ttl);
            assert!((now..=now + 9).contains(&began), "{began} and not {now}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_clock_that_was_set_is_detected() {
        for set_by in [-3_600_000, -4, 60, 3_600_000] {
            let (began, ttl) = (Moment::now(), Ttl::new(Duration::from_secs(10)).unwrap());
            let offset = ClockOffset::new(reading(began, 0, 0).await);
            let before = offset.end(ttl);
            let now = reading(began, set_by, 1).await;
            assert!(!before.agrees_with(now), "{set_by}");
            offset.update(now);
            let now = reading(began, set_by, 1).await;
            assert!(offset.end(ttl).agrees_with(now), "{set_by}");
        }
    }
}
