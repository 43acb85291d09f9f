//! Releases and attempts without an answer, attempts that the store executes late, and panics of an engine.

use std::sync::atomic::Ordering::SeqCst;

use super::faults::Fault;
use super::*;
use crate::engine::EngineExt;

/// Leaves claims on the list of abandoned claims whose releases have no answer (a dead node of a cluster, an attempt whose task
/// still waits for the server).
async fn abandon_hung(engine: &Faulty, locks: &Locks, count: usize) {
    engine.set(Fault::Swallow);
    let calls = (0..count).map(|i| {
        let locks = locks.clone();
        async move { attempt(&locks, &format!("hung{i}"), options(600_000, 0)).await }
    });
    for outcome in futures_util::future::join_all(calls).await {
        assert_eq!(code(outcome), Code::Store);
    }
    engine.set(Fault::HangSome);
}

#[tokio::test(start_paused = true)]
async fn a_close_releases_what_is_held_although_another_release_hangs() {
    let (engine, locks) = service();
    take(&locks, "mine", options(600_000, 0)).await;
    abandon_hung(&engine, &locks, 1).await;
    settle().await;
    engine.closes.store(true, SeqCst);
    locks.close().await;
    tokio::time::sleep(ms(10_000)).await;
    assert!(
        !held_in_store(&engine, "mine").await,
        "the store answers its release at once"
    );
}

