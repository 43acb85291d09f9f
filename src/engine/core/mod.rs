//! What every store uses that is no part of one.
//!
//! - `ledger/`: the rules of the lock: attempts, queues, hand-offs, releases, without a store.
//! - `stream.rs`, `polled_socket.rs`: a connection that the runtime polls, and then the caller's event loop.

#[cfg(any(feature = "memory", feature = "mysql", feature = "postgres", feature = "sqlite"))]
#[cfg_attr(
    not(all(feature = "memory", feature = "mysql", feature = "postgres")),
    allow(dead_code, unused_imports, reason = "a store uses a part")
)]
pub(in crate::engine) mod ledger;
#[cfg(any(feature = "postgres", feature = "redis"))]
#[cfg_attr(not(unix), path = "polled_socket/unsupported.rs")]
mod polled_socket;
#[cfg(any(feature = "postgres", feature = "redis"))]
#[cfg_attr(
    not(all(feature = "postgres", feature = "redis")),
    allow(dead_code, reason = "a store uses a part")
)]
pub(in crate::engine) mod stream;
