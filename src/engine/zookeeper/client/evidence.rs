//! Until when the session certainly lasts. `docs/proofs/zookeeper-session.md` has the proof.
//!
//! # Behavior
//! Only a leader ends a session: `timeout` after it has recorded that the session was alive. A follower that has lost its leader still
//! answers reads, and a leader without followers answers syncs. So one answer proves nothing, and three do:
//!
//! - the answer to a sync *j*,
//! - the answer to a sync *k* that was sent at least 0.3 of the timeout after *j*: the leader has recorded the session after *j* was sent,
//! - the answer to a commit *m* (a multi) that was sent after the answer to *k*: there was no later leader when *m* was sent.
//!
//! So the session lasts until *j* was sent + timeout by this leader, and until *m* was sent + timeout by any later one, minus 1 % and 2 ms for
//! clocks. Syncs are sent all the time, each multi of a call is such a commit, and [`Client::lasts`](super::Client::lasts) sends one that
//! changes nothing if a later end is needed.

use std::collections::VecDeque;
use std::time::Duration;

use crate::clock::Moment;

/// The number of syncs in a session timeout, at least.
const SYNCS: u32 = 20;
/// The longest time between two of them: a server that does not answer a sync is left.
const LONGEST_INTERVAL: Duration = Duration::from_millis(500);

/// Returns the time between two syncs.
pub(super) fn interval(timeout: Duration) -> Duration {
    LONGEST_INTERVAL.min(timeout / SYNCS)
}

/// What the syncs of one connection have shown.
#[derive(Debug)]
pub(super) struct Evidence {
    timeout: Duration,
    /// When each was sent and answered, the oldest first.
    syncs: VecDeque<(Moment, Moment)>,
    /// The leader has recorded the session after this moment, or does so before it executes the next request.
    recorded: Moment,
}

impl Evidence {
    /// Begins with the request that has opened or moved the session.
    pub(super) fn new(timeout: Duration, sent: Moment, answered: Moment) -> Self {
        Evidence {
            timeout,
            syncs: VecDeque::from([(sent, answered)]),
            recorded: sent,
        }
    }

    /// Records the answer to a sync.
    pub(super) fn answered(&mut self, sent: Moment, answered: Moment) {
        let is_earlier = |(_, answered): &(Moment, Moment)| *answered + self.timeout * 3 / 10 <= sent;
        while let Some((first, _)) = self.syncs.pop_front_if(|sync| is_earlier(sync)) {
            self.recorded = first;
        }
        self.syncs.push_back((sent, answered));
    }

    /// Returns until when the session lasts if a majority commits a request that is sent now.
    pub(super) fn until(&self) -> Moment {
        self.recorded + (self.timeout - self.timeout / 100).saturating_sub(Duration::from_millis(2))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const T: Duration = Duration::from_secs(10);

    fn at(ms: u64) -> Moment {
        Moment::from_nanos(1_000_000_000_000 + ms * 1_000_000)
    }

    /// Half of the timeout remains for a commit at each moment, also where each answer takes 400 ms.
    #[test]
    fn half_of_the_timeout_remains_after_a_commit() {
        let round_trips = [0, 1, 100, 300, 400];
        for (timeout, round_trip) in [T, 30 * T].into_iter().flat_map(|t| round_trips.map(|trip| (t, trip))) {
            let mut evidence = Evidence::new(timeout, at(0), at(round_trip));
            let interval = interval(timeout).as_millis() as u64;
            assert_eq!(interval, 500, "a silent server is left soon");
            for index in 1..1000 {
                let (sent, answered) = (index * interval, index * interval + round_trip);
                // Just before the answer.
                assert!(
                    evidence.until() > at(answered) + timeout / 2,
                    "{round_trip} ms, sync {index}"
                );
                evidence.answered(at(sent), at(answered));
                assert!(evidence.until() < at(sent) + timeout, "{round_trip} ms, sync {index}");
            }
        }
    }

    /// The syncs were stopped on their way for 5 s and arrived together: they say nothing about the time between.
    #[test]
    fn syncs_that_arrived_together_are_no_evidence() {
        let mut evidence = Evidence::new(T, at(0), at(1));
        for sent in (500..5000).step_by(500) {
            evidence.answered(at(sent), at(5000));
            assert_eq!(evidence.until(), at(9898), "{sent}");
        }
        evidence.answered(at(7900), at(7901));
        assert_eq!(evidence.until(), at(9898));
        // Their answers are the first ones of the next three.
        evidence.answered(at(8000), at(8001));
        assert_eq!(evidence.until(), at(4500 + 9898));
    }
}
