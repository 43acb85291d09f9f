//! What every store uses that is no part of one.
//!
//! - `ledger/`: the rules of the lock: attempts, queues, hand-offs, releases, without a store.

pub(in crate::engine) mod ledger;
