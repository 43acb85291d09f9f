//! The queue of a name, which is a part of the lock's document: the waiters in order of arrival.
//!
//! `queue: [{ owner, process, at, until, hold, holder? }]`. `at` is the waiter's number: the server's clock in microseconds when it
//! arrived, and always larger than the number before. `until` is the end of the liveness that the last heartbeat of its process
//! gave it. `hold` is how long a hand-off lasts until it confirms, in milliseconds. A waiter with a `holder` takes grants.
//!
//! The command that finds a name free hands it off: the first live waiter becomes the owner, with a short lease or with a short
//! time to confirm (`hand_off.rs`), and with a field that the change stream of its process selects. So a service with queues does
//! not delete the document of a name with live waiters. Where it is deleted (by a gist process, by a service that connected to a
//! standalone, which became a replica set, or by the TTL monitor between the end of a lease and the next grant), every waiter returns
//! with its number.
//!
//! Everything is in one document, so the order is that in which the primary executes the commands. The queue disappears with
//! the document. The next change removes the positions that expired a minute ago.

use std::collections::HashSet;
use std::time::Duration;

use mongodb::bson::{Bson, Document, doc};

use super::expressions::{changed, entries, first, is, is_live, is_missing, is_not, literal, terms, with};
use super::hand_off::{self, Grant, hold};
use crate::engine::mongodb::documents::{self, from_now, millis};
use crate::engine::mongodb::fields::{
    AHEAD, END, EXPIRES_AT, FENCE, GRANTED, HANDED, HOLDER, HOLDERS, LIMIT, NOW, OWNER, PERMITS, QUEUE, RESERVED,
};
use crate::engine::mongodb::ops::fence::Stamp;
use crate::engine::{EXPIRED_POSITION_KEPT, WAITER_LIVENESS};
use crate::model::{Claim, Fence, OwnerToken};

/// Suffix of the owner of a document that is about to be deleted. No owner token ends with it.
pub(crate) const FREED: &str = "-freed";

/// The field of an answer with the owners of the waiters.
const OWNERS: &str = "owners";

/// Maximum number of positions in a queue. A waiter that finds the queue full polls.
const LONGEST_QUEUE: i32 = 10_000;

/// Returns the pipeline that replaces the document by `result`, without the field of an empty queue. So the document of a gist
/// process stays unchanged.
fn replace_with(result: Document) -> Vec<Document> {
    let queue = format!("${QUEUE}");
    let is_empty = doc! { "$eq": [queue.as_str(), Vec::<Bson>::new()] };
    vec![
        doc! { "$replaceWith": result },
        doc! { "$set": { QUEUE: { "$cond": [is_empty, "$$REMOVE", queue] } } },
    ]
}

/// Returns the entries of a list that are live or expired less than [`EXPIRED_POSITION_KEPT`] ago.
pub(super) fn remembered(list: impl Into<Bson>) -> Bson {
    let forgotten_by = doc! { "$subtract": ["$$NOW", millis(EXPIRED_POSITION_KEPT)] };
    entries(list, doc! { "$gt": ["$$e.until", forgotten_by] })
}

/// Returns variables for the queue and for its first live waiter, which may be missing.
fn queue_and_next(queue: Bson) -> Vec<(&'static str, Bson)> {
    vec![("queue", queue), ("next", first(entries("$$queue", is_live())))]
}

/// Returns a list in which the entries of a process are live from now on.
pub(super) fn alive(list: impl Into<Bson>, process: &str) -> Document {
    let of_process = doc! { "$eq": ["$$e.process", literal(process)] };
    changed(list, of_process, doc! { "until": from_now(WAITER_LIVENESS) })
}

/// A waiter as the queues identify it.
pub(crate) struct Waiter<'a> {
    /// The process's name in the queues.
    pub process: &'a str,
    /// Its number in the queue; 0 without a position.
    pub number: u64,
    /// Whether a hand-off may grant it the name: this process gets the event.
    pub takes_grants: bool,
}

