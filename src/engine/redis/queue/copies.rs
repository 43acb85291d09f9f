//! Messages that arrive twice: on the ordinary connection and on the fast path.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use super::Waiters;
use crate::engine::redis::connection::pubsub::MessageHandler;

/// The connection on which a copy of a message arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    Ordinary,
    FastPath,
}

/// How long a message on the ordinary connection waits for its copy on the fast path: an event loop that is not blocked reads it
/// earlier.
const LATE: Duration = Duration::from_millis(20);

/// The largest number of messages. A copy of an older one counts as a new message, which does no harm: a waiter may be notified
/// twice.
const MOST: usize = 256;

/// The messages of which one copy has arrived, the oldest first.
#[derive(Default)]
pub(super) struct Copies(VecDeque<(Source, Vec<u8>)>);

impl Copies {
    /// Removes the copy of a message that arrived on this connection. Returns whether there was one.
    pub(super) fn take(&mut self, source: Source, message: &[u8]) -> bool {
        let mut copies = self.0.iter();
        let at = copies.position(|(from, copy)| *from == source && copy == message);
        at.and_then(|at| self.0.remove(at)).is_some()
    }

    /// Records a copy of a message. Returns whether it is the second one.
    pub(super) fn is_second(&mut self, source: Source, message: &[u8]) -> bool {
        let other = match source {
            Source::Ordinary => Source::FastPath,
            Source::FastPath => Source::Ordinary,
        };
        if self.take(other, message) {
            return true;
        }
        if self.0.len() == MOST {
            self.0.pop_front();
        }
        self.0.push_back((source, message.to_vec()));
        false
    }

    /// Forgets the copies that arrived on this connection.
    pub(super) fn forget(&mut self, source: Source) {
        self.0.retain(|(from, _)| *from != source);
    }
}

impl Waiters {
    /// Subscribes to the channel on the fast path, too, if there is one.
    pub(in super::super) fn listen_on_fast_path(self: &Arc<Self>) {
        if let Some(fast_path) = self.route.fast_path_for_messages() {
            fast_path.subscribe(|| {
                let channel = self.route.channel_prefix(0) + &self.process;
                (channel, self.handler(0, Source::FastPath))
            });
        }
    }

    /// Returns the handler of the messages on a connection.
    pub(super) fn handler(self: &Arc<Self>, slot: u16, source: Source) -> MessageHandler {
        let waiters = Arc::downgrade(self);
        Arc::new(move |message: &[u8]| {
            if let Some(waiters) = waiters.upgrade() {
                waiters.receive(slot, source, message);
            }
        })
    }

    /// Delivers a message, unless its copy from the other connection was or will be delivered. `source`: its connection.
    fn receive(self: &Arc<Self>, slot: u16, source: Source, message: &[u8]) {
        if source == Source::FastPath {
            self.copies.lock().is_second(source, message);
            return self.deliver(slot, message);
        }
        let fast_path = self.route.fast_path_for_messages().filter(|_| !message.is_empty());
        if !fast_path.is_some_and(|fast_path| fast_path.is_subscribed()) {
            self.copies.lock().forget(Source::FastPath);
            return self.deliver(slot, message);
        }
        if self.copies.lock().is_second(source, message) {
            return;
        }
        let (waiters, message) = (self.clone(), message.to_vec());
        self.route.runtime().spawn(async move {
            tokio::time::sleep(LATE).await;
            if waiters.copies.lock().take(source, &message) {
                waiters.deliver(slot, &message);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_copy_has_one_other_copy_and_their_number_is_limited() {
        let mut copies = Copies::default();
        let (ordinary, fast) = (Source::Ordinary, Source::FastPath);
        assert!(!copies.is_second(fast, b"a") && !copies.is_second(fast, b"a"));
        assert!(copies.is_second(ordinary, b"a") && copies.is_second(ordinary, b"a"));
        assert!(!copies.is_second(ordinary, b"a"), "a third message");
        assert!(!copies.is_second(ordinary, b"b"));
        assert!(
            copies.take(ordinary, b"a") && !copies.take(ordinary, b"a"),
            "delivered late"
        );
        assert!(!copies.is_second(fast, b"c"));
        copies.forget(fast);
        assert!(!copies.is_second(ordinary, b"c"));
        for number in 0..2 * MOST {
            assert!(!copies.is_second(ordinary, number.to_string().as_bytes()));
        }
        assert_eq!(copies.0.len(), MOST);
        assert!(copies.take(ordinary, (2 * MOST - 1).to_string().as_bytes()) && !copies.take(ordinary, b"b"));
    }
}
