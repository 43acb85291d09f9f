//! Writes to the socket of the fast path, and reads replies from it.

use std::io::{self, ErrorKind, Read, Write};

use redis::{RedisResult, Value};

use super::buffers::{CHUNK, State};
use super::in_flight::{InFlight, Single};
use super::{FastPath, resp};
use crate::clock::Moment;
use crate::engine::redis::error::{broken, spoils_connection};

impl FastPath {
    /// Writes the output, as far as the socket takes it, without the requests of callers that left. A later tick writes the
    /// rest: when the replies to the first part arrive, or when the watchdog runs.
    pub(super) fn write(&self, state: &mut State) -> io::Result<()> {
        if std::mem::take(&mut state.has_left) {
            state.remove_unsent().map_err(io::Error::other)?;
        }
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
        state.out.shrink_to(CHUNK);
        state.written = 0;
        Ok(())
    }

    pub(super) fn read(&self, state: &mut State) -> RedisResult<()> {
        let mut spoiled = false;
        loop {
            if state.filled == state.input.len() {
                // A reply that is longer than the buffer.
                state.input.resize(2 * state.filled, 0);
            }
            let full = match (&self.socket).read(&mut state.input[state.filled..]) {
                Ok(0) => return Err(broken()),
                Ok(count) => {
                    state.filled += count;
                    state.filled == state.input.len()
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(error.into()),
            };
            let (mut taken, mut attempts) = (0, 0);
            while let Some(length) = resp::length(&state.input[taken..state.filled])? {
                // A reply without a command: the replies of the connection can no longer be assigned.
                let Some(asked) = state.waiting.pop_front() else {
                    return Err(broken());
                };
                let asked = match asked {
                    InFlight::Single(asked) => asked,
                    InFlight::Nothing(_) => continue,
                    InFlight::Batch(sent) => {
                        let Some(length) = sent.length(&state.input[taken..state.filled])? else {
                            state.waiting.push_front(InFlight::Batch(sent));
                            break;
                        };
                        state.under_way -= sent.calls();
                        attempts += sent.attempts();
                        let report = sent.deliver(&state.input[taken..taken + length])?;
                        taken += length;
                        if report.is_unknown {
                            state.is_unknown();
                        }
                        // Waiting calls record that themselves.
                        (0..report.sink_calls).for_each(|_| self.health.replied());
                        spoiled |= report.sink_calls > 0 && report.error.as_ref().is_some_and(spoils_connection);
                        continue;
                    }
                };
                state.under_way -= 1;
                let reply = resp::value(&state.input[taken..taken + length])?;
                taken += length;
                if let Single::Sink(_) = asked {
                    // Waiting calls record that themselves.
                    self.health.replied();
                    spoiled |= matches!(&reply, Value::ServerError(error) if spoils_connection(&error.clone().into()));
                }
                state.answer(asked, reply);
            }
            if attempts > 0 {
                self.attempts.add_permits(attempts);
            }
            state.end_settled();
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
            if !full {
                return Ok(());
            }
        }
    }
}
