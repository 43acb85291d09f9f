//! A store in trouble: outages, lost replies, answers that come too late or never.

use super::faults::Fault;
use super::*;

/// The store is quiet while a call waits for its turn; that is no silence of the store.
#[tokio::test(start_paused = true)]
async fn a_long_wait_is_no_silence_of_the_store() {
    let (engine, locks) = service();
    for unordered in [false, true] {
        if unordered {
            engine.keep_no_queue();
        }
        let holder = take(&locks, "n", options(30_000, 0)).await;
        engine.set(Fault::SlowReply(50));
        for (wait, seconds) in [(1000, 1), (40_000, 40)] {
            let started = tokio::time::Instant::now();
            let waits = [
                attempt(&locks, "n", options(900, wait)),
                attempt(&locks, "n", options(900, wait)),
            ];
            for outcome in futures_util::future::join_all(waits).await {
                assert!(matches!(outcome.unwrap(), Outcome::Busy), "unordered: {unordered}");
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
    assert!(locks.release(&lease).await.unwrap().is_freed());
    assert!(!held_in_store(&engine, "n").await);
}

#[tokio::test(start_paused = true)]
async fn lost_replies_all_along_leave_no_lock_behind() {
    let (engine, locks) = service();
    engine.set(Fault::LoseReply);
    assert_eq!(code(attempt(&locks, "n", options(3_600_000, 0)).await), Code::Store);
    engine.set(Fault::None);
    tokio::time::sleep(ms(1000)).await;
    assert!(!held_in_store(&engine, "n").await);
}

#[tokio::test(start_paused = true)]
async fn a_grant_that_comes_after_giving_up_goes_back() {
    let (engine, locks) = service();
    engine.set(Fault::SlowReply(7000));
    assert_eq!(code(attempt(&locks, "n", options(3_600_000, 0)).await), Code::Store);
    assert!(held_in_store(&engine, "n").await);
    engine.set(Fault::None);
    tokio::time::sleep(ms(3000)).await;
    assert!(!held_in_store(&engine, "n").await);
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_never_comes_leaves_no_lock_behind() {
    let (engine, locks) = service();
    engine.set(Fault::Swallow);
    assert_eq!(code(attempt(&locks, "n", options(3_600_000, 0)).await), Code::Store);
    assert!(held_in_store(&engine, "n").await);
    engine.set(Fault::None);
    tokio::time::sleep(STORE_TIMEOUT + ms(100)).await;
    assert!(!held_in_store(&engine, "n").await);
}

/// A failed try may be carried out long after its caller gave up, or has released what a later try got.
#[tokio::test(start_paused = true)]
async fn a_try_that_arrives_late_leaves_no_lock_behind() {
    let (engine, locks) = service();
    engine.keep_no_queue();
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
    assert!(matches!(busy.await.unwrap().unwrap(), Outcome::Busy));
    assert!(locks.release(&granted.await.unwrap()).await.unwrap().is_freed());
    other.release(&holder).await.unwrap();
    for name in ["n", "m"] {
        assert!(!held_in_store(&engine, name).await, "{name}");
    }
    tokio::time::sleep(ms(6000)).await;
    for name in ["n", "m"] {
        assert!(!held_in_store(&engine, name).await, "{name}: the late try holds it");
    }
    let started = tokio::time::Instant::now();
    locks.close().await;
    assert!(started.elapsed() < ms(100), "doubts keep no close waiting");
}

#[tokio::test(start_paused = true)]
async fn an_extended_lease_is_freed_for_as_long_as_it_lasts() {
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
    // An extension whose reply is lost lasts at the store, if not here.
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
    assert_eq!(
        locks.extend(&lease, Ttl::clamped(ms(600_000))).await.unwrap_err().code,
        Code::Store
    );
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
    assert!(releasing.await.unwrap().unwrap().is_freed());
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
    assert!(
        !releasing.await.unwrap().unwrap().is_freed(),
        "another service holds it"
    );
    assert!(other.release(&theirs).await.unwrap().is_freed());
}

#[tokio::test(start_paused = true)]
async fn a_forced_release_whose_reply_is_lost_says_that_it_freed_the_name() {
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
async fn a_close_does_not_repeat_a_release_that_cannot_succeed() {
    let (engine, locks) = service();
    take(&locks, "held", options(60_000, 0)).await;
    engine.set(Fault::SlowReply(7000));
    assert_eq!(code(attempt(&locks, "n", options(60_000, 0)).await), Code::Store);
    engine.set(Fault::Fatal);
    let started = tokio::time::Instant::now();
    locks.close().await;
    assert!(started.elapsed() < ms(1000), "{:?}", started.elapsed());
}

#[tokio::test(start_paused = true)]
async fn an_abort_in_flight_leaves_nothing() {
    let (engine, locks) = service();
    engine.set(Fault::SlowReply(100));
    let abort = CancellationToken::new();
    let taking = {
        let (locks, abort) = (locks.clone(), abort.clone());
        tokio::spawn(async move {
            locks
                .acquire(&[key("n"), key("m")], options(3_600_000, 9000), Some(abort))
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
async fn an_abort_that_came_first_asks_the_store_for_nothing() {
    let (_, locks) = service();
    let abort = CancellationToken::new();
    abort.cancel();
    let outcome = locks.acquire(&[key("n")], options(1000, 9000), Some(abort)).await;
    assert!(matches!(outcome.unwrap(), Outcome::Aborted));
    assert_eq!(locks.stats().acquired, 0);
}

#[tokio::test(start_paused = true)]
async fn validity_that_is_gone_on_return_is_no_grant() {
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
async fn a_release_that_the_store_did_not_take_goes_on_in_the_background() {
    let (engine, locks) = service();
    let lease = take(&locks, "n", options(60_000, 0)).await;
    engine.set(Fault::Refuse);
    let error = locks.release(&lease).await.unwrap_err();
    assert_eq!((error.code, error.retryable), (Code::Store, true));
    assert!(!lease.is_held());
    assert!(lease.loss().is_none(), "let go, not lost");
    engine.set(Fault::None);
    tokio::time::sleep(ms(1000)).await;
    assert!(!held_in_store(&engine, "n").await);
}

#[tokio::test(start_paused = true)]
async fn a_restore_whose_reply_is_lost_finds_itself_the_holder() {
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
    assert!(!locks.release(&lease).await.unwrap().is_freed());
    assert!(held_in_store(&engine, "n").await);
    assert!(other.release(&restored).await.unwrap().is_freed());
}

/// Its fresh token is known to nobody else.
#[tokio::test(start_paused = true)]
async fn a_restore_that_gave_up_leaves_no_lock_behind() {
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
async fn a_restore_that_the_store_refused_leaves_the_lock_where_it_was() {
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
    assert!(other.release(&restored).await.unwrap().is_freed());
}

#[tokio::test(start_paused = true)]
async fn a_restore_that_is_answered_too_late_gives_back() {
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
async fn a_close_on_a_silent_store_takes_no_longer_than_the_limit() {
    let (engine, locks) = service();
    take(&locks, "held", options(60_000, 0)).await;
    engine.hang();
    let asking = locks.clone();
    let call = tokio::spawn(async move { asking.inspect(&key("n")).await });
    settle().await;
    let started = tokio::time::Instant::now();
    locks.close().await;
    assert!(started.elapsed() <= STORE_TIMEOUT + ms(1000), "{:?}", started.elapsed());
    assert_eq!(call.await.unwrap().unwrap_err().code, Code::Store);
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_ends_while_its_service_closes_says_so_in_time() {
    let (engine, locks) = service();
    let lease = take(&locks, "n", options(1000, 0)).await;
    let (tell, told) = tokio::sync::oneshot::channel();
    lease.on_loss(Box::new(move |loss| drop(tell.send(loss))));
    engine.hang();
    let asking = locks.clone();
    let call = tokio::spawn(async move { asking.inspect(&key("other")).await });
    settle().await;
    let closing = tokio::spawn(async move { locks.close().await });
    let told = tokio::time::timeout(ms(1100), told).await;
    assert_eq!(told.expect("within its ttl").unwrap().code, Code::Lost);
    closing.await.unwrap();
    drop(call);
}

#[tokio::test(start_paused = true)]
async fn an_extension_counts_the_wait_for_a_renewal_that_hangs() {
    let (engine, locks) = service();
    let lease = take(&locks, "n", options(60_000, 0)).await;
    engine.hang();
    // The renewal is under way.
    tokio::time::sleep(ms(20_500)).await;
    let started = tokio::time::Instant::now();
    let error = locks.extend(&lease, Ttl::clamped(ms(60_000))).await.unwrap_err();
    assert_eq!(error.code, Code::Store);
    assert!(started.elapsed() <= STORE_TIMEOUT + ms(100), "{:?}", started.elapsed());
}

#[tokio::test(start_paused = true)]
async fn an_extension_whose_reply_is_lost_is_freed_although_it_was_no_longer_than_the_lease() {
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
    assert!(!held_in_store(&engine, "n").await, "it was made to last longer");
}

#[tokio::test(start_paused = true)]
async fn a_release_while_the_service_closes_counts_from_the_call_on() {
    let (engine, locks) = service();
    let lease = take(&locks, "n", options(30_000, 0)).await;
    engine.set(Fault::SlowReply(500));
    let asking = locks.clone();
    let call = tokio::spawn(async move { asking.inspect(&key("other")).await });
    settle().await;
    let closing = locks.clone();
    let closing = tokio::spawn(async move { closing.close().await });
    settle().await;
    assert!(lease.is_held());
    assert!(!locks.release(&lease).await.unwrap().is_freed());
    assert!(!lease.is_held());
    closing.await.unwrap();
    assert!(!held_in_store(&engine, "n").await);
    drop(call);
}

#[tokio::test(start_paused = true)]
async fn a_close_waits_for_a_release_that_came_too_late_to_count() {
    let (engine, locks) = service();
    let mut brief = options(10_000, 0);
    brief.renew = false;
    let lease = take(&locks, "n", brief).await;
    tokio::time::sleep(ms(9950)).await;
    assert!(!lease.is_held());
    engine.set(Fault::SlowReply(300));
    let releasing = tokio::spawn(locks.release(&lease));
    settle().await;
    locks.close().await;
    assert!(releasing.is_finished());
    assert!(!releasing.await.unwrap().unwrap().is_freed());
    assert!(!held_in_store(&engine, "n").await);
}
