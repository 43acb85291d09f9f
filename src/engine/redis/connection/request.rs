//! One call on the connection, from sending to the reply.

use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, RedisResult, Value};

use super::liveness::Health;
use super::{Connection, Link};
use crate::clock::Moment;
use crate::engine::redis::error::{Failure, at, broken, spoils_connection};
use crate::engine::redis::fast_path::FastPath;
use crate::engine::redis::scripts::Script;

/// Marks a command as an attempt to acquire. The connection limits the number of unanswered attempts
/// ([`ATTEMPTS`](super::liveness::ATTEMPTS)) and calls this function right before it sends one. Dropping the future of a
/// queued attempt cancels it. Commands without this mark are sent at once.
pub(in super::super) type Attempt<'a> = Option<&'a (dyn Fn() + Sync)>;

impl Link {
    /// Runs a script, with its text where the server does not know it (a first call, a restart, `SCRIPT FLUSH`).
    pub(in super::super) async fn run(self: &Arc<Self>, script: &Script, call: &Cmd) -> Result<Value, Failure> {
        self.run_as(script, call, None).await
    }

    /// Runs a script. `attempt` marks an attempt to acquire.
    pub(in super::super) async fn run_as(
        self: &Arc<Self>,
        script: &Script,
        call: &Cmd,
        attempt: Attempt<'_>,
    ) -> Result<Value, Failure> {
        if let Some(fast_path) = self.fast_path() {
            let answer = self.by_fast_path(&fast_path, call, attempt).await;
            return match answer {
                Err(failure) if failure.is_unknown_script() => {
                    Box::pin(self.run_unknown(&fast_path, script, call, attempt)).await
                }
                answer => answer,
            };
        }
        let connection = self.connection().await?;
        self.run_on(&connection, script, call, false, attempt).await
    }

    /// Runs a script on the ordinary connection, from any thread.
    pub(in super::super) async fn run_on_ordinary_connection(
        self: &Arc<Self>,
        script: &Script,
        call: &Cmd,
    ) -> Result<Value, Failure> {
        let connection = self.connection().await?;
        self.run_on(&connection, script, call, false, None).await
    }

    /// Runs a script on this connection. With `asking`, the command directly follows the `ASKING` that a node requires while
    /// a slot is on its way to it.
    pub(in super::super) async fn run_on(
        self: &Arc<Self>,
        connection: &Arc<Connection>,
        script: &Script,
        call: &Cmd,
        asking: bool,
        attempt: Attempt<'_>,
    ) -> Result<Value, Failure> {
        match self.call_on(connection, call, asking, attempt).await {
            Err(failure) if failure.is_unknown_script() => {
                // No second permit: the attempt has been admitted.
                self.call_on(connection, &script.with_source(call), asking, None).await
            }
            answer => answer,
        }
    }

    /// Runs a script once for each of several attempts, in one pipeline: the server executes them in the order of the list.
    /// The first command contains the script's text, so that the later ones find the script.
    pub(in super::super) async fn run_in_order(
        self: &Arc<Self>,
        connection: &Arc<Connection>,
        script: &Script,
        calls: &[Cmd],
        attempt: Attempt<'_>,
    ) -> Result<Vec<Result<Value, Failure>>, Failure> {
        let mut pipeline = redis::pipe();
        for (index, call) in calls.iter().enumerate() {
            pipeline.add_command(if index == 0 {
                script.with_source(call)
            } else {
                call.clone()
            });
        }
        let mut multiplexed = connection.multiplexed.clone();
        let replies = async {
            let _place = admitted(connection, attempt).await?;
            multiplexed.send_packed_commands(&pipeline, 0, calls.len()).await
        };
        let replies = self.exchange(connection, replies).await?;
        if replies.len() != calls.len() {
            return Err(Failure::Unexpected("a pipeline"));
        }
        let answers = replies.into_iter().map(|reply| Ok(reply.extract_error()?));
        Ok(answers.collect())
    }

    /// Sends one command on the current connection, and waits for its reply without a time limit.
    pub(in super::super) async fn call(self: &Arc<Self>, cmd: &Cmd) -> Result<Value, Failure> {
        if let Some(fast_path) = self.fast_path() {
            return self.by_fast_path(&fast_path, cmd, None).await;
        }
        let connection = self.connection().await?;
        self.call_on(&connection, cmd, false, None).await
    }

    /// Sends one command on this connection, with `asking` as for [`Link::run_on`].
    pub(in super::super) async fn call_on(
        self: &Arc<Self>,
        connection: &Arc<Connection>,
        cmd: &Cmd,
        asking: bool,
        attempt: Attempt<'_>,
    ) -> Result<Value, Failure> {
        let reply = async {
            let _place = admitted(connection, attempt).await?;
            // Boxed: the driver's future is large, and many attempts may be queued.
            Box::pin(send(connection, cmd, asking)).await?.extract_error()
        };
        self.exchange(connection, reply).await
    }

