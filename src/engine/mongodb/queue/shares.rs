//! The pipelines of shared names.
//!
//! A shared name is one document of the same collection, whose id is no text:
//! `{ _id: { shared: name }, holders: [{ owner, permits, limit, until, fence, holder, metadata }], queue, fence, expiresAt, granted }`. The
//! queue is that of `pipelines.rs`, with `permits` and `limit` in each entry. `fence` is the last token. `expiresAt`, for the TTL index, is
//! an hour after the end of the last lease: until then tokens grow whatever the server's clock shows.
//!
//! # Behavior
//! Each command but a renewal removes the holders whose leases have ended, makes its change, and then hands off ([`hand_off`]): the first
//! live waiters become holders, with the next tokens, as long as the permits in use are within the smallest limit of all holders. So an
//! attempt enters the queue, and is granted if it fits. A claim that does not wait leaves the queue in the same command.
//!
//! A hand-off is always a grant, because the server draws the token. `granted` has the events of the last command for the change stream,
//! each in the form of a lock's event, with a space before it. For a waiter that does not take hand-offs the time in its event is zero, so
//! that it makes an attempt, which writes the metadata, which the queue does not have. A grant that no call confirms ends by itself, after
//! 2 s at most.

use std::ops::Deref;
use std::time::Duration;

use mongodb::bson::{Bson, Document, doc};

use super::expressions::{changed, entries, first, is, is_live, is_missing, with};
use super::pipelines::{self, Waiter, alive, all, entered, remembered};
use crate::engine::mongodb::documents::{self, KEPT, METADATA, from_now, millis};
use crate::engine::mongodb::fields::{
    CHECK, END, EXPIRES_AT, FENCE, GRANTED, HOLDER, HOLDERS, LIMIT, NOW, PERMITS, QUEUE, WAITING,
};
use crate::model::{Claim, Fence, Key, LockInfo, MAX_PERMITS, Share, Ttl};

/// The field of an id with the shared name.
const SHARED: &str = "shared";
/// The waiters that a command makes holders. Its last step removes it.
const NEXT: &str = "next";
/// The field of an answer with holders.
pub(crate) const HELD: &str = "held";
/// How long a document stays after the end of the last lease.
const STAYS: Duration = Duration::from_secs(3600);

/// Returns the id of a name.
pub(crate) fn id(prefix: &str, key: &Key) -> Bson {
    let text = format!("{prefix}{key}");
    match key.is_shared() {
        true => doc! { SHARED: text }.into(),
        false => text.into(),
    }
}

/// Returns the name of an id.
pub(super) fn key(prefix: &str, id: &Bson) -> Option<Key> {
    let shared = id.as_document();
    let text = shared.map_or(id.as_str(), |id| id.get_str(SHARED).ok())?;
    let key = Key::new(text.strip_prefix(prefix)?).ok()?;
    Some(if shared.is_some() { key.shared() } else { key })
}

/// Returns the holders whose leases have not ended.
fn holding() -> Bson {
    entries(doc! { "$ifNull": ["$holders", []] }, is_live())
}

fn is_one_of(owners: &[&str]) -> Document {
    doc! { "$in": ["$$e.owner", owners] }
}

/// Returns the pipeline of attempts: one at least, for the same name. `waiter`: the first claim. Without `enters`, claims that are not granted
/// the name have no position afterwards.
pub(crate) fn attempt<C: Deref<Target = Claim>>(claims: &[C], waiter: &Waiter<'_>, enters: bool) -> Vec<Document> {
    let (first, others) = (&*claims[0], &claims[1..]);
    let calls: Vec<(&Claim, Ttl)> = claims.iter().map(|claim| (&**claim, claim.ttl)).collect();
    let leaving = calls.iter().filter(|(claim, _)| !enters || !claim.waiting);
    let leaving: Vec<&str> = leaving.map(|(claim, _)| claim.owner.as_str()).collect();
    let queue = match enters {
        true => alive(remembered(all()), waiter.process).into(),
        false => remembered(all()),
    };
    let holds = doc! { "$in": [first.owner.as_str(), "$holders.owner"] };
    let entered = doc! { "$cond": [holds, "$$queue", entered(first, waiter)] };
    let variables = vec![("queue", queue), ("mine", entries("$$queue", is(&first.owner)))];
    let queue = doc! { "$set": { QUEUE: with(variables, entered) } };
    let mut steps = vec![doc! { "$set": { HOLDERS: holding() } }, queue];
    if !others.is_empty() {
        steps.extend(pipelines::enter(others.iter().map(|claim| &**claim), waiter));
    }
    [steps, hand_off(&calls, &leaving)].concat()
}

