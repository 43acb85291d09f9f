//! Expressions that the pipelines of the queues are made of.

use mongodb::bson::{Bson, Document, doc};

use crate::engine::mongodb::fields::{LIMIT, PERMITS};
use crate::model::{Claim, OwnerToken, Share};

/// Returns an expression with variables for its parts.
pub(super) fn with(variables: Vec<(&str, Bson)>, result: Document) -> Document {
    variables.into_iter().rev().fold(result, |inner, (name, value)| {
        doc! { "$let": { "vars": { name: value }, "in": inner } }
    })
}

/// Returns an expression for text that is not an expression itself.
pub(super) fn literal(text: &str) -> Document {
    doc! { "$literal": text }
}

/// Returns the entries of a list that satisfy a condition on `$$e`.
pub(super) fn entries(of: impl Into<Bson>, condition: Document) -> Bson {
    doc! { "$filter": { "input": of.into(), "as": "e", "cond": condition } }.into()
}

/// Returns the condition that the waiter `$$e` is live.
pub(super) fn is_live() -> Document {
    doc! { "$gt": ["$$e.until", "$$NOW"] }
}

/// Returns the condition that `$$e` is the entry of this owner.
pub(super) fn is(owner: &OwnerToken) -> Document {
    doc! { "$eq": ["$$e.owner", literal(owner.as_str())] }
}

/// Returns the condition that `$$e` is the entry of another owner.
pub(super) fn is_not(owner: &OwnerToken) -> Document {
    doc! { "$ne": ["$$e.owner", literal(owner.as_str())] }
}

/// Returns the first entry of a list.
pub(super) fn first(of: Bson) -> Bson {
    doc! { "$arrayElemAt": [of, 0] }.into()
}

/// Returns the condition that a value is missing.
pub(super) fn is_missing(expression: &str) -> Document {
    doc! { "$eq": [{ "$type": expression }, "missing"] }
}

/// Returns a list with these fields set in the entries that satisfy a condition on `$$e`.
pub(super) fn changed(list: impl Into<Bson>, condition: Document, fields: Document) -> Document {
    doc! { "$map": { "input": list.into(), "as": "e", "in": {
        "$cond": [condition, { "$mergeObjects": ["$$e", fields] }, "$$e"],
    } } }
}

/// Returns the fields that only the entry of a share has.
pub(super) fn terms(claim: &Claim) -> Document {
    let terms = |share: Share| doc! { PERMITS: i64::from(share.permits()), LIMIT: i64::from(share.limit()) };
    claim.share.map(terms).unwrap_or_default()
}
