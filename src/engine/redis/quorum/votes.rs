//! Collects and counts the answers of the nodes.

use std::error::Error as StdError;
use std::fmt;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt};
use tokio::task::unconstrained;
use tokio::time::Instant;

use super::Quorum;
use crate::engine::redis::error::{ENGINE, Failure};
use crate::error::EngineError;

/// The answer of one node. `None` until it arrives.
pub(super) type Answer<T> = Option<Result<T, Failure>>;

/// The requests to some nodes, and their answers.
///
/// # Behavior
/// The requests are in progress while an answer is awaited. When it is dropped, those without an answer continue in the background until
/// the engine is closed.
pub(super) struct Votes<T: Send + 'static> {
    quorum: Arc<Quorum>,
    pending: FuturesUnordered<BoxFuture<'static, (usize, Answer<T>)>>,
    pub(super) answers: Vec<Answer<T>>,
}

impl<T: Send + 'static> Votes<T> {
    /// Collects the answers of these requests, in the same order. A request may end without an answer.
    pub(super) fn new<F>(quorum: &Arc<Quorum>, requests: impl Iterator<Item = F>) -> Self
    where
        F: Future<Output = Answer<T>> + Send + 'static,
    {
        let pending: FuturesUnordered<BoxFuture<'static, _>> = requests
            .enumerate()
            .map(|(position, request)| -> BoxFuture<'static, _> { Box::pin(async move { (position, request.await) }) })
            .collect();
        Votes {
            quorum: quorum.clone(),
            answers: std::iter::repeat_with(|| None).take(pending.len()).collect(),
            pending,
        }
    }

    /// Waits until `judge` returns a decision, no more answers come, or `limit` has passed. Returns the decision, if there is one.
    pub(super) async fn decide<R>(
        &mut self,
        limit: Duration,
        mut judge: impl FnMut(&[Answer<T>]) -> Option<R>,
    ) -> Option<R> {
        self.decide_with_grace(limit, |answers| Some((judge(answers)?, Duration::ZERO)))
            .await
    }

    /// Does the same, but `judge` also returns for how long the other nodes may still answer after the first decision.
    pub(super) async fn decide_with_grace<R>(
        &mut self,
        limit: Duration,
        mut judge: impl FnMut(&[Answer<T>]) -> Option<(R, Duration)>,
    ) -> Option<R> {
        let mut end = Instant::now() + limit;
        let mut first_decision = None;
        let mut timeout = pin!(tokio::time::sleep_until(end));
        loop {
            // All answers that have arrived count together, even if this future is polled after the limit, in a task with many of them.
            while let Some(Some((position, answer))) = unconstrained(self.pending.next()).now_or_never() {
                self.answers[position] = answer;
            }
            let decision = judge(&self.answers);
            if let Some((_, grace)) = decision {
                end = end.min(*first_decision.get_or_insert_with(Instant::now) + grace);
                timeout.as_mut().reset(end);
            }
            if self.pending.is_empty() || end <= Instant::now() {
                return decision.map(|(decision, _)| decision);
            }
            tokio::select! {
                biased;
                Some((position, answer)) = self.pending.next() => self.answers[position] = answer,
                () = &mut timeout => {}
            }
        }
    }

    /// Continues the requests without an answer in the background. Their answers do not count.
    pub(super) fn close(&mut self) {
        if !self.pending.is_empty() {
            let mut pending = std::mem::take(&mut self.pending);
            self.quorum
                .spawn(async move { while pending.next().await.is_some() {} });
        }
    }
}

impl<T: Send + 'static> Drop for Votes<T> {
    fn drop(&mut self) {
        self.close();
    }
}

/// The numbers of nodes by their answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Count {
    pub(super) nodes: usize,
    pub(super) yes: usize,
    pub(super) no: usize,
    /// Has not answered yet.
    pub(super) silent: usize,
}

impl Count {
    pub(super) fn of<T>(answers: &[Answer<T>], yes: impl Fn(&T) -> bool) -> Self {
        let answered = |wanted: bool| {
            let is_wanted = |answer: &&Answer<T>| matches!(answer, Some(Ok(value)) if yes(value) == wanted);
            answers.iter().filter(is_wanted).count()
        };
        Count {
            nodes: answers.len(),
            yes: answered(true),
            no: answered(false),
            silent: answers.iter().filter(|answer| answer.is_none()).count(),
        }
    }

    pub(super) fn majority(self) -> usize {
        majority(self.nodes)
    }

    /// Returns what a majority answers: `true`, or `false` if enough nodes answer no that the others are not a majority. Returns
    /// `None` while that is not certain. [`Votes::decide`] then waits for all answers, even when they can not make it
    /// certain any more: the error names the nodes that failed.
    pub(super) fn verdict(self) -> Option<bool> {
        if self.yes >= self.majority() {
            Some(true)
        } else if self.no > self.nodes - self.majority() {
            Some(false)
        } else {
            None
        }
    }
}

/// Returns the size of a majority. Any two majorities share a node.
pub(super) fn majority(nodes: usize) -> usize {
    nodes / 2 + 1
}

/// The error of a request without a majority of equal answers.
#[derive(Debug)]
struct NoMajority {
    nodes: usize,
    answered: usize,
    /// The nodes without a valid answer. `None`: the node did not answer in time.
    failures: Vec<(Box<str>, Option<Failure>)>,
    limit: Duration,
}

