//! holdfast: a distributed lock for Node.js services.
//!
//! ```text
//! await locks.acquire('job:7', { ttlMs, waitMs, signal })
//!  lib/service.ts     arguments checked, listener on the signal             JS thread
//!  js/bridge/mod.rs   future submitted, promise returned ─────────────────► I/O thread
//!  service/acquire/   loop: attempt → wait for a change | safety poll | deadline | abort
//!  engine/redis/      one script ─────────────────────────────────────────► store
//!                   ◄─ Granted { fence }      service/lease/: renewal at ttl/3
//!  js/acquisition.rs  back on the JS thread: the number of the lease, or an error
//!  lib/service.ts     listener removed, Lock or LockError
//! lease lost ► service/lease/ ► js/bridge/notifier.rs ► lib/signals.ts: lock.signal aborts
//! ```

// A failed expectation of a test is a panic.
#![cfg_attr(test, allow(clippy::unwrap_used))]
// Only builds for tests leave out stores.
#![cfg_attr(not(feature = "default"), allow(unused, reason = "of stores that are left out"))]

pub mod backoff;
pub mod clock;
pub mod engine;
pub mod error;
pub mod event_loop;
pub mod model;
pub mod process;
pub mod service;
pub mod share;
pub mod stall_detector;

#[cfg(feature = "node")]
#[cfg_attr(test, allow(dead_code, reason = "napi registers no functions in a test build"))]
mod js;
