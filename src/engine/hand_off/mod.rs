//! The time until which a hand-off lasts, on the local clock.
//!
//! A waiter that gets a name by hand-off has sent no request from whose sending its lease could count. But its process has read the
//! server's clock with a heartbeat or an attempt: the request was sent at the local time `sent`, and the server's clock showed `server`
//! after that. So at a later local time `now` the server's clock shows at most
//!
//! ```text
//! upper(now) = server + (now - sent) * 1.01
//! ```
//!
//! where 1 % is the allowance for clock drift ([`crate::model::Ttl::validity`]). The lease ends at `until` by the server's clock, and
//! locally when `upper` reaches `until - 2 ms`. `docs/proofs/hand-off.md` shows what a step of the server's clock costs. `model/` tries
//! every order of events.

#[cfg(test)]
mod model;

use std::time::Duration;

use crate::clock::Moment;

/// What a waiter accepts as a grant. For anything else it makes an attempt.
#[derive(Debug, Clone, Copy)]
struct Limits {
    /// How old the message may be by `upper`, in microseconds. A message of another delay would hide a step of its length.
    most_delay_us: u64,
    /// How old the reading may be, and so the delay of a message that hides a step: for less than this there may be two holders
    /// (`docs/guarantees.md`). A heartbeat reads the clock every 2 s, and a task may be late by the rest.
    most_age: Duration,
}

const LIMITS: Limits = Limits {
    most_delay_us: 250_000,
    most_age: Duration::from_secs(3),
};
/// The allowance for the server's resolution of a millisecond.
const RESOLUTION_US: u64 = 2000;

/// A reading of the server's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in crate::engine) struct ClockReading {
    /// When the request was sent, at the latest.
    pub(in crate::engine) sent: Moment,
    /// The server's clock when it executed the request, in microseconds since 1970.
    pub(in crate::engine) server_us: u64,
}

/// The times of a hand-off by the server's clock, in microseconds since 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in crate::engine) struct GrantTimes {
    /// When the server handed the name off.
    pub(in crate::engine) granted_us: u64,
    /// When the lease ends.
    pub(in crate::engine) until_us: u64,
}

impl ClockReading {
    /// Returns the largest value that the server's clock may show now, unless it has stepped forward since the reading.
    fn upper_us(&self, now: Moment) -> u64 {
        let passed = now.to_nanos().saturating_sub(self.sent.to_nanos());
        self.server_us
            .saturating_add(passed.saturating_add(passed / 100) / 1000 + 1)
    }

    /// Returns the local end of a lease whose message arrived now.
    ///
    /// # Behavior
    /// `None`: the message is late, a clock has stepped, or less than half of the lease is left. The waiter then makes an attempt.
    pub(in crate::engine) fn local_end(&self, grant: GrantTimes, now: Moment) -> Option<Moment> {
        self.local_end_within(LIMITS, grant, now)
    }

    fn local_end_within(&self, limits: Limits, grant: GrantTimes, now: Moment) -> Option<Moment> {
        let upper = self.upper_us(now);
        let is_on_time = (grant.granted_us..=grant.granted_us.saturating_add(limits.most_delay_us)).contains(&upper);
        if !is_on_time || now.to_nanos().saturating_sub(self.sent.to_nanos()) > limits.most_age.as_nanos() as u64 {
            return None;
        }
        let left = grant
            .until_us
            .saturating_sub(RESOLUTION_US)
            .saturating_sub(self.server_us);
        let end = self.sent + Duration::from_micros(left) * 100 / 101;
        let granted = Duration::from_micros(grant.until_us.saturating_sub(grant.granted_us));
        (end > now + granted / 2).then_some(end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_700_000_000_000_000;
    const MS: u64 = 1000;

    fn at_ms(ms: u64) -> Moment {
        Moment::from_nanos(1_000_000_000_000 + ms * 1_000_000)
    }

    /// Returns the local end, in ms after the reading, of a lease of 2 s that was granted `granted` ms after the reading, and
    /// whose message arrived at `now`.
    fn end(granted: i64, now: u64) -> Option<f64> {
        let reading = ClockReading {
            sent: at_ms(0),
            server_us: S,
        };
        let granted_us = S.checked_add_signed(granted * 1000).unwrap();
        let grant = GrantTimes {
            granted_us,
            until_us: granted_us + 2000 * MS,
        };
        let end = reading.local_end(grant, at_ms(now))?;
        Some((end.to_nanos() - at_ms(0).to_nanos()) as f64 / 1e6)
    }

    #[test]
    fn a_lease_ends_before_the_fastest_clock_of_a_server_shows_its_end() {
        for granted in [0, 1, 500, 1999] {
            let end = end(granted, granted as u64 + 1).unwrap();
            let server_at_end = end * 1.01;
            assert!(server_at_end <= granted as f64 + 1998.0, "{granted}: {end}");
            assert!(server_at_end > granted as f64 + 1997.9, "{granted}: {end}");
        }
    }

    #[test]
    fn late_messages_old_readings_and_stepped_clocks_are_not_accepted() {
        assert!(end(1000, 1200).is_some());
        assert_eq!(end(1000, 1300), None, "late");
        assert_eq!(end(1000, 900), None, "the clock stepped forward");
        assert_eq!(end(-1000, 0), None, "the clock stepped back");
        assert!(end(2520, 2500).is_some(), "the server's clock is 1 % faster");
        assert!(end(2990, 2999).is_some());
        assert_eq!(end(2999, 3001), None, "the reading is old");
    }

    #[test]
    fn a_lease_with_less_than_half_of_its_time_left_is_not_accepted() {
        let reading = ClockReading {
            sent: at_ms(0),
            server_us: S,
        };
        let short = |ms| GrantTimes {
            granted_us: S,
            until_us: S + ms * MS,
        };
        assert!(reading.local_end(short(100), at_ms(40)).is_some());
        assert_eq!(reading.local_end(short(100), at_ms(60)), None);
        assert_eq!(reading.local_end(short(1), at_ms(0)), None);
    }
}
