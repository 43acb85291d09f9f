//! Removes the requests of callers that left from what the socket has not taken yet.

use std::collections::VecDeque;

use redis::RedisResult;

use super::in_flight::InFlight;
use super::pipeline::Batch;
use super::reply_sink::ReplyTo;
use super::resp;
use super::state::State;

impl State {
    /// Removes the requests of callers that left, unless they are written, or partly written.
    ///
    /// # Behavior
    /// The output has no index of its requests, because this is rare: their lengths are read from the bytes.
    ///
    /// # Errors
    /// When the output does not consist of commands.
    pub(super) fn remove_unsent(&mut self) -> RedisResult<()> {
        let mut starts = Vec::new();
        let mut at = 0;
        while let Some(length) = resp::length(&self.out[at..])?.filter(|length| *length > 0) {
            starts.push(at);
            at += length;
        }
        // The last requests that wait for replies are those in the output.
        let (mut first, mut command) = (self.waiting.len(), starts.len());
        while first > 0 {
            let before = command.checked_sub(self.waiting[first - 1].commands());
            match before {
                Some(before) if starts.get(before).is_none_or(|start| *start >= self.written) => command = before,
                _ => break,
            }
            first -= 1;
        }
        let unsent = self.waiting.split_off(first);
        let bytes = starts
            .get(command)
            .map_or(Vec::new(), |start| self.out.split_off(*start));
        self.keep_wanted(unsent, &bytes)
    }

    /// Appends the requests whose callers have not left.
    fn keep_wanted(&mut self, requests: VecDeque<InFlight>, mut bytes: &[u8]) -> RedisResult<()> {
        for asked in requests {
            let length = resp::length_of(bytes, asked.commands())?.unwrap_or(bytes.len());
            let (request, rest) = bytes.split_at(length);
            bytes = rest;
            match asked {
                InFlight::Single(asked) if asked.is_gone() => self.discard(asked.is_attempt, asked.reply_to),
                InFlight::Batch(sent) if sent.has_cancelled() => {
                    let is_attempt = sent.kind.is_attempt();
                    let (mut batch, left) = Batch::restore(sent, request)?;
                    for reply_to in left {
                        self.discard(is_attempt, reply_to);
                    }
                    if !batch.is_empty() {
                        self.waiting.push_back(InFlight::Batch(batch.write(&mut self.out)));
                    }
                }
                asked => {
                    self.out.extend_from_slice(request);
                    self.waiting.push_back(asked);
                }
            }
        }
        Ok(())
    }

