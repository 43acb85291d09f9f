//! Tests of outages, lost replies, and late or missing answers.

use super::faults::Fault;
use super::*;

/// The time between two attempts does not count for the timeout of the store.

#[tokio::test(start_paused = true)]
async fn a_long_wait_is_not_a_timeout_of_the_store() {
    for unordered in [false, true] {
        let (engine, locks) = service_with(!unordered, 0);
        let holder = take(&locks, "n", options(30_000, 0)).await;
        engine.set(Fault::SlowReply(50));
        for (wait, seconds) in [(1000, 1), (40_000, 40)] {
            let started = tokio::time::Instant::now();
            let waits = [
                attempt(&locks, "n", options(900, wait)),
                attempt(&locks, "n", options(900, wait)),
            ];
            for outcome in futures_util::future::join_all(waits).await {
                assert!(matches!(outcome.unwrap(), Outcome::Busy(_)), "unordered: {unordered}");
            }
            assert!(started.elapsed() >= Duration::from_secs(seconds));
        }
        engine.set(Fault::None);
        settle().await;
        locks.release(&holder).await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn a_retry_after_a_lost_reply_does_not_block_itself() {
    let (engine, locks) = service();
    engine.set(Fault::LoseReply);
    let taking = {
        let locks = locks.clone();
        tokio::spawn(async move { attempt(&locks, "n", options(30_000, 0)).await })
    };
    settle().await;
    assert!(held_in_store(&engine, "n").await, "the store applied it");
    engine.set(Fault::None);
    let Outcome::Acquired(lease) = taking.await.unwrap().unwrap() else {
        panic!("blocked by itself")
    };
    assert!(locks.release(&lease).await.unwrap());
    assert!(!held_in_store(&engine, "n").await);
}

#[tokio::test(start_paused = true)]
async fn an_acquisition_whose_replies_are_all_lost_leaves_no_lock() {
    let (engine, locks) = service();
    engine.set(Fault::LoseReply);
    assert_eq!(code(attempt(&locks, "n", options(3_600_000, 0)).await), Code::Store);
    engine.set(Fault::None);
    tokio::time::sleep(ms(1000)).await;
    assert!(!held_in_store(&engine, "n").await);
}

#[tokio::test(start_paused = true)]
async fn a_grant_after_the_timeout_is_released() {
    let (engine, locks) = service();
    engine.set(Fault::SlowReply(7000));
    assert_eq!(code(attempt(&locks, "n", options(3_600_000, 0)).await), Code::Store);
    assert!(held_in_store(&engine, "n").await);
    engine.set(Fault::None);
    tokio::time::sleep(ms(3000)).await;
    assert!(!held_in_store(&engine, "n").await);
}

#[tokio::test(start_paused = true)]
async fn a_grant_without_an_answer_is_released() {
    let (engine, locks) = service();
    engine.set(Fault::Swallow);
    assert_eq!(code(attempt(&locks, "n", options(3_600_000, 0)).await), Code::Store);
    assert!(held_in_store(&engine, "n").await);
    engine.set(Fault::None);
    tokio::time::sleep(STORE_TIMEOUT + ms(100)).await;
    assert!(!held_in_store(&engine, "n").await);
}

/// A failed attempt may be executed long after the call ended, or after the release of what a later attempt got.

#[tokio::test(start_paused = true)]
async fn an_attempt_that_is_executed_late_leaves_no_lock() {
    let (engine, locks) = service_with(false, 0);
    let other = another(&engine);
    let holder = take(&other, "n", options(30_000, 0)).await;
    engine.set(Fault::Late(3000));
    let busy = {
        let locks = locks.clone();
        tokio::spawn(async move { attempt(&locks, "n", options(600_000, 1500)).await })
    };
    let granted = {
        let locks = locks.clone();
        tokio::spawn(async move { take(&locks, "m", options(600_000, 0)).await })
    };
    settle().await;
    engine.set(Fault::None);
    assert!(matches!(busy.await.unwrap().unwrap(), Outcome::Busy(_)));
    assert!(locks.release(&granted.await.unwrap()).await.unwrap());
    other.release(&holder).await.unwrap();
    for name in ["n", "m"] {
        assert!(!held_in_store(&engine, name).await, "{name}");
    }
    tokio::time::sleep(ms(6000)).await;
    for name in ["n", "m"] {
        assert!(!held_in_store(&engine, name).await, "{name}: the late attempt holds it");
    }
    let started = tokio::time::Instant::now();
    locks.close().await;
    assert!(started.elapsed() < ms(100), "repeats of a release do not delay a close");
}

#[tokio::test(start_paused = true)]
async fn the_release_of_an_extended_lease_is_retried_until_it_expires() {
    let (engine, locks) = service();
    for renew in [true, false] {
        let lease = take(
            &locks,
            "n",
            AcquireOptions {
                renew,
                ..options(1000, 0)
            },
        )
        .await;
        locks.extend(&lease, Ttl::clamped(ms(600_000))).await.unwrap();
        engine.set(Fault::Refuse);
        assert_eq!(locks.release(&lease).await.unwrap_err().code, Code::Store);
        tokio::time::sleep(ms(20_000)).await;
        engine.set(Fault::None);
        tokio::time::sleep(ms(1000)).await;
        assert!(!held_in_store(&engine, "n").await);
    }
    // An extension whose reply is lost counts in the store, but not in this process.
    let lease = take(
        &locks,
        "n",
        AcquireOptions {
            renew: false,
            ..options(1000, 0)
        },
    )
    .await;
    engine.set(Fault::LoseReply);
    // The store does not answer. The lease ends long before the store timeout.
    let started = tokio::time::Instant::now();
    let error = locks.extend(&lease, Ttl::clamped(ms(600_000))).await.unwrap_err();
    assert_eq!(error.code, Code::Lost);
    assert!(error.message.contains("the reply was lost"), "{}", error.message);
    assert!(error.cause.is_some());
    assert!(started.elapsed() <= ms(1010), "{:?}", started.elapsed());
    engine.set(Fault::None);
    tokio::time::sleep(ms(2000)).await;
    assert!(!lease.is_held());
    assert!(!held_in_store(&engine, "n").await);
}

#[tokio::test(start_paused = true)]
async fn a_release_whose_reply_is_lost_is_a_release() {
    let (engine, locks) = service();
    let lease = take(&locks, "n", options(60_000, 0)).await;
    engine.set(Fault::LoseReply);
    let releasing = {
        let (locks, lease) = (locks.clone(), lease.clone());
        tokio::spawn(async move { locks.release(&lease).await })
    };
    settle().await;
    assert!(!held_in_store(&engine, "n").await);
    engine.set(Fault::None);
    assert!(releasing.await.unwrap().unwrap());
    assert_eq!((locks.stats().released, locks.stats().lost), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn a_release_that_finds_the_lock_gone_does_not_count_as_freed() {
    let (engine, locks) = service();
    let lease = take(&locks, "n", options(60_000, 0)).await;
    engine.store().force_release(&key("n")).await.unwrap();
    let other = another(&engine);
    let theirs = take(&other, "n", options(60_000, 0)).await;
    engine.set(Fault::Refuse);
    let releasing = tokio::spawn(locks.release(&lease));
    settle().await;
    engine.set(Fault::None);
    assert!(!releasing.await.unwrap().unwrap(), "another service holds it");
    assert!(other.release(&theirs).await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn a_forced_release_whose_reply_is_lost_reports_that_it_freed_the_name() {
    let (engine, locks) = service();
    take(&locks, "n", options(60_000, 0)).await;
    engine.set(Fault::LoseReply);
    let forcing = {
        let locks = locks.clone();
        tokio::spawn(async move { locks.force_release(&key("n")).await })
    };
    settle().await;
    assert!(!held_in_store(&engine, "n").await);
    engine.set(Fault::None);
    assert!(forcing.await.unwrap().unwrap());
    assert!(!locks.force_release(&key("n")).await.unwrap(), "it is free now");
}

#[tokio::test(start_paused = true)]
async fn an_abort_during_an_attempt_leaves_nothing() {
    let (engine, locks) = service();
    engine.set(Fault::SlowReply(100));
    let abort = CancellationToken::new();
    let taking = {
        let (locks, abort) = (locks.clone(), abort.clone());
        tokio::spawn(async move {
            locks
                .acquire(
                    Names::unique(&[key("n"), key("m")]),
                    options(3_600_000, 9000),
                    Some(abort),
                )
                .await
        })
    };
    settle().await;
    assert!(held_in_store(&engine, "n").await);
    abort.cancel();
    assert!(matches!(taking.await.unwrap().unwrap(), Outcome::Aborted));
    tokio::time::sleep(ms(500)).await;
    for name in ["n", "m"] {
        assert!(!held_in_store(&engine, name).await, "{name}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_abort_before_the_first_attempt_sends_nothing() {
    let (_, locks) = service();
    let abort = CancellationToken::new();
    abort.cancel();
    let outcome = locks
        .acquire(Names::unique(&[key("n")]), options(1000, 9000), Some(abort))
        .await;
    assert!(matches!(outcome.unwrap(), Outcome::Aborted));
    assert_eq!(locks.stats().acquired, 0);
}

#[tokio::test(start_paused = true)]
async fn a_grant_whose_lease_has_ended_is_an_error() {
    let (engine, locks) = service();
    engine.set(Fault::SlowReply(100));
    for wait in [0, 1000] {
        let error = attempt(&locks, "n", options(90, wait)).await.unwrap_err();
        assert_eq!((error.code, error.retryable), (Code::Store, true));
        assert!(error.message.contains("granted too late"), "{error}");
    }
    engine.set(Fault::None);
    tokio::time::sleep(ms(500)).await;
    assert!(!held_in_store(&engine, "n").await);
    assert_eq!(locks.stats().acquired, 0);
}

#[tokio::test(start_paused = true)]
async fn a_failed_release_is_retried_in_the_background() {
    let (engine, locks) = service();
    let lease = take(&locks, "n", options(60_000, 0)).await;
    engine.set(Fault::Refuse);
    let error = locks.release(&lease).await.unwrap_err();
    assert_eq!((error.code, error.retryable), (Code::Store, true));
    assert!(!lease.is_held());
    assert!(lease.loss().is_none(), "released, not lost");
    engine.set(Fault::None);
    tokio::time::sleep(ms(1000)).await;
    assert!(!held_in_store(&engine, "n").await);
}

#[tokio::test(start_paused = true)]
async fn a_restore_whose_reply_is_lost_succeeds() {
    let (engine, locks) = service();
    let lease = take(&locks, "n", options(60_000, 0)).await;
    let other = another(&engine);
    engine.set(Fault::LoseReply);
    let restoring = {
        let (other, lease) = (other.clone(), lease.clone());
        tokio::spawn(async move { restore(&other, &["n"], &lease, 60_000).await })
    };
    settle().await;
    engine.set(Fault::None);
    let restored = restoring.await.unwrap().unwrap();
    assert!(!locks.release(&lease).await.unwrap());
    assert!(held_in_store(&engine, "n").await);
    assert!(other.release(&restored).await.unwrap());
}

/// No caller knows its new token.

#[tokio::test(start_paused = true)]
async fn a_failed_restore_leaves_no_lock() {
    for fault in [Fault::LoseReply, Fault::Swallow, Fault::SlowReply(7000)] {
        let (engine, locks) = service();
        let lease = take(&locks, "n", options(3_600_000, 0)).await;
        let other = another(&engine);
        engine.set(fault);
        let error = restore(&other, &["n"], &lease, 3_600_000).await.unwrap_err();
        assert_eq!(
            (error.code, error.key.as_deref()),
            (Code::Store, Some("n")),
            "{fault:?}"
        );
        engine.set(Fault::None);
        tokio::time::sleep(STORE_TIMEOUT + ms(3000)).await;
        assert!(!held_in_store(&engine, "n").await, "{fault:?}");
        assert_eq!(other.stats().held, 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_refused_restore_does_not_change_the_holder() {
    let (engine, locks) = service();
    let lease = take(&locks, "n", options(60_000, 0)).await;
    let other = another(&engine);
    engine.set(Fault::Refuse);
    let error = restore(&other, &["n"], &lease, 60_000).await.unwrap_err();
    assert_eq!((error.code, error.retryable), (Code::Store, true));
    engine.set(Fault::None);
    tokio::time::sleep(ms(3000)).await;
    assert!(lease.is_held() && held_in_store(&engine, "n").await);
    let restored = restore(&other, &["n"], &lease, 60_000).await.unwrap();
    assert!(other.release(&restored).await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn a_restore_that_is_answered_too_late_releases_the_lock() {
    let (engine, locks) = service();
    let lease = take(&locks, "n", options(60_000, 0)).await;
    let other = another(&engine);
    engine.set(Fault::SlowReply(100));
    assert_eq!(restore(&other, &["n"], &lease, 90).await.unwrap_err().code, Code::Lost);
    engine.set(Fault::None);
    tokio::time::sleep(ms(500)).await;
    assert!(!held_in_store(&engine, "n").await);
    assert_eq!(other.stats().held, 0);
}

#[tokio::test(start_paused = true)]
async fn the_timeout_of_an_extension_includes_the_wait_for_a_renewal_without_an_answer() {
    let (engine, locks) = service();
    let lease = take(&locks, "n", options(60_000, 0)).await;
    engine.hang();
    // The renewal is in progress.
    tokio::time::sleep(ms(20_500)).await;
    let started = tokio::time::Instant::now();
    let error = locks.extend(&lease, Ttl::clamped(ms(60_000))).await.unwrap_err();
    assert_eq!(error.code, Code::Store);
    assert!(started.elapsed() <= STORE_TIMEOUT + ms(100), "{:?}", started.elapsed());
}

#[tokio::test(start_paused = true)]
async fn an_extension_whose_reply_is_lost_is_released_although_it_was_no_longer_than_the_lease() {
    let (engine, locks) = service();
    let mut brief = options(10_000, 0);
    brief.renew = false;
    let lease = take(&locks, "n", brief).await;
    tokio::time::sleep(ms(9000)).await;
    engine.set(Fault::LoseReply);
    assert!(locks.extend(&lease, Ttl::clamped(ms(10_000))).await.is_err());
    assert!(!lease.is_held());
    engine.set(Fault::None);
    tokio::time::sleep(ms(2500)).await;
    assert!(
        !held_in_store(&engine, "n").await,
        "the lost reply extended it in the store"
    );
}

/// Another program locks the row of a lease, deletes it, and commits.
#[tokio::test(start_paused = true)]
async fn a_release_that_found_a_locked_row_has_released_nothing() {
    let (engine, locks) = service();
    let lease = take(&locks, "n", options(60_000, 0)).await;
    take(&another(&engine), "forced", options(60_000, 0)).await;
    engine.set(Fault::Locked);
    let name = key("forced");
    let (released, forced, ()) = tokio::join!(locks.release(&lease), locks.force_release(&name), async {
        settle().await;
        for name in ["n", "forced"] {
            assert!(engine.store().force_release(&key(name)).await.unwrap());
        }
        engine.set(Fault::None);
    });
    assert!(!released.unwrap() && !forced.unwrap());
}

#[tokio::test(start_paused = true)]
async fn a_locked_row_does_not_disconnect_the_service() {
    let (engine, locks) = service();
    let lease = take(&locks, "n", options(60_000, 0)).await;
    engine.set(Fault::Locked);
    assert_eq!(code(attempt(&locks, "m", options(3_600_000, 0)).await), Code::Store);
    assert!(locks.release(&lease).await.unwrap_err().retryable);
    assert!(locks.is_connected() && locks.stats().store_errors >= 2);
}
