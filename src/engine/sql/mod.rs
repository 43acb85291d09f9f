//! SQL stores: one row per held lock, one row per waiter, and the database's clock.
//!
//! - `config.rs`: from a URL to a store.
//! - `udp_wakeup.rs`: wakes waiters of stores without messages, by datagrams on the loopback interface.
//! - `sqlite/`: the embedded store, and its statements as files.

mod config;
mod sqlite;
mod udp_wakeup;

pub use config::SqliteConfig;
pub use sqlite::SqliteEngine;
