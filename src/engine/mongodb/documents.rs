//! What is read from and written into the collection: filters, pipelines, and the fields of a document.
//!
//! The lock's document is the gist's own, with more fields:
//! `{ _id: name, expiresAt, owner, fence, holder: { host, pid, since }, metadata }`, and those of `queue.rs` where somebody
//! waits. One without an `owner` is a gist process's, and never ours.
//!
//! Whatever a user wrote goes into a pipeline as a `$literal`: a name or a text that starts with `$` is no expression.

use std::time::Duration;

use mongodb::bson::{Bson, DateTime, Document, doc};
use serde::de::IgnoredAny;

use super::estimate::Written;
use super::fence::{Clock, Stamp};
use super::queue::{self, HANDED, QUEUE, RESERVED, RESERVED_UNTIL};
use crate::model::{Claim, Holder, LockInfo, OwnerToken, Process, Ttl};

pub(super) const EXPIRES_AT: &str = "expiresAt";
pub(super) const FENCE: &str = "fence";
pub(super) const HOLDER: &str = "holder";
pub(super) const OWNER: &str = "owner";
pub(super) const SINCE: &str = "holder.since";
const METADATA: &str = "metadata";
/// What the owner of a name that was released but stays busy is called: no token looks like it.
pub(super) const KEPT: &str = "-kept";
/// The server's clock as an answer shows it.
pub(super) const NOW: &str = "now";
/// The end of a lease as an answer shows it.
pub(super) const END: &str = "end";
/// The place of who asks, and how many are before it, as an answer shows them.
const PLACE: &str = "place";
pub(super) const AHEAD: &str = "ahead";
/// No command is under way for so long.
const FAR_OFF: Duration = Duration::from_secs(60);
/// A field that no document has. A filter that asks for null there matches every document, and the one that an upsert
/// makes *has* the null: only so can the pipeline tell a missing document from a bare `{ _id }` that somebody inserted.
const ABSENT: &str = "holdfastAbsent";

/// A document that counts as free: past its end by the server's clock. One without a proper end never is.
pub(super) fn expired() -> Document {
    doc! { "$and": [{ "$eq": [{ "$type": "$expiresAt" }, "date"] }, { "$lte": [end(), "$$NOW"] }] }
}

/// A document that a try may take over: there is none yet, or it counts as free.
pub(super) fn is_free() -> Document {
    let missing = doc! { "$eq": [{ "$type": format!("${ABSENT}") }, "null"] };
    doc! { "$or": [missing, expired()] }
}

/// A document of this owner.
pub(super) fn is_of(owner: &OwnerToken) -> Document {
    doc! { "$eq": [format!("${OWNER}"), { "$literal": owner.as_str() }] }
}

/// The end of a lease, or of the time for which a name is kept for a waiter. (`$min` passes over what is missing.)
pub(super) fn end() -> Document {
    doc! { "$min": [format!("${EXPIRES_AT}"), format!("${RESERVED_UNTIL}")] }
}

pub(super) fn from_now(duration: Duration) -> Document {
    doc! { "$add": ["$$NOW", millis(duration)] }
}

/// Never less than what is left.
fn extended(ttl: Ttl) -> Document {
    doc! { "$max": ["$expiresAt", from_now(ttl.duration())] }
}

pub(super) fn millis(duration: Duration) -> i64 {
    duration.as_nanos().div_ceil(1_000_000).min(1 << 40) as i64
}

/// The filter of a try.
pub(super) fn one_or_none(id: &str) -> Document {
    doc! { "_id": id, ABSENT: Bson::Null }
}

/// The document of a name that is taken by a claim now, but for its fence.
pub(super) fn taken(claim: &Claim) -> Document {
    let mut taken = doc! {
        "_id": "$_id",
        EXPIRES_AT: from_now(claim.ttl.duration()),
        OWNER: { "$literal": claim.owner.as_str() },
        HOLDER: {
            "host": { "$literal": claim.process.host.as_str() },
            "pid": { "$literal": i64::from(claim.process.pid) },
            "since": "$$NOW",
        },
    };
    if let Some(metadata) = &claim.metadata {
        taken.insert(METADATA, doc! { "$literal": &**metadata });
    }
    taken
}

