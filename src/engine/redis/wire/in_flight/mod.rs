//! Requests that wait for their replies, and what the replies to a batch mean for each of its calls.

pub(super) mod pushes;
#[cfg(test)]
pub(super) mod tests;

use redis::{RedisError, RedisResult, Value};
use tokio::sync::oneshot;

use super::call::{ALONE, Outcome};
use super::pipeline::Kind;
use super::reply_sink::ReplyHandle;
use super::resp::{self, Reader};
use crate::engine::redis::error::spoils_connection;
use crate::model::OwnerToken;

/// The command that ends the subscription to a sharded channel.
pub(in super::super) const UNSUBSCRIBE_SHARD: &str = "SUNSUBSCRIBE";
/// The command after it. Its reply is the only map, and it needs no right.
pub(super) const END_MARK: &str = "HELLO";

/// A request whose replies come next.
pub(super) enum InFlight {
    Single(Single),
    /// Several calls that share commands.
    Batch(SentBatch),
}

impl InFlight {
    /// Returns the number of commands, each of which has one reply.
    pub(super) fn commands(&self) -> usize {
        match self {
            InFlight::Single(Single::Asking(_)) => 2,
            InFlight::Single(single) if single.has_end_mark() => 2,
            InFlight::Single(_) => 1,
            InFlight::Batch(sent) => sent.commands(),
        }
    }
}

impl From<Single> for InFlight {
    fn from(single: Single) -> Self {
        InFlight::Single(single)
    }
}

/// The receiver of one reply.
pub(super) enum Single {
    /// A call.
    Call(oneshot::Sender<RedisResult<Value>>),
    /// A call whose command follows `ASKING`.
    Asking(oneshot::Sender<RedisResult<Value>>),
    /// A command about a subscription. Its reply is a push of this name, or an error. [`UNSUBSCRIBE_SHARD`] is followed by [`END_MARK`].
    Subscription {
        verb: &'static str,
        name: String,
        reply: oneshot::Sender<RedisResult<Value>>,
    },
    Sink(ReplyHandle),
}

impl Single {
    /// Whether the caller was dropped, or does not need the request any more.
    pub(super) fn is_gone(&self) -> bool {
        match self {
            Single::Call(reply) | Single::Asking(reply) => reply.is_closed(),
            // The state of a subscription on the server has to be known.
            Single::Subscription { .. } => false,
            Single::Sink(handle) => handle.is_cancelled(),
        }
    }

    /// Whether a second command follows, whose reply marks the end of the request. A node that ends a subscription itself sends the push
    /// that would be the reply, and then an error as the reply.
    pub(super) fn has_end_mark(&self) -> bool {
        matches!(self, Single::Subscription { verb, .. } if *verb == UNSUBSCRIBE_SHARD)
    }

    pub(super) fn is_of_sink(&self) -> bool {
        matches!(self, Single::Sink(_))
    }

    /// Returns the one of its replies that its caller receives.
    pub(super) fn reply_of<'r>(&self, replies: &'r [u8]) -> RedisResult<&'r [u8]> {
        let mut replies = Reader::new(replies);
        if let Single::Asking(_) = self {
            replies.skip(1)?;
        }
        // With an end mark: the error, or else the reply to the end mark.
        replies.next()
    }

    /// Passes on the reply.
    pub(super) fn deliver(self, reply: Value) {
        match self {
            Single::Call(sender) | Single::Asking(sender) | Single::Subscription { reply: sender, .. } => {
                // The caller may have been dropped.
                let _ = sender.send(Ok(reply));
            }
            Single::Sink(handle) => handle.send(reply.extract_error()),
        }
    }
}

/// The receiver of the outcome for one name.
pub(super) enum ReplyTo {
    Call(oneshot::Sender<RedisResult<Outcome>>),
    /// The vote of a quorum: its four replies, or an error for the last of them.
    Vote(ReplyHandle),
}

pub(super) struct BatchedCall {
    /// `None` for a command of the caller.
    pub(super) owner: Option<OwnerToken>,
    pub(super) reply_to: ReplyTo,
}

impl BatchedCall {
    /// Whether the caller was dropped, or does not need the request any more.
    pub(super) fn is_gone(&self) -> bool {
        match &self.reply_to {
            ReplyTo::Call(sender) => sender.is_closed(),
            ReplyTo::Vote(handle) => handle.is_cancelled(),
        }
    }

