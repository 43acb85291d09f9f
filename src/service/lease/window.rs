//! When a lease is to be renewed: at a third of its ttl at the latest, and a little earlier if others are renewed then.

use std::time::Duration;

use crate::clock::Moment;
use crate::model::Ttl;

/// The time in which the next renewal falls.
#[derive(Debug, Clone, Copy)]
pub(super) struct Window {
    /// From then on it may go along with another lease's.
    pub(super) opens: Moment,
    /// Then it is sent, alone or not.
    pub(super) due: Moment,
}

/// The window is the last so-many-th of the third.
const PART: u32 = 10;
/// What stays free at the window's end for a timer that fires late: a quarter of it.
const SPARE: f64 = 0.25;

impl Window {
    /// The window after a request that was sent at `sent`.
    ///
    /// # Behavior
    /// It ends at a third of the ttl. When in it the renewal is due is drawn at random: thousands of leases that were
    /// taken in one go drift apart with each renewal, and do not come to the store in one instant for ever.
    pub(super) fn after(sent: Moment, ttl: Ttl) -> Self {
        let third = ttl.duration() / 3;
        let opens = sent + (third - third / PART);
        let due = opens + (third / PART).mul_f64((1.0 - SPARE) * fastrand::f64());
        Window { opens, due }
    }

    /// The window of a try after a pause: failed renewals come back together, too.
    pub(super) fn after_pause(pause: Duration) -> Self {
        let due = Moment::now() + pause;
        let opens = due - pause / 4;
        Window { opens, due }
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
            let window = Window::after(sent, Ttl::clamped(Duration::from_secs(30)));
            assert_eq!(window.opens, sent + Duration::from_secs(9));
            assert!(window.due >= window.opens && window.due < sent + Duration::from_secs(10));
            first = first.min(window.due.to_nanos());
            last = last.max(window.due.to_nanos());
        }
        assert!(last - first > 500_000_000, "spread over {} ns only", last - first);
    }
}
