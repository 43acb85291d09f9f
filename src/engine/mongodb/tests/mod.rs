//! The contract on a standalone server and on a replica set, and tests of what only MongoDB has.

use std::sync::Arc;
use std::time::{Duration, Instant};

use mongodb::Collection;
use mongodb::bson::{Bson, DateTime, Document, doc};

use super::ops::clock_offset::ClockReading;
use super::{MongodbConfig, MongodbEngine};
use crate::clock::Moment;
use crate::engine::contract::{one_is_faster, one_succeeds};
use crate::engine::{Acquired, Engine, EngineExt, Released, Renewed, Settings, SharedEngine};
use crate::error::EngineError;
use crate::model::{Claim, Fence, Key, OwnerToken, Process, Ttl};

const STANDALONE: &str = "HOLDFAST_TEST_MONGODB_URL";
const REPLICA_SET: &str = "HOLDFAST_TEST_MONGODB_RS_URL";
const LONG: Duration = Duration::from_secs(30);

/// Returns the server's URL. `None`: there is no server here, and the test prints that it is skipped.
fn url(variable: &str) -> Option<String> {
    let url = std::env::var(variable).ok();
    if url.is_none() {
        assert!(std::env::var_os("CI").is_none(), "{variable} is not set");
        eprintln!("skipped: {variable} is not set");
    }
    url
}

async fn connect(url: &str, settings: &Settings) -> Result<Arc<MongodbEngine>, EngineError> {
    MongodbEngine::connect(MongodbConfig::parse(url, settings).unwrap()).await
}

async fn open(variable: &str, prefix: String) -> Option<(SharedEngine, SharedEngine)> {
    let url = url(variable)?;
    let settings = Settings {
        key_prefix: Some(prefix),
        ..Settings::default()
    };
    Some((
        connect(&url, &settings).await.unwrap(),
        connect(&url, &settings).await.unwrap(),
    ))
}

mod standalone {
    crate::engine::contract::contract_tests!(|prefix| super::open(super::STANDALONE, prefix));
}

mod replica_set {
    crate::engine::contract::contract_tests!(|prefix| super::open(super::REPLICA_SET, prefix));
}

/// Calls a case once per deployment, with an engine whose collection is its own, and drops the collection.
macro_rules! on_both {
    ($($group:ident :: $case:ident),* $(,)?) => { $(
        mod $case {
            #[tokio::test]
            async fn standalone() {
                super::with_own_collection(super::STANDALONE, super::$group::$case).await;
            }
            #[tokio::test]
            async fn replica_set() {
                super::with_own_collection(super::REPLICA_SET, super::$group::$case).await;
            }
        }
    )* };
}

on_both!(
    cases::a_gist_process_and_this_one_exclude_each_other,
    cases::a_document_without_a_valid_end_is_never_acquired,
    cases::text_of_users_is_no_expression,
    cases::fencing_tokens_grow_in_the_order_of_the_holders,
    cases::a_retry_returns_the_same_fencing_token_as_inspect,
    cases::an_unstamped_document_of_this_owner_is_granted,
    cases::a_release_removes_expired_documents_of_its_owner,
    cases::the_ttl_index_is_created_or_accepted,
    monitor::a_lease_that_expires_between_two_commands_is_lost,
    monitor::a_document_that_is_deleted_before_its_stamp_is_acquired_again,
    monitor::a_crash_at_any_step_blocks_the_names_for_the_ttl_only,
    monitor::a_wrong_estimate_is_corrected_before_the_grant,
    pressure::an_attempt_that_is_dropped_before_its_permit_sends_nothing,
    pressure::a_release_takes_effect_after_a_dropped_attempt,
    pressure::a_thousand_dropped_attempts_leave_nothing_and_delay_no_other_call,
    pressure::the_ttl_index_comes_back_after_the_collection_was_dropped,
    pressure::foreign_fields_do_not_prevent_a_lock,
    pressure::a_page_without_an_answer_ends_a_list,
    batches::many_releases_release_the_names_of_each_claim,
);

async fn with_own_collection<F: Future<Output = ()>>(variable: &str, case: impl FnOnce(Arc<MongodbEngine>) -> F) {
    let Some(url) = url(variable) else { return };
    let settings = Settings {
        collection: format!("t{}", OwnerToken::fresh().as_str()),
        ..Settings::default()
    };
    let engine = connect(&url, &settings).await.unwrap();
    case(engine.clone()).await;
    engine.locks().drop().await.unwrap();
    engine.close().await;
}

fn key(name: &str) -> Key {
    Key::new(name).unwrap()
}

fn claim(names: &[&str], ttl: Duration) -> Claim {
    let keys: Vec<Key> = names.iter().map(|name| key(name)).collect();
    Claim::new(
        &keys,
        OwnerToken::fresh(),
        Ttl::new(ttl).unwrap(),
        Arc::new(Process::current()),
    )
}

async fn granted(engine: &MongodbEngine, claim: &Claim) -> Fence {
    match engine.try_acquire(claim).await.unwrap() {
        Acquired::Granted { fence } => fence,
        held => panic!("expected a grant of {:?}, got {held:?}", claim.keys()),
    }
}

async fn busy(engine: &MongodbEngine, claim: &Claim) -> Option<Duration> {
    match engine.try_acquire(claim).await.unwrap() {
        Acquired::Held { retry_after, .. } => retry_after,
        granted => panic!("expected busy for {:?}, got {granted:?}", claim.keys()),
    }
}

