//! The connections to the servers.
//!
//! - `dial.rs`: connects an engine. `checks.rs`: what it checks then. `server_monitor.rs`: the state of the servers, and
//!   elections. `diagnostics.rs`: the meaning of connection errors.
//! - `pool.rs`: which calls may use a connection, and in which order. `openings.rs`: how connections are opened. `session.rs`:
//!   the session of an attempt. `checkouts.rs`: how often the driver sent a command. `clock.rs`: readings of the server's clock.
//!
//! # Elections
//! `server_monitor.rs` reads `electionId` in each reply to a heartbeat of the driver, and publishes a larger one: there is a new primary.
//! Two places use it: the change stream is opened again, and calls without an answer are aborted after one store timeout, not four.
//!
//! # Errors while connecting
//! The driver searches for servers until its timeout, whatever the errors are. So `dial.rs` stops connecting as soon as each host of the
//! URL has a permanent error: a certificate, another replica set, another protocol. A server that closes the connection without an answer
//! is contacted once more with TLS, or without. `checks.rs` refuses servers that lack a command, and collections in which two names may
//! share a document, or one name may have two.

use mongodb::Collection;
use mongodb::bson::{Bson, Document};

use crate::engine::mongodb::Outcome;

pub(super) mod checkouts;
mod checks;
pub(super) mod clock;
pub(super) mod diagnostics;
pub(super) mod dial;
pub(super) mod openings;
pub(super) mod pool;
pub(super) mod server_monitor;
pub(super) mod session;

/// Runs a command in the database of a collection. The driver does not retry it.
///
/// # Why
/// Each typed operation of the driver makes the addon some 30 KB larger. Used by the checks of `connect` and of the TTL index, which are
/// repeated anyway.
pub(crate) async fn run(locks: &Collection<Document>, command: Document) -> Outcome<Document> {
    let database = locks.client().database(&locks.namespace().db);
    Ok(database.run_command(command).await?)
}

/// Returns the documents of a reply's first batch.
pub(crate) fn first_batch(reply: &Document) -> impl Iterator<Item = &Document> {
    let batch = reply
        .get_document("cursor")
        .and_then(|cursor| cursor.get_array("firstBatch"));
    batch.into_iter().flatten().filter_map(Bson::as_document)
}
