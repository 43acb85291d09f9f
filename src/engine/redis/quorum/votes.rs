//! Collects and counts the answers of the nodes.

use std::error::Error as StdError;
use std::fmt;
use std::pin::pin;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::Quorum;
use crate::engine::redis::error::{ENGINE, Failure};
use crate::error::EngineError;

/// The answer of one node. `None` until it arrives.
pub(super) type Answer<T> = Option<Result<T, Failure>>;

/// The answers to one request that every node gets.
pub(super) struct Votes<T> {
    collected: Mutex<Collected<T>>,
    changed: Notify,
}

struct Collected<T> {
    is_open: bool,
    answers: Vec<Answer<T>>,
}

impl<T> Collected<T> {
    fn close(&mut self) -> Vec<Answer<T>> {
        self.is_open = false;
        std::mem::take(&mut self.answers)
    }
}

impl<T> Votes<T> {
    pub(super) fn new(nodes: usize) -> Self {
        let answers = std::iter::repeat_with(|| None).take(nodes).collect();
        Votes {
            collected: Mutex::new(Collected { is_open: true, answers }),
            changed: Notify::new(),
        }
    }

    /// Adds a node's answer. Returns the answer if it came after the decision: the caller handles it.
    pub(super) fn cast(&self, node: usize, answer: Result<T, Failure>) -> Answer<T> {
        let mut collected = self.collected.lock();
        if !collected.is_open {
            return Some(answer);
        }
        collected.answers[node] = Some(answer);
        drop(collected);
        self.changed.notify_one();
        None
    }

    /// Whether answers still count.
    pub(super) fn is_open(&self) -> bool {
        self.collected.lock().is_open
    }

    /// Returns the answers so far. Later answers do not count.
    pub(super) fn close(&self) -> Vec<Answer<T>> {
        self.collected.lock().close()
    }

    /// Waits until `judge` returns a decision, every node has answered, or `limit` has passed. Returns the decision, if
    /// there is one, and the answers that `judge` saw. Later answers do not count.
    pub(super) async fn decide<R>(
        &self,
        limit: Duration,
        mut judge: impl FnMut(&[Answer<T>]) -> Option<R>,
    ) -> (Option<R>, Vec<Answer<T>>) {
        self.decide_with_grace(limit, |answers| Some((judge(answers)?, Duration::ZERO)))
            .await
    }

    /// Does the same, but `judge` also returns for how long the other nodes may still answer after the first decision.
    pub(super) async fn decide_with_grace<R>(
        &self,
        limit: Duration,
        mut judge: impl FnMut(&[Answer<T>]) -> Option<(R, Duration)>,
    ) -> (Option<R>, Vec<Answer<T>>) {
        let mut end = Instant::now() + limit;
        let mut first_decision = None;
        let mut timeout = pin!(tokio::time::sleep_until(end));
        loop {
            {
                let mut collected = self.collected.lock();
                let decision = judge(&collected.answers);
                if let Some((_, grace)) = decision {
                    end = end.min(*first_decision.get_or_insert_with(Instant::now) + grace);
                    timeout.as_mut().reset(end);
                }
                if collected.answers.iter().all(Option::is_some) || end <= Instant::now() {
                    return (decision.map(|(decision, _)| decision), collected.close());
                }
            }
            tokio::select! {
                () = self.changed.notified() => {}
                () = &mut timeout => {}
            }
        }
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
    use super::*;

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

    #[tokio::test(start_paused = true)]
    async fn a_late_answer_is_returned_to_its_caller() {
        let votes = Votes::new(3);
        assert!(votes.cast(0, Ok(true)).is_none());
        assert!(votes.cast(2, Ok(true)).is_none());
        let (verdict, answers) = votes.decide(LIMIT, judged).await;
        assert_eq!(verdict, Some(true));
        assert!(answers[1].is_none());
        assert!(matches!(votes.cast(1, Ok(true)), Some(Ok(true))));

        let votes = Votes::new(3);
        votes.cast(0, Ok(true));
        let started = Instant::now();
        assert_eq!(votes.decide(LIMIT, judged).await.0, None);
        assert!(started.elapsed() >= LIMIT && started.elapsed() < LIMIT * 2);
    }

    #[tokio::test(start_paused = true)]
    async fn the_other_nodes_have_the_grace_time_after_a_decision() {
        let votes = Votes::new(3);
        votes.cast(0, Ok(true));
        votes.cast(1, Ok(true));
        let late = async {
            tokio::time::sleep(LIMIT / 20).await;
            votes.cast(2, Ok(true))
        };
        let generous = |answers: &[Answer<bool>]| Some((judged(answers)?, LIMIT / 10));
        let ((verdict, answers), late) = tokio::join!(votes.decide_with_grace(LIMIT, generous), late);
        assert_eq!(verdict, Some(true));
        assert!(late.is_none() && answers[2].is_some(), "it counts");

        let votes = Votes::new(3);
        votes.cast(0, Ok(true));
        votes.cast(1, Ok(true));
        let started = Instant::now();
        assert_eq!(votes.decide_with_grace(LIMIT, generous).await.0, Some(true));
        assert!(started.elapsed() >= LIMIT / 10 && started.elapsed() < LIMIT / 2);
    }
}
