//! One round: the request for a vote to each node, and its end.
//!
//! A vote is requested with `acquire.lua`, or, where they probably suffice, with plain commands. These cost the node half of the
//! time or less. The attempts of one tick share the last two of them:
//!
//! ```text
//! SET <lock> <owner>.<attempt> PX <ttl> NX GET     acquires a free name
//! ZADD <counter> GT CH <floor> last                raises the counter to the floor, if the floor is larger
//! TIME                                             shows whether the floor is close enough to this node's clock
//! MGET <locks>                                     shows whether the vote still exists
//! ```
//!
//! That is a vote for the floor as the fencing token if the name was free, the counter was raised, the floor is close enough to
//! the node's time, and the vote still existed after that. `docs/proofs/quorum.md` shows that it is as good as a vote by the script,
//! which does all that in one step. In all other cases the script decides: it finds the vote of the plain commands as this
//! attempt's own. Plain commands are for the first attempt of an owner (a later one may have a vote already), for one name
//! without metadata that was neither busy nor undecided within the last 2 s, and where the floor is probably close enough.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

use redis::{Cmd, Value};
use tokio_util::task::task_tracker::TaskTrackerToken;

use super::super::cleanup::Remains;
use super::super::node::{Vote, may_still_execute};
use super::super::scripts::{ACQUIRE, ROLLBACK};
use super::super::votes::{Answer, Votes};
use super::super::{Quorum, VOTED};
use super::replies::{self, Replies};
use super::request_lifetime::RequestLifetime;
use crate::engine::attempt_queue::Permit;
use crate::engine::redis::connection::records::Record;
use crate::engine::redis::connection::{Connection, LATE_REPLY};
use crate::engine::redis::error::{Failure, is_forbidden, is_not_understood};
use crate::engine::redis::keys::RECORD_KEPT_MS;
use crate::engine::redis::wire;
use crate::model::{Claim, Fence};

/// The number under which the last of the four replies to plain commands arrives.
const LAST_REPLY: usize = 3;

/// The round of one attempt. Its votes and its rollback share it.
pub(super) struct Round {
    quorum: Arc<Quorum>,
    pub(super) claim: Claim,
    /// The number of the attempt: the estimate of the nodes' clocks, in µs, and the floor of the fencing token.
    number: u64,
    /// The value of the lock keys on the nodes that gave their votes.
    pub(super) value: String,
    lifetime: Arc<RequestLifetime>,
    /// The requests, node by node.
    requests: Box<[Request]>,
    /// Set when the round is abandoned: the attempt stays counted, and a close waits, until its last vote is answered or its
    /// connection has ended.
    kept: OnceLock<(Option<Permit>, TaskTrackerToken)>,
}

/// The first request for the vote of one node.
struct Request {
    /// `None`: the script opens one.
    connection: Option<Arc<Connection>>,
    /// Whether it consists of plain commands.
    is_plain: bool,
}

impl Round {
    /// Requests the vote of every node.
    pub(super) fn begin(quorum: &Arc<Quorum>, claim: &Claim) -> (Arc<Self>, Votes<Vote>) {
        let number = quorum.next_attempt();
        let is_first = !claim.was_sent();
        let may_be_plain =
            is_first && claim.keys().len() == 1 && claim.metadata.is_none() && !quorum.contended.is(&claim.keys()[0]);
        let requests = quorum.nodes.iter().map(|node| {
            node.asked();
            let connection = node.link.current();
            if !is_first {
                // The script has to find the record of an earlier grant by plain commands.
                node.link.write_records();
            }
            Request {
                is_plain: may_be_plain
                    && connection.as_ref().is_some_and(|connection| connection.wire.is_plain())
                    && !node.refuses_scripts()
                    && node.is_probably_current(number),
                connection,
            }
        });
        let round = Arc::new(Round {
            quorum: quorum.clone(),
            value: format!("{}.{number}", claim.owner.as_str()),
            number,
            lifetime: quorum.lifetimes.begin(&claim.owner),
            requests: requests.collect(),
            claim: claim.clone(),
            kept: OnceLock::new(),
        });
        let votes = Votes::new(quorum, (0..round.requests.len()).map(|index| round.clone().vote(index)));
        (round, votes)
    }

