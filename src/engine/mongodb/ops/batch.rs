//! Batches: attempts of several waiters for one name, in their order, and releases of abandoned claims.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::try_join_all;
use mongodb::bson::Document;
use mongodb::options::ReturnDocument;

use crate::clock::Moment;
use crate::engine::mongodb::connection::pool::Class;
use crate::engine::mongodb::connection::session::Session;
use crate::engine::mongodb::error::Failure;
use crate::engine::mongodb::ops::acquire::held;
use crate::engine::mongodb::ops::acquire_names::{Busy, NameOutcome};
use crate::engine::mongodb::ops::attempts::Caller;
use crate::engine::mongodb::queue::Queue;
use crate::engine::mongodb::queue::change_stream::StreamUse;
use crate::engine::mongodb::queue::pipelines::{self, Waiter};
use crate::engine::mongodb::{Core, Outcome, documents};
use crate::engine::{Acquired, Released};
use crate::model::Claim;

/// The field of an answer with the queue entries of the claims.
const POSITIONS: &str = "positions";

impl Core {
    /// The engine's `try_acquire_all`.
    ///
    /// # Behavior
    /// A claim of several names makes an attempt of its own, and so does one that the command could not enter.
    pub(crate) async fn attempt_in_order(
        self: &Arc<Self>,
        claims: &[&Claim],
        answer: &mut (dyn FnMut(usize, Outcome<Acquired>) + Send),
    ) {
        let mut done = 0;
        while let Some((first, others)) = claims[done..].split_first() {
            let followers = others.iter().take_while(|claim| claim.keys().len() == 1).count();
            let batch = match &self.queue {
                Some(queue) if followers > 0 && first.keys().len() == 1 => {
                    self.attempt_batch(queue, &claims[done..=done + followers]).await
                }
                _ => vec![None],
            };
            for outcome in batch {
                let outcome = match outcome {
                    Some(outcome) => outcome,
                    None => self.attempt(claims[done]).await,
                };
                answer(done, outcome);
                done += 1;
            }
        }
    }

    /// Makes the attempts of several waiters for one name, with one permit. `None`: the claim needs an attempt of its own.
    async fn attempt_batch(self: &Arc<Self>, queue: &Arc<Queue>, claims: &[&Claim]) -> Vec<Option<Outcome<Acquired>>> {
        for claim in claims {
            self.attempts.ended(&claim.owner).await;
        }
        // Before the permit: no connection is in use while the change stream opens.
        let open = match queue.open_stream().await {
            Ok(open) => open,
            Err(failure) => return failed(claims, &failure),
        };
        let permit = self.pool.permit(self.class(claims)).await;
        claims.iter().for_each(|claim| claim.mark_sent());
        let owners = claims.iter().map(|claim| claim.owner.clone()).collect();
        let (waiting, mut working, caller) = self.attempts.begin(owners);
        let (core, queue, batch) = (self.clone(), queue.clone(), owned(claims));
        let attempts = async move {
            let batch: Vec<&Claim> = batch.iter().collect();
            let outcome = core.acquire_batch(&queue, &batch, open, &caller).await;
            core.roll_back_if_dropped(&batch, &caller, outcome.as_ref().err()).await;
            working.note(&outcome);
            drop(working);
            outcome
        };
        let outcome = self.pool.run(permit, attempts).await;
        drop(waiting);
        match outcome {
            Ok(outcomes) => outcomes,
            Err(failure) => failed(claims, &failure),
        }
    }

    /// Makes the attempt of the first claim and enters the others into the queue behind it, in one command. `open`: their use
    /// of the change stream.
    async fn acquire_batch(
        &self,
        queue: &Arc<Queue>,
        claims: &[&Claim],
        open: Option<StreamUse>,
        caller: &Caller,
    ) -> Outcome<Vec<Option<Outcome<Acquired>>>> {
        let first = claims[0];
        let key = &first.keys()[0];
        caller.check()?;
        let number = queue.known.number(&first.owner);
        let is_settled = number > 0 && !self.pool.is_without_majority();
        let waiter = Waiter {
            process: &queue.process,
            number,
            takes_grants: queue.takes_grants && open.is_some(),
        };
        let document = self.enter_batch(queue, claims, &waiter, is_settled, caller).await?;
        let Some(outcome) = NameOutcome::of(&document, &first.owner, is_settled) else {
            return Ok(claims.iter().map(|_| None).collect());
        };
        let positions = positions_in(&document);
        let left = documents::remaining(&document);
        let is_foreign = documents::owner(&document).is_none();
        let outcome = match outcome {
            NameOutcome::Busy(busy) => NameOutcome::Busy(Busy {
                position: positions.get(first.owner.as_str()).map(|at| (*at, open.clone())),
                ..busy
            }),
            acquired => acquired,
        };
        let mut outcomes = Vec::with_capacity(claims.len());
        for claim in &claims[1..] {
            outcomes.push(match positions.get(claim.owner.as_str()) {
                Some(at) => {
                    queue.enter(claim, key, *at, left, open.clone(), is_foreign);
                    Some(Ok(held(key, left)))
                }
                // The queue is full, or the name was handed off to this claim.
                None => None,
            });
        }
        // The positions of the others are recorded before the first claim waits for the majority.
        let first = self.acquire(first, caller, Some(outcome)).await;
        if let Err(failure) = &first
            && failure.is_cancelled()
        {
            return Err(failure.clone());
        }
        if first.as_ref().is_err_and(Failure::is_without_answer) {
            caller.note_unsettled();
        }
        outcomes.insert(0, Some(first.map_err(|failure| self.pool.explain(failure))));
        Ok(outcomes)
    }

