//! Tests of the tokens of grants that are one write.

use std::collections::{BTreeMap, HashMap};
use std::sync::Mutex;

use futures_util::TryStreamExt;
use mongodb::bson::Timestamp;

use super::*;
use crate::clock::Moment;
use crate::engine::EngineExt;
use crate::engine::mongodb::ops::clock_offset::ClockReading;
use crate::engine::mongodb::ops::fence::Stamp;

/// One grant: its claim and its token.
type Grants = Mutex<Vec<(Claim, Fence)>>;

/// What the oplog has of each owner.
#[derive(Default)]
struct Written {
    /// The timestamps of its inserts, by document.
    inserts: BTreeMap<String, Timestamp>,
    /// The last token that an update wrote: a stamp, or the time of the insert.
    token: Option<Timestamp>,
}

/// Reads the oplog of the engine's collection.
async fn written(engine: &MongodbEngine) -> HashMap<String, Written> {
    let oplog: Collection<Document> = engine.pool.connected().client.database("local").collection("oplog.rs");
    let namespace = engine.locks().namespace().to_string();
    let ours = doc! { "$or": [{ "ns": &namespace, "op": { "$in": ["i", "u"] } }, { "o.applyOps.ns": &namespace }] };
    let entries = oplog.find(ours).sort(doc! { "$natural": 1 });
    let entries: Vec<Document> = entries.await.unwrap().try_collect().await.unwrap();
    let mut written: HashMap<String, Written> = HashMap::new();
    let mut owners: HashMap<String, String> = HashMap::new();
    for entry in entries {
        let content = entry.get_document("o").unwrap();
        // Several inserts may be one entry.
        let operations: Vec<&Document> = match content.get_array("applyOps") {
            Ok(operations) => operations.iter().filter_map(Bson::as_document).collect(),
            Err(_) => vec![&entry],
        };
        for operation in operations {
            let content = operation.get_document("o").unwrap();
            if operation.get_str("op").unwrap() == "i" {
                let (id, owner) = (content.get_str("_id").unwrap(), content.get_str("owner").unwrap());
                owners.insert(id.to_owned(), owner.to_owned());
                let inserts = &mut written.entry(owner.to_owned()).or_default().inserts;
                inserts.insert(id.to_owned(), entry.get_timestamp("ts").unwrap());
            } else {
                // The changed fields, or a whole document.
                let changes = content.get_document("diff").unwrap_or(content);
                let parts = ["i", "u"].map(|part| changes.get_document(part).ok());
                let mut parts = parts.into_iter().flatten().chain([changes]);
                let token = parts.find_map(|part| part.get_timestamp("fence").ok());
                let owner = &owners[operation.get_document("o2").unwrap().get_str("_id").unwrap()];
                let of_owner = written.get_mut(owner).unwrap();
                of_owner.token = token.or(of_owner.token);
            }
        }
    }
    written
}

/// Acquires and releases a claim until it was granted.
async fn acquire_and_release(engine: &MongodbEngine, claim: Claim, grants: &Grants) {
    loop {
        if let Acquired::Granted { fence } = engine.try_acquire(&claim).await.unwrap() {
            grants.lock().unwrap().push((claim.clone(), fence));
            if fastrand::u8(..) < 8 {
                // The token is written in the meantime.
                tokio::time::sleep(Duration::from_millis(120)).await;
            }
            assert_eq!(engine.release(&claim, Duration::ZERO).await.unwrap(), Released::Freed);
            return;
        }
        tokio::time::sleep(Duration::from_micros(fastrand::u64(200..3000))).await;
    }
}

