//! The waiting loop, of a call whose first attempt was not granted.

use std::time::Duration;

use tokio::time::Instant;

use super::attempt::AttemptOutcome;
use super::{Acquisition, End, Outcome, wait};
use crate::backoff::Backoff;
use crate::engine::{HandOff, Subscription};
use crate::error::{EngineError, LockError};
use crate::model::Key;
use crate::service::lease::Grant;
use crate::service::local_fifo::Position;

/// What is kept between two attempts.
struct LoopState {
    /// The position among the local waiters, of an engine without a queue. Dropped first: that wakes the next waiter.
    position: Option<Position>,
    /// The outcome of the next attempt: of one that was made before the loop, or a hand-off, which replaces an attempt.
    next: Option<AttemptOutcome>,
    /// The subscription to the name that the call waits for.
    subscription: Option<Box<dyn Subscription>>,
    backoff: Backoff,
    /// Since when attempts have had no answer. `None`: the last attempt had one.
    unanswered_since: Option<Instant>,
    /// The last error since then.
    last_error: Option<EngineError>,
}

impl Acquisition {
    /// Makes attempts until there is an outcome. `first`: the outcome of the first attempt, if it was made, and the subscription
    /// that it was made with.
    pub(super) async fn run_loop(
        &mut self,
        first: Option<AttemptOutcome>,
        subscription: Option<Box<dyn Subscription>>,
    ) -> End {
        // Enters the FIFO before the first attempt, so that it keeps the order of the calls.
        let is_local = self.claim.waiting && !self.shared.store.ordered;
        let enter = || self.shared.local_fifos.enter(&self.claim.keys()[0], self.arrival);
        let mut state = LoopState {
            position: is_local.then(enter),
            next: first,
            subscription,
            backoff: Backoff::for_store(),
            unanswered_since: None,
            last_error: None,
        };
        loop {
            if let Some(end) = self.wait_until_first(state.position.as_ref()).await {
                return end;
            }
            let position = state.position.as_ref();
            let since = *state.unanswered_since.get_or_insert_with(|| {
                let since = position.and_then(|position| position.unanswered_since(true));
                let begins = if state.next.is_some() {
                    self.started
                } else {
                    Instant::now()
                };
                since.map_or(begins, |since| since.max(self.started))
            });
            if let Some(position) = position
                && since.elapsed() >= self.store_timeout
            {
                return Err(self.no_answer(position.last_error()));
            }
            let outcome = match state.next.take() {
                Some(outcome) => outcome,
                None => self.attempt(since).await,
            };
            if let AttemptOutcome::Granted(_) | AttemptOutcome::Held { .. } = outcome {
                (state.unanswered_since, state.last_error) = (None, None);
                state.position.iter().for_each(|position| position.answered(since));
            }
            let end = match outcome {
                AttemptOutcome::Granted(Ok(lease)) => Some(Ok(Outcome::Acquired(lease))),
                AttemptOutcome::Granted(Err(too_late)) => self.after_late_grant(&mut state, too_late).await,
                AttemptOutcome::Held { key, retry_after } => self.after_busy(&mut state, key, retry_after).await,
                AttemptOutcome::Failed(error) => self.after_failure(&mut state, error, since).await,
                AttemptOutcome::TimedOut => {
                    // An earlier error of the store says more than the timeout.
                    let of_first = || state.position.as_ref()?.last_error();
                    Some(Err(self.no_answer(state.last_error.take().or_else(of_first))))
                }
                AttemptOutcome::Ended(end) => Some(end),
            };
            if let Some(end) = end {
                return end;
            }
        }
    }

    /// Waits until the call is the first local waiter of its name.
    async fn wait_until_first(&mut self, position: Option<&Position>) -> Option<End> {
        let position = position?;
        while !position.is_first() {
            self.set_waiting();
            self.busy_name = Some(position.key().clone());
            if let Some(end) = self.wait_for_position(position).await {
                return Some(end);
            }
        }
        self.was_busy |= position.was_answered_since(self.started);
        None
    }

    /// Pauses after a grant whose lease had ended before it arrived.
    async fn after_late_grant(&mut self, state: &mut LoopState, too_late: LockError) -> Option<End> {
        if !self.claim.waiting || !too_late.retryable {
            return Some(Err(too_late));
        }
        if self.shared.store.ordered {
            // The claim has a new owner.
            state.subscription = self.subscribe_to_first().await;
        }
        match self.wait_for(tokio::time::sleep(state.backoff.delay())).await {
            Some(Ok(Outcome::Busy(_))) => Some(Err(too_late)),
            end => end,
        }
    }

    /// Waits for a change of a busy name.
    async fn after_busy(&mut self, state: &mut LoopState, key: Key, retry_after: Option<Duration>) -> Option<End> {
        self.was_busy = true;
        self.busy_name = Some(key.clone());
        state.backoff.reset();
        if !self.claim.waiting {
            return Some(Ok(Outcome::Busy(None)));
        }
        self.set_waiting();
        if !self.shared.store.ordered {
            if state.position.as_ref().is_none_or(|position| *position.key() != key) {
                state.subscription = None;
                let next = self.shared.local_fifos.enter(&key, self.arrival);
                let is_first = next.is_first();
                state.position = Some(next);
                if !is_first {
                    return None;
                }
            }
            if state.subscription.is_none() {
                // A change between the busy answer and the subscription was not notified: the next attempt follows at once.
                return match self.subscribe(&key).await {
                    Ok(new) => {
                        state.subscription = Some(new);
                        None
                    }
                    Err(end) => Some(end),
                };
            }
        }
        // The attempts of a waiter of several names extend its reservations.
        let polls = self.names.len() > 1;
        let change = wait::for_change(&mut state.subscription, state.position.as_ref(), retry_after, polls);
        if let Some(end) = self.wait_for(change).await {
            return Some(end);
        }
        if let Some(end) = self.wait_for_event_loop().await {
            return Some(end);
        }
        // It may have arrived before the answer. Then the server executed the attempt before the hand-off, or the grant ended early
        // in the store (a forced release), which its first renewal detects as for every lease.
        let HandOff { fence, until } = state.subscription.as_mut()?.take_hand_off()?;
        let lease = self.create_lease(fence, Grant::HandedOff { until });
        state.next = Some(AttemptOutcome::Granted(lease));
        None
    }

    /// Pauses after an attempt without an answer.
    async fn after_failure(&mut self, state: &mut LoopState, error: EngineError, since: Instant) -> Option<End> {
        // Attempts in order have a pause in common.
        let is_ordered = self.claim.waiting && self.shared.store.ordered;
        let delay = if is_ordered && self.shared.attempts.has(&self.claim.keys()[0]) {
            Duration::ZERO
        } else {
            state.backoff.delay()
        };
        if !error.retryable || since.elapsed() + delay >= self.store_timeout {
            return Some(Err(LockError::store(error)));
        }
        state.position.iter().for_each(|position| position.failed(&error));
        state.last_error = Some(error);
        // Also past the deadline: the call waits for an answer of the store, not for the lock.
        tokio::select! {
            biased;
            end = self.cancelled() => Some(end),
            () = tokio::time::sleep(delay) => None,
        }
    }
}
