//! Renewals of leases that are due together: one call of the engine for all of them.

use std::sync::Arc;
use std::time::Duration;

use super::alone::Alone;
use super::{Lease, Phase};
use crate::clock::Moment;
use crate::engine::Renewal;
use crate::error::EngineError;
use crate::model::Ttl;
use crate::service::Inner;

/// One of them, until its answer is there.
struct Flight<'a> {
    lease: &'a Arc<Lease>,
    /// What is asked for.
    ttl: Ttl,
    _alone: Alone<'a>,
}

/// Renews leases, and puts each of them back on the keeper's schedule as soon as its answer is there.
///
/// # Behavior
/// What is unanswered after `limit` has failed, and is tried again. A lease that is being extended or released at this
/// moment holds nobody up: it comes later.
pub(in crate::service) async fn renew_together(inner: Arc<Inner>, leases: Vec<Arc<Lease>>, limit: Duration) {
    let mut flights = Vec::with_capacity(leases.len());
    let mut renewals = Vec::with_capacity(leases.len());
    for lease in &leases {
        match lease.take_off(&inner) {
            Some(flight) => {
                let ttl = flight.ttl;
                renewals.push(Renewal {
                    claim: &lease.claim,
                    ttl,
                });
                flights.push(Some(flight));
            }
            None => inner.keeper.schedule(lease),
        }
    }
    let sent = Moment::now();
    let land = |flight: Flight<'_>, answer| {
        let lease = flight.lease;
        lease.renewed(&inner, answer, sent, flight.ttl);
        drop(flight);
        inner.keeper.schedule(lease);
    };
    let mut answered = |index: usize, answer| {
        if let Some(flight) = flights.get_mut(index).and_then(Option::take) {
            land(flight, answer);
        }
    };
    let _ = tokio::time::timeout(limit, inner.engine.renew_all(&renewals, &mut answered)).await;
    for flight in flights.into_iter().flatten() {
        land(flight, Err(EngineError::no_answer(inner.engine.name(), "renew", limit)));
    }
}

impl Lease {
    /// Begins a renewal, unless the lease is over, or something else is under way for it.
    fn take_off<'a>(self: &'a Arc<Self>, inner: &'a Inner) -> Option<Flight<'a>> {
        let Some(alone) = self.try_alone(inner) else {
            self.state().pause();
            return None;
        };
        let state = self.state();
        if !matches!(state.phase, Phase::Held) || state.deadline.is_past() {
            return None;
        }
        let ttl = self.capped(state.ttl)?;
        Some(Flight {
            lease: self,
            ttl,
            _alone: alone,
        })
    }
}
