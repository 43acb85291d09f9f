//! An attempt's way to the nodes and back: how each is asked for its vote, and what its answer leads to.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use redis::{Cmd, Value};

use super::super::FENCE_KEPT_MS;
use super::super::failure::Failure;
#[cfg(unix)]
use super::super::lane::Told;
use super::Quorum;
use super::node::{Vote, common_time, in_doubt, silence};
use super::scripts::ACQUIRE;
use super::tally::Tally;
use super::tenure::Tenure;
use super::withdraw::PARTS;
use crate::model::Claim;

/// How long the late answer of a node is waited for on an ordinary connection. A node that was stopped may go on after any
/// time; but what lies in the buffers of a connection is carried out, or gone with it, within a minute or so. (A lane in
/// silence is ended sooner, and what was asked on it counts as doubtful from then on.)
const LATE: Duration = Duration::from_secs(65);

/// One attempt, as its votes and its clean-up know it.
pub(super) struct Attempt {
    pub(super) quorum: Arc<Quorum>,
    pub(super) claim: Claim,
    number: u64,
    pub(super) tenure: Arc<Tenure>,
    pub(super) tally: Tally<Vote>,
    call: Cmd,
    /// The lanes, node by node, on which the votes were asked for. Zero: none.
    lanes: Box<[AtomicU64]>,
}

impl Attempt {
    /// Asks every node for its vote.
    pub(super) fn begin(quorum: &Arc<Quorum>, claim: &Claim) -> Arc<Self> {
        let number = quorum.next_attempt();
        let parts = if claim.metadata.is_some() {
            &PARTS[..]
        } else {
            &PARTS[..2]
        };
        let ttl = claim.ttl.as_millis();
        let mut call = quorum.call(&ACQUIRE, parts, claim, claim.owner.as_str());
        call.arg(number)
            .arg(ttl)
            .arg(ttl + FENCE_KEPT_MS)
            .arg(common_time(quorum.nodes.iter().map(|node| &**node)))
            .arg(claim.process.pid)
            .arg(&claim.process.host);
        if let Some(metadata) = &claim.metadata {
            call.arg(&**metadata);
        }
        let nodes = quorum.nodes.len();
        let attempt = Arc::new(Attempt {
            quorum: quorum.clone(),
            number,
            tenure: quorum.tenures.begin(&claim.owner),
            claim: claim.clone(),
            tally: Tally::new(nodes),
            call,
            lanes: std::iter::repeat_with(AtomicU64::default).take(nodes).collect(),
        });
        for index in 0..nodes {
            attempt.ask(index);
        }
        attempt
    }

    /// What the lock keys hold where it has the vote.
    pub(super) fn value(&self) -> String {
        format!("{}.{}", self.claim.owner.as_str(), self.number)
    }

    fn ask(self: &Arc<Self>, index: usize) {
        #[cfg(unix)]
        if let Some(lane) = self.quorum.nodes[index].link.lane() {
            self.lanes[index].store(lane.number(), Relaxed);
            return lane.tell(self.clone(), index, &self.call);
        }
        self.ask_by_connection(index);
    }

    fn ask_by_connection(self: &Arc<Self>, index: usize) {
        let attempt = self.clone();
        self.quorum.spawn(async move {
            let node = &attempt.quorum.nodes[index];
            let answer = tokio::time::timeout(LATE, node.link.run(&ACQUIRE, &attempt.call)).await;
            attempt.answered(index, answer.unwrap_or_else(|_| Err(silence())));
        });
    }

    /// Counts a node's vote, and sees to it that nothing is left there when it comes too late for a lease that is over, or
    /// may be carried out without an answer.
    fn answered(self: &Arc<Self>, index: usize, answer: std::result::Result<Value, Failure>) {
        let names = self.claim.keys().len();
        let answer = answer.and_then(|answer| self.quorum.nodes[index].read_vote(&answer, names));
        let is_doubtful = matches!(&answer, Err(failure) if in_doubt(failure));
        let late = self.tally.cast(index, answer);
        if matches!(late, Some(Ok(Vote::Granted { .. }))) && self.tenure.is_over() {
            // What went out behind it on the same lane takes it back.
            let lane = self.lanes[index].load(Relaxed);
            if !self.tenure.is_released_on(index, lane) {
                self.withdraw_later(index);
            }
        }
        if is_doubtful {
            self.watch_doubtful(index);
        }
    }
}

#[cfg(unix)]
impl Told for Attempt {
    fn told(self: Arc<Self>, index: usize, reply: redis::RedisResult<Value>) {
        let answer = reply.map_err(Failure::from);
        if matches!(&answer, Err(failure) if failure.is_unknown_script()) {
            // The release may now overtake it.
            self.lanes[index].store(0, Relaxed);
            return self.ask_by_connection(index);
        }
        self.answered(index, answer);
    }
}