    /// Drops the request without a reply.
    pub(super) fn discard(self) {
        if let ReplyTo::Vote(handle) = self.reply_to {
            handle.discard();
        }
    }

    fn owner(&self) -> Option<&[u8]> {
        self.owner.as_ref().map(|owner| owner.as_str().as_bytes())
    }

    fn deliver(self, outcome: RedisResult<Outcome>) {
        if let ReplyTo::Call(sender) = self.reply_to {
            // The caller may have been dropped.
            let _ = sender.send(outcome);
        }
    }
}

/// A batch that was sent.
pub(super) struct SentBatch {
    pub(super) kind: Kind,
    pub(super) calls: Vec<BatchedCall>,
}

/// What the replies to a batch show about the server.
pub(super) struct BatchReport {
    /// The number of calls with a sink, which do not record liveness themselves.
    pub(super) sink_calls: usize,
    /// The server does not know the script.
    pub(super) is_unknown: bool,
    /// One of the errors: it shows whether the connection is unusable, or whether the user lost a right.
    pub(super) error: Option<RedisError>,
}

impl SentBatch {
    /// Returns the number of calls.
    pub(super) fn calls(&self) -> usize {
        self.calls.len()
    }

    /// Whether a call in it has to be removed while it is unsent.
    pub(super) fn has_cancelled(&self) -> bool {
        self.kind.is_cancellable() && self.calls.iter().any(BatchedCall::is_gone)
    }

    /// Returns the number of attempts to acquire among them.
    pub(super) fn attempts(&self) -> usize {
        if self.kind.is_attempt() { self.calls.len() } else { 0 }
    }

    /// Returns the number of commands, each of which has one reply.
    pub(super) fn commands(&self) -> usize {
        let count = self.calls.len();
        match self.kind {
            Kind::Check | Kind::Release => 1,
            Kind::Script => count,
            Kind::Acquire => count + 3,
            Kind::Vote => 2 * count + 2,
        }
    }

    /// Passes each outcome to its caller.
    ///
    /// # Errors
    /// When the replies cannot be read.
    pub(super) fn deliver(self, replies: &[u8]) -> RedisResult<BatchReport> {
        let sink_calls = self
            .calls
            .iter()
            .filter(|call| !matches!(call.reply_to, ReplyTo::Call(_)))
            .count();
        let mut report = BatchReport {
            sink_calls,
            is_unknown: false,
            error: None,
        };
        let mut replies = Reader::new(replies);
        match self.kind {
            Kind::Check => deliver_checks(self.calls, replies.next()?)?,
            Kind::Acquire => deliver_acquisitions(self.calls, &mut replies)?,
            Kind::Vote => report.error = deliver_votes(self.calls, &mut replies)?,
            Kind::Script => {
                for call in self.calls {
                    let answer = resp::value(replies.next()?)?.extract_error();
                    report.error = report.error.or_else(|| answer.as_ref().err().cloned());
                    call.deliver(answer.map(Outcome::Answer));
                }
            }
            Kind::Release => {
                report.error = deliver_releases(self.calls, resp::value(replies.next()?)?)?;
                let unknown = redis::ServerErrorKind::NoScript.into();
                report.is_unknown = report.error.as_ref().is_some_and(|error| error.kind() == unknown);
            }
        }
        Ok(report)
    }
}

/// A reply for all calls: its elements in order, or the whole reply each time if it is no array.
struct Shared<'a> {
    reply: &'a [u8],
    elements: Option<Reader<'a>>,
}

impl<'a> Shared<'a> {
    fn new(reply: &'a [u8]) -> Self {
        let elements = Reader::elements(reply);
        Shared { reply, elements }
    }

    fn next(&mut self) -> RedisResult<&'a [u8]> {
        self.elements.as_mut().map_or(Ok(self.reply), Reader::next)
    }
}

fn deliver_checks(calls: Vec<BatchedCall>, reply: &[u8]) -> RedisResult<()> {
    let mut holders = Shared::new(reply);
    for call in calls {
        // Not where the reply is an error: the missing right may concern one of the names only.
        let holder = resp::bulk(holders.next()?);
        let is_held = holder.is_some_and(|holder| !call.owner().is_some_and(|owner| holder.starts_with(owner)));
        call.deliver(Ok(if is_held { Outcome::Held } else { Outcome::NotHeld }));
    }
    Ok(())
}

