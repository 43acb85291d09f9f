//! The receivers of replies: calls that wait, and sinks, which receive replies where they are read.

use std::sync::Arc;

use redis::{RedisResult, Value};
use tokio::sync::oneshot;

use crate::engine::redis::error::broken;

/// Receives replies on the thread that reads them, in the place of a call that waits. The methods must not block, and must
/// not use the connection.
pub(in super::super) trait ReplySink: Send + Sync {
    /// Receives the reply to the request with this number, or an error if there is none.
    fn on_reply(self: Arc<Self>, number: usize, reply: RedisResult<Value>);

    /// Whether to remove the unsent request with this number. [`ReplySink::on_reply`] is not called for it then.
    fn is_cancelled(&self, _number: usize) -> bool {
        false
    }
}

/// The receiver of the reply to a request.
pub(super) enum ReplyTo {
    Call(oneshot::Sender<RedisResult<Value>>),
    Sink(ReplyHandle),
}

impl ReplyTo {
    /// Creates the receiver for a call, which waits for the other value.
    pub(super) fn call() -> (Self, oneshot::Receiver<RedisResult<Value>>) {
        let (sender, reply) = oneshot::channel();
        (ReplyTo::Call(sender), reply)
    }

    /// Whether the caller was dropped, or does not need the request any more.
    pub(super) fn is_gone(&self) -> bool {
        match self {
            ReplyTo::Call(sender) => sender.is_closed(),
            ReplyTo::Sink(handle) => handle.is_cancelled(),
        }
    }

    pub(super) fn is_sink(&self) -> bool {
        matches!(self, ReplyTo::Sink(_))
    }

    /// Passes on the reply. A sink receives an error of the server as an error.
    pub(super) fn deliver(self, reply: RedisResult<Value>) {
        match self {
            ReplyTo::Call(sender) => {
                // The caller may have been dropped.
                let _ = sender.send(reply);
            }
            ReplyTo::Sink(handle) => handle.send(reply.and_then(Value::extract_error)),
        }
    }
}

/// One-shot reply handle, for the last of some requests. If it is dropped, the sink receives a broken-pipe error for the
/// last reply.
pub(super) struct ReplyHandle(Option<Arc<dyn ReplySink>>, usize);

impl ReplyHandle {
    pub(super) fn new(sink: Arc<dyn ReplySink>, number: usize) -> Self {
        ReplyHandle(Some(sink), number)
    }

    /// Passes on the reply to a request that is `last` requests before the last one.
    pub(super) fn send_before(&self, last: usize, reply: RedisResult<Value>) {
        if let Some(sink) = &self.0 {
            sink.clone().on_reply(self.1 - last, reply);
        }
    }

    pub(super) fn send(mut self, reply: RedisResult<Value>) {
        if let Some(sink) = self.0.take() {
            sink.on_reply(self.1, reply);
        }
    }

    /// Whether to remove the unsent request.
    fn is_cancelled(&self) -> bool {
        self.0.as_ref().is_some_and(|sink| sink.is_cancelled(self.1))
    }

    /// Drops the handle without a call of [`ReplySink::on_reply`].
    pub(super) fn discard(mut self) {
        self.0 = None;
    }
}

impl Drop for ReplyHandle {
    /// Reports that there is no reply.
    fn drop(&mut self) {
        if let Some(sink) = self.0.take() {
            sink.on_reply(self.1, Err(broken()));
        }
    }
}
