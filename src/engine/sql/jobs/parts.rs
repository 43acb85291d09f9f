//! The parts of a queue.

use std::{ops::RangeInclusive, time::Duration};

use super::{Job, Receiver, SHARE};

/// The bounds of the number of calls that a statement takes at least, if that many wait. Fewer are not worth a round trip and a
/// commit.
const LEAST: RangeInclusive<u128> = 16..=64;

/// The time that a service needs from the answer of a call to its caller's next call, when many callers share a core.
const PER_CALL: Duration = Duration::from_micros(20);

/// The initial value of the mean time of a statement, and the largest time that counts.
pub(super) const MAX_STATEMENT_TIME: Duration = Duration::from_millis(2);

/// The room for jobs that a part keeps after a burst.
const KEPT: usize = 1024;

impl Receiver {
    /// Waits for jobs of some parts: renewals and releases, reads, attempts. `false`: these parts are empty and have no sender.
    pub(super) async fn have_jobs(&mut self, parts: [bool; 3]) -> bool {
        let [changes, reads, attempts] = parts;
        for part in [&mut self.renewals, &mut self.releases, &mut self.reads] {
            if part.len() <= KEPT {
                part.shrink_to(KEPT);
            }
        }
        loop {
            while let Ok(arrival) = self.arrivals.try_recv() {
                self.enter(arrival);
            }
            if changes && !(self.renewals.is_empty() && self.releases.is_empty())
                || reads && !self.reads.is_empty()
                || attempts && !self.attempts.is_empty()
            {
                return true;
            }
            let Some(arrival) = self.arrivals.recv().await else {
                return false;
            };
            self.enter(arrival);
        }
    }

    /// Moves jobs of a part to `batch`: up to `calls` that are no renewals, and until their size is `most`. Returns their size. A claim
    /// counts as `renewals_per_claim`, and a renewal as 1.
    pub(super) fn take(&mut self, part: usize, (calls, most): (usize, usize), batch: &mut Vec<Job>) -> usize {
        let (mut taken, mut size) = (0, 0);
        let share = SHARE * self.limit.renewals_per_claim;
        // The last share goes to releases first.
        while size < most
            && taken < calls
            && let Some(job) = self.next_of(part, size + share < most)
        {
            if job.is_cancelled() {
                continue;
            }
            if let Job::Renew(..) = job {
                size += job.claims();
            } else {
                taken += 1;
                size += job.claims() * self.limit.renewals_per_claim;
            }
            batch.push(job);
        }
        size
    }
}

/// For stores where each part has statements of its own.
impl Receiver {
    /// Waits for jobs of some parts, and moves those of the next statement of each part to `batch`. `false`: these parts are empty and have no
    /// sender.
    ///
    /// A statement takes half of the calls that wait or are executed: the server executes it while the callers of the other half
    /// continue. If it took all of many, server and callers would wait for each other. But it takes at least as many as callers make
    /// in the time of a statement: where commits are slow or the server is distant, halves would take as long as the whole.
    /// Renewals do not count: usually no caller waits for one.
    ///
    /// # Cancellation
    /// Cancel-safe: no job is lost.
    pub(in crate::engine::sql) async fn next_of_parts(&mut self, batch: &mut Vec<Job>, parts: [bool; 3]) -> bool {
        if !self.have_jobs(parts).await {
            return false;
        }
        let is_counted = |job: &Job| !matches!(job, Job::Renew(..));
        let waiting = self.releases.len() + self.reads.len() + self.attempts.len();
        let is_executed = |part: &usize| !parts[*part];
        let executed: usize = (0..3).filter(is_executed).map(|part| self.counted_in_batch[part]).sum();
        let calls = (waiting + executed).div_ceil(2).max(self.least());
        let most = self.limit.claims * self.limit.renewals_per_claim;
        for part in (0..3).filter(|part| parts[*part]) {
            let before = batch.len();
            self.take(part, (calls, most), batch);
            self.counted_in_batch[part] = batch[before..].iter().filter(|job| is_counted(job)).count();
        }
        true
    }

    /// Adds the time of a statement of attempts, which waits for a commit, to the mean. Counts at most [`MAX_STATEMENT_TIME`]: the
    /// statement may have waited for a connection.
    pub(in crate::engine::sql) fn took(&mut self, time: Duration) {
        self.statement_time = (self.statement_time * 3 + time.min(MAX_STATEMENT_TIME)) / 4;
    }

    fn least(&self) -> usize {
        let calls = self.statement_time.as_nanos() / PER_CALL.as_nanos();
        calls.clamp(*LEAST.start(), *LEAST.end()) as usize
    }
}

