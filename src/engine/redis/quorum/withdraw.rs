//! What is left of an attempt: late answers, lost answers, and votes that came to nothing.

use std::sync::Arc;
use std::time::Duration;

use redis::Cmd;

use super::super::keys::Part;
use super::node::{Vote, in_doubt, silence};
use super::scripts::WITHDRAW;
use super::tally::{Answer, Tally};
use super::tenure::Tenure;
use super::{AGAIN, Quorum};
use crate::model::Claim;

/// How long the late answer of a node is waited for. A node that was stopped may go on after any time; but what lies in
/// the buffers of a connection is carried out, or gone with it, within a minute or so.
const LATE: Duration = Duration::from_secs(65);

/// One attempt, as its clean-up knows it.
pub(super) struct Attempt {
    pub(super) claim: Claim,
    /// What the lock keys hold where it has the vote.
    pub(super) value: String,
    pub(super) tenure: Arc<Tenure>,
}

impl Quorum {
    /// Ends an attempt that failed, and takes back whatever it may have got, on every node.
    ///
    /// # Behavior
    /// When this returns, nothing of it is left on the nodes that gave their votes, if they answered once more in time. With
    /// the others it goes on in the background: those that say nothing are told now and, by [`vote`], once more when their
    /// answer comes. A node that refused has nothing of the attempt: a vote is for all names or for none.
    pub(super) async fn take_back(self: &Arc<Self>, attempt: &Arc<Attempt>, answers: &[Answer<Vote>], limit: Duration) {
        attempt.tenure.end();
        let call = Arc::new(self.withdrawal(attempt));
        let is_given = |answer: &&Answer<Vote>| matches!(answer, Some(Ok(Vote::Granted { .. })));
        let tally = Arc::new(Tally::new(answers.iter().filter(is_given).count()));
        let mut places = 0..;
        for (index, answer) in answers.iter().enumerate() {
            let (quorum, call) = (self.clone(), call.clone());
            if is_given(&answer) {
                let (tally, place) = (tally.clone(), places.next().unwrap_or_default());
                self.spawn(async move {
                    withdraw(&quorum, index, &call).await;
                    tally.cast(place, Ok(()));
                });
            } else if answer.is_none() {
                self.spawn(async move { withdraw(&quorum, index, &call).await });
            }
        }
        tally.decide(limit, |_: &[Answer<()>]| None::<()>).await;
    }

    fn withdrawal(&self, attempt: &Attempt) -> Cmd {
        self.call(&WITHDRAW, &[Part::Lock, Part::Metadata], &attempt.claim, &attempt.value)
    }
}

/// Gets one node's vote, and sees to it that nothing is left there when it comes too late for a lease that is over, or
/// may be carried out without an answer.
pub(super) async fn vote(
    quorum: Arc<Quorum>,
    index: usize,
    attempt: Arc<Attempt>,
    call: Arc<Cmd>,
    tally: Arc<Tally<Vote>>,
) {
    let names = attempt.claim.keys().len();
    let answer = tokio::time::timeout(LATE, quorum.nodes[index].vote(&call, names)).await;
    let answer = answer.unwrap_or_else(|_| Err(silence()));
    let doubtful = matches!(&answer, Err(failure) if in_doubt(failure));
    let late = tally.cast(index, answer);
    if matches!(late, Some(Ok(Vote::Granted { .. }))) && attempt.tenure.is_over() {
        withdraw(&quorum, index, &quorum.withdrawal(&attempt)).await;
    }
    if doubtful {
        // Whatever the node says: the request may be carried out after that.
        for pause in AGAIN {
            tokio::time::sleep(pause).await;
            if attempt.tenure.is_over() {
                withdraw_once(&quorum, index, &quorum.withdrawal(&attempt)).await;
            }
        }
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
