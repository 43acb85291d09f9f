//! The documents of the locks: filters, pipelines, projections, and the fields of a document.
//!
//! A lock's document is the gist's, with more fields:
//! `{ _id: name, expiresAt, owner, fence, holder: { host, pid, since }, metadata }`, and those of `queue/pipelines.rs` where the
//! name has waiters. A document without an `owner` belongs to a gist process.
//!
//! Text from the user is a `$literal` in a pipeline, because text that starts with `$` would be an expression.

use std::time::Duration;

use mongodb::bson::{Bson, DateTime, Document, Timestamp, doc};
use serde::de::IgnoredAny;

use super::ops::clock_offset::EstimatedEnd;
use super::ops::fence::Stamp;
use super::queue::pipelines;
use crate::engine::mongodb::fields::{
    AHEAD, CHECK, END, EXPIRES_AT, FENCE, GRANTED, HANDED, HOLDER, NOW, OWNER, QUEUE, RESERVED, RESERVED_UNTIL, SINCE,
    WAITING,
};
use crate::model::{Claim, Holder, LockInfo, OwnerToken, Process, Ttl};

pub(super) const METADATA: &str = "metadata";
/// Suffix of the owner of a name that was released but stays busy. No owner token ends with it.
pub(super) const KEPT: &str = "-kept";
/// The field of an answer with the waiter's number in the queue.
const POSITION: &str = "position";
/// No command is in progress for this long.
const FAR_OFF: Duration = Duration::from_secs(60);
/// A field that no stored document has. A filter for null matches every document, and the document that an upsert creates
/// *has* the null. So the pipeline can distinguish a missing document from a bare `{ _id }` that another program inserted.
const ABSENT: &str = "holdfastAbsent";

/// Returns the condition that the document's lease has expired by the server's clock. Without a valid end it never expires.
pub(super) fn expired() -> Document {
    doc! { "$and": [{ "$eq": [{ "$type": "$expiresAt" }, "date"] }, { "$lte": [end(), "$$NOW"] }] }
}

/// Returns the condition that the document is missing or has expired.
pub(super) fn is_free() -> Document {
    let missing = doc! { "$eq": [{ "$type": format!("${ABSENT}") }, "null"] };
    doc! { "$or": [missing, expired()] }
}

/// Returns the condition that the document belongs to this owner.
pub(super) fn is_of(owner: &OwnerToken) -> Document {
    doc! { "$eq": [format!("${OWNER}"), { "$literal": owner.as_str() }] }
}

/// Returns the expression for the end of a lease or of a reservation. (`$min` ignores missing fields.)
pub(super) fn end() -> Document {
    doc! { "$min": [format!("${EXPIRES_AT}"), format!("${RESERVED_UNTIL}")] }
}

pub(super) fn from_now(duration: Duration) -> Document {
    doc! { "$add": ["$$NOW", millis(duration)] }
}

/// Returns the expression for an end that is at least `ttl` from now and never earlier than the current one.
fn extended(ttl: Ttl) -> Document {
    doc! { "$max": ["$expiresAt", from_now(ttl.duration())] }
}

pub(super) fn millis(duration: Duration) -> i64 {
    duration.as_nanos().div_ceil(1_000_000).min(1 << 40) as i64
}

/// Returns the filter of an attempt.
pub(super) fn one_or_none(id: &str) -> Document {
    doc! { "_id": id, ABSENT: Bson::Null }
}

/// Returns the expression for the document of a name that a claim acquires now, without a fencing token.
pub(super) fn acquired(claim: &Claim) -> Document {
    let mut acquired = doc! {
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
        acquired.insert(METADATA, doc! { "$literal": &**metadata });
    }
    acquired
}

/// Returns the same as a plain document, with an estimated end.
pub(super) fn inserted(id: &str, claim: &Claim, end: &EstimatedEnd) -> Document {
    let mut holder = process(&claim.process);
    holder.insert("since", end.began);
    let mut inserted = doc! { "_id": id, EXPIRES_AT: end.expires_at, OWNER: claim.owner.as_str(), HOLDER: holder };
    if let Some(metadata) = &claim.metadata {
        inserted.insert(METADATA, &**metadata);
    }
    inserted
}

/// Returns the expression for the document of a name that the claim holds already, for at least `ttl` from now on.
///
/// # Behavior
/// The end of a document without a stamp may be an unverified estimate. If that is more than a minute too late, it becomes `ttl`
/// from now. A smaller difference stays: it may come from a later attempt of the same claim, which this one must not shorten. (An
/// extension by more than that writes the stamp.)
pub(super) fn still_held(ttl: Ttl) -> Document {
    let end = from_now(ttl.duration());
    let is_unstamped = doc! { "$eq": [{ "$type": format!("${FENCE}") }, "missing"] };
    let is_far_off = doc! { "$gt": [format!("${EXPIRES_AT}"), from_now(ttl.duration() + FAR_OFF)] };
    let end = doc! { "$cond": [{ "$and": [is_unstamped, is_far_off] }, end, extended(ttl)] };
    doc! { "$mergeObjects": ["$$ROOT", { EXPIRES_AT: end }] }
}

