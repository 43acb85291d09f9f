//! The queue on a replica set, beyond the contract.

pub(super) mod shares;

use super::*;
use crate::engine::local_waiters::HEARTBEAT_INTERVAL;
use crate::engine::mongodb::fields::QUEUE;
use crate::engine::mongodb::queue::change_event::Change;
use crate::engine::{EngineExt, Subscription};

/// Creates a claim that waits.
pub(super) fn waiting(names: &[&str]) -> Claim {
    let mut claim = claim(names, LONG);
    claim.waiting = true;
    claim
}

/// Acquires a free name.
pub(super) async fn hold(engine: &MongodbEngine, name: &str) -> Claim {
    let holder = claim(&[name], LONG);
    granted(engine, &holder).await;
    holder
}

/// Enters the queue of a busy name.
pub(super) async fn wait(engine: &MongodbEngine, claim: &Claim) -> Box<dyn Subscription> {
    let subscription = engine.subscribe(claim, &claim.keys()[0]).await.unwrap();
    busy(engine, claim).await;
    subscription
}

pub(super) async fn notified(subscription: &mut Box<dyn Subscription>) {
    tokio::time::timeout(Duration::from_secs(10), subscription.changed())
        .await
        .expect("no notification within 10 s");
}

pub(super) async fn quiet(subscription: &mut Box<dyn Subscription>, millis: u64) {
    let changed = tokio::time::timeout(Duration::from_millis(millis), subscription.changed()).await;
    assert!(changed.is_err(), "an unnecessary notification");
}

pub(super) async fn release(engine: &MongodbEngine, claim: &Claim) {
    assert_eq!(engine.release(claim, Duration::ZERO).await.unwrap(), Released::Freed);
}

/// Returns the waiters, first to last.
pub(super) async fn positions(engine: &MongodbEngine, name: &str) -> Vec<String> {
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

/// Creates two engines, which are two processes for the store, on a separate collection.
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

/// Runs a case up to five times, until it succeeds. It returns what was wrong.
pub(super) async fn two_succeed<F: Future<Output = Result<(), &'static str>>>(
    case: impl Fn(Arc<MongodbEngine>, Arc<MongodbEngine>) -> F,
) {
    one_succeeds(async |_| {
        let mut outcome = Ok(());
        let (case, result) = (&case, &mut outcome);
        two(move |ours, theirs| async move { *result = case(ours, theirs).await }).await;
        outcome
    })
    .await;
}

/// Runs a case, which returns how long something took, up to five times, until that is less than `limit`.
pub(super) async fn two_within<F: Future<Output = Duration>>(
    limit: Duration,
    case: impl Fn(Arc<MongodbEngine>, Arc<MongodbEngine>) -> F,
) {
    one_is_faster(limit, async || {
        let mut took = Duration::ZERO;
        let (case, measured) = (&case, &mut took);
        two(move |ours, theirs| async move { *measured = case(ours, theirs).await }).await;
        took
    })
    .await;
}

#[tokio::test]
async fn only_the_next_waiter_is_notified() {
    two(|ours, theirs| async move {
        let holder = hold(&ours, "n").await;
        let (first, second, elsewhere) = (waiting(&["n"]), waiting(&["n"]), waiting(&["m"]));
        let other = claim(&["m"], LONG);
        granted(&ours, &other).await;
        let mut first_changes = wait(&theirs, &first).await;
        let mut second_changes = wait(&theirs, &second).await;
        let mut elsewhere_changes = wait(&theirs, &elsewhere).await;
        ours.renew(&holder, Ttl::clamped(LONG * 2)).await.unwrap();
        granted(&ours, &holder).await;
        quiet(&mut first_changes, 300).await;
        release(&ours, &holder).await;
        notified(&mut first_changes).await;
        let info = theirs.inspect(&key("n")).await.unwrap().unwrap();
        assert_eq!((info.fence, info.holder), (None, None), "it is not held yet");
        assert!(
            info.remaining.unwrap() <= Duration::from_secs(2),
            "the reservation is short"
        );
        quiet(&mut second_changes, 300).await;
        quiet(&mut elsewhere_changes, 1).await;
        granted(&theirs, &first).await;
        let info = theirs.inspect(&key("n")).await.unwrap().unwrap();
        assert!(info.fence.is_some() && info.remaining.unwrap() > LONG / 2, "{info:?}");
        release(&theirs, &first).await;
        notified(&mut second_changes).await;
        granted(&theirs, &second).await;
        release(&theirs, &second).await;
        assert_eq!(document(&ours, "n").await, None, "there are no waiters any more");
    })
    .await;
}