/// Acquires a lock as the gist does with the official driver.
async fn gist_acquires(locks: &Collection<Document>, name: &str, ttl: Duration) -> bool {
    let expires_at = DateTime::from_millis(DateTime::now().timestamp_millis() + ttl.as_millis() as i64);
    match locks.insert_one(doc! { "_id": name, "expiresAt": expires_at }).await {
        Ok(_) => true,
        Err(error) => {
            assert!(error.to_string().contains("11000"), "{error}");
            false
        }
    }
}

async fn document(engine: &MongodbEngine, name: &str) -> Option<Document> {
    engine.locks().find_one(doc! { "_id": name }).await.unwrap()
}

mod batches;
mod cases;
mod change_stream;
mod hand_off;
mod inspect;
mod monitor;
mod permits;
mod pressure;
mod queue;
mod repeated;
mod tokens;

#[tokio::test]
async fn a_busy_attempt_writes_nothing() {
    with_own_collection(REPLICA_SET, |engine| async move {
        granted(&engine, &claim(&["n"], LONG)).await;
        assert!(engine.inspect(&key("n")).await.unwrap().unwrap().fence.is_some());
        let oplog: Collection<Document> = engine.pool.connected().client.database("local").collection("oplog.rs");
        let entries = || async {
            oplog
                .count_documents(doc! { "ns": engine.locks().namespace().to_string() })
                .await
                .unwrap()
        };
        let before = entries().await;
        for _ in 0..10 {
            busy(&engine, &claim(&["n"], LONG)).await;
        }
        assert_eq!(entries().await, before);
    })
    .await;
}

/// `acquireLock` returns no token, so on a standalone server its grant has no stamp.
#[tokio::test]
async fn a_claim_that_needs_no_token_is_granted_by_an_insert() {
    with_own_collection(STANDALONE, |engine| async move {
        let first = granted(&engine, &claim(&["m", "n"], LONG)).await;
        assert!(engine.force_release(&key("n")).await.unwrap() && engine.force_release(&key("m")).await.unwrap());
        for (names, wrong) in [
            (&["n"][..], 0),
            (&["n"], -3_600_000),
            (&["m", "n"], 3_600_000),
            (&["n"], 1000),
        ] {
            let mut ours = claim(names, LONG);
            ours.needs_token = false;
            let now = Moment::now();
            engine.clock_offset.set(ClockReading {
                time: DateTime::from_millis(DateTime::now().timestamp_millis() + wrong),
                sent: now,
                answered: now,
            });
            assert_eq!(granted(&engine, &ours).await, Fence::NONE);
            busy(&engine, &claim(&["n"], LONG)).await;
            for name in names {
                let info = engine.inspect(&key(name)).await.unwrap().unwrap();
                assert_eq!(
                    (info.fence, info.holder.unwrap().process),
                    (None, Process::current()),
                    "{name}"
                );
                let left = info.remaining.unwrap();
                // The end may be estimated.
                let most = LONG + Duration::from_millis(100);
                assert!(left <= most && left > LONG - LONG / 10, "{wrong}: {left:?}");
            }
            // A retry finds the document, and draws a stamp.
            assert!(granted(&engine, &ours).await > first);
            assert_eq!(engine.release(&ours, Duration::ZERO).await.unwrap(), Released::Freed);
            assert!(granted(&engine, &claim(&["expired"], Duration::from_millis(1))).await > first);
        }
        assert!(granted(&engine, &claim(&["n"], LONG)).await > first);
    })
    .await;
    // A replica set's token costs nothing.
    with_own_collection(REPLICA_SET, |engine| async move {
        let mut ours = claim(&["n"], LONG);
        ours.needs_token = false;
        assert!(granted(&engine, &ours).await > Fence::NONE);
    })
    .await;
}

#[tokio::test]
async fn a_closed_engine_returns_an_error() {
    for variable in [STANDALONE, REPLICA_SET] {
        with_own_collection(variable, |engine| async move {
            let other = connect(&url(variable).unwrap(), &Settings::default()).await.unwrap();
            let started = Instant::now();
            let mut subscription = other.subscribe(&claim(&["n"], LONG), &key("n")).await.unwrap();
            other.close().await;
            other.close().await;
            assert!(started.elapsed() < Duration::from_secs(4), "{:?}", started.elapsed());
            let error = other.try_acquire(&claim(&["n"], LONG)).await.unwrap_err();
            assert!(!error.retryable && error.to_string().contains("shut down"), "{error}");
            let _ = tokio::time::timeout(Duration::from_millis(20), subscription.changed()).await;
            granted(&engine, &claim(&["n"], LONG)).await;
        })
        .await;
    }
}

#[tokio::test]
async fn a_missing_server_is_reported_within_the_store_timeout() {
    let settings = Settings {
        store_timeout: Duration::from_secs(3),
        ..Settings::default()
    };
    one_is_faster(settings.store_timeout, async || {
        let started = Instant::now();
        let error = connect("mongodb://u:secret@127.0.0.1:1/db", &settings)
            .await
            .unwrap_err();
        let took = started.elapsed();
        assert!(error.retryable);
        let message = error.to_string();
        assert!(
            message.contains("onnection refused") && !message.contains("labels") && !message.contains("secret"),
            "{message}"
        );
        took
    })
    .await;
}

#[tokio::test]
async fn a_url_with_another_replica_set_is_rejected() {
    let Some(url) = url(REPLICA_SET) else { return };
    let mut address = url.split('?').next().unwrap().to_owned();
    address.push_str("?replicaSet=another");
    let settings = Settings {
        store_timeout: Duration::from_millis(1500),
        ..Settings::default()
    };
    let error = connect(&address, &settings).await.unwrap_err();
    assert!(!error.retryable, "{error}");
    assert!(error.to_string().contains("\"another\""), "{error}");
}