/// Returns the pipeline of a renewal of this claim. `tick`: the token of the owner, for a document that has none.
///
/// # Behavior
/// A document without a token was not renewed before, and its end may have a margin, which the renewal removes. A hand-off
/// that granted the name counts as confirmed from now on.
pub(super) fn extend(claim: &Claim, ttl: Ttl, tick: Option<Timestamp>) -> Vec<Document> {
    let set = match tick {
        Some(tick) => {
            let is_new = doc! { "$eq": [{ "$type": format!("${FENCE}") }, "missing"] };
            let end = from_now(ttl.duration().max(claim.ttl.duration()));
            let token = doc! { "$ifNull": [format!("${FENCE}"), tick] };
            doc! { EXPIRES_AT: { "$cond": [is_new, end, extended(ttl)] }, FENCE: token, GRANTED: "$$REMOVE" }
        }
        None => doc! { EXPIRES_AT: extended(ttl), GRANTED: "$$REMOVE" },
    };
    vec![doc! { "$set": set }]
}

/// Returns the pipeline that sets the end of leases to `ttl` from now, earlier or later than before.
pub(super) fn ends(ttl: Ttl) -> Vec<Document> {
    vec![doc! { "$set": { EXPIRES_AT: from_now(ttl.duration()) } }]
}

/// Returns the pipeline of a transfer, which changes neither the end of the lease nor its token. `process`: fields of the holder.
pub(super) fn transfer(to: &OwnerToken, process: &Document) -> Vec<Document> {
    let mut set = doc! { OWNER: { "$literal": to.as_str() } };
    for (field, value) in process {
        set.insert(format!("{HOLDER}.{field}"), doc! { "$literal": value.clone() });
    }
    vec![doc! { "$set": set }]
}

/// Returns the fields of a holder that identify its process.
pub(super) fn process(process: &Process) -> Document {
    doc! { "host": process.host.as_str(), "pid": i64::from(process.pid) }
}

/// Returns the same fields of a document's holder.
pub(super) fn process_of(document: &Document) -> Document {
    let mut process = document.get_document(HOLDER).cloned().unwrap_or_default();
    process.remove("since");
    process
}

/// Returns the pipeline of a release that keeps the names busy for `keep`. The process of the first waiter checks them then.
pub(super) fn keep_busy(owner: &OwnerToken, keep: Duration) -> Vec<Document> {
    let (owner, check) = (format!("{}{KEPT}", owner.as_str()), pipelines::check_after(keep));
    vec![
        doc! { "$set": { OWNER: { "$literal": owner }, EXPIRES_AT: from_now(keep), GRANTED: "$$REMOVE", CHECK: check } },
    ]
}

/// Returns the filter of the documents of these names.
pub(super) fn named(ids: &[String]) -> Document {
    match ids {
        [id] => doc! { "_id": id.as_str() },
        ids => doc! { "_id": { "$in": ids } },
    }
}

/// Returns the filter of the documents of these names that belong to this owner, expired or not.
pub(super) fn owned(ids: &[String], owner: &OwnerToken) -> Document {
    let mut filter = named(ids);
    filter.insert(OWNER, owner.as_str());
    filter
}

/// Returns the filter of the documents of these names that this owner holds.
pub(super) fn held_by(ids: &[String], owner: &OwnerToken) -> Document {
    let mut filter = owned(ids, owner);
    filter.insert("$expr", doc! { "$gt": ["$expiresAt", "$$NOW"] });
    // A reservation is not a lease yet.
    filter.insert(RESERVED, Bson::Null);
    filter
}

/// Returns the filter of the documents of these names that one of these owners holds.
pub(super) fn held_by_either(ids: &[String], owners: [&OwnerToken; 2]) -> Document {
    let mut filter = held_by(ids, owners[0]);
    filter.insert(OWNER, doc! { "$in": owners.map(OwnerToken::as_str).to_vec() });
    filter
}

/// Narrows a filter to documents that keep their names busy.
pub(super) fn busy(mut filter: Document) -> Document {
    filter.insert("$expr", doc! { "$not": [expired()] });
    filter
}

/// Returns the filter of the ids that start with a prefix, byte by byte.
pub(super) fn starting_with(prefix: &str) -> Document {
    let mut range = doc! { "$gte": prefix, "$type": "string" };
    if let Some(end) = after_all_with(prefix) {
        range.insert("$lt", end);
    }
    doc! { "_id": range }
}

/// Returns the smallest text that sorts after all that start with `prefix`. Texts are compared by their UTF-8 bytes, whose
/// order is that of the code points. `None`: there is no such text.
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

/// Returns the projection of an attempt.
pub(super) fn attempt_fields() -> Document {
    doc! { OWNER: 1, FENCE: 1, HANDED: 1, END: end(), SINCE: 1, NOW: "$$NOW" }
}

