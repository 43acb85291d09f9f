//! Wake-up where the store cannot push: a look now and then.

use std::time::Duration;

use async_trait::async_trait;
use tokio::time::Instant;

use crate::engine::Subscription;

const FIRST: Duration = Duration::from_millis(10);
const LONGEST: Duration = Duration::from_millis(200);

/// Says now and then that a new try may be worthwhile: soon at first, because most locks are held briefly, and then less
/// and less often. The pauses vary, so that waiters that began together do not stay together.
#[derive(Debug)]
pub(super) struct Poll {
    pause: Duration,
    /// When the pause under way ends. Kept here, so that a call that is dropped and made again does not start it anew.
    until: Option<Instant>,
}

impl Default for Poll {
    fn default() -> Self {
        Poll {
            pause: FIRST,
            until: None,
        }
    }
}

#[async_trait]
impl Subscription for Poll {
    async fn changed(&mut self) {
        let pause = self.pause;
        let until = *self
            .until
            .get_or_insert_with(|| Instant::now() + pause.mul_f64(0.75 + fastrand::f64() / 2.0));
        tokio::time::sleep_until(until).await;
        self.until = None;
        self.pause = pause.mul_f64(1.5).min(LONGEST);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn pauses_grow_up_to_a_limit() {
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
    async fn a_dropped_wait_goes_on_where_it_was() {
        let mut poll = Poll {
            pause: LONGEST,
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
