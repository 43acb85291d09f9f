//! A call that waits through outages of the store (`onStoreError: 'wait'`).

use tokio::time::sleep;

use super::{Acquisition, End, Outcome};
use crate::backoff::Backoff;

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
    pub(in crate::service) async fn run_through_outages(&mut self) -> End {
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
            let Some(rest) = self.options.resumed(self.arrival, self.started.elapsed()) else {
                return Err(error);
            };
            let (call, names, abort) = (self.call.clone(), self.names.clone(), self.abort.clone());
            let called = self.called;
            *self = Acquisition::new(&self.shared, call, names, rest.into(), abort);
            self.called = called;
        }
    }
}