/// The same as a plain document, with an end that the caller thinks is right.
pub(super) fn inserted(id: &str, claim: &Claim, written: &Written) -> Document {
    let mut holder = process(&claim.process);
    holder.insert("since", written.began);
    let mut inserted = doc! { "_id": id, EXPIRES_AT: written.expires_at, OWNER: claim.owner.as_str(), HOLDER: holder };
    if let Some(metadata) = &claim.metadata {
        inserted.insert(METADATA, &**metadata);
    }
    inserted
}

/// The document of a name that is held by a claim already, for at least `ttl` from now on. One that has no stamp yet was
/// never granted, and its end may be an estimate that nobody has put to the test: where it is far off, it lasts for just
/// that long. (Not where it is a little off: it may be from a later try of the same claim, which this one must not shorten.)
pub(super) fn kept(ttl: Ttl) -> Document {
    let end = from_now(ttl.duration());
    let is_unstamped = doc! { "$eq": [{ "$type": format!("${FENCE}") }, "missing"] };
    let is_far_off = doc! { "$gt": [format!("${EXPIRES_AT}"), from_now(ttl.duration() + FAR_OFF)] };
    let end = doc! { "$cond": [{ "$and": [is_unstamped, is_far_off] }, end, extended(ttl)] };
    doc! { "$mergeObjects": ["$$ROOT", { EXPIRES_AT: end }] }
}

/// The pipeline of a try where names have no queues: extends what is this owner's already, takes over what is missing or
/// expired, and leaves everything else as it is (the server then writes nothing: no oplog entry, no event).
pub(super) fn take(claim: &Claim) -> Vec<Document> {
    vec![doc! { "$replaceWith": { "$switch": {
        "branches": [
            { "case": is_of(&claim.owner), "then": kept(claim.ttl) },
            { "case": is_free(), "then": taken(claim) },
        ],
        "default": "$$ROOT",
    } } }]
}

/// The pipeline of a renewal.
pub(super) fn extend(ttl: Ttl) -> Vec<Document> {
    vec![doc! { "$set": { EXPIRES_AT: extended(ttl) } }]
}

/// The pipeline that has names end a ttl from now on, sooner or later than they would have.
pub(super) fn ends(ttl: Ttl) -> Vec<Document> {
    vec![doc! { "$set": { EXPIRES_AT: from_now(ttl.duration()) } }]
}

/// The pipeline of a transfer, which leaves the end of the lease as it is. `process`: fields of the holder.
pub(super) fn hand_over(to: &OwnerToken, process: &Document) -> Vec<Document> {
    let mut set = doc! { OWNER: { "$literal": to.as_str() } };
    for (field, value) in process {
        set.insert(format!("{HOLDER}.{field}"), doc! { "$literal": value.clone() });
    }
    vec![doc! { "$set": set }]
}

/// The fields of a holder that say which process it is.
pub(super) fn process(process: &Process) -> Document {
    doc! { "host": process.host.as_str(), "pid": i64::from(process.pid) }
}

/// The same of a document's holder.
pub(super) fn process_of(document: &Document) -> Document {
    let mut process = document.get_document(HOLDER).cloned().unwrap_or_default();
    process.remove("since");
    process
}

/// The pipeline of a release that keeps the names busy a while longer.
pub(super) fn let_go(owner: &OwnerToken, keep: Duration) -> Vec<Document> {
    let owner = format!("{}{KEPT}", owner.as_str());
    vec![doc! { "$set": { OWNER: { "$literal": owner }, EXPIRES_AT: from_now(keep) } }]
}

/// The documents of these names that are this owner's, expired or not.
pub(super) fn owned(ids: &[String], owner: &OwnerToken) -> Document {
    let mut filter = match ids {
        [id] => doc! { "_id": id.as_str() },
        ids => doc! { "_id": { "$in": ids } },
    };
    filter.insert(OWNER, owner.as_str());
    filter
}