/// Returns the pipeline of a renewal: those of these claims that hold have leases that last for their ttls from now at least.
pub(crate) fn renew(calls: &[(&Claim, Ttl)]) -> Vec<Document> {
    let call = |(claim, ttl): &(&Claim, Ttl)| {
        let (owner, metadata) = (claim.owner.as_str(), claim.metadata.as_deref());
        let process = documents::process(&claim.process);
        doc! { "owner": owner, "ttl": millis(ttl.duration()), HOLDER: process, METADATA: metadata }
    };
    let calls = doc! { "$literal": calls.iter().map(call).collect::<Vec<_>>() };
    let own = doc! { "$filter": { "input": calls, "as": "c", "cond": { "$eq": ["$$c.owner", "$$e.owner"] } } };
    let extended = doc! { "$mergeObjects": ["$$e", {
        "until": { "$max": ["$$e.until", { "$add": ["$$NOW", "$$own.ttl"] }] },
        HOLDER: { "$mergeObjects": ["$$own.holder", { "since": "$$e.holder.since" }] },
        METADATA: { "$ifNull": ["$$own.metadata", "$$REMOVE"] },
    }] };
    let is_other = doc! { "$or": [is_missing("$$own"), { "$not": [is_live()] }] };
    let holder = doc! { "$cond": [is_other, "$$e", extended] };
    let holder = with(vec![("own", first(own.into()))], holder);
    let expires_at = doc! { "$add": [{ "$ifNull": [{ "$max": "$holders.until" }, "$$NOW"] }, millis(STAYS)] };
    vec![
        doc! { "$set": { HOLDERS: { "$map": { "input": "$holders", "as": "e", "in": holder } } } },
        doc! { "$set": { EXPIRES_AT: expires_at, NEXT: "$$REMOVE" } },
    ]
}

/// Returns the pipeline of a change of the holders and the queue, and of the hand-off after it.
fn changed_to(holders: impl Into<Bson>, queue: Bson) -> Vec<Document> {
    let change = vec![doc! { "$set": { HOLDERS: holders, QUEUE: queue } }];
    [change, hand_off(&[], &[])].concat()
}

/// Returns the pipeline of a release of these owners, whose permits stay in use for `keep`. It removes their positions.
pub(crate) fn release(owners: &[&str], process: &str, keep: Duration) -> Vec<Document> {
    let others = doc! { "$not": [is_one_of(owners)] };
    // The command proves that the process lives.
    let queue = entries(alive(remembered(all()), process), others.clone());
    if keep.is_zero() {
        return changed_to(entries(holding(), others), queue);
    }
    let kept = doc! { "owner": { "$concat": ["$$e.owner", KEPT] }, "until": from_now(keep) };
    let check = vec![doc! { "$set": { CHECK: pipelines::check_after(keep) } }];
    [changed_to(changed(holding(), is_one_of(owners), kept), queue), check].concat()
}

/// Returns the pipeline of a forced release.
pub(crate) fn release_all() -> Vec<Document> {
    changed_to(Vec::<Bson>::new(), remembered(all()))
}

/// Returns the pipeline of a heartbeat, and its projection.
pub(super) fn heartbeat(process: &str) -> (Vec<Document>, Document) {
    let mut fields = pipelines::heartbeat_fields(process);
    // A waiter that was granted a share is not in the queue any more, so it makes an attempt.
    fields.remove(GRANTED);
    fields.insert(END, next_end());
    (changed_to(holding(), remembered(alive(all(), process))), fields)
}

