//! What the server's clock shows, as far as can be told from here.
//!
//! A plain insert cannot read the server's clock. So the end of a lease that begins with one is written by an estimate,
//! which the stamp that follows (`fence.rs`) puts to the test: it shows the server's clock, and an end that does not fit is
//! corrected before anything is granted. Nobody's expiry is ever judged by the estimate: that is the server's.
//!
//! # The estimate
//! The server reads its clock after a request was sent and before it is answered, so that clock is never ahead of the
//! local one by more than what it showed less the time of sending. The smallest such difference of late is off by no more
//! than the shortest way to the server, and never too small as long as the two clocks run alike, which is what the lease
//! is meant to count from: a moment that is not before the sending. They may drift apart by [`DRIFT`] between two looks.
//! This is how NTP picks the best of its samples (RFC 5905, section 10, "clock filter").

use std::sync::{Mutex, MutexGuard, PoisonError};

use mongodb::bson::DateTime;

use crate::clock::Moment;
use crate::model::Ttl;

const MILLI: i64 = 1_000_000;
/// The server shows whole milliseconds, and rounds down.
const RESOLUTION: i64 = MILLI;
/// How far the two clocks may drift apart, in parts: a ten-thousandth. More than that is noticed by the stamp.
const DRIFT: i64 = 10_000;
/// By how much a look at the clock may contradict the estimate.
const TOLERANCE: i64 = MILLI;
/// How long a look may take on its way to the server before an end that was written counts as wrong, because that cannot be
/// told from a clock that was set ahead: this part of the ttl.
const ON_THE_WAY: i64 = 200;

/// How far the server's clock is ahead of the local one.
pub(super) struct Estimate(Mutex<Ahead>);

#[derive(Clone, Copy)]
struct Ahead {
    nanos: i64,
    /// When the server's clock was looked at last.
    seen: Moment,
}

/// An end that was written by the estimate.
#[derive(Debug, Clone, Copy)]
pub(super) struct Written {
    pub began: DateTime,
    pub expires_at: DateTime,
    /// The estimate, in nanoseconds.
    ahead: i64,
}

/// A look at the server's clock.
#[derive(Debug, Clone, Copy)]
pub(super) struct Look {
    pub shown: DateTime,
    /// When the request was sent that was answered with it.
    pub sent: Moment,
    pub answered: Moment,
}

impl Look {
    /// The difference between the clocks, and not less than that.
    fn ahead(&self) -> Ahead {
        Ahead {
            nanos: nanos(self.shown)
                .saturating_add(RESOLUTION)
                .saturating_sub(local(self.sent)),
            seen: self.answered,
        }
    }

    /// Whether the server's clock can have shown this if it is so far ahead, and if it was read no later than so.
    fn agrees_with(&self, ahead: i64, latest: i64) -> bool {
        let earliest = local(self.sent)
            .saturating_add(ahead)
            .saturating_sub(RESOLUTION + TOLERANCE);
        let latest = latest.saturating_add(ahead).saturating_add(TOLERANCE);
        (earliest..=latest).contains(&nanos(self.shown))
    }
}

impl Estimate {
    /// From a first look at the server's clock.
    pub(super) fn new(look: Look) -> Self {
        Estimate(Mutex::new(look.ahead()))
    }

    fn ahead(&self) -> MutexGuard<'_, Ahead> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Another look.
    pub(super) fn note(&self, look: Look) {
        let new = look.ahead();
        let mut ahead = self.ahead();
        let drift = (local(new.seen) - local(ahead.seen)).max(0) / DRIFT;
        *ahead = Ahead {
            // A slow look tells nothing new. One that contradicts the estimate, however slow it was, tells of a clock that was
            // set.
            nanos: match look.agrees_with(ahead.nanos, local(look.answered)) {
                true => new.nanos.min(ahead.nanos.saturating_add(drift)),
                false => new.nanos,
            },
            seen: new.seen.max(ahead.seen),
        };
    }

    /// What the server's clock shows, whatever was seen before.
    #[cfg(test)]
    pub(super) fn set(&self, look: Look) {
        *self.ahead() = look.ahead();
    }

