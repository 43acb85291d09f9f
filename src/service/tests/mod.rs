//! Tests of the service over the memory engine, in paused time: every delay is exact, and no test waits in real time.

mod abandoned;
mod batches;
mod closing;
mod faults;
mod hand_offs;
mod hangs;
mod leases;
mod outages;
mod shares;
mod testing;
mod unavailable;
mod waiting;

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use self::faults::Faulty;
use super::{AcquireOptions, Lease, Locks, Outcome, Wait};
use crate::engine::EngineExt;
use crate::error::{Code, LockError};
use crate::model::{Key, Names, OwnerToken, Ttl};
use crate::stall_detector::StallDetector;

const STORE_TIMEOUT: Duration = Duration::from_secs(5);

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn key(name: &str) -> Key {
    Key::new(name).unwrap()
}

/// Creates a store of its own, wrapped in an engine with faults, and a service over it.
fn service() -> (Arc<Faulty>, Locks) {
    service_with(true, 0)
}

/// Creates a service like [`service`], over a store with or without a queue. `longest_ms`: its longest lease; 0 for none.
fn service_with(queue: bool, longest_ms: u64) -> (Arc<Faulty>, Locks) {
    let mut engine = Faulty::new(OwnerToken::fresh().as_str());
    engine.ordered = queue;
    engine.longest_lease = (longest_ms > 0).then(|| ms(longest_ms));
    let engine = Arc::new(engine);
    let locks = another(&engine);
    (engine, locks)
}

fn another(engine: &Arc<Faulty>) -> Locks {
    Locks::new(engine.clone(), STORE_TIMEOUT, Arc::new(StallDetector::default()), None)
}

fn options(ttl: u64, wait: u64) -> AcquireOptions {
    AcquireOptions {
        ttl: Ttl::clamped(ms(ttl)),
        wait: if wait == 0 { Wait::No } else { Wait::For(ms(wait)) },
        ..AcquireOptions::default()
    }
}

/// Returns the options of [`Locks::acquire_by_name`].
fn of_gist(ttl: u64) -> AcquireOptions {
    AcquireOptions {
        renew: false,
        ..options(ttl, 0)
    }
}

async fn attempt(locks: &Locks, name: &str, options: AcquireOptions) -> Result<Outcome, LockError> {
    locks.acquire(key(name).into(), options, None).await
}

async fn take(locks: &Locks, name: &str, options: AcquireOptions) -> Arc<Lease> {
    match attempt(locks, name, options).await.unwrap() {
        Outcome::Acquired(lease) => {
            lease.received();
            lease
        }
        other => panic!("expected {name} to be granted, got {other:?}"),
    }
}

/// Whether one attempt finds the name busy. Releases what it acquires.
async fn is_busy(locks: &Locks, name: &str) -> bool {
    match attempt(locks, name, options(1000, 0)).await.unwrap() {
        Outcome::Acquired(lease) => {
            locks.release(&lease).await.unwrap();
            false
        }
        _ => true,
    }
}

/// Whether the store holds the name, without faults.
async fn held_in_store(engine: &Faulty, name: &str) -> bool {
    engine.store().inspect(&key(name)).await.unwrap().is_some()
}

/// Runs the tasks that are ready. No time passes.
async fn settle() {
    for _ in 0..50 {
        tokio::task::yield_now().await;
    }
}

fn code(result: Result<Outcome, LockError>) -> Code {
    result.unwrap_err().code
}

