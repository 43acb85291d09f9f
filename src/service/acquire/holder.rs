//! Reads the holder of a busy name, for `LOCK_TIMEOUT`.

use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::{Instant, timeout_at};

use super::Acquisition;
use crate::engine::EngineExt;
use crate::error::EngineError;
use crate::model::{Fence, Holder, Key, LockInfo};
use crate::service::options::{HOLDER_TIMEOUT, MIN_STORE_TIMEOUT};
use crate::service::{Lease, Shared};

/// The name that was busy at the end of a call, and its holder.
#[derive(Debug)]
pub struct BusyLock {
    /// The name.
    pub name: Key,
    /// Its state: of several holders that of the one whose lease ends first. `None`: it has become free, or is reserved for a waiter of
    /// several names. An error: the store did not return it.
    pub info: Result<Option<LockInfo>, EngineError>,
    /// The number of its other holders.
    pub others: usize,
    /// Whether this process is the holder.
    pub is_own: bool,
}

impl Acquisition {
    /// Reads the holder of the busy name.
    ///
    /// # Behavior
    /// Takes at most [`HOLDER_TIMEOUT`], and ends at most [`MIN_STORE_TIMEOUT`] after the deadline of the call. Without an answer
    /// until then and after an error of the store the holder is not known. A cancelled call does not read it.
    pub(super) async fn busy_lock(&self) -> BusyLock {
        let shared = &self.shared;
        let name = self.busy_name.as_ref().unwrap_or(&self.names[0]);
        let limit = Instant::now() + HOLDER_TIMEOUT;
        let end = self
            .deadline
            .map_or(limit, |deadline| limit.min(deadline + MIN_STORE_TIMEOUT));
        let reading = timeout_at(end, async {
            let _permit = shared.holder_reads.acquire().await;
            shared.engine.holders(name, false).await
        });
        let began = Instant::now();
        let infos = tokio::select! {
            biased;
            _ = self.cancelled() => None,
            infos = reading => infos.ok(),
        };
        let infos = infos.unwrap_or_else(|| Err(shared.engine.no_answer("inspect", began.elapsed())));
        let others = infos.as_ref().map_or(0, |infos| infos.len().saturating_sub(1));
        let rest = |info: &LockInfo| info.remaining.unwrap_or(Duration::MAX);
        let info = infos.map(|infos| infos.into_iter().min_by_key(rest));
        let is_own = matches!(&info, Ok(Some(info)) if self.is_own(name, info));
        let name = name.clone();
        BusyLock {
            name,
            info,
            others,
            is_own,
        }
    }

    /// Whether a service of this process is the holder. Containers may have the same host name and process id: only a lease of this
    /// process proves it.
    fn is_own(&self, name: &Key, info: &LockInfo) -> bool {
        let is_alike = |holder: &Holder| holder.process == *self.shared.process;
        if !info.holder.as_ref().is_some_and(is_alike) {
            return false;
        }
        // Another store or prefix has another token. It may be unknown on either side.
        let is_shown = |fence: Fence| fence == Fence::NONE || info.fence.is_none_or(|shown| shown == fence);
        let is_it = |lease: &Lease| lease.names().contains(name) && is_shown(lease.fence());
        let services: Vec<_> = SERVICES.lock().iter().filter_map(Weak::upgrade).collect();
        services.iter().any(|service| service.scheduler.any_held(is_it))
    }
}

/// The services of this process.
static SERVICES: Mutex<Vec<Weak<Shared>>> = Mutex::new(Vec::new());

/// Adds a service of this process.
pub(in crate::service) fn add_service(shared: &Arc<Shared>) {
    let mut services = SERVICES.lock();
    services.retain(|service| service.strong_count() > 0);
    services.push(Arc::downgrade(shared));
}
