//! What this process knows of the primary's clock: the last reading, from an answer to a heartbeat or to an attempt.
//! The driver resumes a broken change stream on the next primary, without a gap. So a reading counts until this process
//! has seen the next election.

use mongodb::bson::Document;
use mongodb::bson::oid::ObjectId;
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::clock::Moment;
use crate::engine::hand_off::ClockReading;
use crate::engine::mongodb::fields::NOW;

pub(crate) struct PrimaryClock {
    /// The last election of a primary.
    election: watch::Receiver<Option<ObjectId>>,
    state: Mutex<State>,
}

struct State {
    reading: Option<ClockReading>,
    /// The election of the primary that answered.
    election: Option<ObjectId>,
    /// A request that was sent earlier may have been answered by an earlier primary.
    since: Moment,
}

impl State {
    fn new(election: Option<ObjectId>) -> Self {
        State {
            reading: None,
            election,
            since: Moment::now(),
        }
    }
}

impl PrimaryClock {
    pub(crate) fn new(election: watch::Receiver<Option<ObjectId>>) -> Self {
        let state = State::new(*election.borrow());
        PrimaryClock {
            election,
            state: Mutex::new(state),
        }
    }

    /// Returns the state, without a reading from before the last election.
    fn state(&self) -> parking_lot::MutexGuard<'_, State> {
        let mut state = self.state.lock();
        let election = *self.election.borrow();
        if state.election != election {
            *state = State::new(election);
        }
        state
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
        let mut state = self.state();
        if sent >= state.since && state.reading.is_none_or(|last| last.sent < sent) {
            state.reading = Some(ClockReading { sent, server_us });
        }
    }

    pub(crate) fn reading(&self) -> Option<ClockReading> {
        self.state().reading
    }

    /// Forgets the reading: another member may be the primary now.
    pub(crate) fn forget(&self) {
        let mut state = self.state();
        *state = State::new(state.election);
    }

    /// Adds to the reading. `None`: forgets it.
    #[cfg(test)]
    pub(crate) fn step(&self, ms: Option<i64>) {
        let mut state = self.state();
        state.reading = state.reading.zip(ms).map(|(reading, ms)| ClockReading {
            server_us: reading.server_us.saturating_add_signed(ms * 1000),
            ..reading
        });
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use mongodb::bson::{DateTime, doc};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_request_before_a_gap_of_the_stream_is_no_reading() {
        let clock = PrimaryClock::new(watch::channel(None).1);
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
    #[tokio::test(start_paused = true)]
    async fn a_reading_from_before_an_election_is_not_used() {
        let elections = watch::Sender::new(Some(ObjectId::new()));
        let clock = PrimaryClock::new(elections.subscribe());
        let answer = |ms| doc! { NOW: DateTime::from_millis(ms) };
        let server_us = || clock.reading().map(|reading| reading.server_us);
        let before = Moment::now();
        clock.read(before, &answer(5000));
        assert_eq!(server_us(), Some(5_000_999));
        tokio::time::advance(Duration::from_millis(1)).await;
        elections.send_replace(Some(ObjectId::new()));
        assert_eq!(server_us(), None);
        clock.read(before, &answer(5001));
        assert_eq!(server_us(), None, "the earlier primary may have answered");
        clock.read(Moment::now(), &answer(5002));
        assert_eq!(server_us(), Some(5_002_999));
    }
}
