//! Renewal and extension of a lease: when, with which timeout, and what an answer means.

use std::sync::Arc;
use std::time::Duration;

use super::{Lease, MAX_HOLD_PASSED, Phase, RenewalRetry, RenewalWindow, State};
use crate::backoff::Backoff;
use crate::clock::Moment;
use crate::engine::{EngineExt, RESERVATION, Renewed};
use crate::error::{EngineError, LockError};
use crate::model::{Key, Ttl};
use crate::service::Shared;
use crate::service::event::EventKind;

/// Returns the timeout of one renewal: several retries fit into the rest of the lease.
fn renewal_timeout(ttl: Ttl) -> Duration {
    (ttl.duration() / 6).max(MIN_RENEWAL_TIMEOUT)
}

/// Rounds a timeout down to three binary digits, so that leases of similar ttls share a batch.
fn batch_timeout(timeout: Duration) -> Duration {
    let ms = (timeout.as_millis() as u64).max(1);
    let unit = 1 << ms.ilog2().saturating_sub(2);
    Duration::from_millis(ms / unit * unit)
}

/// The minimum timeout of a renewal, however short the ttl is.
const MIN_RENEWAL_TIMEOUT: Duration = Duration::from_millis(100);

/// The reason of a loss that the store reported.
pub(super) const GONE: &str = "the store no longer has it: it expired, or was deleted or taken over";

impl Lease {
    /// Declares the lease lost if its deadline has passed. Returns the timeout of its renewal if it is to be renewed now; the
    /// deadline is then its next event.
    pub(in crate::service) fn renewal_due(self: &Arc<Self>, shared: &Arc<Shared>, now: Moment) -> Option<Duration> {
        let mut state = self.state.lock();
        if !matches!(state.phase, Phase::Held) {
            return None;
        }
        if state.deadline <= now {
            let error = self.expired(&state);
            drop(state);
            self.lose(shared, error);
            return None;
        }
        state.renewal.filter(|window| window.opens <= now)?;
        let stalled_for = shared.stall_detector.stalled_for();
        let is_stalled = if state.is_unreceived {
            let silent_for = stalled_for.max(state.acquired_at.elapsed());
            // A hand-off that the event loop has not received is extended after half of its time.
            let is_early = state.is_short && state.acquired_at.elapsed() < state.deadline.remaining();
            is_early || silent_for > self.stall_limit.min(state.ttl.event_loop_timeout())
        } else {
            !state.is_short && stalled_for > self.stall_limit
        };
        if is_stalled {
            // Renewal resumes if the event loop responds before the deadline.
            state.delay_renewal();
            return None;
        }
        state.renewal = None;
        Some(batch_timeout(
            renewal_timeout(state.current_ttl()).min(shared.store_timeout),
        ))
    }

    /// Applies the answer to a renewal that was sent at `sent`.
    pub(super) fn apply_renewal(
        self: &Arc<Self>,
        shared: &Arc<Shared>,
        answer: Result<Renewed, EngineError>,
        sent: Moment,
        ttl: Ttl,
    ) {
        if answer.is_ok() {
            shared.events.store_answered();
        }
        let mut state = self.state.lock();
        match answer {
            // A deadline that has passed is final: `is_held` has returned `false` since then.
            Ok(Renewed::Extended) if matches!(state.phase, Phase::Held) && state.deadline.is_past() => {
                let error = self.expired(&state);
                drop(state);
                self.lose(shared, error);
            }
            Ok(Renewed::Extended) if matches!(state.phase, Phase::Held) => {
                state.deadline = state.deadline.max(sent + ttl.validity());
                let next = RenewalWindow::after(sent, state.ttl);
                let is_renewed = self.renew || state.asked_until.is_some();
                let continues = is_renewed && state.last_end().is_none_or(|end| next.due < end);
                state.renewal = continues.then_some(next);
                state.retry = None;
                let completes_grant = std::mem::take(&mut state.is_short);
                drop(state);
                if !completes_grant {
                    shared.counters.lock().renewed += 1;
                    shared.emit(|| self.event(EventKind::Renewed, None, None));
                }
            }
            Ok(Renewed::Extended) => {
                let is_lost = matches!(state.phase, Phase::Lost(_));
                drop(state);
                if is_lost {
                    // The lease was lost locally during the renewal: the store must not keep a lock without a caller.
                    shared.release_in_background(self.abandoned());
                }
            }
            Ok(Renewed::Lost) => {
                drop(state);
                self.lose(shared, self.lost(GONE));
            }
            Err(error) => {
                shared.store_failed(&error);
                tracing::debug!(%error, name = %self.names[0], "a renewal failed and is retried");
                if self.renew || state.asked_until.is_some() || state.is_short {
                    state.delay_renewal().last_error = Some(Arc::new(error));
                }
            }
        }
    }

