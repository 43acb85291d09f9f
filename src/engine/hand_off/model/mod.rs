//! A model of the hand-off, in which every order of events is tried (the stateright crate).
//!
//! One waiter gets a name by hand-off, and a rival acquires the name whenever the server considers it free. Each message is
//! executed at any time after it was sent, in any order, or never. The server's clock may step. Time is counted in ticks, and the
//! waiter decides by the code of `hand_off/mod.rs`.
//!
//! The releasing command reads the server's clock when it starts. On Redis it writes at once; on MongoDB it may wait for locks
//! before it writes, and the event follows when the majority has the write. An attempt and a renewal that wait after they have read
//! the clock see leases as longer than they are, and grant shorter ones, so their reading and writing are one event here.
//!
//! The waiter may release the lease, at any time. The command passes the waiter's token, and grants the name to the rival with the next
//! one (on MongoDB; on Redis the store counts). A waiter whose call ended holds nothing from then on, so this event is left out.
//! Refusals of the server and messages that are received twice are left out, too.
//! The rival's lease counts from the moment of its grant, earlier than any rival may believe it.

mod steps;

use std::time::Duration;

use stateright::{Checker, HasDiscoveries, Model};

use super::{ClockReading, GrantTimes, Limits};
use crate::clock::Moment;

/// A tick: a message that is one tick late is on time, one that is two ticks late is not.
const TICK_US: u64 = 200_000;
const MOST_DELAY_US: u64 = 250_000;
/// How old a reading may be, in ticks.
const MOST_AGE: i64 = 2;
/// The ticks of a hand-off's lease, and of a whole one.
const GRANT: i64 = 3;
const TTL: i64 = 4;
/// The server's clock at tick 0, in ticks.
const EPOCH: i64 = 1000;

const ONE_HOLDER: &str = "one holder";
const AS_THE_STEP: &str = "two holders for less than the step";
const AS_THE_DELAY: &str = "after a step before the hand-off, two holders for less than the delay of the message";
const AS_THE_AGE: &str = "after a step before the hand-off, two holders for less than the age of the reading";
const TOKENS: &str = "tokens grow";
const HOLDS: &str = "the waiter holds the lock";

