//! Looking at locks: what a majority of the nodes says of them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use redis::Value;

use super::super::error::Failure;
use super::super::keys::Layout;
use super::super::ops::inspect::{ALL, READ_AT_ONCE, grant, read_until_recorded, scan_page, text};
use super::super::scripts::INSPECT;
use super::Quorum;
use super::node::{Node, silence};
use super::tally::{Answer, majority};
use crate::engine::Result;
use crate::model::{Fence, Holder, LockInfo};

/// How much longer than a majority the others have for their word on a name. Without them the answer is right, but not the
/// same as with them: the nodes' leases end milliseconds apart.
const GRACE: Duration = Duration::from_millis(100);

/// A list has no limit as a whole: each of its pages has one.
const UNLIMITED: Duration = Duration::from_secs(365 * 24 * 3600);

/// What one node has of a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Row {
    /// What the lock key holds.
    value: Vec<u8>,
    /// `None`: for ever.
    left: Option<Duration>,
    grant: Option<(Fence, Holder)>,
    metadata: Option<String>,
}

/// What the nodes together say of a name that is held.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Standing {
    pub(super) info: LockInfo,
    /// The owner's token and the attempt, where the holder is one of this kind.
    pub(super) attempt: Option<(String, String)>,
    /// Whether a majority says so. Else it may be one with the nodes that say nothing.
    pub(super) certain: bool,
    /// The largest fence that any of them knows: at least the one that the majority agreed on.
    pub(super) highest: Option<Fence>,
}

impl Standing {
    /// Held by one of this kind, of whom nothing is told yet.
    fn is_untold(&self) -> bool {
        self.attempt.is_some() && self.info.holder.is_none()
    }
}

impl Quorum {
    /// Reads one name.
    pub(super) async fn look_at(self: &Arc<Self>, name: &str) -> Result<Option<LockInfo>> {
        self.write_records();
        let is_untold = |standing: &Option<Standing>| standing.as_ref().is_some_and(Standing::is_untold);
        let standing = read_until_recorded(|| self.standing(name), is_untold).await?;
        Ok(standing.map(|standing| standing.info))
    }

    pub(super) async fn standing(self: &Arc<Self>, name: &str) -> Result<Option<Standing>> {
        let call = Arc::new(INSPECT.call(&self.layout, &ALL, std::iter::once(name)));
        let tally = self.ask(self.patience, |node| {
            let call = call.clone();
            async move { row(node.link.run(&INSPECT, &call).await?) }
        });
        let enough = self.majority();
        let settled = |answers: &[Answer<Option<Row>>]| {
            let said: Vec<&Option<Row>> = answers
                .iter()
                .filter_map(|answer| answer.as_ref()?.as_ref().ok())
                .collect();
            // The fence as well: that of a grant is known to a majority, and a single node may know another one.
            let gist = |row: &Option<Row>| {
                let fence = row.as_ref().and_then(|row| row.grant.as_ref()).map(|grant| grant.0);
                (whose(row).map(<[u8]>::to_vec), fence)
            };
            let alike = |row: &Option<Row>| said.iter().filter(|other| gist(other) == gist(row)).count();
            (said.len() >= enough && said.iter().any(|row| alike(row) >= enough)).then_some(())
        };
        let (_, answers) = tally.decide_with_grace(self.patience, GRACE, settled).await;
        let rows: Vec<&Option<Row>> = answers
            .iter()
            .filter_map(|answer| answer.as_ref()?.as_ref().ok())
            .collect();
        if rows.len() < enough {
            return Err(self.no_majority("inspect", &answers, self.patience));
        }
        let unknown = self.nodes.len() - rows.len();
        Ok(judge(name, rows.into_iter().flatten(), unknown, self.nodes.len()))
    }

    /// Reads every name with a prefix, sorted: those that a majority of the nodes holds for one holder, as far as can be
    /// told where nodes say nothing. What only a minority has is held by nobody, and is not shown.
    pub(super) async fn look_for(self: &Arc<Self>, prefix: &str, page_timeout: Duration) -> Result<Vec<LockInfo>> {
        self.write_records();
        let is_untold = |standings: &Vec<Standing>| standings.iter().any(Standing::is_untold);
        let standings = read_until_recorded(|| self.standings(prefix, page_timeout), is_untold).await?;
        Ok(standings.into_iter().map(|standing| standing.info).collect())
    }

