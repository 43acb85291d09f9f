//! Removes from a node what its calls left there: releases that it did not confirm, and votes that may arrive late.
//!
//! There is one bounded list and at most one task per node.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio_util::task::task_tracker::TaskTrackerToken;

use super::Quorum;
use super::acquire::request_lifetime::RequestLifetime;
use super::scripts::{RELEASE, ROLLBACK};
use crate::backoff::Backoff;
use crate::clock::Moment;
use crate::model::Claim;

/// The largest number of entries of one node. While the list is full, further entries are dropped: the keys that they would
/// remove expire with their ttl, and the oldest entries are those of locks that were granted before the node failed.
const MAX_ENTRIES: usize = 30_000;
/// How many entries are sent to a node together.
const BATCH: usize = 64;
/// The longest pause while a node does not answer.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// The pauses while a node does not answer.
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(100), LONGEST_PAUSE).with_jitter(0.0);
/// Delays of the repeats of the removal of a vote. Bytes that a broken connection left in a buffer are executed or lost within
/// about a minute.
const REPEATS: [Duration; 3] = [
    Duration::from_millis(500),
    Duration::from_secs(5),
    Duration::from_secs(60),
];
/// The shortest time for which an entry is kept. Otherwise it is kept for the ttl of its claim.
const KEPT: Duration = Duration::from_secs(66);

/// What an entry removes.
#[derive(Debug)]
pub(super) enum Remains {
    /// The names that the owner holds. They stay busy until `until`.
    Lease { until: Moment },
    /// The vote with this value, after the end of the request lifetime. The removal is repeated, because the node may still execute a
    /// request after it has confirmed the removal.
    Vote {
        value: Box<str>,
        lifetime: Arc<RequestLifetime>,
    },
}

#[derive(Debug)]
struct Entry {
    claim: Claim,
    remains: Remains,
    /// The number of repeats that were scheduled.
    repeats: usize,
    ends: Moment,
    /// A close waits for the first attempt of the removal, unless the node does not answer.
    urgent: Option<TaskTrackerToken>,
}

/// The list of one node.
#[derive(Debug, Default)]
pub(super) struct Cleanup {
    list: Mutex<List>,
    added: Notify,
}

#[derive(Debug, Default)]
struct List {
    /// By the time of their next removal, and in order of arrival.
    entries: BTreeMap<(Moment, u64), Entry>,
    /// The number of the newest entry.
    last_number: u64,
    is_served: bool,
}

impl List {
    fn push(&mut self, due: Moment, entry: Entry) {
        self.last_number += 1;
        self.entries.insert((due, self.last_number), entry);
    }

    /// Removes a batch of due entries from the list.
    fn take(&mut self) -> Vec<Entry> {
        let now = Moment::now();
        let mut batch = Vec::new();
        while batch.len() < BATCH
            && let Some(entry) = self.entries.first_entry()
            && entry.key().0 <= now
        {
            batch.push(entry.remove());
        }
        batch
    }
}

impl Cleanup {
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.list.lock().entries.len()
    }
}

impl Quorum {
    /// Removes the remains from a node in the background.
    pub(super) fn clean_up(self: &Arc<Self>, node: usize, claim: &Claim, remains: Remains) {
        let cleanup = &self.nodes[node].cleanup;
        let mut list = cleanup.list.lock();
        if list.entries.len() >= MAX_ENTRIES {
            return;
        }
        let entry = Entry {
            claim: claim.clone(),
            remains,
            repeats: 0,
            ends: Moment::now() + claim.ttl.duration().max(KEPT),
            urgent: Some(self.urgent.token()),
        };
        list.push(Moment::now(), entry);
        let is_served = std::mem::replace(&mut list.is_served, true);
        drop(list);
        if is_served {
            cleanup.added.notify_one();
        } else {
            self.spawn(serve(self.clone(), node));
        }
    }

    /// Returns whether the node has confirmed the removal. Votes whose lifetime has not ended are removed only after its end.
    async fn remove(self: &Arc<Self>, node: usize, entry: &Entry) -> bool {
        let (script, call) = match &entry.remains {
            // The request lifetime still lasts: the next repeat checks again.
            Remains::Vote { lifetime, .. } if !lifetime.has_ended() => return true,
            Remains::Vote { value, .. } => (&ROLLBACK, self.rollback_call(&entry.claim, value)),
            Remains::Lease { until } => (&RELEASE, self.release_call(&entry.claim, *until)),
        };
        let removal = self.nodes[node].number(script, &call);
        matches!(tokio::time::timeout(self.node_timeout, removal).await, Ok(Ok(_)))
    }
}

/// Serves the list of one node until it is empty.
async fn serve(quorum: Arc<Quorum>, node: usize) {
    let cleanup = &quorum.nodes[node].cleanup;
    let mut backoff = BACKOFF;
    loop {
        let (batch, next) = {
            let mut list = cleanup.list.lock();
            let batch = list.take();
            let next = list.entries.first_key_value().map(|((due, _), _)| *due);
            if batch.is_empty() && next.is_none() {
                *list = List::default();
                return;
            }
            (batch, next)
        };
        if batch.is_empty() {
            let time = next.map_or(LONGEST_PAUSE, Moment::remaining);
            // An entry that is added meanwhile is due at once.
            let _ = tokio::time::timeout(time, cleanup.added.notified()).await;
            continue;
        }
        let confirmed = join_all(batch.iter().map(|entry| quorum.remove(node, entry))).await;
        let has_failed = confirmed.contains(&false);
        {
            let mut list = cleanup.list.lock();
            for (mut entry, is_confirmed) in batch.into_iter().zip(confirmed) {
                entry.urgent = None;
                if !is_confirmed && !entry.ends.is_past() {
                    list.push(Moment::now(), entry);
                } else if is_confirmed
                    && let Remains::Vote { .. } = entry.remains
                    && let Some(pause) = REPEATS.get(entry.repeats)
                {
                    entry.repeats += 1;
                    list.push(Moment::now() + *pause, entry);
                }
            }
            if has_failed {
                list.entries.values_mut().for_each(|entry| entry.urgent = None);
            }
        }
        if has_failed {
            tokio::time::sleep(backoff.delay()).await;
        } else {
            backoff.reset();
        }
    }
}
