//! The buffers of a fast path, and its requests that wait for replies.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, ServerError, Value};
use tokio::sync::Semaphore;

use super::in_flight::pushes::Channel;
use super::in_flight::{InFlight, Single};
use super::pipeline::{Batch, Kind};
use super::record::{Record, Records};
use crate::clock::Moment;
use crate::engine::redis::connection::liveness::Health;
use crate::engine::redis::error::passes;
use crate::engine::redis::keys::Layout;
use crate::engine::redis::scripts::RECORD;
use crate::model::OwnerToken;

/// How much is read at once, unless a reply is longer.
pub(super) const CHUNK: usize = 64 * 1024;
/// How long plain commands may draw fencing tokens after a script has raised the counter to the server's clock.
const SEEDED_FOR: Duration = Duration::from_secs(1);
/// The interval at which refused records are sent again, and the largest number of them.
const REPEAT_EVERY: Duration = Duration::from_secs(1);
const MOST_REFUSED: usize = 4096;

pub(super) struct State {
    pub(super) channel: Option<Channel>,
    pub(super) out: Vec<u8>,
    /// How much of `out` is written.
    pub(super) written: usize,
    /// A caller was dropped without a reply. Its request may be in `out`.
    pub(super) has_left: bool,
    /// Input that was read and not handled yet, up to `filled`.
    pub(super) input: Vec<u8>,
    pub(super) filled: usize,
    pub(super) waiting: VecDeque<InFlight>,
    /// Permits for attempts to acquire.
    attempts: Arc<Semaphore>,
    pub(super) health: Arc<Health>,
    /// The batches that are being built, in the order of their output.
    batches: [Batch; Kind::ALL.len()],
    /// The number of calls without a reply.
    pub(super) under_way: usize,
    /// The records that are not written yet. A release removes the one of its lease.
    pub(super) records: Records,
    /// When the last script was sent that has raised the counter of fencing tokens to the server's clock.
    pub(super) seeded: Option<Moment>,
    /// Records that the server refused for now (out of memory, busy, a full disk), and when they were last sent.
    pub(super) refused_records: (Vec<Cmd>, Moment),
    /// Records that were in flight when the fast path ended.
    pub(super) lost_records: Vec<Cmd>,
    /// When the oldest call began to wait, or when the last reply arrived.
    pub(super) since: Moment,
}

impl State {
    pub(super) fn new(attempts: Arc<Semaphore>, health: Arc<Health>) -> Self {
        State {
            channel: None,
            attempts,
            health,
            out: Vec::with_capacity(4096),
            written: 0,
            has_left: false,
            input: vec![0; CHUNK],
            filled: 0,
            waiting: VecDeque::new(),
            batches: Kind::ALL.map(Batch::new),
            under_way: 0,
            records: Records::default(),
            refused_records: (Vec::new(), Moment::now()),
            lost_records: Vec::new(),
            seeded: None,
            since: Moment::now(),
        }
    }

    /// Whether there is nothing to send and no reply to wait for.
    pub(super) fn is_idle(&self) -> bool {
        self.under_way == 0 && self.records.is_empty() && self.refused_records.0.is_empty()
    }

    /// Whether a script has raised the counter of fencing tokens to the server's clock within [`SEEDED_FOR`].
    pub(super) fn is_seeded(&self) -> bool {
        self.seeded.is_some_and(|last| last.elapsed() < SEEDED_FOR)
    }

    /// Adds the receiver of a reply.
    pub(super) fn wait(&mut self, asked: Single) {
        self.under_way += 1;
        self.waiting.push_back(asked.into());
    }

    /// Returns the batch that a call of this kind joins.
    pub(super) fn batch_for(&mut self, kind: Kind, owner: Option<&OwnerToken>) -> &mut Batch {
        // A release follows the earlier requests of its owner. A second release of one owner finds nothing, which one script
        // for both could not report.
        let has = |owner| self.batches.iter().any(|batch| batch.has(owner));
        let is_behind = kind == Kind::Release && owner.is_some_and(has);
        let is_other = |batch: &&Batch| !batch.is_empty() && (batch.kind() == Kind::Script) != (kind == Kind::Script);
        if is_behind || self.batches.iter().any(|batch| is_other(&batch)) {
            self.seal();
        }
        self.under_way += 1;
        &mut self.batches[kind as usize]
    }

