//! An attempt to acquire: one round of votes, and the agreement on the fencing token.

mod replies;
pub(super) mod request_lifetime;
mod round;

use std::cmp::Reverse;
use std::sync::Arc;
use std::time::Duration;

use self::round::Round;
use super::fence::{Proposal, agree};
use super::node::{Busy, Vote};
use super::scripts::RAISE;
use super::votes::{Answer, Count, Votes};
use super::{Quorum, VOTED};
use crate::engine::attempt_queue::Permit;
use crate::engine::redis::error::Failure;
use crate::engine::{Acquired, Result};
use crate::model::{Claim, Fence};

/// The shortest upper bound of the delay before a retry after a split vote. It is doubled up to [`DOUBLINGS`] times at random,
/// so that the attempts that split the vote do not retry at the same moment.
const SPLIT_DELAY: Duration = Duration::from_millis(4);
const DOUBLINGS: u32 = 5;
/// A node that has not answered for this time hangs: no attempt with split votes waits for it.
const HANGS_AFTER: Duration = Duration::from_millis(250);
/// A vote that is younger than this may belong to an attempt that is about to be rolled back.
const YOUNG: Duration = Duration::from_secs(1);

/// An attempt in progress. If it is dropped before it has come to its end (its caller was dropped), it is rolled back.
struct Attempt {
    round: Arc<Round>,
    votes: Votes<Vote>,
    permit: Option<Permit>,
    is_finished: bool,
}

impl Attempt {
    /// Ends a failed attempt. Returns the rollback of its votes.
    fn abandon(&mut self) -> Votes<()> {
        self.is_finished = true;
        let votes = count(&self.votes.answers);
        let is_answered = votes.yes + votes.no >= votes.majority();
        let kept = self.permit.take_if(|_| !is_answered);
        let rollback = self.round.abandon(&self.votes.answers, kept);
        self.votes.close();
        rollback
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        if !self.is_finished {
            drop(self.abandon());
        }
    }
}

impl Quorum {
    /// Makes one attempt. Dropping the future rolls it back.
    ///
    /// # Behavior
    /// At most [`ATTEMPTS`](super::ATTEMPTS) attempts are in progress. The others wait for a permit: nothing is sent for them,
    /// and dropping one removes it from the queue. An attempt right after a release is delayed, so that waiting services are
    /// granted the name first.
    pub(super) async fn acquire(self: &Arc<Self>, claim: &Claim) -> Result<Acquired> {
        let attempt = async {
            self.turns.wait(claim.keys()).await;
            let permit = self.attempts.permit(&claim.keys()[0]).await;
            // Boxed, so that a call that waits for its permit is small.
            Box::pin(self.attempt(claim, permit)).await
        };
        tokio::select! {
            biased;
            () = self.closing.cancelled() => Err(Failure::Closed("the quorum".into()).during("acquire")),
            outcome = attempt => outcome,
        }
    }

    async fn attempt(self: &Arc<Self>, claim: &Claim, permit: Permit) -> Result<Acquired> {
        let limit = self.vote_timeout(claim.ttl);
        let (round, votes) = Round::begin(self, claim);
        let mut attempt = Attempt {
            round,
            votes,
            permit: Some(permit),
            is_finished: false,
        };
        let decided = |answers: &[Answer<Vote>]| Some(((), self.grace(answers)?));
        attempt.votes.decide_with_grace(limit, decided).await;
        let votes = count(&attempt.votes.answers);
        if votes.yes >= votes.majority()
            && let Some(fence) = self.agree_on_fence(&attempt.round, &attempt.votes.answers, limit).await
        {
            attempt.is_finished = true;
            attempt.round.write_record(fence);
            return Ok(Acquired::Granted { fence });
        }
        // Waits until the rollback is executed on the nodes that may have given their votes.
        attempt.abandon().decide(limit, |_| None::<()>).await;
        let answers = &attempt.votes.answers;
        // Busy, if a majority has answered: otherwise the store has failed.
        if votes.yes < votes.majority() && votes.yes + votes.no >= votes.majority() {
            if let [only] = claim.keys() {
                self.contended.note(only);
            }
            Ok(self.busy(claim, answers))
        } else {
            Err(self.no_majority("acquire", answers, limit))
        }
    }

    /// Returns for how long the missing nodes may still answer. `None`: without them there is no outcome.
    ///
    /// # Behavior
    /// Where a majority has answered and the votes are split, an attempt waits only for nodes that are not hanging. Otherwise
    /// each of several rivals would keep its vote until its time limit, and none would be granted the name.
    fn grace(&self, answers: &[Answer<Vote>]) -> Option<Duration> {
        if self.is_decided(answers) {
            return Some(Duration::ZERO);
        }
        let votes = count(answers);
        let is_split = votes.yes < self.majority() && votes.yes + votes.no >= self.majority();
        let missing = self.nodes.iter().zip(answers).filter(|(_, answer)| answer.is_none());
        let left = missing.map(|(node, _)| HANGS_AFTER.saturating_sub(node.silence()));
        is_split.then(|| left.max().unwrap_or_default())
    }

