//! The queue of a name, in the lock's own document: who waits, in the order of arrival.
//!
//! `queue: [{ owner, process, at, until, hold }]`, where `at` is the place in the order (the server's clock in
//! microseconds when the waiter came, and in any case more than the one before), `until` the end of the last sign of life
//! of its process, and `hold` how long the name is kept for it when it is its turn, in milliseconds.
//!
//! A name is handed on by the command that finds it free: the document gets the first live waiter for an owner, with a
//! lease that is only as long as it takes to come for it (`reservedUntil`), and `reserved: "<process>:<owner>"`, which is
//! what the change stream of that process looks out for. So the document of a name that somebody waits for is not deleted
//! by us, as long as one of them has given a sign of life of late. Where it is deleted (by a gist process, or by the TTL
//! monitor between the end of a lease and the next), every waiter comes back with the place that it had.
//!
//! All of it goes by one document, and so by the order in which the primary carries the commands out. A queue takes no
//! room of its own: it goes when the document goes, and places that nobody keeps alive are dropped with the next change.

use std::collections::HashSet;
use std::time::Duration;

use mongodb::bson::{Bson, Document, doc};

use super::documents::{self, AHEAD, END, EXPIRES_AT, FENCE, NOW, OWNER, from_now, millis};
use crate::engine::WAITER_LIVENESS;
use crate::engine::local_waiters::RESERVATION as LONGEST_HOLD;
use crate::model::{Claim, OwnerToken, Ttl};

pub(super) const QUEUE: &str = "queue";
/// `<process>:<owner>` of the waiter that a name is kept for.
pub(super) const RESERVED: &str = "reserved";
/// Until when it is kept.
pub(super) const RESERVED_UNTIL: &str = "reservedUntil";
/// How often a name went on to a waiter since its stamp (see `fence.rs`).
pub(super) const HANDED: &str = "handed";
/// What the owner of a document that is about to be deleted is called: no token looks like it.
pub(super) const FREED: &str = "-freed";

/// How long an unconfirmed document stays. This is longer than the reservation for its waiter, so that the TTL monitor
/// does not delete the queue together with it.
pub(super) const STAYS: Duration = Duration::from_secs(10);

/// Who waits, as an answer shows it.
const OWNERS: &str = "owners";

/// The most places in one queue. Whoever finds it full has none, and looks now and then.
const LONGEST_QUEUE: i32 = 10_000;

/// A place that nobody keeps alive is dropped after so long. Until then it is passed over.
const LAPSED_PLACE_KEPT: Duration = Duration::from_secs(60);

/// A pipeline that puts this in the place of the document. A queue of nobody is no field: a gist process's document is left
/// as it was.
fn becomes(result: Document) -> Vec<Document> {
    let queue = format!("${QUEUE}");
    let nobody = doc! { "$eq": [queue.as_str(), Vec::<Bson>::new()] };
    vec![
        doc! { "$replaceWith": result },
        doc! { "$set": { QUEUE: { "$cond": [nobody, "$$REMOVE", queue] } } },
    ]
}

/// Expressions of a pipeline, with names for their parts.
fn with(variables: Vec<(&str, Bson)>, result: Document) -> Document {
    variables.into_iter().rev().fold(result, |inner, (name, value)| {
        doc! { "$let": { "vars": { name: value }, "in": inner } }
    })
}

fn literal(text: &str) -> Document {
    doc! { "$literal": text }
}

/// The entries of a list for which this holds of `$$e`.
fn entries(of: impl Into<Bson>, condition: Document) -> Bson {
    doc! { "$filter": { "input": of.into(), "as": "e", "cond": condition } }.into()
}

fn first(of: Bson) -> Bson {
    doc! { "$arrayElemAt": [of, 0] }.into()
}

fn is_missing(expression: &str) -> Document {
    doc! { "$eq": [{ "$type": expression }, "missing"] }
}

fn is_live() -> Document {
    doc! { "$gt": ["$$e.until", "$$NOW"] }
}

fn is(owner: &OwnerToken) -> Document {
    doc! { "$eq": ["$$e.owner", literal(owner.as_str())] }
}

fn is_not(owner: &OwnerToken) -> Document {
    doc! { "$ne": ["$$e.owner", literal(owner.as_str())] }
}

/// The entries of a list that are not forgotten yet, live or not.
fn standing(list: impl Into<Bson>) -> Bson {
    let forgotten_by = doc! { "$subtract": ["$$NOW", millis(LAPSED_PLACE_KEPT)] };
    entries(list, doc! { "$gt": ["$$e.until", forgotten_by] })
}

