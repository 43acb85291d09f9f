//! Decides the outcome of an attempt from what the store holds: the rules of leases and queues, without a store.
//!
//! All times are relative to the present by the store's clock. An engine reads the snapshot and writes the outcome under one
//! lock (a mutex, a write transaction).

use std::time::Duration;

use crate::engine::WAITER_LIVENESS;
use crate::model::{Fence, Ttl};

/// A lease that has not expired.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::engine) struct HeldLease {
    /// Whether the claim's owner holds it.
    pub is_own: bool,
    pub remaining: Duration,
    pub fence: u64,
}

/// The state of one name of the claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(in crate::engine) struct NameState {
    pub lease: Option<HeldLease>,
    /// The time until the position of the first live waiter ahead of the claim expires.
    pub first_ahead: Option<Duration>,
    /// The time until the position of the last live waiter ahead of the claim expires.
    pub last_ahead: Option<Duration>,
}

/// What an engine reads for an attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::engine) struct Snapshot {
    /// The store's clock, in microseconds since 1970-01-01 UTC.
    pub now_micros: u64,
    /// The last fencing token that the store granted for any name.
    pub last_fence: u64,
    /// The names of the claim, in the claim's order.
    pub names: Vec<NameState>,
}

/// The outcome of an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::engine) enum Decision {
    /// The engine grants every name, and records the fencing token as the last one.
    Grant { fence: Fence },
    /// The owner holds every name already: a retry after a lost reply. The engine only extends the lease.
    AlreadyHeld { fence: Fence },
    /// The name with this index is the first that is busy.
    Busy {
        index: usize,
        retry_after: Duration,
        /// The owner holds other names of the claim. The engine releases them: a claim is held as a whole or not at all.
        holds_some: bool,
    },
}

/// Decides the outcome of an attempt.
///
/// # Behavior
/// `liveness`: how long the claim's position in a queue lives without another attempt. `None`: the claim does not wait.
pub(in crate::engine) fn decide(snapshot: &Snapshot, liveness: Option<Duration>) -> Decision {
    let leases = || snapshot.names.iter().filter_map(|name| name.lease);
    for (index, name) in snapshot.names.iter().enumerate() {
        let wait = match (name.lease, name.first_ahead) {
            // Waiters in the queue of a name that the owner holds came after the owner.
            (Some(lease), _) if lease.is_own => continue,
            (Some(lease), _) => lease.remaining,
            (None, Some(ahead)) => ahead,
            (None, None) => continue,
        };
        return Decision::Busy {
            index,
            retry_after: liveness.map_or(wait, |liveness| waiter_retry(wait, liveness, name.last_ahead)),
            holds_some: leases().any(|lease| lease.is_own),
        };
    }
    if leases().count() == snapshot.names.len()
        && let Some(fence) = leases().map(|lease| lease.fence).max()
    {
        return Decision::AlreadyHeld { fence: Fence(fence) };
    }
    Decision::Grant {
        fence: Fence(snapshot.now_micros.max(snapshot.last_fence + 1)),
    }
}

/// Returns how long a position in a queue lives after the last attempt of its owner.
pub(in crate::engine) fn waiter_liveness(ttl: Ttl) -> Duration {
    ttl.duration().min(WAITER_LIVENESS)
}

/// The shortest retry because of the position ahead.
const MIN_WAITER_RETRY: Duration = Duration::from_millis(100);

