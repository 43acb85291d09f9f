//! Tracks attempts that may still take effect: those that their caller dropped while their task waits for the server, and
//! those whose last command was not answered.
//!
//! The task of a dropped attempt starts no further step of the acquisition and rolls back what it wrote. A release of the same
//! claim, and another attempt of it, wait for the end of the task. So the server executes them after what the attempt sent.
//! Where the task ended without an answer, a release ends the attempt's session first (`session.rs`).

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use parking_lot::Mutex;
use tokio::sync::MappedMutexGuard;
use tokio_util::sync::CancellationToken;

use crate::engine::mongodb::Outcome;
use crate::engine::mongodb::connection::pool::Pool;
use crate::engine::mongodb::connection::session::{AttemptSession, Session};
use crate::engine::mongodb::error::Failure;
use crate::model::OwnerToken;

/// The attempts of one engine that may still take effect.
#[derive(Default)]
pub(crate) struct UnsettledAttempts(Mutex<Unsettled>);

/// Attempts by owner.
#[derive(Default)]
struct Unsettled {
    /// Dropped ones, until the attempt's task has ended.
    dropped: HashMap<OwnerToken, CancellationToken>,
    /// The sessions of those with a command that was not answered.
    unanswered: HashMap<OwnerToken, Vec<AttemptSession>>,
}

/// The task's view of the caller of an attempt, and the attempt's session. The default caller never drops the attempt.
#[derive(Clone, Default)]
pub(crate) struct Caller {
    flags: Arc<Flags>,
    session: AttemptSession,
}

/// What the caller and the task of an attempt share.
#[derive(Debug, Default)]
struct Flags {
    /// The caller dropped the attempt.
    is_gone: CancellationToken,
    /// The task has ended.
    has_ended: CancellationToken,
    /// Whether a command of the attempt failed that the outcome does not report.
    is_unsettled: AtomicBool,
}

impl Caller {
    /// Whether the caller dropped the attempt.
    pub(crate) fn is_gone(&self) -> bool {
        self.flags.is_gone.is_cancelled()
    }

    /// Returns the session for a write of the acquisition.
    ///
    /// # Errors
    /// [`Failure::is_cancelled`] when the caller dropped the attempt.
    pub(crate) async fn session(&self, pool: &Pool) -> Outcome<MappedMutexGuard<'_, Session>> {
        match self.is_gone() {
            true => Err(Failure::cancelled()),
            false => self.session.get(pool).await,
        }
    }

    /// Notes that a command failed that the outcome of the attempt does not report: a rollback, or a part of a batch.
    pub(crate) fn note_unsettled(&self) {
        self.flags.is_unsettled.store(true, Relaxed);
    }

    /// Waits for `step`, which sends nothing of the attempt, until the caller drops the attempt.
    ///
    /// # Errors
    /// Those of the step, or [`Failure::is_cancelled`] when the caller dropped the attempt.
    pub(crate) async fn while_here<T>(&self, step: impl Future<Output = Outcome<T>>) -> Outcome<T> {
        let outcome = self.flags.is_gone.run_until_cancelled(step).await;
        outcome.unwrap_or_else(|| Err(Failure::cancelled()))
    }
}

/// The caller's handle of an attempt. Dropping it before the attempt has ended cancels the attempt.
pub(crate) struct CallerGuard {
    attempts: Arc<UnsettledAttempts>,
    owners: Vec<OwnerToken>,
    caller: Caller,
}

/// The task's handle of an attempt. The task drops it at its end.
pub(crate) struct TaskGuard {
    attempts: Arc<UnsettledAttempts>,
    owners: Vec<OwnerToken>,
    caller: Caller,
    is_answered: bool,
}

impl TaskGuard {
    /// Notes the outcome. Without one, or without an answer, a release ends the session of the attempt.
    pub(crate) fn note<T>(&mut self, outcome: &Outcome<T>) {
        self.is_answered = !outcome.as_ref().is_err_and(Failure::is_without_answer);
    }
}

impl UnsettledAttempts {
    /// Begins an attempt for these owners.
    pub(crate) fn begin(self: &Arc<Self>, owners: Vec<OwnerToken>) -> (CallerGuard, TaskGuard, Caller) {
        let caller = Caller::default();
        let task = TaskGuard {
            attempts: self.clone(),
            owners: owners.clone(),
            caller: caller.clone(),
            is_answered: false,
        };
        let waiting = CallerGuard {
            attempts: self.clone(),
            owners,
            caller: caller.clone(),
        };
        (waiting, task, caller)
    }

    /// Whether an attempt of this owner may still take effect.
    pub(crate) fn has(&self, owner: &OwnerToken) -> bool {
        let unsettled = self.0.lock();
        unsettled.dropped.contains_key(owner) || unsettled.unanswered.contains_key(owner)
    }