    /// Closes the batches: later requests are executed after them.
    pub(super) fn seal(&mut self) {
        for index in 0..self.batches.len() {
            let removed = self.batches[index].remove_cancelled();
            self.removed(Kind::ALL[index], removed);
            let batch = &mut self.batches[index];
            if !batch.is_empty() {
                let sent = batch.write(&mut self.out);
                self.waiting.push_back(InFlight::Batch(sent));
            }
        }
    }

    /// Accounts for calls that were removed before they were sent.
    pub(super) fn removed(&mut self, kind: Kind, count: usize) {
        self.under_way -= count;
        if kind.is_attempt() {
            self.attempts.add_permits(count);
        }
        if kind == Kind::Vote {
            // A waiting call records that itself.
            (0..count).for_each(|_| self.health.cancelled());
        }
    }

    /// Returns the size of the batches in bytes.
    pub(super) fn unsealed(&self) -> usize {
        self.batches.iter().map(Batch::size).sum()
    }

    /// Records that the server does not know the release script.
    pub(super) fn is_unknown(&mut self) {
        self.batches[Kind::Release as usize].is_unknown();
    }

    pub(super) fn answer(&mut self, asked: Single, reply: Value) {
        // The receiver may have been dropped.
        match asked {
            Single::Call(sender) => {
                let _ = sender.send(Ok(reply));
            }
            Single::Hello => self.subscribe_after_hello(&reply),
            Single::Subscribe => {
                if let Some(channel) = &mut self.channel {
                    channel.is_confirmed = matches!(reply, Value::Push { .. });
                }
            }
            Single::Record(call) => {
                let Value::ServerError(error) = reply else { return };
                if error.kind() == Some(redis::ServerErrorKind::NoScript) {
                    // The first of many contains the text, which costs the server most of the work.
                    let is_source_sent = self
                        .waiting
                        .iter()
                        .any(|asked| matches!(asked, InFlight::Single(Single::Source(_))));
                    self.seal();
                    if is_source_sent {
                        call.write_packed_command(&mut self.out);
                        self.wait(Single::Record(call));
                    } else {
                        RECORD.with_source(&call).write_packed_command(&mut self.out);
                        self.wait(Single::Source(call));
                    }
                } else {
                    self.refused(*call, error);
                }
            }
            Single::Sink(handle) => handle.send(reply.extract_error()),
            Single::Source(call) => {
                if let Value::ServerError(error) = reply {
                    self.refused(*call, error);
                }
            }
        }
    }

    /// Keeps a record for later if the error is temporary.
    fn refused(&mut self, call: Cmd, error: ServerError) {
        let (calls, since) = &mut self.refused_records;
        if passes(&error.into()) && calls.len() < MOST_REFUSED {
            if calls.is_empty() {
                *since = Moment::now();
            }
            calls.push(call);
        }
    }

    /// Writes records to the output.
    pub(super) fn write_records(&mut self, records: impl IntoIterator<Item = Record>, layout: &Layout) {
        let mut records = records.into_iter().peekable();
        if records.peek().is_some() {
            self.seal();
        }
        for record in records {
            let call = record.call(layout);
            call.write_packed_command(&mut self.out);
            self.wait(Single::Record(Box::new(call)));
        }
    }

    /// Takes the records that are not known to be stored.
    pub(super) fn take_records(&mut self, layout: &Layout) -> Vec<Cmd> {
        let mut calls = std::mem::take(&mut self.lost_records);
        calls.append(&mut self.refused_records.0);
        calls.extend(self.records.take_all().iter().map(|record| record.call(layout)));
        calls
    }

