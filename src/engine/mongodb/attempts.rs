//! Tracks attempts that their caller dropped while their task still waits for the server.
//!
//! The task of such an attempt starts no further step of the acquisition and rolls back what it wrote. A release of the same
//! claim, and another attempt of it, wait for the end of the task. So the server executes them after what the attempt sent.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{Notify, watch};

use super::Outcome;
use super::failure::Failure;
use crate::model::OwnerToken;

/// The dropped attempts of one engine, by owner. A receiver fails when the attempt's task has ended.
#[derive(Debug, Default)]
pub(super) struct DroppedAttempts(Mutex<HashMap<OwnerToken, watch::Receiver<()>>>);

/// Flag that the caller of an attempt has dropped it. The default caller never does.
#[derive(Debug, Clone, Default)]
pub(super) struct Caller(Arc<Flag>);

#[derive(Debug, Default)]
struct Flag {
    is_gone: AtomicBool,
    change: Notify,
}

impl Caller {
    /// Whether the caller dropped the attempt.
    pub(super) fn is_gone(&self) -> bool {
        self.0.is_gone.load(Relaxed)
    }

    /// Fails when the caller dropped the attempt. Each step of an acquisition begins with it.
    ///
    /// # Errors
    /// [`Failure::is_cancelled`] when the caller dropped the attempt.
    pub(super) fn check(&self) -> Outcome<()> {
        match self.is_gone() {
            true => Err(Failure::cancelled()),
            false => Ok(()),
        }
    }

    /// Waits for `step`, which sends nothing of the attempt, until the caller drops the attempt.
    ///
    /// # Errors
    /// Those of the step, or [`Failure::is_cancelled`] when the caller dropped the attempt.
    pub(super) async fn while_here<T>(&self, step: impl Future<Output = Outcome<T>>) -> Outcome<T> {
        // The future receives the notification from its creation on.
        let gone = self.0.change.notified();
        self.check()?;
        tokio::select! {
            outcome = step => outcome,
            () = gone => Err(Failure::cancelled()),
        }
    }
}

/// The caller's handle of an attempt. Dropping it before the attempt has ended cancels the attempt.
pub(super) struct Waiting {
    attempts: Arc<DroppedAttempts>,
    owners: Vec<OwnerToken>,
    caller: Caller,
    ended: watch::Receiver<()>,
}

/// The task's handle of an attempt. The task drops it at its end.
pub(super) struct Working {
    attempts: Arc<DroppedAttempts>,
    owners: Vec<OwnerToken>,
    ended: Option<watch::Sender<()>>,
}

impl DroppedAttempts {
    fn map(&self) -> MutexGuard<'_, HashMap<OwnerToken, watch::Receiver<()>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins an attempt for these owners.
    pub(super) fn begin(self: &Arc<Self>, owners: Vec<OwnerToken>) -> (Waiting, Working, Caller) {
        let (sender, ended) = watch::channel(());
        let caller = Caller::default();
        let working = Working {
            attempts: self.clone(),
            owners: owners.clone(),
            ended: Some(sender),
        };
        let waiting = Waiting {
            attempts: self.clone(),
            owners,
            caller: caller.clone(),
            ended,
        };
        (waiting, working, caller)
    }

    /// Whether a dropped attempt of this owner is still in progress.
    pub(super) fn is_in_progress(&self, owner: &OwnerToken) -> bool {
        self.map().contains_key(owner)
    }

    /// Waits until no dropped attempt of this owner is in progress.
    pub(super) async fn ended(&self, owner: &OwnerToken) {
        let attempt = self.map().get(owner).cloned();
        if let Some(mut attempt) = attempt {
            // No value is ever sent: this waits for the end of the sender.
            let _ = attempt.changed().await;
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let mut map = self.attempts.map();
        if self.ended.has_changed().is_ok() {
            self.caller.0.is_gone.store(true, Relaxed);
            self.caller.0.change.notify_waiters();
            let owners = self.owners.drain(..);
            map.extend(owners.map(|owner| (owner, self.ended.clone())));
        }
    }
}

impl Drop for Working {
    fn drop(&mut self) {
        let mut map = self.attempts.map();
        // Under the lock of the map, so that no caller enters an attempt that has ended.
        self.ended = None;
        for owner in &self.owners {
            map.remove(owner);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_dropped_attempt_is_in_progress_until_its_task_ends() {
        let attempts = Arc::new(DroppedAttempts::default());
        let owner = OwnerToken::fresh();
        let (waiting, working, caller) = attempts.begin(vec![owner.clone()]);
        attempts.ended(&owner).await;
        caller.check().unwrap();
        drop(waiting);
        assert!(attempts.is_in_progress(&owner) && caller.check().unwrap_err().is_cancelled());
        let waits = tokio::spawn({
            let (attempts, owner) = (attempts.clone(), owner.clone());
            async move { attempts.ended(&owner).await }
        });
        tokio::task::yield_now().await;
        assert!(!waits.is_finished());
        drop(working);
        waits.await.unwrap();
        assert!(attempts.map().is_empty());
    }

    #[tokio::test]
    async fn a_step_ends_when_the_caller_drops_the_attempt() {
        let attempts = Arc::new(DroppedAttempts::default());
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
        let attempts = Arc::new(DroppedAttempts::default());
        let (waiting, working, caller) = attempts.begin(vec![OwnerToken::fresh()]);
        drop(working);
        drop(waiting);
        assert!(attempts.map().is_empty() && !caller.is_gone());
    }
}