/// The queue, and the one whose turn it is: missing where nobody lives.
fn queue_and_next(queue: Bson) -> Vec<(&'static str, Bson)> {
    vec![("queue", queue), ("next", first(entries("$$queue", is_live())))]
}

/// The document, kept for `$$next`, with the rest of this queue.
///
/// Limits the liveness of the process to the time to confirm. A process that does not confirm then delays the waiters behind it
/// once, and not once for each of its waiters.
fn handed_on(queue: &str) -> Document {
    let until = doc! { "$add": ["$$NOW", "$$next.hold"] };
    let of_its_process = doc! { "$eq": ["$$e.process", "$$next.process"] };
    let shortened = doc! { "until": { "$min": ["$$e.until", { "$add": ["$$NOW", "$$e.hold"] }] } };
    let rest = entries(queue, doc! { "$ne": ["$$e.owner", "$$next.owner"] });
    doc! { "$mergeObjects": ["$$ROOT", {
        OWNER: "$$next.owner",
        RESERVED: { "$concat": ["$$next.process", ":", "$$next.owner"] },
        RESERVED_UNTIL: until,
        EXPIRES_AT: from_now(STAYS),
        QUEUE: changed(rest, of_its_process, shortened),
    }] }
}

/// A list of which the entries have other fields for which this holds of `$$e`.
fn changed(list: impl Into<Bson>, condition: Document, fields: Document) -> Document {
    doc! { "$map": { "input": list.into(), "as": "e", "in": {
        "$cond": [condition, { "$mergeObjects": ["$$e", fields] }, "$$e"],
    } } }
}

/// A list of which the entries of a process live from now on.
fn alive(list: impl Into<Bson>, process: &str) -> Document {
    let of_process = doc! { "$eq": ["$$e.process", literal(process)] };
    changed(list, of_process, doc! { "until": from_now(WAITER_LIVENESS) })
}

/// A waiter, as the queues know it.
pub(super) struct Waiter<'a> {
    /// The process's name in the queues.
    pub process: &'a str,
    /// The place that it had, 0 when it had none.
    pub number: u64,
}

/// The pipeline of a try where names have queues.
///
/// # Behavior
/// Confirms what was handed to this owner, with the next token; extends what is this owner's already; takes over what is
/// missing, or expired and nobody came before; hands on what is expired and somebody did. Otherwise the document stays
/// as it is (the server then writes nothing), but for the place that a waiter takes or keeps alive.
pub(super) fn take(claim: &Claim, waiter: Option<&Waiter<'_>>) -> Vec<Document> {
    let owner = &claim.owner;
    let known = waiter.map_or(0, |waiter| waiter.number);
    let unknown = if known == 0 { i64::MAX } else { known as i64 };
    let before = doc! { "$and": [{ "$lt": ["$$e.at", "$$number"] }, is_live()] };
    let variables = vec![
        ("queue", standing(all())),
        ("mine", entries("$$queue", is(owner))),
        ("others", entries("$$queue", is_not(owner))),
        ("number", doc! { "$ifNull": [{ "$min": "$$mine.at" }, unknown] }.into()),
        ("next", first(entries("$$others", before))),
        (
            "line",
            waiter.map_or("$$queue".into(), |waiter| entered(claim, waiter).into()),
        ),
    ];
    let mut taken = documents::taken(claim);
    taken.insert(QUEUE, "$$others");
    let mut confirmed = taken.clone();
    if let Some(waiter) = waiter {
        confirmed.insert(QUEUE, alive("$$others", waiter.process));
    }
    confirmed.insert(FENCE, format!("${FENCE}"));
    confirmed.insert(HANDED, doc! { "$add": [{ "$ifNull": [format!("${HANDED}"), 0] }, 1] });
    let ours = documents::is_of(owner);
    let is_reserved = doc! { "$not": [is_missing(&format!("${RESERVED}"))] };
    let free = documents::is_free();
    let busy: Bson = match waiter {
        Some(_) => doc! { "$mergeObjects": ["$$ROOT", { QUEUE: "$$line" }] }.into(),
        None => "$$ROOT".into(),
    };
    let result = doc! { "$switch": {
        "branches": [
            { "case": { "$and": [ours.clone(), is_reserved] }, "then": confirmed },
            { "case": ours, "then": documents::kept(claim.ttl) },
            { "case": { "$and": [free.clone(), is_missing("$$next")] }, "then": taken },
            { "case": free, "then": handed_on("$$line") },
        ],
        "default": busy,
    } };
    becomes(with(variables, result))
}

