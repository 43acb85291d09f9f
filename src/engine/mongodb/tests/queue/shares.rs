//! Shared names, beyond the contract.

use mongodb::bson::doc;

use super::*;
use crate::engine::Read;
use crate::engine::contract::refs;
use crate::engine::mongodb::fields::{EXPIRES_AT, GRANTED};
use crate::engine::mongodb::queue::hand_off::Grant;
use crate::model::Share;

pub(in crate::engine::mongodb::tests) fn share(permits: u32, limit: u32) -> Claim {
    let ttl = Ttl::new(LONG).unwrap();
    let process = Arc::new(Process::current());
    let mut claim = Claim::new(&[key("n").shared()], OwnerToken::fresh(), ttl, process);
    claim.share = Share::new(permits, limit);
    claim
}

fn waiting_share(permits: u32, limit: u32) -> Claim {
    let mut claim = share(permits, limit);
    claim.waiting = true;
    claim
}

async fn stored(engine: &MongodbEngine) -> Document {
    let id = doc! { "_id": { "shared": "n" } };
    engine.locks().find_one(id).await.unwrap().expect("a document")
}

async fn listed(engine: &MongodbEngine, list: &str) -> Vec<Document> {
    let entries = stored(engine).await.get_array(list).unwrap().clone();
    entries
        .iter()
        .map(|entry| entry.as_document().unwrap().clone())
        .collect()
}

async fn used(engine: &MongodbEngine) -> usize {
    let (key, waits_for_token) = (&key("n").shared(), true);
    engine.read(Read::Name { key, waits_for_token }).await.unwrap().len()
}

#[tokio::test]
async fn a_shared_name_is_a_document_that_no_reader_of_locks_finds() {
    with_own_collection(REPLICA_SET, |engine| async move {
        let holder = share(1, 2);
        granted(&engine, &holder).await;
        assert!(gist_acquires(&engine.locks(), "n", LONG).await);
        let names: Vec<String> = engine
            .list("", LONG)
            .await
            .unwrap()
            .into_iter()
            .map(|info| info.name)
            .collect();
        assert_eq!(names, ["n"]);
        assert!(engine.force_release(&key("n")).await.unwrap());
        let expires_at = async || {
            stored(&engine)
                .await
                .get_datetime(EXPIRES_AT)
                .unwrap()
                .timestamp_millis()
        };
        let hours = async || (expires_at().await - DateTime::now().timestamp_millis()) as f64 / 3_600_000.0;
        assert!(hours().await > 1.0, "longer than the lease");
        let longest = Ttl::new(Duration::from_secs(100 * 3600)).unwrap();
        assert_eq!(engine.renew(&holder, longest).await.unwrap(), Renewed::Extended);
        assert!(hours().await > 100.9);
        release(&engine, &holder).await;
        assert!((0.9..1.1).contains(&hours().await), "the token stays for an hour");
    })
    .await;
}

#[tokio::test]
async fn a_busy_attempt_for_a_share_writes_nothing() {
    with_own_collection(REPLICA_SET, |engine| async move {
        granted(&engine, &share(2, 2)).await;
        busy(&engine, &waiting_share(1, 2)).await;
        let before = stored(&engine).await;
        for _ in 0..3 {
            busy(&engine, &share(1, 2)).await;
            assert_eq!(stored(&engine).await, before);
        }
    })
    .await;
}

