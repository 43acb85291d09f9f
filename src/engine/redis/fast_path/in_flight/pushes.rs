//! Pushes: the messages of the channel of the process, which the server sends before and between the replies.

use redis::{RedisResult, Value};

use super::super::FastPath;
use super::super::buffers::State;
use super::super::resp::{self, Reader};
use super::{InFlight, Single};
use crate::engine::redis::connection::pubsub::MessageHandler;

/// The name of the connection in `CLIENT LIST`. Before, a fast path is the only connection with RESP2.
const NAME: &str = "holdfast-fast-path";

/// The channel of the process, on a fast path that subscribes to it.
pub(in super::super) struct Channel {
    pub(in super::super) name: String,
    pub(in super::super) handler: MessageHandler,
    /// Messages that were read and not passed on yet.
    pub(in super::super) messages: Vec<Vec<u8>>,
    /// The server has confirmed the subscription.
    pub(in super::super) is_confirmed: bool,
}

impl Channel {
    fn new(name: String, handler: MessageHandler) -> Self {
        Channel {
            name,
            handler,
            messages: Vec::new(),
            is_confirmed: false,
        }
    }

    /// Keeps a message for the handler. Returns whether the push is the answer to SUBSCRIBE.
    fn receive(&mut self, push: &[u8]) -> bool {
        let Some(mut fields) = Reader::elements(push) else {
            return false;
        };
        let mut next = || fields.next().ok().and_then(resp::bulk);
        match (next(), next()) {
            (Some(b"message"), Some(name)) if name == self.name.as_bytes() => {
                self.messages.extend(next().map(<[u8]>::to_vec));
                false
            }
            (kind, name) => kind == Some(b"subscribe") && name == Some(self.name.as_bytes()),
        }
    }
}

impl FastPath {
    /// Subscribes to the channel of the process, unless this fast path has done so. The handler receives the messages on the thread
    /// that reads them. It must not block.
    pub(in super::super::super) fn subscribe(&self, handler: impl FnOnce() -> (String, MessageHandler)) {
        if self.state().channel.is_some() {
            return;
        }
        let (name, handler) = handler();
        // A fast path that has ended needs no channel.
        let _ = self.send(|state| {
            state.channel = Some(Channel::new(name, handler));
            state.seal();
            resp::write(&mut state.out, &["HELLO", "3", "SETNAME", NAME]);
            state.wait(Single::Hello);
        });
    }

    /// Whether the server has confirmed the subscription, and the fast path is open.
    pub(in super::super::super) fn is_subscribed(&self) -> bool {
        self.state()
            .channel
            .as_ref()
            .is_some_and(|channel| channel.is_confirmed)
    }
}

impl State {
    /// Returns the length of the replies to the next request. Removes the pushes before and between them, and keeps the messages.
    /// `None`: the replies are incomplete.
    pub(in super::super) fn next_replies(&mut self, taken: &mut usize) -> RedisResult<Option<usize>> {
        let mut left = self.waiting.front().map_or(1, InFlight::commands);
        let mut at = *taken;
        while left > 0 {
            let Some(length) = resp::length(&self.input[at..self.filled])? else {
                return Ok(None);
            };
            let end = at + length;
            let reply = &self.input[at..end];
            let is_answer = |channel: &mut Channel| {
                let asked = self.waiting.front();
                channel.receive(reply) && matches!(asked, Some(InFlight::Single(Single::Subscribe)))
            };
            if !resp::is_push(reply) || self.channel.as_mut().is_some_and(is_answer) {
                (at, left) = (end, left - 1);
            } else if at == *taken {
                (at, *taken) = (end, end);
            } else {
                self.input.copy_within(end..self.filled, at);
                self.filled -= length;
            }
        }
        Ok(Some(at - *taken))
    }

    /// Takes the messages, for the handler.
    pub(in super::super) fn take_messages(&mut self) -> Option<(MessageHandler, Vec<Vec<u8>>)> {
        let channel = self.channel.as_mut().filter(|channel| !channel.messages.is_empty())?;
        Some((channel.handler.clone(), std::mem::take(&mut channel.messages)))
    }

