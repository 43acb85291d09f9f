//! One call on the connection, from sending to the reply.

use std::sync::Arc;

use redis::{Cmd, RedisResult, Value};

use super::connection::{Connection, Link};
use super::failure::{Failure, spoils_connection};
use super::scripts::Script;
use crate::clock::Moment;

impl Link {
    /// Runs a script, with its text where the server does not know it (a first call, a restart, `SCRIPT FLUSH`).
    pub(super) async fn run(self: &Arc<Self>, script: &Script, call: &Cmd) -> Result<Value, Failure> {
        match self.call(call).await {
            Err(failure) if failure.is_unknown_script() => self.call(&script.with_source(call)).await,
            answer => answer,
        }
    }

    /// Sends one command on the current connection, and waits for its reply for as long as the caller does.
    pub(super) async fn call(self: &Arc<Self>, cmd: &Cmd) -> Result<Value, Failure> {
        let connection = self.connection().await?;
        let mut multiplexed = connection.multiplexed.clone();
        let reply = async {
            multiplexed
                .send_packed_command(cmd)
                .await
                .and_then(Value::extract_error)
        };
        self.exchange(&connection, reply).await
    }

    /// Waits for a reply on a connection, and learns about the connection's health from it.
    ///
    /// The caller's future keeps its connection alive even after others have moved on to a fresh one: a late reply is a
    /// reply.
    pub(super) async fn exchange<T>(
        self: &Arc<Self>,
        connection: &Arc<Connection>,
        reply: impl Future<Output = RedisResult<T>>,
    ) -> Result<T, Failure> {
        let mut waiting = Waiting::new(self, connection);
        let reply = reply.await;
        waiting.answered = true;
        drop(waiting);
        if reply.as_ref().is_err_and(spoils_connection) {
            self.lose(connection.generation);
        }
        Ok(reply?)
    }
}

/// A call that waits for its reply. Dropped without one, it may take the connection with it.
struct Waiting<'a> {
    link: &'a Arc<Link>,
    connection: &'a Connection,
    sent: Moment,
    answered: bool,
}

impl<'a> Waiting<'a> {
    fn new(link: &'a Arc<Link>, connection: &'a Connection) -> Self {
        connection.health.sent();
        Waiting {
            link,
            connection,
            sent: Moment::now(),
            answered: false,
        }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if self.answered {
            self.connection.health.heard();
        } else if self.connection.health.given_up(self.sent, self.link.patience()) {
            self.link.lose(self.connection.generation);
        }
    }
}
