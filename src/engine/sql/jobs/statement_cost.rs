//! How long the statements of attempts take, and how many calls they have.

use std::time::Duration;

/// Number of calls that a statement takes at least. Fewer are not worth a round trip and a commit.
const LEAST: usize = 32;
/// Number of statements between two samples.
const SAMPLE_INTERVAL: u32 = 32;
/// The weight of the last statement in the means.
const WEIGHT: f32 = 0.25;

/// Estimates the fixed time of a statement, which is its round trip and its commit, and the time that each call adds. Compares usual
/// statements with samples, which have half of the calls. Both are exponentially weighted means.
///
/// # Behavior
/// With a distant server, or one whose commits are slow, a statement with half of the calls takes almost as long as one with all of
/// them, and half as many calls are executed in that time. Only statements of different sizes show that, so a sample has half of the calls.
#[derive(Debug, Default)]
pub(in crate::engine::sql) struct StatementCost {
    usual: Option<Mean>,
    sample: Option<Mean>,
    /// The number of usual statements with [`LEAST`] calls or more since the last sample.
    since_sample: u32,
    /// Whether the current statement is a sample.
    is_sample: bool,
}

#[derive(Debug, Clone, Copy)]
struct Mean {
    calls: f32,
    seconds: f32,
}

impl StatementCost {
    /// Decides whether the next statement is a sample. Returns how many attempts it takes at most. `half`: half of the calls that wait or
    /// are executed. `waiting`: the number of attempts that wait, up to the limit of a statement.
    pub(in crate::engine::sql) fn size(&mut self, half: usize, waiting: usize) -> usize {
        let size = half.max(self.least());
        let taken = size.min(waiting);
        let is_large = taken >= LEAST;
        let interval = if self.sample.is_some() { SAMPLE_INTERVAL } else { 1 };
        self.is_sample = is_large && self.usual.is_some() && self.since_sample >= interval;
        if self.is_sample {
            self.since_sample = 0;
            return taken / 2;
        }
        self.since_sample += u32::from(is_large);
        size
    }

    /// Records how long the current statement took. Only for a statement that granted a name: another one does not wait for a commit.
    /// Ignores a usual statement with fewer than [`LEAST`] calls.
    pub(in crate::engine::sql) fn record(&mut self, calls: usize, took: Duration) {
        let mean = match self.is_sample {
            true => &mut self.sample,
            false if calls >= LEAST => &mut self.usual,
            false => return,
        };
        let (calls, seconds) = (calls as f32, took.as_secs_f32());
        *mean = Some(mean.map_or(Mean { calls, seconds }, |before| Mean {
            calls: before.calls + (calls - before.calls) * WEIGHT,
            seconds: before.seconds + (seconds - before.seconds) * WEIGHT,
        }));
    }

    /// Returns the minimum number of calls of a statement: as many as together take half as long as its round trip and its commit, because
    /// the callers take about as long again. [`LEAST`] until both are known.
    pub(in crate::engine::sql) fn least(&self) -> usize {
        let (Some(usual), Some(sample)) = (self.usual, self.sample) else {
            return LEAST;
        };
        let more_calls = usual.calls - sample.calls;
        // The sizes are too similar to measure the time of a call.
        if more_calls.abs() < (LEAST / 4) as f32 {
            return LEAST;
        }
        let per_call = (usual.seconds - sample.seconds) / more_calls;
        let fixed = usual.seconds - per_call * usual.calls;
        // More calls take no more time: take all of them.
        if per_call <= 0.0 {
            return usize::MAX;
        }
        ((fixed / per_call / 2.0) as usize).max(LEAST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Simulates statements with `calls` in flight that take `fixed`, and 20 µs for each call. Returns the size of the last one.
    fn last_size(cost: &mut StatementCost, statements: usize, calls: usize, fixed: Duration) -> usize {
        let mut size = 0;
        for _ in 0..statements {
            size = cost.size(calls / 2, calls).min(calls);
            cost.record(size, fixed + Duration::from_micros(20) * size as u32);
        }
        size
    }

    #[test]
    fn a_statement_takes_half_of_the_calls_to_a_near_server_and_all_to_a_distant_one() {
        let (near, distant) = (Duration::from_micros(300), Duration::from_millis(6));
        let mut cost = StatementCost::default();
        assert_eq!(last_size(&mut cost, 3, 100, distant), 100);
        assert_eq!(last_size(&mut cost, 1000, 100, near), 50);
        assert_eq!(last_size(&mut cost, 1000, 100, distant), 100);
        // Few calls do not change it.
        assert_eq!(last_size(&mut cost, 300, 8, near), 8);
        assert_eq!(last_size(&mut cost, 10, 100, distant), 100);
    }

    #[test]
    fn the_size_recovers_after_a_pause_of_the_process() {
        let (near, distant, pause) = (
            Duration::from_micros(300),
            Duration::from_millis(6),
            Duration::from_secs(1),
        );
        for paused in 0..3 {
            let mut cost = StatementCost::default();
            last_size(&mut cost, paused, 100, distant);
            last_size(&mut cost, 1, 100, pause);
            assert_eq!(last_size(&mut cost, 1000, 100, distant), 100, "{paused} {cost:?}");
            last_size(&mut cost, 1, 100, pause);
            assert_eq!(last_size(&mut cost, 1000, 100, near), 50, "{paused} {cost:?}");
        }
    }

    /// A sample may be larger than the usual statements.
    #[test]
    fn a_changing_number_of_calls_makes_no_difference() {
        for (fixed, has_half) in [(Duration::from_micros(300), true), (Duration::from_millis(6), false)] {
            let mut cost = StatementCost::default();
            for round in 0..1000 {
                last_size(&mut cost, 1, if round % 3 == 0 { 250 } else { 40 }, fixed);
            }
            let sizes = [0; 3].map(|_| last_size(&mut cost, 1, 200, fixed));
            assert_eq!(
                sizes.contains(&100) && !sizes.contains(&200),
                has_half,
                "{sizes:?} {cost:?}"
            );
        }
    }

    #[test]
    fn samples_are_rare() {
        let mut cost = StatementCost::default();
        let sizes = (0..200).map(|_| last_size(&mut cost, 1, 100, Duration::from_millis(6)));
        let samples = sizes.filter(|size| *size < 100).count();
        assert!((5..10).contains(&samples), "{samples}");
        // Statements that grant nothing are not recorded.
        let samples = (0..200).filter(|_| cost.size(50, 100) < 100).count();
        assert!((5..10).contains(&samples), "{samples}");
    }
}
