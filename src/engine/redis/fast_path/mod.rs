//! The fast path: a second connection for the calls of one thread, driven by that thread's own event loop.
//!
//! # Behavior
//! A call that is made on the event loop's thread is written, and its reply read, on that thread: no other thread is woken,
//! and the requests of one tick travel in few packets. All other calls (renewals, waiting, clean-up) use the engine's
//! ordinary connection on the I/O thread. So do all calls while the fast path is closed: it is opened in the background, and
//! opened again after it broke.
//!
//! A blocked thread serves no socket. A watchdog on the I/O thread therefore serves a fast path whose calls have waited for
//! [`STALE`](watchdog::STALE). So a grant is known, and its lease renewed, although the thread of the call is busy.
//!
//! While the engine has waiters, the channel of the process is subscribed here, too ([`FastPath::subscribe`]), so that the event
//! loop reads a hand-off. From then on the protocol is RESP3 (the Redis serialization protocol specification), before that RESP2.

mod buffers;
mod call;
mod in_flight;
mod pipeline;
mod record;
mod reply_sink;
pub(super) mod resp;
#[cfg(test)]
mod resp_check;
mod transport;
mod unsent;
mod watchdog;
mod wire;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use redis::{Cmd, RedisError, RedisResult, Value};
use rustls::ClientConnection;
use tokio::sync::{Notify, Semaphore, TryAcquireError, oneshot};

use self::buffers::State;
pub(super) use self::call::{ALONE, BatchRelease, Outcome};
use self::in_flight::{InFlight, Single};
use self::pipeline::{Batch, Kind};
pub(super) use self::record::Record;
use self::reply_sink::ReplyHandle;
pub(super) use self::reply_sink::ReplySink;
use self::transport::Transport;
use super::connection::liveness::{ATTEMPTS, Health};
use super::error::broken;
use super::keys::Layout;
use crate::clock::Moment;
use crate::event_loop::EventLoop;
use crate::model::{Claim, OwnerToken};

/// Output is written before the tick ends when it would serve a third of the calls in flight, so that the server works on it
/// meanwhile. In bytes: per call, and the lower and upper limit in total.
const EARLY: usize = 64;
const LEAST_EARLY: usize = 768;
const MOST_EARLY: usize = 6 * 1024;

/// An open fast path.
pub(super) struct FastPath {
    /// Unique in the process, from 1.
    number: u64,
    transport: Transport,
    state: Mutex<State>,
    dead: AtomicBool,
    /// The error of the socket or of TLS that ended it.
    cause: OnceLock<RedisError>,
    asleep: AtomicBool,
    stirred: Arc<Notify>,
    health: Arc<Health>,
    /// A fast path that is silent for this time while calls wait is ended. The callers have timed out by then.
    silence_limit: Duration,
    layout: Layout,
    /// Whether plain commands may be used (`ops/acquire_plain.rs`).
    plain: AtomicBool,
    /// Locked while a call with the text of a script is in flight.
    loading: tokio::sync::Mutex<()>,
    /// Permits for attempts to acquire. A reply returns its permit. Closed when the fast path ends.
    attempts: Arc<Semaphore>,
}

impl FastPath {
    pub(super) const IS_SUPPORTED: bool = true;

    /// Creates a fast path from a connection on which the login was sent, and its TLS session, if it has one. `version`: the
    /// major version of the server.
    pub(super) fn new(
        stream: tokio::net::TcpStream,
        session: Option<ClientConnection>,
        version: Option<u32>,
        layout: Layout,
        silence_limit: Duration,
    ) -> RedisResult<Arc<Self>> {
        static LAST: AtomicU64 = AtomicU64::new(0);
        // `SET` with both `NX` and `GET` needs version 7.
        let plain = version >= Some(7);
        let transport = Transport::new(stream.into_std()?, session);
        let (attempts, health) = (Arc::new(Semaphore::new(ATTEMPTS)), Arc::new(Health::new()));
        Ok(Arc::new(FastPath {
            number: LAST.fetch_add(1, Relaxed) + 1,
            transport,
            state: Mutex::new(State::new(attempts.clone(), health.clone())),
            dead: AtomicBool::new(false),
            cause: OnceLock::new(),
            asleep: AtomicBool::new(false),
            stirred: Arc::default(),
            health,
            silence_limit,
            layout,
            plain: AtomicBool::new(plain),
            loading: tokio::sync::Mutex::new(()),
            attempts,
        }))
    }

