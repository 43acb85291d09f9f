//! Reads holders.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use futures_util::StreamExt;

use super::super::client::messages::{LeaseRequest, LeaseResponse, RangeRequest};
use super::super::client::{Failure, Outcome};
use super::super::core::Core;
use super::super::entry::Stored;
use super::txn::oldest;
use crate::error::EngineError;
use crate::model::{Key, LockInfo};

const TIME_TO_LIVE: &str = "/etcdserverpb.Lease/LeaseTimeToLive";
/// The maximum number of keys in one answer.
pub(in super::super) const PAGE: i64 = 1000;
/// The maximum number of requests at the same time.
const TOGETHER: usize = 16;

impl Core {
    pub(in super::super) async fn inspect(&self, name: &Key) -> Outcome<Option<LockInfo>> {
        let answer = self.range(&oldest(self.layout.range(name))).await?;
        let waiting = answer.count.saturating_sub(1).max(0) as u64;
        let Some(holder) = self.first_of(name, answer.kvs).await?.filter(Stored::holds) else {
            return Ok(None);
        };
        let lease = self.time_to_live(holder.kv.lease).await?;
        // The lease has expired since.
        if lease == Some(Duration::ZERO) {
            return Ok(None);
        }
        Ok(Some(holder.info(name, lease, waiting)))
    }

    /// Returns the rest of an etcd lease, zero if it has expired. `None`: the entry has none.
    pub(in super::super) async fn time_to_live(&self, id: i64) -> Outcome<Option<Duration>> {
        if id == 0 {
            return Ok(None);
        }
        let answer: LeaseResponse = self.client.call(TIME_TO_LIVE, &LeaseRequest { id }, &|| None).await?;
        // The server rounds down.
        Ok(Some(Duration::from_secs(
            u64::try_from(answer.ttl).map_or(0, |ttl| ttl + 1),
        )))
    }

    pub(in super::super) async fn list(&self, prefix: &str, timeout: Duration) -> Result<Vec<LockInfo>, EngineError> {
        let no_answer = |_| EngineError::no_answer("etcd", &self.client.address(), "list", timeout);
        let of_store = |failure: Failure| failure.of("list");
        let (mut key, range_end) = self.layout.names(prefix);
        let mut revision = 0;
        // The oldest entry of each name, and the number of the others.
        let mut names: BTreeMap<Key, (Stored, u64)> = BTreeMap::new();
        loop {
            let request = RangeRequest {
                key,
                range_end: range_end.clone(),
                limit: PAGE,
                revision,
                ..RangeRequest::default()
            };
            let answer = tokio::time::timeout(timeout, self.range(&request)).await;
            let answer = answer.map_err(no_answer)?.map_err(of_store)?;
            // All pages show the same state.
            if revision == 0 {
                revision = answer.header.map_or(0, |header| header.revision);
            }
            let last = answer.kvs.last().map(|kv| kv.key.clone());
            for (name, stored) in answer.kvs.into_iter().filter_map(|kv| self.layout.read(kv)) {
                match names.get_mut(&name) {
                    Some((first, others)) => {
                        *others += 1;
                        if stored.place() < first.place() {
                            *first = stored;
                        }
                    }
                    None => drop(names.insert(name, (stored, 0))),
                }
            }
            match last {
                Some(last) if answer.more => key = [last, vec![0]].concat(),
                _ => break,
            }
        }
        names.retain(|_, (first, _)| first.holds());
        let mut leases: Vec<i64> = names.values().map(|(first, _)| first.kv.lease).collect();
        leases.sort_unstable();
        leases.dedup();
        let reading = futures_util::stream::iter(leases)
            .map(|id| async move { Ok::<_, Failure>((id, self.time_to_live(id).await?)) })
            .buffer_unordered(TOGETHER);
        let read = tokio::time::timeout(timeout, reading.collect::<Vec<_>>()).await;
        let read: Result<HashMap<i64, Option<Duration>>, Failure> = read.map_err(no_answer)?.into_iter().collect();
        let read = read.map_err(of_store)?;
        let infos = names.iter().filter_map(|(name, (first, others))| {
            let lease = read.get(&first.kv.lease).copied().flatten();
            (lease != Some(Duration::ZERO)).then(|| first.info(name, lease, *others))
        });
        Ok(infos.collect())
    }
}