#[tokio::test]
async fn tokens_grow_with_each_hand_off_and_after_the_last() {
    two(|ours, theirs| async move {
        let mut last = Fence(0);
        for round in 0..5 {
            let holder = claim(&["n"], LONG);
            let mut fences = vec![granted(&ours, &holder).await];
            let waiters: Vec<Claim> = (0..4).map(|_| waiting(&["n"])).collect();
            for waiter in &waiters {
                busy(&theirs, waiter).await;
            }
            release(&ours, &holder).await;
            for waiter in &waiters {
                let fence = granted(&theirs, waiter).await;
                assert_eq!(granted(&theirs, waiter).await, fence, "the same to a retry");
                let shown = ours.inspect(&key("n")).await.unwrap().unwrap().fence;
                assert_eq!(shown, Some(fence));
                fences.push(fence);
                release(&theirs, waiter).await;
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
async fn a_position_keeps_its_number_when_a_gist_process_releases_the_name() {
    two(|ours, theirs| async move {
        assert!(gist_acquires(&ours.locks(), "n", LONG).await);
        let (first, second, third) = (waiting(&["n"]), waiting(&["n"]), waiting(&["n"]));
        let mut first_changes = wait(&ours, &first).await;
        let mut second_changes = wait(&theirs, &second).await;
        let mut third_changes = wait(&ours, &third).await;
        assert_eq!(positions(&ours, "n").await.len(), 3);
        ours.locks().delete_one(doc! { "_id": "n" }).await.unwrap();
        notified(&mut first_changes).await;
        notified(&mut second_changes).await;
        granted(&ours, &first).await;
        // The third is notified a little later, and returns before the second.
        notified(&mut third_changes).await;
        busy(&ours, &third).await;
        busy(&theirs, &second).await;
        let order: Vec<String> = [&second, &third].map(|claim| claim.owner.as_str().to_owned()).into();
        assert_eq!(positions(&ours, "n").await, order);
        release(&ours, &first).await;
        notified(&mut second_changes).await;
        granted(&theirs, &second).await;
    })
    .await;
}

#[tokio::test]
async fn an_expired_gist_lock_goes_to_the_first_waiter() {
    two(|ours, theirs| async move {
        assert!(gist_acquires(&ours.locks(), "n", LONG).await);
        let (first, second) = (waiting(&["n"]), waiting(&["n"]));
        let mut first_changes = wait(&theirs, &first).await;
        let mut second_changes = wait(&ours, &second).await;
        let end = DateTime::from_millis(DateTime::now().timestamp_millis() + 200);
        let set = doc! { "$set": { "expiresAt": end } };
        ours.locks().update_one(doc! { "_id": "n" }, set).await.unwrap();
        // The queue hands off by itself. If the TTL monitor is faster, both are notified.
        // Each waiter is the first of its process, and polls.
        until_granted(&theirs, &mut first_changes, &first).await;
        release(&theirs, &first).await;
        until_granted(&ours, &mut second_changes, &second).await;
    })
    .await;
}

/// Makes an attempt with each notification until the claim is granted.
async fn until_granted(engine: &MongodbEngine, changes: &mut Box<dyn Subscription>, claim: &Claim) {
    for _ in 0..100 {
        notified(changes).await;
        if let Acquired::Granted { .. } = engine.try_acquire(claim).await.unwrap() {
            return;
        }
    }
    panic!("not granted after 100 attempts");
}

#[tokio::test]
async fn a_waiter_gets_the_name_of_a_dead_holder_at_the_end_of_the_lease() {
    two(|ours, theirs| async move {
        let ttl = HEARTBEAT_INTERVAL * 2 + Duration::from_millis(500);
        granted(&ours, &claim(&["n"], ttl)).await;
        let first = waiting(&["n"]);
        let mut first_changes = wait(&theirs, &first).await;
        let before = Instant::now();
        notified(&mut first_changes).await;
        assert!(before.elapsed() > ttl / 2, "an unnecessary notification");
        granted(&theirs, &first).await;
    })
    .await;
}

#[tokio::test]
async fn the_reservation_of_an_unknown_waiter_goes_to_the_next() {
    // Otherwise it is removed with a heartbeat, after 2 s.
    two_within(Duration::from_millis(1400), |ours, theirs| async move {
        let holder = hold(&ours, "n").await;
        let (unknown, next) = (waiting(&["n"]), waiting(&["n"]));
        busy(&theirs, &unknown).await;
        theirs.queue.as_ref().unwrap().known.leave(&unknown.owner);
        let mut next_changes = wait(&theirs, &next).await;
        let released = Instant::now();
        release(&ours, &holder).await;
        notified(&mut next_changes).await;
        granted(&theirs, &next).await;
        released.elapsed()
    })
    .await;
}

#[tokio::test]
async fn a_late_event_of_a_confirmed_hand_off_changes_nothing() {
    two(|ours, theirs| async move {
        let holder = hold(&ours, "n").await;
        let first = waiting(&["n"]);
        busy(&theirs, &first).await;
        release(&ours, &holder).await;
        granted(&theirs, &first).await;
        let queue = theirs.queue.as_ref().unwrap();
        for _ in 0..3 {
            queue.deliver(Change::HandedOff {
                id: "n".into(),
                owner: first.owner.clone(),
            });
            tokio::time::sleep(Duration::from_millis(100)).await;
            assert_eq!(theirs.renew(&first, first.ttl).await.unwrap(), Renewed::Extended);
        }
        release(&theirs, &first).await;
    })
    .await;
}

#[tokio::test]
async fn a_reserved_name_is_not_held() {
    two(|ours, theirs| async move {
        let holder = hold(&ours, "n").await;
        let first = waiting(&["n"]);
        busy(&theirs, &first).await;
        release(&ours, &holder).await;
        assert_eq!(theirs.renew(&first, first.ttl).await.unwrap(), Renewed::Lost);
        let heir = OwnerToken::fresh();
        assert_eq!(theirs.transfer(&first, &heir).await.unwrap(), Renewed::Lost);
        let released = theirs.release(&first, Duration::ZERO).await.unwrap();
        assert_eq!(released, Released::NotHeld);
        assert_eq!(document(&ours, "n").await, None, "there was no other waiter");
    })
    .await;
}

#[tokio::test]
async fn waiters_of_a_dead_process_are_skipped() {
    two(|ours, theirs| async move {
        let holder = hold(&ours, "n").await;
        let (dead, next) = (waiting(&["n"]), waiting(&["n"]));
        drop(wait(&theirs, &dead).await);
        let mut next_changes = wait(&ours, &next).await;
        // The process sends no heartbeats any more.
        theirs.close().await;
        theirs.queue.as_ref().unwrap().known.leave(&dead.owner);
        eventually("its position has expired", async || {
            let document = document(&ours, "n").await.unwrap();
            let first = document.get_array(QUEUE).unwrap()[0].as_document().unwrap().clone();
            *first.get_datetime("until").unwrap() < DateTime::now()
        })
        .await;
        release(&ours, &holder).await;
        notified(&mut next_changes).await;
        granted(&ours, &next).await;
        assert_eq!(
            positions(&ours, "n").await,
            [dead.owner.as_str()],
            "its position is kept for a while"
        );
    })
    .await;
}

#[tokio::test]
async fn a_heartbeat_keeps_the_positions_of_many_names() {
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
            eventually("a heartbeat", async || until(name).await > before).await;
        }
        // A removed position is created again.
        let empty: Vec<Document> = Vec::new();
        ours.locks()
            .update_one(doc! { "_id": "n3" }, doc! { "$set": { QUEUE: empty } })
            .await
            .unwrap();
        let mut subscription = theirs.subscribe(&waiters[3], &key("n3")).await.unwrap();
        notified(&mut subscription).await;
        busy(&theirs, &waiters[3]).await;
        assert_eq!(positions(&ours, "n3").await, [waiters[3].owner.as_str()]);
    })
    .await;
}

#[tokio::test]
async fn force_release_hands_off() {
    two(|ours, theirs| async move {
        let holder = hold(&ours, "n").await;
        let first = waiting(&["n"]);
        let mut first_changes = wait(&theirs, &first).await;
        assert!(ours.force_release(&key("n")).await.unwrap());
        notified(&mut first_changes).await;
        busy(&ours, &claim(&["n"], LONG)).await;
        granted(&theirs, &first).await;
        assert_eq!(ours.renew(&holder, holder.ttl).await.unwrap(), Renewed::Lost);
    })
    .await;
}

/// Returns an earlier position of another process, which is live for `millis` more.
fn position_of(owner: &str, at: i64, millis: i64) -> Document {
    let until = DateTime::from_millis(DateTime::now().timestamp_millis() + millis);
    doc! { "owner": owner, "process": "elsewhere", "at": at, "until": until, "hold": 2000_i64 }
}

async fn fill(engine: &MongodbEngine, positions: Vec<Document>) {
    let set = doc! { "$set": { QUEUE: positions } };
    engine.locks().update_one(doc! { "_id": "n" }, set).await.unwrap();
}

#[tokio::test]
async fn positions_without_heartbeats_are_removed() {
    two(|ours, theirs| async move {
        granted(&ours, &claim(&["n"], LONG)).await;
        fill(
            &ours,
            vec![position_of("gone", 1, -61_000), position_of("silent", 2, -50_000)],
        )
        .await;
        let waiter = waiting(&["n"]);
        busy(&theirs, &waiter).await;
        assert_eq!(positions(&ours, "n").await, ["silent", waiter.owner.as_str()]);
    })
    .await;
}

#[tokio::test]
async fn a_waiter_polls_while_the_queue_is_full() {
    two(|ours, theirs| async move {
        let holder = hold(&ours, "n").await;
        let crowd = (0..10_000).map(|at| position_of(&format!("{at:032x}"), at, 3_600_000));
        fill(&ours, crowd.collect()).await;
        let waiter = waiting(&["n"]);
        let mut subscription = wait(&theirs, &waiter).await;
        assert_eq!(positions(&ours, "n").await.len(), 10_000);
        // A waiter without a position polls.
        notified(&mut subscription).await;
        fill(&ours, Vec::new()).await;
        release(&ours, &holder).await;
        granted(&theirs, &waiter).await;
    })
    .await;
}

/// A name that always has waiters keeps its document and its stamp.
#[tokio::test]
async fn tokens_do_not_run_out_with_hand_offs() {
    two(|ours, theirs| async move {
        let holder = hold(&ours, "n").await;
        let set = doc! { "$set": { "handed": 99_998_i64 } };
        ours.locks().update_one(doc! { "_id": "n" }, set).await.unwrap();
        let mut last = ours.inspect(&key("n")).await.unwrap().unwrap().fence.unwrap();
        let waiters: Vec<Claim> = (0..4).map(|_| waiting(&["n"])).collect();
        for waiter in &waiters {
            busy(&theirs, waiter).await;
        }
        // In reality this many hand-offs take longer, and the server's clock ticks with each.
        tokio::time::sleep(Duration::from_millis(1100)).await;
        release(&ours, &holder).await;
        for waiter in &waiters {
            let fence = granted(&theirs, waiter).await;
            assert!(fence > last, "{fence:?} after {last:?}");
            last = fence;
            release(&theirs, waiter).await;
        }
        assert!(last.0 % 1_000_000 < 99_998, "a new stamp");
    })
    .await;
}
