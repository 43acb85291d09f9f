//! What every store uses that is no part of one.
//!
//! - `ledger/`: the rules of the lock: attempts, queues, hand-offs, releases, without a store.

#[cfg_attr(
    not(all(feature = "memory", feature = "mysql", feature = "postgres")),
    allow(dead_code, unused_imports, reason = "a store uses a part")
)]
pub(in crate::engine) mod ledger;
