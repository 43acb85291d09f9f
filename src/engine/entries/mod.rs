//! The engine of the stores where the order of entries is the lock (etcd, ZooKeeper).
//!
//! Each claim has an entry below its name. The store numbers entries in the order of their creation, and removes an entry when its
//! claim ends or its process dies. The oldest entry holds the name (`mirror.rs`). So the deletion of the holder's entry is the
//! grant of the next one, which each process with waiters detects in its mirror of the name (`local.rs`).
//!
//! The engine has the rules: attempts, renewals, hand-offs, ends of leases. A [`Store`] makes the requests.
//!
//! The first waiter of a name opens a watch, and the last one closes it. The store reads the entries once, after the server has
//! confirmed the watch, and reports the changes that are newer than the read.

mod attempt;
mod engine;
mod held;
mod local;
mod mirror;
pub(in crate::engine) mod names;
mod record;
pub(in crate::engine) mod servers;
mod store;
mod tasks;
#[cfg(test)]
pub(in crate::engine) mod tests;

pub(in crate::engine) use self::engine::EntryEngine;
pub(in crate::engine) use self::engine::PAGE_SIZE;
pub(in crate::engine) use self::local::LocalEntries;
pub(in crate::engine) use self::mirror::Place;
pub(in crate::engine) use self::mirror::{Change, Entry, Share};
pub(in crate::engine) use self::record::UNKNOWN;
pub(in crate::engine) use self::record::{Record, Seen, Stored, now_ms};
pub(in crate::engine) use self::store::{Failure, Outcome, Store};
