//! Counting the answers of the nodes.

use std::error::Error as StdError;
use std::fmt;
use std::pin::pin;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use super::super::error::{ENGINE, Failure};
use super::node::Node;
use crate::error::EngineError;

/// What one node said; `None`: nothing yet.
pub(super) type Answer<T> = Option<Result<T, Failure>>;

/// One question to every node, and the answers so far.
pub(super) struct Tally<T> {
    polls: Mutex<Polls<T>>,
    told: Notify,
}

struct Polls<T> {
    open: bool,
    answers: Vec<Answer<T>>,
}

impl<T> Polls<T> {
    fn close(&mut self) -> Vec<Answer<T>> {
        self.open = false;
        std::mem::take(&mut self.answers)
    }
}

impl<T> Tally<T> {
    pub(super) fn new(nodes: usize) -> Self {
        let answers = std::iter::repeat_with(|| None).take(nodes).collect();
        Tally {
            polls: Mutex::new(Polls { open: true, answers }),
            told: Notify::new(),
        }
    }

    fn polls(&self) -> MutexGuard<'_, Polls<T>> {
        self.polls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands in a node's answer. An answer that comes after the decision is handed back: whoever brings it has to deal
    /// with what it means.
    pub(super) fn cast(&self, node: usize, answer: Result<T, Failure>) -> Answer<T> {
        let mut polls = self.polls();
        if !polls.open {
            return Some(answer);
        }
        polls.answers[node] = Some(answer);
        drop(polls);
        self.told.notify_one();
        None
    }

    /// The answers so far. None counts after that.
    pub(super) fn close(&self) -> Vec<Answer<T>> {
        self.polls().close()
    }

    /// Waits until `judge` comes to a decision, every node has answered, or `limit` is over. Answers the decision, if
    /// there is one, and the answers that it rests on. No answer counts after that.
    pub(super) async fn decide<R>(
        &self,
        limit: Duration,
        judge: impl FnMut(&[Answer<T>]) -> Option<R>,
    ) -> (Option<R>, Vec<Answer<T>>) {
        self.decide_with_grace(limit, Duration::ZERO, judge).await
    }

    /// The same, but when there is a decision the other nodes are given `grace` for theirs.
    pub(super) async fn decide_with_grace<R>(
        &self,
        limit: Duration,
        grace: Duration,
        mut judge: impl FnMut(&[Answer<T>]) -> Option<R>,
    ) -> (Option<R>, Vec<Answer<T>>) {
        let mut end = Instant::now() + limit;
        let mut is_graced = false;
        let mut time_is_over = pin!(tokio::time::sleep_until(end));
        loop {
            {
                let mut polls = self.polls();
                let decision = judge(&polls.answers);
                if decision.is_some() && !is_graced {
                    is_graced = true;
                    end = end.min(Instant::now() + grace);
                    time_is_over.as_mut().reset(end);
                }
                if polls.answers.iter().all(Option::is_some) || end <= Instant::now() {
                    return (decision, polls.close());
                }
            }
            tokio::select! {
                () = self.told.notified() => {}
                () = &mut time_is_over => {}
            }
        }
    }
}

/// How many nodes say what.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Count {
    pub(super) nodes: usize,
    pub(super) yes: usize,
    pub(super) no: usize,
    /// Nothing yet, and an answer may come.
    pub(super) silent: usize,
}

impl Count {
    pub(super) fn of<T>(answers: &[Answer<T>], yes: impl Fn(&T) -> bool) -> Self {
        let said = |wanted: bool| {
            let is_wanted = |answer: &&Answer<T>| matches!(answer, Some(Ok(said)) if yes(said) == wanted);
            answers.iter().filter(is_wanted).count()
        };
        Count {
            nodes: answers.len(),
            yes: said(true),
            no: said(false),
            silent: answers.iter().filter(|answer| answer.is_none()).count(),
        }
    }

    pub(super) fn majority(self) -> usize {
        majority(self.nodes)
    }

