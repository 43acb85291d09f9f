//! `minReplicas`: a grant counts only when this many replicas have it.
//!
//! Redis replicates asynchronously. A failed master may lose its last grants, and the next master grants the same names again.
//! `WAIT` returns the number of replicas that have acknowledged the earlier writes of its own connection. So the script and its
//! `WAIT` share one connection: on a connection to the next master, `WAIT` would count other writes.
//!
//! `WAIT` blocks its connection, so these calls have a connection of their own. There one `WAIT` covers all scripts that were
//! answered before it was sent (as a database commits transactions in groups): without a replica, many concurrent callers wait
//! no longer than for two of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use redis::{Cmd, Value};
use tokio::sync::Mutex;

use crate::engine::redis::connection::request::Attempt;
use crate::engine::redis::connection::{Connection, Link};
use crate::engine::redis::error::Failure;
use crate::engine::redis::scripts::Script;

/// `WAIT` covers the writes of its own connection, and a script that changed nothing has written nothing: the write to this
/// key makes `WAIT` cover all earlier writes of the server.
const MARK: &str = "holdfast:replicated";
const MARK_LASTS_MS: u64 = 1000;

/// The connection for writes that have to survive the loss of their server.
pub(in super::super) struct Replicated {
    pub(in super::super) link: Arc<Link>,
    /// The number of replicas that have to acknowledge.
    wanted: u32,
    /// The number of callers so far.
    asked: AtomicU64,
    /// The outcome of the last `WAIT`. The holder of the lock sends the next one.
    last: Mutex<LastWait>,
}

/// Whether the answer of a script grants or extends a lease.
fn says_yes(answer: &Value) -> bool {
    match answer {
        Value::Int(number) => *number > 0,
        Value::BulkString(digits) => digits.contains(&b'1'),
        _ => false,
    }
}

/// The outcome of one `WAIT`, and the callers that it covers.
struct LastWait {
    generation: u64,
    /// The callers up to this number.
    up_to: u64,
    outcome: Result<(), Failure>,
}

impl Replicated {
    pub(in super::super) fn new(link: Arc<Link>, wanted: u32) -> Self {
        let none_yet = LastWait {
            generation: 0,
            up_to: 0,
            outcome: Ok(()),
        };
        Replicated {
            link,
            wanted,
            asked: AtomicU64::new(0),
            last: Mutex::new(none_yet),
        }
    }

    /// Runs a script. Returns a positive answer only if enough replicas have its writes.
    ///
    /// # Errors
    /// [`Failure::Replicas`] if too few replicas acknowledged in time: the script was executed nevertheless.
    pub(in super::super) async fn run(
        &self,
        script: &Script,
        call: &Cmd,
        attempt: Attempt<'_>,
    ) -> Result<Value, Failure> {
        let connection = self.link.connection().await?;
        let answer = self.link.run_on(&connection, script, call, false, attempt).await?;
        if says_yes(&answer) {
            self.acknowledged(&connection).await?;
        }
        Ok(answer)
    }

    /// Runs a script once for each of several attempts, in the order of the list, and waits for the replicas as
    /// [`Replicated::run`] does. Where too few replicas acknowledged, each positive answer becomes that error.
    pub(in super::super) async fn run_in_order(
        &self,
        script: &Script,
        calls: &[Cmd],
        attempt: Attempt<'_>,
    ) -> Result<Vec<Result<Value, Failure>>, Failure> {
        let connection = self.link.connection().await?;
        let mut answers = self.link.run_in_order(&connection, script, calls, attempt).await?;
        let is_yes = |answer: &Result<Value, Failure>| answer.as_ref().is_ok_and(says_yes);
        if answers.iter().any(is_yes)
            && let Err(failure) = self.acknowledged(&connection).await
        {
            let yes = answers.iter_mut().filter(|answer| is_yes(answer));
            yes.for_each(|answer| *answer = Err(failure.clone()));
        }
        Ok(answers)
    }

    /// Waits until enough replicas have the writes that were answered on this connection so far.
    async fn acknowledged(&self, connection: &Arc<Connection>) -> Result<(), Failure> {
        let number = self.asked.fetch_add(1, Ordering::Relaxed) + 1;
        let mut last = self.last.lock().await;
        if last.generation != connection.generation || last.up_to < number {
            let up_to = self.asked.load(Ordering::Relaxed);
            let outcome = self.wait(connection).await;
            *last = LastWait {
                generation: connection.generation,
                up_to,
                outcome,
            };
        }
        last.outcome.clone()
    }

    async fn wait(&self, connection: &Arc<Connection>) -> Result<(), Failure> {
        let mut pair = [redis::cmd("SET"), redis::cmd("WAIT")];
        pair[0].arg(MARK).arg("").arg("PX").arg(MARK_LASTS_MS);
        pair[1].arg(self.wanted).arg(self.in_time().as_millis() as u64);
        let reply = async {
            let replies = connection.wire.pipeline(&pair, None).await?;
            replies.into_iter().map(Value::extract_error).collect()
        };
        let replies: Vec<Value> = self.link.exchange(connection, reply).await?;
        match replies[..] {
            [_, Value::Int(acknowledged)] if acknowledged >= i64::from(self.wanted) => Ok(()),
            [_, Value::Int(acknowledged)] => Err(Failure::Replicas {
                acknowledged,
                wanted: self.wanted,
            }),
            _ => Err(Failure::Unexpected("WAIT")),
        }
    }

    /// Returns the time limit of the replicas: a part of that of a call, so that there is time for a rollback. Never 0,
    /// which would mean no limit.
    fn in_time(&self) -> Duration {
        (self.link.limit() / 8).max(Duration::from_millis(1))
    }
}