/// Returns the pipeline of an attempt.
///
/// # Behavior
/// - A name that is reserved for this owner is confirmed, with the next token.
/// - A name that this owner holds is extended.
/// - A missing or expired document is acquired if no live waiter is ahead. Otherwise it is handed off to the first one.
/// - Any other document stays unchanged, except for the waiter's position, which is created or kept alive. Without a waiter the
///   server writes nothing.
pub(crate) fn acquire(claim: &Claim, waiter: Option<&Waiter<'_>>) -> Vec<Document> {
    let owner = &claim.owner;
    let known = waiter.map_or(0, |waiter| waiter.number);
    let unknown = if known == 0 { i64::MAX } else { known as i64 };
    let before = doc! { "$and": [{ "$lt": ["$$e.at", "$$number"] }, is_live()] };
    let variables = vec![
        ("queue", remembered(all())),
        ("mine", entries("$$queue", is(owner))),
        ("others", entries("$$queue", is_not(owner))),
        ("number", doc! { "$ifNull": [{ "$min": "$$mine.at" }, unknown] }.into()),
        ("next", first(entries("$$others", before))),
        (
            "entered",
            waiter.map_or("$$queue".into(), |waiter| entered(claim, waiter).into()),
        ),
    ];
    let mut acquired = documents::acquired(claim);
    acquired.insert(QUEUE, "$$others");
    let mut confirmed = acquired.clone();
    if let Some(waiter) = waiter {
        confirmed.insert(QUEUE, alive("$$others", waiter.process));
    }
    confirmed.insert(FENCE, format!("${FENCE}"));
    confirmed.insert(HANDED, doc! { "$add": [{ "$ifNull": [format!("${HANDED}"), 0] }, 1] });
    let mut still_held = hand_off::confirmed(documents::still_held(claim.ttl));
    if let Some(waiter) = waiter {
        still_held = doc! { "$mergeObjects": [still_held, { QUEUE: alive("$$others", waiter.process) }] };
    }
    let ours = documents::is_of(owner);
    let is_reserved = doc! { "$not": [is_missing(&format!("${RESERVED}"))] };
    let free = documents::is_free();
    let busy: Bson = match waiter {
        Some(_) => doc! { "$mergeObjects": ["$$ROOT", { QUEUE: "$$entered" }] }.into(),
        None => "$$ROOT".into(),
    };
    let result = doc! { "$switch": {
        "branches": [
            { "case": { "$and": [ours.clone(), is_reserved] }, "then": confirmed },
            { "case": ours, "then": still_held },
            { "case": { "$and": [free.clone(), is_missing("$$next")] }, "then": acquired },
            { "case": free, "then": hand_off::reserved("$$entered") },
        ],
        "default": busy,
    } };
    replace_with(with(variables, result))
}

/// Returns the queue with this waiter in it.
pub(super) fn entered(claim: &Claim, waiter: &Waiter<'_>) -> Document {
    let mut fresh = doc! {
        "until": from_now(WAITER_LIVENESS),
        "hold": millis(hold(claim.ttl)),
    };
    fresh.extend(terms(claim));
    if let Some(holder) = holder(claim, waiter.takes_grants) {
        fresh.insert(HOLDER, doc! { "$literal": holder });
    }
    let entry = |at: Bson| {
        let mut entry = doc! {
            "owner": literal(claim.owner.as_str()),
            "process": literal(waiter.process),
            "at": at,
        };
        entry.extend(fresh.clone());
        entry
    };
    let inserted = match waiter.number {
        0 => {
            let micros = doc! { "$multiply": [{ "$toLong": "$$NOW" }, 1000_i64] };
            // `$add` of a missing value is null, which `$max` ignores.
            let behind = doc! { "$add": [{ "$max": "$$queue.at" }, 1_i64] };
            doc! { "$concatArrays": ["$$queue", [entry(doc! { "$max": [micros, behind] }.into())]] }
        }
        number => {
            let number = number as i64;
            doc! { "$concatArrays": [
                entries("$$queue", doc! { "$lt": ["$$e.at", number] }),
                [entry(number.into())],
                entries("$$queue", doc! { "$gte": ["$$e.at", number] }),
            ] }
        }
    };
    let kept = changed("$$queue", is(&claim.owner), fresh);
    // A share is granted from the queue, so that remembered positions must not fill it.
    let positions = match claim.share {
        Some(_) => entries("$$queue", is_live()),
        None => "$$queue".into(),
    };
    let is_full = doc! { "$gte": [{ "$size": positions }, LONGEST_QUEUE] };
    let inserted = doc! { "$cond": [is_full, "$$queue", inserted] };
    doc! { "$cond": [{ "$eq": ["$$mine", []] }, inserted, kept] }
}

