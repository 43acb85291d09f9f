//! Tests of `inspect` and `list` while tokens are not in their documents yet.

use super::*;
use crate::engine::EngineExt;
use crate::engine::mongodb::connection::pool::Class;
use crate::engine::mongodb::error::Failure;

/// Connects to a database of its own, and counts the queries of its collection. `None`: there is no server here.
async fn profiled() -> Option<Arc<MongodbEngine>> {
    let url = url(REPLICA_SET)?;
    let (server, options) = url.split_once("/holdfast").unwrap();
    let database = format!("p{}", OwnerToken::fresh().as_str());
    let engine = connect(&format!("{server}/{database}{options}"), &Settings::default()).await;
    let engine = engine.unwrap();
    let profile = doc! { "profile": 2 };
    engine
        .pool
        .connected()
        .client
        .database(&database)
        .run_command(profile)
        .await
        .unwrap();
    Some(engine)
}

/// Returns the number of queries with this filter for `_id` so far.
async fn queries(engine: &MongodbEngine, id: impl Into<Bson>) -> u64 {
    let namespace = engine.locks().namespace();
    let database = engine.pool.connected().client.database(&namespace.db);
    let profile: Collection<Document> = database.collection("system.profile");
    let ours = doc! { "op": "query", "ns": namespace.to_string(), "command.filter._id": id.into() };
    profile.count_documents(ours).await.unwrap()
}

async fn drop_database(engine: &MongodbEngine) {
    let client = engine.pool.connected().client.clone();
    let database = client.database(&engine.locks().namespace().db);
    database.drop().await.map_err(Failure::from).unwrap();
    engine.close().await;
}

/// A document as a holder that died leaves it before it wrote the token.
fn without_token(name: &str) -> Document {
    let now = DateTime::now().timestamp_millis();
    doc! {
        "_id": name,
        "expiresAt": DateTime::from_millis(now + 60_000),
        "owner": OwnerToken::fresh().as_str(),
        "holder": { "host": "h", "pid": 1_i64, "since": DateTime::from_millis(now) },
    }
}

/// `LOCK_TIMEOUT` reads the holder in a short time.
#[tokio::test]
async fn a_read_that_does_not_wait_shows_no_token_of_a_new_lease() {
    let Some(engine) = profiled().await else { return };
    engine.locks().insert_one(without_token("n")).await.unwrap();
    let info = engine.inspect_now(&key("n")).await.unwrap().unwrap();
    assert!(info.fence.is_none() && info.holder.is_some(), "{info:?}");
    assert_eq!(queries(&engine, "n").await, 1);
    assert!(engine.inspect(&key("n")).await.unwrap().unwrap().fence.is_none());
    assert_eq!(queries(&engine, "n").await, 5, "one, and three repetitions");
    drop_database(&engine).await;
}

#[tokio::test]
async fn a_new_lease_that_ends_between_two_reads_is_not_held() {
    with_own_collection(REPLICA_SET, |engine| async move {
        let ends = async || {
            let (name, pause) = (OwnerToken::fresh(), Duration::from_millis(15));
            engine.locks().insert_one(without_token(name.as_str())).await.unwrap();
            let deletion = async {
                tokio::time::sleep(pause).await;
                engine.locks().delete_one(doc! { "_id": name.as_str() }).await.unwrap();
            };
            let name = key(name.as_str());
            let (info, list, ()) = tokio::join!(engine.inspect(&name), engine.list(name.as_str(), LONG), deletion);
            (info.unwrap().is_some(), list.unwrap().len())
        };
        for _ in 0..5 {
            let (is_held, listed) = ends().await;
            assert!(!is_held);
            // Where the machine stands still, the deletion comes before the list.
            assert!(listed <= 1);
        }
    })
    .await;
}

