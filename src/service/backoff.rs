//! Pauses between tries at a store that fails: they double, with jitter, so that a fleet does not come back in step.
//!
//! The jitter is drawn from the upper half of each pause ("equal jitter" in Amazon's note on exponential back-off).

use std::time::Duration;

/// The next pause, and the one after it.
#[derive(Debug, Clone)]
pub(crate) struct Backoff {
    next: Duration,
    most: Duration,
}

impl Backoff {
    /// Pauses from `first`, doubled each time up to `most`.
    pub(crate) fn new(first: Duration, most: Duration) -> Self {
        Backoff { next: first, most }
    }

    /// The pauses between tries at a store that fails.
    pub(crate) fn for_store() -> Self {
        Self::new(Duration::from_millis(10), Duration::from_millis(500))
    }

    /// The next pause.
    pub(crate) fn pause(&mut self) -> Duration {
        let pause = self.next.min(self.most);
        self.next = pause * 2;
        pause / 2 + pause.mul_f64(fastrand::f64() / 2.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_within_their_jitter_up_to_the_most() {
        let mut backoff = Backoff::new(Duration::from_millis(10), Duration::from_millis(25));
        for full in [10, 20, 25, 25] {
            let pause = backoff.pause();
            let full = Duration::from_millis(full);
            assert!(pause >= full / 2 && pause <= full, "{pause:?} of {full:?}");
        }
    }
}