/// Several clients acquire free names, contended names and several names, some with leases that need a stamp.
#[tokio::test]
async fn tokens_are_the_times_of_the_inserts_in_the_oplog() {
    with_own_collection(REPLICA_SET, |engine| async move {
        let settings = Settings {
            collection: engine.locks().name().to_owned(),
            ..Settings::default()
        };
        let mut engines = vec![engine.clone()];
        for _ in 0..3 {
            engines.push(connect(&url(REPLICA_SET).unwrap(), &settings).await.unwrap());
        }
        let grants = Arc::new(Grants::default());
        let tasks: Vec<_> = (0..48)
            .map(|task| {
                let (engine, grants) = (engines[task % 4].clone(), grants.clone());
                tokio::spawn(async move {
                    for round in 0..25 {
                        let own = format!("own{task}");
                        let names = [own.as_str(), ["x", "y", "z"][round % 3], "all"];
                        let names = match (task + round) % 8 {
                            0 => &names[1..],
                            1 => &names[1..2],
                            2 => &names[..2],
                            _ => &names[..1],
                        };
                        let ttl = if (task + round) % 5 == 0 { 4 } else { 30 };
                        acquire_and_release(&engine, claim(names, Duration::from_secs(ttl)), &grants).await;
                    }
                })
            })
            .collect();
        for task in tasks {
            task.await.unwrap();
        }
        let written = written(&engine).await;
        let inserts = |owner: &OwnerToken| &written[owner.as_str()].inserts;
        let mut grants = std::mem::take(&mut *grants.lock().unwrap());
        assert_eq!(grants.len(), 48 * 25);
        let (mut long, mut by_one_write) = (0, 0);
        for (claim, fence) in &grants {
            let of_claim = inserts(&claim.owner);
            assert_eq!(of_claim.len(), claim.keys().len());
            let last = *of_claim.values().max().unwrap();
            let tick = Stamp::tick_of(*fence);
            let stamp = written[claim.owner.as_str()].token;
            assert_eq!(tick, stamp.unwrap_or(last), "inserted at {last:?}");
            assert!(tick >= last, "{tick:?} before the insert {last:?}");
            long += u32::from(claim.ttl.duration() == LONG);
            by_one_write += u32::from(tick == last);
        }
        // An estimate may be wrong where the machine stands still.
        assert!(
            by_one_write > long / 2 && by_one_write <= long,
            "{by_one_write} of {long}"
        );
        // The order of the grants of a name is that of their inserts.
        grants.sort_unstable_by_key(|(claim, _)| *inserts(&claim.owner).values().max().unwrap());
        for name in ["x", "y", "z", "all"] {
            let of_name: Vec<_> = grants
                .iter()
                .filter(|(claim, _)| claim.keys().contains(&key(name)))
                .map(|(claim, fence)| (inserts(&claim.owner)[name], *fence))
                .collect();
            let mut sorted = of_name.clone();
            sorted.sort_unstable();
            assert!(
                sorted.windows(2).all(|pair| pair[0].1 < pair[1].1),
                "{name}: {sorted:?}"
            );
        }
        for engine in &engines[1..] {
            engine.close().await;
        }
    })
    .await;
}

/// Acquires names. Returns the claim, its token, and the document of the last name, in which the token is missing: it is written soon, and
/// where the machine stands still, before the document is read.
pub(super) async fn granted_by_one_write(engine: &MongodbEngine, names: &[&str]) -> (Claim, Fence, Document) {
    let mut documents = Vec::new();
    while documents.len() < 5 {
        let ours = claim(names, LONG);
        let fence = granted(engine, &ours).await;
        let at_once = document(engine, names.last().unwrap()).await.unwrap();
        if !at_once.contains_key("fence") {
            return (ours, fence, at_once);
        }
        assert_eq!(engine.release(&ours, Duration::ZERO).await.unwrap(), Released::Freed);
        documents.push(at_once);
    }
    panic!("each document has its token at once: {documents:?}");
}

#[tokio::test]
async fn a_grant_is_one_write_and_its_token_is_written_later() {
    with_own_collection(REPLICA_SET, |engine| async move {
        for names in [&["n"][..], &["m", "n"]] {
            let (ours, fence, at_once) = granted_by_one_write(&engine, names).await;
            let since = at_once.get_document("holder").unwrap().get_datetime("since").unwrap();
            let lasts = at_once.get_datetime("expiresAt").unwrap().timestamp_millis() - since.timestamp_millis();
            assert_eq!(lasts, 32_000, "with the margin");
            let left = engine.inspect(&key("n")).await.unwrap().unwrap().remaining.unwrap();
            assert!(left > LONG - Duration::from_secs(5) && left <= LONG, "{left:?}");
            let listed = engine.list("", LONG).await.unwrap();
            assert!(listed.iter().all(|info| info.fence == Some(fence)), "{listed:?}");
            for name in names {
                let written = document(&engine, name).await.unwrap();
                assert_eq!(written.get_timestamp("fence").unwrap(), Stamp::tick_of(fence), "{name}");
            }
            assert_eq!(engine.release(&ours, Duration::ZERO).await.unwrap(), Released::Freed);
        }
    })
    .await;
}

