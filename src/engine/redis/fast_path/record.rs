//! The records of grants for `inspect`.

use std::collections::HashMap;

use redis::Cmd;

use crate::engine::redis::connection::liveness::ATTEMPTS;
use crate::engine::redis::keys::{Layout, Part, RECORD_KEPT_MS};
use crate::engine::redis::scripts::RECORD;
use crate::model::{Claim, Fence, Key, OwnerToken};

/// How many records are written at the end of the ticks of their grants, from one round of the watchdog to the next.
const WRITTEN_AT_ONCE: usize = 8;

/// The record of a grant.
pub(in super::super) struct Record {
    pub(in super::super) claim: Claim,
    pub(in super::super) fence: Fence,
    /// On a node of a quorum: the number of the round, and the time of the grant in ms since 1970.
    pub(in super::super) attempt: Option<(u64, u64)>,
}

impl Record {
    /// Returns the call that stores it.
    pub(in super::super) fn call(&self, layout: &Layout) -> Cmd {
        let Record { claim, fence, attempt } = self;
        let names = claim.keys().iter().map(Key::as_str);
        let mut call = RECORD.call(layout, &[Part::Lock, Part::Fence], names);
        let (owner, process) = (claim.owner.as_str(), &claim.process);
        let (value, by, since_ms) = match attempt {
            None => (owner.to_owned(), format!("{} {}", process.pid, process.host), None),
            Some((number, since_ms)) => {
                let by = format!("{}:{number} {}", process.pid, process.host);
                (format!("{owner}.{number}"), by, Some(since_ms))
            }
        };
        call.arg(value)
            .arg(fence.0)
            .arg(by)
            .arg(RECORD_KEPT_MS)
            .arg(claim.ttl.as_millis());
        if let Some(since_ms) = since_ms {
            call.arg(since_ms);
        }
        call
    }
}

/// The records that are not written yet.
///
/// # Behavior
/// A few are written at the end of the tick of their grants, so that a process that dies a moment later leaves its record. The
/// others are written by the watchdog, in the second round after the grant: a busy service releases most of its locks earlier,
/// and a record would cost the server as much as the grant.
#[derive(Default)]
pub(super) struct Records {
    /// Those of this tick.
    new: HashMap<OwnerToken, Record>,
    /// Those for the watchdog: since its last round, and from before.
    deferred: [HashMap<OwnerToken, Record>; 2],
    /// How many were written at the end of a tick since the last round.
    written: usize,
}

impl Records {
    pub(super) fn is_empty(&self) -> bool {
        self.new.is_empty() && self.deferred.iter().all(HashMap::is_empty)
    }

    pub(super) fn insert(&mut self, record: Record) {
        // On a quorum a transfer does not wait for records.
        let is_at_once = record.attempt.is_some() || self.written + self.new.len() < WRITTEN_AT_ONCE;
        let records = if is_at_once {
            &mut self.new
        } else {
            &mut self.deferred[0]
        };
        records.insert(record.claim.owner.clone(), record);
    }

    pub(super) fn remove(&mut self, owner: &OwnerToken) {
        for records in std::iter::once(&mut self.new).chain(&mut self.deferred) {
            if !records.is_empty() && records.remove(owner).is_some() {
                break;
            }
        }
    }

    /// Takes those to write at the end of a tick.
    pub(super) fn take_new(&mut self) -> Vec<Record> {
        self.written += self.new.len();
        take(&mut self.new)
    }

    /// Takes those to write in a round of the watchdog.
    pub(super) fn take_due(&mut self) -> Vec<Record> {
        self.written = 0;
        self.deferred.reverse();
        take(&mut self.deferred[0])
    }

    /// Takes all.
    pub(super) fn take_all(&mut self) -> Vec<Record> {
        let maps = std::iter::once(&mut self.new).chain(&mut self.deferred);
        maps.flat_map(take).collect()
    }
}

/// Empties a map. Its capacity is kept for the next records, unless it is large.
fn take(records: &mut HashMap<OwnerToken, Record>) -> Vec<Record> {
    let taken = records.drain().map(|(_, record)| record).collect();
    records.shrink_to(ATTEMPTS);
    taken
}

#[cfg(test)]
mod tests {
    use super::super::in_flight::tests::claims;
    use super::*;

    fn record(claim: &Claim, attempt: Option<(u64, u64)>) -> Record {
        let (claim, fence) = (claim.clone(), Fence(1));
        Record { claim, fence, attempt }
    }

    #[test]
    fn a_few_records_are_written_at_once_and_the_others_in_the_second_round() {
        let (claims, mut records) = (claims(WRITTEN_AT_ONCE + 4), Records::default());
        let (first, others) = claims.split_at(WRITTEN_AT_ONCE);
        first.iter().for_each(|claim| records.insert(record(claim, None)));
        records.remove(&first[0].owner);
        assert_eq!(records.take_new().len(), WRITTEN_AT_ONCE - 1);
        others[..3].iter().for_each(|claim| records.insert(record(claim, None)));
        assert_eq!(records.take_new().len(), 1, "a released lock does not count");
        assert!(records.take_due().is_empty(), "they are younger than a round");
        records.insert(record(&others[3], None));
        assert_eq!(records.take_new().len(), 1, "a round later");
        records.remove(&others[1].owner);
        let due: Vec<Claim> = records.take_due().into_iter().map(|record| record.claim).collect();
        assert_eq!(
            due.iter().map(|claim| &claim.owner).collect::<Vec<_>>(),
            [&others[2].owner]
        );
        assert!(records.is_empty());
    }

    #[test]
    fn records_of_a_quorum_are_not_deferred() {
        let (claims, mut records) = (claims(2 * WRITTEN_AT_ONCE), Records::default());
        claims
            .iter()
            .for_each(|claim| records.insert(record(claim, Some((1, 1)))));
        assert_eq!(records.take_new().len(), claims.len());
    }

    #[test]
    fn all_can_be_taken() {
        let (claims, mut records) = (claims(3 * WRITTEN_AT_ONCE), Records::default());
        claims[..2 * WRITTEN_AT_ONCE]
            .iter()
            .for_each(|claim| records.insert(record(claim, None)));
        assert!(records.take_due().is_empty());
        claims[2 * WRITTEN_AT_ONCE..]
            .iter()
            .for_each(|claim| records.insert(record(claim, None)));
        assert_eq!(records.take_all().len(), claims.len());
        assert!(records.is_empty());
    }
}
