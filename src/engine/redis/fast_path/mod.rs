//! The fast lane: a second connection for the calls of one thread, served by that thread's own event loop.
//!
//! # Behavior
//! A call that is made on the event loop's thread is written, and its reply read, on that thread: no other thread is
//! woken, and what is asked for in one turn of the loop travels in few packets. Everything else (renewals, waiting,
//! clean-up) goes by the engine's ordinary connection on the I/O thread, and so do all calls while there is no lane: it is
//! opened in the background, and opened again when it broke.
//!
//! A thread that is blocked serves nothing. A watchdog on the I/O thread therefore looks after a lane whose calls have
//! waited for [`STALE`](watchdog::STALE), so that a grant is known (and renewed, and told of, from then on) although the thread that asked
//! is busy.
//!
//! The protocol is RESP2 (the Redis serialization protocol specification): no pushes come on this connection.

mod buffers;
mod call;
mod in_flight;
mod pipeline;
mod record;
mod reply_sink;
pub(super) mod resp;
#[cfg(test)]
mod resp_check;
mod unsent;
mod watchdog;
mod wire;

use std::net::TcpStream;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use redis::{Cmd, RedisError, RedisResult, Value};
use tokio::sync::{Notify, Semaphore, TryAcquireError, oneshot};

use self::buffers::State;
pub(super) use self::call::{ALONE, BatchRelease, Outcome};
use self::in_flight::{InFlight, Single};
use self::pipeline::{Batch, Kind};
pub(super) use self::record::Record;
use self::reply_sink::ReplyHandle;
pub(super) use self::reply_sink::ReplySink;
use self::wire::{ask, major_version};
use super::connection::liveness::{ATTEMPTS, Health};
use super::error::broken;
use super::keys::Layout;
use crate::clock::Moment;
use crate::event_loop::{EventLoop, Socket};
use crate::model::{Claim, OwnerToken};

/// What is to be sent for a third of the calls under way goes out before the turn ends, so that the server works on it
/// meanwhile: in bytes, for each call, and no less and no more than so much in all.
const EARLY: usize = 64;
const LEAST_EARLY: usize = 768;
const MOST_EARLY: usize = 6 * 1024;

/// An open lane.
pub(super) struct FastPath {
    /// No other lane of the process has the same, nor had.
    number: u64,
    socket: TcpStream,
    state: Mutex<State>,
    dead: AtomicBool,
    /// Whether the watchdog sleeps.
    asleep: AtomicBool,
    stirred: Arc<Notify>,
    health: Arc<Health>,
    /// A lane that is silent for so long while calls wait is ended. Who asked has given up by then.
    patience: Duration,
    layout: Layout,
    /// Whether acquisitions may be tried by plain commands (`plain.rs`).
    plain: AtomicBool,
    /// How many more attempts to acquire may be sent: a place is free again with the reply. Closed when the lane ends.
    attempts: Arc<Semaphore>,
}

impl FastPath {
    pub(super) const IS_SUPPORTED: bool = true;

    /// Logs in on a fresh connection, with `HELLO` first.
    pub(super) async fn open(
        mut stream: tokio::net::TcpStream,
        login: &[Cmd],
        layout: Layout,
        patience: Duration,
    ) -> RedisResult<Arc<Self>> {
        static LAST: AtomicU64 = AtomicU64::new(0);
        let mut version = None;
        for cmd in login {
            let reply = ask(&mut stream, cmd).await?.extract_error()?;
            version = version.or_else(|| major_version(&reply));
        }
        // `SET` with both `NX` and `GET` is of version 7.
        let plain = version >= Some(7);
        let socket = stream.into_std()?;
        let (attempts, health) = (Arc::new(Semaphore::new(ATTEMPTS)), Arc::new(Health::new()));
        let fast_path = Arc::new(FastPath {
            number: LAST.fetch_add(1, Relaxed) + 1,
            socket,
            state: Mutex::new(State::new(attempts.clone(), health.clone())),
            dead: AtomicBool::new(false),
            asleep: AtomicBool::new(false),
            stirred: Arc::default(),
            health,
            patience,
            layout,
            plain: AtomicBool::new(plain),
            attempts,
        });
        tokio::spawn(watchdog::watch(Arc::downgrade(&fast_path), fast_path.stirred.clone()));
        Ok(fast_path)
    }