/// The holder could not write the token.
#[tokio::test]
async fn a_renewal_and_a_transfer_write_a_missing_token() {
    with_own_collection(REPLICA_SET, |engine| async move {
        let mut ours = claim(&["m", "n"], LONG);
        let fence = granted(&engine, &ours).await;
        engine.unwritten.as_ref().unwrap().forget(&ours.owner);
        ours.fence = Some(fence);
        assert_eq!(engine.renew(&ours, ours.ttl).await.unwrap(), Renewed::Extended);
        let unset = doc! { "$unset": { "fence": 1 } };
        for renews in [true, false] {
            if !renews {
                engine.locks().update_many(doc! {}, unset.clone()).await.unwrap();
                let to = OwnerToken::fresh();
                assert_eq!(engine.transfer(&ours, &to).await.unwrap(), Renewed::Extended);
                ours.owner = to;
            }
            for name in ["m", "n"] {
                let written = document(&engine, name).await.unwrap();
                assert_eq!(
                    written.get_timestamp("fence").ok(),
                    Some(Stamp::tick_of(fence)),
                    "{name} {renews}"
                );
            }
        }
        assert_eq!(engine.release(&ours, Duration::ZERO).await.unwrap(), Released::Freed);
        assert!(granted(&engine, &claim(&["n"], LONG)).await > fence);
    })
    .await;
}

#[tokio::test]
async fn a_transfer_removes_the_margin_of_a_new_lease() {
    with_own_collection(REPLICA_SET, |engine| async move {
        for (names, is_restored) in [
            (&["n"][..], false),
            (&["n"], true),
            (&["m", "n"], false),
            (&["m", "n"], true),
        ] {
            let mut ours = claim(names, LONG);
            let fence = granted(&engine, &ours).await;
            // As where the process could not write the token.
            if is_restored {
                engine.unwritten.as_ref().unwrap().forget(&ours.owner);
                ours.fence = Some(fence);
            }
            let to = OwnerToken::fresh();
            assert_eq!(engine.transfer(&ours, &to).await.unwrap(), Renewed::Extended);
            for name in names {
                let moved = document(&engine, name).await.unwrap();
                let end = moved.get_datetime("expiresAt").unwrap().timestamp_millis();
                let left = end - DateTime::now().timestamp_millis();
                assert!(left <= LONG.as_millis() as i64, "{name}: {left} ms");
                assert_eq!(moved.get_timestamp("fence").ok(), Some(Stamp::tick_of(fence)), "{name}");
                assert_eq!(moved.get_str("owner").unwrap(), to.as_str());
            }
            ours.owner = to;
            assert_eq!(engine.release(&ours, Duration::ZERO).await.unwrap(), Released::Freed);
        }
    })
    .await;
}

/// The update that writes a token is late.
#[tokio::test]
async fn an_extended_lease_is_not_shortened() {
    with_own_collection(REPLICA_SET, |engine| async move {
        let mut ours = claim(&["n"], LONG);
        ours.fence = Some(granted(&engine, &ours).await);
        let extended = Ttl::new(4 * LONG).unwrap();
        for ttl in [Ttl::new(LONG / 3).unwrap(), extended] {
            assert_eq!(engine.renew(&ours, ttl).await.unwrap(), Renewed::Extended);
            let written = document(&engine, "n").await.unwrap();
            let end = written.get_datetime("expiresAt").unwrap().timestamp_millis();
            let left = end - DateTime::now().timestamp_millis();
            assert!(
                left <= ttl.max(ours.ttl).as_millis() as i64,
                "without the margin: {left}"
            );
            assert!(left > 20_000, "not shortened: {left}");
        }
        tokio::time::sleep(Duration::from_millis(300)).await;
        let left = engine.inspect(&key("n")).await.unwrap().unwrap().remaining.unwrap();
        assert!(left > 3 * LONG && left <= 4 * LONG, "{left:?}");
        assert_eq!(engine.release(&ours, Duration::ZERO).await.unwrap(), Released::Freed);
    })
    .await;
}

/// Without a recent reading, a server clock that was set back would not be detected.
#[tokio::test]
async fn a_short_lease_and_a_grant_without_a_verified_clock_have_a_stamp() {
    with_own_collection(REPLICA_SET, |engine| async move {
        let short = claim(&["short"], Duration::from_secs(4));
        granted(&engine, &short).await;
        assert!(document(&engine, "short").await.unwrap().contains_key("fence"));
        engine.clock_offset.forget();
        granted(&engine, &claim(&["n"], LONG)).await;
        assert!(document(&engine, "n").await.unwrap().contains_key("fence"));
        granted_by_one_write(&engine, &["m"]).await;
        // The timestamp refuses the first end, and the next lease has no margin.
        let now = Moment::now();
        engine.clock_offset.set(ClockReading {
            time: DateTime::from_millis(DateTime::now().timestamp_millis() - 10_000),
            sent: now,
            answered: now,
        });
        for name in ["refused", "next"] {
            granted(&engine, &claim(&[name], LONG)).await;
            assert!(document(&engine, name).await.unwrap().contains_key("fence"), "{name}");
        }
    })
    .await;
}
