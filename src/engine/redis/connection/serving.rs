//! The tasks of a connection: one exchanges requests and replies, one ends a silent connection.

use std::sync::{Arc, Weak};
use std::time::Duration;

use super::liveness::Health;
use super::{Connection, LATE_REPLY, Link};
use crate::engine::redis::wire::{Push, Wire, drive};

/// The task that serves a connection. Its end, also by a panic or with the event loop, ends and replaces the connection.
pub(super) struct Serving {
    pub(super) link: Weak<Link>,
    pub(super) wire: Weak<Wire>,
    pub(super) health: Arc<Health>,
    pub(super) generation: u64,
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.health.mark_dead();
        if let Some(wire) = self.wire.upgrade() {
            wire.end();
        }
        if let Some(link) = self.link.upgrade() {
            link.lose(self.generation);
        }
    }
}

impl Serving {
    pub(super) async fn run(self) {
        drive(self.wire.clone(), |push| {
            let Some(link) = self.link.upgrade() else { return };
            match push {
                Push::Message { channel, message } => link.topics.notify(&channel, &message),
                Push::Ended { channel } => {
                    link.topics.end(&channel);
                    link.endings.send_replace(());
                }
            }
        })
        .await;
    }
}

/// Replaces a connection that is silent although requests without a waiting caller are in flight, and ends it when their replies can
/// no longer arrive.
pub(super) async fn watch_silence(
    link: Weak<Link>,
    connection: Weak<Connection>,
    health: Arc<Health>,
    limit: Duration,
) {
    while let Some(connection) = connection.upgrade() {
        if connection.health.is_silent(LATE_REPLY) {
            return connection.wire.end();
        }
        if connection.health.is_silent(2 * limit)
            && let Some(link) = link.upgrade()
        {
            link.lose(connection.generation);
        }
        drop(connection);
        // The timer does not wake an idle process.
        health.used().await;
        tokio::time::sleep(limit).await;
    }
}