/// Returns the projection of a waiter's attempt, with its position.
pub(super) fn waiter_fields(owner: &OwnerToken) -> Document {
    let (position, ahead) = pipelines::position(owner);
    let mut fields = attempt_fields();
    fields.extend(doc! { POSITION: position, AHEAD: ahead });
    fields
}

/// Whether this is an answer to [`attempt_fields`]. For a command that the driver retried, the server returns the document
/// that it stored the first time, without calculated fields.
pub(super) fn is_answer(document: &Document) -> bool {
    document.contains_key(NOW)
}

/// Reads the waiter's number in the queue from an answer to [`waiter_fields`].
pub(super) fn position(document: &Document) -> Option<u64> {
    let number = document.get_i64(POSITION).ok();
    number.and_then(|number| u64::try_from(number).ok())
}

/// Reads the number of live waiters ahead from an answer. Without that field, returns the maximum.
pub(super) fn ahead(document: &Document) -> usize {
    let ahead = document.get_i32(AHEAD).ok();
    ahead
        .and_then(|ahead| usize::try_from(ahead).ok())
        .unwrap_or(usize::MAX)
}

/// Returns the projection of `inspect` and `list`. `has_queue`: with the number of waiters.
pub(super) fn info_fields(has_queue: bool) -> Document {
    let mut fields =
        doc! { OWNER: 1, FENCE: 1, HANDED: 1, END: end(), HOLDER: 1, METADATA: 1, RESERVED: 1, NOW: "$$NOW" };
    fields.extend(has_queue.then(|| (WAITING.to_owned(), pipelines::waiting().into())));
    fields
}

/// Returns the projection for a release of several claims.
pub(super) fn release_fields() -> Document {
    // Only whether there is a queue, without its content.
    let queue = doc! { "$cond": [{ "$eq": [{ "$type": "$queue" }, "missing"] }, "$$REMOVE", true] };
    doc! { OWNER: 1, RESERVED: 1, QUEUE: queue, END: end(), NOW: "$$NOW" }
}

/// Whether this owner holds the document of an answer to [`release_fields`].
pub(super) fn is_held_by(document: &Document, owner: &OwnerToken) -> bool {
    is_owned_by(document, owner) && !document.contains_key(RESERVED) && remaining(document) != Some(Duration::ZERO)
}

/// Returns the owner of a document.
pub(super) fn owner(document: &Document) -> Option<&str> {
    document.get_str(OWNER).ok()
}

/// Whether the document belongs to this owner.
pub(super) fn is_owned_by(document: &Document, owner: &OwnerToken) -> bool {
    self::owner(document) == Some(owner.as_str())
}

/// Returns how long a document keeps its name busy, by the server's clock. `None`: for ever.
pub(super) fn remaining(document: &Document) -> Option<Duration> {
    let end: &DateTime = document.get_datetime(END).ok()?;
    let now: &DateTime = document.get_datetime(NOW).ok()?;
    let left = end.timestamp_millis().saturating_sub(now.timestamp_millis());
    Some(Duration::from_millis(u64::try_from(left).unwrap_or(0)))
}

/// Returns the id of a document. `None`: the id is not text.
pub(super) fn id(document: &Document) -> Option<&str> {
    document.get_str("_id").ok()
}

/// Returns the public data of a document.
pub(super) fn info(name: &str, document: &Document) -> LockInfo {
    // A reservation still has the data of the earlier holder.
    let ours = document.get_str(OWNER).is_ok() && !document.contains_key(RESERVED);
    LockInfo {
        name: name.to_owned(),
        remaining: remaining(document),
        fence: Stamp::of(document).filter(|_| ours).and_then(|stamp| stamp.fence()),
        holder: document.get_document(HOLDER).ok().and_then(holder).filter(|_| ours),
        metadata: document
            .get_str(METADATA)
            .ok()
            .filter(|text| ours && is_json(text))
            .map(str::to_owned),
        share: None,
        waiting: document
            .get_i32(WAITING)
            .ok()
            .and_then(|waiting| waiting.try_into().ok()),
    }
}

/// Whether a text is JSON, as metadata is. Another tool may have written a field of that name.
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
    fn the_end_of_a_range_of_names() {
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
    fn milliseconds_are_rounded_up_and_never_overflow() {
        assert_eq!(millis(Duration::from_micros(1)), 1);
        assert_eq!(millis(Duration::from_millis(7)), 7);
        assert!(millis(Duration::MAX) > 0);
    }

    #[test]
    fn a_gist_document_has_only_an_end() {
        let gist = doc! { "_id": "n", "end": DateTime::from_millis(5000), "now": DateTime::from_millis(3000) };
        let info = info("n", &gist);
        assert_eq!(info.remaining, Some(Duration::from_secs(2)));
        assert_eq!((info.fence, info.holder, info.metadata), (None, None, None));
        assert_eq!(
            remaining(&doc! { "_id": "n", "end": "soon", "now": DateTime::from_millis(1) }),
            None
        );
    }
}
