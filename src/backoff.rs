//! Exponential backoff with jitter, for every retry loop of the crate.

use std::time::Duration;

/// The delays of one retry loop. Each delay is `factor` times the one before it, up to a cap.
///
/// # Behavior
/// Jitter shortens a delay by a random part of it, so that many clients do not retry in the same instant. The default factor
/// is 2, the default jitter 0.5 ("equal jitter" in Amazon's article on exponential backoff and jitter).
#[derive(Debug, Clone)]
pub struct Backoff {
    initial: Duration,
    next: Duration,
    cap: Duration,
    factor: f64,
    jitter: f64,
}

impl Backoff {
    /// Creates a backoff whose first delay is `initial` and whose longest is `cap`.
    pub const fn new(initial: Duration, cap: Duration) -> Self {
        Backoff {
            initial,
            next: initial,
            cap,
            factor: 2.0,
            jitter: 0.5,
        }
    }

    /// Creates the backoff between attempts at a store that fails: from 10 ms up to 500 ms.
    pub const fn for_store() -> Self {
        Self::new(Duration::from_millis(10), Duration::from_millis(500))
    }

    /// Sets the growth of the delays, at least 1.
    pub const fn with_factor(mut self, factor: f64) -> Self {
        self.factor = factor;
        self
    }

    /// Sets the jitter, from 0 to 1: a delay is shortened by a random part of at most this share.
    pub const fn with_jitter(mut self, jitter: f64) -> Self {
        self.jitter = jitter;
        self
    }

    /// Returns the next delay.
    pub fn delay(&mut self) -> Duration {
        let delay = self.next.min(self.cap);
        self.next = delay.mul_f64(self.factor);
        delay.mul_f64(1.0 - self.jitter * fastrand::f64())
    }

    /// Starts again with the first delay, after a success.
    pub fn reset(&mut self) {
        self.next = self.initial;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_grow_up_to_the_cap_and_are_shortened_by_the_jitter() {
        let ms = Duration::from_millis;
        for (factor, jitter, expected) in [
            (2.0, 0.5, [16, 32, 40, 40]),
            (1.5, 0.25, [16, 24, 36, 40]),
            (2.0, 0.0, [16, 32, 40, 40]),
        ] {
            let mut backoff = Backoff::new(ms(16), ms(40)).with_factor(factor).with_jitter(jitter);
            for longest in expected.map(ms) {
                let delay = backoff.delay();
                assert!(
                    delay >= longest.mul_f64(1.0 - jitter) && delay <= longest,
                    "{delay:?} of {longest:?}"
                );
            }
            backoff.reset();
            assert!(backoff.delay() <= ms(16));
        }
    }
}
