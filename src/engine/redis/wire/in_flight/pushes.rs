//! Pushes: the messages of channels, which the server sends before and between the replies, and the replies to commands about
//! subscriptions.

use redis::RedisResult;

use super::super::resp::{self, Reader};
use super::super::state::State;
use super::{InFlight, Single};

/// A push that no request has caused.
#[derive(Debug, PartialEq, Eq)]
pub(in super::super::super) enum Push {
    Message {
        channel: Vec<u8>,
        message: Vec<u8>,
    },
    /// The node of a cluster has ended the subscription to a channel, whose slot moves.
    Ended {
        channel: Vec<u8>,
    },
}

impl Push {
    /// Reads a push. `None`: it is of no interest.
    fn read(push: &[u8]) -> Option<Self> {
        let mut fields = Reader::elements(push)?;
        let mut next = || fields.next().ok().and_then(resp::bulk);
        let (kind, channel) = (next()?, next()?.to_vec());
        match kind {
            b"message" | b"smessage" => {
                let message = next()?.to_vec();
                Some(Push::Message { channel, message })
            }
            b"sunsubscribe" => Some(Push::Ended { channel }),
            _ => None,
        }
    }
}

impl Single {
    /// Whether a push is the reply to this request.
    fn is_answered_by(&self, push: &[u8]) -> bool {
        let (Some((verb, name)), Some(mut fields)) = (&self.subscription, Reader::elements(push)) else {
            return false;
        };
        let mut next = || fields.next().ok().and_then(resp::bulk);
        next().is_some_and(|kind| kind.eq_ignore_ascii_case(verb.as_bytes())) && next() == Some(name.as_bytes())
    }
}

impl State {
    /// Returns the length of the replies to the next request. Removes the pushes before and between them, and keeps those that are of
    /// interest. `None`: the replies are incomplete.
    pub(in super::super) fn next_replies(&mut self, taken: &mut usize) -> RedisResult<Option<usize>> {
        let mut left = self.waiting.front().map_or(1, InFlight::commands);
        let has_end_mark = matches!(self.waiting.front(), Some(InFlight::Single(asked)) if asked.has_end_mark());
        let mut at = *taken;
        while left > 0 {
            let Some(length) = resp::length(&self.input[at..self.filled])? else {
                return Ok(None);
            };
            let end = at + length;
            let reply = &self.input[at..end];
            let is_answer = |asked: &InFlight| matches!(asked, InFlight::Single(asked) if asked.is_answered_by(reply));
            let is_answer = self.waiting.front().is_some_and(is_answer);
            if !resp::is_push(reply) || (is_answer && !has_end_mark) {
                left = match (has_end_mark, reply[0], left) {
                    (false, ..) | (true, b'-', 2) => left - 1,
                    (true, b'%', _) => 0,
                    _ => return Err(resp::nonsense()),
                };
                at = end;
                continue;
            }
            if !is_answer {
                self.pushes.extend(Push::read(reply));
            }
            if at == *taken {
                (at, *taken) = (end, end);
            } else {
                self.input.copy_within(end..self.filled, at);
                self.filled -= length;
            }
        }
        Ok(Some(at - *taken))
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::call::Request;
    use super::super::super::reply_sink::ReplyTo;
    use super::super::UNSUBSCRIBE_SHARD;
    use super::super::tests::{ask, claims, state};
    use super::*;
    use crate::engine::redis::error::broken;

    /// Pushes of other shapes.
    const STRANGE: &str = ">1\r\n$7\r\nmessage\r\n>0\r\n>2\r\n$7\r\nmessage\r\n$2\r\nto\r\n\
                           >3\r\n$7\r\nmessage\r\n$2\r\nto\r\n:1\r\n>2\r\n*1\r\n:1\r\n_\r\n>2\r\n$10\r\ninvalidate\r\n_\r\n";
    const SUBSCRIBED: &str = ">3\r\n$9\r\nsubscribe\r\n$2\r\nto\r\n:1\r\n";

    fn message(text: &str) -> String {
        format!(">3\r\n$7\r\nmessage\r\n$2\r\nto\r\n${}\r\n{text}\r\n", text.len())
    }

    /// Returns the messages that were read.
    fn messages(state: &mut State) -> Vec<String> {
        let text = |push| match push {
            Push::Message { message, .. } => String::from_utf8(message).unwrap(),
            Push::Ended { channel } => format!("the end of {}", String::from_utf8(channel).unwrap()),
        };
        std::mem::take(&mut state.pushes).into_iter().map(text).collect()
    }

    fn call() -> Single {
        Single::new(ReplyTo::call().0)
    }

    fn subscription(verb: &'static str) -> Single {
        let subscription = Some((verb, "to".to_owned()));
        Single { subscription, ..call() }
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
                std::mem::forget(ask(&mut state, claim, &Request::Acquire));
            }
            state.seal();
            state.wait(call());
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
        assert!(read(&mut state, [b"+OK\r\n", b""]).is_err());
    }

    #[test]
    fn a_subscription_is_confirmed_by_its_own_reply_only() {
        let other = SUBSCRIBED.replace("to", "ot");
        for (before, reply) in [
            (String::new(), SUBSCRIBED),
            (message("1") + &other, SUBSCRIBED),
            (SUBSCRIBED.replace("subscribe", "psubscrib"), "-NOPERM no\r\n"),
            (message("1"), "+OK\r\n"),
        ] {
            let mut state = state();
            state.wait(subscription("SUBSCRIBE"));
            let answered = read(&mut state, [before.as_bytes(), reply.as_bytes()]).unwrap();
            assert_eq!(answered, [reply], "{before}");
        }
    }

    #[test]
    fn a_node_that_ends_a_subscription_answers_no_other_request() {
        let (ended, end) = (">3\r\n$12\r\nsunsubscribe\r\n$2\r\nto\r\n:0\r\n", "%1\r\n:1\r\n:2\r\n");
        let moved = "-MOVED 1 host:1\r\n";
        for (replies, answer) in [
            // The node ends it before it executes the command, and refuses the command or not.
            ([ended, moved, end].concat(), moved.to_owned() + end),
            ([ended, ended, end].concat(), end.to_owned()),
            ([ended, end, ended].concat(), end.to_owned()),
            ([moved, &message("2"), end].concat(), moved.to_owned() + end),
        ] {
            let stream = [ended, "+PONG\r\n", &message("1"), &replies, "+PONG\r\n"].concat();
            for cut in 0..=stream.len() {
                let mut state = state();
                state.wait(call());
                state.wait(subscription(UNSUBSCRIBE_SHARD));
                state.wait(call());
                let (first, second) = stream.as_bytes().split_at(cut);
                let answered = read(&mut state, [first, second]).unwrap();
                assert_eq!(answered, ["+PONG\r\n", &answer, "+PONG\r\n"], "{cut}");
                assert_eq!(messages(&mut state)[..2], ["the end of to", "1"]);
            }
        }
        for replies in [[moved, moved], [ended, ":1\r\n"]] {
            let mut state = state();
            state.wait(subscription(UNSUBSCRIBE_SHARD));
            assert!(read(&mut state, [replies.concat().as_bytes(), b""]).is_err());
        }
    }
}
