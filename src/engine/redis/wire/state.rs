//! The buffers of a connection, and its requests that wait for replies.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Semaphore;

use super::call::Request;
use super::in_flight::pushes::Push;
use super::in_flight::{InFlight, Single};
use super::pipeline::{Batch, Kind};
use super::reply_sink::ReplyTo;
use crate::clock::Moment;
use crate::engine::core::stream::Replies;
use crate::engine::redis::connection::liveness::Health;
use crate::engine::redis::keys::Layout;
use crate::model::Claim;

/// How much is read at once, unless a reply is longer.
pub(super) const CHUNK: usize = 64 * 1024;
/// The longest reply, in bytes. A page of `list` is far shorter.
pub(super) const LONGEST: usize = 512 << 20;
/// How long plain commands may draw fencing tokens after a script has raised the counter to the server's clock.
const SEEDED_FOR: Duration = Duration::from_secs(1);

/// A stream to a server, with TLS or without.
pub(in super::super) trait Io: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

/// A stream on which the login is complete.
pub(in super::super) struct Opened {
    pub(in super::super) io: Box<dyn Io>,
    /// Counts the requests without a reply, for the event loop.
    pub(in super::super) replies: Replies,
    /// How many records its TLS session allows.
    pub(in super::super) tls_records: u64,
    /// The major version of the server.
    pub(in super::super) version: Option<u32>,
}

/// What wakes a task.
#[derive(Default)]
pub(super) struct Wakeup {
    /// `None` before its first poll.
    waker: Option<Waker>,
    /// It will be polled.
    is_woken: bool,
}

impl Wakeup {
    /// Records a poll.
    pub(super) fn begin_poll(&mut self, context: &Context<'_>) {
        self.is_woken = false;
        match &mut self.waker {
            Some(waker) => waker.clone_from(context.waker()),
            None => self.waker = Some(context.waker().clone()),
        }
    }

    pub(super) fn wake(&mut self) {
        if !std::mem::replace(&mut self.is_woken, true)
            && let Some(waker) = &self.waker
        {
            waker.wake_by_ref();
        }
    }
}

pub(super) struct State {
    /// `None` after the end.
    pub(super) io: Option<Box<dyn Io>>,
    pub(super) driver: Wakeup,
    pub(super) flusher: Wakeup,
    pub(super) replies: Replies,
    /// The pushes that were read and not passed on yet.
    pub(super) pushes: Vec<Push>,
    pub(super) out: Vec<u8>,
    /// How much of `out` is written.
    pub(super) written: usize,
    /// How many records the TLS session still allows. At 0 the connection is replaced.
    pub(super) tls_records: u64,
    /// The socket did not take all of the last write.
    pub(super) is_blocked: bool,
    /// A caller was dropped without a reply. Its request may be in `out`.
    pub(super) has_left: bool,
    /// Input that was read and not handled yet, up to `filled`.
    pub(super) input: Vec<u8>,
    pub(super) filled: usize,
    pub(super) waiting: VecDeque<InFlight>,
    /// Permits for attempts to acquire.
    pub(super) attempts: Arc<Semaphore>,
    pub(super) health: Arc<Health>,
    /// The batches that are being built, in the order of their output.
    batches: [Batch; Kind::ALL.len()],
    /// The number of calls without a reply.
    pub(super) under_way: usize,
    /// How many of the last ones were sent by other threads than the event loop's.
    pub(super) of_others: usize,
    /// When the last script was sent that has raised the counter of fencing tokens to the server's clock.
    pub(super) seeded: Option<Moment>,
}

impl State {
    pub(super) fn new(opened: Opened, attempts: Arc<Semaphore>, health: Arc<Health>) -> Self {
        State {
            io: Some(opened.io),
            driver: Wakeup::default(),
            flusher: Wakeup::default(),
            replies: opened.replies,
            pushes: Vec::new(),
            attempts,
            health,
            out: Vec::with_capacity(4096),
            written: 0,
            tls_records: opened.tls_records,
            is_blocked: false,
            has_left: false,
            input: vec![0; CHUNK],
            filled: 0,
            waiting: VecDeque::new(),
            batches: Kind::ALL.map(Batch::new),
            under_way: 0,
            of_others: 0,
            seeded: None,
        }
    }

    /// Removes the stream, whose drop closes the socket, and announces the end to the server. Not with TLS that still holds requests: it
    /// would send them first, although their callers receive an error.
    pub(super) fn take_io(&mut self) -> Option<Box<dyn Io>> {
        let mut io = self.io.take()?;
        if !self.is_blocked {
            // Without the announcement, the server finds the end of the connection.
            let _ = Pin::new(&mut *io).poll_shutdown(&mut Context::from_waker(Waker::noop()));
        }
        Some(io)
    }

    /// Writes what the socket takes now. If that fails, the driver, which is woken, finds the error.
    pub(super) fn write_early(&mut self) {
        if let Some(driver) = self.driver.waker.take() {
            let written = self.write(&mut Context::from_waker(&driver));
            self.driver.waker = Some(driver);
            if written.is_err() {
                self.driver.wake();
            }
        }
    }

    /// Whether a script has raised the counter of fencing tokens to the server's clock within [`SEEDED_FOR`].
    pub(super) fn is_seeded(&self) -> bool {
        self.seeded.is_some_and(|last| last.elapsed() < SEEDED_FOR)
    }

    /// Reports the calls without a reply to the event loop.
    pub(super) fn count_replies(&self) {
        self.replies.set_of_others(self.of_others);
        self.replies.set(self.under_way);
    }

    /// Adds the receiver of a reply.
    pub(super) fn wait(&mut self, asked: Single) {
        self.under_way += 1;
        self.waiting.push_back(InFlight::Single(asked));
    }

    /// Adds a request to the batch of its kind.
    pub(super) fn add(&mut self, layout: &Layout, claim: &Claim, request: &Request<'_>, reply_to: ReplyTo) {
        let kind = request.kind();
        // A release follows the earlier requests of its owner. A second release of one owner finds nothing, which one script
        // for both could not report.
        if kind == Kind::Release && self.batches.iter().any(|batch| batch.has(&claim.owner)) {
            self.seal();
        }
        self.under_way += 1;
        self.batches[kind as usize].add(layout, claim, request, reply_to);
    }

    /// Closes the batches: later requests are executed after them.
    pub(super) fn seal(&mut self) {
        for batch in self.batches.iter_mut().filter(|batch| !batch.is_empty()) {
            self.waiting.push_back(InFlight::Batch(batch.write(&mut self.out)));
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
}

#[cfg(test)]
mod tests {
    use super::super::in_flight::tests::{RELEASED, ask, claims, state};
    use super::*;

    fn take(state: &mut State, claim: &Claim) {
        // The caller waits.
        std::mem::forget(ask(state, claim, &Request::Acquire));
    }

    fn free(state: &mut State, claim: &Claim) {
        drop(ask(state, claim, &RELEASED));
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
}
