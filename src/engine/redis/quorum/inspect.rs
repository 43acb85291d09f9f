//! `inspect` and `list`: what a majority of the nodes reports about names.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use redis::Value;

use super::Quorum;
use super::node::Node;
use super::votes::{Answer, majority};
use crate::engine::Result;
use crate::engine::redis::error::Failure;
use crate::engine::redis::keys::Layout;
use crate::engine::redis::ops::inspect::{READ_AT_ONCE, WITHOUT_QUEUE, info, read_until_recorded, scan_page};
use crate::engine::redis::scripts::INSPECT;
use crate::model::{Fence, Holder, LockInfo};

/// The time that the other nodes have after a majority has answered. The answer of a majority is correct, but with all nodes it
/// is more precise: the leases on the nodes end milliseconds apart.
const GRACE: Duration = Duration::from_millis(100);

/// A list as a whole has no time limit, but each of its pages has one.
const UNLIMITED: Duration = Duration::from_secs(365 * 24 * 3600);

/// The data of one node for a name.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Row {
    /// The value of the lock key.
    value: Vec<u8>,
    info: LockInfo,
}

impl Row {
    /// Parses the answer of `inspect.lua`.
    fn read(name: &str, answer: &Value) -> std::result::Result<Option<Self>, Failure> {
        if *answer == Value::Nil {
            return Ok(None);
        }
        let (value, info) = info(name, answer).ok_or(Failure::Unexpected("inspect.lua"))?;
        let value = value.to_vec();
        Ok(Some(Row { value, info }))
    }

    /// Returns the holder: all attempts of one owner are one holder.
    fn holder(&self) -> &[u8] {
        attempt_of(&self.value).map_or(&self.value, |(token, _)| token.as_bytes())
    }
}

/// A name that is held, by the data of all nodes.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct HeldName {
    pub(super) info: LockInfo,
    /// The owner token and the number of the attempt, if the holder is a holdfast quorum client.
    pub(super) attempt: Option<(String, String)>,
    /// Whether a majority reports it. Otherwise the silent nodes may make it one.
    pub(super) is_certain: bool,
    /// The largest fencing token that a node knows: at least the one that the majority agreed on.
    pub(super) largest_fence: Option<Fence>,
}

impl HeldName {
    /// Whether it is held by a quorum client of holdfast whose record is not written yet.
    fn lacks_record(&self) -> bool {
        self.attempt.is_some() && self.info.fence.is_none()
    }
}

impl Quorum {
    /// Reads one name.
    pub(super) async fn inspect(self: &Arc<Self>, name: &str) -> Result<Option<LockInfo>> {
        self.write_records();
        let lacks_record = |held: &Option<HeldName>| held.as_ref().is_some_and(HeldName::lacks_record);
        let held = read_until_recorded(|| self.held_name(name), lacks_record).await?;
        Ok(held.map(|held| held.info))
    }

    pub(super) async fn held_name(self: &Arc<Self>, name: &str) -> Result<Option<HeldName>> {
        let call = Arc::new(INSPECT.call(&self.layout, &WITHOUT_QUEUE, std::iter::once(name)));
        let votes = self.request(self.node_timeout, |node| {
            let (call, name) = (call.clone(), name.to_owned());
            async move { Row::read(&name, &node.link.run(&INSPECT, &call).await?) }
        });
        let enough = self.majority();
        let is_decided = |answers: &[Answer<Option<Row>>]| {
            let rows: Vec<&Option<Row>> = answers
                .iter()
                .filter_map(|answer| answer.as_ref()?.as_ref().ok())
                .collect();
            // The fencing token, too: a majority knows that of the grant, and a single node may know another one.
            let identity = |row: &Option<Row>| row.as_ref().map(|row| (row.holder().to_vec(), row.info.fence));
            let alike = |row: &Option<Row>| rows.iter().filter(|other| identity(other) == identity(row)).count();
            (rows.len() >= enough && rows.iter().any(|row| alike(row) >= enough)).then_some(((), GRACE))
        };
        let (_, answers) = votes.decide_with_grace(self.node_timeout, is_decided).await;
        let rows: Vec<&Option<Row>> = answers
            .iter()
            .filter_map(|answer| answer.as_ref()?.as_ref().ok())
            .collect();
        if rows.len() < enough {
            return Err(self.no_majority("inspect", &answers, self.node_timeout));
        }
        let unknown = self.nodes.len() - rows.len();
        let nodes = self.nodes.len();
        Ok(majority_holder(rows.into_iter().flatten(), unknown, nodes))
    }

