//! The queue on a replica set, beyond the contract.

use super::super::event::Change;
use super::super::queue::QUEUE;
use super::*;
use crate::engine::Subscription;
use crate::engine::local_waiters::HEARTBEAT_INTERVAL;

/// A claim that is ready to wait.
pub(super) fn waiting(names: &[&str]) -> Claim {
    let mut claim = claim(names, LONG);
    claim.waiting = true;
    claim
}

/// Takes a free name.
pub(super) async fn hold(engine: &MongodbEngine, name: &str) -> Claim {
    let holder = claim(&[name], LONG);
    granted(engine, &holder).await;
    holder
}

/// Takes a place in the queue of a busy name.
pub(super) async fn wait(engine: &MongodbEngine, claim: &Claim) -> Box<dyn Subscription> {
    let subscription = engine.subscribe(claim, &claim.keys()[0]).await.unwrap();
    busy(engine, claim).await;
    subscription
}

pub(super) async fn told(subscription: &mut Box<dyn Subscription>) {
    tokio::time::timeout(Duration::from_secs(10), subscription.changed())
        .await
        .expect("told within 10 s");
}

async fn quiet(subscription: &mut Box<dyn Subscription>, millis: u64) {
    let told = tokio::time::timeout(Duration::from_millis(millis), subscription.changed()).await;
    assert!(told.is_err(), "told without need");
}

pub(super) async fn free(engine: &MongodbEngine, claim: &Claim) {
    assert_eq!(engine.release(claim, Duration::ZERO).await.unwrap(), Released::Freed);
}

/// Who waits, first to last.
pub(super) async fn places(engine: &MongodbEngine, name: &str) -> Vec<String> {
    let document = document(engine, name).await.unwrap_or_default();
    let queue = document.get_array(QUEUE).cloned().unwrap_or_default();
    let owners = queue.iter().map(|entry| entry.as_document().unwrap().get_str("owner"));
    owners.map(|owner| owner.unwrap().to_owned()).collect()
}

