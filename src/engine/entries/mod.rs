//! The engine of the stores where the order of entries is the lock (etcd, ZooKeeper).
//!
//! Each claim has an entry below its name. The store numbers entries in the order of their creation, and removes an entry when its claim
//! ends or its process dies. The oldest entry holds the name; of a shared name the longest run of oldest entries that fits is granted. So the
//! deletion of an entry is the grant of the next one, which each process with waiters detects in its mirror of the name.
//! `docs/proofs/entries.md` shows that a lock has one holder, and that shares stay within their limits.
//!
//! The engine has the rules. A [`Store`] makes the requests.
//!
//! - `engine.rs`: the engine, and its reads. `attempt.rs`: attempts. `held.rs`: renewals, transfers, releases. `tasks.rs`: its tasks,
//!   which grant names to waiters, end leases, and write fencing tokens.
//! - `store.rs`: the trait. `record.rs`: the entries of claims, and their data.
//! - `local.rs`: the waiters of this process. `mirror.rs`: the order of the entries of a name, and which of them are
//!   granted.
//! - `names.rs`: names in keys and paths. `servers.rs`: the servers of a URL, and their sockets.
//!
//! # Ends
//! An entry lasts as long as a session of its process (an etcd lease, a session of ZooKeeper), which is longer than most leases. So one
//! table (`engine/ends.rs`) has the claims of the process with their ends, and the entries of a claim are deleted at its end if they have
//! not changed. A waiter's entry is deleted when its call is dropped, when the event loop does not respond, or, without a subscription,
//! 4.5 s (or its ttl) after its last attempt.
//!
//! # Several names
//! The entries of a claim are marked as those of a set until it holds all of them, so that `inspect` shows no holder.

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

pub(in crate::engine) use self::engine::{EntryEngine, PAGE_SIZE};
pub(in crate::engine) use self::local::LocalEntries;
pub(in crate::engine) use self::mirror::{Change, Entry, granted};
pub(in crate::engine) use self::record::{Record, Seen, Stored, UNKNOWN, now_ms};
pub(in crate::engine) use self::store::{Failure, Outcome, Store};
