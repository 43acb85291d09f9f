//! One attempt to acquire: a vote on every node, the fence, and the clean-up after what failed.

use std::sync::Arc;
use std::time::Duration;

use redis::Cmd;

use super::super::FENCE_KEPT_MS;
use super::super::keys::Part;
use super::fence::{Proposal, agree};
use super::node::{Node, Vote, common_time, in_doubt, silence};
use super::scripts::{ACQUIRE, RAISE, WITHDRAW};
use super::tally::{Answer, Count, Tally};
use super::tenure::Tenure;
use super::{AGAIN, Quorum};
use crate::engine::{Acquired, Result};
use crate::model::{Claim, Fence};

/// How long the late answer of a node is waited for. A node that was stopped may go on after any time; but what lies in
/// the buffers of a connection is carried out, or gone with it, within a minute or so.
const LATE: Duration = Duration::from_secs(65);
/// A retry after a split vote comes after a pause of this length, doubled up to five times at random: whoever split the
/// vote shall not come back at the same moment, however many they are.
const SPLIT_PAUSE: Duration = Duration::from_millis(4);
const DOUBLINGS: u32 = 5;

const PARTS: [Part; 3] = [Part::Lock, Part::Fence, Part::Metadata];

/// One attempt, as its clean-up knows it.
struct Attempt {
    claim: Claim,
    /// What the lock keys hold where it has the vote.
    value: String,
    tenure: Arc<Tenure>,
}

/// Ends the tenure unless the attempt was granted, also when the caller goes away in the middle.
struct Open<'a>(&'a Attempt);

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.0.tenure.end();
    }
}

impl Quorum {
    pub(super) async fn acquire(self: &Arc<Self>, claim: &Claim) -> Result<Acquired> {
        let number = self.next_attempt();
        let attempt = Arc::new(Attempt {
            claim: claim.clone(),
            value: format!("{}.{number}", claim.owner.as_str()),
            tenure: self.tenures.begin(&claim.owner),
        });
        let open = Open(&attempt);
        let limit = self.limit(claim.ttl);
        let tally = self.call_votes(&attempt, number);
        let (_, answers) = tally.decide(limit, |answers| self.is_decided(answers).then_some(())).await;
        let votes = Count::of(&answers, |vote| matches!(vote, Vote::Granted { .. }));
        let outcome = if votes.yes >= votes.majority() {
            self.settle_fence(&attempt, &answers, limit).await
        } else if votes.yes + votes.no >= votes.majority() {
            Ok(self.refusal(claim, &answers))
        } else {
            Err(())
        };
        match outcome {
            Ok(granted @ Acquired::Granted { .. }) => {
                std::mem::forget(open);
                Ok(granted)
            }
            Ok(held) => {
                drop(open);
                self.take_back(&attempt, &answers, limit).await;
                Ok(held)
            }
            Err(()) => {
                drop(open);
                self.take_back(&attempt, &answers, limit).await;
                Err(self.no_majority("acquire", answers, limit))
            }
        }
    }

    /// Whether the votes that may still come can change anything.
    fn is_decided(&self, answers: &[Answer<Vote>]) -> bool {
        let votes = Count::of(answers, |vote| matches!(vote, Vote::Granted { .. }));
        let enough = self.majority();
        // Refused for certain, and by enough nodes to say that it is the lock that is busy and not the store that is down.
        let refused = votes.yes + votes.silent < enough && votes.yes + votes.no >= enough;
        let lost = votes.yes + votes.no + votes.silent < enough;
        votes.yes >= enough || refused || lost
    }