pub(super) async fn eventually(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !holds().await {
        assert!(Instant::now() < deadline, "not within 10 s: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Two engines, which the store takes for two processes, on a collection of their own.
pub(super) async fn two<F: Future<Output = ()>>(case: impl FnOnce(Arc<MongodbEngine>, Arc<MongodbEngine>) -> F) {
    with_own_collection(REPLICA_SET, |ours| async move {
        let settings = Settings {
            collection: ours.locks().name().to_owned(),
            ..Settings::default()
        };
        let theirs = connect(&url(REPLICA_SET).unwrap(), &settings).await.unwrap();
        case(ours, theirs.clone()).await;
        theirs.close().await;
    })
    .await;
}

#[tokio::test]
async fn only_the_one_whose_turn_it_is_is_told() {
    two(|ours, theirs| async move {
        let holder = hold(&ours, "n").await;
        let (first, second, elsewhere) = (waiting(&["n"]), waiting(&["n"]), waiting(&["m"]));
        let other = claim(&["m"], LONG);
        granted(&ours, &other).await;
        let mut told_first = wait(&theirs, &first).await;
        let mut told_second = wait(&theirs, &second).await;
        let mut told_elsewhere = wait(&theirs, &elsewhere).await;
        ours.renew(&holder, Ttl::clamped(LONG * 2)).await.unwrap();
        granted(&ours, &holder).await;
        quiet(&mut told_first, 300).await;
        free(&ours, &holder).await;
        told(&mut told_first).await;
        quiet(&mut told_second, 300).await;
        quiet(&mut told_elsewhere, 1).await;
        let info = theirs.inspect(&key("n")).await.unwrap().unwrap();
        assert_eq!((info.fence, info.holder), (None, None), "nobody holds it yet");
        assert!(
            info.remaining.unwrap() <= Duration::from_secs(2),
            "it is kept for a short while"
        );
        granted(&theirs, &first).await;
        let info = theirs.inspect(&key("n")).await.unwrap().unwrap();
        assert!(info.fence.is_some() && info.remaining.unwrap() > LONG / 2, "{info:?}");
        free(&theirs, &first).await;
        told(&mut told_second).await;
        granted(&theirs, &second).await;
        free(&theirs, &second).await;
        assert_eq!(document(&ours, "n").await, None, "nobody waits any more");
    })
    .await;
}

#[tokio::test]
async fn tokens_grow_from_hand_to_hand_and_after_it() {
    two(|ours, theirs| async move {
        let mut last = Fence(0);
        for round in 0..5 {
            let holder = claim(&["n"], LONG);
            let mut fences = vec![granted(&ours, &holder).await];
            let waiters: Vec<Claim> = (0..4).map(|_| waiting(&["n"])).collect();
            for waiter in &waiters {
                busy(&theirs, waiter).await;
            }
            free(&ours, &holder).await;
            for waiter in &waiters {
                let fence = granted(&theirs, waiter).await;
                assert_eq!(granted(&theirs, waiter).await, fence, "the same to a retry");
                let shown = ours.inspect(&key("n")).await.unwrap().unwrap().fence;
                assert_eq!(shown, Some(fence));
                fences.push(fence);
                free(&theirs, waiter).await;
            }
            for fence in fences {
                assert!(fence > last, "round {round}: {fence:?} after {last:?}");
                last = fence;
            }
        }
    })
    .await;
}

#[tokio::test]
async fn a_place_keeps_its_number_when_a_gist_process_frees_the_name() {
    two(|ours, theirs| async move {
        assert!(gist_acquires(&ours.locks(), "n", LONG).await);
        let (first, second, third) = (waiting(&["n"]), waiting(&["n"]), waiting(&["n"]));
        let mut told_first = wait(&ours, &first).await;
        let mut told_second = wait(&theirs, &second).await;
        let mut told_third = wait(&ours, &third).await;
        assert_eq!(places(&ours, "n").await.len(), 3);
        ours.locks().delete_one(doc! { "_id": "n" }).await.unwrap();
        told(&mut told_first).await;
        told(&mut told_second).await;
        granted(&ours, &first).await;
        // The third is told a moment later, and comes back before the second does.
        told(&mut told_third).await;
        busy(&ours, &third).await;
        busy(&theirs, &second).await;
        let order: Vec<String> = [&second, &third].map(|claim| claim.owner.as_str().to_owned()).into();
        assert_eq!(places(&ours, "n").await, order);
        free(&ours, &first).await;
        told(&mut told_second).await;
        granted(&theirs, &second).await;
    })
    .await;
}

#[tokio::test]
async fn an_expired_gist_lock_goes_to_the_first_who_waits() {
    two(|ours, theirs| async move {
        assert!(gist_acquires(&ours.locks(), "n", Duration::from_millis(700)).await);
        let (first, second) = (waiting(&["n"]), waiting(&["n"]));
        let mut told_first = wait(&theirs, &first).await;
        let mut told_second = wait(&ours, &second).await;
        // The queue moves by itself. Where the TTL monitor comes first, both are told.
        told(&mut told_first).await;
        granted(&theirs, &first).await;
        free(&theirs, &first).await;
        told(&mut told_second).await;
        granted(&ours, &second).await;
    })
    .await;
}

#[tokio::test]
async fn a_holder_that_died_needs_no_help_and_its_waiters_no_commands() {
    two(|ours, theirs| async move {
        let ttl = HEARTBEAT_INTERVAL * 2 + Duration::from_millis(500);
        granted(&ours, &claim(&["n"], ttl)).await;
        let first = waiting(&["n"]);
        let mut told_first = wait(&theirs, &first).await;
        let before = Instant::now();
        told(&mut told_first).await;
        assert!(before.elapsed() > ttl / 2, "told without need");
        granted(&theirs, &first).await;
    })
    .await;
}

#[tokio::test]
async fn a_waiter_that_is_not_known_any_more_hands_on() {
    two(|ours, theirs| async move {
        let holder = hold(&ours, "n").await;
        let (ghost, next) = (waiting(&["n"]), waiting(&["n"]));
        busy(&theirs, &ghost).await;
        theirs.line.as_ref().unwrap().known.leave(&ghost.owner);
        let mut told_next = wait(&theirs, &next).await;
        let released = Instant::now();
        free(&ours, &holder).await;
        told(&mut told_next).await;
        granted(&theirs, &next).await;
        assert!(
            released.elapsed() < Duration::from_secs(2),
            "the ghost's time was waited for"
        );
    })
    .await;
}

#[tokio::test]
async fn news_of_a_turn_that_was_taken_already_takes_nothing_away() {
    two(|ours, theirs| async move {
        let holder = hold(&ours, "n").await;
        let first = waiting(&["n"]);
        busy(&theirs, &first).await;
        free(&ours, &holder).await;
        granted(&theirs, &first).await;
        let line = theirs.line.as_ref().unwrap();
        for _ in 0..3 {
            line.deliver(Change::Handed {
                id: "n".to_owned(),
                owner: first.owner.clone(),
            });
            tokio::time::sleep(Duration::from_millis(100)).await;
            assert_eq!(theirs.renew(&first, first.ttl).await.unwrap(), Renewed::Extended);
        }
        free(&theirs, &first).await;
    })
    .await;
}

#[tokio::test]
async fn what_is_kept_for_a_waiter_is_not_held_by_it() {
    two(|ours, theirs| async move {
        let holder = hold(&ours, "n").await;
        let first = waiting(&["n"]);
        busy(&theirs, &first).await;
        free(&ours, &holder).await;
        assert_eq!(theirs.renew(&first, first.ttl).await.unwrap(), Renewed::Lost);
        let heir = OwnerToken::fresh();
        assert_eq!(theirs.transfer(&first, &heir).await.unwrap(), Renewed::Lost);
        let released = theirs.release(&first, Duration::ZERO).await.unwrap();
        assert_eq!(released, Released::NotHeld);
        assert_eq!(document(&ours, "n").await, None, "it was handed on, to nobody");
    })
    .await;
}

#[tokio::test]
async fn a_process_that_is_gone_is_passed_over() {
    two(|ours, theirs| async move {
        let holder = hold(&ours, "n").await;
        let (dead, next) = (waiting(&["n"]), waiting(&["n"]));
        drop(wait(&theirs, &dead).await);
        let mut told_next = wait(&ours, &next).await;
        // No sign of life comes from there any more.
        theirs.close().await;
        theirs.line.as_ref().unwrap().known.leave(&dead.owner);
        eventually("its sign of life is too old", async || {
            let document = document(&ours, "n").await.unwrap();
            let first = document.get_array(QUEUE).unwrap()[0].as_document().unwrap().clone();
            *first.get_datetime("until").unwrap() < DateTime::now()
        })
        .await;
        free(&ours, &holder).await;
        told(&mut told_next).await;
        granted(&ours, &next).await;
        assert_eq!(places(&ours, "n").await, [dead.owner.as_str()], "it might come back");
    })
    .await;
}

#[tokio::test]
async fn a_sign_of_life_keeps_many_names_at_once() {
    two(|ours, theirs| async move {
        let names: Vec<String> = (0..5).map(|i| format!("n{i}")).collect();
        let mut waiters = Vec::new();
        for name in &names {
            granted(&ours, &claim(&[name], LONG)).await;
            let waiter = waiting(&[name]);
            busy(&theirs, &waiter).await;
            waiters.push(waiter);
        }
        let until = async |name: &str| {
            let document = document(&ours, name).await.unwrap();
            let first = document.get_array(QUEUE).unwrap()[0].as_document().unwrap().clone();
            *first.get_datetime("until").unwrap()
        };
        for name in &names {
            let before = until(name).await;
            eventually("a sign of life", async || until(name).await > before).await;
        }
        // A place that is gone is taken again.
        let nobody: Vec<Document> = Vec::new();
        ours.locks()
            .update_one(doc! { "_id": "n3" }, doc! { "$set": { QUEUE: nobody } })
            .await
            .unwrap();
        let mut subscription = theirs.subscribe(&waiters[3], &key("n3")).await.unwrap();
        told(&mut subscription).await;
        busy(&theirs, &waiters[3]).await;
        assert_eq!(places(&ours, "n3").await, [waiters[3].owner.as_str()]);
    })
    .await;
}

#[tokio::test]
async fn force_release_hands_on() {
    two(|ours, theirs| async move {
        let holder = hold(&ours, "n").await;
        let first = waiting(&["n"]);
        let mut told_first = wait(&theirs, &first).await;
        assert!(ours.force_release(&key("n")).await.unwrap());
        told(&mut told_first).await;
        busy(&ours, &claim(&["n"], LONG)).await;
        granted(&theirs, &first).await;
        assert_eq!(ours.renew(&holder, holder.ttl).await.unwrap(), Renewed::Lost);
    })
    .await;
}

/// Open while anybody waits, and not for ever after.
#[tokio::test]
async fn the_stream_closes_and_opens_by_need() {
    two(|ours, theirs| async move {
        let is_open = || theirs.line.as_ref().unwrap().is_listening();
        let waiter = waiting(&["n"]);
        granted(&theirs, &waiter).await;
        assert!(!is_open(), "nobody waits");
        free(&theirs, &waiter).await;
        for _ in 0..2 {
            let holder = claim(&["n"], LONG);
            granted(&ours, &holder).await;
            let first = waiting(&["n"]);
            let mut told_first = wait(&theirs, &first).await;
            assert!(is_open());
            free(&ours, &holder).await;
            told(&mut told_first).await;
            granted(&theirs, &first).await;
            free(&theirs, &first).await;
            eventually("the stream is closed", async || !is_open()).await;
        }
    })
    .await;
}

/// Dropping the collection ends a stream as surely as a broken connection does.
#[tokio::test]
async fn a_stream_that_ended_is_opened_again_and_everybody_looks() {
    two(|ours, theirs| async move {
        granted(&ours, &claim(&["n"], LONG)).await;
        let first = waiting(&["n"]);
        let mut told_first = wait(&theirs, &first).await;
        ours.locks().drop().await.unwrap();
        told(&mut told_first).await;
        let taken = granted(&ours, &claim(&["m"], LONG)).await;
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            let holder = claim(&["k"], LONG);
            granted(&ours, &holder).await;
            let next = waiting(&["k"]);
            // Not before the new stream is open.
            let mut told_next = wait(&theirs, &next).await;
            free(&ours, &holder).await;
            let hint = tokio::time::timeout(Duration::from_millis(1000), told_next.changed()).await;
            let fence = granted(&theirs, &next).await;
            assert!(fence > taken);
            free(&theirs, &next).await;
            if hint.is_ok() {
                break;
            }
            assert!(Instant::now() < deadline, "no new stream");
        }
    })
    .await;
}

/// A place of somebody who came first, with a sign of life that counts for so long yet.
fn place_of(owner: &str, at: i64, millis: i64) -> Document {
    let until = DateTime::from_millis(DateTime::now().timestamp_millis() + millis);
    doc! { "owner": owner, "process": "elsewhere", "at": at, "until": until, "hold": 2000_i64 }
}

async fn fill(engine: &MongodbEngine, places: Vec<Document>) {
    let set = doc! { "$set": { QUEUE: places } };
    engine.locks().update_one(doc! { "_id": "n" }, set).await.unwrap();
}

#[tokio::test]
async fn places_that_nobody_keeps_alive_go_away() {
    two(|ours, theirs| async move {
        granted(&ours, &claim(&["n"], LONG)).await;
        fill(
            &ours,
            vec![place_of("gone", 1, -61_000), place_of("silent", 2, -50_000)],
        )
        .await;
        let waiter = waiting(&["n"]);
        busy(&theirs, &waiter).await;
        assert_eq!(places(&ours, "n").await, ["silent", waiter.owner.as_str()]);
    })
    .await;
}

#[tokio::test]
async fn a_full_queue_takes_nobody_and_loses_nobody() {
    two(|ours, theirs| async move {
        let holder = hold(&ours, "n").await;
        let crowd = (0..10_000).map(|at| place_of(&format!("{at:032x}"), at, 3_600_000));
        fill(&ours, crowd.collect()).await;
        let waiter = waiting(&["n"]);
        let mut subscription = wait(&theirs, &waiter).await;
        assert_eq!(places(&ours, "n").await.len(), 10_000);
        // Who has no place looks for itself.
        told(&mut subscription).await;
        fill(&ours, Vec::new()).await;
        free(&ours, &holder).await;
        granted(&theirs, &waiter).await;
    })
    .await;
}

/// A name that is waited for without a pause keeps its document, and its stamp, for ever.
#[tokio::test]
async fn tokens_do_not_run_out_from_hand_to_hand() {
    two(|ours, theirs| async move {
        let holder = hold(&ours, "n").await;
        let set = doc! { "$set": { "handed": 99_998_i64 } };
        ours.locks().update_one(doc! { "_id": "n" }, set).await.unwrap();
        let mut last = ours.inspect(&key("n")).await.unwrap().unwrap().fence.unwrap();
        let waiters: Vec<Claim> = (0..4).map(|_| waiting(&["n"])).collect();
        for waiter in &waiters {
            busy(&theirs, waiter).await;
        }
        // So many hand-offs take longer than this, and each lets the server's clock tick on.
        tokio::time::sleep(Duration::from_millis(1100)).await;
        free(&ours, &holder).await;
        for waiter in &waiters {
            let fence = granted(&theirs, waiter).await;
            assert!(fence > last, "{fence:?} after {last:?}");
            last = fence;
            free(&theirs, waiter).await;
        }
        assert!(last.0 % 1_000_000 < 99_998, "a new stamp");
    })
    .await;
}
