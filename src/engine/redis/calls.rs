//! One call on the connection, from sending to the reply.

use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, RedisResult, Value};

use super::connection::{Connection, Link};
use super::failure::{Failure, spoils_connection};
use super::health::Health;
#[cfg(unix)]
use super::lane::Lane;
use super::scripts::Script;
use crate::clock::Moment;

impl Link {
    /// Runs a script, with its text where the server does not know it (a first call, a restart, `SCRIPT FLUSH`).
    pub(super) async fn run(self: &Arc<Self>, script: &Script, call: &Cmd) -> Result<Value, Failure> {
        #[cfg(unix)]
        if let Some(lane) = self.lane() {
            return match self.by_lane(&lane, call).await {
                Err(failure) if failure.is_unknown_script() => self.by_lane(&lane, &script.with_source(call)).await,
                answer => answer,
            };
        }
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
        #[cfg(unix)]
        if let Some(lane) = self.lane() {
            return self.by_lane(&lane, cmd).await;
        }
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

    #[cfg(unix)]
    async fn by_lane(&self, lane: &Lane, cmd: &Cmd) -> Result<Value, Failure> {
        self.exchange_on(lane, lane.call(cmd)).await
    }

    /// Waits for a reply on the lane, and learns about its health from it.
    #[cfg(unix)]
    pub(super) async fn exchange_on<T>(
        &self,
        lane: &Lane,
        reply: impl Future<Output = RedisResult<T>>,
    ) -> Result<T, Failure> {
        let reply = Waiting::on(lane.health(), self.patience(), || lane.end())
            .until(reply)
            .await;
        if reply.as_ref().is_err_and(spoils_connection) {
            lane.end();
        }
        Ok(reply?)
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
        let reply = Waiting::on(&connection.health, self.patience(), || self.lose(connection.generation))
            .until(reply)
            .await;
        if reply.as_ref().is_err_and(spoils_connection) {
            self.lose(connection.generation);
        }
        Ok(reply?)
    }
}

/// A call that waits for its reply. Dropped without one, it may take the connection with it.
struct Waiting<'a, F: Fn()> {
    health: &'a Health,
    patience: Duration,
    lose: F,
    sent: Moment,
    answered: bool,
}

impl<'a, F: Fn()> Waiting<'a, F> {
    fn on(health: &'a Health, patience: Duration, lose: F) -> Self {
        let sent = Moment::now();
        health.sent(sent);
        Waiting {
            health,
            patience,
            lose,
            sent,
            answered: false,
        }
    }

    async fn until<T>(mut self, reply: impl Future<Output = T>) -> T {
        let reply = reply.await;
        self.answered = true;
        reply
    }
}

impl<F: Fn()> Drop for Waiting<'_, F> {
    fn drop(&mut self) {
        if self.answered {
            self.health.heard();
        } else if self.health.given_up(self.sent, self.patience) {
            (self.lose)();
        }
    }
}
