//! What `connect` checks of the server and of the collection.

use std::sync::Arc;
use std::time::Duration;

use mongodb::bson::{Document, doc};
use mongodb::{Collection, Namespace};

use crate::engine::mongodb::Outcome;
use crate::engine::mongodb::connection::pool::Connected;
use crate::engine::mongodb::connection::{first_batch, run};
use crate::engine::mongodb::documents;
use crate::engine::mongodb::error::{CONNECT, ENGINE, Failure, UNSATISFIABLE};
use crate::engine::mongodb::queue::pipelines::{self, Waiter};
use crate::engine::{Result, Warnings};
use crate::error::EngineError;
use crate::model::{Claim, OwnerToken, Process, Ttl};

/// Two texts that every collation except the simple one counts as equal: a letter with an accent, as one character and as two.
const ONE_CHARACTER: &str = "\u{e9}";
const TWO_CHARACTERS: &str = "e\u{301}";
/// The code of the server's error ShardKeyNotFound.
const OTHER_SHARD_KEY: i32 = 61;

/// Checks that a name is one document of the collection, and that the server executes the commands of a lock. Changes nothing.
/// `is_router`: the server is the router of a sharded cluster. Warns if the shard key cannot be checked.
///
/// # Errors
/// Not retryable where the server or the collection cannot keep locks, or the user lacks the rights.
pub(super) async fn check(connected: &Connected, is_router: bool, warnings: Option<&Warnings>) -> Result<()> {
    let locks = &connected.locks;
    let (collation, commands) = futures_util::future::join(has_collation(locks), execute(locks)).await;
    commands.map_err(|failure| refusal(failure, locks.name()))?;
    if collation.map_err(|failure| refusal(failure, locks.name()))? {
        return Err(unusable(format!(
            "the collection {:?} has a collation, which may count different names as one: use a collection without it",
            locks.name()
        )));
    }
    if is_router {
        check_shard_key(connected, warnings).await?;
    }
    Ok(())
}

fn unusable(message: String) -> EngineError {
    EngineError::new(ENGINE, CONNECT, false, message)
}

/// Describes the failure of a check.
fn refusal(failure: Failure, collection: &str) -> EngineError {
    match failure.code() {
        Some(OTHER_SHARD_KEY) => other_shard_key(collection),
        Some(UNSATISFIABLE) => failure.during(CONNECT),
        Some(_) if !failure.is_unauthorized() && !failure.retryable() => unusable(format!(
            "the server does not execute a command that locks need, an update with a pipeline that reads the clock of the \
             server: {failure}. holdfast needs MongoDB 5.0 or newer; compatible servers, such as Amazon DocumentDB, may not \
             have it"
        )),
        _ => failure.during(CONNECT),
    }
}

fn unreadable_shard_key(namespace: &Namespace) -> String {
    format!(
        "the MongoDB user has no right to read config.collections, so holdfast cannot check the shard key of the collection \
         {namespace}. If it is sharded by another key than _id, two shards could have the same lock. Grant the user the action \
         find on config.collections"
    )
}

fn other_shard_key(collection: &str) -> EngineError {
    unusable(format!(
        "the collection {collection:?} is sharded by another key than _id, so that two shards could have the same lock: use _id \
         as its shard key, or another collection"
    ))
}

/// Whether the collection has a collation. Comparisons in an aggregation have that of the collection.
async fn has_collation(locks: &Collection<Document>) -> Outcome<bool> {
    let is_equal = doc! { "$eq": [{ "$literal": ONE_CHARACTER }, { "$literal": TWO_CHARACTERS }] };
    let steps = vec![
        doc! { "$limit": 1 },
        // One document also of an empty collection.
        doc! { "$facet": { "none": [{ "$limit": 1 }] } },
        doc! { "$project": { "isEqual": is_equal } },
    ];
    let command = doc! { "aggregate": locks.name(), "pipeline": steps, "cursor": {} };
    let answer = run(locks, command).await?;
    Ok(first_batch(&answer).any(|found| found.get_bool("isEqual").unwrap_or(false)))
}

