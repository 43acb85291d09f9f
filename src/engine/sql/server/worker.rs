//! The task that uses the connection of the transactions.
//!
//! A call is a job for it and an answer, so that a dropped caller never leaves an incomplete transaction. Jobs that wait at the
//! same time share a transaction. `sql/jobs.rs` has their order.

use std::sync::Arc;

use tokio::sync::mpsc;

use super::error::Kind;
use super::slot::Slot;
use super::transaction::{CheckedNames, Plan, Prefix, transact};
use super::waiters::Waiters;
use super::{Outcome, Server, Session};
use crate::engine::sql::jobs::{Failed, Job, Receiver};

/// The connection and what the calls need.
pub(super) struct Worker<S: Server> {
    pub slot: Slot<S>,
    pub prefix: Prefix,
    pub waiters: Arc<Waiters<S>>,
    pub names: mpsc::UnboundedReceiver<CheckedNames>,
}

impl<S: Server> Worker<S> {
    /// Executes jobs until the last sender is gone, then closes the connection.
    pub(super) async fn run(mut self, mut jobs: Receiver) {
        let mut batch = Vec::new();
        loop {
            tokio::select! {
                biased;
                Some(names) = self.names.recv() => {
                    if let Err(failure) = self.transact_twice(&mut [], Some(&names)).await {
                        // The next check finds the names again.
                        tracing::debug!(%failure, "names could not be handed off");
                    }
                }
                next = jobs.next(&mut batch) => {
                    if !next {
                        break;
                    }
                    self.execute(&mut batch).await;
                }
            }
        }
    }

    async fn execute(&mut self, batch: &mut Vec<Job>) {
        let outcome = self.transact_twice(batch, None).await;
        if batch.len() > 1 && outcome.as_ref().is_err_and(|failure| failure.kind() == Kind::Permanent) {
            // One job may be the cause: execute each on its own, so that the others do not fail with it.
            for mut job in batch.drain(..) {
                let outcome = self.transact_twice(std::slice::from_mut(&mut job), None).await;
                job.answer(cause(&outcome));
            }
        } else {
            batch.drain(..).for_each(|job| job.answer(cause(&outcome)));
        }
    }

    /// Executes jobs as one transaction, and once more after a conflict.
    async fn transact_twice(&mut self, batch: &mut [Job], names: Option<&CheckedNames>) -> Outcome<()> {
        match self.transact(batch, names).await {
            Err(failure) if failure.kind() == Kind::Conflict => self.transact(batch, names).await,
            outcome => outcome,
        }
    }

    async fn transact(&mut self, batch: &mut [Job], names: Option<&CheckedNames>) -> Outcome<()> {
        let session = self.slot.session().await?;
        let plan = Plan::new(batch, names, &self.prefix);
        if plan.is_empty() {
            return Ok(());
        }
        let connection = session.connection().clone();
        let transaction = transact(session, &self.prefix, &self.waiters, &plan, batch);
        let outcome = connection.within_limit(transaction).await;
        let effects = self.slot.settle(outcome)?;
        self.waiters.apply(effects);
        Ok(())
    }
}

/// Returns the failure of a transaction for its jobs.
pub(super) fn cause<T>(outcome: &Outcome<T>) -> Option<&dyn Failed> {
    outcome.as_ref().err().map(|failure| failure as &dyn Failed)
}
