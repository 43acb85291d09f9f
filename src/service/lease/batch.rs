//! Renews several leases in one call of the engine.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::MutexGuard;

use super::{Lease, Phase};
use crate::clock::Moment;
use crate::engine::{EngineExt, Renewal};
use crate::model::Ttl;
use crate::service::Shared;

/// A renewal without an answer yet.
struct InFlight<'a> {
    lease: &'a Arc<Lease>,
    /// The requested ttl.
    ttl: Ttl,
    /// `None`: the first renewal after a hand-off. A release does not wait for its answer.
    _guard: Option<MutexGuard<'a, ()>>,
}

/// Renews leases, and schedules the next event of each one when its answer arrives.
///
/// # Behavior
/// A renewal without an answer within `timeout` has failed, and is retried. A lease with another operation in progress is
/// skipped, and is renewed later.
pub(in crate::service) async fn renew_batch(shared: Arc<Shared>, leases: Vec<Arc<Lease>>, timeout: Duration) {
    let mut in_flight = Vec::with_capacity(leases.len());
    let mut renewals = Vec::with_capacity(leases.len());
    for lease in &leases {
        match lease.begin_renewal() {
            Some(renewal) => {
                renewals.push(Renewal {
                    claim: &lease.claim,
                    ttl: renewal.ttl,
                });
                in_flight.push(Some(renewal));
            }
            None => shared.scheduler.schedule(lease),
        }
    }
    let sent = Moment::now();
    let complete = |renewal: InFlight<'_>, answer| {
        let lease = renewal.lease;
        lease.apply_renewal(&shared, answer, sent, renewal.ttl);
        drop(renewal);
        shared.scheduler.schedule(lease);
    };
    let mut answered = |index: usize, answer| {
        if let Some(renewal) = in_flight.get_mut(index).and_then(Option::take) {
            complete(renewal, answer);
        }
    };
    let _ = tokio::time::timeout(timeout, shared.engine.renew_all(&renewals, &mut answered)).await;
    for renewal in in_flight.into_iter().flatten() {
        let error = shared.engine.no_answer("renew", timeout);
        complete(renewal, Err(error));
    }
}

impl Lease {
    /// Begins a renewal, unless the lease has ended or another operation is in progress.
    fn begin_renewal(self: &Arc<Self>) -> Option<InFlight<'_>> {
        let Ok(guard) = self.operation.try_lock() else {
            self.state.lock().delay_renewal();
            return None;
        };
        let state = self.state.lock();
        let guard = Some(guard).filter(|_| !state.is_short);
        if !matches!(state.phase, Phase::Held) || state.deadline.is_past() {
            return None;
        }
        let ttl = state.capped_ttl(state.ttl)?;
        Some(InFlight {
            lease: self,
            ttl,
            _guard: guard,
        })
    }
}
