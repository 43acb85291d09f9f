//! Batches: attempts of several waiters for one name, in their order, and releases of abandoned claims.

use std::collections::HashMap;
use std::sync::Arc;

use futures_util::future::try_join_all;
use mongodb::bson::Document;
use mongodb::options::ReturnDocument;

use super::acquire::{Busy, Taken, held, one_member};
use super::attempts::Caller;
use super::failure::Failure;
use super::pool::Class;
use super::queue::{self, RESERVED, Waiter};
use super::session::Session;
use super::waiting::Line;
use super::watch::Use;
use super::{Core, Outcome, documents};
use crate::engine::{Acquired, Released};
use crate::model::Claim;

/// The answer's field with the queue entries of the claims.
const PLACES: &str = "places";

impl Core {
    /// The engine's `try_acquire_in_order`.
    ///
    /// # Behavior
    /// A claim of several names makes an attempt of its own, and so does one that the command could not enter.
    pub(super) async fn attempt_in_order(
        self: &Arc<Self>,
        claims: &[Arc<Claim>],
        answer: &mut (dyn FnMut(usize, Outcome<Acquired>) + Send),
    ) {
        let mut done = 0;
        while let Some((first, others)) = claims[done..].split_first() {
            let followers = others.iter().take_while(|claim| claim.keys().len() == 1).count();
            let batch = match &self.line {
                Some(line) if followers > 0 && first.keys().len() == 1 => {
                    self.attempt_batch(line, &claims[done..=done + followers]).await
                }
                _ => vec![None],
            };
            for outcome in batch {
                let outcome = match outcome {
                    Some(outcome) => outcome,
                    None => self.attempt(&claims[done]).await,
                };
                answer(done, outcome);
                done += 1;
            }
        }
    }

