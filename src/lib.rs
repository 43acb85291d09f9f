//! holdfast: a distributed lock for Node.js services.
//!
//! ```text
//! await locks.acquire('job:7', { ttlMs, waitMs, signal })
//!  js/                options validated, promise returned                   JS thread
//!                     future submitted ───────────────────────────────────► I/O thread
//!  service/acquire/   loop: attempt → wait for a change | safety poll | deadline | abort
//!  engine/redis/      one script ─────────────────────────────────────────► store
//!                   ◄─ Granted { fence }      service/lease/: renewal at ttl/3
//!  js/                promise settled with a Lock or a coded Error            JS thread
//! lease lost ► service/lease/ ► lock.signal aborts
//! ```

// A failed expectation of a test is a panic.
#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod backoff;
pub mod clock;
pub mod engine;
pub mod error;
pub mod event_loop;
pub mod model;
pub mod service;

#[cfg(feature = "node")]
mod js;
