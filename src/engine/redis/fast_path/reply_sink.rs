//! Receives replies where they are read.

use std::sync::Arc;

use redis::{RedisResult, Value};

use crate::engine::redis::error::broken;

/// Who is told of a reply where it is read, in place of a call that waits for it. It must not block, nor ask the lane for
/// anything.
pub(in super::super) trait ReplySink: Send + Sync {
    /// The reply to the question with this number, or why there is none.
    fn on_reply(self: Arc<Self>, number: usize, reply: RedisResult<Value>);

    /// Whether to remove the request with this number, which has not left the process. [`ReplySink::on_reply`] is not called for it then.
    fn is_cancelled(&self, _number: usize) -> bool {
        false
    }
}

/// Somebody who is to be told, once; of several questions at least of the last.
pub(in super::super) struct ReplyHandle(Option<Arc<dyn ReplySink>>, usize);

impl ReplyHandle {
    pub(in super::super) fn new(sink: Arc<dyn ReplySink>, number: usize) -> Self {
        ReplyHandle(Some(sink), number)
    }

    /// Tells of the reply to a question so many before the last.
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

    /// Whether the request, which has not left the process, is to be removed.
    pub(in super::super) fn is_cancelled(&self) -> bool {
        self.0.as_ref().is_some_and(|sink| sink.is_cancelled(self.1))
    }

    /// Drops the handle without a call of [`ReplySink::on_reply`].
    pub(in super::super) fn discard(mut self) {
        self.0 = None;
    }
}

impl Drop for ReplyHandle {
    /// There will be no reply.
    fn drop(&mut self) {
        if let Some(sink) = self.0.take() {
            sink.on_reply(self.1, Err(broken()));
        }
    }
}
