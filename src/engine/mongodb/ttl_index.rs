//! The TTL index, which removes what crashed holders left behind, and what gist processes wait for.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use futures_util::TryStreamExt;
use mongodb::bson::{Bson, Document, doc};
use mongodb::options::IndexOptions;
use mongodb::{Collection, IndexModel};

use super::Outcome;
use super::connect::OP;
use super::documents::EXPIRES_AT;
use super::failure::{ENGINE, Failure};
use super::pool::{Class, Pool};
use crate::clock::Moment;
use crate::engine::Result;
use crate::error::EngineError;

/// The server's NamespaceNotFound.
const NO_COLLECTION: i32 = 26;
/// The server's IndexOptionsConflict: an index on this field has other options, or another name.
const OTHER_OPTIONS: i32 = 85;
/// The server's IndexKeySpecsConflict: an index of this name is on something else.
const OTHER_KEYS: i32 = 86;

/// What the index is, in the words of a message.
const WANTED: &str = "the TTL index { expiresAt: 1 } with expireAfterSeconds: 0";

/// Makes the index.
///
/// # Behavior
/// One that stands already is fine under any name. So is a missing right to make one when one stands, and when the user
/// may not even look it up, but may write: locks work without it.
///
/// # Errors
/// Not retryable when another index is in the way, when there is none and none may be made, and when the user may not
/// write at all.
pub(super) async fn ensure(locks: &Collection<Document>) -> Result<()> {
    let options = IndexOptions::builder().expire_after(Duration::ZERO).build();
    let index = IndexModel::builder()
        .keys(doc! { EXPIRES_AT: 1 })
        .options(options)
        .build();
    let failure = match locks.create_index(index).await.map_err(Failure) {
        Ok(_) => return Ok(()),
        Err(failure) => failure,
    };
    let is_in_the_way = matches!(failure.code(), Some(OTHER_OPTIONS | OTHER_KEYS));
    if !is_in_the_way && !failure.is_unauthorized() {
        return Err(failure.during(OP));
    }
    if failure.is_unauthorized() {
        may_write(locks).await.map_err(|failure| failure.during(OP))?;
    }
    let collection = locks.name();
    let message = match stands(locks).await {
        Ok(true) => return Ok(()),
        Ok(false) if is_in_the_way => {
            format!("the collection {collection:?} has an index in the way of {WANTED}: {failure}")
        }
        Ok(false) => format!("the collection {collection:?} has not {WANTED}: {failure}"),
        Err(looking) if looking.is_unauthorized() && failure.is_unauthorized() => {
            tracing::warn!(collection, "may neither make nor look up {WANTED}");
            return Ok(());
        }
        Err(looking) => return Err(looking.during(OP)),
    };
    Err(EngineError::new(ENGINE, OP, false, message))
}

/// Whether the index stands, under whatever name.
async fn stands(locks: &Collection<Document>) -> Outcome<bool> {
    let indexes = match list(locks).await {
        Err(failure) if failure.code() == Some(NO_COLLECTION) => return Ok(false),
        indexes => indexes?,
    };
    Ok(indexes.iter().any(|index| {
        let options = index.options.as_ref();
        let ends_at_once = options.and_then(|options| options.expire_after) == Some(Duration::ZERO);
        let is_partial = options.is_some_and(|options| options.partial_filter_expression.is_some());
        let is_on_the_end = index.keys.len() == 1 && index.keys.contains_key(EXPIRES_AT);
        is_on_the_end && ends_at_once && !is_partial
    }))
}

/// Interval between two checks of the index while the collection is in use.
const CHECK: Duration = if cfg!(test) {
    Duration::from_millis(500)
} else {
    Duration::from_secs(300)
};

/// Creates the index again after the collection was dropped, while the engine acquires locks.
pub(super) struct IndexKeeper {
    pool: Arc<Pool>,
    /// When the next check is due, in nanoseconds of [`Moment`].
    due: AtomicU64,
}

impl IndexKeeper {
    /// Creates the keeper of an index that was checked just now.
    pub(super) fn new(pool: Arc<Pool>) -> Arc<Self> {
        let due = AtomicU64::new((Moment::now() + CHECK).to_nanos());
        Arc::new(IndexKeeper { pool, due })
    }

    /// Makes the next check due. The engine calls it when the collection may have been dropped.
    pub(super) fn check_soon(&self) {
        self.due.store(0, Relaxed);
    }

    /// Creates the index in the background if a check is due. The engine calls it after each grant.
    pub(super) fn check_if_due(&self) {
        let now = Moment::now();
        let due = self.due.load(Relaxed);
        if due > now.to_nanos() {
            return;
        }
        let next = (now + CHECK).to_nanos();
        if self.due.compare_exchange(due, next, Relaxed, Relaxed).is_err() {
            return;
        }
        let (pool, locks) = (self.pool.clone(), self.pool.locks());
        tokio::spawn(async move {
            let check = || async move { Ok(ensure(&locks).await) };
            if let Ok(Err(error)) = pool.call(Class::Query, check).await {
                tracing::warn!(%error, "the TTL index could not be checked");
            }
        });
    }
}

async fn list(locks: &Collection<Document>) -> Outcome<Vec<IndexModel>> {
    Ok(locks.list_indexes().await?.try_collect().await?)
}

/// Asks for the right to write, by an update of nothing.
async fn may_write(locks: &Collection<Document>) -> Outcome<()> {
    let nothing = doc! { "_id": { "$in": Vec::<Bson>::new() } };
    locks.update_one(nothing, doc! { "$unset": { EXPIRES_AT: 1 } }).await?;
    Ok(())
}