/// Returns the time after which a waiter with a position tries again.
///
/// # Behavior
/// `wait`: the rest of the current lease. A waiter tries again twice before its position expires. It also tries again when the
/// position directly ahead of it expires (`ahead`): a release before that moment wakes only the waiter ahead, which may be
/// dead.
fn waiter_retry(wait: Duration, liveness: Duration, ahead: Option<Duration>) -> Duration {
    let ahead = ahead.map_or(Duration::MAX, |ahead| ahead.max(MIN_WAITER_RETRY));
    wait.min(liveness / 3).min(ahead)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW_MICROS: u64 = 1_000_000_000;
    const FREE: NameState = NameState {
        lease: None,
        first_ahead: None,
        last_ahead: None,
    };

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn held(is_own: bool, remaining: u64, fence: u64) -> NameState {
        NameState {
            lease: Some(HeldLease {
                is_own,
                remaining: ms(remaining),
                fence,
            }),
            ..FREE
        }
    }

    fn queued(remaining: u64) -> NameState {
        NameState {
            first_ahead: Some(ms(remaining)),
            last_ahead: Some(ms(remaining)),
            ..FREE
        }
    }

    fn decided(names: &[NameState], liveness_ms: Option<u64>) -> Decision {
        decided_after(7, names, liveness_ms)
    }

    fn decided_after(last_fence: u64, names: &[NameState], liveness_ms: Option<u64>) -> Decision {
        let snapshot = Snapshot {
            now_micros: NOW_MICROS,
            last_fence,
            names: names.to_vec(),
        };
        decide(&snapshot, liveness_ms.map(ms))
    }

    fn grant(fence: u64) -> Decision {
        Decision::Grant { fence: Fence(fence) }
    }

    fn busy(index: usize, retry_ms: u64) -> Decision {
        Decision::Busy {
            index,
            retry_after: ms(retry_ms),
            holds_some: false,
        }
    }

    #[test]
    fn a_fencing_token_is_the_clock_or_one_more_than_the_last() {
        assert_eq!(decided(&[FREE, FREE], None), grant(NOW_MICROS));
        assert_eq!(decided_after(5 * NOW_MICROS, &[FREE], None), grant(5 * NOW_MICROS + 1));
    }

    #[test]
    fn the_first_busy_name_is_reported() {
        assert_eq!(
            decided(&[FREE, held(false, 900, 1), held(false, 100, 1)], None),
            busy(1, 900)
        );
        assert_eq!(decided(&[queued(300), held(false, 900, 1)], None), busy(0, 300));
    }

    #[test]
    fn a_waiter_tries_again_before_its_position_expires() {
        assert_eq!(decided(&[held(false, 9000, 1)], Some(4500)), busy(0, 1500));
        assert_eq!(decided(&[held(false, 900, 1)], Some(4500)), busy(0, 900));
        assert_eq!(decided(&[queued(700)], Some(4500)), busy(0, 700));
    }

    #[test]
    fn a_waiter_tries_again_when_the_position_ahead_of_it_expires() {
        let behind = |remaining: u64| NameState {
            last_ahead: Some(ms(remaining)),
            ..held(false, 9000, 1)
        };
        assert_eq!(decided(&[behind(400)], Some(4500)), busy(0, 400));
        assert_eq!(decided(&[behind(4400)], Some(4500)), busy(0, 1500));
        assert_eq!(
            decided(&[behind(1)], Some(4500)),
            busy(0, 100),
            "after the shortest retry"
        );
        assert_eq!(
            decided(&[behind(400)], None),
            busy(0, 9000),
            "without a position in the queue"
        );
    }

    #[test]
    fn names_that_the_owner_holds_are_not_busy() {
        let own = held(true, 500, 42);
        assert_eq!(decided(&[own, own], None), Decision::AlreadyHeld { fence: Fence(42) });
        let with_queue = NameState {
            first_ahead: Some(ms(300)),
            ..own
        };
        assert_eq!(decided(&[with_queue], None), Decision::AlreadyHeld { fence: Fence(42) });
        // One name of the lease is lost, and free: a new grant of all names, with a new fencing token.
        assert_eq!(decided(&[own, FREE], None), grant(NOW_MICROS));
        assert_eq!(
            decided(&[own, held(false, 10, 1)], None),
            Decision::Busy {
                index: 1,
                retry_after: ms(10),
                holds_some: true
            }
        );
    }
}
