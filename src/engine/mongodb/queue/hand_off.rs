//! What a hand-off writes: a grant or a reservation.
//!
//! # Grants
//! The release of a holder makes the first live waiter the holder, with the next token (`ops/fence.rs`), for the time that a
//! reservation would last. Its process extends the lease. `granted: "<process>:<owner>:<token>:<ms of the grant>:<ms it lasts>"`
//! is one text, because the event of an update has only the parts of a field that changed. The field disappears with the first
//! renewal or attempt of the waiter, so that a late event cannot release a lease that is in use.
//!
//! # Reservations
//! Every other hand-off only reserves the name (`reserved`, `reservedUntil`): where the releasing command does not know the last
//! token (a name whose lease expired, `force_release`, a restored lease, a rollback), and for waiters of several names, with
//! metadata, without a change stream, or of an earlier version.

use std::time::Duration;

use mongodb::bson::{Bson, DateTime, Document, doc};

use super::expressions::{changed, entries, first, is_live, with};
use crate::engine::hand_off::GrantTimes;
use crate::engine::local_waiters::RESERVATION;
use crate::engine::mongodb::fields::{
    CHECK, EXPIRES_AT, FENCE, GRANTED, HANDED, HOLDER, OWNER, QUEUE, RESERVED, RESERVED_UNTIL,
};
use crate::engine::mongodb::ops::fence::{MAX_HAND_OFFS, Stamp};
use crate::model::{Fence, OwnerToken, Ttl};

/// How long an unconfirmed document stays. This is longer than the reservation for its waiter, so that the TTL monitor
/// does not delete the queue together with it.
pub(super) const STAYS: Duration = Duration::from_secs(10);
/// A waiter with a ttl up to this has all of it to confirm.
const SHORT_HOLD: Duration = Duration::from_secs(1);

/// Returns how long a name is reserved for a waiter, or granted to it. A dead waiter so blocks the next one for no longer than its
/// lease would have. A hold below [`RESERVATION`] is an event for the process of the next waiter ([`CHECK`]). After the longest hold
/// its heartbeat comes within [`HEARTBEAT_INTERVAL`](crate::engine::local_waiters::HEARTBEAT_INTERVAL).
pub(super) fn hold(ttl: Ttl) -> Duration {
    let ttl = ttl.duration();
    ttl.min((ttl / 2).clamp(SHORT_HOLD, RESERVATION))
}

/// A grant as the change stream reports it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Grant {
    pub(crate) owner: OwnerToken,
    pub(crate) fence: Fence,
    /// When it began, in milliseconds since 1970 by the server's clock.
    pub(crate) granted_ms: i64,
    /// How long it lasts.
    pub(crate) hold: Duration,
    /// The field of the document.
    text: String,
}

impl Grant {
    /// Reads the field of a document. Returns the grant and the process that got it.
    pub(crate) fn parse(text: &str) -> Option<(&str, Grant)> {
        let mut parts = text.split(':');
        let process = parts.next()?;
        let grant = Grant {
            owner: OwnerToken::parse(parts.next()?).ok()?,
            fence: Fence(parts.next()?.parse().ok()?),
            granted_ms: parts.next()?.parse().ok()?,
            hold: Duration::from_millis(parts.next()?.parse().ok()?),
            text: text.to_owned(),
        };
        Some((process, grant))
    }

    fn until(&self) -> DateTime {
        let hold = i64::try_from(self.hold.as_millis()).unwrap_or(i64::MAX);
        DateTime::from_millis(self.granted_ms.saturating_add(hold))
    }

    /// Returns the times by the server's clock. `None`: they are before 1970.
    pub(super) fn times(&self) -> Option<GrantTimes> {
        let us = |ms: i64| u64::try_from(ms).ok()?.checked_mul(1000);
        Some(GrantTimes {
            granted_us: us(self.granted_ms)?,
            until_us: us(self.until().timestamp_millis())?,
        })
    }

    /// Returns the filter of the document of this name with this grant, if no attempt or renewal has found it.
    pub(super) fn unconfirmed(&self, id: &str) -> Document {
        doc! { "_id": id, OWNER: self.owner.as_str(), GRANTED: &self.text }
    }
}