    /// Returns the sessions of this owner's attempts that were not answered.
    pub(crate) fn unanswered(&self, owner: &OwnerToken) -> Vec<AttemptSession> {
        self.0.lock().unanswered.get(owner).cloned().unwrap_or_default()
    }

    /// Forgets the attempts of this owner that were not answered: their sessions have ended.
    pub(crate) fn forget(&self, owner: &OwnerToken) {
        self.0.lock().unanswered.remove(owner);
    }

    /// Waits until no dropped attempt of this owner is in progress.
    pub(crate) async fn ended(&self, owner: &OwnerToken) {
        let attempt = self.0.lock().dropped.get(owner).cloned();
        if let Some(attempt) = attempt {
            attempt.cancelled().await;
        }
    }
}

impl Drop for CallerGuard {
    fn drop(&mut self) {
        let mut unsettled = self.attempts.0.lock();
        let Flags { is_gone, has_ended, .. } = &*self.caller.flags;
        if !has_ended.is_cancelled() {
            is_gone.cancel();
            let owners = self.owners.drain(..);
            unsettled.dropped.extend(owners.map(|owner| (owner, has_ended.clone())));
        }
    }
}

impl Drop for TaskGuard {
    fn drop(&mut self) {
        let mut unsettled = self.attempts.0.lock();
        let Flags {
            has_ended,
            is_unsettled,
            ..
        } = &*self.caller.flags;
        // Under the lock, so that no caller enters an attempt that has ended.
        has_ended.cancel();
        for owner in self.owners.drain(..) {
            unsettled.dropped.remove(&owner);
            if !self.is_answered || is_unsettled.load(Relaxed) {
                let sessions = unsettled.unanswered.entry(owner).or_default();
                sessions.push(self.caller.session.clone());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn a_dropped_attempt_is_in_progress_until_its_task_ends() {
        let attempts = Arc::new(UnsettledAttempts::default());
        let owner = OwnerToken::fresh();
        let (waiting, mut task, caller) = attempts.begin(vec![owner.clone()]);
        attempts.ended(&owner).await;
        assert!(!caller.is_gone());
        drop(waiting);
        assert!(attempts.has(&owner) && caller.is_gone());
        let waits = tokio::spawn({
            let (attempts, owner) = (attempts.clone(), owner.clone());
            async move { attempts.ended(&owner).await }
        });
        tokio::task::yield_now().await;
        assert!(!waits.is_finished());
        task.note(&Ok(()));
        drop(task);
        waits.await.unwrap();
        assert!(!attempts.has(&owner));
    }

    #[tokio::test]
    async fn a_step_ends_when_the_caller_drops_the_attempt() {
        let attempts = Arc::new(UnsettledAttempts::default());
        let (waiting, _working, caller) = attempts.begin(vec![OwnerToken::fresh()]);
        assert!(caller.while_here(async { Ok(7) }).await.is_ok_and(|value| value == 7));
        let step = tokio::spawn(async move { caller.while_here(std::future::pending::<Outcome<()>>()).await });
        tokio::task::yield_now().await;
        assert!(!step.is_finished());
        drop(waiting);
        assert!(step.await.unwrap().unwrap_err().is_cancelled());
    }

    #[tokio::test]
    async fn an_attempt_that_ended_leaves_nothing() {
        let attempts = Arc::new(UnsettledAttempts::default());
        let owner = OwnerToken::fresh();
        let (waiting, mut task, caller) = attempts.begin(vec![owner.clone()]);
        task.note::<()>(&Err(Failure::cancelled()));
        drop(task);
        drop(waiting);
        assert!(!attempts.has(&owner) && !caller.is_gone());
    }

    #[test]
    fn an_attempt_whose_rollback_failed_is_kept() {
        let attempts = Arc::new(UnsettledAttempts::default());
        let owner = OwnerToken::fresh();
        let (_waiting, mut task, caller) = attempts.begin(vec![owner.clone()]);
        caller.note_unsettled();
        task.note(&Ok(()));
        drop(task);
        assert!(attempts.has(&owner));
    }

    #[test]
    fn an_attempt_without_an_answer_is_kept_until_it_is_forgotten() {
        let attempts = Arc::new(UnsettledAttempts::default());
        let owner = OwnerToken::fresh();
        for outcome in [None, Some(Failure::unanswered(Duration::ZERO))] {
            let (_waiting, mut task, _) = attempts.begin(vec![owner.clone()]);
            if let Some(failure) = outcome {
                task.note::<()>(&Err(failure));
            }
        }
        assert_eq!(attempts.unanswered(&owner).len(), 2);
        attempts.forget(&owner);
        assert!(!attempts.has(&owner));
    }
}