    /// Extends the lease to at least `ttl` from now on. Later renewals use this ttl.
    ///
    /// # Errors
    /// `LOCK_LOST` when the lease is lost or was released, or when it ends before the store answers. `LOCK_STORE` when the store
    /// fails before the lease ends.
    pub(in crate::service) async fn extend(self: &Arc<Self>, shared: &Arc<Shared>, ttl: Ttl) -> Result<(), LockError> {
        let started = tokio::time::Instant::now();
        let Ok(_guard) = tokio::time::timeout(shared.store_timeout, self.operation.lock()).await else {
            let error = shared.engine.no_answer("renew", shared.store_timeout);
            return Err(self.extension_failed(shared, LockError::store(error)));
        };
        if self.is_released() {
            return Err(self.lost("it was released"));
        }
        if let Some(loss) = self.loss() {
            return Err(loss);
        }
        let whole = ttl;
        let longest = shared.store.longest_lease.map(Ttl::clamped);
        let ttl = longest.map_or(ttl, |longest| ttl.min(longest));
        // As short as that of a renewal: a retry must fit into the rest of the lease.
        let (capped, timeout, end) = {
            let mut state = self.state.lock();
            if !self.renew && (whole > ttl || state.asked_until.is_some()) {
                state.asked_until = state.asked_until.max(Some(Moment::now() + whole.validity()));
            }
            // Never shorter than the lease that the caller was granted.
            let least = if state.is_short { ttl.max(state.ttl) } else { ttl };
            let Some(capped) = state.capped_ttl(least) else {
                return Err(self.lost(MAX_HOLD_PASSED));
            };
            state.max_ttl = state.max_ttl.max(capped);
            state.is_extended = true;
            // A reply that arrives after the end of the lease cannot extend it. A renewal may still extend a short one.
            let end = if state.is_short {
                Duration::MAX
            } else {
                state.deadline.remaining()
            };
            (capped, renewal_timeout(state.current_ttl()), end)
        };
        let time_left = shared.store_timeout.saturating_sub(started.elapsed()).min(end);
        let mut sent = Moment::now();
        let answer = shared
            .with_retries("renew", time_left, || {
                sent = Moment::now();
                async move {
                    match tokio::time::timeout(timeout, shared.engine.renew(&self.claim, capped)).await {
                        Ok(answer) => answer,
                        Err(_) => Err(shared.engine.no_answer("renew", timeout)),
                    }
                }
            })
            .await
            .map_err(|error| self.extension_failed(shared, error))?;
        match answer {
            Renewed::Extended => {
                {
                    let mut state = self.state.lock();
                    // A lease that is renewed until an end keeps the longest ttl.
                    state.ttl = longest.filter(|_| state.asked_until.is_some()).unwrap_or(ttl);
                    state.asked = (whole > ttl).then_some(whole);
                    // An extension, and not the renewal that completes a hand-off.
                    state.is_short = false;
                }
                self.apply_renewal(shared, Ok(answer), sent, capped);
                if let Some(loss) = self.loss() {
                    return Err(loss);
                }
                shared.scheduler.schedule(self);
                Ok(())
            }
            Renewed::Lost => {
                let error = self.lost(GONE);
                self.lose(shared, error.clone());
                Err(error)
            }
        }
    }

    /// Converts the error of a failed extension. If the lease has ended, it is lost: `LOCK_LOST`, with the error of the store as the cause.
    fn extension_failed(self: &Arc<Self>, shared: &Arc<Shared>, error: LockError) -> LockError {
        let mut state = self.state.lock();
        if !state.deadline.is_past() {
            return match &state.phase {
                Phase::Lost(loss) => LockError::clone(loss),
                _ => error.with_key(self.names[0].as_str()),
            };
        }
        state.delay_renewal().last_error = error.cause;
        let loss = self.expired(&state);
        drop(state);
        self.lose(shared, loss.clone());
        loss
    }

    /// Moves the clock of this lease forward: all of its moments become earlier by `by`.
    pub(in crate::service) fn advance(&self, by: Duration) {
        let mut state = self.state.lock();
        state.acquired_at = state.acquired_at - by;
        state.deadline = state.deadline - by;
        state.max_hold_until = state.max_hold_until.map(|end| end - by);
        state.min_hold_until = state.min_hold_until.map(|end| end - by);
        if let Some(window) = &mut state.renewal {
            window.opens = window.opens - by;
            window.due = window.due - by;
        }
    }

    /// Declares the lease lost if it has this name, as after a renewal that did not find the name in the store.
    pub(in crate::service) fn lose_name(self: &Arc<Self>, shared: &Arc<Shared>, name: &Key) {
        if self.claim.keys().contains(name) {
            self.lose(shared, self.lost(GONE));
        }
    }
}

impl State {
    /// Shortens a ttl so that the lease does not outlast `max_hold`. `None`: `max_hold` has passed.
    pub(super) fn capped_ttl(&self, ttl: Ttl) -> Option<Ttl> {
        let Some(end) = self.last_end() else {
            return Some(ttl);
        };
        let left = end.remaining();
        (!left.is_zero()).then(|| Ttl::clamped(left.min(ttl.duration())))
    }

    /// Returns the end of the lease, however often it is renewed. `None`: it has none.
    fn last_end(&self) -> Option<Moment> {
        let ends = self.max_hold_until.into_iter().chain(self.asked_until);
        ends.min()
    }

    /// Returns the ttl by which renewals are timed: that of a hand-off until it is extended, so that several retries fit into it.
    fn current_ttl(&self) -> Ttl {
        match self.is_short {
            true => Ttl::clamped(self.ttl.duration().min(RESERVATION)),
            false => self.ttl,
        }
    }

    /// Delays the next renewal, because one failed or is not possible now.
    pub(super) fn delay_renewal(&mut self) -> &mut RenewalRetry {
        let ttl = self.current_ttl();
        let retry = self.retry.get_or_insert_with(|| {
            Box::new(RenewalRetry {
                backoff: renewal_backoff(ttl),
                last_error: None,
            })
        });
        self.renewal = Some(RenewalWindow::after_delay(retry.backoff.delay()));
        retry
    }
}

/// Returns the backoff between failed renewals. The cap is a sixth of the ttl, and at most 2 s.
fn renewal_backoff(ttl: Ttl) -> Backoff {
    let cap = (ttl.duration() / 6).clamp(Duration::from_millis(5), Duration::from_secs(2));
    Backoff::new((cap / 8).max(Duration::from_millis(2)), cap)
}