/// Returns what a hand-off writes of the holder. `None`: a hand-off cannot grant the claim its name.
fn holder(claim: &Claim, takes_grants: bool) -> Option<Document> {
    (takes_grants && claim.takes_hand_offs()).then(|| documents::process(&claim.process))
}

/// Returns the pipeline that enters several new waiters of a process in their order, up to the longest queue. Waiters with a
/// position keep it. The owner of the document gets none: a hand-off was for it, and it has not received the event.
pub(crate) fn enter<'c>(claims: impl Iterator<Item = &'c Claim>, waiter: &Waiter<'_>) -> Vec<Document> {
    let new: Vec<Document> = claims
        .zip(0_i64..)
        .map(|(claim, offset)| {
            let mut new = doc! { "owner": claim.owner.as_str(), "hold": millis(hold(claim.ttl)), "offset": offset };
            new.extend(terms(claim));
            new.extend(holder(claim, waiter.takes_grants).map(|holder| (HOLDER.to_owned(), holder.into())));
            new
        })
        .collect();
    let is_new = doc! { "$and": [
        { "$not": [{ "$in": ["$$e.owner", "$$queue.owner"] }] },
        { "$ne": ["$$e.owner", format!("${OWNER}")] },
        { "$not": [{ "$in": ["$$e.owner", { "$ifNull": [format!("${HOLDERS}.owner"), Vec::<Bson>::new()] }] }] },
    ] };
    let micros = doc! { "$multiply": [{ "$toLong": "$$NOW" }, 1000_i64] };
    let behind = doc! { "$add": [{ "$max": "$$queue.at" }, 1_i64] };
    let room = doc! { "$max": [0, { "$subtract": [LONGEST_QUEUE, { "$size": "$$queue" }] }] };
    let positions = doc! { "$map": { "input": { "$slice": ["$$new", room] }, "as": "e", "in": {
        "owner": "$$e.owner",
        "process": literal(waiter.process),
        "at": { "$add": ["$$first", "$$e.offset"] },
        "until": from_now(WAITER_LIVENESS),
        "hold": "$$e.hold",
        HOLDER: format!("$$e.{HOLDER}"),
        PERMITS: format!("$$e.{PERMITS}"),
        LIMIT: format!("$$e.{LIMIT}"),
    } } };
    let variables = vec![
        ("queue", alive(remembered(all()), waiter.process).into()),
        ("new", entries(doc! { "$literal": new }, is_new)),
        ("first", doc! { "$max": [micros, behind] }.into()),
    ];
    let queue = doc! { "$concatArrays": ["$$queue", positions] };
    replace_with(with(variables, doc! { "$mergeObjects": ["$$ROOT", { QUEUE: queue }] }))
}

/// Returns the projection of the entries of these owners, for an answer to [`enter`].
pub(crate) fn positions_of(owners: &[&str]) -> Bson {
    entries(all(), doc! { "$in": ["$$e.owner", owners] })
}

/// Returns the projections of an owner's number (missing without a position) and of the number of live waiters ahead of it.
pub(crate) fn position(owner: &OwnerToken) -> (Document, Document) {
    let number = doc! { "$min": "$$mine.at" };
    let of = |result: Document| with(vec![("mine", entries(all(), is(owner)))], result);
    let position = doc! { "$cond": [{ "$eq": ["$$mine", []] }, "$$REMOVE", number.clone()] };
    (of(position), of(ahead_of(number)))
}

