//! An attempt's way to the nodes and back: how each is asked for its vote, and what its answer leads to.
//!
//! A node is asked by `acquire.lua`; or, where that is likely to do, by plain commands on its lane, which take half of its
//! time or less, the last two being shared by the attempts of one turn of the event loop (`lane/batch.rs`):
//!
//! ```text
//! SET <lock> <owner>.<attempt> PX <ttl> NX GET     takes a free name
//! ZADD <counter> GT CH <floor> last                raises the counter to the floor, if that is larger
//! TIME                                             tells whether the floor is what this node's clock shows
//! MGET <locks>                                     tells whether the vote stands still
//! ```
//!
//! That is a vote for the floor as the fence where the name was free, the counter was raised, the floor is as good as the
//! node's own time, and the vote stood still after that; `docs/quorum.md` says why it is as good as the script's, which does
//! all that in one step. Whatever else comes out of it, the script decides: it finds the vote that was taken as this
//! attempt's own. What is asked for plainly is the first attempt of an owner (a later one may have a vote already), for one
//! name without metadata that was neither busy nor undecided of late, where the floor is likely to be right.

use std::sync::Arc;
use std::sync::OnceLock;
#[cfg(unix)]
use std::sync::atomic::AtomicU8;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

#[cfg(unix)]
use redis::RedisResult;
use redis::{Cmd, Value};

use super::super::error::Failure;
#[cfg(unix)]
use super::super::error::{is_forbidden, is_not_understood};
#[cfg(unix)]
use super::super::fast_path::FastPath;
#[cfg(unix)]
use super::super::fast_path::Record;
#[cfg(unix)]
use super::super::fast_path::ReplySink;
use super::super::keys::RECORD_KEPT_MS;
#[cfg(unix)]
use super::super::scripts::RECORD;
use super::Quorum;
use super::node::{Vote, common_time, in_doubt, silence};
use super::scripts::ACQUIRE;
use super::tally::Tally;
use super::tenure::Tenure;
use super::withdraw::VOTED;
use crate::engine::attempt_queue::Ticket;
use crate::model::Claim;
#[cfg(unix)]
use crate::model::Fence;

/// How long the late answer of a node is waited for on an ordinary connection. A node that was stopped may go on after any
/// time; but what lies in the buffers of a connection is carried out, or gone with it, within a minute or so. (A lane in
/// silence is ended sooner, and what was asked on it counts as doubtful from then on.)
const LATE: Duration = Duration::from_secs(65);

/// One attempt, as its votes and its clean-up know it.
pub(super) struct Attempt {
    pub(super) quorum: Arc<Quorum>,
    pub(super) claim: Claim,
    number: u64,
    /// What the lock keys hold where it has the vote.
    pub(super) value: String,
    pub(super) tenure: Arc<Tenure>,
    pub(super) tally: Tally<Vote>,
    /// Whether a doubtful entry for it is on the clean-up list of each node.
    pub(super) listed: Box<[AtomicBool]>,
    /// Keeps the attempt counted until its last vote is answered or its connection has ended.
    ticket: OnceLock<Ticket>,
    /// What the nodes' clocks were taken to show.
    floor: u64,
    /// The way to each node.
    #[cfg(unix)]
    ways: Box<[Way]>,
}

/// How a node was asked for its vote.
#[cfg(unix)]
struct Way {
    lane: Option<Arc<FastPath>>,
    /// By plain commands; and how many of them came out as they have to.
    is_plain: bool,
    done: AtomicU8,
    /// It is asked by the other connection, because the lane's answer did not decide.
    is_left: AtomicBool,
    /// The lane has removed the vote before it was sent.
    is_cancelled: AtomicBool,
}

/// The replies that are told of, by their numbers: so many for each node, the script's and those of the plain commands.
#[cfg(unix)]
const REPLIES: usize = 5;
#[cfg(unix)]
const BY_SCRIPT: usize = 0;
#[cfg(unix)]
const TAKEN: usize = 1;
#[cfg(unix)]
const COUNTED: usize = 2;
#[cfg(unix)]
const TIMELY: usize = 3;
#[cfg(unix)]
const STANDS: usize = 4;

impl Attempt {
    /// Asks every node for its vote.
    pub(super) fn begin(quorum: &Arc<Quorum>, claim: &Claim) -> Arc<Self> {
        let number = quorum.next_attempt();
        let floor = quorum.next_floor(common_time(quorum.nodes.iter().map(|node| &**node)));
        let (tenure, is_first) = quorum.tenures.begin(&claim.owner);
        let attempt = Arc::new(Attempt {
            quorum: quorum.clone(),
            value: format!("{}.{number}", claim.owner.as_str()),
            number,
            tenure,
            tally: Tally::new(quorum.nodes.len()),
            listed: quorum.nodes.iter().map(|_| AtomicBool::new(false)).collect(),
            ticket: OnceLock::new(),
            floor,
            #[cfg(unix)]
            ways: quorum.ways(claim, floor, is_first),
            claim: claim.clone(),
        });
        #[cfg(unix)]
        attempt.ask_by_lanes(is_first);
        #[cfg(not(unix))]
        {
            let _ = is_first;
            (0..quorum.nodes.len()).for_each(|index| attempt.ask_by_connection(index));
        }
        attempt
    }

