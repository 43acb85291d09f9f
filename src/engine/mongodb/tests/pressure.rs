//! Tests of dropped calls and of scarce connections.

use super::queue::{eventually, notified, two, wait, waiting};
use super::*;
use crate::engine::EngineExt;
use crate::engine::contract::refs;
use crate::engine::mongodb::connection::pool::Class;

/// Opens an engine with `count` connections on the collection of `engine`.
async fn with_connections(engine: &MongodbEngine, variable: &str, count: u32) -> Arc<MongodbEngine> {
    let url = url(variable).unwrap();
    let separator = if url.contains('?') { '&' } else { '?' };
    let settings = Settings {
        collection: engine.locks().name().to_owned(),
        ..Settings::default()
    };
    connect(&format!("{url}{separator}maxPoolSize={count}"), &settings)
        .await
        .unwrap()
}

async fn in_time<T>(what: &str, call: impl Future<Output = T>) -> T {
    let answer = tokio::time::timeout(Duration::from_secs(8), call).await;
    answer.unwrap_or_else(|_| panic!("no answer within 8 s: {what}"))
}

#[tokio::test]
async fn one_connection_is_enough_while_a_call_waits() {
    two(|ours, _| async move {
        let narrow = with_connections(&ours, REPLICA_SET, 1).await;
        let holder = claim(&["n"], LONG);
        granted(&ours, &holder).await;
        let first = waiting(&["n"]);
        let mut first_changes = in_time("a waiter enters", wait(&narrow, &first)).await;
        let other = claim(&["m"], LONG);
        in_time("acquire", granted(&narrow, &other)).await;
        in_time("renew", narrow.renew(&other, other.ttl)).await.unwrap();
        in_time("inspect", narrow.inspect(&key("m"))).await.unwrap();
        in_time("list", narrow.list("", LONG)).await.unwrap();
        in_time("release", narrow.release(&other, Duration::ZERO))
            .await
            .unwrap();
        ours.release(&holder, Duration::ZERO).await.unwrap();
        notified(&mut first_changes).await;
        in_time("confirm", granted(&narrow, &first)).await;
        in_time("release", narrow.release(&first, Duration::ZERO))
            .await
            .unwrap();
        narrow.close().await;
    })
    .await;
}

pub(super) async fn an_attempt_that_is_dropped_before_its_permit_sends_nothing(engine: Arc<MongodbEngine>) {
    let (mut permits, name) = (Vec::new(), key("n"));
    let permit = || engine.pool.permit(Class::Acquire(&name));
    // Of 64.
    for _ in 0..40 {
        permits.push(in_time("permit", permit()).await);
    }
    assert!(tokio::time::timeout(Duration::from_secs(1), permit()).await.is_err());
    let dropped = claim(&["n"], LONG);
    let attempt = tokio::time::timeout(Duration::from_millis(50), engine.try_acquire(&dropped)).await;
    assert!(attempt.is_err() && !dropped.was_sent());
    // Every other class has connections left.
    let theirs = claim(&["m"], LONG);
    in_time("renew", engine.renew(&theirs, theirs.ttl)).await.unwrap();
    in_time("release", engine.release(&theirs, Duration::ZERO))
        .await
        .unwrap();
    in_time("inspect", engine.inspect(&key("m"))).await.unwrap();
    permits.clear();
    granted(&engine, &theirs).await;
    assert!(theirs.was_sent());
    assert_eq!(document(&engine, "n").await, None);
}

/// A release removes everything of an attempt, at whichever step it was dropped.
pub(super) async fn a_release_takes_effect_after_a_dropped_attempt(engine: Arc<MongodbEngine>) {
    let mut left = Vec::new();
    for round in 0..120_u64 {
        let name = format!("n{round}");
        let dropped = claim(&[&name, "shared"], LONG);
        let limit = Duration::from_micros(round % 40 * 100);
        let attempt = tokio::time::timeout(limit, engine.try_acquire(&dropped)).await;
        if attempt.is_err() && dropped.was_sent() && round % 2 == 0 {
            // The task rolls the attempt back.
            left.push(name);
        } else {
            engine.release(&dropped, Duration::ZERO).await.unwrap();
            assert_eq!(document(&engine, &name).await, None, "round {round}");
            if round % 2 == 1 && left.is_empty() {
                assert_eq!(document(&engine, "shared").await, None, "round {round}");
            }
        }
    }
    eventually("nothing is left", async || {
        engine.locks().count_documents(doc! {}).await.unwrap() == 0
    })
    .await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(engine.locks().count_documents(doc! {}).await.unwrap(), 0);
}

