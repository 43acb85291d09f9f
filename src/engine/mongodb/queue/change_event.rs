//! The events of the change stream: their filter, their projection, and their meaning.

use std::time::Duration;

use mongodb::bson::{Document, doc};

use crate::engine::local_waiters::RESERVATION;
use crate::engine::mongodb::documents::{KEPT, millis};
use crate::engine::mongodb::fields::{EXPIRES_AT, GRANTED, RESERVED, RESERVED_UNTIL};
use crate::engine::mongodb::queue::hand_off::{Grant, STAYS};
use crate::model::OwnerToken;

/// A change that matters to waiters.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// A name was handed off to a waiter of this process.
    HandedOff { id: String, owner: OwnerToken },
    /// The hand-off to a waiter of this process was a grant.
    Granted { id: String, grant: Grant },
    /// A name is kept busy, and is free earlier than expected.
    Kept { id: String },
    /// A name was handed off to a waiter of another process, which has this time to confirm, or to extend its lease.
    Reserved { id: String, hold: Duration },
    /// The stream had a gap: events may be lost.
    Gap,
}

/// Returns what an event of the stream means for waiters of `process`. `None`: nothing.
pub(crate) fn change_of(event: &Document, process: &str) -> Option<Change> {
    let id = event.get_document("documentKey").ok()?.get_str("_id").ok()?.to_owned();
    // `<process>:<owner>`, and a grant as in `hand_off.rs`.
    match (event.get_str("to"), event.get_str("granted")) {
        (Ok(to), _) => {
            let (to, owner) = to.split_once(':')?;
            if to == process {
                let owner = OwnerToken::parse(owner).ok()?;
                return Some(Change::HandedOff { id, owner });
            }
            let hold = u64::try_from(event.get_i64("hold").ok()?).ok()?;
            let hold = Duration::from_millis(hold);
            Some(Change::Reserved { id, hold })
        }
        (_, Ok(granted)) => {
            let (to, grant) = Grant::parse(granted)?;
            let hold = grant.hold;
            Some(match to == process {
                true => Change::Granted { id, grant },
                false => Change::Reserved { id, hold },
            })
        }
        _ => Some(Change::Kept { id }),
    }
}

/// Returns the pipeline of the stream of a process.
pub(crate) fn pipeline(process: &str) -> [Document; 2] {
    // The driver needs `_id`, the resume token.
    let shown =
        doc! { "_id": 1, "documentKey._id": 1, "to": either(RESERVED), "granted": either(GRANTED), "hold": hold() };
    [doc! { "$match": wanted(process) }, doc! { "$project": shown }]
}

/// Returns the filter of the events that the server sends.
fn wanted(process: &str) -> Document {
    let ours = doc! { "$regex": format!("^{}:", process) };
    let kept = doc! { "$regex": format!("{KEPT}$") };
    doc! { "$or": [
        { "operationType": "update", updated(RESERVED): ours.clone() },
        { "operationType": "replace", replaced(RESERVED): ours.clone() },
        { "operationType": "update", updated(GRANTED): ours.clone() },
        { "operationType": "replace", replaced(GRANTED): ours },
        { "operationType": "update", updated("owner"): kept.clone() },
        { "operationType": "replace", replaced("owner"): kept },
        { "operationType": { "$in": ["update", "replace"] }, "$expr": { "$lt": [hold(), millis(RESERVATION)] } },
    ] }
}

/// Returns the path of a field's new value in an update.
fn updated(field: &str) -> String {
    format!("updateDescription.updatedFields.{field}")
}

/// Returns the path of a field in a replacement, which the server logs where a difference would be longer.
fn replaced(field: &str) -> String {
    format!("fullDocument.{field}")
}

/// Returns the expression for the new value of a field.
fn either(field: &str) -> Document {
    doc! { "$ifNull": [format!("${}", updated(field)), format!("${}", replaced(field))] }
}

/// Returns the expression for the time, in milliseconds, that a hand-off lasts.
/// For an event that is not a hand-off the value is at least [`RESERVATION`].
fn hold() -> Document {
    let is_date = |value: &str| doc! { "$eq": [{ "$type": value }, "date"] };
    let kept_for = doc! { "$subtract": [millis(STAYS), { "$subtract": ["$$end", "$$until"] }] };
    let granted_for = doc! { "$convert": {
        "input": { "$arrayElemAt": [{ "$split": ["$$granted", ":"] }, -1] },
        "to": "long",
        "onError": millis(RESERVATION),
    } };
    doc! { "$let": {
        "vars": { "end": either(EXPIRES_AT), "until": either(RESERVED_UNTIL), "granted": either(GRANTED) },
        "in": { "$switch": {
            "branches": [
                { "case": { "$and": [is_date("$$end"), is_date("$$until")] }, "then": kept_for },
                { "case": { "$eq": [{ "$type": "$$granted" }, "string"] }, "then": granted_for },
            ],
            "default": millis(RESERVATION),
        } },
    } }
}
