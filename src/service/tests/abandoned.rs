//! Tests of cancelled calls: what is sent and released, in which order, and in how many commands.

use std::sync::Mutex;
use std::sync::atomic::Ordering::SeqCst;

use super::faults::Fault;
use super::*;
use crate::engine::EngineExt;

/// Makes `count` concurrent calls, each for a different name.
async fn attempt_many(locks: &Locks, count: usize, wait: u64) -> Vec<Result<Outcome, LockError>> {
    let calls = (0..count).map(|i| {
        let locks = locks.clone();
        async move { attempt(&locks, &format!("n{i}"), options(600_000, wait)).await }
    });
    futures_util::future::join_all(calls).await
}

async fn count_held(engine: &Faulty) -> usize {
    engine.store().list("", STORE_TIMEOUT).await.unwrap().len()
}

#[tokio::test(start_paused = true)]
async fn an_attempt_that_was_not_sent_is_dropped_and_nothing_is_released() {
    let (engine, locks) = service();
    engine.set(Fault::HangUnsent);
    for outcome in attempt_many(&locks, 1000, 0).await {
        assert_eq!(code(outcome), Code::Store);
    }
    engine.set(Fault::None);
    tokio::time::sleep(Duration::from_secs(70)).await;
    assert_eq!(count_held(&engine).await, 0);
    let releases = (
        engine.releases.load(SeqCst),
        engine.release_batches.lock().unwrap().len(),
    );
    assert_eq!(releases, (0, 0), "there is nothing to release");
}

