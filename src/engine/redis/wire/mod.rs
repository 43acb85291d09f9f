//! The protocol of a connection: requests are collected during a tick, written together, and their replies are read in order.
//!
//! # Behavior
//! Each connection has a task, the driver ([`drive`]), which the caller's event loop polls, or the runtime if there is no event
//! loop. A request is added to the output on the thread of its call, and wakes the driver. So the requests of one tick share commands
//! and packets. Replies and messages are handled where the driver reads them. A request of another thread wakes a task that only writes
//! ([`flush`]).
//!
//! The protocol is RESP3 (the Redis serialization protocol specification). The server executes the requests of a connection in the
//! order in which they were sent: a release takes effect after the attempts before it, also if their callers were dropped.

mod call;
mod driver;
#[cfg(test)]
mod hostile_peer;
mod in_flight;
mod pipeline;
mod reply_sink;
pub(super) mod resp;
#[cfg(test)]
mod resp_check;
mod state;
#[cfg(test)]
mod tests;
mod unsent;

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

use parking_lot::{Mutex, MutexGuard};
use redis::{Cmd, RedisError, RedisResult, Value};
use tokio::sync::{Semaphore, SemaphorePermit, TryAcquireError};

pub(super) use self::call::{ALONE, BatchRelease, Request};
pub(super) use self::driver::{drive, flush};
pub(super) use self::in_flight::UNSUBSCRIBE_SHARD;
pub(super) use self::in_flight::pushes::Push;
use self::in_flight::{END_MARK, Single};
pub(super) use self::reply_sink::ReplySink;
use self::reply_sink::{ReplyHandle, ReplyTo};
use self::state::State;
pub(super) use self::state::{Io, Opened};
use super::connection::liveness::{ATTEMPTS, Health};
use super::connection::request::Attempt;
use super::error::broken;
use super::keys::Layout;
use crate::clock::Moment;
use crate::event_loop::EventLoop;
use crate::model::Claim;

/// Output is written before the tick ends when it would serve a third of the calls in flight, so that the server works on it
/// meanwhile. In bytes: per call, and the lower and upper limit in total.
const EARLY: usize = 64;
const LEAST_EARLY: usize = 768;
const MOST_EARLY: usize = 6 * 1024;

/// The requests and replies of an open connection.
pub(super) struct Wire {
    state: Mutex<State>,
    has_ended: AtomicBool,
    /// The error of the socket or of TLS that ended it.
    cause: OnceLock<RedisError>,
    health: Arc<Health>,
    layout: Layout,
    event_loop: Option<Arc<dyn EventLoop>>,
    /// Whether plain commands may be used (`ops/acquire_plain.rs`).
    plain: AtomicBool,
    /// Locked while a call with the text of a script is in flight.
    loading: tokio::sync::Mutex<()>,
    /// Permits for attempts to acquire. A reply returns its permit. Closed when the connection is replaced.
    attempts: Arc<Semaphore>,
}