    /// Keeps the ticket of an attempt that ended without the answer of a majority: its votes may not have been sent yet.
    pub(super) fn keep_ticket(&self, ticket: Ticket) {
        // An attempt ends once.
        let _ = self.ticket.set(ticket);
    }

    /// The script's call.
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
            .arg(self.floor)
            .arg(claim.process.pid)
            .arg(&claim.process.host);
        if let Some(metadata) = &claim.metadata {
            call.arg(&**metadata);
        }
        call
    }

    fn ask_by_connection(self: &Arc<Self>, index: usize) {
        let attempt = self.clone();
        self.quorum.spawn(async move {
            let is_sent = AtomicBool::new(false);
            // A vote that is unsent when the tenure ends is never sent. A sent one gets a short time for its answer.
            let is_over = async {
                attempt.tenure.ended().await;
                if is_sent.load(Relaxed) {
                    tokio::time::sleep(attempt.quorum.patience).await;
                }
            };
            tokio::select! {
                biased;
                answer = tokio::time::timeout(LATE, attempt.ask(index, &is_sent)) => {
                    attempt.answered(index, answer.unwrap_or_else(|_| Err(silence())));
                }
                () = is_over => if is_sent.load(Relaxed) {
                    attempt.withdraw_later(index, true);
                }
            }
        });
    }

    async fn ask(&self, index: usize, is_sent: &AtomicBool) -> std::result::Result<Value, Failure> {
        let link = &self.quorum.nodes[index].link;
        let connection = link.connection().await?;
        let mark_sent = || {
            self.claim.mark_sent();
            is_sent.store(true, Relaxed);
        };
        // Boxed, so that a call that waits for a connection is small.
        let call = self.call();
        Box::pin(link.run_on(&connection, &ACQUIRE, &call, false, Some(&mark_sent))).await
    }

    /// The script's answer, or why there is none.
    fn answered(self: &Arc<Self>, index: usize, answer: std::result::Result<Value, Failure>) {
        let names = self.claim.keys().len();
        self.voted(
            index,
            answer.and_then(|answer| self.quorum.nodes[index].read_vote(&answer, names)),
        );
    }

    /// Whether a node that answered so may have given its vote. By the script, one that failed has not; plain commands may
    /// have taken the name all the same.
    pub(super) fn may_have(&self, index: usize, vote: &std::result::Result<Vote, Failure>) -> bool {
        match vote {
            Ok(Vote::Granted { .. }) => true,
            Ok(Vote::Busy(_)) => false,
            Err(_) => self.is_plain(index),
        }
    }

    /// Counts a node's vote, and sees to it that nothing is left there when it comes too late for a lease that is over, or
    /// may be carried out without an answer.
    fn voted(self: &Arc<Self>, index: usize, vote: std::result::Result<Vote, Failure>) {
        let is_doubtful = matches!(&vote, Err(failure) if in_doubt(failure));
        let late = self.tally.cast(index, vote);
        if is_doubtful {
            self.watch_doubtful(index);
        } else if late.is_some_and(|vote| self.may_have(index, &vote))
            && self.tenure.is_over()
            && !self.is_taken_back(index)
        {
            self.withdraw_later(index, false);
        }
    }
}

#[cfg(unix)]
impl Quorum {
    /// How to ask each node.
    fn ways(&self, claim: &Claim, floor: u64, is_first: bool) -> Box<[Way]> {
        let is_plain =
            is_first && claim.keys().len() == 1 && claim.metadata.is_none() && !self.contended.is(&claim.keys()[0]);
        self.nodes
            .iter()
            .map(|node| {
                let lane = node.link.fast_path();
                Way {
                    is_plain: is_plain && lane.as_ref().is_some_and(|lane| lane.is_plain()) && node.shows(floor),
                    lane,
                    done: AtomicU8::new(0),
                    is_left: AtomicBool::new(false),
                    is_cancelled: AtomicBool::new(false),
                }
            })
            .collect()
    }
}

