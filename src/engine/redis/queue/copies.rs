//! Messages that arrive twice: on the ordinary connection and on the fast path.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use super::Waiters;
use crate::engine::redis::connection::pubsub::MessageHandler;
use futures_util::FutureExt;

/// The connection on which a copy of a message arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    Ordinary,
    FastPath,
}

/// How long a message on the ordinary connection waits for its copy on the fast path: an event loop that is not blocked reads it
/// earlier.
const LATE: Duration = Duration::from_millis(20);

/// The largest number of messages that are kept without a time limit. A copy of an older one counts as a new message, which does no
/// harm: a waiter may be notified twice.
const MOST: usize = 256;

/// The messages of which one copy has arrived, the oldest first.
#[derive(Default)]
pub(super) struct Copies {
    /// Those on the ordinary connection that wait for [`LATE`]. None is forgotten earlier: nothing else might deliver it.
    waiting: VecDeque<Vec<u8>>,
    /// Those on the ordinary connection that were delivered late: their copies on the fast path stand for no further message.
    late: VecDeque<Vec<u8>>,
    /// Those on the fast path.
    early: VecDeque<Vec<u8>>,
}

impl Copies {
    /// Records a copy of a message. Returns whether it is the second one.
    pub(super) fn is_second(&mut self, source: Source, message: &[u8]) -> bool {
        match source {
            Source::Ordinary if remove(&mut self.early, message) => true,
            Source::Ordinary => {
                self.waiting.push_back(message.to_vec());
                false
            }
            Source::FastPath if remove(&mut self.waiting, message) || remove(&mut self.late, message) => true,
            Source::FastPath => {
                keep(&mut self.early, message);
                false
            }
        }
    }

    /// Returns whether a message on the ordinary connection still waits for its copy: it is delivered now.
    pub(super) fn is_late(&mut self, message: &[u8]) -> bool {
        let is_late = remove(&mut self.waiting, message);
        if is_late {
            keep(&mut self.late, message);
        }
        is_late
    }

    /// Forgets what has arrived or is expected on a fast path, which has ended.
    pub(super) fn forget_fast_path(&mut self) {
        self.early.clear();
        self.late.clear();
    }
}

fn remove(messages: &mut VecDeque<Vec<u8>>, message: &[u8]) -> bool {
    let at = messages.iter().position(|copy| copy == message);
    at.and_then(|at| messages.remove(at)).is_some()
}

fn keep(messages: &mut VecDeque<Vec<u8>>, message: &[u8]) {
    if messages.len() == MOST {
        messages.pop_front();
    }
    messages.push_back(message.to_vec());
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
            self.copies.lock().forget_fast_path();
            return self.deliver(slot, message);
        }
        if self.copies.lock().is_second(source, message) {
            return;
        }
        let (waiters, message) = (self.clone(), message.to_vec());
        self.route.runtime().spawn(FutureExt::boxed(async move {
            tokio::time::sleep(LATE).await;
            if waiters.copies.lock().is_late(&message) {
                waiters.deliver(slot, &message);
            }
        }));
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
        assert!(copies.is_late(b"a") && !copies.is_late(b"a"), "delivered late");
        assert!(!copies.is_second(fast, b"c"));
        copies.forget_fast_path();
        assert!(!copies.is_second(ordinary, b"c"));
        for number in 0..2 * MOST {
            assert!(!copies.is_second(fast, number.to_string().as_bytes()));
        }
        assert_eq!(copies.early.len(), MOST);
        assert!(copies.is_second(ordinary, (2 * MOST - 1).to_string().as_bytes()));
        assert!(!copies.is_second(ordinary, b"0"), "forgotten");
    }

    #[test]
    fn each_of_many_messages_is_delivered_while_the_event_loop_is_blocked() {
        let mut copies = Copies::default();
        let messages: Vec<String> = (0..2 * MOST).map(|number| number.to_string()).collect();
        for message in &messages {
            assert!(!copies.is_second(Source::Ordinary, message.as_bytes()));
        }
        assert!(messages.iter().all(|message| copies.is_late(message.as_bytes())));
        assert!(copies.waiting.is_empty() && copies.late.len() == MOST);
    }

    #[test]
    fn the_copy_of_a_message_that_was_delivered_late_hides_no_later_message() {
        let mut copies = Copies::default();
        assert!(!copies.is_second(Source::Ordinary, b"a") && copies.is_late(b"a"));
        assert!(copies.is_second(Source::FastPath, b"a"), "the event loop continues");
        assert!(!copies.is_second(Source::Ordinary, b"a"), "it is blocked again");
        assert!(copies.is_late(b"a"));
    }
}
