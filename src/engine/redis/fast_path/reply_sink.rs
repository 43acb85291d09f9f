//! What was asked for on a lane, and who waits for the reply.

use std::io::{self, ErrorKind};
use std::sync::Arc;

use redis::{Cmd, RedisResult, Value};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::oneshot;

use super::resp;
use super::{Sent, broken};

/// Who is told of a reply where it is read, in place of a call that waits for it. It must not block, nor ask the lane for
/// anything.
pub(in super::super) trait Told: Send + Sync {
    /// The reply to the question with this number, or why there is none.
    fn told(self: Arc<Self>, number: usize, reply: RedisResult<Value>);

    /// Whether to remove the request with this number, which has not left the process. [`Told::told`] is not called for it then.
    fn is_cancelled(&self, _number: usize) -> bool {
        false
    }
}

/// Somebody who is to be told, once; of several questions at least of the last.
pub(in super::super) struct Telling(Option<Arc<dyn Told>>, usize);

impl Telling {
    pub(in super::super) fn new(who: Arc<dyn Told>, number: usize) -> Self {
        Telling(Some(who), number)
    }

    /// Tells of the reply to a question so many before the last.
    pub(in super::super) fn tell_before(&self, last: usize, reply: RedisResult<Value>) {
        if let Some(who) = &self.0 {
            who.clone().told(self.1 - last, reply);
        }
    }

    pub(in super::super) fn tell(mut self, reply: RedisResult<Value>) {
        if let Some(who) = self.0.take() {
            who.told(self.1, reply);
        }
    }

    /// Whether the request, which has not left the process, is to be removed.
    pub(in super::super) fn is_cancelled(&self) -> bool {
        self.0.as_ref().is_some_and(|who| who.is_cancelled(self.1))
    }

    /// Drops the handle without a call of [`Told::told`].
    pub(in super::super) fn discard(mut self) {
        self.0 = None;
    }
}

impl Drop for Telling {
    /// There will be no reply.
    fn drop(&mut self) {
        if let Some(who) = self.0.take() {
            who.told(self.1, Err(broken()));
        }
    }
}

/// Who waits for the next replies.
pub(in super::super) enum Asked {
    Single(Single),
    /// Several calls, which are told of together.
    Batch(Sent),
    /// A caller that waits for the replies before this place. It gets no reply itself.
    Nothing(#[expect(dead_code, reason = "its drop is the message")] oneshot::Sender<()>),
}

impl Asked {
    /// Returns the number of commands, each of which has one reply.
    pub(in super::super) fn commands(&self) -> usize {
        match self {
            Asked::Single(_) => 1,
            Asked::Batch(sent) => sent.commands(),
            Asked::Nothing(_) => 0,
        }
    }
}

impl From<Single> for Asked {
    fn from(single: Single) -> Self {
        Asked::Single(single)
    }
}

/// Who waits for one reply.
pub(in super::super) enum Single {
    /// A call.
    Call(oneshot::Sender<RedisResult<Value>>),
    Told(Telling),
    /// The lane itself, after `seed.lua`.
    Seed,
    /// Nobody; but a record whose script the server does not know is sent once more.
    Record(Box<Cmd>),
    /// No caller: a record that was sent with the script's text. The call is the one without the text.
    Source(Box<Cmd>),
}

/// Sends one command on a fresh connection.
pub(in super::super) async fn ask(stream: &mut tokio::net::TcpStream, cmd: &Cmd) -> RedisResult<Value> {
    let mut input = Vec::new();
    stream.write_all(&cmd.get_packed_command()).await?;
    while resp::length(&input)?.is_none() {
        if stream.read_buf(&mut input).await? == 0 {
            return Err(io::Error::from(ErrorKind::UnexpectedEof).into());
        }
    }
    redis::parse_redis_value(&input)
}

/// Of the server, from its answer to `HELLO`.
pub(in super::super) fn major_version(reply: &Value) -> Option<u32> {
    let Value::Array(fields) = reply else { return None };
    fields.chunks_exact(2).find_map(|field| match field {
        [Value::BulkString(name), Value::BulkString(version)] if name == b"version" => {
            std::str::from_utf8(version).ok()?.split('.').next()?.parse().ok()
        }
        _ => None,
    })
}
