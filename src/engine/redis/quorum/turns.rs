//! Delays attempts after a release, so that waiting services are granted the name first.
//!
//! A quorum has no queue. A service that releases a name knows that first, so that its next attempt would reach the nodes before
//! those of the waiters that the release notifies: it would get the name again and again.

use std::time::Duration;

use crate::clock::Moment;
use crate::engine::redis::ops::contended::ExpiringNames;
use crate::model::Key;

/// The shortest pause after a release: the waiters wait for the messages of a majority, and their processes may be busy.
const SHORTEST: Duration = Duration::from_millis(5);
/// The longest pause.
const LONGEST: Duration = Duration::from_millis(500);

/// The names that this service has released while other services waited for them, and until when it makes no attempt.
#[derive(Default)]
pub(super) struct Turns(ExpiringNames);

impl Turns {
    /// Records a release that took `round_trip`, while other services waited.
    pub(super) fn released(&self, key: &Key, round_trip: Duration) {
        let pause = (SHORTEST + round_trip).mul_f64(1.0 + fastrand::f64()).min(LONGEST);
        self.0.note(key, Moment::now() + pause);
    }

    /// Waits until the pauses of all these names have ended.
    pub(super) async fn wait(&self, keys: &[Key]) {
        let left = keys.iter().map(|key| self.0.remaining(key)).max().unwrap_or_default();
        if !left.is_zero() {
            tokio::time::sleep(left).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_name_waits_once_and_for_a_short_time() {
        let turns = Turns::default();
        let key = |name: &str| Key::new(name).unwrap();
        let waited = async |name: &str| {
            let started = tokio::time::Instant::now();
            turns.wait(&[key(name)]).await;
            started.elapsed()
        };
        turns.released(&key("n"), Duration::from_millis(1));
        assert_eq!(waited("m").await, Duration::ZERO);
        assert!((6..=13).contains(&waited("n").await.as_millis()));
        assert_eq!(waited("n").await, Duration::ZERO);
        turns.released(&key("n"), Duration::from_secs(9));
        assert!(waited("n").await <= LONGEST + Duration::from_millis(1));
    }
}
