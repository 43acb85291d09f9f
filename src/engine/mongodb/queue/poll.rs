//! Polling, where the store has no change stream.

use std::time::Duration;

use async_trait::async_trait;
use tokio::time::Instant;

use crate::backoff::Backoff;
use crate::engine::Subscription;

const LONGEST: Duration = Duration::from_millis(250);

/// Wakes a waiter after growing intervals, because most locks are held briefly. Jitter separates waiters that began together.
#[derive(Debug)]
pub(crate) struct Poll {
    backoff: Backoff,
    /// The end of the current interval. A call that is dropped and made again does not restart it.
    until: Option<Instant>,
}

impl Default for Poll {
    fn default() -> Self {
        // The mean delays are 10 ms at first and 200 ms in the end.
        let backoff = Backoff::new(Duration::from_micros(12_500), LONGEST);
        Poll {
            backoff: backoff.with_factor(1.5).with_jitter(0.4),
            until: None,
        }
    }
}

#[async_trait]
impl Subscription for Poll {
    async fn changed(&mut self) {
        let backoff = &mut self.backoff;
        let until = *self.until.get_or_insert_with(|| Instant::now() + backoff.delay());
        tokio::time::sleep_until(until).await;
        self.until = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn intervals_grow_up_to_a_limit() {
        let mut poll = Poll::default();
        let started = Instant::now();
        poll.changed().await;
        assert!(
            started.elapsed() <= Duration::from_millis(14),
            "{:?}",
            started.elapsed()
        );
        for _ in 0..20 {
            poll.changed().await;
        }
        let started = Instant::now();
        poll.changed().await;
        let longest = started.elapsed();
        assert!(
            longest >= Duration::from_millis(149) && longest <= Duration::from_millis(252),
            "{longest:?}"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_dropped_call_does_not_restart_the_interval() {
        let mut poll = Poll {
            backoff: Backoff::new(LONGEST, LONGEST),
            until: None,
        };
        let started = Instant::now();
        while tokio::time::timeout(Duration::from_millis(5), poll.changed())
            .await
            .is_err()
        {}
        assert!(
            started.elapsed() <= Duration::from_millis(260),
            "{:?}",
            started.elapsed()
        );
    }
}
