//! Tests of a close while the store fails or is slow.

use std::sync::atomic::Ordering::SeqCst;

use super::faults::Fault;
use super::*;
use crate::engine::EngineExt;

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
async fn a_close_takes_no_longer_than_the_timeout_when_the_store_does_not_answer() {
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
async fn a_lease_that_ends_during_a_close_is_reported_in_time() {
    let (engine, locks) = service();
    let lease = take(&locks, "n", options(1000, 0)).await;
    let (sender, reported) = tokio::sync::oneshot::channel();
    lease.on_loss(Box::new(move |loss| drop(sender.send(loss))));
    engine.hang();
    let asking = locks.clone();
    let call = tokio::spawn(async move { asking.inspect(&key("other")).await });
    settle().await;
    let closing = tokio::spawn(async move { locks.close().await });
    let loss = tokio::time::timeout(ms(1100), reported).await;
    assert_eq!(loss.expect("within its ttl").unwrap().code, Code::Lost);
    closing.await.unwrap();
    drop(call);
}

#[tokio::test(start_paused = true)]
async fn a_release_during_a_close_ends_the_lease_at_once() {
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
    assert!(!locks.release(&lease).await.unwrap());
    assert!(!lease.is_held());
    closing.await.unwrap();
    assert!(!held_in_store(&engine, "n").await);
    drop(call);
}

#[tokio::test(start_paused = true)]
async fn a_close_waits_for_the_release_of_a_lost_lease() {
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
    assert!(!releasing.await.unwrap().unwrap());
    assert!(!held_in_store(&engine, "n").await);
}

#[tokio::test(start_paused = true)]
async fn a_drain_ends_waits_and_waits_for_the_leases() {
    let (engine, locks) = service();
    let other = another(&engine);
    let theirs = take(&other, "busy", options(60_000, 0)).await;
    let waiter = locks.clone();
    let waiter = tokio::spawn(async move { attempt(&waiter, "busy", options(1000, 60_000)).await });
    let lease = take(&locks, "n", options(1000, 0)).await;
    settle().await;
    let draining = locks.clone();
    let draining = tokio::spawn(async move { draining.drain(ms(600_000)).await });
    settle().await;
    assert_eq!(code(waiter.await.unwrap()), Code::Closed);
    assert_eq!(code(attempt(&locks, "new", options(1000, 0)).await), Code::Closed);
    tokio::time::sleep(ms(5000)).await;
    assert!(lease.is_held() && !draining.is_finished());
    locks.extend(&lease, Ttl::clamped(ms(2000))).await.unwrap();
    assert!(locks.release(&lease).await.unwrap());
    tokio::time::sleep(ms(20)).await;
    assert!(draining.is_finished() && !locks.is_closed());
    locks.close().await;
    assert!(other.release(&theirs).await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn a_drain_has_a_limit_and_ends_with_a_close() {
    let (_, locks) = service();
    let lease = take(&locks, "n", options(1000, 0)).await;
    let started = tokio::time::Instant::now();
    locks.drain(ms(3000)).await;
    assert!(started.elapsed() >= ms(3000) && started.elapsed() < ms(3100));
    assert!(lease.is_held());
    let draining = locks.clone();
    let draining = tokio::spawn(async move { draining.drain(ms(600_000)).await });
    settle().await;
    locks.close().await;
    draining.await.unwrap();
    assert!(!lease.is_held());
}

#[tokio::test(start_paused = true)]
async fn a_close_releases_thousands_of_leases_of_a_distant_store() {
    let (engine, locks) = service();
    for number in 0..20_000 {
        take(&locks, &format!("n{number}"), options(60_000, 0)).await;
    }
    engine.set(Fault::SlowReply(100));
    let started = tokio::time::Instant::now();
    assert_eq!(locks.close().await, 0, "all are released");
    assert!(started.elapsed() < ms(3000), "{:?}", started.elapsed());
    assert!(engine.store().list("", STORE_TIMEOUT).await.unwrap().is_empty());
    assert!(engine.max_concurrent_batches.load(SeqCst) <= 8);
}

#[tokio::test(start_paused = true)]
async fn a_close_counts_the_leases_that_it_could_not_release() {
    let (engine, locks) = service();
    for number in 0..1000 {
        take(&locks, &format!("n{number}"), options(60_000, 0)).await;
    }
    engine.hang();
    assert_eq!(locks.close().await, 1000);
    assert!(locks.unreleased_warning(1000).contains("1000 locks or waits"));
    assert_eq!(locks.close().await, 0, "reported once");
}
