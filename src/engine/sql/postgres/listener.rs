//! The connection that receives notifications.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::timeout;

use super::session::{PostgresServer, PostgresSession};
use crate::engine::sql::server::slot::open;
use crate::engine::sql::server::waiters::Waiters;
use crate::engine::sql::server::{Outcome, Server};

/// How long the connection stays open without waiters.
const LISTENER_KEPT: Duration = Duration::from_secs(30);

/// Listens until the connection breaks. `true`: there have been no waiters for some time.
pub(super) async fn receive(server: &Arc<PostgresServer>, waiters: &Waiters<PostgresServer>) -> Outcome<bool> {
    let (sender, mut notifications) = mpsc::unbounded_channel();
    let session: PostgresSession = open(server.links(), server.connect_with(Some(sender))).await?;
    session
        .execute(&format!("LISTEN \"holdfast_{}\"", waiters.process))
        .await?;
    // Notifications of earlier transactions were not received.
    let names = waiters.known.names();
    if !names.is_empty() {
        waiters.check(names);
    }
    loop {
        let received = tokio::select! {
            received = timeout(LISTENER_KEPT, notifications.recv()) => received,
            () = session.link.outdated() => Ok(None),
        };
        match received {
            Ok(Some(notification)) => waiters.notify(&notification),
            Ok(None) => return Ok(false),
            Err(_) if waiters.is_unused() => return Ok(true),
            Err(_) => {}
        }
    }
}