/// A command or message in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Flight<T> {
    /// Not sent, received, or not needed any more.
    No,
    /// Sent at this tick.
    Sent(i64),
    /// Executed by the server. The answer is in flight.
    Answered(i64, T),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Holder {
    Releaser,
    Waiter,
    Rival,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Phase {
    Waiting,
    /// Its attempt is in flight.
    Confirming,
    /// The lease ends locally at this time.
    Holding(Moment),
    /// It lost the lease, or the name.
    Ended,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct State {
    now: i64,
    /// The server's clock minus `now`.
    offset: i64,
    /// The ticks of forward steps so far, before and after the start of the hand-off.
    stepped: [i64; 2],
    steps: usize,
    /// The holder in the store, and the end of its lease by the server's clock.
    holder: Option<(Holder, i64)>,
    fence: u64,
    /// When the releasing command started, and the server's clock then.
    release: Option<(i64, i64)>,
    /// The token of the hand-off, which happens once.
    handed_off: Option<u64>,
    /// How late the message was.
    delay: i64,
    phase: Phase,
    /// The token that the waiter knows.
    known_fence: u64,
    reading: Option<ClockReading>,
    heartbeat: Flight<i64>,
    /// The times of the hand-off by the server's clock.
    message: Flight<(i64, i64)>,
    attempt: Flight<Option<u64>>,
    renewal: Flight<bool>,
    /// Whether the waiter's release is in flight.
    is_releasing: bool,
    /// When the rival got the name.
    rival_since: Option<i64>,
    /// Whether a token was not larger than the one before it.
    has_shrunk: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Action {
    Tick,
    Step(i64),
    SendHeartbeat,
    ExecuteHeartbeat,
    ReceiveHeartbeat,
    /// The releaser's command starts, and later writes.
    StartHandOff,
    HandOff,
    ReceiveMessage,
    ExecuteAttempt,
    ReceiveAttempt,
    SendRenewal,
    ExecuteRenewal,
    ReceiveRenewal,
    SendRelease,
    ExecuteRelease,
    RivalAcquires,
}

/// The rules, each of which can be broken.
#[derive(Debug, Clone)]
struct Rules {
    /// The steps of the server's clock that may happen, and how many.
    steps: &'static [i64],
    most_steps: usize,
    /// Nothing is sent after this many ticks.
    end: i64,
    /// A reading counts from the sending of its request, not from its answer.
    counts_from_sending: bool,
    /// The lease counts from the reading, not from the arrival of the message.
    counts_from_reading: bool,
    /// A message whose times do not fit is not accepted.
    checks_times: bool,
    /// The releasing command draws a token for the waiter.
    draws_token: bool,
    /// How old a reading may be, in ticks.
    most_age: i64,
    /// The waiter's release passes the token that the store granted to it, and not that of an earlier lease.
    passes_own_token: bool,
}

const ALL_RULES: Rules = Rules {
    steps: &[],
    most_steps: 0,
    end: 5,
    counts_from_sending: true,
    counts_from_reading: true,
    checks_times: true,
    draws_token: true,
    most_age: MOST_AGE,
    passes_own_token: true,
};

fn moment(tick: i64) -> Moment {
    Moment::from_nanos(1_000_000_000_000) + Duration::from_micros(TICK_US) * tick as u32
}

fn server_us(clock: i64) -> u64 {
    clock as u64 * TICK_US
}

impl State {
    fn clock(&self) -> i64 {
        EPOCH + self.now + self.offset
    }

    /// Returns the holder in the store, unless its lease has expired.
    fn live(&self) -> Option<Holder> {
        self.holder
            .filter(|(_, until)| self.clock() < *until)
            .map(|(holder, _)| holder)
    }

    fn is_waiter_holding(&self) -> bool {
        matches!(self.phase, Phase::Holding(until) if moment(self.now) < until)
    }

    /// Returns for how many ticks the rival has held the name while the waiter holds it.
    fn overlap(&self) -> Option<i64> {
        self.rival_since
            .filter(|_| self.is_waiter_holding())
            .map(|since| self.now - since)
    }

    fn draw(&mut self) -> u64 {
        self.fence += 1;
        self.fence
    }
}

impl Rules {
    /// Returns the local end of the lease if the waiter accepts the message.
    fn accept(&self, state: &State, (granted, until): (i64, i64)) -> Option<Moment> {
        let now = moment(state.now);
        let reading = state.reading?;
        let times = GrantTimes {
            granted_us: server_us(granted),
            until_us: server_us(until),
        };
        let left = Duration::from_micros(TICK_US) * (until - granted) as u32;
        if !self.counts_from_reading {
            return Some(now + left);
        }
        if !self.checks_times {
            let left = times.until_us.saturating_sub(reading.server_us);
            let end = reading.sent + Duration::from_micros(left) * 100 / 101;
            return (end > now).then_some(end);
        }
        let limits = Limits {
            most_delay_us: MOST_DELAY_US,
            most_age: Duration::from_micros(TICK_US) * self.most_age as u32,
        };
        reading.local_end_within(limits, times, now)
    }
}

/// Returns the properties that do not hold.
fn broken(rules: Rules) -> Vec<&'static str> {
    let started = std::time::Instant::now();
    let checker = rules.clone().checker().threads(2).spawn_bfs().join();
    assert!(
        checker.discovery(HOLDS).is_some(),
        "the waiter never holds the lock: {rules:?}"
    );
    let mut found: Vec<_> = checker
        .discoveries()
        .into_keys()
        .filter(|name| *name != HOLDS)
        .collect();
    found.sort_unstable();
    eprintln!(
        "{} states in {:?}: {rules:?}: {found:?}",
        checker.unique_state_count(),
        started.elapsed()
    );
    found
}

/// Asserts that a property does not hold. The search ends there.
fn assert_breaks(rules: Rules, property: &'static str) {
    let until = HasDiscoveries::AllOf([property].into());
    let checker = rules.clone().checker().threads(2).finish_when(until).spawn_bfs().join();
    assert!(checker.discovery(property).is_some(), "{property}: {rules:?}");
}

const FORWARD: &[i64] = &[1, 2, 3];
const BACK: &[i64] = &[-1, -2];

#[test]
fn one_holder_in_every_order_of_events() {
    assert!(broken(ALL_RULES).is_empty());
    let back = Rules {
        steps: BACK,
        most_steps: 1,
        end: 3,
        ..ALL_RULES
    };
    assert!(broken(back).is_empty());
}

/// The documented exception: a step ends every lease early in the store.
#[test]
fn a_step_forward_gives_two_holders_for_no_longer_than_the_step() {
    let forward = Rules {
        steps: FORWARD,
        most_steps: 1,
        end: 3,
        ..ALL_RULES
    };
    assert_eq!(broken(forward), [ONE_HOLDER]);
}

#[test]
fn no_rule_is_superfluous() {
    let rules = Rules {
        counts_from_sending: false,
        ..ALL_RULES
    };
    assert_breaks(rules, ONE_HOLDER);
    let rules = Rules {
        counts_from_reading: false,
        ..ALL_RULES
    };
    assert_breaks(rules, ONE_HOLDER);
    let rules = Rules {
        checks_times: false,
        steps: FORWARD,
        most_steps: 1,
        end: 3,
        ..ALL_RULES
    };
    assert_breaks(rules, AS_THE_DELAY);
    let rules = Rules {
        most_age: MOST_AGE + 1,
        steps: FORWARD,
        most_steps: 1,
        end: 3,
        ..ALL_RULES
    };
    assert_breaks(rules, AS_THE_AGE);
    let rules = Rules {
        draws_token: false,
        ..ALL_RULES
    };
    assert_breaks(rules, TOKENS);
    let rules = Rules {
        passes_own_token: false,
        ..ALL_RULES
    };
    assert_breaks(rules, TOKENS);
}
