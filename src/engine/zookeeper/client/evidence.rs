//! Until when the session certainly lasts.
//!
//! # Behavior
//! Only the leader ends a session. A follower answers reads from its own memory, and reports the sessions with a recent request in its
//! answers to the leader's pings, which arrive every half tick. (A session lasts at least two ticks, so half a tick is at most a
//! quarter of its timeout.) So an answered read says nothing about the session. A chain of syncs, which go to the leader, does:
//!
//! - The answer to sync *j* has arrived: the follower knows that the session is alive.
//! - Sync *k* was sent at least 0.3 of the timeout later, and is answered. On its way it has passed a ping of the leader that was
//!   sent after *j*, and whose reply names the session.
//! - Sync *m* was sent after the answer to *k*, and is answered: that reply has reached the leader before *m*.
//!
//! So the leader knows that the session was alive after *j* was sent, and the session lasts for its timeout from then on, however long
//! each message was on its way.
//!
//! A leader that was deposed answers until it notices that, for some tick after the next one was elected, with which all sessions begin
//! again. A chain is older than that. The answer to a session that moves to another connection may come from such a leader, so it counts
//! for a quarter of the timeout less. (A new session is committed by a majority.)
//!
//! 1 % and 2 ms are an allowance for clocks, as in [`Ttl::validity`](crate::model::Ttl::validity).

use std::collections::VecDeque;
use std::time::Duration;

use crate::clock::Moment;

/// The number of syncs in a session timeout. With a chain of eight of them, more than half of the timeout always remains.
const SYNCS: u32 = 20;

/// The syncs of one connection, the oldest first.
#[derive(Debug)]
pub(super) struct Evidence {
    timeout: Duration,
    /// When each was sent and answered.
    syncs: VecDeque<(Moment, Moment)>,
}

impl Evidence {
    /// Begins with the request that has opened the session or moved it (`has_moved`), which the leader has answered. Returns the
    /// evidence, and until when the session lasts.
    pub(super) fn new(timeout: Duration, sent: Moment, answered: Moment, has_moved: bool) -> (Self, Moment) {
        let evidence = Evidence {
            timeout,
            syncs: VecDeque::from([(sent, answered)]),
        };
        let doubt = if has_moved { timeout / 4 } else { Duration::ZERO };
        let until = evidence.end(sent) - doubt;
        (evidence, until)
    }

    /// Returns the time between two syncs.
    pub(super) fn interval(&self) -> Duration {
        self.timeout / SYNCS
    }

    /// Records the answer to a sync. Returns until when the session lasts, if it is known.
    pub(super) fn answered(&mut self, sent: Moment, answered: Moment) -> Option<Moment> {
        while self
            .syncs
            .front()
            .is_some_and(|(oldest, _)| *oldest + self.timeout < sent)
        {
            self.syncs.pop_front();
        }
        let latest = |before: Moment| self.syncs.iter().rev().find(|(_, answered)| *answered <= before);
        let chain = latest(sent).and_then(|(middle, _)| latest(*middle - self.timeout * 3 / 10));
        let until = chain.map(|(first, _)| self.end(*first));
        self.syncs.push_back((sent, answered));
        until
    }

    fn end(&self, sent: Moment) -> Moment {
        sent + (self.timeout - self.timeout / 100).saturating_sub(Duration::from_millis(2))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const T: Duration = Duration::from_secs(10);

    fn at(ms: u64) -> Moment {
        Moment::from_nanos(1_000_000_000_000 + ms * 1_000_000)
    }

    /// Half of the timeout remains at each moment, also where each answer takes 300 ms.
    #[test]
    fn half_of_the_timeout_always_remains() {
        for round_trip in [0, 1, 100, 300] {
            let (mut evidence, mut until) = Evidence::new(T, at(0), at(round_trip), false);
            let interval = evidence.interval().as_millis() as u64;
            for index in 1..100 {
                let (sent, answered) = (index * interval, index * interval + round_trip);
                // Just before the answer.
                assert!(until > at(answered) + T / 2, "{round_trip} ms, sync {index}");
                if let Some(later) = evidence.answered(at(sent), at(answered)) {
                    until = until.max(later);
                }
                assert!(until < at(sent) + T, "{round_trip} ms, sync {index}");
            }
        }
    }

    /// The leader may be a deposed one. A quarter of the timeout always remains.
    #[test]
    fn a_session_that_moves_counts_less() {
        let (mut evidence, mut until) = Evidence::new(T, at(0), at(1), true);
        assert_eq!(until, at(9898 - 2500));
        for sent in (500..6000).step_by(500) {
            assert!(until > at(sent + 1) + T / 4, "{sent}");
            until = evidence
                .answered(at(sent), at(sent + 1))
                .map_or(until, |later| later.max(until));
        }
    }

    /// The syncs were stopped on their way for 5 s and arrived together: they say nothing about the time between.
    #[test]
    fn syncs_that_arrived_together_are_no_chain() {
        let (mut evidence, until) = Evidence::new(T, at(0), at(1), false);
        assert_eq!(until, at(9898));
        let late: Vec<_> = (1..10)
            .map(|index| evidence.answered(at(500 * index), at(5000)))
            .collect();
        assert!(late.iter().flatten().all(|later| *later == at(9898)), "{late:?}");
        // The next chain begins with their answers.
        assert_eq!(evidence.answered(at(5100), at(5101)), Some(at(9898)));
        assert_eq!(evidence.answered(at(8050), at(8051)), Some(at(9898)));
        assert_eq!(evidence.answered(at(8100), at(8101)), Some(at(4500 + 9898)));
    }

    /// The rule of reads, where any answer counts, believed in a session that the leader had ended.
    #[test]
    fn one_answer_is_no_evidence() {
        let (mut evidence, _) = Evidence::new(T, at(0), at(1), false);
        assert_eq!(evidence.answered(at(2000), at(2001)), None);
        assert_eq!(evidence.answered(at(2500), at(2501)), None);
        assert_eq!(evidence.answered(at(3010), at(3011)), None);
        assert_eq!(evidence.answered(at(3020), at(3021)), Some(at(9898)));
    }
}