    /// Accounts for a call that was removed before it was sent. It receives no reply.
    fn discard(&mut self, is_attempt: bool, reply_to: ReplyTo) {
        self.under_way -= 1;
        if is_attempt {
            self.attempts.add_permits(1);
        }
        if let ReplyTo::Sink(handle) = reply_to {
            handle.discard();
            // A waiting call records that itself.
            self.health.cancelled();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};
    use std::task::{Context, Waker};
    use std::time::Duration;

    use redis::Value;
    use tokio::sync::oneshot;

    use super::super::call::Request;
    use super::super::in_flight::Single;
    use super::super::in_flight::tests::{RELEASED, ask, claims, state};
    use super::super::reply_sink::{ReplyHandle, ReplySink};
    use super::*;
    use crate::clock::Moment;
    use crate::engine::redis::keys::Layout;
    use crate::model::Claim;

    /// Returns what a state writes for some requests.
    fn output(fill: impl FnOnce(&mut State)) -> String {
        let mut state = state();
        fill(&mut state);
        state.seal();
        String::from_utf8(state.out).unwrap()
    }

    fn text(state: &State) -> String {
        String::from_utf8(state.out.clone()).unwrap()
    }

    fn one(state: &mut State, word: &str) -> oneshot::Receiver<RedisResult<Value>> {
        let (reply_to, reply) = ReplyTo::call();
        state.seal();
        resp::write(&mut state.out, &[word]);
        let is_attempt = word == "EVALSHA";
        state.wait(Single {
            is_attempt,
            ..Single::new(reply_to)
        });
        reply
    }

    #[test]
    fn what_is_partly_written_stays_and_the_rest_of_the_callers_that_left_does_not() {
        let mut state = state();
        let [first, second, third] = ["first", "second", "third"].map(|word| one(&mut state, word));
        state.written = 1;
        drop((first, second));
        state.remove_unsent().unwrap();
        let expected = output(|state| ["first", "third"].into_iter().for_each(|word| drop(one(state, word))));
        assert_eq!(text(&state), expected);
        assert_eq!((state.written, state.waiting.len(), state.under_way), (1, 2, 2));
        // All of the first request is written, and its reply was read: it does not wait any more.
        state.written = state.out.len() / 2;
        state.waiting.pop_front();
        drop(third);
        state.remove_unsent().unwrap();
        assert_eq!((state.waiting.len(), state.out.len() > state.written), (0, false));
    }

    #[test]
    fn an_attempt_is_removed_from_the_commands_that_it_shares_with_others() {
        for request in [Some(Request::Acquire), Some(Request::Check), None] {
            let claims = claims(3);
            let add = |state: &mut State, claim: &Claim| match &request {
                Some(request) => ask(state, claim, request),
                None => one(state, "EVALSHA"),
            };
            let mut state = state();
            let mut outcomes: Vec<_> = claims.iter().map(|claim| add(&mut state, claim)).collect();
            state.seal();
            drop(outcomes.remove(1));
            state.remove_unsent().unwrap();
            assert_eq!(state.attempts.available_permits(), 1);
            let expected = output(|state| {
                // The callers wait.
                [0, 2]
                    .into_iter()
                    .for_each(|i| std::mem::forget(add(state, &claims[i])));
            });
            assert_eq!(text(&state), expected);
            assert_eq!(
                (state.waiting.iter().map(InFlight::commands).sum(), state.under_way),
                (expected.matches('*').count(), 2)
            );
            drop(outcomes);
            state.remove_unsent().unwrap();
            assert_eq!(
                (text(&state), state.waiting.len(), state.under_way),
                (String::new(), 0, 0)
            );
        }
    }

    #[test]
    fn an_attempt_whose_caller_left_before_it_was_put_together_is_not_written() {
        let (claims, mut state) = (claims(2), state());
        // A socket that takes nothing.
        state.io = None;
        drop(ask(&mut state, &claims[0], &Request::Acquire));
        state.has_left = true;
        let _waits = ask(&mut state, &claims[1], &Request::Acquire);
        state.write(&mut Context::from_waker(Waker::noop())).unwrap();
        state.seal();
        let expected = output(|state| std::mem::forget(ask(state, &claims[1], &Request::Acquire)));
        assert_eq!((text(&state), state.under_way), (expected, 1));
    }

    #[test]
    fn releases_and_subscriptions_whose_callers_left_are_sent() {
        let (claims, mut state) = (claims(1), state());
        drop(ask(&mut state, &claims[0], &RELEASED));
        state.seal();
        resp::write(&mut state.out, &["SUBSCRIBE", "to"]);
        let subscription = Some(("SUBSCRIBE", "to".to_owned()));
        state.wait(Single {
            subscription,
            ..Single::new(ReplyTo::call().0)
        });
        let before = text(&state);
        state.remove_unsent().unwrap();
        assert_eq!((text(&state), state.under_way), (before, 2));
    }

    /// Counts its replies. Its odd requests are cancelled.
    #[derive(Default)]
    struct Odd(Mutex<usize>);

    impl ReplySink for Odd {
        fn on_reply(self: Arc<Self>, _: usize, _: RedisResult<Value>) {
            *self.0.lock().unwrap() += 1;
        }

        fn is_cancelled(&self, number: usize) -> bool {
            number % 2 == 1
        }
    }

    #[test]
    fn a_vote_of_an_ended_attempt_is_removed_without_a_reply() {
        let (claims, odd) = (claims(3), Arc::<Odd>::default());
        let sink = |number| ReplyTo::Sink(ReplyHandle::new(odd.clone(), number));
        let add = |state: &mut State, number: usize| {
            state.health.sent(Moment::now());
            let (value, floor) = ("value", 7);
            let request = Request::Vote { value, floor };
            state.add(&Layout::new("lock:", true), &claims[number], &request, sink(number));
        };
        let tell = |state: &mut State, number: usize| {
            state.seal();
            state.health.sent(Moment::now());
            resp::write(&mut state.out, &["EVALSHA"]);
            state.wait(Single::new(sink(number)));
        };
        let mut state = state();
        (0..3).for_each(|number| add(&mut state, number));
        (2..4).for_each(|number| tell(&mut state, number));
        state.remove_unsent().unwrap();
        let expected = output(|state| {
            [0, 2].into_iter().for_each(|number| add(state, number));
            tell(state, 2);
            // Each receives an error in place of its reply.
            std::mem::forget(std::mem::take(&mut state.waiting));
        });
        assert_eq!(text(&state), expected);
        assert_eq!(
            (state.under_way, state.waiting.len(), *odd.0.lock().unwrap()),
            (3, 2, 0)
        );
        let mut alone = super::super::in_flight::tests::state();
        add(&mut alone, 1);
        alone.seal();
        assert!(alone.health.is_silent(Duration::ZERO));
        alone.remove_unsent().unwrap();
        assert!(!alone.health.is_silent(Duration::ZERO), "the vote has no reply");
    }
}
