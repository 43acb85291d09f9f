//! One call on the connection, from sending to the reply.

use std::sync::Arc;

use redis::{Cmd, RedisResult, Value};

use super::{Connection, Link};
use crate::clock::Moment;
use crate::engine::redis::error::{Failure, at, spoils_connection};
use crate::engine::redis::scripts::Script;

/// Marks a command as an attempt to acquire. The connection limits the number of unanswered attempts
/// ([`ATTEMPTS`](super::liveness::ATTEMPTS)) and calls this function right before it sends one. Dropping the future of a
/// queued attempt cancels it. Commands without this mark are sent at once.
pub(in super::super) type Attempt<'a> = Option<&'a (dyn Fn() + Sync)>;

impl Link {
    /// Runs a script, with its text where the server does not know it (a first call, a restart, `SCRIPT FLUSH`).
    pub(in super::super) async fn run(self: &Arc<Self>, script: &Script, call: &Cmd) -> Result<Value, Failure> {
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
                Box::pin(self.run_unknown(connection, script, call, asking, attempt)).await
            }
            answer => answer,
        }
    }

    /// Runs a script that the server did not know a moment ago. The first of many calls contains the text, and the server executes
    /// the others after it. It has no permit, because calls that wait for the script may have all of them.
    async fn run_unknown(
        self: &Arc<Self>,
        connection: &Arc<Connection>,
        script: &Script,
        call: &Cmd,
        asking: bool,
        attempt: Attempt<'_>,
    ) -> Result<Value, Failure> {
        let whole = || script.with_source(call);
        if let Some(_loading) = connection.wire.begin_load() {
            let sent = Moment::now();
            let answer = self.call_on(connection, &whole(), asking, None).await?;
            if attempt.is_some() {
                connection.wire.note_grant(&answer, sent);
            }
            return Ok(answer);
        }
        match self.call_on(connection, call, asking, attempt).await {
            Err(failure) if failure.is_unknown_script() => self.call_on(connection, &whole(), asking, attempt).await,
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
        let mut cmds = calls.to_vec();
        if let Some(first) = cmds.first_mut() {
            *first = script.with_source(first);
        }
        let replies = self
            .exchange(connection, connection.wire.pipeline(&cmds, attempt))
            .await?;
        let answers = replies.into_iter().map(|reply| Ok(reply.extract_error()?));
        Ok(answers.collect())
    }

    /// Sends one command on the current connection, and waits for its reply without a time limit.
    pub(in super::super) async fn call(self: &Arc<Self>, cmd: &Cmd) -> Result<Value, Failure> {
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
        self.exchange(connection, connection.wire.call(cmd, asking, attempt))
            .await
    }

    /// Waits for a reply on a connection, and records its liveness.
    ///
    /// The future keeps its connection open even after it was replaced: a late reply is valid.
    pub(in super::super) async fn exchange<T>(
        self: &Arc<Self>,
        connection: &Arc<Connection>,
        reply: impl Future<Output = RedisResult<T>>,
    ) -> Result<T, Failure> {
        let sent = Moment::now();
        connection.health.sent(sent);
        let mut waiting = Waiting {
            link: self,
            connection,
            sent,
            is_answered: false,
        };
        let reply = reply.await;
        waiting.is_answered = true;
        drop(waiting);
        if reply.as_ref().is_err_and(spoils_connection) {
            self.lose(connection.generation);
        }
        Ok(reply.map_err(at(&self.address))?)
    }
}

/// A call that waits for its reply. If it is dropped without one, the connection may be replaced.
struct Waiting<'a> {
    link: &'a Arc<Link>,
    connection: &'a Connection,
    sent: Moment,
    is_answered: bool,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let health = &self.connection.health;
        if self.is_answered {
            return health.replied(Some(self.sent.elapsed()));
        }
        let is_lost = health.dropped(self.sent, self.link.silence_limit());
        // Also where the connection is replaced: it lives on while other callers wait for late replies.
        self.connection.wire.caller_left();
        if is_lost {
            self.link.lose(self.connection.generation);
        }
    }
}
