//! SQL stores: one row per held lock, one row per waiter, and the database's clock.
//!
//! - `calls.rs`, `jobs.rs`: the calls of an engine, as jobs in the queue of its connection. `dropped_calls.rs`: silent connections. `page.rs`: the pages of a list.
//!   `failure.rs`: their failures.
//! - `config.rs`, `sqlite/`: the embedded store. `udp_wakeup.rs`: wakes its waiters, by datagrams on the loopback interface.
//! - `server/`: the engine of SQL servers. `postgres/`, `mysql/`: the dialects.
//! - `tables.rs`: the names of tables.

mod calls;
#[cfg(feature = "sqlite")]
mod config;
mod dropped_calls;
mod failure;
mod jobs;
#[cfg(feature = "mysql")]
pub(super) mod mysql;
mod page;
#[cfg(feature = "postgres")]
pub(super) mod postgres;
#[cfg(any(feature = "mysql", feature = "postgres"))]
mod server;
#[cfg(feature = "sqlite")]
mod sqlite;
mod tables;
#[cfg(feature = "sqlite")]
mod udp_wakeup;

#[cfg(feature = "sqlite")]
pub use config::SqliteConfig;
#[cfg(feature = "mysql")]
pub use mysql::MysqlConfig;
use page::{Lease, Page};
#[cfg(feature = "postgres")]
pub use postgres::PostgresConfig;
#[cfg(feature = "sqlite")]
pub(super) use sqlite::SqliteEngine;