/// Returns for how long a name is reserved for a waiter. So a dead waiter blocks the next one for no longer than its lease
/// would have. A hold below [`LONGEST_HOLD`] is an event for the processes that wait for the name. After the longest hold
/// their heartbeat comes within [`HEARTBEAT_INTERVAL`](crate::engine::local_waiters::HEARTBEAT_INTERVAL).
fn hold(ttl: Ttl) -> Duration {
    let ttl = ttl.duration();
    ttl.min((ttl / 2).clamp(SHORT_HOLD, LONGEST_HOLD))
}

/// A waiter with a ttl up to this has all of it to confirm.
const SHORT_HOLD: Duration = Duration::from_secs(1);

/// The queue with this waiter in it.
fn entered(claim: &Claim, waiter: &Waiter<'_>) -> Document {
    let fresh = doc! {
        "until": from_now(WAITER_LIVENESS),
        "hold": millis(hold(claim.ttl)),
    };
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
            // `$add` of nothing is null, which `$max` passes over.
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
    let is_full = doc! { "$gte": [{ "$size": "$$queue" }, LONGEST_QUEUE] };
    let inserted = doc! { "$cond": [is_full, "$$queue", inserted] };
    doc! { "$cond": [{ "$eq": ["$$mine", []] }, inserted, kept] }
}

/// Returns the pipeline that enters several new waiters of a process in their order, up to the longest queue. Waiters that
/// have a place keep it.
pub(super) fn enter(claims: &[&Claim], process: &str) -> Vec<Document> {
    let new: Vec<Document> = claims
        .iter()
        .zip(0_i64..)
        .map(|(claim, offset)| {
            doc! { "owner": claim.owner.as_str(), "hold": millis(hold(claim.ttl)), "offset": offset }
        })
        .collect();
    let is_new = doc! { "$not": [{ "$in": ["$$e.owner", "$$queue.owner"] }] };
    let micros = doc! { "$multiply": [{ "$toLong": "$$NOW" }, 1000_i64] };
    let behind = doc! { "$add": [{ "$max": "$$queue.at" }, 1_i64] };
    let room = doc! { "$max": [0, { "$subtract": [LONGEST_QUEUE, { "$size": "$$queue" }] }] };
    let places = doc! { "$map": { "input": { "$slice": ["$$new", room] }, "as": "e", "in": {
        "owner": "$$e.owner",
        "process": literal(process),
        "at": { "$add": ["$$first", "$$e.offset"] },
        "until": from_now(WAITER_LIVENESS),
        "hold": "$$e.hold",
    } } };
    let variables = vec![
        ("queue", alive(standing(all()), process).into()),
        ("new", entries(doc! { "$literal": new }, is_new)),
        ("first", doc! { "$max": [micros, behind] }.into()),
    ];
    let queue = doc! { "$concatArrays": ["$$queue", places] };
    becomes(with(variables, doc! { "$mergeObjects": ["$$ROOT", { QUEUE: queue }] }))
}

/// Returns the projection of the entries of these owners, for an answer to [`enter`].
pub(super) fn places(owners: &[&str]) -> Bson {
    entries(all(), doc! { "$in": ["$$e.owner", owners] })
}

/// The place of an owner, for the projection of an answer (missing when it has none), and how many live ones are before it.
pub(super) fn place(owner: &OwnerToken) -> (Document, Document) {
    let place = doc! { "$min": "$$mine.at" };
    let of = |result: Document| with(vec![("mine", entries(all(), is(owner)))], result);
    let number = doc! { "$cond": [{ "$eq": ["$$mine", []] }, "$$REMOVE", place.clone()] };
    (of(number), of(before(place)))
}

/// How many live waiters came before a place.
fn before(place: Document) -> Document {
    let earlier = doc! { "$and": [{ "$lt": ["$$e.at", "$$place"] }, is_live()] };
    with(vec![("place", place.into())], doc! { "$size": entries(all(), earlier) })
}