#[tokio::test(start_paused = true)]
async fn abandoned_claims_are_released_in_batches_once_the_store_answers() {
    let (engine, locks) = service();
    engine.set(Fault::Swallow);
    for outcome in attempt_many(&locks, 1000, 0).await {
        assert_eq!(code(outcome), Code::Store);
    }
    assert!(count_held(&engine).await > 500, "the store applied them");
    engine.hang();
    tokio::time::sleep(Duration::from_secs(20)).await;
    let batches = engine.release_batches.lock().unwrap().clone();
    assert!(
        batches.len() <= 24,
        "a store that does not answer gets few batches: {batches:?}"
    );
    engine.release_batches.lock().unwrap().clear();
    engine.set(Fault::None);
    tokio::time::sleep(STORE_TIMEOUT + ms(1000)).await;
    assert_eq!(count_held(&engine).await, 0);
    let batches = engine.release_batches.lock().unwrap().clone();
    assert!(
        batches.len() <= 12,
        "each claim once, and two repeats so far: {batches:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_doubtful_release_is_repeated_in_batches() {
    let (engine, locks) = service();
    engine.set(Fault::Late(3000));
    for outcome in attempt_many(&locks, 100, 0).await {
        assert_eq!(code(outcome), Code::Store);
    }
    engine.set(Fault::None);
    tokio::time::sleep(ms(4000)).await;
    assert_eq!(count_held(&engine).await, 100, "executed after the first releases");
    engine.release_batches.lock().unwrap().clear();
    tokio::time::sleep(ms(2500)).await;
    assert_eq!(count_held(&engine).await, 0);
    let batches = engine.release_batches.lock().unwrap().clone();
    assert!(batches.len() <= 10, "{batches:?}");
}

/// A name whose lease expired in an outage is made busy again for the rest of its minimum hold. The store executes the attempt, and its answer
/// is lost: the next one is of the same owner, so that no lease is left without an end.
#[tokio::test(start_paused = true)]
async fn a_minimum_hold_that_begins_again_has_one_owner() {
    let (engine, locks) = service();
    let min_hold = AcquireOptions {
        min_hold: ms(20_000),
        ..options(1000, 0)
    };
    let lease = take(&locks, "n", min_hold).await;
    engine.set(Fault::Refuse);
    assert!(locks.release(&lease).await.is_err());
    tokio::time::sleep(ms(2000)).await;
    engine.owners.lock().unwrap().clear();
    engine.set(Fault::LoseAttempts);
    tokio::time::sleep(ms(2000)).await;
    engine.set(Fault::None);
    tokio::time::sleep(ms(3000)).await;
    let owners = std::mem::take(&mut *engine.owners.lock().unwrap());
    assert!(owners.len() > 1 && owners.iter().all(|owner| *owner == owners[0]));
    assert!(is_busy(&locks, "n").await);
    tokio::time::sleep(ms(15_000)).await;
    assert!(!is_busy(&locks, "n").await);
}

#[tokio::test(start_paused = true)]
async fn a_close_releases_what_is_held_in_batches() {
    let (engine, locks) = service();
    for outcome in attempt_many(&locks, 1000, 0).await {
        assert!(matches!(outcome.unwrap(), Outcome::Acquired(_)));
    }
    locks.close().await;
    assert_eq!(count_held(&engine).await, 0);
    assert_eq!((locks.stats().released, locks.stats().held), (1000, 0));
    assert!(engine.release_batches.lock().unwrap().len() <= 5);
}

/// The calls of one tick are served in the order in which they were made.
#[tokio::test(start_paused = true)]
async fn waiters_of_one_name_make_one_attempt_at_a_time_in_the_order_of_their_calls() {
    for unordered in [false, true] {
        let (engine, locks) = service_with(!unordered, 0);
        // Replies that take different times would change the order of attempts in progress.
        engine.set(Fault::SlowReply(3));
        let served = Arc::new(Mutex::new(Vec::new()));
        let calls = (0..100).map(|i| {
            let (locks, served) = (locks.clone(), served.clone());
            async move {
                let lease = take(&locks, "n", options(30_000, 60_000)).await;
                served.lock().unwrap().push(i);
                locks.release(&lease).await.unwrap();
            }
        });
        futures_util::future::join_all(calls).await;
        assert_eq!(*served.lock().unwrap(), (0..100).collect::<Vec<_>>());
        assert_eq!(engine.max_concurrent.load(SeqCst), 1, "unordered: {unordered}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_waiter_that_is_cancelled_before_its_attempt_sends_nothing_and_delays_no_other() {
    let (engine, locks) = service();
    engine.set(Fault::SlowReply(100));
    let first = {
        let locks = locks.clone();
        tokio::spawn(async move { take(&locks, "n", options(30_000, 9000)).await })
    };
    settle().await;
    let abort = CancellationToken::new();
    let cancelled = {
        let (locks, abort) = (locks.clone(), abort.clone());
        tokio::spawn(async move {
            locks
                .acquire(Names::unique(&[key("n")]), options(30_000, 9000), Some(abort))
                .await
        })
    };
    let last = {
        let locks = locks.clone();
        tokio::spawn(async move { take(&locks, "n", options(30_000, 9000)).await })
    };
    settle().await;
    abort.cancel();
    assert!(matches!(cancelled.await.unwrap().unwrap(), Outcome::Aborted));
    let first = first.await.unwrap();
    tokio::time::sleep(ms(200)).await;
    assert_eq!(engine.attempts.load(SeqCst), 2, "of the first and of the last");
    locks.release(&first).await.unwrap();
    assert!(last.await.unwrap().is_held());
    let releases = (
        engine.releases.load(SeqCst),
        engine.release_batches.lock().unwrap().len(),
    );
    assert_eq!(releases, (1, 0), "of the first only");
}

#[tokio::test(start_paused = true)]
async fn a_resumed_call_goes_before_the_waiters_that_came_after_it() {
    let (_, locks) = service_with(false, 0);
    let lost = take(&locks, "n", options(1000, 0)).await;
    let served = Arc::new(Mutex::new(Vec::new()));
    let mut tasks = Vec::new();
    for (call, resumed) in [("later", None), ("resumed", Some(lost.arrival))] {
        let (locks, served) = (locks.clone(), served.clone());
        let options = AcquireOptions {
            resumed,
            ..options(30_000, 60_000)
        };
        tasks.push(tokio::spawn(async move {
            let lease = take(&locks, "n", options).await;
            served.lock().unwrap().push(call);
            locks.release(&lease).await.unwrap();
        }));
        settle().await;
    }
    locks.release(&lost).await.unwrap();
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!(*served.lock().unwrap(), ["resumed", "later"]);
}
