//! The task of a connection: writes requests, and reads replies and messages.

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::Weak;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Poll};

use redis::{RedisError, RedisResult};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::state::{CHUNK, LONGEST, State};
use super::{Push, Wire};
use crate::engine::redis::error::{broken, is_forbidden, spoils_connection};

/// The longest record of TLS, in bytes.
const TLS_RECORD: usize = 16 * 1024;
/// The number of reads in one poll of the driver: a peer that sends without end must not occupy the event loop.
const READS_AT_ONCE: usize = 16;

/// Serves a connection until it ends, or until nothing refers to it. `handle` receives the pushes. It must not block.
pub(in super::super) async fn drive(wire: Weak<Wire>, handle: impl Fn(Push)) {
    poll_fn(|context| {
        let Some(wire) = wire.upgrade() else {
            return Poll::Ready(());
        };
        let (outcome, pushes) = {
            let mut state = wire.state();
            state.driver.begin_poll(context);
            let outcome = wire.exchange(&mut state, context);
            state.count_replies();
            (outcome, std::mem::take(&mut state.pushes))
        };
        pushes.into_iter().for_each(&handle);
        if let Err(error) = outcome
            && wire.is_open()
        {
            tracing::debug!(%error, "a connection broke");
            if error.kind() == redis::ErrorKind::Io {
                // Another thread may have been first.
                let _ = wire.cause.set(error);
            }
            wire.end();
        }
        match wire.has_ended.load(Relaxed) {
            true => Poll::Ready(()),
            false => Poll::Pending,
        }
    })
    .await;
}

/// Writes the requests of the threads that are not the event loop's. It reads nothing, so that the event loop reads all replies, and
/// its calls continue in the same tick.
pub(in super::super) async fn flush(wire: Weak<Wire>) {
    poll_fn(|context| {
        let Some(wire) = wire.upgrade() else {
            return Poll::Ready(());
        };
        let mut state = wire.state();
        state.flusher.begin_poll(context);
        state.seal();
        state.write_early();
        state.count_replies();
        match wire.is_open() {
            true => Poll::Pending,
            false => Poll::Ready(()),
        }
    })
    .await;
}

impl State {
    /// Writes the output, as far as the socket takes it, without the requests of callers that left.
    pub(super) fn write(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        if std::mem::take(&mut self.has_left) {
            // The requests of this tick, too: the next write would not search for them again.
            self.seal();
            self.remove_unsent().map_err(io::Error::other)?;
        }
        let Some(io) = &mut self.io else { return Ok(()) };
        self.is_blocked = true;
        loop {
            // With TLS: the records that the socket did not take. More is encrypted only after them, because an encrypted request can
            // no longer be removed.
            if Pin::new(&mut *io).poll_flush(context)?.is_pending() {
                return Ok(());
            }
            if self.written == self.out.len() {
                break;
            }
            match Pin::new(&mut *io).poll_write(context, &self.out[self.written..])? {
                Poll::Ready(0) => return Err(io::ErrorKind::WriteZero.into()),
                Poll::Ready(count) => {
                    self.written += count;
                    self.tls_records = self.tls_records.saturating_sub(1 + (count / TLS_RECORD) as u64);
                    if self.tls_records == 0 {
                        self.health.mark_dead();
                    }
                }
                Poll::Pending => return Ok(()),
            }
        }
        self.is_blocked = false;
        self.out.clear();
        self.out.shrink_to(CHUNK);
        self.written = 0;
        Ok(())
    }

    /// Reads what has arrived. Returns the number of bytes. `Pending`: nothing.
    fn read(&mut self, context: &mut Context<'_>) -> Poll<io::Result<usize>> {
        if self.filled == self.input.len() {
            if self.filled >= LONGEST {
                return Poll::Ready(Err(io::ErrorKind::InvalidData.into()));
            }
            // A reply that is longer than the buffer.
            self.input.resize(2 * self.filled, 0);
        }
        let Some(io) = &mut self.io else {
            return Poll::Pending;
        };
        let mut into = ReadBuf::new(&mut self.input[self.filled..]);
        let read = Pin::new(&mut *io).poll_read(context, &mut into);
        let count = into.filled().len();
        read.map_ok(|()| count)
    }
}

impl Wire {
    fn exchange(&self, state: &mut State, context: &mut Context<'_>) -> RedisResult<()> {
        state.seal();
        state.write(context)?;
        for _ in 0..READS_AT_ONCE {
            let Poll::Ready(count) = state.read(context) else {
                return Ok(());
            };
            match count {
                Ok(0) => return Err(broken()),
                Ok(count) => state.filled += count,
                Err(error) => return Err(RedisError::from(error)),
            }
            self.take_replies(state)?;
        }
        context.waker().wake_by_ref();
        Ok(())
    }

    /// Passes on the replies in the input.
    fn take_replies(&self, state: &mut State) -> RedisResult<()> {
        let (mut taken, mut attempts, mut spoiled) = (0, 0, false);
        while let Some(length) = state.next_replies(&mut taken)? {
            // A reply without a command: the replies of the connection can no longer be assigned.
            let Some(asked) = state.waiting.pop_front() else {
                return Err(broken());
            };
            let replies = &state.input[taken..taken + length];
            taken += length;
            state.under_way -= asked.calls();
            attempts += asked.attempts();
            let report = asked.deliver(replies)?;
            if report.is_unknown {
                state.is_unknown();
            }
            if report.error.as_ref().is_some_and(is_forbidden) {
                // The user may have lost the right to scripts: a lock acquired by plain commands could not be released.
                state.seeded = None;
            }
            // Waiting calls record that themselves.
            (0..report.sink_calls).for_each(|_| self.health.replied(None));
            spoiled |= report.sink_calls > 0 && report.error.as_ref().is_some_and(spoils_connection);
        }
        if attempts > 0 {
            self.attempts.add_permits(attempts);
        }
        state.input.copy_within(taken..state.filled, 0);
        state.filled -= taken;
        if state.input.len() > CHUNK && state.filled <= CHUNK {
            state.input.truncate(CHUNK);
            state.input.shrink_to_fit();
        }
        if spoiled { Err(broken()) } else { Ok(()) }
    }
}