    /// Reads every name with a prefix, sorted: the names that a majority holds for one holder, or may hold with the silent nodes.
    /// A lock that only a minority has is not held, and is not returned.
    pub(super) async fn list(self: &Arc<Self>, prefix: &str, page_timeout: Duration) -> Result<Vec<LockInfo>> {
        self.write_records();
        let lacks_record = |names: &Vec<HeldName>| names.iter().any(HeldName::lacks_record);
        let names = read_until_recorded(|| self.held_names(prefix, page_timeout), lacks_record).await?;
        Ok(names.into_iter().map(|held| held.info).collect())
    }

    async fn held_names(self: &Arc<Self>, prefix: &str, page_timeout: Duration) -> Result<Vec<HeldName>> {
        let votes = self.request(UNLIMITED, |node| {
            let (quorum, prefix) = (self.clone(), prefix.to_owned());
            async move { rows(&node, &quorum.layout, &prefix, page_timeout).await }
        });
        let (_, answers) = votes.decide(UNLIMITED, |_| None::<()>).await;
        let mut names: BTreeMap<&str, Vec<&Row>> = BTreeMap::new();
        let mut known = 0;
        for found in answers.iter().filter_map(|answer| answer.as_ref()?.as_ref().ok()) {
            known += 1;
            for row in found {
                names.entry(&row.info.name).or_default().push(row);
            }
        }
        if known < self.majority() {
            return Err(self.no_majority("list", &answers, page_timeout));
        }
        let nodes = self.nodes.len();
        let held = |rows: Vec<&Row>| majority_holder(rows.into_iter(), nodes - known, nodes);
        Ok(names.into_values().filter_map(held).collect())
    }
}

/// Reads the names with a prefix on one node. Each page has `page_timeout`.
async fn rows(
    node: &Node,
    layout: &Layout,
    prefix: &str,
    page_timeout: Duration,
) -> std::result::Result<Vec<Row>, Failure> {
    let mut names = Vec::new();
    let mut cursor = Some(b"0".to_vec());
    while let Some(from) = cursor {
        let page = scan_page(&node.link, layout, prefix, &from, &mut names);
        cursor = tokio::time::timeout(page_timeout, page)
            .await
            .map_err(|_| Failure::timed_out())??;
    }
    names.sort_unstable();
    names.dedup();
    let mut found = Vec::with_capacity(names.len());
    for some in names.chunks(READ_AT_ONCE) {
        let reads = join_all(some.iter().map(|name| async move {
            let call = INSPECT.call(layout, &WITHOUT_QUEUE, std::iter::once(name.as_str()));
            Row::read(name, &node.link.run(&INSPECT, &call).await?)
        }));
        let reads = tokio::time::timeout(page_timeout, reads)
            .await
            .map_err(|_| Failure::timed_out())?;
        for outcome in reads {
            match outcome {
                Ok(row) => found.extend(row),
                // The key has changed its type since the scan.
                Err(failure) if failure.is_wrong_type() => {}
                Err(failure) => return Err(failure),
            }
        }
    }
    Ok(found)
}

/// Splits `<token>.<attempt>`.
fn attempt_of(value: &[u8]) -> Option<(&str, &str)> {
    std::str::from_utf8(value).ok()?.split_once('.')
}