    /// Returns whether the missing votes can not change the outcome.
    fn is_decided(&self, answers: &[Answer<Vote>]) -> bool {
        let votes = count(answers);
        let enough = self.majority();
        if votes.yes >= enough {
            // A retry by an owner that may have been granted the lock already: with those votes it gets the same token.
            let kept = |answer: &&Answer<Vote>| matches!(answer, Some(Ok(Vote::Granted { already: true, .. })));
            let kept = answers.iter().filter(kept).count();
            return kept == 0 || kept >= enough || kept + votes.silent < enough;
        }
        let most = Conflict::of(answers).same;
        votes.yes + votes.silent < enough
            && votes.yes + votes.no >= enough
            // Held by one holder, or certainly split.
            && (most >= enough || most + votes.silent < enough)
    }

    /// Agrees on the fencing token with the nodes that gave their votes. The missing votes are not needed: when they arrive,
    /// they belong to the same lease.
    async fn agree_on_fence(
        self: &Arc<Self>,
        round: &Round,
        answers: &[Answer<Vote>],
        limit: Duration,
    ) -> Option<Fence> {
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
            let mut call = self.call(&RAISE, &VOTED[..3], &round.claim, &round.value);
            call.arg(agreement.fence);
            let call = Arc::new(call);
            let mut votes = self.request_from(agreement.behind.into_iter(), limit, |node| {
                let call = call.clone();
                async move { node.number(&RAISE, &call).await }
            });
            let raised = |answers: &[Answer<i64>]| Count::of(answers, |answer| *answer == 1);
            let enough = |answers: &[Answer<i64>]| (raised(answers).yes >= missing).then_some(());
            votes.decide(limit, enough).await?;
        }
        Some(Fence(agreement.fence))
    }

    /// Returns the answer to a claim whose names the nodes did not grant.
    ///
    /// # Behavior
    /// The claim counts as held if a majority names the same holder, or if the nodes that name it and the silent nodes may be
    /// one and its votes are not young. Otherwise the vote is split between attempts that all fail.
    fn busy(&self, claim: &Claim, answers: &[Answer<Vote>]) -> Acquired {
        let Conflict { busy, same, index } = Conflict::of(answers);
        let unknown = answers.iter().filter(|answer| !matches!(answer, Some(Ok(_)))).count();
        let is_old = || busy.iter().all(|vote| vote.age.is_none_or(|age| age >= YOUNG));
        let retry_after = if same >= self.majority() || same + unknown >= self.majority() && is_old() {
            // When enough leases have ended that their nodes and the free ones are a majority.
            let mut ends: Vec<_> = busy.iter().map(|vote| vote.left.unwrap_or(Duration::MAX)).collect();
            ends.sort_unstable();
            let needed = self.majority().saturating_sub(count(answers).yes).max(1);
            ends.get(needed - 1).copied().filter(|end| *end < Duration::MAX)
        } else {
            let youngest = busy.iter().filter_map(|vote| vote.age).min().unwrap_or_default();
            let first_end = busy.iter().filter_map(|vote| vote.left).min().unwrap_or(Duration::MAX);
            Some(split_delay(youngest).min(first_end))
        };
        Acquired::Held {
            key: claim.keys()[index].clone(),
            retry_after,
        }
    }
}

fn count(answers: &[Answer<Vote>]) -> Count {
    Count::of(answers, |vote| matches!(vote, Vote::Granted { .. }))
}

/// The holders that the nodes name.
struct Conflict<'a> {
    busy: Vec<&'a Busy>,
    /// The largest number of nodes that name the same holder of the same name.
    same: usize,
    /// The position of that name in the claim: the first one of several.
    index: usize,
}

impl<'a> Conflict<'a> {
    fn of(answers: &'a [Answer<Vote>]) -> Self {
        let busy: Vec<&Busy> = answers
            .iter()
            .filter_map(|answer| match answer {
                Some(Ok(Vote::Busy(busy))) => Some(busy),
                _ => None,
            })
            .collect();
        let alike = |one: &Busy| {
            busy.iter()
                .filter(|other| (other.index, &other.value) == (one.index, &one.value))
                .count()
        };
        let foremost = busy.iter().map(|one| (alike(one), Reverse(one.index))).max();
        let (same, Reverse(index)) = foremost.unwrap_or((0, Reverse(0)));
        Conflict { busy, same, index }
    }
}

/// Returns the delay before a retry after a split vote. The older the youngest conflicting vote is, the more likely it was left
/// behind by a process that died, and the less likely it belongs to an attempt that is about to be rolled back.
fn split_delay(youngest: Duration) -> Duration {
    let longest = SPLIT_DELAY * 2u32.pow(fastrand::u32(0..=DOUBLINGS));
    let delay = longest.max(youngest / 2);
    delay / 2 + delay.mul_f64(fastrand::f64() / 2.0)
}
