//! Rolls back votes that did not lead to a grant, also those with a late or lost answer.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::Duration;

use redis::Cmd;

use super::super::Quorum;
use super::super::cleanup::Remains;
use super::super::node::Vote;
use super::super::scripts::ROLLBACK;
use super::super::votes::{Answer, Votes};
use super::round::Round;
use crate::engine::redis::keys::Part;
use crate::model::Claim;

impl Quorum {
    /// Ends a failed round, and rolls back its votes on every node.
    ///
    /// # Behavior
    /// Returns when the rollback is executed on the nodes that gave their votes or may have given them, or after `limit`. For
    /// the other nodes see [`Round::abandon`].
    pub(super) async fn roll_back(self: &Arc<Self>, round: &Arc<Round>, answers: &[Answer<Vote>], limit: Duration) {
        let voted = round.abandon(answers);
        let call = Arc::new(self.rollback_call(&round.claim, &round.value));
        let votes = Arc::new(Votes::new(voted.len()));
        for (position, index) in voted.into_iter().enumerate() {
            let (round, call, votes) = (round.clone(), call.clone(), votes.clone());
            let urgent = self.urgent.token();
            self.spawn(async move {
                let quorum = &round.quorum;
                let answer = quorum.nodes[index].number(&ROLLBACK, &call);
                if !matches!(tokio::time::timeout(quorum.node_timeout, answer).await, Ok(Ok(_))) {
                    round.roll_back_later(index, false);
                }
                drop(urgent);
                votes.cast(position, Ok(()));
            });
        }
        votes.decide(limit, |_: &[Answer<()>]| None::<()>).await;
    }

    pub(in super::super) fn rollback_call(&self, claim: &Claim, value: &str) -> Cmd {
        self.call(&ROLLBACK, &[Part::Lock, Part::Metadata], claim, value)
    }
}

impl Round {
    /// Ends the round, and returns the nodes that may have given their votes by their answers.
    ///
    /// # Behavior
    /// An unsent vote is never sent: the connection removes it before its next write. A vote that is in flight is rolled back when
    /// its answer comes (`round.rs`), or by the clean-up list of its node when the connection has ended. A node that refused has
    /// nothing of the round: a vote is for all names or for none.
    pub(super) fn abandon(&self, answers: &[Answer<Vote>]) -> Vec<usize> {
        self.lifetime.end();
        let mut voted = Vec::new();
        for (index, answer) in answers.iter().enumerate() {
            let may_hold_vote = match answer {
                Some(answer) => self.may_hold_vote(index, answer),
                None => self.requests[index].has_voted_late.load(SeqCst),
            };
            if may_hold_vote {
                voted.push(index);
            } else if answer.is_none()
                && let Some(connection) = self.connection(index)
            {
                connection.wire.caller_left();
                let _ = self.in_flight.set(self.quorum.urgent.token());
            }
        }
        voted
    }

    /// Rolls back a vote that arrived, or may arrive, after the end of its round.
    pub(super) fn roll_back_later(&self, index: usize, is_doubtful: bool) {
        // One doubtful entry is enough, because it is repeated.
        let listed = &self.requests[index].is_listed;
        let is_listed = if is_doubtful {
            listed.swap(true, Relaxed)
        } else {
            listed.load(Relaxed)
        };
        if !is_listed {
            let remains = Remains::Vote {
                value: self.value.as_str().into(),
                lifetime: self.lifetime.clone(),
            };
            self.quorum.clean_up(index, &self.claim, remains, is_doubtful);
        }
    }
}