    async fn standings(self: &Arc<Self>, prefix: &str, page_timeout: Duration) -> Result<Vec<Standing>> {
        let tally = self.ask(UNLIMITED, |node| {
            let (quorum, prefix) = (self.clone(), prefix.to_owned());
            async move { rows(&node, &quorum.layout, &prefix, page_timeout).await }
        });
        let (_, answers) = tally.decide(UNLIMITED, |_| None::<()>).await;
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
        let held = |(name, rows): (&str, Vec<&Row>)| judge(name, rows.into_iter(), nodes - known, nodes);
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
            .map_err(|_| silence())??;
    }
    names.sort_unstable();
    names.dedup();
    let mut found = Vec::with_capacity(names.len());
    for some in names.chunks(READ_AT_ONCE) {
        let reads = join_all(some.iter().map(|name| async move {
            let call = INSPECT.call(layout, &ALL, std::iter::once(name.as_str()));
            row(node.link.run(&INSPECT, &call).await?)
        }));
        let reads = tokio::time::timeout(page_timeout, reads).await.map_err(|_| silence())?;
        for (name, outcome) in some.iter().zip(reads) {
            match outcome {
                Ok(row) => found.extend(row.map(|row| (name.clone(), row))),
                // It has become something else since the scan.
                Err(failure) if failure.is_wrong_type() => {}
                Err(failure) => return Err(failure),
            }
        }
    }
    Ok(found)
}

/// The answer of `inspect.lua`.
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
    // The companions are believed only where they speak of the token that holds the lock.
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

/// `<token>.<attempt>`.
fn attempt_of(value: &[u8]) -> Option<(&str, &str)> {
    std::str::from_utf8(value).ok()?.split_once('.')
}

/// Whom a row speaks for: the attempts of one owner are one holder.
fn whose(row: &Option<Row>) -> Option<&[u8]> {
    let row = row.as_ref()?;
    Some(attempt_of(&row.value).map_or(row.value.as_slice(), |(token, _)| token.as_bytes()))
}

/// Who holds a name, if anybody does: whoever has a majority of the nodes, or may have one with the `unknown`.
fn judge<'r>(name: &str, rows: impl Iterator<Item = &'r Row>, unknown: usize, nodes: usize) -> Option<Standing> {
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
    // The lease lasts while a majority of the nodes has it.
    votes.sort_by_key(|row| std::cmp::Reverse(row.left.unwrap_or(Duration::MAX)));
    let remaining = votes[votes.len().min(enough) - 1].left;
    // A node that was healed, or that voted late, may know another fence than the majority that the grant was made with.
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
    Some(Standing {
        attempt: attempt.map(|(token, attempt)| (token.to_owned(), attempt.to_owned())),
        certain: votes.len() >= enough,
        highest: granted.clone().map(|(fence, _)| *fence).max(),
        info: LockInfo {
            name: name.to_owned(),
            remaining,
            fence,
            holder,
            metadata: votes.iter().find_map(|row| row.metadata.clone()),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Process;

    fn held(value: &str, left: u64, fence: Option<u64>) -> Row {
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
    fn a_majority_holds_and_lasts_as_long_as_it_is_one() {
        let rows = [
            held("a.1", 10, Some(7)),
            held("a.1", 30, Some(7)),
            held("a.2", 20, Some(9)),
        ];
        let standing = judge("n", rows.iter(), 0, 3).unwrap();
        assert_eq!(standing.info.remaining, Some(Duration::from_millis(20)));
        assert_eq!(standing.info.fence, Some(Fence(7)));
        assert!(standing.certain);
        assert_eq!(standing.info.holder.unwrap().since_ms, 5);
    }

    #[test]
    fn a_minority_holds_nothing_unless_the_others_say_nothing() {
        let rows = [held("a.1", 10, Some(7))];
        assert_eq!(judge("n", rows.iter(), 0, 3), None);
        let standing = judge("n", rows.iter(), 1, 3).unwrap();
        assert!(!standing.certain);
        let split = [
            held("a.1", 10, Some(7)),
            held("b.1", 10, Some(8)),
            held("c.1", 10, Some(9)),
        ];
        assert_eq!(judge("n", split.iter(), 0, 3), None);
        assert_eq!(judge("n", [].iter(), 1, 3), None);
    }

    #[test]
    fn another_tool_is_a_holder_without_a_name() {
        let rows = [held("theirs", 0, None), held("theirs", 0, None)];
        let standing = judge("n", rows.iter(), 1, 3).unwrap();
        assert_eq!((standing.info.remaining, standing.info.fence), (None, None));
        assert_eq!(standing.attempt, None);
    }
}