    /// Returns the watchdog. It ends with the fast path.
    pub(super) fn watchdog(self: &Arc<Self>) -> impl Future<Output = ()> + use<> {
        watchdog::watch(Arc::downgrade(self), self.stirred.clone())
    }

    /// Lets an event loop poll the socket.
    pub(super) fn serve_on(self: Arc<Self>, event_loop: &dyn EventLoop) {
        event_loop.serve(self);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Returns the number of this fast path, which is unique in the process, from 1.
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    pub(super) fn is_open(&self) -> bool {
        !self.dead.load(Relaxed)
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

    /// Whether there is nothing to send and no reply to wait for.
    pub(super) fn is_idle(&self) -> bool {
        self.state().is_idle()
    }

    /// Disables plain commands.
    pub(super) fn use_scripts_only(&self) {
        self.plain.store(false, Relaxed);
    }

    /// Sends one command at the end of the tick, and waits for its reply.
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
        reply.await.unwrap_or_else(|_| Err(self.broken()))?.extract_error()
    }

    /// Waits for the permit of an attempt. An attempt that is dropped meanwhile is never sent.
    async fn admit(&self) -> RedisResult<()> {
        let place = match self.attempts.try_acquire() {
            Ok(place) => place,
            Err(TryAcquireError::Closed) => return Err(self.broken()),
            Err(TryAcquireError::NoPermits) => {
                // Boxed: this is rare, and the future of a call stays small.
                Box::pin(self.attempts.acquire()).await.map_err(|_| self.broken())?
            }
        };
        place.forget();
        Ok(())
    }

    /// Sends one command of an attempt to acquire by `acquire.lua`, and waits for its reply. `mark_sent` is called before it is
    /// sent.
    pub(super) async fn attempt(&self, cmd: &Cmd, mark_sent: &(dyn Fn() + Sync)) -> RedisResult<Value> {
        self.admit().await?;
        mark_sent();
        let sent = Moment::now();
        let outcome = self.send(|state| state.batch_for(Kind::Script, None).add_script(cmd))?;
        match outcome.await.unwrap_or_else(|_| Err(self.broken()))? {
            Outcome::Answer(answer) => {
                if matches!(answer, Value::Int(_)) {
                    let mut state = self.state();
                    state.seeded = state.seeded.max(Some(sent));
                }
                Ok(answer)
            }
            _ => Err(resp::nonsense()),
        }
    }

    /// Marks that a call with the text of a script is in flight, until the guard is dropped. `None`: there is one already.
    pub(super) fn begin_load(&self) -> Option<tokio::sync::MutexGuard<'_, ()>> {
        self.loading.try_lock().ok()
    }