fn deliver_acquisitions(calls: Vec<BatchedCall>, replies: &mut Reader<'_>) -> RedisResult<()> {
    let is_shared = calls.len() > 1;
    let queued = resp::value(spared(replies.next()?, is_shared))?;
    let mut behind = replies.clone();
    behind.skip(calls.len())?;
    let last = resp::value(behind.next()?)?;
    let standing = spared(behind.next()?, is_shared);
    let mut holders = Shared::new(standing);
    let count = calls.len() as i64;
    for (call, number) in calls.into_iter().zip(1..) {
        let held = replies.next()?;
        let holder = holders.next()?;
        let fence = match &last {
            Value::Int(last) => Value::Int(last - count + number),
            other => other.clone(),
        };
        let outcome = match (&queued, &fence) {
            (Value::Int(queued), Value::Int(fence))
                if resp::is_nil(held) && resp::bulk(holder).is_some_and(|holder| call.owner() == Some(holder)) =>
            {
                Ok(Outcome::Acquired {
                    fence: *fence,
                    queued: *queued > 0,
                })
            }
            _ => match resp::value(held)? {
                Value::ServerError(error) => Err(error.into()),
                held => Ok(Outcome::Replies(Box::new([
                    queued.clone(),
                    held,
                    fence,
                    resp::value(holder)?,
                ]))),
            },
        };
        call.deliver(outcome);
    }
    Ok(())
}

/// Returns the reply, or nil if it is an error and `is_shared`: a right that is missing for one of several names must not
/// look like one that is missing for all.
fn spared(answer: &[u8], is_shared: bool) -> &[u8] {
    if is_shared && answer.starts_with(b"-") {
        resp::NIL
    } else {
        answer
    }
}

/// Returns one of the errors, preferably one after which the connection is unusable.
fn deliver_votes(calls: Vec<BatchedCall>, replies: &mut Reader<'_>) -> RedisResult<Option<RedisError>> {
    let mut behind = replies.clone();
    behind.skip(2 * calls.len())?;
    let time = behind.next()?;
    let standing = spared(behind.next()?, calls.len() > 1);
    let mut holders = Shared::new(standing);
    let mut seen: Option<RedisError> = None;
    for call in calls {
        let (taken, counted) = (replies.next()?, replies.next()?);
        let holder = holders.next()?;
        let ReplyTo::Vote(handle) = call.reply_to else {
            continue;
        };
        let mut read = |reply| -> RedisResult<RedisResult<Value>> {
            let reply = resp::value(reply)?.extract_error();
            if let Err(error) = &reply
                && !seen.as_ref().is_some_and(spoils_connection)
            {
                seen = Some(error.clone());
            }
            Ok(reply)
        };
        for (before, reply) in [(3, taken), (2, counted), (1, time)] {
            handle.send_before(before, read(reply)?);
        }
        handle.send(read(holder)?);
    }
    Ok(seen)
}

/// Returns the error of the server.
fn deliver_releases(calls: Vec<BatchedCall>, answer: Value) -> RedisResult<Option<RedisError>> {
    match answer {
        Value::Int(freed) if freed == calls.len() as i64 => {
            calls
                .into_iter()
                .for_each(|call| call.deliver(Ok(Outcome::Released(1))));
        }
        Value::Array(answers) if answers.len() == calls.len() => {
            for (call, answer) in calls.into_iter().zip(answers) {
                let Value::Int(answer) = answer else {
                    return Err(resp::nonsense());
                };
                call.deliver(Ok(Outcome::Released(answer)));
            }
        }
        Value::ServerError(error) => {
            let error = RedisError::from(error);
            // One of the names may be the cause, or the script is unknown.
            let is_shared = calls.len() > 1 || error.kind() == redis::ServerErrorKind::NoScript.into();
            for call in calls {
                call.deliver(if is_shared {
                    Ok(Outcome::Released(ALONE))
                } else {
                    Err(error.clone())
                });
            }
            return Ok(Some(error));
        }
        _ => return Err(resp::nonsense()),
    }
    Ok(None)
}