    /// Requests the vote of a node. The returned future waits for it, and rolls it back if it comes too late.
    fn vote(self: Arc<Self>, index: usize) -> impl Future<Output = Answer<Vote>> + Send + 'static {
        let replies = self.requests[index].connection.as_ref().map(|connection| {
            self.claim.mark_sent();
            replies::send(&self.lifetime, |sink| {
                let wire = &connection.wire;
                match self.requests[index].is_plain {
                    true => {
                        let (value, floor) = (&*self.value, self.number);
                        wire.request_to_sink(sink, LAST_REPLY, &self.claim, &wire::Request::Vote { value, floor });
                    }
                    false => wire.call_to_sink(sink, 0, &self.call()),
                }
            })
        });
        async move {
            if let Some(replies) = replies {
                let replies = replies.await.unwrap_or_default();
                if replies.is_empty() {
                    return None;
                }
                if let Some(vote) = self.read(index, replies) {
                    self.vote_arrived(index, true, &vote).await;
                    return Some(vote);
                }
            }
            if self.lifetime.has_ended() {
                if self.requests[index].is_plain {
                    self.roll_back_late_vote(index, true).await;
                }
                return None;
            }
            let vote = Box::pin(self.vote_by_script(index)).await?;
            self.vote_arrived(index, false, &vote).await;
            Some(vote)
        }
    }

    /// Returns the call of the script.
    fn call(&self) -> Cmd {
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
            .arg(self.number)
            .arg(claim.process.pid)
            .arg(&claim.process.host);
        if let Some(metadata) = &claim.metadata {
            call.arg(&**metadata);
        }
        call
    }

    /// Reads the replies to the first request. `None`: the script has to decide.
    fn read(&self, index: usize, mut replies: Replies) -> Option<Result<Vote, Failure>> {
        let Request { connection, is_plain } = &self.requests[index];
        if !is_plain {
            return match replies.pop()?.map_err(Failure::from) {
                Err(failure) if failure.is_unknown_script() => None,
                answer => Some(self.read_script(index, answer)),
            };
        }
        if let [
            Ok(Value::Nil),
            Ok(Value::Int(1)),
            Ok(time),
            Ok(Value::BulkString(value)),
        ] = &replies[..]
            && self.quorum.nodes[index].is_current(time, self.number)
            && value == self.value.as_bytes()
        {
            let (fence, already) = (self.number, false);
            return Some(Ok(Vote::Granted { fence, already }));
        }
        let mut errors = replies.iter().filter_map(|reply| reply.as_ref().err());
        if errors.any(|error| is_not_understood(error) || is_forbidden(error))
            && let Some(connection) = connection
        {
            connection.wire.use_scripts_only();
        }
        match replies.pop()?.map_err(Failure::from) {
            Err(failure) if may_still_execute(&failure) => Some(Err(failure)),
            _ => {
                // The next attempts for this name will probably end in the same way.
                self.quorum.contended.note(&self.claim.keys()[0]);
                None
            }
        }
    }

    fn read_script(&self, index: usize, answer: Result<Value, Failure>) -> Result<Vote, Failure> {
        let node = &self.quorum.nodes[index];
        node.script_answered(&answer);
        node.read_vote(&answer?, self.claim.keys().len())
    }

    /// Requests a vote by the script, on a connection that is opened if there is none.
    ///
    /// # Behavior
    /// A vote that is unsent when the request lifetime ends is never sent. A sent one gets a short time for its answer.
    async fn vote_by_script(self: &Arc<Self>, index: usize) -> Answer<Vote> {
        let is_sent = AtomicBool::new(false);
        let has_ended = async {
            self.lifetime.ended().await;
            if is_sent.load(Relaxed) {
                tokio::time::sleep(self.quorum.node_timeout).await;
            }
        };
        let mark_sent = || {
            self.claim.mark_sent();
            is_sent.store(true, Relaxed);
        };
        let (link, call) = (&self.quorum.nodes[index].link, self.call());
        let answer = async {
            let connection = link.connection().await?;
            link.run_on(&connection, &ACQUIRE, &call, false, Some(&mark_sent)).await
        };
        tokio::select! {
            biased;
            () = has_ended => {
                // Plain commands before it may have left a vote.
                if is_sent.load(Relaxed) || self.requests[index].is_plain {
                    self.roll_back_later(index);
                }
                None
            }
            answer = tokio::time::timeout(LATE_REPLY, answer) => {
                Some(self.read_script(index, answer.unwrap_or_else(|_| Err(Failure::timed_out()))))
            }
        }
    }

    /// Rolls a vote back if it arrives after the end of the request lifetime, or if the node may execute the request without an
    /// answer. `is_in_order`: a release on the same connection comes after it.
    async fn vote_arrived(self: &Arc<Self>, index: usize, is_in_order: bool, vote: &Result<Vote, Failure>) {
        if vote.is_ok() {
            self.quorum.nodes[index].answered();
        }
        if matches!(vote, Err(failure) if may_still_execute(failure)) {
            self.roll_back_later(index);
        } else if self.lifetime.has_ended() && self.may_hold_vote(index, vote) {
            self.roll_back_late_vote(index, is_in_order).await;
        }
    }

    /// Rolls back a late vote, unless the release was sent behind it. The connection of the vote is still the current one then: so it was
    /// at the release.
    async fn roll_back_late_vote(self: &Arc<Self>, index: usize, is_in_order: bool) {
        let is_current = || {
            let connections = (
                &self.requests[index].connection,
                self.quorum.nodes[index].link.current(),
            );
            matches!(connections, (Some(ours), Some(current)) if ours.generation == current.generation)
        };
        if !(is_in_order && self.lifetime.is_released() && is_current()) {
            self.clone().roll_back(index).await;
        }
    }

    /// Returns whether a node with this answer may have given its vote. A script that failed has not; plain commands that failed
    /// may have acquired the name.
    fn may_hold_vote(&self, index: usize, vote: &Result<Vote, Failure>) -> bool {
        match vote {
            Ok(Vote::Granted { .. }) => true,
            Ok(Vote::Busy(_)) => false,
            Err(_) => self.requests[index].is_plain,
        }
    }

    /// Defers the writing of the grant's record on the nodes where the script has not written it.
    pub(super) fn write_record(&self, fence: Fence) {
        let nodes = self.quorum.nodes.iter().zip(&self.requests);
        for (node, _) in nodes.filter(|(_, request)| request.is_plain) {
            node.link.record_later(Record {
                claim: self.claim.clone(),
                fence,
                attempt: Some(self.number),
            });
        }
    }

    /// Ends a failed round, and begins to roll back the votes that the nodes have given, or may have given, by these answers. `permit`:
    /// kept until the last vote is answered.
    ///
    /// # Behavior
    /// An unsent vote is never sent: the connection removes it before its next write. A vote that is in flight is rolled back when
    /// its answer comes, or by the clean-up list of its node when the connection has ended. A node that refused has nothing of the round:
    /// a vote is for all names or for none.
    pub(super) fn abandon(self: &Arc<Self>, answers: &[Answer<Vote>], permit: Option<Permit>) -> Votes<()> {
        self.lifetime.end();
        // A round ends once.
        let _ = self.kept.set((permit, self.quorum.urgent.token()));
        let mut voted = Vec::new();
        for (index, answer) in answers.iter().enumerate() {
            match (answer, &self.requests[index].connection) {
                (Some(answer), _) if self.may_hold_vote(index, answer) => voted.push(index),
                (None, Some(connection)) => connection.wire.caller_left(),
                _ => {}
            }
        }
        Votes::new(
            &self.quorum,
            voted.into_iter().map(|index| self.clone().roll_back(index)),
        )
    }

    /// Rolls a vote back. A close waits for the first attempt.
    async fn roll_back(self: Arc<Self>, index: usize) -> Answer<()> {
        let _urgent = self.quorum.urgent.token();
        let call = self.quorum.rollback_call(&self.claim, &self.value);
        let answer = self.quorum.nodes[index].number(&ROLLBACK, &call);
        if !matches!(tokio::time::timeout(self.quorum.node_timeout, answer).await, Ok(Ok(_))) {
            self.roll_back_later(index);
        }
        Some(Ok(()))
    }

    /// Rolls a vote back by the clean-up list of its node.
    fn roll_back_later(&self, index: usize) {
        let remains = Remains::Vote {
            value: self.value.as_str().into(),
            lifetime: self.lifetime.clone(),
        };
        self.quorum.clean_up(index, &self.claim, remains);
    }
}