    fn call_votes(self: &Arc<Self>, attempt: &Arc<Attempt>, number: u64) -> Arc<Tally<Vote>> {
        let claim = &attempt.claim;
        let parts = if claim.metadata.is_some() {
            &PARTS[..]
        } else {
            &PARTS[..2]
        };
        let ttl = claim.ttl.as_millis();
        let mut call = self.call(&ACQUIRE, parts, claim, claim.owner.as_str());
        call.arg(number)
            .arg(ttl)
            .arg(ttl + FENCE_KEPT_MS)
            .arg(common_time(self.nodes.iter().map(|node| &**node)))
            .arg(claim.process.pid)
            .arg(&claim.process.host);
        if let Some(metadata) = &claim.metadata {
            call.arg(&**metadata);
        }
        let (call, tally) = (Arc::new(call), Arc::new(Tally::new(self.nodes.len())));
        for index in 0..self.nodes.len() {
            let vote = vote(self.clone(), index, attempt.clone(), call.clone(), tally.clone());
            self.spawn(vote);
        }
        tally
    }

    /// Agrees on the fence with the nodes that gave their votes. The votes that are not in yet are not needed: they belong
    /// to the same lease when they come.
    async fn settle_fence(
        self: &Arc<Self>,
        attempt: &Attempt,
        answers: &[Answer<Vote>],
        limit: Duration,
    ) -> std::result::Result<Acquired, ()> {
        let proposals: Vec<Proposal> = answers
            .iter()
            .enumerate()
            .filter_map(|(node, answer)| match *answer {
                Some(Ok(Vote::Granted { fence, already })) => Some(Proposal { node, fence, already }),
                _ => None,
            })
            .collect();
        let agreement = agree(&proposals, self.majority());
        let missing = self.majority().saturating_sub(agreement.known);
        if missing > 0 {
            let mut call = self.call(&RAISE, &PARTS[..2], &attempt.claim, &attempt.value);
            call.arg(agreement.fence);
            let call = Arc::new(call);
            let tally = Arc::new(Tally::new(agreement.behind.len()));
            for (index, node) in agreement.behind.iter().enumerate() {
                let (node, call, tally) = (self.nodes[*node].clone(), call.clone(), tally.clone());
                self.spawn(async move {
                    let answer = tokio::time::timeout(limit, node.number(&RAISE, &call)).await;
                    tally.cast(index, answer.unwrap_or_else(|_| Err(silence())));
                });
            }
            let raised = |answers: &[Answer<i64>]| Count::of(answers, |answer| *answer == 1);
            let enough = |answers: &[Answer<i64>]| (raised(answers).yes >= missing).then_some(());
            tally.decide(limit, enough).await.0.ok_or(())?;
        }
        Ok(Acquired::Granted {
            fence: Fence(agreement.fence),
        })
    }

    /// What to answer when the nodes that answered do not let the claim have its names.
    ///
    /// Somebody holds it, as far as can be told, when those that name him and those that say nothing may be a majority. Else
    /// the vote is split between attempts that all fail.
    fn refusal(&self, claim: &Claim, answers: &[Answer<Vote>]) -> Acquired {
        let mut busy = Vec::new();
        for answer in answers {
            if let Some(Ok(Vote::Busy { index, left, value, age })) = answer {
                busy.push((*index, *left, value.as_slice(), *age));
            }
        }
        let said = |index: usize, value: &[u8]| busy.iter().filter(|vote| (vote.0, vote.2) == (index, value)).count();
        let unknown = answers.iter().filter(|answer| !matches!(answer, Some(Ok(_)))).count();
        // The first name of several that are as busy: one order for everybody.
        let foremost = busy.iter().map(|vote| (said(vote.0, vote.2), std::cmp::Reverse(vote.0))).max();
        let (count, index) = foremost.map_or((0, 0), |(count, index)| (count, index.0));
        let retry_after = if count + unknown >= self.majority() {
            // When so many leases have ended that those nodes, and those that are free, are a majority.
            let free = answers.iter().filter(|answer| matches!(answer, Some(Ok(Vote::Granted { .. })))).count();
            let mut ends: Vec<_> = busy.iter().map(|vote| vote.1.unwrap_or(Duration::MAX)).collect();
            ends.sort_unstable();
            let needed = self.majority().saturating_sub(free).max(1);
            ends.get(needed - 1).copied().filter(|end| *end < Duration::MAX)
        } else {
            let youngest = busy.iter().filter_map(|vote| vote.3).min().unwrap_or_default();
            let first_end = busy.iter().filter_map(|vote| vote.1).min().unwrap_or(Duration::MAX);
            Some(split_pause(youngest).min(first_end))
        };
        Acquired::Held {
            key: claim.keys()[index].clone(),
            retry_after,
        }
    }

