//! One round: the request for a vote to each node, and the handling of the answers.
//!
//! A vote is requested by `acquire.lua`, or by plain commands (`requests.rs`).

use std::sync::atomic::{AtomicBool, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, OnceLock};

use redis::{Cmd, Value};
use tokio_util::task::task_tracker::TaskTrackerToken;

use super::super::node::{Vote, common_time, may_still_execute};
use super::super::request_lifetime::RequestLifetime;
use super::super::scripts::ACQUIRE;
use super::super::votes::Votes;
use super::super::{Quorum, VOTED};
use super::requests::NodeRequest;
use crate::engine::attempt_queue::Permit;
use crate::engine::redis::connection::LATE_REPLY;
use crate::engine::redis::error::Failure;
use crate::engine::redis::keys::RECORD_KEPT_MS;
use crate::model::Claim;

/// The round of one attempt. Its votes and its rollback share it.
pub(super) struct Round {
    pub(super) quorum: Arc<Quorum>,
    pub(super) claim: Claim,
    /// The number of the attempt.
    pub(super) number: u64,
    /// The value of the lock keys on the nodes that gave their votes.
    pub(super) value: String,
    pub(super) lifetime: Arc<RequestLifetime>,
    pub(super) votes: Votes<Vote>,
    /// Keeps the attempt counted until its last vote is answered or its connection has ended.
    permit: OnceLock<Permit>,
    /// Set when the round is abandoned while a vote is in flight: a close waits until it is answered, and rolled back.
    pub(super) in_flight: OnceLock<TaskTrackerToken>,
    /// The estimate of the nodes' clocks, in µs.
    pub(super) floor: u64,
    /// The requests, node by node.
    pub(super) requests: Box<[NodeRequest]>,
}

impl Round {
    /// Requests the vote of every node.
    pub(super) fn begin(quorum: &Arc<Quorum>, claim: &Claim) -> Arc<Self> {
        let number = quorum.next_attempt();
        let floor = quorum.next_floor(common_time(quorum.nodes.iter().map(|node| &**node)));
        let (lifetime, is_first) = quorum.lifetimes.begin(&claim.owner);
        quorum.nodes.iter().for_each(|node| node.asked());
        let round = Arc::new(Round {
            quorum: quorum.clone(),
            value: format!("{}.{number}", claim.owner.as_str()),
            number,
            lifetime,
            votes: Votes::new(quorum.nodes.len()),
            permit: OnceLock::new(),
            in_flight: OnceLock::new(),
            floor,
            requests: quorum.plan_requests(claim, floor, is_first),
            claim: claim.clone(),
        });
        round.request_votes(is_first);
        round
    }

    /// Keeps the permit of an attempt that ended without the answer of a majority: its votes may not have been sent yet.
    pub(super) fn keep_permit(&self, permit: Permit) {
        // A round ends once.
        let _ = self.permit.set(permit);
    }

    /// Returns the call of the script.
    pub(super) fn call(&self) -> Cmd {
        let claim = &self.claim;
        let ttl = claim.ttl.as_millis();
        let parts = if claim.metadata.is_some() {
            &VOTED[..]
        } else {
            &VOTED[..3]
        };
        let mut call = self.quorum.call(&ACQUIRE, parts, claim, claim.owner.as_str());
        call.arg(self.number)
            .arg(ttl)
            .arg(ttl + RECORD_KEPT_MS)
            .arg(self.floor)
            .arg(claim.process.pid)
            .arg(&claim.process.host);
        if let Some(metadata) = &claim.metadata {
            call.arg(&**metadata);
        }
        call
    }

    pub(super) fn request_in_task(self: &Arc<Self>, index: usize) {
        let round = self.clone();
        self.quorum.spawn(async move {
            let is_sent = AtomicBool::new(false);
            // A vote that is unsent when the request lifetime ends is never sent. A sent one gets a short time for its answer.
            let has_ended = async {
                round.lifetime.ended().await;
                if is_sent.load(Relaxed) {
                    tokio::time::sleep(round.quorum.node_timeout).await;
                }
            };
            tokio::select! {
                biased;
                answer = tokio::time::timeout(LATE_REPLY, round.run_script(index, &is_sent)) => {
                    round.script_replied(index, answer.unwrap_or_else(|_| Err(Failure::timed_out())));
                }
                () = has_ended => if is_sent.load(Relaxed) {
                    round.roll_back_later(index, true);
                }
            }
        });
    }

    async fn run_script(&self, index: usize, is_sent: &AtomicBool) -> std::result::Result<Value, Failure> {
        let node = &self.quorum.nodes[index];
        let connection = node.link.connection().await?;
        let mark_sent = || {
            self.claim.mark_sent();
            is_sent.store(true, Relaxed);
        };
        let mut call = self.call();
        if node.is_first_attempt_on(connection.generation) {
            // The first attempt on a connection contains the script's text, so that the later ones find the script.
            call = ACQUIRE.with_source(&call);
        }
        // Boxed, so that a call that waits for a connection is small.
        Box::pin(node.link.run_on(&connection, &ACQUIRE, &call, false, Some(&mark_sent))).await
    }

    /// Handles the reply of the script, or the failure of its call.
    pub(super) fn script_replied(self: &Arc<Self>, index: usize, answer: std::result::Result<Value, Failure>) {
        let names = self.claim.keys().len();
        self.quorum.nodes[index].script_answered(&answer);
        self.vote_arrived(
            index,
            answer.and_then(|answer| self.quorum.nodes[index].read_vote(&answer, names)),
        );
    }

    /// Returns whether a node with this answer may have given its vote. A script that failed has not; plain commands that failed
    /// may have acquired the name.
    pub(super) fn may_hold_vote(&self, index: usize, vote: &std::result::Result<Vote, Failure>) -> bool {
        match vote {
            Ok(Vote::Granted { .. }) => true,
            Ok(Vote::Busy(_)) => false,
            Err(_) => self.is_plain(index),
        }
    }

    /// Counts a node's vote. Rolls it back if it arrives after the end of the request lifetime, or if the node may execute the
    /// request without an answer.
    pub(super) fn vote_arrived(self: &Arc<Self>, index: usize, vote: std::result::Result<Vote, Failure>) {
        if vote.is_ok() {
            self.quorum.nodes[index].answered();
        }
        let is_doubtful = matches!(&vote, Err(failure) if may_still_execute(failure));
        let late = self.votes.cast(index, vote);
        if is_doubtful {
            self.roll_back_later(index, true);
        } else if late.is_some_and(|vote| self.may_hold_vote(index, &vote)) {
            // Before the check of the lifetime: an abandoned round ends it, and then reads this.
            self.requests[index].has_voted_late.store(true, SeqCst);
            if self.lifetime.has_ended() && !self.is_rolled_back_by_release(index) {
                self.roll_back_later(index, false);
            }
        }
    }
}