    /// Sends the command of [`Self::acquire_batch`]. Returns the document after it.
    async fn enter_batch(
        &self,
        queue: &Queue,
        claims: &[&Claim],
        waiter: &Waiter<'_>,
        is_settled: bool,
        caller: &Caller,
    ) -> Outcome<Document> {
        let first = claims[0];
        let new: Vec<&Claim> = claims[1..]
            .iter()
            .filter(|claim| queue.known.number(&claim.owner) == 0)
            .copied()
            .collect();
        let owners: Vec<&str> = claims.iter().map(|claim| claim.owner.as_str()).collect();
        let mut fields = documents::waiter_fields(&first.owner);
        fields.insert(POSITIONS, pipelines::positions_of(&owners));
        let mut steps = pipelines::acquire(first, Some(waiter));
        steps.extend(pipelines::enter(&new, waiter));
        let entered = {
            let mut session = caller.session.get(&self.pool).await?;
            let Session { connected, session } = &mut *session;
            let entering = connected
                .locks_for(is_settled)
                .find_one_and_update(documents::one_or_none(&self.id(&first.keys()[0])), steps)
                .upsert(true)
                .return_document(ReturnDocument::After)
                .projection(fields)
                .session(session);
            let sent = Moment::now();
            let entered = entering.await.map_err(Failure::from);
            if let Ok(Some(document)) = &entered {
                queue.read_clock(sent, document);
            }
            entered
        };
        match entered {
            Ok(document) => Ok(document.unwrap_or_default()),
            // Another process inserted the document at the same time.
            Err(failure) if failure.is_duplicate_key() => Ok(Document::new()),
            Err(failure) => Err(failure),
        }
    }

    /// Waits until no earlier attempt of the claim can take effect.
    ///
    /// # Errors
    /// Those of the writes that end the attempts without an answer.
    pub(crate) async fn end_attempts(&self, claim: &Claim) -> Outcome<()> {
        self.attempts.ended(&claim.owner).await;
        let unanswered = self.attempts.unanswered(&claim.owner);
        if !unanswered.is_empty() {
            let id = self.id(&claim.keys()[0]);
            for session in unanswered {
                session.end(&self.pool, id.clone()).await?;
            }
            self.attempts.forget(&claim.owner);
        }
        Ok(())
    }

    /// Releases one claim after its attempts.
    pub(crate) async fn release_alone(self: &Arc<Self>, claim: &Claim, keep: Duration) -> Outcome<Released> {
        self.end_attempts(claim).await?;
        let (core, claim) = (self.clone(), claim.clone());
        let release = || async move { core.release_one(&claim, keep).await };
        self.pool.call(Class::Release, release).await
    }

    /// Releases several claims. Those with an unsettled attempt come last, after its end.
    pub(crate) async fn release_abandoned(
        self: &Arc<Self>,
        claims: &[&Claim],
        answer: &mut (dyn FnMut(usize, Outcome<Released>) + Send),
    ) {
        let is_unsettled = |index: &usize| self.attempts.has(&claims[*index].owner);
        let (later, now): (Vec<usize>, Vec<usize>) = (0..claims.len()).partition(is_unsettled);
        for indexes in [now, later] {
            if indexes.is_empty() {
                continue;
            }
            let batch: Vec<Claim> = indexes.iter().map(|index| (*claims[*index]).clone()).collect();
            let core = self.clone();
            let ended = try_join_all(batch.iter().map(|claim| self.end_attempts(claim))).await;
            let release = || async move { core.release_claims(&batch.iter().collect::<Vec<_>>()).await };
            let outcome = match ended {
                Ok(_) => self.pool.call(Class::Release, release).await,
                Err(failure) => Err(failure),
            };
            for (offset, index) in indexes.into_iter().enumerate() {
                answer(index, outcome.as_ref().map(|all| all[offset]).map_err(Failure::clone));
            }
        }
    }
}

/// Returns copies of claims, which share the marks of what was sent.
fn owned(claims: &[&Claim]) -> Vec<Claim> {
    claims.iter().map(|claim| (*claim).clone()).collect()
}

/// Returns the outcome of a batch that failed.
fn failed(claims: &[&Claim], failure: &Failure) -> Vec<Option<Outcome<Acquired>>> {
    claims.iter().map(|_| Some(Err(failure.clone()))).collect()
}

/// Returns the numbers in an answer, by owner.
fn positions_in(document: &Document) -> HashMap<&str, u64> {
    let entries = document.get_array(POSITIONS).map(Vec::as_slice).unwrap_or_default();
    let positions = entries.iter().filter_map(|entry| {
        let entry = entry.as_document()?;
        let at = u64::try_from(entry.get_i64("at").ok()?).ok()?;
        Some((entry.get_str("owner").ok()?, at))
    });
    positions.collect()
}
