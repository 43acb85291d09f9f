//! One node of the quorum: its connection, its clock, and the answers of its scripts.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use parking_lot::Mutex;
use redis::{Cmd, Value};

use super::cleanup::Cleanup;
use crate::clock::Moment;
use crate::engine::redis::config::RedisConfig;
use crate::engine::redis::connection::Link;
use crate::engine::redis::connection::probe::explained;
use crate::engine::redis::connection::version::check_server;
use crate::engine::redis::error::{Failure, spoils_connection};
use crate::engine::redis::keys::FREE_CHANNEL;
use crate::engine::redis::scripts::Script;
use crate::engine::redis::topology::Route;

pub(super) struct Node {
    pub(super) link: Arc<Link>,
    pub(super) address: Box<str>,
    pub(super) cleanup: Cleanup,
    clock: Mutex<Option<Clock>>,
    /// Whether the node refused the last release or vote by script: no plain commands acquire a vote that it could not release.
    refuses_scripts: AtomicBool,
    /// When the oldest request for a vote was sent that may have no answer yet. `None`: the node has answered since.
    silent_since: Mutex<Option<Moment>>,
}

/// The last observation of a node's clock.
#[derive(Debug, Clone, Copy)]
struct Clock {
    /// By how many µs it is ahead of the local clock.
    offset: i64,
    /// The local time of the observation, in µs.
    at: i64,
}

/// A clock that differs from the last observation by more than this was set, in µs.
const CLOCK_STEP: i64 = 100_000;
/// The largest difference between a floor and a node's clock, in µs. `acquire.lua` has the same limit.
const MAX_CLOCK_DIFFERENCE: u64 = 100_000;

impl Clock {
    /// Combines the known observation with the time `shown` in an answer that arrived at the local time `at`.
    ///
    /// # Behavior
    /// The delay of an answer makes the clock seem further behind than it is, and never further ahead. So the fastest answer
    /// counts, minus the drift of two clocks since then (1 in 1000).
    fn observe(known: Option<Self>, shown: i64, at: i64) -> Self {
        let offset = shown - at;
        let best = known.map(|known| known.offset - (at - known.at) / 1000);
        match best {
            Some(best) if offset < best && best - offset < CLOCK_STEP => Clock { offset: best, at },
            _ => Clock { offset, at },
        }
    }
}

/// A node's answer to an attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Vote {
    Granted {
        /// The fencing token that the node proposes.
        fence: u64,
        /// Whether the owner already had this node's vote, from an earlier attempt.
        already: bool,
    },
    Busy(Busy),
}

/// The holder that makes an attempt fail on one node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Busy {
    /// The position of the busy name in the claim, from 0.
    pub(super) index: usize,
    /// The remaining time of its lease. `None`: without end.
    pub(super) left: Option<Duration>,
    /// The value of the lock key.
    pub(super) value: Vec<u8>,
    /// For how long it has been held, if the holder is a holdfast quorum client.
    pub(super) age: Option<Duration>,
}

impl Node {
    pub(super) fn new(config: RedisConfig) -> Self {
        Node {
            address: config.address().into(),
            link: Link::new(config),
            cleanup: Cleanup::default(),
            clock: Mutex::new(None),
            refuses_scripts: AtomicBool::new(false),
            silent_since: Mutex::new(None),
        }
    }

    /// Records that the node's vote is requested.
    pub(super) fn asked(&self) {
        self.silent_since.lock().get_or_insert_with(Moment::now);
    }

    /// Records that the node has answered such a request.
    pub(super) fn answered(&self) {
        *self.silent_since.lock() = None;
    }

    /// Records the answer of a script.
    pub(super) fn script_answered<T>(&self, answer: &Result<T, Failure>) {
        match answer {
            Ok(_) => self.refuses_scripts.store(false, Relaxed),
            Err(failure) if !failure.retryable() => self.refuses_scripts.store(true, Relaxed),
            Err(_) => {}
        }
    }

    /// Whether the node refused the last script for a permanent reason.
    pub(super) fn refuses_scripts(&self) -> bool {
        self.refuses_scripts.load(Relaxed)
    }

