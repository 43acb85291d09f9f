//! The verbs of the engine.

mod acquire;
mod acquire_set;
mod inspect;
mod release;
mod renew;
mod rewrite;
pub(super) mod txn;

pub(super) use self::inspect::PAGE;

/// How often a verb begins again because an entry has changed since it was read.
const ATTEMPTS: usize = 16;