/// The documents of these names that this owner holds.
pub(super) fn held_by(ids: &[String], owner: &OwnerToken) -> Document {
    let mut filter = owned(ids, owner);
    filter.insert("$expr", doc! { "$gt": ["$expiresAt", "$$NOW"] });
    // What is kept for a waiter is not held by it yet.
    filter.insert(RESERVED, Bson::Null);
    filter
}

/// The documents of these names that one of these owners holds.
pub(super) fn held_by_either(ids: &[String], owners: [&OwnerToken; 2]) -> Document {
    let mut filter = held_by(ids, owners[0]);
    filter.insert(OWNER, doc! { "$in": owners.map(OwnerToken::as_str).to_vec() });
    filter
}

/// Narrows a filter to documents that somebody holds.
pub(super) fn busy(mut filter: Document) -> Document {
    filter.insert("$expr", doc! { "$not": [expired()] });
    filter
}

/// Ids that start with a prefix, byte by byte.
pub(super) fn starting_with(prefix: &str) -> Document {
    let mut range = doc! { "$gte": prefix, "$type": "string" };
    if let Some(end) = after_all_with(prefix) {
        range.insert("$lt", end);
    }
    doc! { "_id": range }
}

/// The smallest text behind all that start with `prefix`. Texts are compared by their UTF-8 bytes, whose order is that
/// of the code points. `None`: nothing is behind them.
fn after_all_with(prefix: &str) -> Option<String> {
    let mut chars: Vec<char> = prefix.chars().collect();
    while let Some(last) = chars.pop() {
        let next = match last {
            '\u{D7FF}' => Some('\u{E000}'),
            last => char::from_u32(last as u32 + 1),
        };
        if let Some(next) = next {
            chars.push(next);
            return Some(chars.into_iter().collect());
        }
    }
    None
}

/// What a try wants to know of a document.
pub(super) fn seen() -> Document {
    doc! { OWNER: 1, FENCE: 1, HANDED: 1, END: end(), SINCE: 1, NOW: "$$NOW" }
}

/// The same for a waiter, who wants to know of its place as well.
pub(super) fn seen_by_waiter(owner: &OwnerToken) -> Document {
    let (place, ahead) = queue::place(owner);
    let mut seen = seen();
    seen.extend(doc! { PLACE: place, AHEAD: ahead });
    seen
}

/// Whether this is an answer to [`seen`]. A command that the driver sent again is answered with what the server has kept
/// of the first time: a whole document, and nothing that was calculated.
pub(super) fn is_answer(document: &Document) -> bool {
    document.contains_key(NOW)
}

/// The place in the queue, in an answer to [`seen_by_waiter`].
pub(super) fn place(document: &Document) -> Option<u64> {
    document.get_i64(PLACE).ok().and_then(|place| u64::try_from(place).ok())
}

/// How many live waiters are before who asks, in an answer that tells.
pub(super) fn ahead(document: &Document) -> usize {
    let ahead = document.get_i32(AHEAD).ok();
    ahead
        .and_then(|ahead| usize::try_from(ahead).ok())
        .unwrap_or(usize::MAX)
}

/// What an inspection wants to know of a document.
pub(super) fn shown() -> Document {
    doc! { OWNER: 1, FENCE: 1, HANDED: 1, END: end(), HOLDER: 1, METADATA: 1, RESERVED: 1, NOW: "$$NOW" }
}

/// Returns the projection for a release of several claims.
pub(super) fn released() -> Document {
    // Only whether there is a queue, without its content.
    let queue = doc! { "$cond": [{ "$eq": [{ "$type": "$queue" }, "missing"] }, "$$REMOVE", true] };
    doc! { OWNER: 1, RESERVED: 1, QUEUE: queue, END: end(), NOW: "$$NOW" }
}

/// Whether this owner holds the document of an answer to [`released`].
pub(super) fn is_held_by(document: &Document, owner: &OwnerToken) -> bool {
    is_owned_by(document, owner) && !document.contains_key(RESERVED) && remaining(document) != Some(Duration::ZERO)
}