#[tokio::test(start_paused = true)]
async fn leases_are_acquired_and_released_by_name() {
    let (engine, locks) = service();
    let other = another(&engine);
    let ttl = || of_gist(1000);
    assert!(!locks.release_by_name(&key("n")).await.unwrap(), "never acquired");
    assert!(locks.acquire_by_name(key("n"), ttl()).await.unwrap().is_some());
    assert!(
        locks.acquire_by_name(key("n"), ttl()).await.unwrap().is_none(),
        "busy for the same service"
    );
    assert!(other.acquire_by_name(key("n"), ttl()).await.unwrap().is_none());
    assert!(
        !other.release_by_name(&key("n")).await.unwrap(),
        "the lock of another service"
    );
    assert!(locks.release_by_name(&key("n")).await.unwrap());
    assert!(!locks.release_by_name(&key("n")).await.unwrap(), "released before");

    assert!(locks.acquire_by_name(key("n"), ttl()).await.unwrap().is_some());
    tokio::time::sleep(ms(1001)).await;
    assert!(
        other.acquire_by_name(key("n"), ttl()).await.unwrap().is_some(),
        "not renewed"
    );
    assert!(
        !locks.release_by_name(&key("n")).await.unwrap(),
        "another service holds it"
    );
    assert!(held_in_store(&engine, "n").await, "the successor keeps it");
    assert_eq!(locks.stats().lost, 1);
}

#[tokio::test(start_paused = true)]
async fn one_time_names_leave_nothing_in_the_service() {
    let (_, locks) = service();
    for i in 0..100 {
        assert!(
            locks
                .acquire_by_name(key(&format!("n{i}")), of_gist(50))
                .await
                .unwrap()
                .is_some()
        );
    }
    tokio::time::sleep(ms(300)).await;
    assert!(locks.shared.leases_by_name.lock().is_empty());
    assert!(locks.shared.scheduler.held().is_empty());
    assert_eq!(locks.stats().held, 0);
}

#[tokio::test(start_paused = true)]
async fn close_releases_and_ends_the_waits() {
    let (engine, locks) = service();
    let other = another(&engine);
    let mine = take(&locks, "mine", options(30_000, 0)).await;
    let reported: Arc<std::sync::Mutex<Option<LockError>>> = Arc::default();
    let sink = reported.clone();
    mine.on_loss(Box::new(move |loss| *sink.lock().unwrap() = Some(loss)));
    assert!(
        locks
            .acquire_by_name(key("gist"), of_gist(30_000))
            .await
            .unwrap()
            .is_some()
    );
    take(&other, "theirs", options(30_000, 0)).await;
    let waiting = {
        let locks = locks.clone();
        tokio::spawn(async move { attempt(&locks, "theirs", options(1000, 60_000)).await })
    };
    settle().await;
    assert_eq!(locks.stats().waiting, 1);
    tokio::join!(locks.close(), locks.close());
    assert_eq!(code(waiting.await.unwrap()), Code::Closed);
    assert!(!mine.is_held());
    let loss = reported.lock().unwrap().take();
    let loss = loss.expect("the holder is notified of the loss");
    assert_eq!(loss.code, Code::Lost);
    assert!(loss.message.contains("closed"), "{loss}");
    for name in ["mine", "gist"] {
        assert!(!held_in_store(&engine, name).await, "{name}");
    }
    assert_eq!(code(attempt(&locks, "mine", options(1000, 0)).await), Code::Closed);
    assert_eq!(locks.inspect(&key("mine")).await.unwrap_err().code, Code::Closed);
    assert_eq!(
        locks.release_by_name(&key("gist")).await.unwrap_err().code,
        Code::Closed
    );
    assert_eq!(locks.stats().waiting, 0);
    locks.close().await;
}

/// A close at any point of an acquisition leaves no lock and no position in a queue.
#[tokio::test(start_paused = true)]
async fn close_in_the_middle_of_an_acquisition_leaves_nothing() {
    for slow in [0, 20] {
        for yields in 0..12 {
            let (engine, locks) = service();
            let other = another(&engine);
            take(&other, "busy", options(30_000, 0)).await;
            engine.set(faults::Fault::SlowReply(slow));
            let mut calls = Vec::new();
            for name in ["free", "busy", "gist"] {
                let locks = locks.clone();
                calls.push(tokio::spawn(async move {
                    match name {
                        "gist" => locks.acquire_by_name(key(name), of_gist(30_000)).await.map(|_| ()),
                        _ => attempt(&locks, name, options(30_000, 60_000)).await.map(|_| ()),
                    }
                }));
            }
            for _ in 0..yields {
                tokio::task::yield_now().await;
            }
            locks.close().await;
            for call in calls {
                let _ = call.await.unwrap();
            }
            engine.set(faults::Fault::None);
            settle().await;
            for name in ["free", "gist"] {
                assert!(!held_in_store(&engine, name).await, "{name} after {yields} yields");
            }
            other.force_release(&key("busy")).await.unwrap();
            assert!(
                !is_busy(&other, "busy").await,
                "a position in the queue is left after {yields} yields"
            );
        }
    }
}

