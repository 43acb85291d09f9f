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
use crate::engine::redis::ops::inspect::{READ_AT_ONCE, WITHOUT_QUEUE, grant, read_until_recorded, scan_page, text};
use crate::engine::redis::scripts::INSPECT;
use crate::model::{Fence, Holder, LockInfo};

/// The time that the other nodes have after a majority has answered. The answer of a majority is correct, but with all nodes it
/// is more precise: the leases on the nodes end milliseconds apart.
const GRACE: Duration = Duration::from_millis(100);

/// A list as a whole has no time limit, but each of its pages has one.
const UNLIMITED: Duration = Duration::from_secs(365 * 24 * 3600);

/// The data of one node for a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Row {
    /// The value of the lock key.
    value: Vec<u8>,
    /// The remaining time. `None`: without end.
    left: Option<Duration>,
    grant: Option<(Fence, Holder)>,
    metadata: Option<String>,
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
            let call = call.clone();
            async move { row(node.link.run(&INSPECT, &call).await?) }
        });
        let enough = self.majority();
        let is_decided = |answers: &[Answer<Option<Row>>]| {
            let rows: Vec<&Option<Row>> = answers
                .iter()
                .filter_map(|answer| answer.as_ref()?.as_ref().ok())
                .collect();
            // The fencing token, too: a majority knows that of the grant, and a single node may know another one.
            let identity = |row: &Option<Row>| {
                let fence = row.as_ref().and_then(|row| row.grant.as_ref()).map(|grant| grant.0);
                (holder_of(row).map(<[u8]>::to_vec), fence)
            };
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
        Ok(majority_holder(
            name,
            rows.into_iter().flatten(),
            unknown,
            self.nodes.len(),
        ))
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
            for (name, row) in found {
                names.entry(name).or_default().push(row);
            }
        }
        if known < self.majority() {
            return Err(self.no_majority("list", &answers, page_timeout));
        }
        let nodes = self.nodes.len();
        let held = |(name, rows): (&str, Vec<&Row>)| majority_holder(name, rows.into_iter(), nodes - known, nodes);
        Ok(names.into_iter().filter_map(held).collect())
    }
}

/// Reads the names with a prefix on one node. Each page has `page_timeout`.
async fn rows(
    node: &Node,
    layout: &Layout,
    prefix: &str,
    page_timeout: Duration,
) -> std::result::Result<Vec<(String, Row)>, Failure> {
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
            row(node.link.run(&INSPECT, &call).await?)
        }));
        let reads = tokio::time::timeout(page_timeout, reads)
            .await
            .map_err(|_| Failure::timed_out())?;
        for (name, outcome) in some.iter().zip(reads) {
            match outcome {
                Ok(row) => found.extend(row.map(|row| (name.clone(), row))),
                // The key has changed its type since the scan.
                Err(failure) if failure.is_wrong_type() => {}
                Err(failure) => return Err(failure),
            }
        }
    }
    Ok(found)
}

/// Parses the answer of `inspect.lua`.
fn row(answer: Value) -> std::result::Result<Option<Row>, Failure> {
    if answer == Value::Nil {
        return Ok(None);
    }
    let unexpected = || Failure::Unexpected("inspect.lua");
    let Value::Array(fields) = answer else {
        return Err(unexpected());
    };
    let [Value::BulkString(value), Value::Int(left), record, metadata] = fields.as_slice() else {
        return Err(unexpected());
    };
    // The companions count only if they contain the owner token of the lock.
    let token = attempt_of(value).map(|(token, _)| token).or_else(|| {
        let kept = std::str::from_utf8(value).ok()?;
        kept.strip_suffix("-kept")
    });
    let grant = text(record)
        .and_then(grant)
        .filter(|(owner, ..)| Some(*owner) == token)
        .map(|(_, fence, holder)| (fence, holder));
    let metadata = text(metadata)
        .and_then(|text| text.split_once(' '))
        .filter(|(owner, _)| Some(*owner) == token)
        .map(|(_, json)| json.to_owned());
    Ok(Some(Row {
        value: value.clone(),
        left: u64::try_from(*left).ok().map(Duration::from_millis),
        grant,
        metadata,
    }))
}

/// Splits `<token>.<attempt>`.
fn attempt_of(value: &[u8]) -> Option<(&str, &str)> {
    std::str::from_utf8(value).ok()?.split_once('.')
}