/// Each read of a list has its own time limit.
#[tokio::test]
async fn slow_reads_of_new_leases_do_not_end_a_list() {
    let Some(url) = url(REPLICA_SET) else { return };
    let settings = Settings {
        collection: format!("t{}", OwnerToken::fresh().as_str()),
        ..Settings::default()
    };
    let engine = connect(&format!("{url}&maxPoolSize=1"), &settings).await.unwrap();
    // A machine that stands still makes a read slower than its limit.
    one_succeeds(async |_| {
        engine.locks().delete_many(doc! {}).await.unwrap();
        let mut new = without_token("n");
        let later = DateTime::from_millis(DateTime::now().timestamp_millis() + 20_000);
        new.get_document_mut("holder").unwrap().insert("since", later);
        engine.locks().insert_one(new).await.unwrap();
        // Every query waits for the only permit.
        let mut permit = engine.pool.permit(Class::Query).await;
        let slow = async {
            loop {
                tokio::time::sleep(Duration::from_millis(700)).await;
                drop(permit);
                permit = engine.pool.permit(Class::Query).await;
            }
        };
        let list = async {
            let began = Instant::now();
            engine.inspect_now(&key("n")).await.unwrap();
            let one = began.elapsed();
            let list = engine.list("", Duration::from_millis(1600)).await;
            (one, list.map(|list| list.len()))
        };
        let (one, listed) = tokio::select! {
            result = list => result,
            () = slow => unreachable!(),
        };
        assert!(one > Duration::from_millis(500), "{one:?}");
        listed.map(|listed| assert_eq!(listed, 1))
    })
    .await;
    engine.locks().drop().await.unwrap();
    engine.close().await;
}

#[tokio::test]
async fn an_inspection_does_not_wait_for_the_token_of_the_next_owner() {
    let Some(engine) = profiled().await else { return };
    let locks = engine.locks();
    locks.insert_one(without_token("n")).await.unwrap();
    let others = async {
        loop {
            let next = without_token("n");
            locks.replace_one(doc! { "_id": "n" }, next).await.unwrap();
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    let inspecting = async {
        let mut fewest = u64::MAX;
        // The machine may stand still, and then the owner stays the same.
        for _ in 0..10 {
            let before = queries(&engine, "n").await;
            assert!(engine.inspect(&key("n")).await.unwrap().is_some());
            fewest = fewest.min(queries(&engine, "n").await - before);
        }
        fewest
    };
    tokio::select! {
        fewest = inspecting => assert_eq!(fewest, 2),
        () = others => {}
    }
    drop_database(&engine).await;
}

#[tokio::test]
async fn a_list_of_several_pages_waits_once_for_tokens() {
    let Some(engine) = profiled().await else { return };
    let mut documents: Vec<Document> = (0..2500).map(|at| without_token(&format!("n{at:04}"))).collect();
    // One new lease in each page.
    let later = DateTime::from_millis(DateTime::now().timestamp_millis() + 20_000);
    for (at, document) in documents.iter_mut().enumerate() {
        if at % 1000 == 7 {
            // New for long enough, also where the machine stands still.
            document.get_document_mut("holder").unwrap().insert("since", later);
        } else {
            document.insert(
                "fence",
                Bson::Timestamp(mongodb::bson::Timestamp { time: 1, increment: 1 }),
            );
        }
    }
    engine.locks().insert_many(documents).await.unwrap();
    let listed = engine.list("", LONG).await.unwrap();
    assert_eq!(listed.len(), 2500);
    assert_eq!(listed.iter().filter(|info| info.fence.is_none()).count(), 3);
    assert!(listed.is_sorted_by(|a, b| a.name < b.name));
    let repeated = doc! { "$exists": true };
    let ids = ["n0007", "n1007", "n2007"];
    let namespace = engine.locks().namespace();
    let profile: Collection<Document> = engine
        .pool
        .connected()
        .client
        .database(&namespace.db)
        .collection("system.profile");
    let again = doc! { "op": "query", "command.filter._id.$in": { "$all": ids.to_vec() } };
    assert_eq!(profile.count_documents(again).await.unwrap(), 3);
    let any = doc! { "op": "query", "command.filter._id.$in": repeated };
    assert_eq!(profile.count_documents(any).await.unwrap(), 3);
    drop_database(&engine).await;
}