impl fmt::Display for NoMajority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (answered, nodes) = (self.answered, self.nodes);
        if answered < majority(nodes) {
            write!(f, "no majority of the nodes: {answered} of {nodes} answered")?;
        } else {
            write!(f, "no majority of the nodes agreed: {answered} of {nodes} answered")?;
        }
        for (address, failure) in &self.failures {
            match failure {
                Some(failure @ Failure::Connect { .. }) => write!(f, "; {failure}")?,
                Some(failure) => write!(f, "; {address}: {failure}")?,
                None => write!(f, "; {address}: no answer within {} ms", self.limit.as_millis())?,
            }
        }
        Ok(())
    }
}

impl StdError for NoMajority {}

impl Quorum {
    /// Returns the error of a request that no majority answered within `limit`.
    pub(super) fn no_majority<T>(&self, op: &'static str, answers: &[Answer<T>], limit: Duration) -> EngineError {
        let total = answers.len();
        let failures: Vec<_> = self
            .nodes
            .iter()
            .zip(answers)
            .filter_map(|(node, answer)| match answer {
                Some(Ok(_)) => None,
                Some(Err(failure)) => Some((node.address.clone(), Some(failure.clone()))),
                None => Some((node.address.clone(), None)),
            })
            .collect();
        // A retry can not succeed if the nodes without a permanent error are not a majority.
        let permanent = failures
            .iter()
            .filter(|(_, failure)| failure.as_ref().is_some_and(|failure| !failure.retryable()))
            .count();
        let retryable = permanent <= total - majority(total);
        let source = NoMajority {
            nodes: total,
            answered: total - failures.len(),
            failures,
            limit,
        };
        EngineError::new(ENGINE, op, retryable, source)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    use super::*;
    use crate::engine::Settings;
    use crate::engine::redis::quorum::QuorumConfig;

    const LIMIT: Duration = Duration::from_secs(1);

    fn judged(answers: &[Answer<bool>]) -> Option<bool> {
        Count::of(answers, |yes| *yes).verdict()
    }

    #[test]
    fn a_majority_is_more_than_half() {
        assert_eq!([3, 4, 5, 6, 7].map(majority), [2, 3, 3, 4, 4]);
    }

    #[test]
    fn a_verdict_is_returned_as_soon_as_it_is_certain() {
        let (yes, no, failed, silent) = (
            || Some(Ok(true)),
            || Some(Ok(false)),
            || Some(Err(Failure::Closed("h:1".into()))),
            || None,
        );
        assert_eq!(judged(&[yes(), silent(), silent()]), None);
        assert_eq!(judged(&[yes(), silent(), yes()]), Some(true));
        assert_eq!(judged(&[no(), no(), silent()]), Some(false));
        assert_eq!(judged(&[yes(), no(), silent()]), None);
        assert_eq!(judged(&[yes(), no(), failed()]), None);
        // Two of four nodes are not a majority, and two that answer no prevent one.
        assert_eq!(judged(&[yes(), yes(), silent(), failed()]), None);
        assert_eq!(judged(&[yes(), yes(), no(), no()]), Some(false));
    }

    /// Returns requests to three nodes that are answered with yes after these times.
    fn votes<const N: usize>(after: [Duration; N]) -> (Votes<bool>, Arc<AtomicUsize>) {
        let urls = ["redis://a", "redis://b", "redis://c"].map(String::from);
        let quorum = Quorum::new(QuorumConfig::parse(&urls, &Settings::default()).unwrap());
        let answered = Arc::new(AtomicUsize::new(0));
        let requests = after.map(|after| {
            let answered = answered.clone();
            async move {
                tokio::time::sleep(after).await;
                answered.fetch_add(1, Relaxed);
                Some(Ok(true))
            }
        });
        (Votes::new(&quorum, requests.into_iter()), answered)
    }

    const NOW: Duration = Duration::ZERO;
    const NEVER: Duration = Duration::from_secs(3600);

    #[tokio::test(start_paused = true)]
    async fn a_request_without_an_answer_continues_in_the_background() {
        let (mut votes, answered) = votes([NOW, LIMIT * 5, NOW]);
        assert_eq!(votes.decide(LIMIT, judged).await, Some(true));
        assert!(votes.answers[1].is_none());
        drop(votes);
        assert_eq!(answered.load(Relaxed), 2);
        tokio::time::sleep(LIMIT * 6).await;
        assert_eq!(answered.load(Relaxed), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn answers_that_arrived_before_a_late_poll_count_together() {
        let (mut votes, _) = votes([LIMIT / 2, LIMIT / 2, NEVER]);
        let mut deciding = Box::pin(votes.decide(LIMIT, judged));
        assert!(futures_util::poll!(&mut deciding).is_pending());
        tokio::time::advance(LIMIT * 2).await;
        assert_eq!(deciding.await, Some(true));
    }

    #[tokio::test(start_paused = true)]
    async fn without_a_decision_the_limit_counts() {
        let (mut votes, _) = votes([NOW, NEVER, NEVER]);
        let started = Instant::now();
        assert_eq!(votes.decide(LIMIT, judged).await, None);
        assert!(started.elapsed() >= LIMIT && started.elapsed() < LIMIT * 2);
    }

    #[tokio::test(start_paused = true)]
    async fn the_other_nodes_have_the_grace_time_after_a_decision() {
        let generous = |answers: &[Answer<bool>]| Some((judged(answers)?, LIMIT / 10));
        let (mut late, _) = votes([NOW, NOW, LIMIT / 20]);
        assert_eq!(late.decide_with_grace(LIMIT, generous).await, Some(true));
        assert!(late.answers[2].is_some(), "it counts");

        let (mut silent, _) = votes([NOW, NOW, NEVER]);
        let started = Instant::now();
        assert_eq!(silent.decide_with_grace(LIMIT, generous).await, Some(true));
        assert!(started.elapsed() >= LIMIT / 10 && started.elapsed() < LIMIT / 2);
    }
}
