//! The events of the change stream: which of them the server sends, what it sends of each, and what they mean.

use std::collections::HashSet;
use std::time::Duration;

use mongodb::bson::{Bson, Document, doc};
use serde::Deserialize;

use super::documents::{EXPIRES_AT, KEPT, millis};
use super::queue::{RESERVED, RESERVED_UNTIL, STAYS};
use crate::engine::waiters::RESERVED as LONGEST_HOLD;
use crate::model::OwnerToken;

/// What happened, as far as it matters to waiters.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// A name was handed on to a waiter of this process.
    Handed { id: String, owner: OwnerToken },
    /// A name may be free, or sooner than it was thought.
    Freed { id: String },
    /// A name was handed on to a waiter of another process, which has so long to confirm.
    Reserved { id: String, hold: Duration },
    /// The stream was interrupted: anything may have happened.
    Unknown,
}

/// What the server sends of a change.
#[derive(Debug, Deserialize)]
pub(super) struct Event {
    #[serde(rename = "documentKey")]
    document: Option<DocumentKey>,
    /// `<process>:<owner>`.
    to: Option<String>,
    /// For how long the name is kept for it, in milliseconds.
    hold: Option<i64>,
}

#[derive(Debug, Deserialize)]
struct DocumentKey {
    #[serde(rename = "_id")]
    id: Bson,
}

impl Event {
    pub(super) fn change(self, process: &str) -> Option<Change> {
        let DocumentKey { id: Bson::String(id) } = self.document? else {
            return None;
        };
        Some(match self.to {
            Some(to) => {
                let (to, owner) = to.split_once(':')?;
                if to == process {
                    let owner = OwnerToken::parse(owner).ok()?;
                    Change::Handed { id, owner }
                } else {
                    let hold = Duration::from_millis(u64::try_from(self.hold?).ok()?);
                    Change::Reserved { id, hold }
                }
            }
            None => Change::Freed { id },
        })
    }
}

/// The pipeline of the stream of a process, with the events of these names. `None`: of all names.
pub(super) fn pipeline(process: &str, names: Option<HashSet<String>>) -> [Document; 2] {
    // The driver needs `_id`, the resume token.
    let shown = doc! { "_id": 1, "documentKey._id": 1, "to": either(RESERVED), "hold": hold() };
    [doc! { "$match": wanted(process, names) }, doc! { "$project": shown }]
}

/// The events that the server sends, with those of these names.
fn wanted(process: &str, names: Option<HashSet<String>>) -> Document {
    let ours = doc! { "$regex": format!("^{}:", process) };
    let kept = doc! { "$regex": format!("{KEPT}$") };
    let of_names = doc! { "$or": [
        // A collection that is dropped or renamed ends the stream.
        { "operationType": "delete" },
        { "operationType": "update", updated("owner"): kept.clone() },
        { "operationType": "replace", replaced("owner"): kept },
        { "$expr": { "$lt": [hold(), millis(LONGEST_HOLD)] } },
    ] };
    let of_names = match names {
        Some(names) => {
            let names: Vec<String> = names.into_iter().collect();
            doc! { "documentKey._id": { "$in": names }, "$and": [of_names] }
        }
        None => of_names,
    };
    doc! { "$or": [
        { "operationType": "update", updated(RESERVED): ours.clone() },
        { "operationType": "replace", replaced(RESERVED): ours },
        of_names,
    ] }
}

/// Where the server describes the new value of a field in an update.
fn updated(field: &str) -> String {
    format!("updateDescription.updatedFields.{field}")
}

/// The same where it logs an update that a difference would describe at greater length: as a replacement.
fn replaced(field: &str) -> String {
    format!("fullDocument.{field}")
}

/// The new value of a field.
fn either(field: &str) -> Document {
    doc! { "$ifNull": [format!("${}", updated(field)), format!("${}", replaced(field))] }
}

/// For how long a name is kept for the waiter that it was handed to, in milliseconds. An event that is no hand-off has a
/// value that is not below [`LONGEST_HOLD`].
fn hold() -> Document {
    let is_date = |value: &str| doc! { "$eq": [{ "$type": value }, "date"] };
    let kept_for = doc! { "$subtract": [millis(STAYS), { "$subtract": ["$$end", "$$until"] }] };
    doc! { "$let": {
        "vars": { "end": either(EXPIRES_AT), "until": either(RESERVED_UNTIL) },
        "in": { "$cond": [{ "$and": [is_date("$$end"), is_date("$$until")] }, kept_for, millis(LONGEST_HOLD)] },
    } }
}