    /// Returns for how long requests for a vote have had no answer.
    pub(super) fn silence(&self) -> Duration {
        let since = *self.silent_since.lock();
        since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// Checks the mode and the version of the server and the rights of the user, and reads its clock.
    pub(super) async fn handshake(&self) -> Result<(), Failure> {
        explained(self.link.config(), check_server(&self.link, false)).await?;
        let route = Route::One(self.link.clone());
        let layout = &self.link.config().layout;
        let time = redis::cmd("TIME");
        let (checked, time) = tokio::join!(
            route.check(&self.link, layout, Some(FREE_CHANNEL)),
            self.link.call(&time)
        );
        checked?;
        self.observe_time(&time?)?;
        Ok(())
    }

    /// Records an answer of `TIME`, and returns the time in µs since 1970.
    fn observe_time(&self, time: &Value) -> Result<u64, Failure> {
        let unexpected = Failure::Unexpected("TIME");
        let Value::Array(parts) = time else {
            return Err(unexpected);
        };
        let number = |value: &Value| match value {
            Value::BulkString(digits) => std::str::from_utf8(digits).ok()?.parse::<u32>().ok(),
            _ => None,
        };
        let [Some(seconds), Some(micros)] = [0, 1].map(|part| parts.get(part).and_then(number)) else {
            return Err(unexpected);
        };
        let shown = i64::from(seconds) * 1_000_000 + i64::from(micros);
        self.observe(shown);
        Ok(shown.unsigned_abs())
    }

    /// Returns whether a floor is close enough to the node's clock in this answer of `TIME`.
    pub(super) fn is_current(&self, time: &Value, floor: u64) -> bool {
        self.observe_time(time)
            .is_ok_and(|shown| shown.abs_diff(floor) <= MAX_CLOCK_DIFFERENCE)
    }

    /// Returns whether a floor is probably close enough to the node's clock.
    pub(super) fn is_probably_current(&self, floor: u64) -> bool {
        self.time()
            .is_some_and(|time| time.abs_diff(floor) <= MAX_CLOCK_DIFFERENCE)
    }

    fn observe(&self, shown: i64) {
        let mut clock = self.clock.lock();
        *clock = Some(Clock::observe(*clock, shown, local_micros()));
    }

    /// Returns the time by the node's clock, in µs since 1970, if it was observed.
    fn time(&self) -> Option<u64> {
        let clock = *self.clock.lock();
        Some(u64::try_from(local_micros() + clock?.offset).unwrap_or(0))
    }

    /// Parses an answer of `acquire.lua` to a claim of `names` names.
    pub(super) fn read_vote(&self, answer: &Value, names: usize) -> Result<Vote, Failure> {
        let Value::Array(fields) = answer else {
            return Err(Failure::Unexpected("quorum/acquire.lua"));
        };
        match fields.as_slice() {
            [
                Value::Int(1),
                Value::Int(fence @ 1..),
                Value::Int(now),
                Value::Int(already),
            ] => {
                self.observe(*now);
                Ok(Vote::Granted {
                    fence: *fence as u64,
                    already: *already == 1,
                })
            }
            [
                Value::Int(0),
                Value::Int(index @ 1..),
                Value::Int(left),
                Value::BulkString(value),
                Value::Int(age),
            ] if *index as usize <= names => Ok(Vote::Busy(Busy {
                index: *index as usize - 1,
                left: millis(*left).map(|left| left.max(Duration::from_millis(1))),
                value: value.clone(),
                age: millis(*age),
            })),
            _ => Err(Failure::Unexpected("quorum/acquire.lua")),
        }
    }

    /// Runs a script. Allocates the exchange only when there is a connection, because many calls may wait for one.
    pub(super) async fn run(&self, script: &Script, call: &Cmd) -> Result<Value, Failure> {
        let connection = self.link.connection().await?;
        Box::pin(self.link.run_on(&connection, script, call, false, None)).await
    }

    /// Runs a script whose answer is a number.
    pub(super) async fn number(&self, script: &Script, call: &Cmd) -> Result<i64, Failure> {
        number(&self.run(script, call).await?)
    }
}

/// Parses an answer that is a number.
pub(super) fn number(answer: &Value) -> Result<i64, Failure> {
    match answer {
        Value::Int(number) => Ok(*number),
        _ => Err(Failure::Unexpected("a script of the quorum")),
    }
}

fn millis(number: i64) -> Option<Duration> {
    u64::try_from(number).ok().map(Duration::from_millis)
}

fn local_micros() -> i64 {
    i64::try_from(Moment::now().to_nanos() / 1000).unwrap_or(i64::MAX)
}

/// Returns the time by the clocks of the nodes, in µs since 1970: the median of the known ones, so that a minority of wrong
/// clocks has no effect. Of an even number it is the lower median. Returns 0 if no clock is known.
pub(super) fn common_time(nodes: &[Arc<Node>]) -> u64 {
    let mut times: Vec<u64> = nodes.iter().filter_map(|node| node.time()).collect();
    times.sort_unstable();
    times.get(times.len().saturating_sub(1) / 2).copied().unwrap_or(0)
}

/// Returns whether the server may still execute a call that failed.
pub(super) fn may_still_execute(failure: &Failure) -> bool {
    matches!(failure, Failure::Call(error) if spoils_connection(error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fastest_answer_determines_the_offset_of_a_clock() {
        let first = Clock::observe(None, 5_000_000, 1_000_000);
        assert_eq!(first.offset, 4_000_000);
        // Half a second later an answer that took 20 ms: the known offset, minus the drift.
        let slow = Clock::observe(Some(first), 5_480_000, 1_500_000);
        assert_eq!(slow.offset, 3_999_500);
        let fast = Clock::observe(Some(slow), 5_600_100, 1_600_000);
        assert_eq!(fast.offset, 4_000_100);
        let set_back = Clock::observe(Some(fast), 1_700_000, 1_700_000);
        assert_eq!(set_back.offset, 0);
    }
}