/// Executes an attempt that matches no document, with all expressions of a lock.
async fn execute(locks: &Collection<Document>) -> Outcome<()> {
    let ttl = Ttl::clamped(Duration::from_secs(1));
    let probe = Claim::new(&[], OwnerToken::fresh(), ttl, Arc::new(Process::current()));
    let ids = [probe.owner.as_str().to_owned()];
    let waiter = Waiter {
        process: "",
        number: 1,
        takes_grants: true,
    };
    let attempt = locks.find_one_and_update(
        documents::held_by(&ids, &probe.owner),
        pipelines::acquire(&probe, Some(&waiter)),
    );
    // The members may not have confirmed earlier writes, or the majority may be down: then the answer is the error of this time limit.
    let mut concern = locks.write_concern().cloned().unwrap_or_default();
    concern.w_timeout = Some(Duration::from_millis(1));
    let attempt = attempt.write_concern(concern);
    match attempt
        .projection(documents::waiter_fields(&probe.owner))
        .await
        .map_err(Failure)
    {
        Err(failure) if !failure.is_unconfirmed() => Err(failure),
        _ => Ok(()),
    }
}

/// Checks the shard key, for servers that need none in a filter (MongoDB 7.0 and newer). A user may lack the right to read it.
async fn check_shard_key(connected: &Connected, warnings: Option<&Warnings>) -> Result<()> {
    let collections: Collection<Document> = connected.client.database("config").collection("collections");
    let namespace = connected.locks.namespace();
    let found = collections.find_one(doc! { "_id": namespace.to_string() }).await;
    match found.map_err(Failure) {
        Ok(Some(sharded)) if !is_sharded_by_id(&sharded) => Err(other_shard_key(&namespace.coll)),
        Err(failure) if failure.is_unauthorized() => {
            if let Some(warnings) = warnings {
                warnings.warn(unreadable_shard_key(&namespace));
            }
            Ok(())
        }
        Err(failure) => Err(failure.during(CONNECT)),
        Ok(_) => Ok(()),
    }
}

/// Whether a document of `config.collections` has `_id` as the shard key, ranged or hashed.
fn is_sharded_by_id(sharded: &Document) -> bool {
    let key = sharded.get_document("key");
    key.is_ok_and(|key| key.keys().eq(["_id"]))
}

#[cfg(test)]
mod tests {
    use mongodb::error::{CommandError, ErrorKind};

    use super::*;

    /// Returns the reply of a server as a failure.
    fn failure(reply: Document) -> Failure {
        let error: CommandError = mongodb::bson::deserialize_from_document(reply).unwrap();
        Failure(ErrorKind::Command(error).into())
    }

    #[test]
    fn replies_of_servers_that_cannot_keep_locks_are_explained() {
        // Of a router of MongoDB 6.0.
        let other_key = doc! {
            "code": 61,
            "codeName": "ShardKeyNotFound",
            "errmsg": "Query for sharded findAndModify must contain the shard key",
        };
        // Of Amazon DocumentDB 5.0.
        let no_pipeline = doc! {
            "code": 9,
            "codeName": "FailedToParse",
            "errmsg": "Unsupported update pipeline",
        };
        let busy = doc! { "code": 16500, "codeName": "RequestRateTooLarge", "errmsg": "Request rate is large" };
        for (reply, retryable, part) in [
            (other_key, false, "is sharded by another key than _id"),
            (no_pipeline, false, "does not execute a command that locks need"),
            (busy, true, "Request rate is large"),
        ] {
            let error = refusal(failure(reply), "locks");
            assert_eq!(error.retryable, retryable);
            assert!(error.to_string().contains(part), "{error}");
        }
    }

    /// As the config servers of MongoDB 6.0 store them.
    #[test]
    fn another_shard_key_is_recognised() {
        let sharded = |key: Document| doc! { "_id": "shop.locks", "key": key, "unique": false, "noBalance": false };
        for key in [doc! { "_id": 1 }, doc! { "_id": "hashed" }] {
            assert!(is_sharded_by_id(&sharded(key)));
        }
        for key in [doc! { "owner": 1 }, doc! { "_id": 1, "owner": 1 }] {
            assert!(!is_sharded_by_id(&sharded(key)));
        }
    }
}
