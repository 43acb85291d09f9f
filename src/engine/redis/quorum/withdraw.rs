//! What is left of an attempt: late answers, lost answers, and votes that came to nothing.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use redis::Cmd;
#[cfg(unix)]
use redis::{RedisResult, Value};
#[cfg(unix)]
use tokio_util::task::task_tracker::TaskTrackerToken;

#[cfg(unix)]
use super::super::fast_path::ReplySink;
use super::super::keys::Part;
use super::Quorum;
use super::attempt::Attempt;
use super::cleanup::Remains;
use super::node::Vote;
use super::scripts::WITHDRAW;
#[cfg(unix)]
use super::tally::Count;
use super::tally::{Answer, Tally};
use crate::model::Claim;

/// What a lease is made of, for each name.
pub(super) const PARTS: [Part; 3] = [Part::Lock, Part::Fence, Part::Metadata];
/// What a vote touches; the metadata only where there is some.
pub(super) const VOTED: [Part; 4] = [Part::Lock, Part::Fence, Part::Counter, Part::Metadata];

impl Quorum {
    /// Ends an attempt that failed, and takes back whatever it may have got, on every node.
    ///
    /// # Behavior
    /// When this returns, nothing of it is left on the nodes that gave their votes, or may have, if they answered once more in
    /// time. The others: see [`Attempt::abandon`].
    pub(super) async fn take_back(self: &Arc<Self>, attempt: &Arc<Attempt>, answers: &[Answer<Vote>], limit: Duration) {
        let voted = attempt.abandon(answers);
        let call = Arc::new(self.withdrawal(&attempt.claim, &attempt.value));
        let tally = Arc::new(Tally::new(voted.len()));
        for (place, index) in voted.into_iter().enumerate() {
            let (attempt, call, tally) = (attempt.clone(), call.clone(), tally.clone());
            let urgent = self.urgent.token();
            self.spawn(async move {
                let quorum = &attempt.quorum;
                let answer = quorum.nodes[index].number(&WITHDRAW, &call);
                if !matches!(tokio::time::timeout(quorum.patience, answer).await, Ok(Ok(_))) {
                    attempt.withdraw_later(index, false);
                }
                drop(urgent);
                tally.cast(place, Ok(()));
            });
        }
        tally.decide(limit, |_: &[Answer<()>]| None::<()>).await;
    }

    pub(super) fn withdrawal(&self, claim: &Claim, value: &str) -> Cmd {
        self.call(&WITHDRAW, &[Part::Lock, Part::Metadata], claim, value)
    }
}

/// A withdrawal behind a vote on the same lane.
#[cfg(unix)]
struct Withdrawal {
    attempt: Arc<Attempt>,
    _urgent: TaskTrackerToken,
}

#[cfg(unix)]
impl ReplySink for Withdrawal {
    fn on_reply(self: Arc<Self>, index: usize, reply: RedisResult<Value>) {
        // The script may be unknown; or the lane has ended, and the vote may be anywhere.
        if reply.is_err() {
            self.attempt.withdraw_later(index, true);
        }
    }

    fn is_cancelled(&self, index: usize) -> bool {
        self.attempt.is_cancelled_at(index)
    }
}

impl Attempt {
    /// Ends the attempt, and returns the nodes that may have given their votes by their answers.
    ///
    /// # Behavior
    /// An unsent vote is never sent: the fast path removes it before its next write. Where a node has not answered, the
    /// rollback follows the vote on the same lane, or the clean-up list of the node sends it. If most nodes have refused, a
    /// vote on a lane is rolled back only when its answer comes (`attempt.rs`). A node that refused has nothing of the
    /// attempt: a vote is for all names or for none.
    pub(super) fn abandon(self: &Arc<Self>, answers: &[Answer<Vote>]) -> Vec<usize> {
        self.tenure.end();
        #[cfg(unix)]
        let is_refused = Count::of(answers, |vote| matches!(vote, Vote::Granted { .. })).verdict() == Some(false);
        let mut voted = Vec::new();
        for (index, answer) in answers.iter().enumerate() {
            match answer {
                Some(answer) if self.may_have(index, answer) => voted.push(index),
                Some(_) => {}
                #[cfg(unix)]
                None => {
                    let Some(lane) = self.lane(index) else {
                        // The task of the vote reacts to the end of the tenure.
                        continue;
                    };
                    lane.caller_left();
                    if !is_refused {
                        let behind: Arc<dyn ReplySink> = Arc::new(Withdrawal {
                            attempt: self.clone(),
                            _urgent: self.quorum.urgent.token(),
                        });
                        let call = self.quorum.withdrawal(&self.claim, &self.value);
                        lane.call_to_sink(&behind, index, |out| call.write_packed_command(out));
                    }
                }
                #[cfg(not(unix))]
                None => {}
            }
        }
        voted
    }

    /// Rolls back a vote that arrived, or may arrive, after the end of its attempt.
    pub(super) fn withdraw_later(&self, index: usize, is_doubtful: bool) {
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

    /// A request that failed may be carried out after that, whatever the node says then.
    pub(super) fn watch_doubtful(&self, index: usize) {
        if self.tenure.is_over() {
            self.withdraw_later(index, true);
        } else if !self.listed[index].swap(true, Relaxed) {
            self.quorum.clean_up_later(index, &self.claim, self.remains());
        }
    }

    fn remains(&self) -> Remains {
        Remains::Vote {
            value: self.value.as_str().into(),
            tenure: self.tenure.clone(),
        }
    }
}