#[tokio::test(start_paused = true)]
async fn close_ends_in_time_when_the_store_does_not_answer() {
    let (engine, locks) = service();
    take(&locks, "n", options(30_000, 0)).await;
    engine.hang();
    let started = tokio::time::Instant::now();
    locks.close().await;
    assert!(started.elapsed() <= STORE_TIMEOUT * 3, "{:?}", started.elapsed());
}

async fn restore(locks: &Locks, names: &[&str], lease: &Lease, ttl: u64) -> Result<Arc<Lease>, LockError> {
    let names: Vec<Key> = names.iter().map(|name| key(name)).collect();
    let owner = OwnerToken::parse(lease.token()).unwrap();
    locks.restore(&names, owner, lease.fence(), options(ttl, 0)).await
}

#[tokio::test(start_paused = true)]
async fn a_lock_is_restored_elsewhere() {
    let (engine, locks) = service();
    let lease = take(&locks, "n", options(1000, 0)).await;
    let other = another(&engine);
    let restored = restore(&other, &["n"], &lease, 1000).await.unwrap();
    assert!(restored.is_held());
    assert_eq!(restored.fence(), lease.fence());
    assert_ne!(restored.token(), lease.token());
    let twice = restore(&other, &["n"], &lease, 1000).await.unwrap_err();
    assert_eq!((twice.code, twice.key.as_deref()), (Code::Lost, Some("n")));
    assert!(other.release(&restored).await.unwrap());
    let gone = restore(&other, &["n"], &restored, 1000).await.unwrap_err();
    assert_eq!((gone.code, gone.key.as_deref()), (Code::Lost, Some("n")));
    assert_eq!(other.stats().held, 0);
}

#[tokio::test(start_paused = true)]
async fn the_former_holder_of_a_restored_lock_loses_it_and_cannot_release_it() {
    let (engine, locks) = service();
    let lease = take(&locks, "n", options(3000, 0)).await;
    let unused = take(&locks, "m", options(60_000, 0)).await;
    let reported = Arc::new(std::sync::Mutex::new(None));
    let sink = reported.clone();
    lease.on_loss(Box::new(move |loss| *sink.lock().unwrap() = Some(loss)));
    let other = another(&engine);
    let restored = restore(&other, &["n"], &lease, 3000).await.unwrap();
    let second = restore(&other, &["m"], &unused, 60_000).await.unwrap();
    assert!(lease.is_held(), "it is notified at its next renewal");
    tokio::time::sleep(ms(1100)).await;
    assert!(!lease.is_held(), "lost at its next renewal");
    assert_eq!(reported.lock().unwrap().take().unwrap().code, Code::Lost);
    assert!(!locks.release(&lease).await.unwrap());
    let error = locks.extend(&unused, unused.ttl()).await.unwrap_err();
    assert_eq!(error.code, Code::Lost, "lost at its extension");
    locks.close().await;
    tokio::time::sleep(ms(10_000)).await;
    for (name, held) in [("n", &restored), ("m", &second)] {
        assert!(held.is_held(), "{name} is renewed by its new holder");
        assert!(held_in_store(&engine, name).await, "{name}");
        assert!(is_busy(&other, name).await, "{name}");
    }
    assert!(other.release(&restored).await.unwrap());
    assert!(other.release(&second).await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn a_close_does_not_release_a_transferred_lock() {
    let (engine, locks) = service();
    let lease = take(&locks, "n", options(60_000, 0)).await;
    let other = another(&engine);
    let restored = restore(&other, &["n"], &lease, 60_000).await.unwrap();
    locks.close().await;
    assert!(held_in_store(&engine, "n").await);
    assert!(restored.is_held());
    assert!(other.release(&restored).await.unwrap());
    assert!(!held_in_store(&engine, "n").await);
}