/// Returns the projection of the number of live waiters.
pub(crate) fn waiting() -> Document {
    doc! { "$size": entries(all(), is_live()) }
}

/// Returns the number of live waiters with a smaller number.
fn ahead_of(number: Document) -> Document {
    let earlier = doc! { "$and": [{ "$lt": ["$$e.at", "$$number"] }, is_live()] };
    with(
        vec![("number", number.into())],
        doc! { "$size": entries(all(), earlier) },
    )
}

/// Returns the whole queue. A field of this name with other content counts as absent: another tool may have written it.
pub(super) fn all() -> Bson {
    const TYPES: [(&str, &str); 5] = [
        ("owner", "string"),
        ("process", "string"),
        ("at", "long"),
        ("until", "date"),
        ("hold", "long"),
    ];
    let queue = format!("${QUEUE}");
    let array = doc! { "$cond": [{ "$isArray": [queue.as_str()] }, queue.as_str(), Vec::<Bson>::new()] };
    let fits = |(field, bson_type)| Bson::from(doc! { "$eq": [{ "$type": format!("$$e.{field}") }, bson_type] });
    entries(array, doc! { "$and": TYPES.map(fits).to_vec() })
}

/// Returns the filter of the documents of these names that a release of these owners concerns: one of them holds the name, has
/// a position in its queue, or has marked it for deletion.
pub(crate) fn touched_by(ids: &[String], owners: &[&str]) -> Document {
    let freed = owners.iter().map(|owner| format!("{owner}{FREED}"));
    let names: Vec<String> = owners.iter().map(|owner| (*owner).to_owned()).chain(freed).collect();
    let in_queue = format!("{QUEUE}.owner");
    let mut filter = documents::named(ids);
    filter.insert(
        "$or",
        vec![doc! { OWNER: { "$in": names } }, doc! { in_queue: { "$in": owners } }],
    );
    filter
}

/// Returns the filter of a document that is reserved for this waiter of a process, or in whose queue it is. A document that
/// the waiter holds does not match.
pub(crate) fn waited_for_by(id: &str, process: &str, owner: &OwnerToken) -> Document {
    let (reserved, owner) = (format!("{process}:{}", owner.as_str()), owner.as_str());
    doc! { "_id": id, "$or": [
        { RESERVED: reserved },
        { format!("{QUEUE}.owner"): owner, OWNER: { "$ne": owner } },
    ] }
}

/// Returns the pipeline of a release for owners of this process. It hands off what belongs to one of them and removes their
/// positions. It marks a document without waiters for deletion ([`FREED`]). `last`: the token of the owner, if it holds the
/// document. The hand-off is then a grant, if the waiter takes one.
pub(crate) fn release(owners: &[&str], process: &str, last: Option<Fence>) -> Vec<Document> {
    let is_other = doc! { "$not": [{ "$in": ["$$e.owner", owners] }] };
    // The command proves that the process lives.
    let variables = queue_and_next(entries(alive(remembered(all()), process), is_other));
    let ours = doc! { "$in": [format!("${OWNER}"), owners] };
    let freed = doc! { "$mergeObjects": ["$$ROOT", {
        OWNER: { "$concat": [format!("${OWNER}"), FREED] },
        EXPIRES_AT: "$$NOW",
    }] };
    let reserved = hand_off::reserved("$$queue");
    let handed_off = match last.and_then(|last| Some((last, Stamp::after(last)?))) {
        Some((last, next)) => {
            let granted = hand_off::granted("$$queue", last, next);
            doc! { "$cond": [hand_off::is_grantable(), granted, reserved] }
        }
        None => reserved,
    };
    let result = doc! { "$switch": {
        "branches": [
            { "case": { "$and": [ours.clone(), { "$not": [is_missing("$$next")] }] }, "then": handed_off },
            { "case": ours, "then": freed },
        ],
        "default": { "$mergeObjects": ["$$ROOT", { QUEUE: "$$queue" }] },
    } };
    replace_with(with(variables, result))
}

