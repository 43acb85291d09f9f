//! Until when the session certainly lasts.
//!
//! # Behavior
//! Only a leader ends a session: `timeout` after it has recorded that the session was alive. Two leaders count.
//!
//! **The leader of this connection.** A follower answers reads from its own memory, and reports the sessions with a recent request in its
//! answers to the leader's pings, which arrive every half tick. (A session lasts at least two ticks, so half a tick is at most a
//! quarter of its timeout.) So no answer to one request says what the leader has recorded. Three do, the first two of which are syncs:
//!
//! - The answer to *j* has arrived: the follower knows that the session was alive.
//! - *k* went to the leader at least 0.3 of the timeout later, and is answered. On its way back it has passed a ping of the leader that
//!   was sent after *j*, and whose reply names the session.
//! - *m* was sent after the answer to *k*, and is answered by the leader: that reply has reached the leader before *m*.
//!
//! So this leader does not end the session before *j* was sent + timeout, however long each message was on its way. A server with a
//! new leader closes its connections, so the three have the same one. The leader itself answers the request that opens or moves a
//! session, after it has recorded it: that is *j* and *k*.
//!
//! **A later leader.** The servers may have elected one that this leader does not know of. A leader that is cut off answers syncs and
//! reads for up to `syncLimit` + 1 ticks, which may be longer than the session, and moves sessions to other connections. But it cannot
//! commit. So *m* is a commit: a multi, which the leader checks the session for, and proposes also if it changes nothing. (ZooKeeper 3.6 to
//! 3.9: `PrepRequestProcessor`, `ProposalRequestProcessor`.) A majority has accepted it after *m* was sent. One of these servers is in
//! the majority of any later leader, which it has joined after that, and with which all sessions begin again. So no later leader ends the
//! session before *m* was sent + timeout.
//!
//! So one commit is enough, and each multi of the engine is one. The engine sends one that changes nothing only if it needs a later
//! end ([`Client::lasts`](super::Client::lasts)). The syncs go on all the time, so that *j* was sent at most 0.4 of the timeout and two
//! round trips before *m*: more than half of the timeout is left for a lease that begins with *m*, if a round trip takes less than
//! 4 % of the timeout. Otherwise it waits for the next commit.
//!
//! 1 % and 2 ms are an allowance for clocks, as in [`Ttl::validity`](crate::model::Ttl::validity).

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