    /// Makes the attempts of several waiters for one name, with one permit. `None`: the claim needs an attempt of its own.
    async fn attempt_batch(
        self: &Arc<Self>,
        line: &Arc<Line>,
        claims: &[Arc<Claim>],
    ) -> Vec<Option<Outcome<Acquired>>> {
        for claim in claims {
            self.attempts.ended(&claim.owner).await;
        }
        // Before the permit: no connection is in use while the change stream opens.
        let mut uses = Vec::with_capacity(claims.len());
        for _ in claims {
            match line.listen(&claims[0].keys()[0]).await {
                Ok(open) => uses.push(open),
                Err(failure) => return failed(claims, &failure),
            }
        }
        let class = self.class(claims.iter().map(|claim| &**claim));
        let permit = self.pool.permit(class).await;
        claims.iter().for_each(|claim| claim.mark_sent());
        let owners = claims.iter().map(|claim| claim.owner.clone()).collect();
        let (waiting, mut working, caller) = self.attempts.begin(owners);
        let (core, line, batch) = (self.clone(), line.clone(), claims.to_vec());
        let attempts = async move {
            let batch: Vec<&Claim> = batch.iter().map(|claim| &**claim).collect();
            let outcome = core.acquire_batch(&line, &batch, uses, &caller).await;
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

    /// Makes the attempt of the first claim and enters the others into the queue behind it, in one command. `uses`: a use of the
    /// change stream for each claim.
    async fn acquire_batch(
        &self,
        line: &Arc<Line>,
        claims: &[&Claim],
        uses: Vec<Option<Use>>,
        caller: &Caller,
    ) -> Outcome<Vec<Option<Outcome<Acquired>>>> {
        let first = claims[0];
        let key = &first.keys()[0];
        caller.check()?;
        let number = line.known.number(&first.owner);
        let waiter = Waiter {
            process: &line.process,
            number,
        };
        let new: Vec<&Claim> = claims[1..]
            .iter()
            .filter(|claim| line.known.number(&claim.owner) == 0)
            .copied()
            .collect();
        let owners: Vec<&str> = claims.iter().map(|claim| claim.owner.as_str()).collect();
        let mut seen = documents::seen_by_waiter(&first.owner);
        seen.insert(RESERVED, 1);
        seen.insert(PLACES, queue::places(&owners));
        let mut steps = queue::take(first, Some(&waiter));
        steps.extend(queue::enter(&new, &line.process));
        let entered = {
            let mut session = caller.session.get(&self.pool).await?;
            let Session { connected, session } = &mut *session;
            let mut entering = connected
                .locks
                .find_one_and_update(documents::one_or_none(&self.id(key)), steps)
                .upsert(true)
                .return_document(ReturnDocument::After)
                .projection(seen)
                .session(session);
            if number == 0 {
                entering = entering.write_concern(one_member());
            }
            entering.await.map_err(Failure::from)
        };
        let document = match entered {
            Ok(document) => document.unwrap_or_default(),
            // Another process inserted the document at the same time.
            Err(failure) if failure.is_duplicate_key() => Document::new(),
            Err(failure) => return Err(failure),
        };
        let Some(taken) = Taken::of(&document, &first.owner, number > 0) else {
            return Ok(claims.iter().map(|_| None).collect());
        };
        let places = places(&document);
        let left = documents::remaining(&document);
        let reserved_for = queue::reserved_for(&document, &line.process);
        let mut uses = uses.into_iter();
        let taken = match taken {
            Taken::Busy(busy) => Taken::Busy(Busy {
                place: places.get(first.owner.as_str()).map(|at| (*at, uses.next().flatten())),
                ..busy
            }),
            ours => ours,
        };
        let mut outcomes = Vec::with_capacity(claims.len());
        for claim in &claims[1..] {
            let is_next = reserved_for.as_ref() == Some(&claim.owner);
            outcomes.push(match places.get(claim.owner.as_str()) {
                Some(at) if !is_next => {
                    line.waits(claim, key, *at, left, uses.next().flatten());
                    Some(Ok(held(key, left)))
                }
                _ => None,
            });
        }
        // The places of the others are known before the first claim waits for the majority.
        let first = self.acquire(first, caller, Some(taken)).await;
        if let Err(failure) = &first
            && failure.is_cancelled()
        {
            return Err(failure.clone());
        }
        outcomes.insert(0, Some(first));
        Ok(outcomes)
    }

    /// Waits until no earlier attempt of the claim can take effect.
    ///
    /// # Errors
    /// Those of the writes that end the attempts without an answer.
    pub(super) async fn end_attempts(&self, claim: &Claim) -> Outcome<()> {
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

    /// The engine's `release_all`. Releases claims with an unsettled attempt last, after its end.
    pub(super) async fn release_abandoned(
        self: &Arc<Self>,
        claims: &[Claim],
        answer: &mut (dyn FnMut(usize, Outcome<Released>) + Send),
    ) {
        let is_unsettled = |index: &usize| self.attempts.has(&claims[*index].owner);
        let (later, now): (Vec<usize>, Vec<usize>) = (0..claims.len()).partition(is_unsettled);
        for indexes in [now, later] {
            if indexes.is_empty() {
                continue;
            }
            let batch: Vec<Claim> = indexes.iter().map(|index| claims[*index].clone()).collect();
            let core = self.clone();
            let ended = try_join_all(batch.iter().map(|claim| self.end_attempts(claim))).await;
            let release = || async move { core.release_claims(&batch.iter().collect::<Vec<_>>()).await };
            let outcome = match ended {
                Ok(_) => self.pool.call(Class::Release, release).await,
                Err(failure) => Err(failure),
            };
            for (place, index) in indexes.into_iter().enumerate() {
                answer(index, outcome.as_ref().map(|all| all[place]).map_err(Failure::clone));
            }
        }
    }
}

/// Returns the outcome of a batch that failed.
fn failed(claims: &[Arc<Claim>], failure: &Failure) -> Vec<Option<Outcome<Acquired>>> {
    claims.iter().map(|_| Some(Err(failure.clone()))).collect()
}

/// Returns the places in an answer, by owner.
fn places(document: &Document) -> HashMap<&str, u64> {
    let entries = document.get_array(PLACES).map(Vec::as_slice).unwrap_or_default();
    let places = entries.iter().filter_map(|entry| {
        let entry = entry.as_document()?;
        let at = u64::try_from(entry.get_i64("at").ok()?).ok()?;
        Some((entry.get_str("owner").ok()?, at))
    });
    places.collect()
}
