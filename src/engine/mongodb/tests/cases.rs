//! Test cases for every deployment.

use mongodb::IndexModel;
use mongodb::options::IndexOptions;

use super::*;
use crate::engine::EngineExt;
use crate::engine::mongodb::ttl_index;

pub(super) async fn a_gist_process_and_this_one_exclude_each_other(engine: Arc<MongodbEngine>) {
    let locks = &engine.locks();
    let ours = claim(&["n"], LONG);
    granted(&engine, &ours).await;
    assert!(!gist_acquires(locks, "n", LONG).await);
    assert_eq!(engine.release(&ours, Duration::ZERO).await.unwrap(), Released::Freed);
    assert_eq!(document(&engine, "n").await, None, "a gist process would wait for it");

    assert!(gist_acquires(locks, "n", LONG).await);
    assert!(busy(&engine, &claim(&["n"], LONG)).await.unwrap() > LONG / 2);
    let info = engine.inspect(&key("n")).await.unwrap().unwrap();
    assert_eq!((info.fence, info.holder, info.metadata), (None, None, None));
    assert_eq!(engine.renew(&ours, ours.ttl).await.unwrap(), Renewed::Lost);
    assert_eq!(engine.release(&ours, Duration::ZERO).await.unwrap(), Released::NotHeld);
    locks.delete_one(doc! { "_id": "n" }).await.unwrap();
    granted(&engine, &ours).await;
    // The gist deletes the document of any owner.
    locks.delete_one(doc! { "_id": "n" }).await.unwrap();
    assert_eq!(engine.renew(&ours, ours.ttl).await.unwrap(), Renewed::Lost);

    // The expired document must not prevent the grant. The TTL monitor may delete it first.
    assert!(gist_acquires(locks, "n", Duration::from_millis(50)).await);
    tokio::time::sleep(Duration::from_millis(80)).await;
    let short = claim(&["n"], Duration::from_millis(50));
    granted(&engine, &short).await;
    let deadline = Instant::now() + Duration::from_secs(90);
    while !gist_acquires(locks, "n", LONG).await {
        assert!(Instant::now() < deadline, "the TTL index does not clean up");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

pub(super) async fn a_document_without_a_valid_end_is_never_acquired(engine: Arc<MongodbEngine>) {
    for (name, other) in [
        ("bare", doc! {}),
        ("text", doc! { "expiresAt": "soon" }),
        ("null", doc! { "expiresAt": null }),
    ] {
        let mut foreign = doc! { "_id": name };
        foreign.extend(other);
        engine.locks().insert_one(&foreign).await.unwrap();
        assert_eq!(busy(&engine, &claim(&[name], LONG)).await, None, "{name}");
        assert_eq!(document(&engine, name).await, Some(foreign));
        assert_eq!(engine.inspect(&key(name)).await.unwrap().unwrap().remaining, None);
        assert!(engine.force_release(&key(name)).await.unwrap());
        granted(&engine, &claim(&[name], LONG)).await;
    }
}

pub(super) async fn text_of_users_is_no_expression(engine: Arc<MongodbEngine>) {
    for text in ["$$NOW", "$owner", "$literal", "{\"$add\":[1]}", "a.b", "nul\0nul"] {
        let mut ours = claim(&[text], LONG);
        ours.metadata = Some(text.into());
        ours.process = Arc::new(Process {
            host: text.to_owned(),
            pid: u32::MAX,
        });
        granted(&engine, &ours).await;
        let info = engine.inspect(&key(text)).await.unwrap().unwrap();
        assert_eq!(info.name, text);
        let written = document(&engine, text).await.unwrap();
        assert_eq!(written.get_str("metadata").unwrap(), text);
        assert_eq!(info.holder.unwrap().process, *ours.process);
        assert_eq!(engine.release(&ours, Duration::ZERO).await.unwrap(), Released::Freed);
    }
}

pub(super) async fn fencing_tokens_grow_in_the_order_of_the_holders(engine: Arc<MongodbEngine>) {
    let seen = Arc::new(std::sync::Mutex::new(Vec::new()));
    let mut tasks = Vec::new();
    for task in 0..8 {
        let (engine, seen) = (engine.clone(), seen.clone());
        tasks.push(tokio::spawn(async move {
            for round in 0..12 {
                let names: &[&str] = if (task + round) % 3 == 0 { &["m", "n"] } else { &["n"] };
                let ours = claim(names, LONG);
                let fence = loop {
                    if let Acquired::Granted { fence } = engine.try_acquire(&ours).await.unwrap() {
                        break fence;
                    }
                    tokio::time::sleep(Duration::from_micros(fastrand::u64(200..3000))).await;
                };
                seen.lock().unwrap().push(fence);
                assert_eq!(engine.release(&ours, Duration::ZERO).await.unwrap(), Released::Freed);
            }
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    let seen = seen.lock().unwrap();
    assert_eq!(seen.len(), 96);
    assert!(seen.windows(2).all(|pair| pair[0] < pair[1]), "{seen:?}");
}

pub(super) async fn a_retry_returns_the_same_fencing_token_as_inspect(engine: Arc<MongodbEngine>) {
    for names in [&["n"][..], &["m", "n", "o"]] {
        let ours = claim(names, LONG);
        let first = granted(&engine, &ours).await;
        // Where the token was not written yet, the retry gets another one.
        let fence = granted(&engine, &ours).await;
        assert!(fence >= first, "{fence:?} after {first:?}");
        for name in names {
            assert_eq!(
                engine.inspect(&key(name)).await.unwrap().unwrap().fence,
                Some(fence),
                "{name}"
            );
        }
        assert_eq!(granted(&engine, &ours).await, fence);
        engine.release(&ours, Duration::ZERO).await.unwrap();
    }
}

/// The first step of an attempt was made, the second was not.
pub(super) async fn an_unstamped_document_of_this_owner_is_granted(engine: Arc<MongodbEngine>) {
    let ours = claim(&["m", "n"], LONG);
    let first = granted(&engine, &ours).await;
    for name in ["m", "n"] {
        assert_eq!(engine.inspect(&key(name)).await.unwrap().unwrap().fence, Some(first));
    }
    engine
        .locks()
        .update_one(doc! { "_id": "n" }, doc! { "$unset": { "fence": 1 } })
        .await
        .unwrap();
    let second = granted(&engine, &ours).await;
    assert!(second > first, "another owner may have had \"n\" in between");
    for name in ["m", "n"] {
        assert_eq!(
            engine.inspect(&key(name)).await.unwrap().unwrap().fence,
            Some(second),
            "{name}"
        );
    }
}

pub(super) async fn a_release_removes_expired_documents_of_its_owner(engine: Arc<MongodbEngine>) {
    for keep in [Duration::ZERO, LONG] {
        let ours = claim(&["m", "n"], LONG);
        granted(&engine, &ours).await;
        let past = DateTime::from_millis(DateTime::now().timestamp_millis() - 10);
        engine
            .locks()
            .update_one(doc! { "_id": "m" }, doc! { "$set": { "expiresAt": past } })
            .await
            .unwrap();
        assert_eq!(engine.release(&ours, keep).await.unwrap(), Released::NotHeld);
        assert_eq!(document(&engine, "m").await, None);
        assert_eq!(document(&engine, "n").await.is_some(), keep == LONG);
    }
}

pub(super) async fn the_ttl_index_is_created_or_accepted(engine: Arc<MongodbEngine>) {
    let ttl = |name: &str, after: Option<u64>| {
        let options = IndexOptions::builder()
            .name(name.to_owned())
            .expire_after(after.map(Duration::from_secs));
        IndexModel::builder()
            .keys(doc! { "expiresAt": 1 })
            .options(options.build())
            .build()
    };
    let locks = &engine.locks();
    ttl_index::ensure(locks).await.unwrap();
    assert_eq!(locks.list_index_names().await.unwrap(), ["_id_", "expiresAt_1"]);
    locks.drop_indexes().await.unwrap();
    locks.create_index(ttl("mine", Some(0))).await.unwrap();
    ttl_index::ensure(locks).await.unwrap();
    assert_eq!(locks.list_index_names().await.unwrap(), ["_id_", "mine"]);
    for after in [None, Some(3600)] {
        locks.drop_indexes().await.unwrap();
        locks.create_index(ttl("mine", after)).await.unwrap();
        let error = ttl_index::ensure(locks).await.unwrap_err();
        assert!(!error.retryable);
        assert!(error.to_string().contains("expireAfterSeconds: 0"), "{error}");
    }
}