    /// Takes back whatever an attempt that failed may have got. When this returns, nothing of it is left on the nodes that
    /// gave their votes, and can answer; with the others it goes on in the background.
    async fn take_back(self: &Arc<Self>, attempt: &Arc<Attempt>, answers: &[Answer<Vote>], limit: Duration) {
        let call = Arc::new(self.withdrawal(attempt));
        let (mut given, mut tallied) = (0, Vec::new());
        for (index, answer) in answers.iter().enumerate() {
            match answer {
                Some(Ok(Vote::Granted { .. })) => {
                    given += 1;
                    tallied.push(index);
                }
                // An answer to come is followed by another withdrawal; but perhaps only the answer is late.
                None => self.spawn(withdraw(self.clone(), index, call.clone(), None)),
                // Nothing was taken there, or `vote` sees to it.
                Some(_) => {}
            }
        }
        let tally = Arc::new(Tally::new(given));
        for (place, index) in tallied.into_iter().enumerate() {
            let tally = tally.clone();
            self.spawn(withdraw(self.clone(), index, call.clone(), Some((tally, place))));
        }
        tally.decide(limit, |_: &[Answer<()>]| None::<()>).await;
    }

    fn withdrawal(&self, attempt: &Attempt) -> Cmd {
        self.call(&WITHDRAW, &[Part::Lock, Part::Metadata], &attempt.claim, &attempt.value)
    }
}

/// Gets one node's vote, and sees to it that nothing is left there when it comes too late, or may be carried out without
/// an answer.
async fn vote(quorum: Arc<Quorum>, index: usize, attempt: Arc<Attempt>, call: Arc<Cmd>, tally: Arc<Tally<Vote>>) {
    let node: &Node = &quorum.nodes[index];
    let names = attempt.claim.keys().len();
    let answer = tokio::time::timeout(LATE, node.vote(&call, names)).await;
    let answer = answer.unwrap_or_else(|_| Err(silence()));
    let doubtful = matches!(&answer, Err(failure) if in_doubt(failure));
    if let Some(late) = tally.cast(index, answer)
        && matches!(late, Ok(Vote::Granted { .. }))
        && attempt.tenure.is_over()
    {
        let call = Arc::new(quorum.withdrawal(&attempt));
        withdraw(quorum.clone(), index, call, None).await;
    }
    if doubtful {
        let call = quorum.withdrawal(&attempt);
        for pause in AGAIN {
            if attempt.tenure.is_over() {
                let _ = tokio::time::timeout(quorum.patience, node.number(&WITHDRAW, &call)).await;
            }
            tokio::time::sleep(pause).await;
        }
        if attempt.tenure.is_over() {
            let _ = tokio::time::timeout(quorum.patience, node.number(&WITHDRAW, &call)).await;
        }
    }
}

/// Takes back one node's vote, again and again until the node has said that it did.
async fn withdraw(quorum: Arc<Quorum>, index: usize, call: Arc<Cmd>, told: Option<(Arc<Tally<()>>, usize)>) {
    let _urgent = quorum.urgent.token();
    let node = &quorum.nodes[index];
    for pause in AGAIN {
        if let Ok(Ok(_)) = tokio::time::timeout(quorum.patience, node.number(&WITHDRAW, &call)).await {
            break;
        }
        tokio::time::sleep(pause).await;
    }
    if let Some((tally, place)) = told {
        tally.cast(place, Ok(()));
    }
}

/// When to try again after a split vote. The longer the youngest of the votes in the way has been there, the less it is
/// one of an attempt that just fails, and the more one that somebody left behind who died.
fn split_pause(youngest: Duration) -> Duration {
    let longest = SPLIT_PAUSE * 2u32.pow(fastrand::u32(0..=DOUBLINGS));
    let pause = longest.max(youngest / 2);
    pause / 2 + pause.mul_f64(fastrand::f64() / 2.0)
}