/// Returns the whole queue. A field of this name with other content counts as absent: another tool may have written it.
fn all() -> Bson {
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
/// a place in its queue, or freed it (the document waits for its deletion).
pub(super) fn touched_by(ids: &[String], owners: &[&str]) -> Document {
    let freed = owners.iter().map(|owner| format!("{owner}{FREED}"));
    let names: Vec<String> = owners.iter().map(|owner| (*owner).to_owned()).chain(freed).collect();
    let in_queue = format!("{QUEUE}.owner");
    doc! { "_id": { "$in": ids }, "$or": [{ OWNER: { "$in": names } }, { in_queue: { "$in": owners } }] }
}

/// The document of a name that is kept for this waiter of a process, or in whose queue it is: but not one that it holds.
pub(super) fn waited_for_by(id: &str, process: &str, owner: &OwnerToken) -> Document {
    let (reserved, owner) = (format!("{process}:{}", owner.as_str()), owner.as_str());
    doc! { "_id": id, "$or": [
        { RESERVED: reserved },
        { format!("{QUEUE}.owner"): owner, OWNER: { "$ne": owner } },
    ] }
}

/// Returns the pipeline of a release for owners of this process. It hands on what belongs to one of them and removes their
/// places. It marks a document without waiters as [`FREED`], for deletion.
pub(super) fn part(owners: &[&str], process: &str) -> Vec<Document> {
    let is_other = doc! { "$not": [{ "$in": ["$$e.owner", owners] }] };
    // The command proves that the process lives.
    let variables = queue_and_next(entries(alive(standing(all()), process), is_other));
    let ours = doc! { "$in": [format!("${OWNER}"), owners] };
    let freed = doc! { "$mergeObjects": ["$$ROOT", {
        OWNER: { "$concat": [format!("${OWNER}"), FREED] },
        EXPIRES_AT: "$$NOW",
    }] };
    let result = doc! { "$switch": {
        "branches": [
            { "case": { "$and": [ours.clone(), { "$not": [is_missing("$$next")] }] }, "then": handed_on("$$queue") },
            { "case": ours, "then": freed },
        ],
        "default": { "$mergeObjects": ["$$ROOT", { QUEUE: "$$queue" }] },
    } };
    becomes(with(variables, result))
}

/// Returns the filter of the documents of these names that these owners freed.
pub(super) fn freed_by(ids: &[String], owners: &[&str]) -> Document {
    let freed: Vec<String> = owners.iter().map(|owner| format!("{owner}{FREED}")).collect();
    doc! { "_id": { "$in": ids }, OWNER: { "$in": freed } }
}

/// The pipeline that hands on a name whoever holds it. The filter sees to it that somebody waits.
pub(super) fn hand_on() -> Vec<Document> {
    becomes(with(queue_and_next(standing(all())), handed_on("$$queue")))
}

/// Narrows a filter to documents that nobody live waits for, or (`wanted`) that somebody does.
pub(super) fn narrowed(mut filter: Document, wanted: bool) -> Document {
    let live = entries(all(), is_live());
    let comparison = if wanted { "$ne" } else { "$eq" };
    let condition = doc! { comparison: [live, Vec::<Bson>::new()] };
    let both = match filter.remove("$expr") {
        Some(other) => doc! { "$and": [other, condition] },
        None => condition,
    };
    filter.insert("$expr", both);
    filter
}

/// The documents of these names in whose queues the process is.
pub(super) fn waited_for(ids: &[String], process: &str) -> Document {
    doc! { "_id": { "$in": ids }, format!("{QUEUE}.process"): process }
}

/// The pipeline of a sign of life: all waiters of the process live, and what is free goes on.
pub(super) fn beat(process: &str) -> Vec<Document> {
    // First of all they live: however long the process was silent, its places stand.
    let variables = queue_and_next(standing(alive(all(), process)));
    let free = doc! { "$and": [documents::expired(), { "$not": [is_missing("$$next")] }] };
    let result = doc! { "$cond": [
        free,
        handed_on("$$queue"),
        { "$mergeObjects": ["$$ROOT", { QUEUE: "$$queue" }] },
    ] };
    becomes(with(variables, result))
}

/// What a sign of life wants to know of a document: whose it is, until when, who of the process waits, and behind how many.
pub(super) fn shown(process: &str) -> Document {
    let ours = entries(all(), doc! { "$eq": ["$$e.process", literal(process)] });
    let owners = doc! { "$map": { "input": ours.clone(), "as": "e", "in": "$$e.owner" } };
    let ahead = with(vec![("ours", ours)], before(doc! { "$min": "$$ours.at" }));
    doc! { RESERVED: 1, END: documents::end(), NOW: "$$NOW", OWNERS: owners, AHEAD: ahead }
}

/// Who of the process waits, in an answer to [`shown`].
pub(super) fn owners(document: &Document) -> HashSet<OwnerToken> {
    let owners = document.get_array(OWNERS).map(Vec::as_slice).unwrap_or_default();
    let tokens = owners.iter().filter_map(Bson::as_str);
    tokens.filter_map(|token| OwnerToken::parse(token).ok()).collect()
}

/// For whom of the process the name is kept, in an answer to [`shown`].
pub(super) fn reserved_for(document: &Document, process: &str) -> Option<OwnerToken> {
    let owner = document
        .get_str(RESERVED)
        .ok()?
        .strip_prefix(process)?
        .strip_prefix(':')?;
    OwnerToken::parse(owner).ok()
}
