//! Reads the holder of a busy name, for `LOCK_TIMEOUT`.

use tokio::time::{Instant, timeout_at};

use super::Acquisition;
use crate::model::{Key, LockInfo};
use crate::service::options::{HOLDER_TIMEOUT, MIN_STORE_TIMEOUT};

/// The name that was busy at the end of a call, and its holder.
#[derive(Debug)]
pub struct BusyLock {
    /// The name.
    pub name: Key,
    /// Its state. `None`: the name became free, or the store did not answer in time.
    pub info: Option<LockInfo>,
    /// Whether this process is the holder.
    pub is_own: bool,
}

impl Acquisition {
    /// Reads the holder of the busy name.
    ///
    /// # Behavior
    /// Takes at most [`HOLDER_TIMEOUT`], and ends at most [`MIN_STORE_TIMEOUT`] after the deadline of the call. Without an answer
    /// until then, after an error of the store and in a cancelled call there is no holder.
    pub(super) async fn busy_lock(&self) -> BusyLock {
        let shared = &self.shared;
        let name = self.busy_name.as_ref().unwrap_or(&self.names[0]);
        let limit = Instant::now() + HOLDER_TIMEOUT;
        let end = self
            .deadline
            .map_or(limit, |deadline| limit.min(deadline + MIN_STORE_TIMEOUT));
        let reading = timeout_at(end, async {
            let _permit = shared.holder_reads.acquire().await;
            shared.engine.inspect_now(name).await
        });
        let info = tokio::select! {
            biased;
            _ = self.cancelled() => None,
            info = reading => info.ok().and_then(Result::ok).flatten(),
        };
        let holder = info.as_ref().and_then(|info| info.holder.as_ref());
        BusyLock {
            name: name.clone(),
            is_own: holder.is_some_and(|holder| holder.process == *shared.process),
            info,
        }
    }
}