/// Returns the holder of a name, if any: the one with a majority of the nodes, or possibly one together with the `unknown`.
fn majority_holder<'r>(rows: impl Iterator<Item = &'r Row>, unknown: usize, nodes: usize) -> Option<HeldName> {
    let enough = majority(nodes);
    let mut holders: BTreeMap<&[u8], Vec<&Row>> = BTreeMap::new();
    for row in rows {
        holders.entry(row.holder()).or_default().push(row);
    }
    let mut votes = holders.into_values().max_by_key(Vec::len)?;
    if votes.len() + unknown < enough {
        return None;
    }
    // The lease lasts as long as a majority of the nodes has it.
    votes.sort_by_key(|row| std::cmp::Reverse(row.info.remaining.unwrap_or(Duration::MAX)));
    let last = votes[votes.len().min(enough) - 1];
    // A node that was healed, or that voted late, may know another fencing token than the majority of the grant.
    let mut fences: BTreeMap<Fence, usize> = BTreeMap::new();
    for fence in votes.iter().filter_map(|row| row.info.fence) {
        *fences.entry(fence).or_default() += 1;
    }
    let largest_fence = fences.keys().next_back().copied();
    let fence = fences
        .into_iter()
        .max_by_key(|(fence, count)| (*count, std::cmp::Reverse(*fence)))
        .map(|(fence, _)| fence);
    let granted = votes.iter().find(|row| row.info.fence == fence);
    let holder = granted.and_then(|row| row.info.holder.clone());
    let attempt = votes.iter().find_map(|row| attempt_of(&row.value));
    // Its process has not written the record, and perhaps never will.
    let holder = holder.or_else(|| attempt.map(|_| Holder::unknown()));
    Some(HeldName {
        attempt: attempt.map(|(token, attempt)| (token.to_owned(), attempt.to_owned())),
        is_certain: votes.len() >= enough,
        largest_fence,
        info: LockInfo {
            fence,
            holder,
            metadata: votes.iter().find_map(|row| row.info.metadata.clone()),
            ..last.info.clone()
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Process;

    fn row_of(value: &str, left: u64, fence: Option<u64>) -> Row {
        let process = Process {
            host: "h".into(),
            pid: 1,
        };
        Row {
            value: value.into(),
            info: LockInfo {
                name: "n".into(),
                remaining: (left > 0).then(|| Duration::from_millis(left)),
                fence: fence.map(Fence),
                holder: fence.map(|_| Holder { process, since_ms: 5 }),
                metadata: None,
                share: None,
                waiting: None,
            },
        }
    }

    #[test]
    fn a_name_is_held_as_long_as_by_a_majority() {
        let rows = [
            row_of("a.1", 10, Some(7)),
            row_of("a.1", 30, Some(7)),
            row_of("a.2", 20, Some(9)),
        ];
        let held = majority_holder(rows.iter(), 0, 3).unwrap();
        assert_eq!(held.info.remaining, Some(Duration::from_millis(20)));
        assert_eq!(held.info.fence, Some(Fence(7)));
        assert!(held.is_certain);
        assert_eq!(held.info.holder.unwrap().since_ms, 5);
    }

    #[test]
    fn a_minority_holds_nothing_unless_the_other_nodes_are_silent() {
        let rows = [row_of("a.1", 10, Some(7))];
        assert_eq!(majority_holder(rows.iter(), 0, 3), None);
        assert!(!majority_holder(rows.iter(), 1, 3).unwrap().is_certain);
        let split = [
            row_of("a.1", 10, Some(7)),
            row_of("b.1", 10, Some(8)),
            row_of("c.1", 10, Some(9)),
        ];
        assert_eq!(majority_holder(split.iter(), 0, 3), None);
        assert_eq!(majority_holder([].iter(), 1, 3), None);
    }

    #[test]
    fn another_tool_is_a_holder_without_data() {
        let rows = [row_of("theirs", 0, None), row_of("theirs", 0, None)];
        let held = majority_holder(rows.iter(), 1, 3).unwrap();
        assert_eq!((held.info.remaining, held.info.fence), (None, None));
        assert_eq!(held.attempt, None);
    }
}