    /// Runs a script that the server did not know a moment ago. The first of many calls contains the text, and the server executes
    /// the others after it.
    async fn run_unknown(
        &self,
        fast_path: &FastPath,
        script: &Script,
        call: &Cmd,
        attempt: Attempt<'_>,
    ) -> Result<Value, Failure> {
        if let Some(_loading) = fast_path.begin_load() {
            return self.by_fast_path(fast_path, &script.with_source(call), attempt).await;
        }
        match self.by_fast_path(fast_path, call, attempt).await {
            Err(failure) if failure.is_unknown_script() => {
                self.by_fast_path(fast_path, &script.with_source(call), attempt).await
            }
            answer => answer,
        }
    }

    async fn by_fast_path(&self, fast_path: &FastPath, cmd: &Cmd, attempt: Attempt<'_>) -> Result<Value, Failure> {
        match attempt {
            None => self.exchange_on(fast_path, fast_path.call(cmd)).await,
            Some(mark_sent) => self.exchange_on(fast_path, fast_path.attempt(cmd, mark_sent)).await,
        }
    }

    /// Waits for a reply on the fast path, and records its liveness.
    pub(in super::super) async fn exchange_on<T>(
        &self,
        fast_path: &FastPath,
        reply: impl Future<Output = RedisResult<T>>,
    ) -> Result<T, Failure> {
        let left = |is_lost| match is_lost {
            true => fast_path.end(),
            false => fast_path.caller_left(),
        };
        let reply = Waiting::on(fast_path.health(), self.silence_limit(), left)
            .until(reply)
            .await;
        if reply.as_ref().is_err_and(spoils_connection) {
            fast_path.end();
        }
        Ok(reply.map_err(at(&self.address))?)
    }

    /// Waits for a reply on a connection, and records its liveness.
    ///
    /// The future keeps its connection open even after it was replaced: a late reply is valid.
    pub(in super::super) async fn exchange<T>(
        self: &Arc<Self>,
        connection: &Arc<Connection>,
        reply: impl Future<Output = RedisResult<T>>,
    ) -> Result<T, Failure> {
        let left = |is_lost| {
            if is_lost {
                self.lose(connection.generation);
            }
        };
        let reply = Waiting::on(&connection.health, self.silence_limit(), left)
            .until(reply)
            .await;
        if reply.as_ref().is_err_and(spoils_connection) {
            self.lose(connection.generation);
        }
        Ok(reply.map_err(at(&self.address))?)
    }
}

/// Sends one command and waits for its reply.
async fn send(connection: &Connection, cmd: &Cmd, asking: bool) -> RedisResult<Value> {
    let mut multiplexed = connection.multiplexed.clone();
    if !asking {
        return multiplexed.send_packed_command(cmd).await;
    }
    // In one packet: `ASKING` applies to the next command on the connection, whichever call that belongs to.
    let mut pair = redis::pipe();
    pair.cmd("ASKING").add_command(cmd.clone());
    let replies = multiplexed.send_packed_commands(&pair, 1, 1).await?;
    Ok(replies.into_iter().next().unwrap_or(Value::Nil))
}

/// Waits until an attempt may be sent on a connection, and marks it as sent. `None` for other commands.
///
/// The driver discards a command whose caller was dropped before the write. So a dropped attempt is sent only if its bytes
/// are in the driver's write buffer.
async fn admitted<'c>(
    connection: &'c Connection,
    attempt: Attempt<'_>,
) -> RedisResult<Option<tokio::sync::SemaphorePermit<'c>>> {
    let Some(mark_sent) = attempt else { return Ok(None) };
    let place = connection.attempts.acquire().await.map_err(|_| broken())?;
    if connection.health.is_dead() {
        return Err(broken());
    }
    mark_sent();
    Ok(Some(place))
}

/// A call that waits for its reply. If it is dropped without one, the connection may be replaced.
struct Waiting<'a, F: Fn(bool)> {
    health: &'a Health,
    silence_limit: Duration,
    /// Called when the caller is dropped without a reply; `true`: the connection should be replaced.
    left: F,
    sent: Moment,
    answered: bool,
}

impl<'a, F: Fn(bool)> Waiting<'a, F> {
    fn on(health: &'a Health, silence_limit: Duration, left: F) -> Self {
        let sent = Moment::now();
        health.sent(sent);
        Waiting {
            health,
            silence_limit,
            left,
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

impl<F: Fn(bool)> Drop for Waiting<'_, F> {
    fn drop(&mut self) {
        if self.answered {
            self.health.replied(Some(self.sent.elapsed()));
        } else {
            (self.left)(self.health.dropped(self.sent, self.silence_limit));
        }
    }
}