#[tokio::test]
async fn a_release_makes_all_first_waiters_holders_that_fit() {
    two(|ours, theirs| async move {
        let holder = share(3, 3);
        let last = granted(&ours, &holder).await;
        let mut waiters = [waiting_share(1, 3), waiting_share(2, 3), waiting_share(1, 3)];
        let mut subscriptions = Vec::new();
        for waiter in &waiters {
            subscriptions.push(wait(&theirs, waiter).await);
        }
        release(&ours, &holder).await;
        let mut fences = vec![last];
        for (waiter, changes) in waiters.iter_mut().zip(&mut subscriptions).take(2) {
            notified(changes).await;
            // Where the machine stood still, the event was late, and the waiter makes an attempt.
            let fence = match changes.take_hand_off() {
                Some(hand_off) => hand_off.fence,
                None => granted(&theirs, waiter).await,
            };
            fences.push(fence);
            assert_eq!(theirs.renew(waiter, waiter.ttl).await.unwrap(), Renewed::Extended);
            assert_eq!(granted(&theirs, waiter).await, fence);
        }
        assert!(fences.is_sorted() && fences[1] != fences[2], "{fences:?}");
        quiet(&mut subscriptions[2], 100).await;
        assert_eq!(listed(&ours, QUEUE).await.len(), 1);
        for waiter in &waiters[..2] {
            release(&theirs, waiter).await;
        }
        notified(&mut subscriptions[2]).await;
    })
    .await;
}

/// In the same command: the next heartbeat would find them, too.
#[tokio::test]
async fn a_waiter_that_leaves_makes_those_behind_it_holders() {
    two(|ours, theirs| async move {
        granted(&ours, &share(1, 3)).await;
        let heavy = waiting_share(3, 3);
        busy(&theirs, &heavy).await;
        for _ in 0..3 {
            busy(&ours, &waiting_share(1, 3)).await;
        }
        assert_eq!(theirs.release(&heavy, Duration::ZERO).await.unwrap(), Released::NotHeld);
        let left = (listed(&ours, "holders").await.len(), listed(&ours, QUEUE).await.len());
        assert_eq!(left, (3, 1), "holders and waiters");
    })
    .await;
}

#[tokio::test]
async fn a_batch_of_shares_is_granted_and_entered_in_its_order() {
    two(|ours, theirs| async move {
        let batch: Vec<Arc<Claim>> = (0..64).map(|_| Arc::new(waiting_share(1, 3))).collect();
        let granted_of = async |engine: &MongodbEngine, batch: &[Arc<Claim>]| {
            let mut granted = vec![false; batch.len()];
            let mut answer = |index: usize, answer: Result<Acquired, EngineError>| {
                granted[index] = matches!(answer.unwrap(), Acquired::Granted { .. });
            };
            engine.try_acquire_all(&refs(batch), &mut answer).await;
            granted
        };
        let first = granted_of(&ours, &batch).await;
        assert!(
            first[..3].iter().all(|granted| *granted) && !first[3..].contains(&true),
            "{first:?}"
        );
        assert_eq!((used(&theirs).await, listed(&ours, QUEUE).await.len()), (3, 61));
        // Again, with a new claim.
        let again = [&batch[1..5], &[Arc::new(waiting_share(1, 3))]].concat();
        assert_eq!(granted_of(&ours, &again).await, [true, true, false, false, false]);
        assert_eq!((used(&theirs).await, listed(&ours, QUEUE).await.len()), (3, 62));
        let answers = std::sync::Mutex::new(vec![None; batch.len()]);
        let mut answer = |index: usize, answer: Result<Released, EngineError>| {
            answers.lock().unwrap()[index] = Some(answer.unwrap());
        };
        ours.release_all(&refs(&batch), Duration::ZERO, &mut answer).await;
        let freed = answers.into_inner().unwrap();
        for (index, answer) in freed.into_iter().enumerate() {
            let expected = if index < 3 { Released::Freed } else { Released::NotHeld };
            assert_eq!(answer, Some(expected), "{index}");
        }
        assert_eq!(used(&theirs).await, 1, "the last one");
    })
    .await;
}