/// Returns the condition that a hand-off can make `$$next` the holder.
pub(super) fn is_grantable() -> Document {
    doc! { "$and": [
        { "$eq": [{ "$type": "$$next.holder" }, "object"] },
        { "$in": [{ "$type": format!("${FENCE}") }, ["timestamp", "missing"]] },
        { "$lt": [{ "$ifNull": [format!("${HANDED}"), 0] }, MAX_HAND_OFFS] },
    ] }
}

/// Returns the expression for the document after a hand-off that makes `$$next` the holder, with the rest of this queue. `last`,
/// `next`: the token of the earlier holder, and the one after it.
pub(super) fn granted(queue: &str, last: Fence, next: Fence) -> Document {
    let now = doc! { "$toString": { "$toLong": "$$NOW" } };
    let hold = doc! { "$toString": "$$next.hold" };
    let token = format!(":{}:", next.0);
    doc! {
        "_id": "$_id",
        EXPIRES_AT: { "$add": ["$$NOW", "$$next.hold"] },
        OWNER: "$$next.owner",
        HOLDER: { "$mergeObjects": ["$$next.holder", { "since": "$$NOW" }] },
        // The token of the earlier holder may be unwritten.
        FENCE: { "$ifNull": [format!("${FENCE}"), Stamp::tick_of(last)] },
        HANDED: { "$add": [{ "$ifNull": [format!("${HANDED}"), 0] }, 1] },
        GRANTED: { "$concat": ["$$next.process", ":", "$$next.owner", token, now, ":", hold] },
        CHECK: check_behind_next(queue),
        QUEUE: without_next(queue),
    }
}

/// Returns the expression for the document after a hand-off that reserves the name for `$$next`, with the rest of this queue.
pub(super) fn reserved(queue: &str) -> Document {
    let until = doc! { "$add": ["$$NOW", "$$next.hold"] };
    let reserved = doc! { "$mergeObjects": ["$$ROOT", {
        OWNER: "$$next.owner",
        RESERVED: { "$concat": ["$$next.process", ":", "$$next.owner"] },
        RESERVED_UNTIL: until,
        EXPIRES_AT: { "$add": ["$$NOW", STAYS.as_millis() as i64] },
        CHECK: check_behind_next(queue),
        QUEUE: without_next(queue),
    }] };
    confirmed(reserved)
}

/// Returns the expression of [`CHECK`] for a hand-off to `$$next`: the first waiter of another process checks a short one.
fn check_behind_next(queue: &str) -> Document {
    let is_elsewhere = doc! { "$ne": ["$$e.process", "$$next.process"] };
    let behind = entries(queue, doc! { "$and": [is_elsewhere, is_live()] });
    let is_short = doc! { "$lt": ["$$next.hold", RESERVATION.as_millis() as i64] };
    doc! { "$cond": [is_short, check(behind, "$$next.hold"), "$$REMOVE"] }
}

/// Returns the expression of [`CHECK`] for a name that is busy for `left` milliseconds: the first of these waiters checks it. The time
/// makes each value a change, which is an event.
pub(super) fn check(waiters: Bson, left: impl Into<Bson>) -> Document {
    let now = doc! { "$toString": { "$toLong": "$$NOW" } };
    let text = doc! { "$concat": ["$$checks.process", ":", { "$toString": left.into() }, ":", now] };
    // Without a waiter the text is null.
    with(vec![("checks", first(waiters))], doc! { "$ifNull": [text, "$$REMOVE"] })
}

/// Returns a document without the mark of a grant that was not found yet.
pub(super) fn confirmed(document: Document) -> Document {
    doc! { "$unsetField": { "field": GRANTED, "input": document } }
}

/// Returns the queue without `$$next`.
///
/// # Behavior
/// Limits the liveness of its process to the time of the hand-off. A process that sends no command then delays the waiters behind
/// it once, and not once for each of its waiters.
fn without_next(queue: &str) -> Document {
    let of_its_process = doc! { "$eq": ["$$e.process", "$$next.process"] };
    let shortened = doc! { "until": { "$min": ["$$e.until", { "$add": ["$$NOW", "$$e.hold"] }] } };
    let rest = entries(queue, doc! { "$ne": ["$$e.owner", "$$next.owner"] });
    changed(rest, of_its_process, shortened)
}
