//! The time of the next renewal: at a third of the ttl at the latest, and a little earlier if other leases are renewed then.

use std::time::Duration;

use crate::clock::Moment;
use crate::model::Ttl;

/// The time span in which a lease is renewed.
#[derive(Debug, Clone, Copy)]
pub(in crate::service) struct RenewalWindow {
    /// From this moment on, the lease may be renewed together with another one.
    pub(in crate::service) opens: Moment,
    /// At this moment the lease is renewed.
    pub(in crate::service) due: Moment,
}

/// The window is the last tenth of a third of the ttl.
const PART: u32 = 10;
/// The time until a lease that was handed off for a short time is extended to its ttl.
const HAND_OFF_DELAY: Duration = Duration::from_millis(10);
/// The last quarter of the window is a reserve for late timers.
const RESERVE: f64 = 0.25;

impl RenewalWindow {
    /// Returns the window after a request that was sent at `sent`.
    ///
    /// # Behavior
    /// It ends at a third of the ttl. The due time within it is random: thousands of leases that were acquired at the same
    /// moment drift apart with each renewal.
    pub(super) fn after(sent: Moment, ttl: Ttl) -> Self {
        let third = ttl.duration() / 3;
        let opens = sent + (third - third / PART);
        let due = opens + (third / PART).mul_f64((1.0 - RESERVE) * fastrand::f64());
        RenewalWindow { opens, due }
    }

    /// Returns the window of the first renewal after a hand-off. A lease that is released at once needs none.
    pub(super) fn after_hand_off() -> Self {
        Self::after_delay(HAND_OFF_DELAY)
    }

    /// Returns the window of a retry. Failed renewals are retried together, too.
    pub(super) fn after_delay(delay: Duration) -> Self {
        let due = Moment::now() + delay;
        let opens = due - delay / 4;
        RenewalWindow { opens, due }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_renewal_is_due_within_the_last_tenth_of_a_third_and_never_later() {
        let sent = Moment::from_nanos(1_000_000_000);
        let (mut first, mut last) = (u64::MAX, 0);
        for _ in 0..1000 {
            let window = RenewalWindow::after(sent, Ttl::clamped(Duration::from_secs(30)));
            assert_eq!(window.opens, sent + Duration::from_secs(9));
            assert!(window.due >= window.opens && window.due < sent + Duration::from_secs(10));
            first = first.min(window.due.to_nanos());
            last = last.max(window.due.to_nanos());
        }
        assert!(last - first > 500_000_000, "spread over {} ns only", last - first);
    }
}
