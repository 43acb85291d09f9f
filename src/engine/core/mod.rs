//! What several stores use.
//!
//! - `ledger/`: the rules of the lock: attempts, queues, hand-offs, releases, without a store.
//! - `stream.rs`: a connection that the runtime polls, and then the caller's event loop.

pub(in crate::engine) mod ledger;
#[cfg(any(feature = "postgres", feature = "redis"))]
pub(in crate::engine) mod stream;