#[tokio::test]
async fn readers_behind_a_writer_are_granted_together() {
    two(|ours, theirs| async move {
        let writer = share(1000, 1000);
        granted(&ours, &writer).await;
        let readers: Vec<Arc<Claim>> = (0..600).map(|_| Arc::new(waiting_share(1, 1000))).collect();
        for readers in readers.chunks(64) {
            theirs
                .try_acquire_all(&refs(readers), &mut |_, answer| assert!(answer.is_ok()))
                .await;
        }
        release(&ours, &writer).await;
        assert_eq!(listed(&ours, "holders").await.len(), 600);
        theirs
            .release_all(&refs(&readers), Duration::ZERO, &mut |_, answer| {
                assert!(answer.is_ok())
            })
            .await;
        assert_eq!(used(&ours).await, 0);
    })
    .await;
}

#[tokio::test]
async fn the_share_of_an_unknown_waiter_goes_to_the_next() {
    two(|ours, theirs| async move {
        let holder = share(1, 1);
        granted(&ours, &holder).await;
        let (unknown, next) = (waiting_share(1, 1), waiting_share(1, 1));
        busy(&theirs, &unknown).await;
        theirs.queue.as_ref().unwrap().known.leave(&unknown.owner);
        let mut changes = wait(&theirs, &next).await;
        release(&ours, &holder).await;
        notified(&mut changes).await;
        granted(&theirs, &next).await;
    })
    .await;
}

#[tokio::test]
async fn a_late_event_releases_no_share_that_is_in_use() {
    two(|ours, theirs| async move {
        let holder = share(1, 1);
        granted(&ours, &holder).await;
        let waiter = waiting_share(1, 1);
        let mut changes = wait(&theirs, &waiter).await;
        release(&ours, &holder).await;
        notified(&mut changes).await;
        let text = stored(&ours).await.get_str(GRANTED).unwrap().to_owned();
        let (_, grant) = Grant::parse(text.trim_start()).unwrap();
        granted(&theirs, &waiter).await;
        drop(changes);
        for _ in 0..3 {
            let (id, grants) = (doc! { "shared": "n" }.into(), vec![grant.clone()]);
            theirs.queue.as_ref().unwrap().deliver(Change::Granted { id, grants });
            tokio::time::sleep(Duration::from_millis(100)).await;
            assert_eq!(theirs.renew(&waiter, waiter.ttl).await.unwrap(), Renewed::Extended);
        }
    })
    .await;
}

#[tokio::test]
async fn a_heartbeat_finds_a_share_whose_event_was_lost() {
    two(|ours, theirs| async move {
        let holder = share(2, 2);
        granted(&ours, &holder).await;
        let waiters = [waiting_share(1, 2), waiting_share(1, 2), waiting_share(1, 2)];
        let mut subscriptions = Vec::new();
        for waiter in &waiters {
            subscriptions.push(wait(&theirs, waiter).await);
        }
        let queue = theirs.queue.as_ref().unwrap();
        queue.watcher.hang();
        release(&ours, &holder).await;
        queue.deliver(Change::Gap);
        for (waiter, changes) in waiters.iter().zip(&mut subscriptions).take(2) {
            notified(changes).await;
            assert_eq!(changes.take_hand_off(), None);
            granted(&theirs, waiter).await;
        }
    })
    .await;
}

/// A dead process has positions in front. The next heartbeat after the end of its liveness skips them.
#[tokio::test]
async fn waiters_of_a_dead_process_are_skipped() {
    two(|ours, theirs| async move {
        let holder = share(2, 2);
        granted(&ours, &holder).await;
        for _ in 0..5 {
            busy(&theirs, &waiting_share(2, 2)).await;
        }
        let next = waiting_share(1, 2);
        let mut changes = wait(&ours, &next).await;
        theirs.close().await;
        release(&ours, &holder).await;
        let began = Instant::now();
        notified(&mut changes).await;
        while changes.take_hand_off().is_none() && busy_or_granted(&ours, &next).await {
            notified(&mut changes).await;
        }
        assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
    })
    .await;
}

async fn busy_or_granted(engine: &MongodbEngine, claim: &Claim) -> bool {
    matches!(engine.try_acquire(claim).await.unwrap(), Acquired::Held { .. })
}
