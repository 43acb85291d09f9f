//! A call that waits through outages of the store (`onStoreError: 'wait'`).

use tokio::time::{Instant, sleep};

use super::{Acquisition, Outcome};
use crate::backoff::Backoff;
use crate::error::LockError;
use crate::service::options::{AcquireOptions, Wait};

impl Acquisition {
    /// Runs the acquisition, and begins again after each failure of the store that a repetition may cure.
    ///
    /// # Behavior
    /// Each repetition has a new owner token, because the attempts of the earlier owner are released in the background, some of
    /// them after the store answers again. It keeps the arrival number of the call. In the store's queue it is a new waiter.
    ///
    /// # Errors
    /// The last error of the store at the deadline, or up to [`MIN_STORE_TIMEOUT`](crate::service::options::MIN_STORE_TIMEOUT)
    /// later; an error that no repetition cures; `LOCK_CLOSED`.
    pub(in crate::service) async fn run_through_outages(mut self) -> Result<Outcome, LockError> {
        let mut backoff = Backoff::for_store();
        loop {
            let error = match self.run().await {
                Err(error) if error.retryable => error,
                outcome => return outcome,
            };
            if let Some(end) = self.wait_for(sleep(backoff.delay())).await {
                return match end {
                    Ok(Outcome::Busy(_)) => Err(error),
                    end => end,
                };
            }
            self = self.repetition();
        }
    }

    /// Returns a new acquisition with the rest of the wait.
    fn repetition(self) -> Self {
        let wait = match self.deadline {
            Some(deadline) => Wait::For(deadline.saturating_duration_since(Instant::now())),
            None => Wait::Forever,
        };
        let options = AcquireOptions {
            wait,
            resumed: Some(self.arrival),
            ..AcquireOptions::clone(&self.options)
        };
        let mut next = Acquisition::new(&self.shared, self.call, self.names, options.into(), self.abort);
        next.called = self.called;
        next
    }
}
