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

/// The attempts of one engine that may still take effect, by owner: dropped ones until their task has ended, and those with a command
/// that was not answered.
#[derive(Default)]
pub(crate) struct UnsettledAttempts(Mutex<HashMap<OwnerToken, Vec<Arc<Caller>>>>);

/// The task's view of the caller of an attempt, and the attempt's session. The default caller never drops the attempt.
#[derive(Default)]
pub(crate) struct Caller {
    owners: Vec<OwnerToken>,
    /// The caller dropped the attempt.
    is_gone: CancellationToken,
    /// The task has ended.
    has_ended: CancellationToken,
    /// Whether a command of the attempt failed that the outcome does not report.
    is_unsettled: AtomicBool,
    pub(super) session: AttemptSession,
}

impl Caller {
    /// Whether the caller dropped the attempt.
    pub(crate) fn is_gone(&self) -> bool {
        self.is_gone.is_cancelled()
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
        self.is_unsettled.store(true, Relaxed);
    }

    /// Waits for `step`, which sends nothing of the attempt, until the caller drops the attempt.
    ///
    /// # Errors
    /// Those of the step, or [`Failure::is_cancelled`] when the caller dropped the attempt.
    pub(crate) async fn while_here<T>(&self, step: impl Future<Output = Outcome<T>>) -> Outcome<T> {
        let outcome = self.is_gone.run_until_cancelled(step).await;
        outcome.unwrap_or_else(|| Err(Failure::cancelled()))
    }
}

/// The caller's handle of an attempt. Dropping it before the attempt has ended cancels the attempt.
pub(crate) struct CallerGuard(Arc<UnsettledAttempts>, Arc<Caller>);

/// The task's handle of an attempt. The task drops it at its end.
pub(crate) struct TaskGuard {
    attempts: Arc<UnsettledAttempts>,
    caller: Arc<Caller>,
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
    pub(crate) fn begin(self: &Arc<Self>, owners: Vec<OwnerToken>) -> (CallerGuard, TaskGuard, Arc<Caller>) {
        let caller = Arc::new(Caller {
            owners,
            ..Caller::default()
        });
        let task = TaskGuard {
            attempts: self.clone(),
            caller: caller.clone(),
            is_answered: false,
        };
        (CallerGuard(self.clone(), caller.clone()), task, caller)
    }

    /// Whether an attempt of this owner may still take effect.
    pub(crate) fn has(&self, owner: &OwnerToken) -> bool {
        self.0.lock().contains_key(owner)
    }

    /// Waits until no dropped attempt of this owner is in progress. Returns those that were not answered.
    pub(crate) async fn wait_for(&self, owner: &OwnerToken) -> Vec<Arc<Caller>> {
        let of_owner = || self.0.lock().get(owner).cloned().unwrap_or_default();
        for attempt in of_owner() {
            attempt.has_ended.cancelled().await;
        }
        of_owner()
    }

    /// Forgets an attempt: it has ended, and so has its session, or it was answered.
    pub(crate) fn forget(&self, owner: &OwnerToken, attempt: &Arc<Caller>) {
        remove(&mut self.0.lock(), owner, attempt);
    }
}

fn add(unsettled: &mut HashMap<OwnerToken, Vec<Arc<Caller>>>, attempt: &Arc<Caller>) {
    for owner in &attempt.owners {
        unsettled.entry(owner.clone()).or_default().push(attempt.clone());
    }
}

fn remove(unsettled: &mut HashMap<OwnerToken, Vec<Arc<Caller>>>, owner: &OwnerToken, attempt: &Arc<Caller>) {
    if let Some(of_owner) = unsettled.get_mut(owner) {
        of_owner.retain(|other| !Arc::ptr_eq(other, attempt));
        if of_owner.is_empty() {
            unsettled.remove(owner);
        }
    }
}

impl Drop for CallerGuard {
    fn drop(&mut self) {
        let CallerGuard(attempts, caller) = self;
        let mut unsettled = attempts.0.lock();
        if !caller.has_ended.is_cancelled() {
            caller.is_gone.cancel();
            add(&mut unsettled, caller);
        }
    }
}

impl Drop for TaskGuard {
    fn drop(&mut self) {
        let caller = &self.caller;
        let mut unsettled = self.attempts.0.lock();
        // Under the lock, so that no caller enters an attempt that has ended.
        caller.has_ended.cancel();
        let is_settled = self.is_answered && !caller.is_unsettled.load(Relaxed);
        for owner in &caller.owners {
            remove(&mut unsettled, owner, caller);
        }
        if !is_settled {
            add(&mut unsettled, caller);
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
        attempts.wait_for(&owner).await;
        assert!(!caller.is_gone());
        drop(waiting);
        assert!(attempts.has(&owner) && caller.is_gone());
        let waits = tokio::spawn({
            let (attempts, owner) = (attempts.clone(), owner.clone());
            async move { attempts.wait_for(&owner).await }
        });
        tokio::task::yield_now().await;
        assert!(!waits.is_finished());
        task.note(&Ok(()));
        drop(task);
        assert!(waits.await.unwrap().is_empty());
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

    #[tokio::test]
    async fn an_attempt_without_an_answer_is_kept_until_it_is_forgotten() {
        let attempts = Arc::new(UnsettledAttempts::default());
        let owner = OwnerToken::fresh();
        for outcome in [None, Some(Failure::unanswered(Duration::ZERO))] {
            let (_waiting, mut task, _) = attempts.begin(vec![owner.clone()]);
            if let Some(failure) = outcome {
                task.note::<()>(&Err(failure));
            }
        }
        let unanswered = attempts.wait_for(&owner).await;
        assert_eq!(unanswered.len(), 2);
        for attempt in unanswered {
            assert!(attempts.has(&owner));
            attempts.forget(&owner, &attempt);
        }
        assert!(!attempts.has(&owner));
    }
}