#[cfg(unix)]
impl Attempt {
    fn ask_by_lanes(self: &Arc<Self>, is_first: bool) {
        let who: Arc<dyn ReplySink> = self.clone();
        let mut by_script = None;
        for (index, way) in self.ways.iter().enumerate() {
            let Some(lane) = &way.lane else {
                self.ask_by_connection(index);
                continue;
            };
            self.claim.mark_sent();
            let first = index * REPLIES;
            if way.is_plain {
                lane.vote(&who, first + STANDS, &self.claim, &self.value, self.floor);
            } else {
                if !is_first {
                    // What it was granted by plain commands, if it was, is to be found by the script.
                    lane.write_records();
                }
                let call: &Cmd = by_script.get_or_insert_with(|| self.call());
                lane.call_to_sink(&who, first + BY_SCRIPT, |out| call.write_packed_command(out));
            }
        }
    }

    /// Takes up the reply to one of the plain commands.
    fn plainly(self: &Arc<Self>, index: usize, which: usize, reply: RedisResult<Value>) {
        let way = &self.ways[index];
        let is_done = match &reply {
            Ok(reply) => match (which, reply) {
                (TAKEN, Value::Nil) | (COUNTED, Value::Int(1)) => true,
                (TIMELY, time) => self.quorum.nodes[index].is_timely(time, self.floor),
                (STANDS, Value::BulkString(value)) => value == self.value.as_bytes(),
                _ => false,
            },
            Err(error) => {
                if (is_not_understood(error) || is_forbidden(error))
                    && let Some(lane) = &way.lane
                {
                    lane.use_scripts_only();
                }
                false
            }
        };
        let done = way.done.load(Relaxed) + u8::from(is_done);
        way.done.store(done, Relaxed);
        if which < STANDS {
            return;
        }
        match reply.map_err(Failure::from) {
            Err(failure) if in_doubt(&failure) => self.voted(index, Err(failure)),
            Ok(_) if usize::from(done) == STANDS => {
                let (fence, already) = (self.floor, false);
                self.voted(index, Ok(Vote::Granted { fence, already }));
            }
            _ => {
                // The next attempts for this name are likely to end so, too.
                self.quorum.contended.note(&self.claim.keys()[0]);
                if !self.tenure.is_over() {
                    // From here on a release may overtake what is asked.
                    way.is_left.store(true, Relaxed);
                    self.ask_by_connection(index);
                } else if !self.is_taken_back(index) {
                    self.withdraw_later(index, false);
                }
            }
        }
    }

    /// Whether the release went out behind the vote on the same lane, and with that takes it back.
    fn is_taken_back(&self, index: usize) -> bool {
        self.lane(index)
            .is_some_and(|lane| self.tenure.is_released_on(index, lane.number()))
    }

    fn is_plain(&self, index: usize) -> bool {
        self.ways[index].is_plain
    }

    /// Whether the lane has removed the vote before it was sent.
    pub(super) fn is_cancelled_at(&self, index: usize) -> bool {
        self.ways[index].is_cancelled.load(Relaxed)
    }

    /// The lane on which a node's vote is on its way, if it is: what is sent there now is carried out after it.
    pub(super) fn lane(&self, index: usize) -> Option<&Arc<FastPath>> {
        let way = &self.ways[index];
        way.lane.as_ref().filter(|_| !way.is_left.load(Relaxed))
    }

    /// Has what inspection tells written down where the script has not done so.
    pub(super) fn record(&self, fence: Fence) {
        for index in 0..self.ways.len() {
            let Some(lane) = self.lane(index).filter(|_| self.is_plain(index)) else {
                continue;
            };
            let record = Record {
                claim: self.claim.clone(),
                fence,
                attempt: Some((self.number, self.floor / 1000)),
            };
            if lane.is_open() {
                lane.record_later(record);
            } else {
                let (call, node) = (record.call(&self.quorum.layout), self.quorum.nodes[index].clone());
                self.quorum
                    .spawn(async move { drop(node.link.run(&RECORD, &call).await) });
            }
        }
    }
}

#[cfg(not(unix))]
impl Attempt {
    fn is_taken_back(&self, _: usize) -> bool {
        false
    }

    fn is_plain(&self, _: usize) -> bool {
        false
    }
}

#[cfg(unix)]
impl ReplySink for Attempt {
    /// A vote of an attempt that has ended.
    fn is_cancelled(&self, number: usize) -> bool {
        let is_over = self.tenure.is_over();
        if is_over {
            self.ways[number / REPLIES].is_cancelled.store(true, Relaxed);
        }
        is_over
    }

    fn on_reply(self: Arc<Self>, number: usize, reply: RedisResult<Value>) {
        let (index, which) = (number / REPLIES, number % REPLIES);
        if which != BY_SCRIPT {
            return self.plainly(index, which, reply);
        }
        let answer = reply.map_err(Failure::from);
        if matches!(&answer, Err(failure) if failure.is_unknown_script()) && !self.tenure.is_over() {
            // The release may overtake it from here on.
            self.ways[index].is_left.store(true, Relaxed);
            return self.ask_by_connection(index);
        }
        self.answered(index, answer);
    }
}
