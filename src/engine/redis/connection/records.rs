//! The records of grants for `inspect`. They are written a moment after the grants: a busy service releases most of its locks
//! earlier, and a record would cost the server as much as the grant.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::FutureExt;
use redis::{Cmd, RedisResult, Value};

use super::Link;
use super::liveness::ATTEMPTS;
use crate::clock::Moment;
use crate::engine::redis::error::Failure;
use crate::engine::redis::keys::{Layout, Part, RECORD_KEPT_MS};
use crate::engine::redis::scripts::RECORD;
use crate::engine::redis::wire::ReplySink;
use crate::model::{Claim, Fence, Key, OwnerToken};

/// The interval at which records are written: each one at the second time after its grant.
const WRITE_INTERVAL: Duration = Duration::from_millis(25);
/// The same on a node of a quorum, where a transfer waits for a shorter time.
const QUORUM_WRITE_INTERVAL: Duration = Duration::from_millis(5);
/// The pause before a record that the server refused for now, or that was lost with its connection, is sent again.
const REPEATED_AFTER: Duration = Duration::from_secs(1);
/// The time for which it is repeated.
const REPEATED_WITHIN: Duration = Duration::from_secs(60);

/// The record of a grant.
pub(in super::super) struct Record {
    pub(in super::super) claim: Claim,
    pub(in super::super) fence: Fence,
    /// On a node of a quorum: the number of the round, which is the time of the grant in µs since 1970.
    pub(in super::super) attempt: Option<u64>,
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
            Some(number) => {
                let by = format!("{}:{number} {}", process.pid, process.host);
                (format!("{owner}.{number}"), by, Some(number / 1000))
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

/// The records of a server that are not written yet.
#[derive(Default)]
pub(super) struct Records {
    /// Those since the last write, and earlier ones.
    waiting: [HashMap<OwnerToken, Record>; 2],
    /// Whether a task writes them.
    is_scheduled: bool,
}

impl Link {
    /// Writes the record of a grant after a moment, unless the lock is released before that.
    pub(in super::super) fn record_later(self: &Arc<Self>, record: Record) {
        let interval = record.attempt.map_or(WRITE_INTERVAL, |_| QUORUM_WRITE_INTERVAL);
        let mut records = self.records.lock();
        records.waiting[0].insert(record.claim.owner.clone(), record);
        if std::mem::replace(&mut records.is_scheduled, true) {
            return;
        }
        drop(records);
        let link = Arc::downgrade(self);
        self.runtime.spawn(FutureExt::boxed(async move {
            loop {
                tokio::time::sleep(interval).await;
                let Some(link) = link.upgrade() else { return };
                let mut records = link.records.lock();
                let due = take(&mut records.waiting[1]);
                records.waiting.reverse();
                records.is_scheduled = !records.waiting[1].is_empty();
                let is_last = !records.is_scheduled;
                drop(records);
                due.iter().for_each(|record| link.write_record(record));
                if is_last {
                    return;
                }
            }
        }));
    }

    /// Discards the record of a grant that is about to be released.
    pub(in super::super) fn forget_record(&self, owner: &OwnerToken) {
        let mut records = self.records.lock();
        if records.waiting[0].remove(owner).is_none() {
            records.waiting[1].remove(owner);
        }
    }

    /// Sends the records now: the server stores them before it executes later requests.
    pub(in super::super) fn write_records(self: &Arc<Self>) {
        let waiting: Vec<Record> = self.records.lock().waiting.iter_mut().flat_map(take).collect();
        waiting.iter().for_each(|record| self.write_record(record));
    }

    /// Sends a record now.
    pub(in super::super) fn write_record(self: &Arc<Self>, record: &Record) {
        let (link, call) = (Arc::downgrade(self), record.call(&self.config.layout));
        let sent = Arc::new(SentRecord { link, call });
        match self.current() {
            Some(connection) => {
                let sink: Arc<dyn ReplySink> = sent.clone();
                connection.wire.call_to_sink(&sink, 0, &sent.call);
            }
            None => sent.repeat(),
        }
    }
}

/// Empties a map. Its capacity is kept for the next records, unless it is large.
fn take(records: &mut HashMap<OwnerToken, Record>) -> Vec<Record> {
    let taken = records.drain().map(|(_, record)| record).collect();
    records.shrink_to(ATTEMPTS);
    taken
}

/// A record that was sent.
struct SentRecord {
    link: Weak<Link>,
    call: Cmd,
}

impl SentRecord {
    fn repeat(self: Arc<Self>) {
        let Some(link) = self.link.upgrade() else { return };
        let runtime = link.runtime.clone();
        drop(link);
        runtime.spawn(FutureExt::boxed(async move {
            let end = Moment::now() + REPEATED_WITHIN;
            while let Some(link) = self.link.upgrade() {
                match link.run(&RECORD, &self.call).await {
                    Err(failure) if failure.retryable() && !end.is_past() => {
                        drop(link);
                        tokio::time::sleep(REPEATED_AFTER).await;
                    }
                    _ => break,
                }
            }
        }));
    }
}

impl ReplySink for SentRecord {
    fn on_reply(self: Arc<Self>, _: usize, reply: RedisResult<Value>) {
        if let Err(failure) = reply.map_err(Failure::from)
            && (failure.is_unknown_script() || failure.retryable())
        {
            self.repeat();
        }
    }
}
