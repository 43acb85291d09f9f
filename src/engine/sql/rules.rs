//! What a try leads to, given what the store holds: the rules of the queue, without a database.
//!
//! Times are milliseconds by the store's clock. What a dialect reads, it reads under the store's write lock, and what
//! this decides it writes before it gives the lock back.

use std::time::Duration;

use crate::engine::{LAPSED_PLACE_KEPT, waiter_retry};
use crate::model::Fence;

/// A place that lapsed is remembered for so long, as the database counts.
pub(super) const LAPSED_PLACE_KEPT_MS: i64 = LAPSED_PLACE_KEPT.as_millis() as i64;

/// The lease on one name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Lease {
    /// Whether the asker holds it.
    pub mine: bool,
    pub expires_at: i64,
    pub fence: u64,
}

/// What stands between the asker and one name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Name {
    /// The lease, unless it has expired.
    pub lease: Option<Lease>,
    /// Until when the first live waiter that came before the asker keeps its place.
    pub ahead_until: Option<i64>,
    /// Until when the last live waiter before the asker keeps its place.
    pub directly_ahead_until: Option<i64>,
}

/// What was read for a try.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Sight {
    pub now: i64,
    /// The last fence that the store gave to anybody.
    pub last_fence: u64,
    /// One per name of the claim, in the claim's order.
    pub names: Vec<Name>,
}

/// What a try leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Give every name to the asker, and remember the fence as the last one.
    Grant { fence: Fence },
    /// The asker holds every name already: a retry after a lost reply. Only the end of the lease moves.
    Again { fence: Fence },
    /// The name with this index is the first that the asker cannot have.
    Busy {
        index: usize,
        retry_after: Duration,
        /// The asker still holds others of its names, though a claim is held as a whole or not at all.
        holds_some: bool,
    },
}

/// What a try leads to. `liveness`: of the asker's place, when it waits.
pub(super) fn judge(sight: &Sight, liveness: Option<Duration>) -> Verdict {
    let leases = || sight.names.iter().filter_map(|name| name.lease);
    for (index, name) in sight.names.iter().enumerate() {
        let until = match name {
            // Whoever queues for a name that the asker holds came after it.
            Name { lease: Some(lease), .. } if lease.mine => continue,
            Name { lease: Some(lease), .. } => lease.expires_at,
            Name { lease: None, .. } => match name.ahead_until {
                Some(until) => until,
                None => continue,
            },
        };
        let wait = millis(until - sight.now);
        return Verdict::Busy {
            index,
            retry_after: liveness.map_or(wait, |liveness| {
                let ahead = name.directly_ahead_until.map(|until| millis(until - sight.now));
                waiter_retry(wait, liveness, ahead)
            }),
            holds_some: leases().any(|lease| lease.mine),
        };
    }
    if leases().count() == sight.names.len()
        && let Some(fence) = leases().map(|lease| lease.fence).max()
    {
        return Verdict::Again { fence: Fence(fence) };
    }
    let micros = sight.now.max(0).unsigned_abs() * 1000;
    Verdict::Grant {
        fence: Fence(micros.max(sight.last_fence + 1)),
    }
}

/// A span of milliseconds, zero when it is negative.
pub(super) fn millis(span: i64) -> Duration {
    Duration::from_millis(span.max(0).unsigned_abs())
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: i64 = 1_000_000;
    const FREE: Name = Name {
        lease: None,
        ahead_until: None,
        directly_ahead_until: None,
    };

    fn held(mine: bool, lasts: i64, fence: u64) -> Name {
        Name {
            lease: Some(Lease {
                mine,
                expires_at: NOW + lasts,
                fence,
            }),
            ..FREE
        }
    }

    fn queued(lasts: i64) -> Name {
        Name {
            ahead_until: Some(NOW + lasts),
            directly_ahead_until: Some(NOW + lasts),
            ..FREE
        }
    }

    fn judged(names: &[Name], liveness_ms: Option<u64>) -> Verdict {
        let sight = Sight {
            now: NOW,
            last_fence: 7,
            names: names.to_vec(),
        };
        judge(&sight, liveness_ms.map(Duration::from_millis))
    }

    fn busy(index: usize, retry_ms: u64) -> Verdict {
        Verdict::Busy {
            index,
            retry_after: Duration::from_millis(retry_ms),
            holds_some: false,
        }
    }

    #[test]
    fn a_fence_is_the_clock_or_one_more_than_the_last() {
        assert_eq!(
            judged(&[FREE, FREE], None),
            Verdict::Grant {
                fence: Fence(1_000_000_000)
            }
        );
        let sight = Sight {
            now: NOW,
            last_fence: 5_000_000_000,
            names: vec![FREE],
        };
        assert_eq!(
            judge(&sight, None),
            Verdict::Grant {
                fence: Fence(5_000_000_001)
            }
        );
    }

    #[test]
    fn the_first_obstacle_answers() {
        assert_eq!(
            judged(&[FREE, held(false, 900, 1), held(false, 100, 1)], None),
            busy(1, 900)
        );
        assert_eq!(judged(&[queued(300), held(false, 900, 1)], None), busy(0, 300));
    }

    #[test]
    fn a_waiter_comes_again_before_its_place_lapses() {
        assert_eq!(judged(&[held(false, 9000, 1)], Some(4500)), busy(0, 1500));
        assert_eq!(judged(&[held(false, 900, 1)], Some(4500)), busy(0, 900));
        assert_eq!(judged(&[queued(700)], Some(4500)), busy(0, 700));
    }

    #[test]
    fn a_waiter_tries_again_when_the_place_ahead_of_it_expires() {
        let behind = |lasts: i64| Name {
            directly_ahead_until: Some(NOW + lasts),
            ..held(false, 9000, 1)
        };
        assert_eq!(judged(&[behind(400)], Some(4500)), busy(0, 400));
        assert_eq!(judged(&[behind(4400)], Some(4500)), busy(0, 1500));
        assert_eq!(
            judged(&[behind(1)], Some(4500)),
            busy(0, 100),
            "after the shortest retry"
        );
        assert_eq!(
            judged(&[behind(400)], None),
            busy(0, 9000),
            "without a place in the queue"
        );
    }

    #[test]
    fn what_the_asker_holds_is_no_obstacle() {
        let mine = held(true, 500, 42);
        assert_eq!(judged(&[mine, mine], None), Verdict::Again { fence: Fence(42) });
        let with_queue = Name {
            ahead_until: Some(NOW + 300),
            ..mine
        };
        assert_eq!(judged(&[with_queue], None), Verdict::Again { fence: Fence(42) });
        // Part of the lease is gone, and free: a new grant of all, so a new fence.
        assert_eq!(
            judged(&[mine, FREE], None),
            Verdict::Grant {
                fence: Fence(1_000_000_000)
            }
        );
        assert_eq!(
            judged(&[mine, held(false, 10, 1)], None),
            Verdict::Busy {
                index: 1,
                retry_after: Duration::from_millis(10),
                holds_some: true
            }
        );
    }
}
