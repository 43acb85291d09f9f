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
        let connection = self.connection().await?;
        self.run_on(&connection, script, call, false).await
    }

    /// The same on a certain connection, and with `asking` right behind the `ASKING` that a node wants to hear first when a
    /// slot is on its way to it.
    pub(super) async fn run_on(
        self: &Arc<Self>,
        connection: &Arc<Connection>,
        script: &Script,
        call: &Cmd,
        asking: bool,
    ) -> Result<Value, Failure> {
        match self.call_on(connection, call, asking).await {
            Err(failure) if failure.is_unknown_script() => {
                self.call_on(connection, &script.with_source(call), asking).await
            }
            answer => answer,
        }
    }

    /// Sends one command on the current connection, and waits for its reply for as long as the caller does.
    pub(super) async fn call(self: &Arc<Self>, cmd: &Cmd) -> Result<Value, Failure> {
        let connection = self.connection().await?;
        self.call_on(&connection, cmd, false).await
    }

    /// Sends one command on a certain connection, with `asking` as for [`Link::run_on`].
    pub(super) async fn call_on(
        self: &Arc<Self>,
        connection: &Arc<Connection>,
        cmd: &Cmd,
        asking: bool,
    ) -> Result<Value, Failure> {
        let mut multiplexed = connection.multiplexed.clone();
        let reply = async {
            let reply = if asking {
                // In one piece: it counts for the next command of the connection, whoever sends that.
                let mut pair = redis::pipe();
                pair.cmd("ASKING").add_command(cmd.clone());
                let replies = multiplexed.send_packed_commands(&pair, 1, 1).await?;
                replies.into_iter().next().unwrap_or(Value::Nil)
            } else {
                multiplexed.send_packed_command(cmd).await?
            };
            reply.extract_error()
        };
        self.exchange(connection, reply).await
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
