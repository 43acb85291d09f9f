//! Sends requests where they are called, and waits for their replies later.

use std::sync::Arc;

use parking_lot::Mutex;
use redis::{RedisResult, Value};
use tokio::sync::oneshot;

use super::request_lifetime::RequestLifetime;
use crate::engine::redis::wire::ReplySink;

/// The replies to one request: those of the server, or one error if the connection has ended. None if the request was removed before it
/// was sent.
pub(super) type Replies = Vec<RedisResult<Value>>;

/// Collects the replies to one request. The connection drops it after the last one.
struct Collector {
    replies: Mutex<Replies>,
    receiver: Option<oneshot::Sender<Replies>>,
    lifetime: Arc<RequestLifetime>,
}

/// Sends a request with `send`, and returns the receiver of its replies. The request is removed if it is unsent at the end of `lifetime`.
pub(super) fn send(
    lifetime: &Arc<RequestLifetime>,
    send: impl FnOnce(&Arc<dyn ReplySink>),
) -> oneshot::Receiver<Replies> {
    let (sender, receiver) = oneshot::channel();
    let collector: Arc<dyn ReplySink> = Arc::new(Collector {
        replies: Mutex::default(),
        receiver: Some(sender),
        lifetime: lifetime.clone(),
    });
    send(&collector);
    receiver
}

impl ReplySink for Collector {
    fn on_reply(self: Arc<Self>, _: usize, reply: RedisResult<Value>) {
        self.replies.lock().push(reply);
    }

    fn is_cancelled(&self, _: usize) -> bool {
        self.lifetime.has_ended()
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        if let Some(receiver) = self.receiver.take() {
            // Its caller may have been dropped.
            let _ = receiver.send(std::mem::take(self.replies.get_mut()));
        }
    }
}
