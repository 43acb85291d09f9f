//! The connections to the servers.
//!
//! - `dial.rs`: connects an engine. `checks.rs`: what it checks then. `server_monitor.rs`: the state of the servers, and
//!   elections. `diagnostics.rs`: the meaning of connection errors.
//! - `pool.rs`: which calls may use a connection, and in which order. `openings.rs`: how connections are opened. `session.rs`:
//!   the session of an attempt. `checkouts.rs`: how often the driver sent a command. `clock.rs`: readings of the server's clock.

pub(super) mod checkouts;
mod checks;
pub(super) mod clock;
pub(super) mod diagnostics;
pub(super) mod dial;
pub(super) mod openings;
pub(super) mod pool;
pub(super) mod server_monitor;
pub(super) mod session;
