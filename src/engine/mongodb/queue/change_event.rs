//! The events of the change stream: their filter, their projection, and their meaning.

use std::time::Duration;

use mongodb::bson::{Bson, Document, doc};

use crate::engine::mongodb::fields::{CHECK, GRANTED, RESERVED};
use crate::engine::mongodb::queue::hand_off::Grant;
use crate::model::OwnerToken;

/// A change that matters to waiters.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// A name was handed off to a waiter of this process.
    HandedOff { id: Bson, owner: OwnerToken },
    /// The hand-off to waiters of this process was a grant: one of a lock, or several of a shared name.
    Granted { id: Bson, grants: Vec<Grant> },
    /// A name may be free after this time: that of a minimum hold, or of a hand-off to a waiter of another process.
    Check { id: Bson, after: Duration },
    /// The stream had a gap: events may be lost.
    Gap,
}

/// Returns what an event of the stream means for waiters of `process`. `None`: nothing.
pub(crate) fn change_of(event: &Document, process: &str) -> Option<Change> {
    let id = event.get_document("documentKey").ok()?.get("_id")?.clone();
    let ours = |field: &str| event.get_str(field).ok()?.strip_prefix(process)?.strip_prefix(':');
    if let Some(owner) = ours(RESERVED) {
        let owner = OwnerToken::parse(owner).ok()?;
        return Some(Change::HandedOff { id, owner });
    }
    let granted = event.get_str(GRANTED).unwrap_or_default().split(' ');
    let granted = granted.filter_map(Grant::parse).filter(|(to, _)| *to == process);
    let grants: Vec<Grant> = granted.map(|(_, grant)| grant).collect();
    if !grants.is_empty() {
        return Some(Change::Granted { id, grants });
    }
    let (ms, _) = ours(CHECK)?.split_once(':')?;
    let after = Duration::from_millis(ms.parse().ok()?);
    Some(Change::Check { id, after })
}

/// Returns the pipeline of the stream of a process. Each of these fields begins with the process that the event is for, and so does each of
/// several grants of a shared name, which are separated by spaces.
pub(crate) fn pipeline(process: &str) -> [Document; 2] {
    let ours = doc! { "$regex": format!("(^| ){process}:") };
    let mut wanted = Vec::new();
    // The driver needs `_id`, the resume token.
    let mut shown = doc! { "_id": 1, "documentKey._id": 1 };
    for field in [RESERVED, GRANTED, CHECK] {
        let updated = format!("updateDescription.updatedFields.{field}");
        // The server logs a replacement where a difference would be longer.
        let replaced = format!("fullDocument.{field}");
        shown.insert(
            field,
            doc! { "$ifNull": [format!("${updated}"), format!("${replaced}")] },
        );
        wanted.push(doc! { "operationType": "update", updated: ours.clone() });
        wanted.push(doc! { "operationType": "replace", replaced: ours.clone() });
    }
    [doc! { "$match": { "$or": wanted } }, doc! { "$project": shown }]
}
