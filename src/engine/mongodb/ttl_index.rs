//! The TTL index, which removes the documents of crashed holders. Gist processes rely on it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use futures_util::FutureExt;
use mongodb::Collection;
use mongodb::bson::{Bson, Document, doc};

use super::Outcome;
use super::connection::pool::{Class, Pool};
use super::connection::{first_batch, run};
use super::error::{CONNECT, ENGINE};
use crate::clock::Moment;
use crate::engine::Result;
use crate::engine::mongodb::fields::EXPIRES_AT;
use crate::error::EngineError;

/// The server's NamespaceNotFound.
const NO_COLLECTION: i32 = 26;
/// The server's IndexOptionsConflict: an index on this field has other options, or another name.
const OTHER_OPTIONS: i32 = 85;
/// The server's IndexKeySpecsConflict: an index of this name has other fields.
const OTHER_KEYS: i32 = 86;

/// The index in messages.
const WANTED: &str = "the TTL index { expiresAt: 1 } with expireAfterSeconds: 0";

/// Creates the index.
///
/// # Behavior
/// An existing one may have any name. A user without the right to create it needs an existing one. For a user without the rights
/// to create and to list indexes, logs a warning: locks work without the index. The server does nothing where it exists, and the
/// index need not wait for the other members, which may be down.
///
/// # Errors
/// Not retryable when another index is in the way, when there is no index and the user may not create it.
pub(super) async fn ensure(locks: &Collection<Document>) -> Result<()> {
    let index = doc! { "key": { EXPIRES_AT: 1 }, "name": format!("{EXPIRES_AT}_1"), "expireAfterSeconds": 0 };
    let create = doc! { "createIndexes": locks.name(), "indexes": [index], "writeConcern": { "w": 1 } };
    let Err(failure) = run(locks, create).await else {
        return Ok(());
    };
    let is_in_the_way = matches!(failure.code(), Some(OTHER_OPTIONS | OTHER_KEYS));
    if !is_in_the_way && !failure.is_unauthorized() {
        return Err(failure.during(CONNECT));
    }
    let collection = locks.name();
    let message = match exists(locks).await {
        Ok(true) => return Ok(()),
        Ok(false) if is_in_the_way => {
            format!("the collection {collection:?} has an index that conflicts with {WANTED}: {failure}")
        }
        Ok(false) => format!("the collection {collection:?} has not {WANTED}: {failure}"),
        Err(listing) if listing.is_unauthorized() && failure.is_unauthorized() => {
            tracing::warn!(collection, "the user may neither create nor list {WANTED}");
            return Ok(());
        }
        Err(listing) => return Err(listing.during(CONNECT)),
    };
    Err(EngineError::new(ENGINE, CONNECT, false, message))
}

/// Whether the index exists, under any name.
async fn exists(locks: &Collection<Document>) -> Outcome<bool> {
    // One reply has all of them: a collection has 64 at most.
    let indexes = match run(locks, doc! { "listIndexes": locks.name() }).await {
        Err(failure) if failure.code() == Some(NO_COLLECTION) => return Ok(false),
        indexes => indexes?,
    };
    Ok(first_batch(&indexes).any(is_wanted))
}

fn is_wanted(index: &Document) -> bool {
    let is_on_the_end = index
        .get_document("key")
        .is_ok_and(|key| key.len() == 1 && key.contains_key(EXPIRES_AT));
    let ends_at_once = match index.get("expireAfterSeconds") {
        Some(Bson::Double(seconds)) => *seconds == 0.0,
        seconds => matches!(seconds, Some(Bson::Int32(0) | Bson::Int64(0))),
    };
    is_on_the_end && ends_at_once && !index.contains_key("partialFilterExpression")
}

/// Interval between two checks of the index while the collection is in use.
const CHECK: Duration = if cfg!(test) {
    Duration::from_millis(500)
} else {
    Duration::from_secs(300)
};

/// Creates the index again after the collection was dropped, while the engine acquires locks.
pub(super) struct TtlIndex {
    pool: Arc<Pool>,
    /// When the next check is due, in nanoseconds of [`Moment`].
    due: AtomicU64,
}

impl TtlIndex {
    /// Creates the check of an index that was checked just now.
    pub(super) fn new(pool: Arc<Pool>) -> Arc<Self> {
        let due = AtomicU64::new((Moment::now() + CHECK).to_nanos());
        Arc::new(TtlIndex { pool, due })
    }

    /// Makes the next check due. The engine calls it when the collection may have been dropped.
    pub(super) fn check_soon(&self) {
        self.due.store(0, Relaxed);
    }

    /// Creates the index in the background if a check is due. The engine calls it after each grant.
    pub(super) fn check_if_due(&self) {
        let now = Moment::now();
        if self.due.load(Relaxed) > now.to_nanos() {
            return;
        }
        // Two checks at once do no harm.
        self.due.store((now + CHECK).to_nanos(), Relaxed);
        let (pool, locks) = (self.pool.clone(), self.pool.locks());
        let checking = async move {
            let check = || async move { Ok(ensure(&locks).await) };
            if let Ok(Err(error)) = pool.call(Class::Query, check).await {
                tracing::warn!(%error, "the TTL index could not be checked");
            }
        };
        tokio::spawn(checking.boxed());
    }
}
