//! SQL stores: one row per held lock, one row per waiter, and the database's own clock.
//!
//! - `config.rs`: where a store is, from its URL.
//! - `wake.rs`: a wake-up for stores that cannot push: a datagram on the loopback interface.
//! - `sqlite/`: the embedded store, and its statements as files.

mod config;
mod sqlite;
mod wake;

pub use config::SqliteConfig;
pub use sqlite::SqliteEngine;
