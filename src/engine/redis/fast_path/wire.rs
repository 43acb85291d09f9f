//! Writes to the socket of the fast path, and reads replies from it, for the event loop and for the watchdog.

use std::io::{self, ErrorKind};
use std::os::fd::{AsRawFd, RawFd};

use redis::{RedisError, RedisResult, Value};

use super::buffers::{CHUNK, State};
use super::in_flight::{InFlight, Single};
use super::transport::Arrived;
use super::{FastPath, resp};
use crate::clock::Moment;
use crate::engine::redis::error::{broken, is_forbidden, spoils_connection};
use crate::event_loop::Socket;

impl FastPath {
    /// Writes the output, as far as the socket takes it, without the requests of callers that left. A later tick writes the
    /// rest: when the socket takes more, when the replies to the first part arrive, or when the watchdog runs.
    pub(super) fn write(&self, state: &mut State) -> io::Result<()> {
        if std::mem::take(&mut state.has_left) {
            state.remove_unsent().map_err(io::Error::other)?;
        }
        while state.written < state.out.len() {
            match self.transport.write(&state.out[state.written..]) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(count) => state.written += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        state.out.clear();
        state.out.shrink_to(CHUNK);
        state.written = 0;
        self.transport.flush()
    }

    pub(super) fn read(&self, state: &mut State) -> RedisResult<()> {
        let mut spoiled = false;
        loop {
            if state.filled == state.input.len() {
                // A reply that is longer than the buffer.
                state.input.resize(2 * state.filled, 0);
            }
            let more = match self.transport.read(&mut state.input[state.filled..]) {
                Ok(Arrived { count: 0, .. }) => return Err(broken()),
                Ok(Arrived { count, more }) => {
                    state.filled += count;
                    more
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(error.into()),
            };
            let (mut taken, mut attempts) = (0, 0);
            while let Some(length) = state.next_replies(&mut taken)? {
                // A reply without a command: the replies of the connection can no longer be assigned.
                let Some(asked) = state.waiting.pop_front() else {
                    return Err(broken());
                };
                let asked = match asked {
                    InFlight::Single(asked) => asked,
                    InFlight::Nothing(_) => continue,
                    InFlight::Batch(sent) => {
                        state.under_way -= sent.calls();
                        attempts += sent.attempts();
                        let report = sent.deliver(&state.input[taken..taken + length])?;
                        taken += length;
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
                        continue;
                    }
                };
                state.under_way -= 1;
                let reply = resp::value(&state.input[taken..taken + length])?;
                taken += length;
                if let Single::Sink(_) = asked {
                    // Waiting calls record that themselves.
                    self.health.replied(None);
                    spoiled |= matches!(&reply, Value::ServerError(error) if spoils_connection(&error.clone().into()));
                }
                state.answer(asked, reply);
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
            state.since = Moment::now();
            if spoiled {
                return Err(broken());
            }
            if !more {
                return Ok(());
            }
        }
    }

    /// Ends the fast path after an error. Returns whether it is open.
    fn settle(&self, outcome: RedisResult<()>) -> bool {
        if let Err(error) = outcome {
            // If this process closed the fast path, the error of the socket is only a consequence.
            if self.is_open() {
                tracing::debug!(%error, "the fast path broke");
                if error.kind() == redis::ErrorKind::Io {
                    // Another thread may have been first.
                    let _ = self.cause.set(error);
                }
            }
            self.end();
        } else if !self.is_open() {
            // A reply has closed it.
            self.end();
        }
        self.is_open()
    }
}

impl Socket for FastPath {
    fn descriptor(&self) -> RawFd {
        self.transport.as_raw_fd()
    }

    fn readable(&self) -> bool {
        let (outcome, messages) = {
            let mut state = self.state();
            (self.read(&mut state), state.take_messages())
        };
        if let Some((handler, messages)) = messages {
            messages.iter().for_each(|message| handler(message));
        }
        self.settle(outcome)
    }

    fn flush(&self) -> bool {
        let outcome = {
            let mut state = self.state();
            state.seal();
            let records = state.records.take_new();
            state.write_records(records, &self.layout);
            self.write(&mut state)
        };
        self.settle(outcome.map_err(RedisError::from))
    }

    fn awaits(&self) -> bool {
        self.state().under_way > 0
    }

    fn is_blocked(&self) -> bool {
        !self.state().out.is_empty() || self.transport.is_blocked()
    }

    fn end(&self) {
        FastPath::end(self);
    }
}