impl Wire {
    pub(super) fn new(
        opened: Opened,
        health: Arc<Health>,
        layout: Layout,
        event_loop: Option<Arc<dyn EventLoop>>,
    ) -> Arc<Self> {
        // `SET` with both `NX` and `GET` needs version 7.
        let plain = opened.version >= Some(7);
        let attempts = Arc::new(Semaphore::new(ATTEMPTS));
        Arc::new(Wire {
            state: Mutex::new(State::new(opened, attempts.clone(), health.clone())),
            has_ended: AtomicBool::new(false),
            cause: OnceLock::new(),
            health,
            layout,
            event_loop,
            plain: AtomicBool::new(plain),
            loading: tokio::sync::Mutex::new(()),
            attempts,
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    fn is_open(&self) -> bool {
        !self.has_ended.load(Relaxed)
    }

    /// Whether the server understands the plain commands.
    pub(super) fn is_plain(&self) -> bool {
        self.plain.load(Relaxed)
    }

    /// Whether plain commands may draw fencing tokens: a script has raised the counter to the server's clock a moment ago. So the
    /// server executes scripts, without which the lock could not be released.
    pub(super) fn is_seeded(&self) -> bool {
        self.state().is_seeded()
    }

    /// Disables plain commands.
    pub(super) fn use_scripts_only(&self) {
        self.plain.store(false, Relaxed);
    }

    /// Sends one command at the end of the tick, directly after `ASKING` if it is `asking`, and waits for its reply.
    pub(super) async fn call(&self, cmd: &Cmd, asking: bool, attempt: Attempt<'_>) -> RedisResult<Value> {
        if let Some(permit) = self.admit(attempt).await? {
            // The reply returns it.
            permit.forget();
        }
        let sent = Moment::now();
        let write = |out: &mut Vec<u8>| {
            if asking {
                resp::write(out, &["ASKING"]);
            }
            cmd.write_packed_command(out);
        };
        let request = |reply_to| Single {
            is_asking: asking,
            is_attempt: attempt.is_some(),
            ..Single::new(reply_to)
        };
        let answer = self.single(write, request).await?;
        if attempt.is_some() {
            self.note_grant(&answer, sent);
        }
        Ok(answer)
    }

    /// Sends `verb` for a channel: a command about a subscription, whose reply is a push with this name.
    pub(super) async fn change_subscription(&self, verb: &'static str, channel: &str) -> RedisResult<()> {
        let write = |out: &mut Vec<u8>| {
            resp::write(out, &[verb, channel]);
            if verb == UNSUBSCRIBE_SHARD {
                resp::write(out, &[END_MARK]);
            }
        };
        let subscription = Some((verb, channel.to_owned()));
        let reply = self.single(write, |reply_to| Single {
            subscription,
            ..Single::new(reply_to)
        });
        match reply.await? {
            Value::Push { .. } | Value::Map(_) => Ok(()),
            _ => Err(resp::nonsense()),
        }
    }

    async fn single(
        &self,
        write: impl FnOnce(&mut Vec<u8>),
        request: impl FnOnce(ReplyTo) -> Single,
    ) -> RedisResult<Value> {
        let (reply_to, reply) = ReplyTo::call();
        self.send(|state| {
            state.seal();
            write(&mut state.out);
            state.wait(request(reply_to));
        })?;
        reply.await.unwrap_or_else(|_| Err(self.broken()))?.extract_error()
    }

    /// Sends commands in one part of the output, and waits for their replies. An error of the server is a value.
    pub(super) async fn pipeline(&self, cmds: &[Cmd], attempt: Attempt<'_>) -> RedisResult<Vec<Value>> {
        let _permit = self.admit(attempt).await?;
        let mut replies = Vec::with_capacity(cmds.len());
        self.send(|state| {
            state.seal();
            for cmd in cmds {
                let (reply_to, reply) = ReplyTo::call();
                cmd.write_packed_command(&mut state.out);
                state.wait(Single::new(reply_to));
                replies.push(reply);
            }
        })?;
        let mut values = Vec::with_capacity(replies.len());
        for reply in replies {
            values.push(reply.await.unwrap_or_else(|_| Err(self.broken()))?);
        }
        Ok(values)
    }

    /// Waits until an attempt may be sent, and marks it as sent. An attempt that is dropped meanwhile is never sent. `None` for other
    /// commands.
    async fn admit(&self, attempt: Attempt<'_>) -> RedisResult<Option<SemaphorePermit<'_>>> {
        let Some(mark_sent) = attempt else { return Ok(None) };
        let permit = match self.attempts.try_acquire() {
            Ok(permit) => permit,
            Err(TryAcquireError::Closed) => return Err(self.broken()),
            // Boxed: this is rare, and the future of a call stays small.
            Err(TryAcquireError::NoPermits) => Box::pin(self.attempts.acquire()).await.map_err(|_| self.broken())?,
        };
        mark_sent();
        Ok(Some(permit))
    }

    /// Records the answer of `acquire.lua` to an attempt that was sent at `sent`: a grant has raised the counter of fencing tokens.
    pub(super) fn note_grant(&self, answer: &Value, sent: Moment) {
        if matches!(answer, Value::Int(_)) {
            let mut state = self.state();
            state.seeded = state.seeded.max(Some(sent));
        }
    }

    /// Marks that a call with the text of a script is in flight, until the guard is dropped. `None`: there is one already.
    pub(super) fn begin_load(&self) -> Option<tokio::sync::MutexGuard<'_, ()>> {
        self.loading.try_lock().ok()
    }

    /// Makes a request for the one name of a claim, in the batch of its kind in this tick.
    pub(super) async fn request(&self, claim: &Claim, request: Request<'_>) -> RedisResult<Value> {
        let mark_sent = || claim.mark_sent();
        let attempt: Attempt<'_> = if request.kind().is_attempt() {
            Some(&mark_sent)
        } else {
            None
        };
        if let Some(permit) = self.admit(attempt).await? {
            // The reply returns it.
            permit.forget();
        }
        let (reply_to, reply) = ReplyTo::call();
        self.send(|state| state.add(&self.layout, claim, &request, reply_to))?;
        reply.await.unwrap_or_else(|_| Err(self.broken()))
    }

    /// Makes a request for the one name of a claim, in the batch of its kind in this tick. The sink receives the reply.
    pub(super) fn request_to_sink(
        &self,
        sink: &Arc<dyn ReplySink>,
        number: usize,
        claim: &Claim,
        request: &Request<'_>,
    ) {
        self.send_to_sink(sink, number, |state, reply_to| {
            state.add(&self.layout, claim, request, reply_to);
        });
    }

    /// Sends a command at the end of the tick. The sink receives the reply.
    pub(super) fn call_to_sink(&self, sink: &Arc<dyn ReplySink>, number: usize, cmd: &Cmd) {
        self.send_to_sink(sink, number, |state, reply_to| {
            state.seal();
            cmd.write_packed_command(&mut state.out);
            state.wait(Single::new(reply_to));
        });
    }

    fn send_to_sink(&self, sink: &Arc<dyn ReplySink>, number: usize, fill: impl FnOnce(&mut State, ReplyTo)) {
        let reply_to = ReplyTo::Sink(ReplyHandle::new(sink.clone(), number));
        // After the end, it is dropped, and the sink receives an error.
        let _ = self.send(|state| {
            self.health.sent(Moment::now());
            fill(state, reply_to);
        });
    }

    /// Adds a request to the output, which is written at the end of the tick; a large one of the driver's thread at once.
    fn send<R>(&self, fill: impl FnOnce(&mut State) -> R) -> RedisResult<R> {
        let mut state = self.state();
        if !self.is_open() {
            return Err(self.broken());
        }
        let (is_here, before) = (self.is_here(), state.under_way);
        let result = fill(&mut state);
        if is_here {
            state.of_others = 0;
            let early = (EARLY * state.under_way).clamp(LEAST_EARLY, MOST_EARLY);
            if state.unsealed() >= early {
                state.seal();
            }
            // Not where the next write removes requests: the output seems larger than it is.
            if state.out.len() - state.written >= early && !state.has_left {
                state.write_early();
            }
        } else {
            state.of_others += state.under_way.saturating_sub(before);
        }
        self.wake(&mut state, is_here);
        Ok(result)
    }

    /// Whether the thread that polls the driver is this one.
    fn is_here(&self) -> bool {
        self.event_loop.as_ref().is_none_or(|event_loop| event_loop.is_here())
    }

    /// Wakes the task that sends the requests of this tick. `is_here` as of [`Self::is_here`].
    fn wake(&self, state: &mut State, is_here: bool) {
        state.count_replies();
        match is_here {
            true => state.driver.wake(),
            false => state.flusher.wake(),
        }
    }

    /// Refuses attempts from here on: the connection is replaced.
    pub(super) fn refuse_attempts(&self) {
        self.attempts.close();
    }

    /// Ends the connection: its calls fail, and it accepts no more.
    pub(super) fn end(&self) {
        self.has_ended.store(true, Relaxed);
        self.refuse_attempts();
        let mut state = self.state();
        state.seal();
        (state.out, state.written, state.under_way) = (Vec::new(), 0, 0);
        state.count_replies();
        let (io, waiting) = (state.take_io(), std::mem::take(&mut state.waiting));
        state.driver.wake();
        state.flusher.wake();
        drop(state);
        // Without the lock: the last owner of another connection may be among them.
        drop(waiting);
        drop(io);
    }

    /// Returns the error of the calls that it ended without a reply.
    fn broken(&self) -> RedisError {
        self.cause.get().cloned().unwrap_or_else(broken)
    }

    /// Marks that a caller was dropped without a reply. If its request has not left the process, the next write removes it.
    pub(super) fn caller_left(&self) {
        let mut state = self.state();
        state.has_left = true;
        self.wake(&mut state, self.is_here());
    }
}

impl Drop for Wire {
    /// Ends the driver, which has no reference to it.
    fn drop(&mut self) {
        let state = self.state.get_mut();
        drop(state.take_io());
        state.under_way = 0;
        state.count_replies();
        state.driver.wake();
        state.flusher.wake();
    }
}
