//! Removes from a node what its calls left there: releases that it did not confirm, and votes that may arrive late.
//!
//! There is one bounded list and at most one task per node.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio_util::task::task_tracker::TaskTrackerToken;

use super::Quorum;
use super::request_lifetime::RequestLifetime;
use super::scripts::{RELEASE, ROLLBACK};
use crate::backoff::Backoff;
use crate::clock::Moment;
use crate::model::Claim;

/// The largest number of entries of one node. While the list is full, further entries are dropped: the keys that they would
/// remove expire with their ttl, and the oldest entries are those of locks that were granted before the node failed.
const MAX_ENTRIES: usize = 30_000;
/// How many entries are sent to a node together.
pub(super) const BATCH: usize = 64;
/// The longest pause while a node does not answer.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// The pauses while a node does not answer.
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(100), LONGEST_PAUSE).with_jitter(0.0);
/// Delays of the repeats of a doubtful entry. Bytes that a broken connection left in a buffer are executed or lost within
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
    /// The vote with this value, after the end of the request lifetime.
    Vote {
        value: Box<str>,
        lifetime: Arc<RequestLifetime>,
    },
}

#[derive(Debug)]
struct Entry {
    claim: Claim,
    remains: Remains,
    /// Whether a request may still be executed after the node has confirmed the removal.
    is_doubtful: bool,
    ends: Moment,
    /// A close waits for the first attempt of the removal.
    urgent: Option<TaskTrackerToken>,
}

/// The list of one node.
#[derive(Debug, Default)]
pub(super) struct Cleanup {
    lists: Mutex<Lists>,
    added: Notify,
}

#[derive(Debug, Default)]
struct Lists {
    due: VecDeque<Entry>,
    repeats: [VecDeque<(Moment, Entry)>; REPEATS.len()],
    is_served: bool,
}

impl Lists {
    fn len(&self) -> usize {
        self.due.len() + self.repeats.iter().map(VecDeque::len).sum::<usize>()
    }

    /// Removes a batch of due entries from the list, with the number of their repeat.
    fn take(&mut self) -> Option<(Vec<Entry>, usize)> {
        if !self.due.is_empty() {
            let count = self.due.len().min(BATCH);
            return Some((self.due.drain(..count).collect(), 0));
        }
        self.repeats.iter_mut().enumerate().find_map(|(number, list)| {
            let count = list.iter().take(BATCH).take_while(|(at, _)| at.is_past()).count();
            let due = list.drain(..count).map(|(_, entry)| entry).collect();
            (count > 0).then_some((due, number + 1))
        })
    }

    fn next(&self) -> Option<Moment> {
        self.repeats
            .iter()
            .filter_map(|list| list.front())
            .map(|(at, _)| *at)
            .min()
    }

    fn repeat(&mut self, number: usize, entry: Entry) {
        if let Some(pause) = REPEATS.get(number) {
            self.repeats[number].push_back((Moment::now() + *pause, entry));
        }
    }
}

impl Cleanup {
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.lists.lock().len()
    }
}

impl Quorum {
    /// Removes the remains from a node in the background, at once.
    pub(super) fn clean_up(self: &Arc<Self>, node: usize, claim: &Claim, remains: Remains, is_doubtful: bool) {
        let entry = self.entry(claim, remains, is_doubtful);
        self.add(node, |lists| lists.due.push_back(entry));
    }

    /// Removes the remains after the pauses of a doubtful entry.
    pub(super) fn clean_up_later(self: &Arc<Self>, node: usize, claim: &Claim, remains: Remains) {
        let entry = Entry {
            urgent: None,
            ..self.entry(claim, remains, true)
        };
        self.add(node, |lists| lists.repeat(0, entry));
    }

    fn entry(&self, claim: &Claim, remains: Remains, is_doubtful: bool) -> Entry {
        Entry {
            claim: claim.clone(),
            remains,
            is_doubtful,
            ends: Moment::now() + claim.ttl.duration().max(KEPT),
            urgent: Some(self.urgent.token()),
        }
    }

    fn add(self: &Arc<Self>, node: usize, add: impl FnOnce(&mut Lists)) {
        let cleanup = &self.nodes[node].cleanup;
        let mut lists = cleanup.lists.lock();
        if lists.len() >= MAX_ENTRIES {
            return;
        }
        add(&mut lists);
        let is_served = std::mem::replace(&mut lists.is_served, true);
        drop(lists);
        if is_served {
            cleanup.added.notify_one();
        } else {
            self.spawn(serve(self.clone(), node));
        }
    }

    /// Sends the removals of a batch, and returns the entries that the node did not confirm.
    async fn remove(self: &Arc<Self>, node: usize, batch: Vec<Entry>, number: usize) -> Vec<Entry> {
        let removals = batch.iter().map(|entry| async {
            let (script, call) = match &entry.remains {
                // The request lifetime still lasts: the next repeat checks again.
                Remains::Vote { lifetime, .. } if !lifetime.has_ended() => return true,
                Remains::Vote { value, .. } => (&ROLLBACK, self.rollback_call(&entry.claim, value)),
                Remains::Lease { until } => (&RELEASE, self.release_call(&entry.claim, *until)),
            };
            let removal = self.nodes[node].number(script, &call);
            matches!(tokio::time::timeout(self.node_timeout, removal).await, Ok(Ok(_)))
        });
        let confirmed = join_all(removals).await;
        let mut failed = Vec::new();
        let mut lists = self.nodes[node].cleanup.lists.lock();
        for (mut entry, is_confirmed) in batch.into_iter().zip(confirmed) {
            entry.urgent = None;
            if !is_confirmed {
                failed.push(entry);
            } else if entry.is_doubtful {
                lists.repeat(number, entry);
            }
        }
        failed
    }
}

/// Serves the list of one node until it is empty.
async fn serve(quorum: Arc<Quorum>, node: usize) {
    let cleanup = &quorum.nodes[node].cleanup;
    let mut backoff = BACKOFF;
    loop {
        let (due, next) = {
            let mut lists = cleanup.lists.lock();
            let due = lists.take();
            if due.is_none() && lists.len() == 0 {
                *lists = Lists::default();
                return;
            }
            (due, lists.next())
        };
        let Some((batch, number)) = due else {
            let time = tokio::time::sleep(next.map_or(LONGEST_PAUSE, Moment::remaining));
            tokio::select! {
                () = cleanup.added.notified() => {}
                () = time => {}
            }
            continue;
        };
        let failed = quorum.remove(node, batch, number).await;
        if failed.is_empty() {
            backoff.reset();
            continue;
        }
        {
            let mut lists = cleanup.lists.lock();
            for entry in failed.into_iter().rev().filter(|entry| !entry.ends.is_past()) {
                lists.due.push_front(entry);
            }
            // No close waits for a node that does not answer.
            lists.due.iter_mut().for_each(|entry| entry.urgent = None);
        }
        tokio::time::sleep(backoff.delay()).await;
    }
}
