//! holdfast: a distributed lock for Node.js services.
//!
//! ```text
//! await locks.acquire('job:7', { ttlMs, waitMs, signal })
//!  js/service.rs      options checked, signal armed                         JS thread
//!  js/promise.rs      future handed over, promise returned ───────────────► I/O thread
//!  service/acquire.rs loop: try → wait for a change | safety poll | deadline | abort
//!  engine/redis       one script ─────────────────────────────────────────► store
//!                   ◄─ Granted { fence }      service/lease/: renew at ttl/3
//!  js/promise.rs      back on the JS thread: signal disarmed, Lock or coded Error
//! lease lost ► service/lease/ ► lock.signal aborts
//! ```

// A failed expectation of a test is a panic.
#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod clock;
pub mod engine;
pub mod error;
pub mod event_loop;
pub mod model;
pub mod service;

#[cfg(feature = "node")]
mod js;