/// Returns the holder in a row: all attempts of one owner are one holder.
fn holder_of(row: &Option<Row>) -> Option<&[u8]> {
    let row = row.as_ref()?;
    Some(attempt_of(&row.value).map_or(row.value.as_slice(), |(token, _)| token.as_bytes()))
}

/// Returns the holder of a name, if any: the one with a majority of the nodes, or possibly one together with the `unknown`.
fn majority_holder<'r>(
    name: &str,
    rows: impl Iterator<Item = &'r Row>,
    unknown: usize,
    nodes: usize,
) -> Option<HeldName> {
    let enough = majority(nodes);
    let mut holders: BTreeMap<&[u8], Vec<&Row>> = BTreeMap::new();
    for row in rows {
        let holder = attempt_of(&row.value).map_or(row.value.as_slice(), |(token, _)| token.as_bytes());
        holders.entry(holder).or_default().push(row);
    }
    let mut votes = holders.into_values().max_by_key(Vec::len)?;
    if votes.len() + unknown < enough {
        return None;
    }
    // The lease lasts as long as a majority of the nodes has it.
    votes.sort_by_key(|row| std::cmp::Reverse(row.left.unwrap_or(Duration::MAX)));
    let remaining = votes[votes.len().min(enough) - 1].left;
    // A node that was healed, or that voted late, may know another fencing token than the majority of the grant.
    let mut fences: BTreeMap<Fence, usize> = BTreeMap::new();
    for (fence, _) in votes.iter().filter_map(|row| row.grant.as_ref()) {
        *fences.entry(*fence).or_default() += 1;
    }
    let fence = fences
        .into_iter()
        .max_by_key(|(fence, count)| (*count, std::cmp::Reverse(*fence)))
        .map(|(fence, _)| fence);
    let granted = votes.iter().filter_map(|row| row.grant.as_ref());
    let holder = granted
        .clone()
        .find(|(known, _)| Some(*known) == fence)
        .map(|(_, holder)| holder.clone());
    let attempt = votes.iter().find_map(|row| attempt_of(&row.value));
    // Its process has not written the record, and perhaps never will.
    let holder = holder.or_else(|| attempt.map(|_| Holder::unknown()));
    Some(HeldName {
        attempt: attempt.map(|(token, attempt)| (token.to_owned(), attempt.to_owned())),
        is_certain: votes.len() >= enough,
        largest_fence: granted.clone().map(|(fence, _)| *fence).max(),
        info: LockInfo {
            name: name.to_owned(),
            remaining,
            fence,
            holder,
            metadata: votes.iter().find_map(|row| row.metadata.clone()),
            waiting: None,
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
            left: (left > 0).then(|| Duration::from_millis(left)),
            grant: fence.map(|fence| (Fence(fence), Holder { process, since_ms: 5 })),
            metadata: None,
        }
    }

    #[test]
    fn a_name_is_held_as_long_as_by_a_majority() {
        let rows = [
            row_of("a.1", 10, Some(7)),
            row_of("a.1", 30, Some(7)),
            row_of("a.2", 20, Some(9)),
        ];
        let held = majority_holder("n", rows.iter(), 0, 3).unwrap();
        assert_eq!(held.info.remaining, Some(Duration::from_millis(20)));
        assert_eq!(held.info.fence, Some(Fence(7)));
        assert!(held.is_certain);
        assert_eq!(held.info.holder.unwrap().since_ms, 5);
    }

    #[test]
    fn a_minority_holds_nothing_unless_the_other_nodes_are_silent() {
        let rows = [row_of("a.1", 10, Some(7))];
        assert_eq!(majority_holder("n", rows.iter(), 0, 3), None);
        assert!(!majority_holder("n", rows.iter(), 1, 3).unwrap().is_certain);
        let split = [
            row_of("a.1", 10, Some(7)),
            row_of("b.1", 10, Some(8)),
            row_of("c.1", 10, Some(9)),
        ];
        assert_eq!(majority_holder("n", split.iter(), 0, 3), None);
        assert_eq!(majority_holder("n", [].iter(), 1, 3), None);
    }

    #[test]
    fn another_tool_is_a_holder_without_data() {
        let rows = [row_of("theirs", 0, None), row_of("theirs", 0, None)];
        let held = majority_holder("n", rows.iter(), 1, 3).unwrap();
        assert_eq!((held.info.remaining, held.info.fence), (None, None));
        assert_eq!(held.attempt, None);
    }
}
