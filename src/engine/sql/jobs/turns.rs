//! The order of the parts of a queue when they cannot be executed at the same time.

use super::Receiver;

impl Receiver {
    /// Returns the first of `parts` that has jobs, in their order from `start` on. If none has jobs, returns all of `parts`.
    pub(in crate::engine::sql) fn first_of(&self, parts: [bool; 3], start: usize) -> [bool; 3] {
        let has_attempts = !(self.attempts.is_empty() && self.waiting.is_empty());
        let has_jobs = [!self.changes.is_empty(), !self.reads.is_empty(), has_attempts];
        let mut order = (start..start + 3).map(|part| part % 3);
        let first = order.find(|part| parts[*part] && has_jobs[*part]);
        first.map_or(parts, |first| std::array::from_fn(|part| part == first))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use crate::engine::sql::jobs::{Job, Limit, Reply, queue};
    use crate::model::{Claim, Key, OwnerToken, Process, Ttl};

    #[test]
    fn each_part_with_jobs_has_its_turn() {
        let (sender, receiver) = queue(Limit::claims(64));
        assert_eq!(receiver.first_of([true; 3], 1), [true; 3]);
        let key = Key::new("n").unwrap();
        let ttl = Ttl::clamped(Duration::from_secs(30));
        let claim = Claim::new(
            std::slice::from_ref(&key),
            OwnerToken::fresh(),
            ttl,
            Arc::new(Process::current()),
        );
        let ((read, _read), (renewed, _renewed), (granted, _granted)) = (Reply::new(), Reply::new(), Reply::new());
        sender.send(Job::Inspect(key, read));
        sender.send(Job::Renew(claim.clone(), ttl, renewed));
        let [changes, reads, attempts] = [[true, false, false], [false, true, false], [false, false, true]];
        assert_eq!(receiver.first_of([true; 3], 2), changes, "there are no attempts");
        sender.send(Job::Acquire(vec![Arc::new(claim)], Arc::default(), granted));
        let turns = [0, 1, 2, 3].map(|start| receiver.first_of([true; 3], start));
        assert_eq!(turns, [changes, reads, attempts, changes]);
        assert_eq!(receiver.first_of([false, true, true], 0), reads);
    }
}