/// Whose document it is.
pub(super) fn is_owned_by(document: &Document, owner: &OwnerToken) -> bool {
    document.get_str(OWNER).is_ok_and(|found| found == owner.as_str())
}

/// How long a document keeps its name busy, by the server's clock. `None`: for ever.
pub(super) fn remaining(document: &Document) -> Option<Duration> {
    let end: &DateTime = document.get_datetime(END).ok()?;
    let now: &DateTime = document.get_datetime(NOW).ok()?;
    let left = end.timestamp_millis().saturating_sub(now.timestamp_millis());
    Some(Duration::from_millis(u64::try_from(left).unwrap_or(0)))
}

/// The name that a document is about. `None`: it has no text for an id.
pub(super) fn id(document: &Document) -> Option<&str> {
    document.get_str("_id").ok()
}

/// A document as users see it.
pub(super) fn info(name: &str, document: &Document, clock: Clock) -> LockInfo {
    // What is kept for a waiter still tells of the holder before.
    let ours = document.get_str(OWNER).is_ok() && !document.contains_key(RESERVED);
    LockInfo {
        name: name.to_owned(),
        remaining: remaining(document),
        fence: Stamp::of(document)
            .filter(|_| ours)
            .and_then(|stamp| stamp.fence(clock)),
        holder: document.get_document(HOLDER).ok().and_then(holder).filter(|_| ours),
        metadata: document
            .get_str(METADATA)
            .ok()
            .filter(|text| ours && is_json(text))
            .map(str::to_owned),
    }
}

/// Whether a text is JSON, as the users' metadata is. Another tool may have a field of that name.
fn is_json(text: &str) -> bool {
    serde_json::from_str::<IgnoredAny>(text).is_ok()
}

fn holder(document: &Document) -> Option<Holder> {
    let pid = match document.get("pid")? {
        Bson::Int64(pid) => u32::try_from(*pid).ok()?,
        Bson::Int32(pid) => u32::try_from(*pid).ok()?,
        _ => return None,
    };
    let since_ms = u64::try_from(document.get_datetime("since").ok()?.timestamp_millis()).ok()?;
    Some(Holder {
        process: Process {
            host: document.get_str("host").ok()?.to_owned(),
            pid,
        },
        since_ms,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_behind_a_prefix() {
        assert_eq!(after_all_with(""), None);
        assert_eq!(after_all_with("a*").as_deref(), Some("a+"));
        assert_eq!(after_all_with("é").as_deref(), Some("ê"));
        assert_eq!(
            after_all_with("a\u{D7FF}").as_deref(),
            Some("a\u{E000}"),
            "there are no characters in between"
        );
        assert_eq!(
            after_all_with("a\u{10FFFF}").as_deref(),
            Some("b"),
            "the last character has no successor"
        );
        assert_eq!(after_all_with("\u{10FFFF}\u{10FFFF}"), None);
        assert!(after_all_with("a\u{7F}").is_some_and(|end| end.as_bytes() > "a\u{7F}\u{10FFFF}".as_bytes()));
    }

    #[test]
    fn part_milliseconds_round_up_and_no_length_overflows() {
        assert_eq!(millis(Duration::from_micros(1)), 1);
        assert_eq!(millis(Duration::from_millis(7)), 7);
        assert!(millis(Duration::MAX) > 0);
    }

    #[test]
    fn a_gist_document_tells_only_how_long() {
        let gist = doc! { "_id": "n", "end": DateTime::from_millis(5000), "now": DateTime::from_millis(3000) };
        let info = info("n", &gist, Clock::Cluster);
        assert_eq!(info.remaining, Some(Duration::from_secs(2)));
        assert_eq!((info.fence, info.holder, info.metadata), (None, None, None));
        assert_eq!(
            remaining(&doc! { "_id": "n", "end": "soon", "now": DateTime::from_millis(1) }),
            None
        );
    }
}