#[tokio::test(start_paused = true)]
async fn abandoned_claims_that_can_be_released_do_not_wait_for_those_that_cannot() {
    let (engine, locks) = service();
    abandon_hung(&engine, &locks, 256).await;
    tokio::time::sleep(Duration::from_secs(10)).await;
    // One call is cancelled between the grant and its answer; the store answers its release at once.
    let abort = CancellationToken::new();
    engine.set(Fault::Swallow);
    let cancelled = {
        let (locks, abort) = (locks.clone(), abort.clone());
        tokio::spawn(async move {
            locks
                .acquire(Names::unique(&[key("fine")]), options(600_000, 0), Some(abort))
                .await
        })
    };
    settle().await;
    abort.cancel();
    assert!(matches!(cancelled.await.unwrap().unwrap(), Outcome::Aborted));
    engine.set(Fault::HangSome);
    tokio::time::sleep(ms(1000)).await;
    let after_1_s = held_in_store(&engine, "fine").await;
    tokio::time::sleep(Duration::from_secs(120)).await;
    let after_2_min = held_in_store(&engine, "fine").await;
    assert!(
        !after_1_s && !after_2_min,
        "held without a caller after 1 s: {after_1_s}, after 2 min: {after_2_min}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_close_releases_kept_leases_at_the_same_time() {
    let (engine, locks) = service();
    for i in 0..200 {
        let kept = AcquireOptions {
            min_hold: Duration::from_secs(15),
            ..options(600_000, 0)
        };
        take(&locks, &format!("n{i}"), kept).await;
    }
    engine.set(Fault::SlowReply(50));
    engine.closes.store(true, SeqCst);
    locks.close().await;
    engine.set(Fault::None);
    tokio::time::sleep(Duration::from_secs(16)).await;
    let left = engine.store().list("", STORE_TIMEOUT).await.unwrap().len();
    assert_eq!(
        left, 0,
        "200 leases, round trips of 50 ms, 5 s: these stay for ten minutes"
    );
}

#[tokio::test(start_paused = true)]
async fn an_attempt_that_is_executed_after_its_ttl_is_released() {
    let (engine, locks) = service();
    // The store executes the attempt 20 s later.
    engine.set(Fault::Late(20_000));
    assert_eq!(code(attempt(&locks, "n", options(10_000, 0)).await), Code::Store);
    engine.hang();
    tokio::time::sleep(Duration::from_secs(15)).await;
    engine.set(Fault::None);
    // The store answers again 20 s after the call. (The retries of the call are executed until 25 s after it.)
    tokio::time::sleep(ms(9000)).await;
    assert!(
        !held_in_store(&engine, "n").await,
        "a lock without a holder, 9 s after the store answers again"
    );
}

#[tokio::test(start_paused = true)]
async fn an_attempt_is_not_sent_after_its_call_was_aborted() {
    let (engine, locks) = service();
    let _held = take(&locks, "n", options(600_000, 0)).await;
    engine.gate.store(true, SeqCst);
    engine.set(Fault::SlowReply(1));
    let abort = CancellationToken::new();
    let mut calls = Vec::new();
    for i in 0..10 {
        let (locks, abort) = (locks.clone(), (i % 2 == 1).then(|| abort.clone()));
        calls.push(tokio::spawn(async move {
            locks
                .acquire(Names::unique(&[key("n")]), options(600_000, 3000), abort)
                .await
        }));
    }
    tokio::time::sleep(ms(100)).await;
    abort.cancel();
    tokio::time::sleep(ms(100)).await;
    engine.gate.store(false, SeqCst);
    tokio::time::sleep(ms(500)).await;
    let sent = engine.sent_owners.lock().unwrap().len();
    assert!(sent <= 5, "{sent} attempts were sent together, but only 5 had a caller");
}

#[tokio::test(start_paused = true)]
async fn a_name_is_usable_after_a_panic_in_its_attempts() {
    let (engine, locks) = service();
    let held = take(&locks, "n", options(600_000, 0)).await;
    engine.set(Fault::SlowReply(10));
    let mut calls = Vec::new();
    for _ in 0..3 {
        let locks = locks.clone();
        calls.push(tokio::spawn(async move {
            attempt(&locks, "n", options(600_000, 1000)).await
        }));
    }
    tokio::time::sleep(ms(5)).await;
    engine.set(Fault::Panic);
    tokio::time::sleep(ms(20_000)).await;
    engine.set(Fault::None);
    for call in calls {
        let _ = call.await;
    }
    locks.release(&held).await.unwrap();
    let next = attempt(&locks, "n", options(1000, 2000)).await;
    assert!(matches!(next, Ok(Outcome::Acquired(_))), "{next:?}");
}

#[tokio::test(start_paused = true)]
async fn the_list_does_not_keep_metadata() {
    let (engine, locks) = service();
    let metadata: Arc<str> = format!("\"{}\"", "x".repeat(1 << 20)).into();
    engine.set(Fault::Swallow);
    let with = AcquireOptions {
        metadata: Some(metadata.clone()),
        ..options(600_000, 0)
    };
    assert_eq!(code(attempt(&locks, "n", with).await), Code::Store);
    engine.set(Fault::None);
    tokio::time::sleep(Duration::from_secs(10)).await;
    // (The memory engine does not hold the name any more.)
    assert_eq!(
        Arc::strong_count(&metadata),
        1,
        "kept for a minute although the claim was released"
    );
}

#[tokio::test(start_paused = true)]
async fn an_attempt_without_an_answer_does_not_delay_the_first_waiter() {
    let (engine, locks) = service();
    let other = another(&engine);
    let held = take(&other, "n", options(600_000, 0)).await;
    let first = {
        let locks = locks.clone();
        tokio::spawn(async move { take(&locks, "n", options(600_000, 60_000)).await })
    };
    tokio::time::sleep(ms(100)).await;
    // The reply to one attempt of a later call is lost; everything else works.
    engine.set(Fault::Swallow);
    let later = {
        let locks = locks.clone();
        tokio::spawn(async move { attempt(&locks, "n", options(600_000, 60_000)).await })
    };
    settle().await;
    engine.set(Fault::None);
    let released = tokio::time::Instant::now();
    other.release(&held).await.unwrap();
    let lease = first.await.unwrap();
    assert!(released.elapsed() < ms(1000), "granted after {:?}", released.elapsed());
    drop((lease, later));
}

#[tokio::test(start_paused = true)]
async fn abandoned_claims_are_released_after_a_panic_in_a_release() {
    let (engine, locks) = service();
    engine.set(Fault::Swallow);
    assert_eq!(code(attempt(&locks, "first", options(600_000, 0)).await), Code::Store);
    engine.panics.store(true, SeqCst);
    tokio::time::sleep(ms(20_000)).await;
    engine.panics.store(false, SeqCst);
    engine.set(Fault::Swallow);
    assert_eq!(code(attempt(&locks, "n", options(600_000, 0)).await), Code::Store);
    engine.set(Fault::None);
    tokio::time::sleep(ms(20_000)).await;
    assert!(!held_in_store(&engine, "n").await, "20 s after the last panic");
}

#[tokio::test(start_paused = true)]
async fn a_forced_release_does_not_count_what_the_holder_released() {
    let (engine, locks) = service();
    let other = another(&engine);
    let held = take(&other, "n", options(600_000, 0)).await;
    engine.set(Fault::SlowReply(10));
    let forcing = {
        let locks = locks.clone();
        tokio::spawn(async move { locks.force_release(&key("n")).await })
    };
    // The inspection succeeds. Then connections are refused for a moment: nothing is sent.
    tokio::time::sleep(ms(5)).await;
    engine.set(Fault::Refuse);
    tokio::time::sleep(ms(7)).await;
    engine.set(Fault::None);
    assert!(other.release(&held).await.unwrap());
    assert!(!forcing.await.unwrap().unwrap(), "its holder released it");
}

#[tokio::test(start_paused = true)]
async fn a_forced_release_is_sent_although_the_inspection_before_it_has_no_answer() {
    let (engine, locks) = service();
    take(&locks, "n", options(600_000, 0)).await;
    engine.set(Fault::HangOne);
    assert!(locks.force_release(&key("n")).await.unwrap());
    assert!(!held_in_store(&engine, "n").await);
}

#[tokio::test(start_paused = true)]
async fn a_forced_release_without_an_answer_names_the_store_and_the_time() {
    let (engine, locks) = service();
    engine.hang();
    let started = tokio::time::Instant::now();
    let error = locks.force_release(&key("n")).await.unwrap_err();
    assert_eq!(started.elapsed(), STORE_TIMEOUT);
    let time = STORE_TIMEOUT.as_millis();
    let expected = format!("faulty: forceRelease failed: no answer within {time} ms (h:1)");
    assert_eq!((error.message, error.retryable), (expected, true));
}

/// Three waiters of an event loop that hangs are ahead of a live one. `stallLimitMs` is 5 min.
#[tokio::test(start_paused = true)]
async fn an_event_loop_that_hangs_delays_other_waiters_by_its_ttl() {
    for hands_off in [false, true] {
        let engine = Arc::new(Faulty::new(OwnerToken::fresh().as_str()));
        let (holder, live) = (another(&engine), another(&engine));
        let hung = Locks::new(engine.clone(), STORE_TIMEOUT, Arc::new(StallDetector::new(|| {})), None);
        let held = take(&holder, "n", options(30_000, 0)).await;
        engine.hands_off.store(hands_off, SeqCst);
        for _ in 0..3 {
            let hung = hung.clone();
            tokio::spawn(async move { attempt(&hung, "n", options(3000, 60_000)).await });
            settle().await;
        }
        engine.hands_off.store(false, SeqCst);
        let waiting = tokio::spawn(async move { take(&live, "n", options(3000, 60_000)).await });
        settle().await;
        holder.release(&held).await.unwrap();
        let released = tokio::time::Instant::now();
        waiting.await.unwrap();
        // Until its lease and its positions have expired.
        assert!(released.elapsed() < ms(6500), "{hands_off}: {:?}", released.elapsed());
    }
}

/// A loop that is busy for less than a third of the ttl keeps its grant.
#[tokio::test(start_paused = true)]
async fn a_grant_that_a_busy_event_loop_receives_late_is_renewed() {
    let engine = Arc::new(Faulty::new(OwnerToken::fresh().as_str()));
    let (holder, busy) = (another(&engine), another(&engine));
    let held = take(&holder, "n", options(30_000, 0)).await;
    engine.hands_off.store(true, SeqCst);
    let waiting = tokio::spawn(async move { attempt(&busy, "n", options(30_000, 60_000)).await });
    settle().await;
    holder.release(&held).await.unwrap();
    let Outcome::Acquired(lease) = waiting.await.unwrap().unwrap() else {
        panic!("not granted")
    };
    assert!(lease.remaining() < ms(2000));
    tokio::time::sleep(ms(900)).await;
    assert_eq!(engine.renewals.load(SeqCst), 0, "the loop may hang");
    tokio::time::sleep(ms(600)).await;
    assert_eq!(engine.renewals.load(SeqCst), 1, "before the end of the hand-off");
    tokio::time::sleep(ms(7000)).await;
    lease.received();
    tokio::time::sleep(ms(60_000)).await;
    assert!(lease.is_held());
}
