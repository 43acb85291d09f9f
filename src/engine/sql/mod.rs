//! SQL stores: one row per held lock, one row per waiter, and the database's clock.
//!
//! - `calls.rs`, `jobs.rs`: the calls of an engine, as jobs in the queue of its connection. `dropped_calls.rs`: silent connections. `page.rs`: the pages of a list.
//! - `config.rs`, `sqlite/`: the embedded store. `udp_wakeup.rs`: wakes its waiters, by datagrams on the loopback interface.
//! - `ledger/`: the rows that a transaction has locked, and what calls change in them. `postgres/`: PostgreSQL.

mod calls;
#[cfg(feature = "sqlite")]
mod config;
mod dropped_calls;
mod jobs;
#[cfg(feature = "postgres")]
mod ledger;
mod page;
#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "sqlite")]
mod sqlite;
#[cfg(feature = "sqlite")]
mod udp_wakeup;

#[cfg(feature = "sqlite")]
pub use config::SqliteConfig;
use page::Page;
#[cfg(feature = "postgres")]
pub use postgres::{PostgresConfig, PostgresEngine};
#[cfg(feature = "sqlite")]
pub use sqlite::SqliteEngine;
