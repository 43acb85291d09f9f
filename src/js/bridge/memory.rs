//! Returns the memory of a burst of calls to the system.
//!
//! glibc's allocator keeps unused memory. After 20 000 concurrent calls, or an outage under load, a process would keep some 3 KB
//! for each call. So `malloc_trim(3)` runs after the end of a burst.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// The number of calls in progress, or of leases, that counts as a burst.
const BURST: usize = 2048;
/// The delay after the end of a burst. By then the state of its calls has been dropped.
const DELAY: Duration = Duration::from_secs(1);
/// The shortest interval between two runs: each takes some milliseconds.
const MIN_INTERVAL: Duration = Duration::from_secs(3);

/// Detects the end of a burst of calls, or of leases.
#[derive(Debug, Default)]
pub(super) struct Burst {
    /// The largest number since the end of the last burst.
    peak: Cell<usize>,
    ended: Cell<Option<Instant>>,
}

impl Burst {
    /// Records a start. `current`: the number of calls in progress, or of leases, with this one.
    pub(super) fn began(&self, current: usize) {
        self.peak.set(self.peak.get().max(current));
    }

    /// Records ends. `current`: the number that is left. Returns whether a burst has ended and memory should be returned.
    pub(super) fn has_ended(&self, current: usize) -> bool {
        if self.peak.get() < BURST || current > self.peak.get() / 8 {
            return false;
        }
        if self.ended.get().is_some_and(|ended| ended.elapsed() < MIN_INTERVAL) {
            return false;
        }
        self.peak.set(current);
        self.ended.set(Some(Instant::now()));
        true
    }
}

/// Returns unused memory to the system after a delay.
pub(super) async fn return_memory() {
    tokio::time::sleep(DELAY).await;
    // On a separate thread, so that neither renewals nor the event loop wait for it. It fails only when the runtime ends.
    drop(tokio::task::spawn_blocking(trim).await);
}

fn trim() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: the function has no requirements, and any thread may call it.
    unsafe {
        libc::malloc_trim(0);
    }
}
