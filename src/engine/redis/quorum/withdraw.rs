//! What is left of an attempt: late answers, lost answers, and votes that came to nothing.

use std::sync::Arc;
use std::time::Duration;

use redis::Cmd;
#[cfg(unix)]
use redis::{RedisResult, Value};
#[cfg(unix)]
use tokio_util::task::task_tracker::TaskTrackerToken;

#[cfg(unix)]
use super::super::asked::Told;
use super::super::keys::Part;
use super::attempt::Attempt;
use super::node::Vote;
use super::scripts::WITHDRAW;
use super::tally::{Answer, Count, Tally};
use super::{AGAIN, Quorum};

/// What a lease is made of, for each name.
pub(super) const PARTS: [Part; 3] = [Part::Lock, Part::Fence, Part::Metadata];
/// What a vote touches; the metadata only where there is some.
pub(super) const VOTED: [Part; 4] = [Part::Lock, Part::Fence, Part::Counter, Part::Metadata];

impl Quorum {
    /// Ends an attempt that failed, and takes back whatever it may have got, on every node.
    ///
    /// # Behavior
    /// When this returns, nothing of it is left on the nodes that gave their votes, or may have, if they answered once more in
    /// time. With the others it goes on in the background: those that say nothing are told now, and once more when their
    /// answer comes (`attempt.rs`); but if most nodes have refused, those that were asked on a lane only then. A node that
    /// refused has nothing of the attempt: a vote is for all names or for none.
    pub(super) async fn take_back(self: &Arc<Self>, attempt: &Arc<Attempt>, answers: &[Answer<Vote>], limit: Duration) {
        attempt.tenure.end();
        let call = Arc::new(attempt.withdrawal());
        let may_have = |(index, answer): &(usize, &Answer<Vote>)| {
            answer.as_ref().is_some_and(|answer| attempt.may_have(*index, answer))
        };
        let tally = Arc::new(Tally::new(answers.iter().enumerate().filter(may_have).count()));
        let is_refused = Count::of(answers, |vote| matches!(vote, Vote::Granted { .. })).verdict() == Some(false);
        let mut places = 0..;
        for (index, answer) in answers.iter().enumerate() {
            let (quorum, call) = (self.clone(), call.clone());
            if may_have(&(index, answer)) {
                let (tally, place) = (tally.clone(), places.next().unwrap_or_default());
                self.spawn(async move {
                    withdraw(&quorum, index, &call).await;
                    tally.cast(place, Ok(()));
                });
            } else if answer.is_none() {
                #[cfg(unix)]
                if let Some(lane) = attempt.lane(index) {
                    if !is_refused {
                        let behind: Arc<dyn Told> = Arc::new(Withdrawal {
                            attempt: attempt.clone(),
                            _urgent: self.urgent.token(),
                        });
                        lane.tell(&behind, index, |out| call.write_packed_command(out));
                    }
                    continue;
                }
                self.spawn(async move { withdraw(&quorum, index, &call).await });
            }
        }
        tally.decide(limit, |_: &[Answer<()>]| None::<()>).await;
    }
}

/// A withdrawal behind a vote on the same lane.
#[cfg(unix)]
struct Withdrawal {
    attempt: Arc<Attempt>,
    _urgent: TaskTrackerToken,
}

#[cfg(unix)]
impl Told for Withdrawal {
    fn told(self: Arc<Self>, index: usize, reply: RedisResult<Value>) {
        // The script may be unknown; or the lane has ended, and the vote may be anywhere.
        if reply.is_err() {
            self.attempt.withdraw_later(index);
        }
    }
}

impl Attempt {
    fn withdrawal(&self) -> Cmd {
        self.quorum
            .call(&WITHDRAW, &[Part::Lock, Part::Metadata], &self.claim, &self.value)
    }

    /// Takes back a vote that came when it was not wanted any more.
    pub(super) fn withdraw_later(self: &Arc<Self>, index: usize) {
        let attempt = self.clone();
        self.quorum
            .spawn(async move { withdraw(&attempt.quorum, index, &attempt.withdrawal()).await });
    }

    /// A request that failed may be carried out after that, whatever the node says then.
    pub(super) fn watch_doubtful(self: &Arc<Self>, index: usize) {
        let attempt = self.clone();
        self.quorum.spawn(async move {
            for pause in AGAIN {
                tokio::time::sleep(pause).await;
                if attempt.tenure.is_over() {
                    withdraw_once(&attempt.quorum, index, &attempt.withdrawal()).await;
                }
            }
        });
    }
}

/// Takes back one node's vote, again and again until the node has said that it did.
async fn withdraw(quorum: &Quorum, index: usize, call: &Cmd) {
    let urgent = quorum.urgent.token();
    if withdraw_once(quorum, index, call).await {
        return;
    }
    drop(urgent);
    for pause in AGAIN {
        tokio::time::sleep(pause).await;
        if withdraw_once(quorum, index, call).await {
            return;
        }
    }
}

/// Whether the node has said that it did.
async fn withdraw_once(quorum: &Quorum, index: usize, call: &Cmd) -> bool {
    let answer = quorum.nodes[index].number(&WITHDRAW, call);
    matches!(tokio::time::timeout(quorum.patience, answer).await, Ok(Ok(_)))
}