/// Returns the filter of the documents of these names that these owners marked for deletion.
pub(crate) fn marked_freed(ids: &[String], owners: &[&str]) -> Document {
    let freed: Vec<String> = owners.iter().map(|owner| format!("{owner}{FREED}")).collect();
    let mut filter = documents::named(ids);
    filter.insert(OWNER, doc! { "$in": freed });
    filter
}

/// Returns the pipeline that hands off a name of any owner. Its filter selects only documents with live waiters.
pub(crate) fn hand_off() -> Vec<Document> {
    replace_with(with(queue_and_next(remembered(all())), hand_off::reserved("$$queue")))
}

/// Returns the expression of [`CHECK`](crate::engine::mongodb::fields::CHECK) for a name that stays busy for this time, without an
/// owner.
pub(crate) fn check_after(left: Duration) -> Document {
    hand_off::check(entries(all(), is_live()), millis(left))
}

/// Narrows a filter to documents with live waiters, or to documents without.
pub(crate) fn narrowed(mut filter: Document, has_waiters: bool) -> Document {
    let live = entries(all(), is_live());
    let comparison = if has_waiters { "$ne" } else { "$eq" };
    let condition = doc! { comparison: [live, Vec::<Bson>::new()] };
    let both = match filter.remove("$expr") {
        Some(other) => doc! { "$and": [other, condition] },
        None => condition,
    };
    filter.insert("$expr", both);
    filter
}

/// Returns the filter of the documents of these names in whose queues the process has waiters.
pub(crate) fn waited_for(ids: &[Bson], process: &str) -> Document {
    doc! { "_id": { "$in": ids }, format!("{QUEUE}.process"): process }
}

/// Returns the pipeline of a heartbeat, and its projection: keeps all waiters of the process alive, and hands off the names that are free.
pub(crate) fn heartbeat(process: &str) -> (Vec<Document>, Document) {
    // Revive before the removal of old positions: the positions of the process stay, however long it was silent.
    let variables = queue_and_next(remembered(alive(all(), process)));
    let free = doc! { "$and": [documents::expired(), { "$not": [is_missing("$$next")] }] };
    let result = doc! { "$cond": [
        free,
        hand_off::reserved("$$queue"),
        { "$mergeObjects": ["$$ROOT", { QUEUE: "$$queue" }] },
    ] };
    (replace_with(with(variables, result)), heartbeat_fields(process))
}

/// Returns the projection of a heartbeat: the reservation or the grant, the end of the lease, the waiters of the process, and the
/// number of waiters ahead of them.
pub(super) fn heartbeat_fields(process: &str) -> Document {
    let ours = entries(all(), doc! { "$eq": ["$$e.process", literal(process)] });
    let owners = doc! { "$map": { "input": ours.clone(), "as": "e", "in": "$$e.owner" } };
    let ahead = with(vec![("ours", ours)], ahead_of(doc! { "$min": "$$ours.at" }));
    doc! { RESERVED: 1, GRANTED: 1, END: documents::end(), NOW: "$$NOW", OWNERS: owners, AHEAD: ahead }
}

/// Reads the waiters of the process from an answer to [`heartbeat_fields`].
pub(crate) fn owners(document: &Document) -> HashSet<OwnerToken> {
    let owners = document.get_array(OWNERS).map(Vec::as_slice).unwrap_or_default();
    let tokens = owners.iter().filter_map(Bson::as_str);
    tokens.filter_map(|token| OwnerToken::parse(token).ok()).collect()
}

/// Reads the waiter of the process that the name was handed off to, and that has not confirmed it, from an answer to
/// [`heartbeat_fields`].
pub(crate) fn handed_off_to(document: &Document, process: &str) -> Option<OwnerToken> {
    if let Ok(granted) = document.get_str(GRANTED) {
        let (to, grant) = Grant::parse(granted)?;
        return (to == process).then_some(grant.owner);
    }
    let reserved = document.get_str(RESERVED).ok()?;
    let owner = reserved.strip_prefix(process)?.strip_prefix(':')?;
    OwnerToken::parse(owner).ok()
}
