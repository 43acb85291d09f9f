//! Memory that a burst of calls leaves behind.
//!
//! glibc's allocator keeps freed memory for later: after 20 000 calls at once, or an outage under load, a process would keep
//! some 3 KB per call for good. So the memory is returned to the system when a burst is over (`malloc_trim(3)`).

use std::cell::Cell;
use std::time::{Duration, Instant};

/// The fewest calls in progress that count as a burst.
const BURST: u32 = 2048;
/// When memory is returned after the end of a burst: what belongs to its calls has been dropped by then.
const DELAY: Duration = Duration::from_secs(1);
/// The shortest time between two returns: each costs some milliseconds.
const PAUSE: Duration = Duration::from_secs(3);

/// Finds the end of a burst.
#[derive(Debug, Default)]
pub(super) struct Burst {
    /// The most calls in progress since the last burst ended.
    peak: Cell<u32>,
    ended: Cell<Option<Instant>>,
}

impl Burst {
    /// Counts a call that has begun, with which `calls` are in progress.
    pub(super) fn began(&self, calls: u32) {
        self.peak.set(self.peak.get().max(calls));
    }

    /// Counts replies, after which `calls` are in progress. `true`: a burst is over, and memory is to be returned.
    pub(super) fn is_over(&self, calls: u32) -> bool {
        if self.peak.get() < BURST || calls > self.peak.get() / 8 {
            return false;
        }
        if self.ended.get().is_some_and(|ended| ended.elapsed() < PAUSE) {
            return false;
        }
        self.peak.set(calls);
        self.ended.set(Some(Instant::now()));
        true
    }
}

/// Returns freed memory to the system, a little later.
pub(super) async fn return_memory() {
    tokio::time::sleep(DELAY).await;
    // A thread of its own: neither renewals nor the event loop wait for it. It fails only when the runtime ends.
    drop(tokio::task::spawn_blocking(trim).await);
}

fn trim() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: the function has no requirements, and any thread may call it.
    unsafe {
        libc::malloc_trim(0);
    }
}
