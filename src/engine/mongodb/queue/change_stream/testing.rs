//! Reads and changes the state of a stream, for tests.

use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::{Phase, REFUSAL, Watcher};
use crate::engine::mongodb::error::Failure;

impl Watcher {
    pub(crate) fn refuse(&self, failure: Failure) {
        self.0.state.lock().refused = Some((Instant::now() + REFUSAL, failure));
    }

    pub(crate) fn is_open(&self) -> bool {
        matches!(*self.0.phase.borrow(), Phase::Open)
    }

    /// Makes every opening of the stream wait from now on. A stream that is open loses its events.
    pub(crate) fn hang(&self) {
        let task = tokio::spawn(std::future::pending::<()>()).abort_handle();
        let before = self.0.state.lock().task.replace(task);
        before.iter().for_each(AbortHandle::abort);
    }
}