/// Returns the steps that make the first live waiters holders, as long as the next one fits. The waiters of `calls` are granted their whole
/// ttls without an event. `leaving`: the owners that have no position afterwards.
fn hand_off(calls: &[(&Claim, Ttl)], leaving: &[&str]) -> Vec<Document> {
    // An empty queue may be missing.
    let queue = doc! { "$ifNull": ["$queue", []] };
    let least = doc! { "$ifNull": [{ "$min": "$holders.limit" }, i64::from(MAX_PERMITS)] };
    // As `used` only grows and `least` only falls, the first waiter that does not fit ends the run.
    let initial = doc! { "used": { "$sum": "$holders.permits" }, "least": least, "count": 0 };
    let one_more = doc! { "$cond": [{ "$lte": ["$$used", "$$least"] }, 1, 0] };
    let run = doc! { "$let": {
        "vars": { "used": { "$add": ["$$value.used", "$$this.permits"] }, "least": { "$min": ["$$value.least", "$$this.limit"] } },
        "in": { "used": "$$used", "least": "$$least", "count": { "$add": ["$$value.count", one_more] } },
    } };
    let run = doc! { "$reduce": { "input": "$$live", "initialValue": initial, "in": run } };
    // `$add` of a missing value is null, which `$max` ignores.
    let token = doc! { "$max": [{ "$multiply": [{ "$toLong": "$$NOW" }, 1000_i64] }, { "$add": ["$fence", 1_i64] }] };
    let live = entries(queue.clone(), is_live());
    let variables = vec![("live", live), ("run", run.into()), ("token", token.into())];
    let token = doc! { FENCE: { "$add": ["$$token", "$$i"] } };
    let next = doc! { "$mergeObjects": [{ "$arrayElemAt": ["$$live", "$$i"] }, token] };
    let next = doc! { "$map": { "input": { "$range": [0, "$$run.count"] }, "as": "i", "in": next } };

    let holder = doc! {
        "owner": "$$e.owner", PERMITS: "$$e.permits", LIMIT: "$$e.limit", "until": { "$add": ["$$NOW", "$$e.hold"] },
        FENCE: "$$e.fence", HOLDER: { "$mergeObjects": ["$$e.holder", { "since": "$$NOW" }] },
    };
    let holders = doc! { "$map": { "input": "$next", "as": "e", "in": holder } };
    let last = doc! { "$ifNull": [{ "$max": "$next.at" }, -1_i64] };
    let is_behind = doc! { "$or": [{ "$gt": ["$$e.at", last] }, { "$not": [is_live()] }] };
    let waits = doc! { "$and": [is_behind, { "$not": [is_one_of(leaving)] }] };
    let ours: Vec<&str> = calls.iter().map(|(claim, _)| claim.owner.as_str()).collect();
    let handed = entries("$next", doc! { "$not": [is_one_of(&ours)] });
    let hold = doc! { "$cond": [is_missing("$$this.holder"), 0_i64, "$$this.hold"] };
    let event = doc! { "$concat": [
        "$$value", " ", "$$this.process", ":", "$$this.owner", ":", { "$toString": "$$this.fence" }, ":",
        { "$toString": { "$toLong": "$$NOW" } }, ":", { "$toString": hold },
    ] };
    let set = doc! {
        HOLDERS: { "$concatArrays": ["$holders", holders] },
        QUEUE: entries(queue, waits),
        FENCE: { "$ifNull": [{ "$max": "$next.fence" }, "$fence"] },
        GRANTED: { "$reduce": { "input": handed, "initialValue": "", "in": event } },
    };
    let steps = vec![doc! { "$set": { NEXT: with(variables, next) } }, doc! { "$set": set }];
    [steps, renew(calls)].concat()
}

/// Returns the expression for the end of the lease that ends next.
fn next_end() -> Document {
    with(vec![("holders", holding())], doc! { "$min": "$$holders.until" })
}

/// Returns the projection of the holders among these owners.
pub(crate) fn fields(owners: &[&str]) -> Document {
    doc! { HELD: entries(holding(), is_one_of(owners)), END: next_end(), NOW: "$$NOW" }
}

/// Returns the projection of `inspect`.
pub(crate) fn info_fields() -> Document {
    let info = doc! { END: "$$e.until", NOW: "$$NOW", WAITING: pipelines::waiting() };
    doc! { HELD: { "$map": { "input": holding(), "as": "e", "in": { "$mergeObjects": ["$$e", info] } } } }
}

/// Reads the holders from an answer to [`info_fields`].
pub(crate) fn infos(key: &Key, document: &Document) -> Vec<LockInfo> {
    let holders = document.get_array(HELD).map(Vec::as_slice).unwrap_or_default();
    let info = |holder: &Document| {
        let number = |field: &str| u32::try_from(holder.get_i64(field).ok()?).ok();
        let share = || Share::new(number(PERMITS)?, number(LIMIT)?);
        let fence = holder.get_i64(FENCE).ok().map(i64::unsigned_abs).map(Fence);
        let mut info = documents::info(key.as_str(), holder);
        (info.fence, info.share) = (fence, share());
        info
    };
    holders.iter().filter_map(Bson::as_document).map(info).collect()
}
