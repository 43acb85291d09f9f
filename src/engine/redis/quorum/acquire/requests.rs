//! The requests for the votes of the nodes.
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

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering::Relaxed};

use redis::{Cmd, RedisResult, Value};

use super::super::Quorum;
use super::super::node::{Vote, may_still_execute};
use super::round::Round;
use crate::engine::redis::connection::Connection;
use crate::engine::redis::connection::records::Record;
use crate::engine::redis::error::{Failure, is_forbidden, is_not_understood};
use crate::engine::redis::wire::{ReplySink, Request};
use crate::model::{Claim, Fence};

/// The request for the vote of one node.
pub(super) struct NodeRequest {
    /// The connection at the time of the request. `None`: a task opens one.
    connection: Option<Arc<Connection>>,
    /// Whether it consists of plain commands.
    is_plain: bool,
    /// The number of plain commands with the expected reply.
    confirmed: AtomicU8,
    /// Whether a task has repeated it, because the reply did not decide.
    is_repeated: AtomicBool,
    /// Whether the node gave its vote after the decision of the round.
    pub(super) has_voted_late: AtomicBool,
    /// Whether the node's clean-up list has a doubtful entry of this round.
    pub(super) is_listed: AtomicBool,
}

/// The numbers of the replies of one node: that of the script, and those of the plain commands.
const REPLIES: usize = 5;
const SCRIPT_REPLY: usize = 0;
const SET_REPLY: usize = 1;
const ZADD_REPLY: usize = 2;
const TIME_REPLY: usize = 3;
const MGET_REPLY: usize = 4;

impl Quorum {
    /// Decides how to request the vote of each node.
    pub(super) fn plan_requests(&self, claim: &Claim, floor: u64, is_first: bool) -> Box<[NodeRequest]> {
        let is_plain =
            is_first && claim.keys().len() == 1 && claim.metadata.is_none() && !self.contended.is(&claim.keys()[0]);
        self.nodes
            .iter()
            .map(|node| {
                let connection = node.link.current();
                NodeRequest {
                    is_plain: is_plain
                        && connection.as_ref().is_some_and(|connection| connection.wire.is_plain())
                        && !node.refuses_scripts()
                        && node.is_probably_current(floor),
                    connection,
                    confirmed: AtomicU8::new(0),
                    is_repeated: AtomicBool::new(false),
                    has_voted_late: AtomicBool::new(false),
                    is_listed: AtomicBool::new(false),
                }
            })
            .collect()
    }
}

impl Round {
    pub(super) fn request_votes(self: &Arc<Self>, is_first: bool) {
        let sink: Arc<dyn ReplySink> = self.clone();
        let mut by_script = None;
        for (index, request) in self.requests.iter().enumerate() {
            let Some(Connection { wire, .. }) = request.connection.as_deref() else {
                self.request_in_task(index);
                continue;
            };
            self.claim.mark_sent();
            let first = index * REPLIES;
            if request.is_plain {
                let (value, floor) = (&*self.value, self.floor);
                wire.request_to_sink(&sink, first + MGET_REPLY, &self.claim, &Request::Vote { value, floor });
            } else {
                if !is_first {
                    // The script has to find the record of an earlier grant by plain commands.
                    self.quorum.nodes[index].link.write_records();
                }
                let call: &Cmd = by_script.get_or_insert_with(|| self.call());
                wire.call_to_sink(&sink, first + SCRIPT_REPLY, call);
            }
        }
    }

    /// Handles the reply to one of the plain commands.
    fn plain_replied(self: &Arc<Self>, index: usize, which: usize, reply: RedisResult<Value>) {
        let request = &self.requests[index];
        let is_confirmed = match &reply {
            Ok(reply) => match (which, reply) {
                (SET_REPLY, Value::Nil) | (ZADD_REPLY, Value::Int(1)) => true,
                (TIME_REPLY, time) => self.quorum.nodes[index].is_current(time, self.floor),
                (MGET_REPLY, Value::BulkString(value)) => value == self.value.as_bytes(),
                _ => false,
            },
            Err(error) => {
                if (is_not_understood(error) || is_forbidden(error))
                    && let Some(connection) = &request.connection
                {
                    connection.wire.use_scripts_only();
                }
                false
            }
        };
        let confirmed = request.confirmed.load(Relaxed) + u8::from(is_confirmed);
        request.confirmed.store(confirmed, Relaxed);
        if which < MGET_REPLY {
            return;
        }
        match reply.map_err(Failure::from) {
            Err(failure) if may_still_execute(&failure) => self.vote_arrived(index, Err(failure)),
            Ok(_) if usize::from(confirmed) == MGET_REPLY => {
                let (fence, already) = (self.floor, false);
                self.vote_arrived(index, Ok(Vote::Granted { fence, already }));
            }
            _ => {
                // The next attempts for this name will probably end in the same way.
                self.quorum.contended.note(&self.claim.keys()[0]);
                if !self.lifetime.has_ended() {
                    // From here on a release may overtake the request.
                    request.is_repeated.store(true, Relaxed);
                    self.request_in_task(index);
                } else if !self.is_rolled_back_by_release(index) {
                    self.roll_back_later(index, false);
                }
            }
        }
    }

    /// Returns whether the release was sent behind the vote on the same connection, and so rolls it back.
    pub(super) fn is_rolled_back_by_release(&self, index: usize) -> bool {
        self.connection(index)
            .is_some_and(|connection| self.lifetime.is_released_on(index, connection.generation))
    }

    pub(super) fn is_plain(&self, index: usize) -> bool {
        self.requests[index].is_plain
    }

    /// Returns the connection on which a node's vote is in flight, if any: the node executes later requests there after it.
    pub(super) fn connection(&self, index: usize) -> Option<&Arc<Connection>> {
        let request = &self.requests[index];
        request
            .connection
            .as_ref()
            .filter(|_| !request.is_repeated.load(Relaxed))
    }

    /// Defers the writing of the grant's record on the nodes where the script has not written it.
    pub(super) fn write_record(&self, fence: Fence) {
        for index in 0..self.requests.len() {
            if self.connection(index).is_none() || !self.is_plain(index) {
                continue;
            }
            self.quorum.nodes[index].link.record_later(Record {
                claim: self.claim.clone(),
                fence,
                attempt: Some((self.number, self.floor / 1000)),
            });
        }
    }
}

impl ReplySink for Round {
    /// Returns whether to remove a vote: its round has ended.
    fn is_cancelled(&self, _number: usize) -> bool {
        self.lifetime.has_ended()
    }

    fn on_reply(self: Arc<Self>, number: usize, reply: RedisResult<Value>) {
        let (index, which) = (number / REPLIES, number % REPLIES);
        if which != SCRIPT_REPLY {
            return self.plain_replied(index, which, reply);
        }
        let answer = reply.map_err(Failure::from);
        if matches!(&answer, Err(failure) if failure.is_unknown_script()) && !self.lifetime.has_ended() {
            // From here on a release may overtake the request.
            self.requests[index].is_repeated.store(true, Relaxed);
            return self.request_in_task(index);
        }
        self.script_replied(index, answer);
    }
}
