//! The fast lane: a second connection for the calls of one thread, served by that thread's own event loop.
//!
//! # Behavior
//! A call that is made on the event loop's thread is written, and its reply read, on that thread: no other thread is
//! woken, and whatever is asked for in one turn of the loop travels in one packet. Everything else (renewals, waiting,
//! clean-up) goes by the engine's ordinary connection on the I/O thread, and so do all calls while there is no lane: it is
//! opened in the background, and opened again when it broke.
//!
//! A thread that is blocked serves nothing. A watchdog on the I/O thread therefore looks after a lane whose calls have
//! waited for [`STALE`], so that a grant is known (and renewed from then on) although the thread that asked is busy.
//!
//! The protocol is RESP2 (the Redis serialization protocol specification): no pushes come on this connection.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use redis::{Cmd, RedisError, RedisResult, Value};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::{Notify, oneshot};

use super::health::Health;
use super::resp;
use crate::clock::Moment;
use crate::event_loop::Socket;

/// A call that has waited for so long is looked after by the watchdog.
const STALE: Duration = Duration::from_millis(20);
/// How often the watchdog looks while the lane is in use.
const WATCH: Duration = Duration::from_millis(25);
/// The watchdog sleeps when nothing was asked for so long.
const IDLE: Duration = Duration::from_secs(2);
/// How much is read in one go.
const CHUNK: usize = 64 * 1024;

/// An open lane.
pub(super) struct Lane {
    socket: TcpStream,
    state: Mutex<State>,
    dead: AtomicBool,
    /// Whether the watchdog sleeps.
    asleep: AtomicBool,
    stirred: Arc<Notify>,
    health: Health,
}

struct State {
    out: Vec<u8>,
    /// How much of `out` was written already.
    written: usize,
    input: Vec<u8>,
    waiting: VecDeque<oneshot::Sender<RedisResult<Value>>>,
    /// Since when the oldest call waits, or when a reply last came.
    since: Moment,
}

impl Lane {
    /// Logs in on a fresh connection.
    pub(super) async fn open(mut stream: tokio::net::TcpStream, login: &[Cmd]) -> RedisResult<Arc<Self>> {
        let mut input = Vec::new();
        for cmd in login {
            stream.write_all(&cmd.get_packed_command()).await?;
            while resp::length(&input)?.is_none() {
                if stream.read_buf(&mut input).await? == 0 {
                    return Err(io::Error::from(ErrorKind::UnexpectedEof).into());
                }
            }
            redis::parse_redis_value(&input)?.extract_error()?;
            input.clear();
        }
        let socket = stream.into_std()?;
        let lane = Arc::new(Lane {
            socket,
            state: Mutex::new(State {
                out: Vec::with_capacity(4096),
                written: 0,
                input: Vec::with_capacity(4096),
                waiting: VecDeque::new(),
                since: Moment::now(),
            }),
            dead: AtomicBool::new(false),
            asleep: AtomicBool::new(false),
            stirred: Arc::default(),
            health: Health::new(),
        });
        tokio::spawn(watch(Arc::downgrade(&lane), lane.stirred.clone()));
        Ok(lane)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether calls may be made on it.
    pub(super) fn is_open(&self) -> bool {
        !self.dead.load(Relaxed)
    }

    /// Sends one command with the loop's next turn, and waits for its reply.
    pub(super) async fn call(&self, cmd: &Cmd) -> RedisResult<Value> {
        let reply = {
            let mut state = self.state();
            if !self.is_open() {
                return Err(broken());
            }
            let (sender, reply) = oneshot::channel();
            cmd.write_packed_command(&mut state.out);
            if state.waiting.is_empty() {
                state.since = Moment::now();
            }
            state.waiting.push_back(sender);
            reply
        };
        if self.asleep.swap(false, Relaxed) {
            self.stirred.notify_one();
        }
        reply.await.unwrap_or_else(|_| Err(broken()))?.extract_error()
    }

    /// Ends the lane: calls under way fail, and no more are taken.
    pub(super) fn end(&self) {
        self.dead.store(true, Relaxed);
        self.state().waiting.clear();
        // So that the event loop hears of it. A peer that has gone already is no matter.
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
        self.stirred.notify_one();
    }

    /// What is known of the connection's life.
    pub(super) fn health(&self) -> &Health {
        &self.health
    }

    /// Writes what is to be sent, as far as the socket takes it. The rest goes out with a later turn: when the server's
    /// answers to the first part have come, or when the watchdog looks.
    fn write(&self, state: &mut State) -> io::Result<()> {
        while state.written < state.out.len() {
            match (&self.socket).write(&state.out[state.written..]) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(count) => state.written += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        state.out.clear();
        state.written = 0;
        Ok(())
    }

    fn read(&self, state: &mut State) -> RedisResult<()> {
        loop {
            let before = state.input.len();
            state.input.resize(before + CHUNK, 0);
            let read = (&self.socket).read(&mut state.input[before..]);
            state.input.truncate(before + *read.as_ref().unwrap_or(&0));
            let full = match read {
                Ok(0) => return Err(broken()),
                Ok(count) => count == CHUNK,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(error.into()),
            };
            let mut taken = 0;
            while let Some(length) = resp::length(&state.input[taken..])? {
                let reply = resp::value(&state.input[taken..taken + length]);
                taken += length;
                // A reply that nobody asked for: the connection cannot be made sense of.
                let Some(sender) = state.waiting.pop_front() else {
                    return Err(broken());
                };
                // Whoever asked may have gone.
                let _ = sender.send(reply);
            }
            state.input.drain(..taken);
            state.since = Moment::now();
            if !full {
                return Ok(());
            }
        }
    }

    fn settle(&self, outcome: Result<(), RedisError>) -> bool {
        if let Err(error) = outcome {
            if self.is_open() {
                tracing::debug!(%error, "the fast lane broke");
            }
            self.end();
        }
        self.is_open()
    }
}

impl Socket for Lane {
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
            if state.out.is_empty() {
                Ok(())
            } else {
                self.write(&mut state)
            }
        };
        self.settle(outcome.map_err(RedisError::from))
    }

    fn end(&self) {
        Lane::end(self);
    }
}

fn broken() -> RedisError {
    io::Error::from(ErrorKind::BrokenPipe).into()
}

/// Looks after a lane whose thread does not.
async fn watch(lane: Weak<Lane>, stirred: Arc<Notify>) {
    let mut used = Moment::now();
    loop {
        tokio::time::sleep(WATCH).await;
        let sleepy = {
            let Some(lane) = lane.upgrade().filter(|lane| lane.is_open()) else {
                return;
            };
            let (waits, stale) = {
                let state = lane.state();
                let waits = !state.waiting.is_empty();
                (waits, waits && state.since.elapsed() >= STALE)
            };
            if stale {
                lane.flush();
                lane.readable();
            }
            if waits {
                used = Moment::now();
            }
            let sleepy = used.elapsed() >= IDLE;
            lane.asleep.store(sleepy, Relaxed);
            // Between the look and the sleep a call may have come, and seen the watchdog awake.
            sleepy && lane.state().waiting.is_empty()
        };
        if sleepy {
            stirred.notified().await;
            used = Moment::now();
        }
    }
}