    /// Lets an event loop poll the socket.
    pub(super) fn serve_on(self: Arc<Self>, event_loop: &dyn EventLoop) {
        event_loop.serve(self);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// What tells it from every other lane: from 1 on.
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// Whether calls may be made on it.
    pub(super) fn is_open(&self) -> bool {
        !self.dead.load(Relaxed)
    }

    /// Whether acquisitions may be tried by plain commands.
    pub(super) fn is_plain(&self) -> bool {
        self.plain.load(Relaxed)
    }

    /// From now on no acquisition is tried by plain commands.
    pub(super) fn use_scripts_only(&self) {
        self.plain.store(false, Relaxed);
    }

    /// Sends one command with the loop's next turn, and waits for its reply.
    pub(super) async fn call(&self, cmd: &Cmd) -> RedisResult<Value> {
        self.call_written(|out| cmd.write_packed_command(out)).await
    }

    /// Sends the command that `write` writes, and waits for its reply.
    pub(super) async fn call_written(&self, write: impl FnOnce(&mut Vec<u8>)) -> RedisResult<Value> {
        let (sender, reply) = oneshot::channel();
        self.send(|state| {
            state.seal();
            write(&mut state.out);
            state.wait(Single::Call(sender));
        })?;
        reply.await.unwrap_or_else(|_| Err(broken()))?.extract_error()
    }

    /// Waits until another attempt to acquire may be sent. Dropped meanwhile, the attempt is never sent.
    async fn admit(&self) -> RedisResult<()> {
        let place = match self.attempts.try_acquire() {
            Ok(place) => place,
            Err(TryAcquireError::Closed) => return Err(broken()),
            Err(TryAcquireError::NoPermits) => {
                // Boxed: this is rare, and a call's future is to stay small.
                Box::pin(self.attempts.acquire()).await.map_err(|_| broken())?
            }
        };
        place.forget();
        Ok(())
    }

    /// Sends one command of an attempt to acquire, and waits for its reply. `mark_sent` is called before it is sent.
    pub(super) async fn attempt(&self, cmd: &Cmd, mark_sent: &(dyn Fn() + Sync)) -> RedisResult<Value> {
        self.admit().await?;
        mark_sent();
        let outcome = self.send(|state| state.batch_for(Kind::Script, None).script(cmd))?;
        match outcome.await.unwrap_or_else(|_| Err(broken()))? {
            Outcome::Answer(answer) => Ok(answer),
            _ => Err(resp::nonsense()),
        }
    }

    /// Waits for the replies to all that was asked for so far, or for the end of the lane.
    pub(super) async fn settled(&self) {
        let (sender, settled) = oneshot::channel();
        {
            let mut state = self.state();
            state.seal();
            if state.waiting.is_empty() || !self.is_open() {
                return;
            }
            state.waiting.push_back(InFlight::Nothing(sender));
        }
        // The sender is dropped when it comes to the front of the queue.
        let _ = settled.await;
    }

    /// Looks whether somebody else holds a claim's one name.
    pub(super) async fn check(&self, claim: &Claim) -> RedisResult<Outcome> {
        self.admit().await?;
        claim.mark_sent();
        self.join(Kind::Check, claim, |batch| batch.look(&self.layout, claim))
            .await
    }

    /// Tries to take a claim's one name by plain commands.
    pub(super) async fn acquire(&self, claim: &Claim) -> RedisResult<Outcome> {
        self.admit().await?;
        claim.mark_sent();
        self.join(Kind::Acquire, claim, |batch| batch.take(&self.layout, claim))
            .await
    }

    /// Lets go of a claim's one name. `more` as for [`Batch::free`].
    pub(super) async fn release(
        &self,
        release: &'static BatchRelease,
        claim: &Claim,
        more: Option<&str>,
    ) -> RedisResult<Outcome> {
        self.join(Kind::Release, claim, |batch| {
            batch.free(&self.layout, release, claim, more)
        })
        .await
    }

    /// Does something together with other calls of this turn.
    async fn join(
        &self,
        kind: Kind,
        claim: &Claim,
        add: impl FnOnce(&mut Batch) -> oneshot::Receiver<RedisResult<Outcome>>,
    ) -> RedisResult<Outcome> {
        let outcome = self.send(|state| add(state.batch_for(kind, Some(&claim.owner))))?;
        outcome.await.unwrap_or_else(|_| Err(broken()))
    }

    /// Asks for a vote by plain commands, and has somebody told of the four replies, by the numbers up to `last`; or of the last
    /// alone that there is none.
    pub(super) fn vote(&self, sink: &Arc<dyn ReplySink>, last: usize, claim: &Claim, value: &str, floor: u64) {
        self.send_to_sink(sink, last, |state, handle| {
            let batch = state.batch_for(Kind::Vote, Some(&claim.owner));
            batch.vote(&self.layout, claim, value, floor, handle);
        });
    }

    /// Lets go of a claim's one name, and has somebody told of the answer.
    pub(super) fn release_to_sink(
        &self,
        sink: &Arc<dyn ReplySink>,
        number: usize,
        release: &'static BatchRelease,
        claim: &Claim,
    ) {
        self.send_to_sink(sink, number, |state, handle| {
            let batch = state.batch_for(Kind::Release, Some(&claim.owner));
            batch.release_to_sink(&self.layout, release, claim, handle);
        });
    }

    /// Sends the command that `write` writes with the loop's next turn, and has somebody told of the reply.
    pub(super) fn call_to_sink(&self, sink: &Arc<dyn ReplySink>, number: usize, write: impl FnOnce(&mut Vec<u8>)) {
        self.send_to_sink(sink, number, |state, handle| {
            state.seal();
            write(&mut state.out);
            state.wait(Single::Sink(handle));
        });
    }

    fn send_to_sink(&self, sink: &Arc<dyn ReplySink>, number: usize, fill: impl FnOnce(&mut State, ReplyHandle)) {
        let handle = ReplyHandle::new(sink.clone(), number);
        // Where the lane has ended it is dropped, which tells that there is no reply.
        let _ = self.send(|state| {
            self.health.sent(Moment::now());
            fill(state, handle);
        });
    }

    /// Whether the last token was raised as it should be.
    pub(super) fn is_seeded(&self) -> bool {
        !self.state().unseeded
    }

    /// Has something sent with the loop's next turn, or before, if that is much.
    fn send<R>(&self, fill: impl FnOnce(&mut State) -> R) -> RedisResult<R> {
        let result = {
            let mut state = self.state();
            if !self.is_open() {
                return Err(broken());
            }
            if state.under_way == 0 {
                state.since = Moment::now();
            }
            let result = fill(&mut state);
            let early = (EARLY * state.under_way).clamp(LEAST_EARLY, MOST_EARLY);
            if state.unsealed() >= early {
                state.seal();
            }
            // A write that fails leaves the rest for the end of the turn, where the failure is seen to.
            if state.out.len() - state.written >= early {
                let _ = self.write(&mut state);
            }
            result
        };
        if self.asleep.load(Relaxed) && self.asleep.swap(false, Relaxed) {
            self.stirred.notify_one();
        }
        Ok(result)
    }

    /// Has a grant written down with the end of the turn.
    pub(super) fn record_later(&self, record: Record) {
        self.state().records.insert(record.claim.owner.clone(), record);
    }

    /// A grant is about to be given back: there is nothing to write down.
    pub(super) fn forget(&self, owner: &OwnerToken) {
        self.state().records.remove(owner);
    }

    /// Has the grants written down now: what is asked for next is to find them. Answers whether there were any.
    pub(super) fn write_records(&self) -> bool {
        let mut state = self.state();
        let any = !state.records.is_empty();
        state.write_records(&self.layout);
        any
    }

    /// What was not written down, for all that is known, when the lane ended.
    pub(super) fn take_records(&self) -> Vec<Cmd> {
        self.state().take_records(&self.layout)
    }

    /// Ends the lane: calls under way fail, and no more are taken.
    pub(super) fn end(&self) {
        self.dead.store(true, Relaxed);
        self.attempts.close();
        let mut state = self.state();
        state.seal();
        // None of it is to be sent any more.
        state.out = Vec::new();
        state.written = 0;
        state.under_way = 0;
        let waiting = std::mem::take(&mut state.waiting);
        let lost = waiting.into_iter().filter_map(|asked| match asked {
            InFlight::Single(Single::Record(call) | Single::Source(call)) => Some(*call),
            _ => None,
        });
        state.lost_records.extend(lost);
        drop(state);
        // So that the event loop hears of it. A peer that has gone already is no matter.
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
        self.stirred.notify_one();
    }

    /// Marks that a caller was dropped without a reply. If its request has not left the process, the next write removes it.
    pub(super) fn caller_left(&self) {
        self.state().has_left = true;
    }

    /// What is known of the connection's life.
    pub(super) fn health(&self) -> &Health {
        &self.health
    }

    fn settle(&self, outcome: Result<(), RedisError>) -> bool {
        if let Err(error) = outcome {
            if self.is_open() {
                tracing::debug!(%error, "the fast path broke");
            }
            self.end();
        }
        self.is_open()
    }
}

impl Socket for FastPath {
    fn descriptor(&self) -> RawFd {
        self.socket.as_raw_fd()
    }

    fn readable(&self) -> bool {
        let outcome = self.read(&mut self.state());
        self.settle(outcome)
    }

    fn flush(&self) -> bool {
        let outcome = {
            let mut state = self.state();
            state.seal();
            state.write_records(&self.layout);
            if state.out.is_empty() {
                Ok(())
            } else {
                self.write(&mut state)
            }
        };
        self.settle(outcome.map_err(RedisError::from))
    }

    fn awaits(&self) -> bool {
        self.state().under_way > 0
    }

    fn end(&self) {
        FastPath::end(self);
    }
}
