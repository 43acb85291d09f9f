//! One node of the quorum: its connection, its clock, and what its scripts answer.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use redis::{Cmd, Value};

use super::super::config::RedisConfig;
use super::super::connection::Link;
use super::super::connection::version::{OLDEST, check_version};
use super::super::error::{Failure, spoils_connection};
use super::super::scripts::Script;
use super::cleanup::Cleanup;
use super::scripts::RENEW;
use crate::clock::Moment;

pub(super) struct Node {
    pub(super) link: Arc<Link>,
    pub(super) address: Box<str>,
    pub(super) cleanup: Cleanup,
    clock: Mutex<Option<Clock>>,
}

/// What is known of a node's clock.
#[derive(Debug, Clone, Copy)]
struct Clock {
    /// How far it is ahead of the local one, in µs.
    ahead: i64,
    /// When that was learnt, by the local one.
    at: i64,
}

/// A node's clock that differs by more from what was known of it was set anew, in µs.
const LEAP: i64 = 100_000;
/// By how much a floor may differ from what a node's clock shows, in µs. `acquire.lua` has the same.
#[cfg(unix)]
const PUNCTUAL: u64 = 100_000;

impl Clock {
    /// Takes up what the node's clock showed in an answer that came just now.
    ///
    /// # Behavior
    /// An answer that was slow makes the clock look further behind than it is, and never further ahead. So the quickest
    /// answer is believed, less what two clocks can drift apart since then (1 in 1000).
    fn learn(known: Option<Self>, shown: i64, at: i64) -> Self {
        let ahead = shown - at;
        let best = known.map(|known| known.ahead - (at - known.at) / 1000);
        match best {
            Some(best) if ahead < best && best - ahead < LEAP => Clock { ahead: best, at },
            _ => Clock { ahead, at },
        }
    }
}

/// A node's answer to an attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Vote {
    Granted {
        /// The fence that the node proposes.
        fence: u64,
        /// The owner had this node's vote already, from an earlier attempt.
        already: bool,
    },
    Busy(Busy),
}

/// What is in the way of an attempt on one node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Busy {
    /// Which of the claim's names, from 0.
    pub(super) index: usize,
    /// How long its holder's lease lasts. `None`: for ever.
    pub(super) left: Option<Duration>,
    /// What the lock key holds.
    pub(super) value: Vec<u8>,
    /// For how long, where the holder is one of this kind.
    pub(super) age: Option<Duration>,
}

/// A node's answer to a renewal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Renewal {
    Extended,
    Lost,
    /// Lost here by no doing of anybody's.
    Missing,
}

impl Node {
    pub(super) fn new(config: RedisConfig) -> Self {
        let (address, link) = (config.address().into(), Link::new(config));
        #[cfg(unix)]
        link.allow_fast_path();
        Node {
            address,
            link,
            cleanup: Cleanup::default(),
            clock: Mutex::new(None),
        }
    }

    /// Makes sure that the server is new enough, and learns what its clock shows.
    pub(super) async fn greet(&self) -> Result<(), Failure> {
        check_version(&self.link, OLDEST).await?;
        self.learn_time(&self.link.call(&redis::cmd("TIME")).await?)?;
        #[cfg(unix)]
        self.link.open_fast_path().await;
        Ok(())
    }

    /// Takes up an answer of `TIME`, and tells what it shows.
    fn learn_time(&self, time: &Value) -> Result<u64, Failure> {
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
        self.learn(shown);
        Ok(shown.unsigned_abs())
    }

    /// Whether a floor is as good as what the node's clock shows by an answer of `TIME`.
    #[cfg(unix)]
    pub(super) fn is_timely(&self, time: &Value, floor: u64) -> bool {
        self.learn_time(time)
            .is_ok_and(|shown| shown.abs_diff(floor) <= PUNCTUAL)
    }

    /// Whether it is likely to be.
    #[cfg(unix)]
    pub(super) fn shows(&self, floor: u64) -> bool {
        let shown = self
            .ahead()
            .map(|ahead| u64::try_from(local_micros() + ahead).unwrap_or(0));
        shown.is_some_and(|shown| shown.abs_diff(floor) <= PUNCTUAL)
    }

    fn learn(&self, shown: i64) {
        let mut clock = self.clock.lock().unwrap_or_else(PoisonError::into_inner);
        *clock = Some(Clock::learn(*clock, shown, local_micros()));
    }

    fn ahead(&self) -> Option<i64> {
        let clock = *self.clock.lock().unwrap_or_else(PoisonError::into_inner);
        clock.map(|clock| clock.ahead)
    }

    /// What an answer of `quorum/acquire.lua` says, for a claim of so many names.
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
                self.learn(*now);
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

    pub(super) async fn renewal(&self, call: &Cmd) -> Result<Renewal, Failure> {
        match self.number(&RENEW, call).await? {
            0 => Ok(Renewal::Lost),
            1 => Ok(Renewal::Extended),
            2 => Ok(Renewal::Missing),
            _ => Err(Failure::Unexpected("quorum/renew.lua")),
        }
    }

    /// Runs a script. Allocates the exchange once there is a connection, because many calls may wait for one.
    pub(super) async fn run(&self, script: &Script, call: &Cmd) -> Result<Value, Failure> {
        #[cfg(unix)]
        if self.link.fast_path().is_some() {
            return Box::pin(self.link.run(script, call)).await;
        }
        let connection = self.link.connection().await?;
        Box::pin(self.link.run_on(&connection, script, call, false, None)).await
    }

    /// Runs a script that answers a number.
    pub(super) async fn number(&self, script: &Script, call: &Cmd) -> Result<i64, Failure> {
        number(&self.run(script, call).await?)
    }
}

/// The answer of a script that answers a number.
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

/// What the clocks of the nodes show now, in µs since 1970: the middle one of those that are known, the lower middle of
/// an even number, so that a minority of wrong clocks has no say.
pub(super) fn common_time<'n>(nodes: impl Iterator<Item = &'n Node>) -> u64 {
    let mut ahead: Vec<i64> = nodes.filter_map(Node::ahead).collect();
    ahead.sort_unstable();
    let middle = ahead.get(ahead.len().saturating_sub(1) / 2);
    middle.map_or(0, |ahead| u64::try_from(local_micros() + ahead).unwrap_or(0))
}

/// Whether a call that failed may yet be carried out.
pub(super) fn in_doubt(failure: &Failure) -> bool {
    matches!(failure, Failure::Call(error) if spoils_connection(error))
}

/// The failure of a call whose answer did not come.
pub(super) fn silence() -> Failure {
    Failure::Call(io::Error::from(io::ErrorKind::TimedOut).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_quickest_answer_tells_what_a_clock_shows() {
        let ahead = |known: Option<Clock>, shown, at| Clock::learn(known, shown, at);
        let first = ahead(None, 5_000_000, 1_000_000);
        assert_eq!(first.ahead, 4_000_000);
        // Half a second later an answer that took 20 ms: what was known, less the drift.
        let slow = ahead(Some(first), 5_480_000, 1_500_000);
        assert_eq!(slow.ahead, 3_999_500);
        let quick = ahead(Some(slow), 5_600_100, 1_600_000);
        assert_eq!(quick.ahead, 4_000_100);
        let set_back = ahead(Some(quick), 1_700_000, 1_700_000);
        assert_eq!(set_back.ahead, 0);
    }
}