    /// Sends SUBSCRIBE. With RESP2, the server would execute no other command after that.
    pub(in super::super) fn subscribe_after_hello(&mut self, hello: &Value) {
        let (Value::Map(_), Some(channel)) = (hello, &self.channel) else {
            return;
        };
        let name = channel.name.clone();
        self.seal();
        resp::write(&mut self.out, &["SUBSCRIBE", &name]);
        self.wait(Single::Subscribe);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::sync::{Semaphore, oneshot};

    use super::super::super::pipeline::Kind;
    use super::super::tests::claims;
    use super::*;
    use crate::engine::redis::connection::liveness::Health;
    use crate::engine::redis::error::broken;
    use crate::engine::redis::keys::Layout;

    /// Pushes of other shapes, and of another channel.
    const STRANGE: &str = ">1\r\n$7\r\nmessage\r\n>0\r\n>2\r\n$7\r\nmessage\r\n$2\r\nto\r\n>3\r\n$7\r\nmessage\r\n$5\r\nother\r\n$1\r\nx\r\n\
                           >3\r\n$7\r\nmessage\r\n$2\r\nto\r\n:1\r\n>2\r\n*1\r\n:1\r\n_\r\n>2\r\n$10\r\ninvalidate\r\n_\r\n";
    const SUBSCRIBED: &str = ">3\r\n$9\r\nsubscribe\r\n$2\r\nto\r\n:1\r\n";

    fn message(text: &str) -> String {
        format!(">3\r\n$7\r\nmessage\r\n$2\r\nto\r\n${}\r\n{text}\r\n", text.len())
    }

    fn state() -> State {
        let mut state = State::new(Arc::new(Semaphore::new(0)), Arc::new(Health::new()));
        state.channel = Some(Channel::new("to".into(), Arc::new(|_: &[u8]| {})));
        state
    }

    /// Returns the messages that were read.
    fn messages(state: &mut State) -> Vec<String> {
        let taken = state.take_messages().map_or(Vec::new(), |(_, messages)| messages);
        taken.into_iter().map(|text| String::from_utf8(text).unwrap()).collect()
    }

    /// Reads replies that arrive in two parts. Returns those to each request.
    fn read(state: &mut State, [first, second]: [&[u8]; 2]) -> RedisResult<Vec<String>> {
        let mut answered = Vec::new();
        for part in [first, second] {
            state.input[state.filled..state.filled + part.len()].copy_from_slice(part);
            state.filled += part.len();
            let mut taken = 0;
            while let Some(length) = state.next_replies(&mut taken)? {
                let replies = state.input[taken..taken + length].to_vec();
                answered.push(String::from_utf8(replies).unwrap());
                taken += length;
                if state.waiting.pop_front().is_none() {
                    return Err(broken());
                }
            }
            state.input.copy_within(taken..state.filled, 0);
            state.filled -= taken;
        }
        Ok(answered)
    }

    #[test]
    fn messages_between_the_replies_of_a_batch_are_delivered_once_wherever_the_stream_is_cut() {
        let claims = claims(2);
        let parts = [":0\r\n", "_\r\n", "$3\r\nabc\r\n", ":7\r\n", "*2\r\n_\r\n_\r\n"];
        let between = |at: usize| message(&at.to_string()) + STRANGE + SUBSCRIBED;
        let stream: String = parts
            .iter()
            .enumerate()
            .map(|(at, reply)| between(at) + reply)
            .collect();
        let stream = stream + &message("5") + "+PONG\r\n" + &message("6");
        for cut in 0..=stream.len() {
            let mut state = state();
            for claim in &claims {
                let batch = state.batch_for(Kind::Acquire, Some(&claim.owner));
                std::mem::forget(batch.add_acquisition(&Layout::new("lock:", true), claim));
            }
            state.waiting.clear();
            state.seal();
            state.waiting.retain(|asked| matches!(asked, InFlight::Batch(_)));
            state.wait(Single::Call(oneshot::channel().0));
            let (first, second) = stream.as_bytes().split_at(cut);
            let answered = read(&mut state, [first, second]).unwrap();
            assert_eq!(answered, [parts.concat(), "+PONG\r\n".to_owned()], "{cut}");
            assert_eq!(messages(&mut state), ["0", "1", "2", "3", "4", "5", "6"], "{cut}");
            assert_eq!((state.filled, state.waiting.len()), (0, 0));
        }
    }

    #[test]
    fn a_reply_that_no_request_has_caused_is_an_error_and_a_push_is_not() {
        let mut state = state();
        let pushes = STRANGE.to_owned() + SUBSCRIBED + &message("1");
        assert!(read(&mut state, [pushes.as_bytes(), b""]).unwrap().is_empty());
        assert_eq!(messages(&mut state), ["1"]);
        state.channel = None;
        assert!(read(&mut state, [pushes.as_bytes(), b""]).unwrap().is_empty());
        assert!(messages(&mut state).is_empty(), "without a subscription");
        assert!(read(&mut state, [b"+OK\r\n", b""]).is_err());
    }

    #[test]
    fn a_subscription_is_confirmed_by_its_own_answer_only() {
        for (hello, answer, is_confirmed) in [
            ("%0\r\n", SUBSCRIBED, Some(true)),
            ("%0\r\n", "-NOPERM no\r\n", Some(false)),
            ("%0\r\n", "+OK\r\n", Some(false)),
            ("-NOPROTO no\r\n", "", None),
            ("*0\r\n", "", None),
        ] {
            let mut state = state();
            // Not asked for.
            assert!(read(&mut state, [SUBSCRIBED.as_bytes(), b""]).unwrap().is_empty());
            state.answer(Single::Hello, resp::value(hello.as_bytes()).unwrap());
            let command = String::from_utf8(state.out.clone()).unwrap();
            assert_eq!(command.contains("SUBSCRIBE"), is_confirmed.is_some(), "{hello}");
            if let Some(is_confirmed) = is_confirmed {
                let channel = |state: &State| state.channel.as_ref().unwrap().is_confirmed;
                assert!(!channel(&state));
                let answered = read(&mut state, [message("1").as_bytes(), answer.as_bytes()]).unwrap();
                assert_eq!(answered, [answer]);
                state.answer(Single::Subscribe, resp::value(answer.as_bytes()).unwrap());
                assert_eq!(channel(&state), is_confirmed, "{answer}");
            } else {
                assert!(state.waiting.is_empty());
            }
        }
    }
}
