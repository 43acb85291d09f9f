//! Batches: attempts of several waiters for one name, in their order, and releases of abandoned claims.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::try_join_all;
use mongodb::bson::Document;

use crate::engine::mongodb::connection::pool::Class;
use crate::engine::mongodb::error::Failure;
use crate::engine::mongodb::ops::acquire::held;
use crate::engine::mongodb::ops::acquire_names::NameOutcome;
use crate::engine::mongodb::ops::attempts::Caller;
use crate::engine::mongodb::queue::Queue;
use crate::engine::mongodb::queue::change_stream::StreamUse;
use crate::engine::mongodb::queue::pipelines;
use crate::engine::mongodb::{Core, Outcome, documents, shares};
use crate::engine::{Acquired, Released};
use crate::model::Claim;

/// The field of an answer with the queue entries of the claims.
pub(crate) const POSITIONS: &str = "positions";

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
        if claims.first().is_some_and(|claim| claim.share.is_some()) {
            return self.attempt_shares_in_order(claims, answer).await;
        }
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
        let outcomes = async {
            // Before the permit: no connection is in use while the change stream opens.
            let open = queue.open_stream().await?;
            let (queue, batch) = (queue.clone(), owned(claims));
            let claims = batch.clone();
            let steps =
                |core: Arc<Core>, caller| async move { core.acquire_batch(&queue, &batch, open, &caller).await };
            self.in_attempt(claims, steps).await
        };
        outcomes
            .await
            .unwrap_or_else(|failure| claims.iter().map(|_| Some(Err(failure.clone()))).collect())
    }

    /// Makes the attempt of the first claim and enters the others into the queue behind it, in one command. `open`: their use
    /// of the change stream.
    async fn acquire_batch(
        &self,
        queue: &Arc<Queue>,
        claims: &[Arc<Claim>],
        open: Option<StreamUse>,
        caller: &Caller,
    ) -> Outcome<Vec<Option<Outcome<Acquired>>>> {
        let first = &claims[0];
        let key = &first.keys()[0];
        let waiter = queue.waiter(queue.known.number(&first.owner), &open);
        let others = claims[1..].iter().map(|claim| &**claim);
        let new = others.filter(|claim| queue.known.number(&claim.owner) == 0);
        let mut steps = pipelines::acquire(first, Some(&waiter));
        steps.extend(pipelines::enter(new, &waiter));
        let owners: Vec<&str> = claims.iter().map(|claim| claim.owner.as_str()).collect();
        let mut fields = documents::waiter_fields(&first.owner);
        fields.insert(POSITIONS, pipelines::positions_of(&owners));
        let is_settled = self.is_settled(waiter.number);
        let document = self
            .send_attempt(documents::one_or_none(&self.id(key)), steps, fields, is_settled, caller)
            .await?;
        let document = document.unwrap_or_default();
        let Some(outcome) = NameOutcome::of(&document, &first.owner, is_settled, open.clone()) else {
            return Ok(claims.iter().map(|_| None).collect());
        };
        let positions = numbers_in(&document, POSITIONS, "at");
        let left = documents::remaining(&document);
        let is_foreign = documents::owner(&document).is_none();
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

    /// Waits until no earlier attempt of the claim can take effect.
    ///
    /// # Errors
    /// Those of the writes that end the attempts without an answer.
    pub(crate) async fn end_attempts(&self, claim: &Claim) -> Outcome<()> {
        self.attempts.ended(&claim.owner).await;
        let unanswered = self.attempts.unanswered(&claim.owner);
        if !unanswered.is_empty() {
            let id = shares::id(&self.prefix, &claim.keys()[0]);
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
            let batch = owned(indexes.iter().map(|index| &claims[*index]));
            let core = self.clone();
            let ended = try_join_all(batch.iter().map(|claim| self.end_attempts(claim))).await;
            let release = || async move { core.release_claims(&batch).await };
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
pub(crate) fn owned<'a>(claims: impl IntoIterator<Item = &'a &'a Claim>) -> Vec<Arc<Claim>> {
    claims.into_iter().map(|claim| Arc::new((*claim).clone())).collect()
}

/// Returns a number of each entry in a field of an answer, by owner.
pub(crate) fn numbers_in<'d>(document: &'d Document, field: &str, number: &str) -> HashMap<&'d str, u64> {
    let entries = document.get_array(field).map(Vec::as_slice).unwrap_or_default();
    let positions = entries.iter().filter_map(|entry| {
        let entry = entry.as_document()?;
        let at = u64::try_from(entry.get_i64(number).ok()?).ok()?;
        Some((entry.get_str("owner").ok()?, at))
    });
    positions.collect()
}
