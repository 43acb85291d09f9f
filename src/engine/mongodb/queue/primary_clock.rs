//! What this process knows of the primary's clock: the last reading, from an answer to a heartbeat or to an attempt.
//!
//! It is only used for events of the change stream. The stream is opened again when another primary is elected, and each opening
//! forgets the reading before the first event.

use mongodb::bson::Document;
use parking_lot::Mutex;

use crate::clock::Moment;
use crate::engine::hand_off::ClockReading;
use crate::engine::mongodb::fields::NOW;

pub(crate) struct PrimaryClock(Mutex<State>);

struct State {
    reading: Option<ClockReading>,
    /// A request that was sent earlier may have been answered by an earlier primary.
    since: Moment,
}

impl PrimaryClock {
    pub(crate) fn new() -> Self {
        let (reading, since) = (None, Moment::now());
        PrimaryClock(Mutex::new(State { reading, since }))
    }

    /// Records the clock from an answer to a command that was sent at `sent`, or later.
    pub(crate) fn read(&self, sent: Moment, answer: &Document) {
        let now = answer.get_datetime(NOW).ok();
        let Some(us) = now.and_then(|now| now.timestamp_millis().checked_mul(1000)) else {
            return;
        };
        // The server rounds down to milliseconds.
        let Ok(server_us) = u64::try_from(us.saturating_add(999)) else {
            return;
        };
        let mut state = self.0.lock();
        if sent >= state.since && state.reading.is_none_or(|last| last.sent < sent) {
            state.reading = Some(ClockReading { sent, server_us });
        }
    }

    pub(crate) fn reading(&self) -> Option<ClockReading> {
        self.0.lock().reading
    }

    /// Forgets the reading: another member may be the primary now.
    pub(crate) fn forget(&self) {
        *self.0.lock() = State {
            reading: None,
            since: Moment::now(),
        };
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use mongodb::bson::{DateTime, doc};

    use super::*;

    impl PrimaryClock {
        /// Adds to the reading. `None`: forgets it.
        pub(crate) fn step(&self, ms: Option<i64>) {
            let mut state = self.0.lock();
            state.reading = state.reading.zip(ms).map(|(reading, ms)| ClockReading {
                server_us: reading.server_us.saturating_add_signed(ms * 1000),
                ..reading
            });
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_before_a_gap_of_the_stream_is_no_reading() {
        let clock = PrimaryClock::new();
        let answer = |ms| doc! { NOW: DateTime::from_millis(ms) };
        let server_us = || clock.reading().map(|reading| reading.server_us);
        let first = Moment::now();
        clock.read(first, &answer(5000));
        assert_eq!(server_us(), Some(5_000_999), "the server rounds down");
        tokio::time::advance(Duration::from_millis(1)).await;
        let second = Moment::now();
        clock.read(second, &answer(5001));
        clock.read(first, &answer(5002));
        assert_eq!(server_us(), Some(5_001_999), "the latest request counts");
        clock.read(second, &doc! {});
        tokio::time::advance(Duration::from_millis(1)).await;
        clock.forget();
        clock.read(second, &answer(5003));
        assert_eq!(server_us(), None);
        clock.read(Moment::now(), &answer(5004));
        assert_eq!(server_us(), Some(5_004_999));
    }
}
