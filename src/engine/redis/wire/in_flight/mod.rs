//! Requests that wait for their replies, and what the replies to a batch mean for each of its calls.

pub(super) mod pushes;
#[cfg(test)]
pub(super) mod tests;

use redis::{RedisError, RedisResult, Value};

use super::call::ALONE;
use super::pipeline::Kind;
use super::reply_sink::ReplyTo;
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

/// What replies show about the server.
pub(super) struct Report {
    /// The number of calls with a sink, which do not record liveness themselves.
    pub(super) sink_calls: usize,
    /// The server does not know the script of a batch.
    pub(super) is_unknown: bool,
    /// One of the errors: it shows whether the connection is unusable, or whether the user lost a right.
    pub(super) error: Option<RedisError>,
}

impl InFlight {
    /// Returns the number of commands, each of which has one reply.
    pub(super) fn commands(&self) -> usize {
        match self {
            InFlight::Single(single) => 1 + usize::from(single.is_asking) + usize::from(single.has_end_mark()),
            InFlight::Batch(sent) => sent.commands(),
        }
    }

    /// Returns the number of calls.
    pub(super) fn calls(&self) -> usize {
        match self {
            InFlight::Single(_) => 1,
            InFlight::Batch(sent) => sent.calls.len(),
        }
    }

    /// Returns the number of attempts to acquire among them.
    pub(super) fn attempts(&self) -> usize {
        match self {
            InFlight::Single(single) => usize::from(single.is_attempt),
            InFlight::Batch(sent) if sent.kind.is_attempt() => sent.calls.len(),
            InFlight::Batch(_) => 0,
        }
    }

    /// Passes each reply to its caller.
    ///
    /// # Errors
    /// When the replies cannot be read.
    pub(super) fn deliver(self, replies: &[u8]) -> RedisResult<Report> {
        match self {
            InFlight::Single(single) => single.deliver(replies),
            InFlight::Batch(sent) => sent.deliver(replies),
        }
    }
}

/// A command with one reply.
pub(super) struct Single {
    pub(super) reply_to: ReplyTo,
    /// It follows `ASKING`.
    pub(super) is_asking: bool,
    /// It is an attempt to acquire, whose number is limited.
    pub(super) is_attempt: bool,
    /// For a command about a subscription: the command and the channel. Its reply is a push with these names, or an error.
    /// [`UNSUBSCRIBE_SHARD`] is followed by [`END_MARK`].
    pub(super) subscription: Option<(&'static str, String)>,
}

impl Single {
    pub(super) fn new(reply_to: ReplyTo) -> Self {
        Single {
            reply_to,
            is_asking: false,
            is_attempt: false,
            subscription: None,
        }
    }

    /// Whether the caller was dropped, or does not need the request any more.
    pub(super) fn is_gone(&self) -> bool {
        // The state of a subscription on the server has to be known.
        self.subscription.is_none() && self.reply_to.is_gone()
    }

    /// Whether a second command follows, whose reply marks the end of the request. A node that ends a subscription itself sends the push
    /// that would be the reply, and then an error as the reply.
    pub(super) fn has_end_mark(&self) -> bool {
        matches!(self.subscription, Some((UNSUBSCRIBE_SHARD, _)))
    }

    fn deliver(self, replies: &[u8]) -> RedisResult<Report> {
        let mut replies = Reader::new(replies);
        if self.is_asking {
            replies.skip(1)?;
        }
        // With an end mark: the error, or else the reply to the end mark.
        let reply = resp::value(replies.next()?)?;
        let report = Report {
            sink_calls: usize::from(self.reply_to.is_sink()),
            is_unknown: false,
            error: match &reply {
                Value::ServerError(error) if self.is_attempt || self.reply_to.is_sink() => Some(error.clone().into()),
                _ => None,
            },
        };
        self.reply_to.deliver(Ok(reply));
        Ok(report)
    }
}

/// A call that shares commands with others.
pub(super) struct BatchedCall {
    pub(super) owner: OwnerToken,
    pub(super) reply_to: ReplyTo,
}

/// A batch that was sent.
pub(super) struct SentBatch {
    pub(super) kind: Kind,
    pub(super) calls: Vec<BatchedCall>,
}

impl SentBatch {
    /// Whether a call in it has to be removed while it is unsent. A release is sent in any case.
    pub(super) fn has_cancelled(&self) -> bool {
        self.kind != Kind::Release && self.calls.iter().any(|call| call.reply_to.is_gone())
    }

    fn commands(&self) -> usize {
        let count = self.calls.len();
        match self.kind {
            Kind::Check | Kind::Release => 1,
            Kind::Acquire => count + 3,
            Kind::Vote => 2 * count + 2,
        }
    }

    fn deliver(self, replies: &[u8]) -> RedisResult<Report> {
        let sink_calls = self.calls.iter().filter(|call| call.reply_to.is_sink()).count();
        let mut report = Report {
            sink_calls,
            is_unknown: false,
            error: None,
        };
        let mut replies = Reader::new(replies);
        match self.kind {
            Kind::Check => deliver_checks(self.calls, replies.next()?)?,
            Kind::Acquire => deliver_acquisitions(self.calls, &mut replies)?,
            Kind::Vote => report.error = deliver_votes(self.calls, &mut replies)?,
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
        let is_held = holder.is_some_and(|holder| !holder.starts_with(call.owner.as_str().as_bytes()));
        call.reply_to.deliver(Ok(Value::Boolean(is_held)));
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
        let is_acquired = queued == Value::Int(0)
            && matches!(fence, Value::Int(_))
            && resp::is_nil(held)
            && resp::bulk(holder) == Some(call.owner.as_str().as_bytes());
        call.reply_to.deliver(match is_acquired {
            true => Ok(fence),
            false => match resp::value(held)? {
                Value::ServerError(error) => Err(error.into()),
                held => Ok(Value::Array(vec![queued.clone(), held, fence, resp::value(holder)?])),
            },
        });
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
        let ReplyTo::Sink(handle) = call.reply_to else {
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
                .for_each(|call| call.reply_to.deliver(Ok(Value::Int(1))));
        }
        Value::Array(answers) if answers.len() == calls.len() => {
            for (call, answer) in calls.into_iter().zip(answers) {
                if !matches!(answer, Value::Int(_)) {
                    return Err(resp::nonsense());
                }
                call.reply_to.deliver(Ok(answer));
            }
        }
        Value::ServerError(error) => {
            let error = RedisError::from(error);
            // One of the names may be the cause, or the script is unknown.
            let is_shared = calls.len() > 1 || error.kind() == redis::ServerErrorKind::NoScript.into();
            for call in calls {
                call.reply_to.deliver(if is_shared {
                    Ok(Value::Int(ALONE))
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
