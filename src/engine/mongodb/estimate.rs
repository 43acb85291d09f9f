//! What the server's clock shows, as far as can be told from here.
//!
//! A plain insert cannot read the server's clock. So the end of a lease that begins with one is written by an estimate,
//! which the stamp that follows (`fence.rs`) puts to the test: it shows the server's clock, and an end that does not fit
//! is corrected before anything is granted. Nothing is ever judged by the estimate itself.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use mongodb::bson::DateTime;

use crate::clock::Moment;
use crate::model::Ttl;

/// The server shows whole milliseconds, and rounds down.
const RESOLUTION: i64 = 1;
/// By how much a lease may last longer in the store than was asked for.
const SLACK: i64 = 100;
/// An estimate that was too high comes down by this part of the difference with each look at the clock.
const DESCENT: i64 = 8;

/// How far the server's clock is ahead of the local one, in milliseconds: rather more than less.
pub(super) struct Estimate(Mutex<i64>);

/// An end that was written by the estimate.
#[derive(Debug, Clone, Copy)]
pub(super) struct Written {
    pub expires_at: DateTime,
    sent: Moment,
}

impl Estimate {
    /// From a first look at the server's clock, in an answer to what was sent at `sent`.
    pub(super) fn new(shown: DateTime, sent: Moment) -> Self {
        Estimate(Mutex::new(ahead(shown, sent)))
    }

    fn ahead(&self) -> MutexGuard<'_, i64> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Another look. It is the slowest of the recent requests that counts: the server's clock was not read before the
    /// request was sent, so that too long a way makes the estimate too high.
    pub(super) fn note(&self, shown: DateTime, sent: Moment) {
        let seen = ahead(shown, sent);
        let mut ahead = self.ahead();
        *ahead = match *ahead - seen {
            // The clock was set back.
            SLACK.. => seen,
            above @ 1.. => *ahead - (above / DESCENT),
            ..=0 => seen,
        };
    }

    /// What the server's clock shows, whatever was seen before.
    #[cfg(test)]
    pub(super) fn set(&self, shown: DateTime, sent: Moment) {
        *self.ahead() = ahead(shown, sent);
    }

    /// The end of a lease that begins now.
    pub(super) fn write(&self, ttl: Ttl) -> Written {
        let sent = Moment::now();
        let now = local(sent) + *self.ahead() + RESOLUTION;
        Written {
            expires_at: DateTime::from_millis(now + millis(ttl.duration())),
            sent,
        }
    }
}

impl Written {
    /// Whether the end is right, by a look at the server's clock in an answer to what was sent at `sent`: not before a
    /// whole ttl after the name was asked for, and not much later.
    pub(super) fn is_right(&self, shown: DateTime, sent: Moment, ttl: Ttl) -> bool {
        let between = sent.to_nanos().saturating_sub(self.sent.to_nanos()) / 1_000_000;
        let began_by = shown.timestamp_millis() + RESOLUTION - between as i64;
        let begins = self.expires_at.timestamp_millis() - millis(ttl.duration());
        begins >= began_by && begins <= shown.timestamp_millis() + SLACK
    }
}

fn ahead(shown: DateTime, sent: Moment) -> i64 {
    shown.timestamp_millis() + RESOLUTION - local(sent)
}

fn local(moment: Moment) -> i64 {
    (moment.to_nanos() / 1_000_000) as i64
}

fn millis(duration: Duration) -> i64 {
    duration.as_nanos().div_ceil(1_000_000) as i64
}

#[cfg(test)]
mod tests {
    use super::*;

    const TTL: Duration = Duration::from_secs(10);

    fn ttl() -> Ttl {
        Ttl::new(TTL).unwrap()
    }

    fn at(millis: i64) -> DateTime {
        DateTime::from_millis(millis)
    }

    #[tokio::test(start_paused = true)]
    async fn an_end_is_right_when_it_is_a_ttl_after_the_asking() {
        let estimate = Estimate::new(at(1_000_000), Moment::now());
        let written = estimate.write(ttl());
        let sent = Moment::now();
        assert!(written.is_right(at(1_000_000), sent, ttl()));
        assert!(
            !written.is_right(at(1_000_050), sent, ttl()),
            "the clock was ahead of what was thought"
        );
        assert!(!written.is_right(at(999_800), sent, ttl()), "it was set back");
        tokio::time::advance(Duration::from_millis(40)).await;
        assert!(
            written.is_right(at(1_000_040), Moment::now(), ttl()),
            "the stamp was asked for later"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn the_estimate_follows_the_slowest_and_comes_down_slowly() {
        let estimate = Estimate::new(at(1_000_000), Moment::now());
        estimate.note(at(1_000_020), Moment::now());
        let high = *estimate.ahead();
        estimate.note(at(1_000_000), Moment::now());
        assert_eq!(*estimate.ahead(), high - 2);
        for _ in 0..100 {
            estimate.note(at(1_000_000), Moment::now());
        }
        assert!(*estimate.ahead() < high - 10);
        estimate.note(at(500_000), Moment::now());
        assert_eq!(*estimate.ahead(), high - 20 - 500_000, "the clock was set back");
    }
}