pub(super) async fn a_thousand_dropped_attempts_leave_nothing_and_delay_no_other_call(engine: Arc<MongodbEngine>) {
    let names: Vec<String> = (0..1000).map(|number| format!("n{number}")).collect();
    let claims: Vec<Claim> = names.iter().map(|name| claim(&[name], LONG)).collect();
    let attempts = futures_util::future::join_all(claims.iter().map(|claim| engine.try_acquire(claim)));
    assert!(tokio::time::timeout(Duration::from_millis(60), attempts).await.is_err());
    let sent = claims.iter().filter(|claim| claim.was_sent()).count();
    assert!(sent < 1000, "the last attempts had no connection yet");
    let began = Instant::now();
    in_time("acquire", granted(&engine, &claim(&["other"], LONG))).await;
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    let mut answers = 0;
    let sent: Vec<Claim> = claims.into_iter().filter(Claim::was_sent).collect();
    for batch in sent.chunks(256) {
        engine
            .release_all(&refs(batch), Duration::ZERO, &mut |_, released| {
                released.unwrap();
                answers += 1;
            })
            .await;
    }
    assert_eq!(answers, sent.len());
    assert_eq!(engine.locks().count_documents(doc! {}).await.unwrap(), 1);
}

pub(super) async fn the_ttl_index_comes_back_after_the_collection_was_dropped(engine: Arc<MongodbEngine>) {
    engine.locks().drop().await.unwrap();
    eventually("the index is there", async || {
        granted(&engine, &claim(&["n", "m"], LONG)).await;
        engine.locks().delete_many(doc! {}).await.unwrap();
        let names = engine.locks().list_index_names().await.unwrap();
        names.iter().any(|name| name == "expiresAt_1")
    })
    .await;
}

pub(super) async fn foreign_fields_do_not_prevent_a_lock(engine: Arc<MongodbEngine>) {
    let queues = [
        Bson::Int32(7),
        Bson::String("$$NOW".into()),
        Bson::Document(doc! { "owner": "x" }),
        Bson::Array(vec![Bson::Int32(1), Bson::Null]),
        Bson::Array(vec![Bson::Document(
            doc! { "owner": 1, "process": 2, "at": "x", "until": 9_i64, "hold": "y" },
        )]),
        Bson::Array(vec![Bson::Document(
            doc! { "owner": "a", "process": 2, "at": 1_i64, "until": DateTime::from_millis(4_000_000_000_000), "hold": "y" },
        )]),
    ];
    for (number, queue) in queues.into_iter().enumerate() {
        let name = format!("n{number}");
        let end = DateTime::from_millis(DateTime::now().timestamp_millis() + 1700);
        let foreign = doc! { "_id": &name, "expiresAt": end, "queue": queue, "metadata": "{no json", "owner": 5 };
        engine.locks().insert_one(foreign).await.unwrap();
        assert_eq!(engine.inspect(&key(&name)).await.unwrap().unwrap().metadata, None);
        let mut waiter = waiting(&[&name]);
        waiter.ttl = Ttl::new(Duration::from_secs(20)).unwrap();
        busy(&engine, &waiter).await;
        busy(&engine, &claim(&[&name], LONG)).await;
        let list = engine.list(&name, LONG).await.unwrap();
        assert_eq!((list.len(), &list[0].metadata), (1, &None));
        let deadline = Instant::now() + Duration::from_secs(10);
        while let Acquired::Held { .. } = engine.try_acquire(&waiter).await.unwrap() {
            assert!(Instant::now() < deadline, "{name} is not usable");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert_eq!(engine.release(&waiter, Duration::ZERO).await.unwrap(), Released::Freed);
        assert_eq!(document(&engine, &name).await, None);
    }
    let ours = claim(&["n"], LONG);
    granted(&engine, &ours).await;
    let set = doc! { "$set": { "metadata": "{no json", "queue": 7 } };
    engine.locks().update_one(doc! { "_id": "n" }, set).await.unwrap();
    let info = engine.inspect(&key("n")).await.unwrap().unwrap();
    assert!(info.metadata.is_none() && info.holder.is_some());
    assert_eq!(engine.renew(&ours, ours.ttl).await.unwrap(), Renewed::Extended);
    assert_eq!(engine.release(&ours, Duration::ZERO).await.unwrap(), Released::Freed);
    assert_eq!(document(&engine, "n").await, None);
}

pub(super) async fn a_page_without_an_answer_ends_a_list(engine: Arc<MongodbEngine>) {
    let documents = (0..2500).map(|number| doc! { "_id": format!("n{number:04}"), "expiresAt": DateTime::MAX });
    engine.locks().insert_many(documents).await.unwrap();
    let list = engine.list("n", LONG).await.unwrap();
    assert_eq!(list.len(), 2500);
    assert!(list.is_sorted_by(|one, other| one.name < other.name));
    // In a test that stalls, the answer may arrive before the timer fires.
    let mut ended = None;
    for _ in 0..50 {
        ended = engine.list("n", Duration::from_nanos(1)).await.err();
        if ended.is_some() {
            break;
        }
    }
    let error = ended.expect("a list without a time limit for its pages");
    assert!(error.retryable && error.op == "list", "{error}");
}