    /// Waits until all earlier requests are answered, or the fast path has ended.
    ///
    /// After its end the server may still execute the requests that its socket has. Their callers got an error or no answer, so
    /// the service repeats the releases of their claims (`service/abandoned.rs`).
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
        // The sender is dropped when it reaches the front of the queue.
        let _ = settled.await;
    }

    /// Checks whether another owner holds the one name of a claim.
    pub(super) async fn check(&self, claim: &Claim) -> RedisResult<Outcome> {
        self.admit().await?;
        claim.mark_sent();
        self.join(Kind::Check, claim, |batch| batch.add_check(&self.layout, claim))
            .await
    }

    /// Tries to acquire the one name of a claim by plain commands.
    pub(super) async fn acquire(&self, claim: &Claim) -> RedisResult<Outcome> {
        self.admit().await?;
        claim.mark_sent();
        self.join(Kind::Acquire, claim, |batch| batch.add_acquisition(&self.layout, claim))
            .await
    }

    /// Releases the one name of a claim. `more` as for [`Batch::add_release`].
    pub(super) async fn release(
        &self,
        release: &'static BatchRelease,
        claim: &Claim,
        more: Option<&str>,
    ) -> RedisResult<Outcome> {
        self.join(Kind::Release, claim, |batch| {
            batch.add_release(&self.layout, release, claim, more)
        })
        .await
    }

    /// Adds a call to the batch of its kind in this tick.
    async fn join(
        &self,
        kind: Kind,
        claim: &Claim,
        add: impl FnOnce(&mut Batch) -> oneshot::Receiver<RedisResult<Outcome>>,
    ) -> RedisResult<Outcome> {
        let outcome = self.send(|state| add(state.batch_for(kind, Some(&claim.owner))))?;
        outcome.await.unwrap_or_else(|_| Err(self.broken()))
    }

    /// Requests a vote by plain commands. The sink receives the four replies under the numbers up to `last`, or one error
    /// under `last`.
    pub(super) fn vote(&self, sink: &Arc<dyn ReplySink>, last: usize, claim: &Claim, value: &str, floor: u64) {
        self.send_to_sink(sink, last, |state, handle| {
            let batch = state.batch_for(Kind::Vote, Some(&claim.owner));
            batch.add_vote(&self.layout, claim, value, floor, handle);
        });
    }

    /// Releases the one name of a claim. The sink receives the answer.
    pub(super) fn release_to_sink(
        &self,
        sink: &Arc<dyn ReplySink>,
        number: usize,
        release: &'static BatchRelease,
        claim: &Claim,
    ) {
        self.send_to_sink(sink, number, |state, handle| {
            let batch = state.batch_for(Kind::Release, Some(&claim.owner));
            batch.add_release_to_sink(&self.layout, release, claim, handle);
        });
    }

    /// Sends the command that `write` writes at the end of the tick. The sink receives the reply.
    pub(super) fn call_to_sink(&self, sink: &Arc<dyn ReplySink>, number: usize, write: impl FnOnce(&mut Vec<u8>)) {
        self.send_to_sink(sink, number, |state, handle| {
            state.seal();
            write(&mut state.out);
            state.wait(Single::Sink(handle));
        });
    }

    fn send_to_sink(&self, sink: &Arc<dyn ReplySink>, number: usize, fill: impl FnOnce(&mut State, ReplyHandle)) {
        let handle = ReplyHandle::new(sink.clone(), number);
        // If the fast path has ended, the handle is dropped, and the sink receives an error.
        let _ = self.send(|state| {
            self.health.sent(Moment::now());
            fill(state, handle);
        });
    }

    /// Adds a request to the output, which is written at the end of the tick, or at once if it is large.
    fn send<R>(&self, fill: impl FnOnce(&mut State) -> R) -> RedisResult<R> {
        let result = {
            let mut state = self.state();
            if !self.is_open() {
                return Err(self.broken());
            }
            if state.under_way == 0 {
                state.since = Moment::now();
            }
            let result = fill(&mut state);
            let early = (EARLY * state.under_way).clamp(LEAST_EARLY, MOST_EARLY);
            if state.unsealed() >= early {
                state.seal();
            }
            // After a failed write the rest stays for the end of the tick, where the error is handled.
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

    /// Defers the record of a grant to the end of the tick, or under load to the watchdog.
    pub(super) fn record_later(&self, record: Record) {
        self.state().records.insert(record);
    }

    /// Discards the deferred record of a grant that is about to be released.
    pub(super) fn forget(&self, owner: &OwnerToken) {
        self.state().records.remove(owner);
    }

    /// Writes the deferred records now, so that the next request finds them. Returns whether there were any.
    pub(super) fn write_records(&self) -> bool {
        let mut state = self.state();
        let any = !state.records.is_empty();
        let records = state.records.take_all();
        state.write_records(records, &self.layout);
        any
    }

    /// Takes the records that may not be stored. Called after the end of the fast path.
    pub(super) fn take_records(&self) -> Vec<Cmd> {
        self.state().take_records(&self.layout)
    }

    /// Closes the socket without the state, so that a reply may do it. The event loop sees that, and ends the fast path.
    pub(super) fn abandon(&self) {
        self.dead.store(true, Relaxed);
        self.attempts.close();
        self.transport.close();
        self.stirred.notify_one();
    }

    /// Ends the fast path: its calls fail, and it accepts no more.
    pub(super) fn end(&self) {
        self.abandon();
        let mut state = self.state();
        state.channel = None;
        state.seal();
        (state.out, state.written, state.under_way) = (Vec::new(), 0, 0);
        let waiting = std::mem::take(&mut state.waiting);
        let lost = waiting.into_iter().filter_map(|asked| match asked {
            InFlight::Single(Single::Record(call) | Single::Source(call)) => Some(*call),
            _ => None,
        });
        state.lost_records.extend(lost);
    }

    /// Returns the error of the calls that it ended without a reply.
    fn broken(&self) -> RedisError {
        self.cause.get().cloned().unwrap_or_else(broken)
    }

    /// Marks that a caller was dropped without a reply. If its request has not left the process, the next write removes it.
    pub(super) fn caller_left(&self) {
        self.state().has_left = true;
    }

    pub(super) fn health(&self) -> &Health {
        &self.health
    }
}
