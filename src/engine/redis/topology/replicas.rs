//! `minReplicas`: a grant counts only when so many replicas have it.
//!
//! Redis replicates behind its clients' backs. A master that fails may take with it what it has just granted, and the one
//! that follows it grants the same once more. `WAIT` tells how many replicas have acknowledged the writes of the connection
//! that asks, which is why the script and its `WAIT` have to go over one connection: the same words on a connection to the
//! master's successor would speak of another history.
//!
//! `WAIT` keeps its connection from everything else meanwhile, so that what needs it has a connection of its own. There
//! one `WAIT` speaks for all scripts that were answered before it was sent (as a database commits transactions in
//! groups): without a replica, many callers together wait no longer than two of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use redis::{Cmd, Value};
use tokio::sync::Mutex;

use crate::engine::redis::connection::request::Attempt;
use crate::engine::redis::connection::{Connection, Link};
use crate::engine::redis::error::Failure;
use crate::engine::redis::scripts::Script;

/// `WAIT` speaks of the connection's own writes, and a script that found nothing to change has written nothing: the
/// write to this key makes it speak of everything that the server has done so far.
const MARK: &str = "holdfast:replicated";
const MARK_LASTS_MS: u64 = 1000;

/// The way to a server for what must survive its loss.
pub(in super::super) struct Replicated {
    pub(in super::super) link: Arc<Link>,
    /// How many replicas have to acknowledge.
    wanted: u32,
    /// How many callers have asked so far.
    asked: AtomicU64,
    /// What the last `WAIT` said. Whoever has the lock is about to send the next.
    last: Mutex<ReplySink>,
}

/// Whether the scripts mean by this that somebody holds a name (longer) now.
fn says_yes(answer: &Value) -> bool {
    match answer {
        Value::Int(number) => *number > 0,
        Value::BulkString(digits) => digits.contains(&b'1'),
        _ => false,
    }
}

/// What one `WAIT` said, and for whom.
struct ReplySink {
    generation: u64,
    /// Everybody who had asked up to this number.
    up_to: u64,
    outcome: Result<(), Failure>,
}

impl Replicated {
    pub(in super::super) fn new(link: Arc<Link>, wanted: u32) -> Self {
        let nobody = ReplySink {
            generation: 0,
            up_to: 0,
            outcome: Ok(()),
        };
        Replicated {
            link,
            wanted,
            asked: AtomicU64::new(0),
            last: Mutex::new(nobody),
        }
    }

    /// Runs a script. A positive answer is given only when enough replicas have what it says.
    ///
    /// # Errors
    /// [`Failure::Replicas`] when too few acknowledged in time: the script has been carried out all the same.
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

    /// Makes sure of everything that was answered on this connection so far.
    async fn acknowledged(&self, connection: &Arc<Connection>) -> Result<(), Failure> {
        let number = self.asked.fetch_add(1, Ordering::Relaxed) + 1;
        let mut last = self.last.lock().await;
        if last.generation != connection.generation || last.up_to < number {
            let up_to = self.asked.load(Ordering::Relaxed);
            let outcome = self.wait(connection).await;
            *last = ReplySink {
                generation: connection.generation,
                up_to,
                outcome,
            };
        }
        last.outcome.clone()
    }

    async fn wait(&self, connection: &Arc<Connection>) -> Result<(), Failure> {
        let mut pair = redis::pipe();
        pair.cmd("SET").arg(MARK).arg("").arg("PX").arg(MARK_LASTS_MS);
        pair.cmd("WAIT").arg(self.wanted).arg(self.in_time().as_millis() as u64);
        let mut multiplexed = connection.multiplexed.clone();
        let reply = async {
            let replies = multiplexed.send_packed_commands(&pair, 0, 2).await?;
            replies.into_iter().map(Value::extract_error).collect()
        };
        let replies: Vec<Value> = self.link.exchange(connection, reply).await?;
        match replies[..] {
            [_, Value::Int(acknowledged)] if acknowledged >= i64::from(self.wanted) => Ok(()),
            [_, Value::Int(acknowledged)] => Err(Failure::Replicas {
                acknowledged,
                wanted: self.wanted,
            }),
            _ => Err(Failure::Unexpected("of WAIT")),
        }
    }

    /// How long the replicas have time. A part of what a call may take, so that there is time to give back what they do
    /// not acknowledge; never 0, which would mean for ever.
    fn in_time(&self) -> Duration {
        (self.link.limit() / 8).max(Duration::from_millis(1))
    }
}
