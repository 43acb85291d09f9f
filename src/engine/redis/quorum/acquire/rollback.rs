//! Rolls back votes that did not lead to a grant, also those with a late or lost answer.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use redis::Cmd;
use redis::{RedisResult, Value};
use tokio_util::task::task_tracker::TaskTrackerToken;

use super::super::Quorum;
use super::super::cleanup::Remains;
use super::super::node::Vote;
use super::super::scripts::ROLLBACK;
use super::super::votes::Count;
use super::super::votes::{Answer, Votes};
use super::round::Round;
use crate::engine::redis::keys::Part;
use crate::engine::redis::wire::ReplySink;
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

/// A rollback behind a vote on the same connection.
struct FollowingRollback {
    round: Arc<Round>,
    _urgent: TaskTrackerToken,
}

impl ReplySink for FollowingRollback {
    fn on_reply(self: Arc<Self>, index: usize, reply: RedisResult<Value>) {
        // The server does not know the script; or the connection has ended, and the vote may still be executed.
        if reply.is_err() {
            self.round.roll_back_later(index, true);
        }
    }

    fn is_cancelled(&self, index: usize) -> bool {
        self.round.is_cancelled_at(index)
    }
}

impl Round {
    /// Ends the round, and returns the nodes that may have given their votes by their answers.
    ///
    /// # Behavior
    /// An unsent vote is never sent: the connection removes it before its next write. Where a node has not answered, the
    /// rollback follows the vote on the same connection, or the clean-up list of the node sends it. If most nodes have refused,
    /// such a vote is rolled back only when its answer comes (`round.rs`). A node that refused has nothing of the
    /// round: a vote is for all names or for none.
    pub(super) fn abandon(self: &Arc<Self>, answers: &[Answer<Vote>]) -> Vec<usize> {
        self.lifetime.end();
        let is_refused = Count::of(answers, |vote| matches!(vote, Vote::Granted { .. })).verdict() == Some(false);
        let mut voted = Vec::new();
        for (index, answer) in answers.iter().enumerate() {
            match answer {
                Some(answer) if self.may_hold_vote(index, answer) => voted.push(index),
                Some(_) => {}
                None => {
                    let Some(connection) = self.connection(index) else {
                        // The task of the vote reacts to the end of the request lifetime.
                        continue;
                    };
                    connection.wire.caller_left();
                    if !is_refused {
                        let behind: Arc<dyn ReplySink> = Arc::new(FollowingRollback {
                            round: self.clone(),
                            _urgent: self.quorum.urgent.token(),
                        });
                        let call = self.quorum.rollback_call(&self.claim, &self.value);
                        connection.wire.call_to_sink(&behind, index, &call);
                    }
                }
            }
        }
        voted
    }

    /// Rolls back a vote that arrived, or may arrive, after the end of its round.
    pub(super) fn roll_back_later(&self, index: usize, is_doubtful: bool) {
        // One doubtful entry is enough, because it is repeated.
        let listed = &self.listed[index];
        let is_listed = if is_doubtful {
            listed.swap(true, Relaxed)
        } else {
            listed.load(Relaxed)
        };
        if !is_listed {
            self.quorum.clean_up(index, &self.claim, self.remains(), is_doubtful);
        }
    }

    /// Adds a rollback for a failed request that the node may still execute.
    pub(super) fn watch_doubtful(&self, index: usize) {
        if self.lifetime.has_ended() {
            self.roll_back_later(index, true);
        } else if !self.listed[index].swap(true, Relaxed) {
            self.quorum.clean_up_later(index, &self.claim, self.remains());
        }
    }

    fn remains(&self) -> Remains {
        Remains::Vote {
            value: self.value.as_str().into(),
            lifetime: self.lifetime.clone(),
        }
    }
}