    /// What a majority says: yes, or so many no that the others cannot be one. `None`: not to be told (yet). Where it is
    /// not to be told any more, the last answers are waited for all the same: who is lost is worth knowing.
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

/// How many of so many nodes are a majority: any two of that size share a node.
pub(super) fn majority(nodes: usize) -> usize {
    nodes / 2 + 1
}

/// There was no majority for an answer.
#[derive(Debug)]
struct NoMajority {
    nodes: usize,
    answered: usize,
    /// What kept the others from it.
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

/// The error of a question that no majority answered within `limit`.
pub(super) fn no_majority<'n, T>(
    op: &'static str,
    nodes: impl Iterator<Item = &'n Node>,
    answers: &[Answer<T>],
    limit: Duration,
) -> EngineError {
    let total = answers.len();
    let failures: Vec<_> = nodes
        .zip(answers)
        .filter_map(|(node, answer)| match answer {
            Some(Ok(_)) => None,
            Some(Err(failure)) => Some((node.address.clone(), Some(failure.clone()))),
            None => Some((node.address.clone(), None)),
        })
        .collect();
    // With so many nodes out of order for good that the others are no majority, only a human helps.
    let hopeless = failures
        .iter()
        .filter(|(_, failure)| failure.as_ref().is_some_and(|failure| !failure.retryable()))
        .count();
    let retryable = hopeless <= total - majority(total);
    let source = NoMajority {
        nodes: total,
        answered: total - failures.len(),
        failures,
        limit,
    };
    EngineError::new(ENGINE, op, retryable, source)
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
    fn a_verdict_comes_as_soon_as_it_is_certain() {
        let (yes, no, failed, silent) = (
            || Some(Ok(true)),
            || Some(Ok(false)),
            || Some(Err(Failure::Closed)),
            || None,
        );
        assert_eq!(judged(&[yes(), silent(), silent()]), None);
        assert_eq!(judged(&[yes(), silent(), yes()]), Some(true));
        assert_eq!(judged(&[no(), no(), silent()]), Some(false));
        assert_eq!(judged(&[yes(), no(), silent()]), None);
        assert_eq!(judged(&[yes(), no(), failed()]), None);
        // Of four, two are no majority, and two that say no leave none.
        assert_eq!(judged(&[yes(), yes(), silent(), failed()]), None);
        assert_eq!(judged(&[yes(), yes(), no(), no()]), Some(false));
    }

    #[tokio::test(start_paused = true)]
    async fn late_answers_are_handed_back() {
        let tally = Tally::new(3);
        assert!(tally.cast(0, Ok(true)).is_none());
        assert!(tally.cast(2, Ok(true)).is_none());
        let (verdict, answers) = tally.decide(LIMIT, judged).await;
        assert_eq!(verdict, Some(true));
        assert!(answers[1].is_none());
        assert!(matches!(tally.cast(1, Ok(true)), Some(Ok(true))));

        let tally = Tally::new(3);
        tally.cast(0, Ok(true));
        let started = Instant::now();
        assert_eq!(tally.decide(LIMIT, judged).await.0, None);
        assert!(started.elapsed() >= LIMIT && started.elapsed() < LIMIT * 2);
    }

    #[tokio::test(start_paused = true)]
    async fn grace_is_for_the_others_once_there_is_a_decision() {
        let tally = Tally::new(3);
        tally.cast(0, Ok(true));
        tally.cast(1, Ok(true));
        let late = async {
            tokio::time::sleep(LIMIT / 20).await;
            tally.cast(2, Ok(true))
        };
        let ((verdict, answers), late) = tokio::join!(tally.decide_with_grace(LIMIT, LIMIT / 10, judged), late);
        assert_eq!(verdict, Some(true));
        assert!(late.is_none() && answers[2].is_some(), "it counts");

        let tally = Tally::new(3);
        tally.cast(0, Ok(true));
        tally.cast(1, Ok(true));
        let started = Instant::now();
        assert_eq!(tally.decide_with_grace(LIMIT, LIMIT / 10, judged).await.0, Some(true));
        assert!(started.elapsed() >= LIMIT / 10 && started.elapsed() < LIMIT / 2);
    }
}