    /// Sends the refused records again after a while.
    pub(super) fn repeat_records(&mut self) {
        let (calls, since) = &mut self.refused_records;
        if calls.is_empty() || since.elapsed() < REPEAT_EVERY {
            return;
        }
        *since = Moment::now();
        let calls = std::mem::take(calls);
        self.seal();
        for call in calls {
            call.write_packed_command(&mut self.out);
            self.wait(Single::Record(Box::new(call)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::in_flight::tests::{RELEASE, claims};
    use super::*;
    use crate::model::Claim;

    fn take(state: &mut State, claim: &Claim) {
        let batch = state.batch_for(Kind::Acquire, Some(&claim.owner));
        // The caller waits.
        std::mem::forget(batch.add_acquisition(&Layout::new("lock:", true), claim));
    }

    fn free(state: &mut State, claim: &Claim) {
        let batch = state.batch_for(Kind::Release, Some(&claim.owner));
        drop(batch.add_release(&Layout::new("lock:", true), &RELEASE, claim, Some("process")));
    }

    /// Returns the output as its verbs and owners.
    fn written(state: &State, claims: &[Claim]) -> Vec<String> {
        let text = String::from_utf8(state.out.clone()).unwrap();
        let verbs = ["EVAL", "EVALSHA", "EXISTS", "SET", "INCRBY", "MGET"];
        let name = |word: &str| {
            let owner = claims.iter().position(|claim| word.starts_with(claim.owner.as_str()));
            owner
                .map(|owner| owner.to_string())
                .or_else(|| verbs.contains(&word).then(|| word.to_owned()))
        };
        text.split("\r\n").filter_map(name).collect()
    }

    fn state() -> State {
        State::new(Arc::new(Semaphore::new(0)), Arc::new(Health::new()))
    }

    fn knows(mut state: State, claim: &Claim) -> State {
        free(&mut state, claim);
        state.seal();
        state.out.clear();
        state.waiting.clear();
        state.under_way = 0;
        state
    }

    #[test]
    fn releases_go_out_first() {
        let claims = claims(4);
        let mut state = knows(state(), &claims[0]);
        for i in 0..2 {
            take(&mut state, &claims[i]);
            free(&mut state, &claims[2 + i]);
        }
        assert!(state.unsealed() > 0 && state.waiting.is_empty());
        state.seal();
        let expected = ["EVALSHA", "2", "3", "EXISTS", "SET", "0", "SET", "1", "INCRBY", "MGET"];
        assert_eq!(written(&state, &claims), expected);
        assert_eq!((state.waiting.len(), state.under_way, state.unsealed()), (2, 4, 0));
    }

    #[test]
    fn a_release_goes_behind_what_its_owner_has_asked_for() {
        let claims = claims(2);
        let mut state = knows(state(), &claims[0]);
        take(&mut state, &claims[0]);
        take(&mut state, &claims[1]);
        free(&mut state, &claims[1]);
        state.seal();
        let expected = ["EXISTS", "SET", "0", "SET", "1", "INCRBY", "MGET", "EVALSHA", "1"];
        assert_eq!(written(&state, &claims), expected);
        // A second release of one owner belongs to the next script.
        state.out.clear();
        for claim in [&claims[0], &claims[1], &claims[0]] {
            free(&mut state, claim);
        }
        state.seal();
        assert_eq!(written(&state, &claims), ["EVALSHA", "0", "1", "EVALSHA", "0"]);
    }

    #[test]
    fn the_text_of_the_script_is_sent_at_first_and_when_the_server_does_not_know_it() {
        let (claims, mut state) = (claims(1), state());
        let mut verbs = Vec::new();
        for unknown in [false, false, true, false] {
            if unknown {
                state.is_unknown();
            }
            free(&mut state, &claims[0]);
            state.seal();
            verbs.extend(written(&state, &claims).into_iter().step_by(2));
            state.out.clear();
        }
        assert_eq!(verbs, ["EVAL", "EVALSHA", "EVAL", "EVALSHA"]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_record_that_the_server_refused_for_now_is_sent_again() {
        for (line, is_repeated) in [
            ("-OOM command not allowed\r\n", true),
            ("-BUSY Redis is busy\r\n", true),
            ("-MISCONF no disk\r\n", true),
            ("-NOPERM no\r\n", false),
        ] {
            let mut state = state();
            let refused = redis::parse_redis_value(line.as_bytes()).unwrap();
            state.answer(Single::Record(Box::new(redis::cmd("EVALSHA"))), refused);
            state.repeat_records();
            assert!(state.out.is_empty(), "not at once");
            assert_eq!(state.is_idle(), !is_repeated, "the watchdog stays awake for it");
            tokio::time::advance(REPEAT_EVERY).await;
            state.repeat_records();
            assert_eq!(!state.out.is_empty(), is_repeated, "{line}");
            assert_eq!(state.waiting.len(), usize::from(is_repeated));
        }
    }
}
