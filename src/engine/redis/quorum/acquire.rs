//! One attempt to acquire: a vote on every node, and the fence. What is left of one that failed: `withdraw.rs`.

use std::cmp::Reverse;
use std::sync::Arc;
use std::time::Duration;

use super::super::error::Failure;
use super::Quorum;
use super::attempt::Attempt;
use super::fence::{Proposal, agree};
use super::node::{Busy, Vote, silence};
use super::scripts::RAISE;
use super::tally::{Answer, Count, Tally};
use super::withdraw::VOTED;
use crate::engine::attempt_queue::Ticket;
use crate::engine::{Acquired, Result};
use crate::model::{Claim, Fence};

/// A retry after a split vote comes after a pause of this length, doubled up to five times at random: whoever split the
/// vote shall not come back at the same moment, however many they are.
const SPLIT_PAUSE: Duration = Duration::from_millis(4);
const DOUBLINGS: u32 = 5;

/// An attempt that has not come to its end. Dropped before that (its caller is gone), it is taken back.
struct Unfinished<'a> {
    claim: &'a Claim,
    attempt: Arc<Attempt>,
    answers: Option<Vec<Answer<Vote>>>,
    /// The attempt's ticket, until a majority has answered.
    ticket: Option<Ticket>,
    is_finished: bool,
}

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        if !self.is_finished {
            let answers = self.answers.take().unwrap_or_else(|| self.attempt.tally.close());
            for index in self.attempt.abandon(&answers) {
                self.attempt.withdraw_later(index, false);
            }
        }
        if let Some(ticket) = self.ticket.take() {
            self.attempt.keep_ticket(ticket);
        }
        self.claim.copy_sent_marks(&self.attempt.claim);
    }
}

impl Quorum {
    /// One attempt. Where its caller goes away, it is taken back.
    ///
    /// # Behavior
    /// At most [`ATTEMPTS`](super::ATTEMPTS) attempts are in progress. The others wait for a ticket: nothing is sent for them,
    /// and dropping one removes it from the queue.
    pub(super) async fn acquire(self: &Arc<Self>, claim: &Claim) -> Result<Acquired> {
        let attempt = async {
            let ticket = self.attempts.ticket().await;
            // Boxed, so that a call that waits for its ticket is small.
            Box::pin(self.attempt(claim, ticket)).await
        };
        tokio::select! {
            biased;
            () = self.closing.cancelled() => Err(Failure::Closed.during("acquire")),
            outcome = attempt => outcome,
        }
    }

    async fn attempt(self: &Arc<Self>, claim: &Claim, ticket: Ticket) -> Result<Acquired> {
        let limit = self.limit(claim.ttl);
        let mut attempt = Unfinished {
            claim,
            attempt: Attempt::begin(self, claim),
            answers: None,
            ticket: Some(ticket),
            is_finished: false,
        };
        let decided = |answers: &[Answer<Vote>]| self.is_decided(answers).then_some(());
        let (_, answers) = attempt.attempt.tally.decide(limit, decided).await;
        let answers = attempt.answers.insert(answers);
        let votes = count(answers);
        let is_answered = votes.yes + votes.no >= votes.majority();
        if votes.yes >= votes.majority()
            && let Some(fence) = self.settle_fence(&attempt.attempt, answers, limit).await
        {
            attempt.is_finished = true;
            attempt.ticket = None;
            #[cfg(unix)]
            attempt.attempt.record(fence);
            return Ok(Acquired::Granted { fence });
        }
        self.take_back(&attempt.attempt, answers, limit).await;
        attempt.is_finished = true;
        if is_answered {
            attempt.ticket = None;
        }
        // Busy, if enough nodes have answered to say that it is the lock and not the store.
        if votes.yes < votes.majority() && is_answered {
            #[cfg(unix)]
            if let [only] = claim.keys() {
                self.contended.note(only);
            }
            Ok(self.refusal(claim, answers))
        } else {
            Err(self.no_majority("acquire", answers, limit))
        }
    }

    /// Whether the votes that may still come can change anything.
    fn is_decided(&self, answers: &[Answer<Vote>]) -> bool {
        let votes = count(answers);
        let enough = self.majority();
        if votes.yes >= enough {
            // A retry by an owner that may have been granted the lock already: with those votes it gets the same fence.
            let kept = |answer: &&Answer<Vote>| matches!(answer, Some(Ok(Vote::Granted { already: true, .. })));
            let kept = answers.iter().filter(kept).count();
            return kept == 0 || kept >= enough || kept + votes.silent < enough;
        }
        let most = Standing::of(answers).same;
        votes.yes + votes.silent < enough
            && votes.yes + votes.no >= enough
            // Held by one, or certainly split.
            && (most >= enough || most + votes.silent < enough)
    }

    /// Agrees on the fence with the nodes that gave their votes. The votes that are not in yet are not needed: they belong
    /// to the same lease when they come.
    async fn settle_fence(
        self: &Arc<Self>,
        attempt: &Attempt,
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
            let mut call = self.call(&RAISE, &VOTED[..3], &attempt.claim, &attempt.value);
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
            tally.decide(limit, enough).await.0?;
        }
        Some(Fence(agreement.fence))
    }

    /// What to answer when the nodes that answered do not let the claim have its names.
    ///
    /// Somebody holds it, as far as can be told, when those that name him and those that say nothing may be a majority. Else
    /// the vote is split between attempts that all fail.
    fn refusal(&self, claim: &Claim, answers: &[Answer<Vote>]) -> Acquired {
        let Standing { busy, same, index } = Standing::of(answers);
        let unknown = answers.iter().filter(|answer| !matches!(answer, Some(Ok(_)))).count();
        let retry_after = if same + unknown >= self.majority() {
            // When so many leases have ended that those nodes, and those that are free, are a majority.
            let mut ends: Vec<_> = busy.iter().map(|vote| vote.left.unwrap_or(Duration::MAX)).collect();
            ends.sort_unstable();
            let needed = self.majority().saturating_sub(count(answers).yes).max(1);
            ends.get(needed - 1).copied().filter(|end| *end < Duration::MAX)
        } else {
            let youngest = busy.iter().filter_map(|vote| vote.age).min().unwrap_or_default();
            let first_end = busy.iter().filter_map(|vote| vote.left).min().unwrap_or(Duration::MAX);
            Some(split_pause(youngest).min(first_end))
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

/// Who is in the way.
struct Standing<'a> {
    busy: Vec<&'a Busy>,
    /// How many nodes name the same holder of the same name, at most.
    same: usize,
    /// Which name that is: the foremost of several.
    index: usize,
}

impl<'a> Standing<'a> {
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
        Standing { busy, same, index }
    }
}

/// When to try again after a split vote. The longer the youngest of the votes in the way has been there, the less it is
/// one of an attempt that just fails, and the more one that somebody left behind who died.
fn split_pause(youngest: Duration) -> Duration {
    let longest = SPLIT_PAUSE * 2u32.pow(fastrand::u32(0..=DOUBLINGS));
    let pause = longest.max(youngest / 2);
    pause / 2 + pause.mul_f64(fastrand::f64() / 2.0)
}