#[cfg(all(test, any(feature = "postgres", feature = "mysql")))]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use crate::engine::sql::Page;
    use crate::engine::sql::jobs::{Job, Limit, Receiver, Reply, Sender, queue};
    use crate::model::{Claim, Key, OwnerToken, Process, Ttl};

    fn claim(name: &str) -> Claim {
        let ttl = Ttl::clamped(Duration::from_secs(30));
        Claim::new(
            &[Key::new(name).unwrap()],
            OwnerToken::fresh(),
            ttl,
            Arc::new(Process::current()),
        )
    }

    #[tokio::test]
    async fn a_statement_takes_half_of_the_calls_that_wait_or_are_executed() {
        let (sender, mut receiver) = queue(Limit::claims(128));
        let mut answers = Vec::new();
        let mut attempts = |count: usize| {
            for name in 0..count {
                let (reply, answer) = Reply::new();
                let claim = Arc::new(claim(&format!("n{name}")));
                sender.send(Job::Acquire(vec![claim], Arc::default(), reply));
                answers.push(answer);
            }
        };
        attempts(200);
        let mut next = async |parts| {
            let mut batch = Vec::new();
            assert!(receiver.next_of_parts(&mut batch, parts).await);
            batch.len()
        };
        assert_eq!(next([true; 3]).await, 100);
        assert_eq!(
            next([true; 3]).await,
            64,
            "the minimum, before the time of a statement is known"
        );
        assert_eq!(next([true; 3]).await, 36);
        attempts(300);
        assert_eq!(next([true; 3]).await, 128, "the limit");
        assert_eq!(next([true; 3]).await, 86);
    }

    #[tokio::test]
    async fn a_statement_takes_as_many_calls_as_are_made_in_the_time_of_one() {
        let (sender, mut receiver) = queue(Limit::claims(128));
        let mut answers = Vec::new();
        for name in 0..230 {
            let (reply, answer) = Reply::new();
            sender.send(Job::Inspect(Page::of_name(format!("n{name}").into(), false), reply));
            answers.push(answer);
        }
        let mut batch = Vec::new();
        for (us, expected) in [(0, 115), (805, 58), (805, 40), (0, 16)] {
            (0..20).for_each(|_| receiver.took(Duration::from_micros(us)));
            assert!(receiver.next_of_parts(&mut batch, [true; 3]).await);
            assert_eq!(batch.drain(..).count(), expected, "{us} us");
        }
    }

    /// The renewals arrive after more releases than the statement takes.
    #[tokio::test]
    async fn a_statement_takes_all_renewals_first() {
        let (sender, mut receiver) = queue(Limit::claims(256));
        let (mut renewals, mut releases) = (Vec::new(), Vec::new());
        for name in 0..100 {
            let (reply, answer) = Reply::new();
            sender.send(Job::Release(vec![claim(&format!("n{name}"))], Duration::ZERO, reply));
            releases.push(answer);
        }
        for name in 0..60 {
            let claim = claim(&format!("n{name}"));
            let (reply, answer) = Reply::new();
            sender.send(Job::Renew(claim.clone(), claim.ttl, reply));
            renewals.push(answer);
        }
        let mut batch = Vec::new();
        for expected in [(60, 64), (0, 36)] {
            assert!(receiver.next_of_parts(&mut batch, [true; 3]).await);
            let is_renewal = |job: &Job| matches!(job, Job::Renew(..));
            assert!(batch.is_sorted_by_key(|job| !is_renewal(job)));
            let renewals = batch.iter().filter(|job| is_renewal(job)).count();
            assert_eq!((renewals, batch.len() - renewals), expected);
            batch.clear();
        }
    }

    #[tokio::test]
    async fn releases_have_a_share_of_the_statements_with_many_renewals() {
        let (sender, mut receiver) = queue(Limit::claims(64));
        let (reply, _answer) = Reply::new();
        sender.send(Job::Release(vec![claim("n")], Duration::ZERO, reply));
        let mut renewals = Vec::new();
        for name in 0..100 {
            let claim = claim(&format!("n{name}"));
            let (reply, answer) = Reply::new();
            sender.send(Job::Renew(claim.clone(), claim.ttl, reply));
            renewals.push(answer);
        }
        let mut batch = Vec::new();
        assert!(receiver.next_of_parts(&mut batch, [true; 3]).await);
        assert_eq!(batch.len(), 64);
        assert!(batch.iter().any(|job| matches!(job, Job::Release(..))));
    }

    /// Returns a queue with one job of each part.
    fn queue_of_three() -> (Sender, Receiver, impl Sized) {
        let (sender, receiver) = queue(Limit::claims(64));
        let claim = claim("n");
        let ((read, was_read), (renewed, was_renewed), (granted, was_granted)) =
            (Reply::new(), Reply::new(), Reply::new());
        sender.send(Job::Inspect(Page::of_name(b"n".to_vec(), false), read));
        sender.send(Job::Renew(claim.clone(), claim.ttl, renewed));
        sender.send(Job::Acquire(vec![Arc::new(claim)], Arc::default(), granted));
        (sender, receiver, (was_read, was_renewed, was_granted))
    }

    #[tokio::test]
    async fn a_part_of_the_queue_is_left_out() {
        let (_sender, mut receiver, _answers) = queue_of_three();
        let mut batch = Vec::new();
        assert!(receiver.next_of_parts(&mut batch, [true, false, false]).await);
        assert!(matches!(batch[..], [Job::Renew(..)]));
        assert!(receiver.next_of_parts(&mut batch, [true, true, false]).await);
        assert!(matches!(batch[..], [_, Job::Inspect(..)]));
        assert!(receiver.next_of_parts(&mut batch, [false, false, true]).await);
        assert!(matches!(batch[..], [_, _, Job::Acquire(..)]));
    }
}