    /// The end of a lease that begins now.
    pub(super) fn write(&self, ttl: Ttl) -> Written {
        let ahead = self.ahead().nanos;
        let now = local(Moment::now()).saturating_add(ahead).div_euclid(MILLI);
        let ttl = i64::try_from(ttl.as_millis()).unwrap_or(i64::MAX);
        Written {
            began: DateTime::from_millis(now),
            expires_at: DateTime::from_millis(now.saturating_add(ttl)),
            ahead,
        }
    }
}

impl Written {
    /// Whether the end is right, by a later look at the server's clock. It may be too early by no more than a part of what
    /// a lease is cut short by for the drift of clocks.
    pub(super) fn is_right(&self, look: Look) -> bool {
        let ttl = nanos(self.expires_at).saturating_sub(nanos(self.began));
        // How long the answer took proves nothing: it waits for the majority.
        look.agrees_with(self.ahead, local(look.sent).saturating_add(ttl / ON_THE_WAY))
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

    /// A look at a clock that showed `SERVER` at `began`, which takes so many milliseconds, all of them on the way there.
    async fn look(began: Moment, set_by: i64, takes: u64) -> Look {
        let sent = Moment::now();
        tokio::time::advance(Duration::from_millis(takes)).await;
        let answered = Moment::now();
        let shown = DateTime::from_millis(SERVER + set_by + answered_after(began, answered));
        Look { shown, sent, answered }
    }

    fn answered_after(began: Moment, answered: Moment) -> i64 {
        (local(answered) - local(began)) / MILLI
    }

    fn began_at(written: Written, ttl: Ttl) -> i64 {
        written.expires_at.timestamp_millis() - ttl.as_millis() as i64
    }

    #[tokio::test(start_paused = true)]
    async fn the_best_of_the_looks_counts() {
        let (began, ttl) = (Moment::now(), Ttl::new(Duration::from_secs(10)).unwrap());
        let estimate = Estimate::new(look(began, 0, 40).await);
        assert_eq!(
            began_at(estimate.write(ttl), ttl),
            SERVER + 40 + 41,
            "no better than the way there"
        );
        estimate.note(look(began, 0, 0).await);
        let exact = estimate.write(ttl);
        assert_eq!(began_at(exact, ttl), SERVER + 41);
        let slow = look(began, 0, 20).await;
        assert!(exact.is_right(slow));
        estimate.note(slow);
        let now = SERVER + answered_after(began, Moment::now());
        assert_eq!(
            began_at(estimate.write(ttl), ttl),
            now + 1,
            "a slow look spoils nothing"
        );
        let slower = look(began, 0, 500).await;
        assert!(!exact.is_right(slower), "the clock may have been set ahead");
        estimate.note(slower);
        let now = SERVER + answered_after(began, Moment::now());
        assert_eq!(began_at(estimate.write(ttl), ttl), now + 1, "nor does a very slow one");
    }

    #[tokio::test(start_paused = true)]
    async fn clocks_that_drift_apart_are_followed() {
        let (began, ttl) = (Moment::now(), Ttl::new(Duration::from_secs(10)).unwrap());
        let estimate = Estimate::new(look(began, 0, 0).await);
        for minute in 1..=10 {
            tokio::time::advance(Duration::from_secs(60)).await;
            estimate.note(look(began, minute * 5, 7).await);
            let now = SERVER + minute * 5 + answered_after(began, Moment::now());
            let began = began_at(estimate.write(ttl), ttl);
            assert!((now..=now + 9).contains(&began), "{began} and not {now}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_clock_that_was_set_is_noticed() {
        for set_by in [-3_600_000, -4, 60, 3_600_000] {
            let (began, ttl) = (Moment::now(), Ttl::new(Duration::from_secs(10)).unwrap());
            let estimate = Estimate::new(look(began, 0, 0).await);
            let before = estimate.write(ttl);
            let now = look(began, set_by, 1).await;
            assert!(!before.is_right(now), "{set_by}");
            estimate.note(now);
            let now = look(began, set_by, 1).await;
            assert!(estimate.write(ttl).is_right(now), "{set_by}");
        }
    }
}
