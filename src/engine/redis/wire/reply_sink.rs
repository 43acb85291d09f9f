//! Receives replies where they are read.

use std::sync::Arc;

use redis::{RedisResult, Value};

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

/// One-shot reply handle, for the last of some requests. If it is dropped, the sink receives a broken-pipe error for the
/// last reply.
pub(in super::super) struct ReplyHandle(Option<Arc<dyn ReplySink>>, usize);

impl ReplyHandle {
    pub(in super::super) fn new(sink: Arc<dyn ReplySink>, number: usize) -> Self {
        ReplyHandle(Some(sink), number)
    }

    /// Passes on the reply to a request that is `last` requests before the last one.
    pub(in super::super) fn send_before(&self, last: usize, reply: RedisResult<Value>) {
        if let Some(sink) = &self.0 {
            sink.clone().on_reply(self.1 - last, reply);
        }
    }

    pub(in super::super) fn send(mut self, reply: RedisResult<Value>) {
        if let Some(sink) = self.0.take() {
            sink.on_reply(self.1, reply);
        }
    }

    /// Whether to remove the unsent request.
    pub(in super::super) fn is_cancelled(&self) -> bool {
        self.0.as_ref().is_some_and(|sink| sink.is_cancelled(self.1))
    }

    /// Drops the handle without a call of [`ReplySink::on_reply`].
    pub(in super::super) fn discard(mut self) {
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
