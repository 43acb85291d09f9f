//! Tests of the permits: which calls wait for which others, and when a permit becomes free.

use std::sync::LazyLock;

use mongodb::options::{ClientOptions, CollectionOptions, ServerAddress, WriteConcern};

use super::queue::{hold, notified, release, two, wait, waiting};
use super::*;
use crate::engine::contract::refs;
use crate::engine::mongodb::config::ClientSettings;
use crate::engine::mongodb::connection::openings::OpenConnections;
use crate::engine::mongodb::connection::pool::{Class, Namespace, Pool};
use crate::engine::mongodb::connection::server_monitor::ServerMonitor;
use crate::engine::{EngineExt, TlsFiles};

/// The name of attempts without a claim.
static NAME: LazyLock<Key> = LazyLock::new(|| key("n"));

/// Creates a pool of `size` connections without a server.
fn pool(size: u32, store_timeout: Duration) -> Arc<Pool> {
    let options = ClientOptions::builder()
        .hosts(vec![ServerAddress::parse("127.0.0.1:1").unwrap()])
        .build();
    let monitor = ServerMonitor::new(&options);
    let settings = ClientSettings {
        options,
        tls: TlsFiles::default(),
    };
    let client = settings.client().unwrap();
    let namespace = Namespace {
        database: "d".into(),
        collection: "c".into(),
        options: CollectionOptions::default(),
        release_concern: WriteConcern::default(),
    };
    let size = (size, OpenConnections::of(size));
    Pool::new(client, settings, namespace, monitor, size, store_timeout)
}

/// Waiters make attempts together after a heartbeat failed, or after the collection was dropped. Even where all of them were
/// notified of a hand-off, renewals and releases go before them.
#[tokio::test]
async fn a_renewal_does_not_wait_behind_the_attempts_of_waiters() {
    for waiters in [Class::Confirm, Class::Acquire(&NAME)] {
        for size in [8, 1] {
            let pool = pool(size, Duration::from_secs(5));
            // Each command takes 5 ms.
            for _ in 0..8000 {
                let pool = pool.clone();
                tokio::spawn(async move {
                    let _permit = pool.permit(waiters).await;
                    tokio::time::sleep(Duration::from_millis(5)).await;
                });
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
            for class in [Class::Keep, Class::Release] {
                let asked = Instant::now();
                drop(pool.permit(class).await);
                let waited = asked.elapsed();
                assert!(
                    waited < Duration::from_secs(2),
                    "{class:?} waited for {waited:?} behind {waiters:?}, with {size} connections"
                );
            }
        }
    }
}

/// Counts permits of a class that are available at once.
async fn available(pool: &Pool, class: Class<'_>) -> usize {
    available_within(pool, class, Duration::from_millis(20)).await
}

/// Counts permits of a class that are available, each one within this time.
async fn available_within(pool: &Pool, class: Class<'_>, limit: Duration) -> usize {
    let mut permits = Vec::new();
    while let Ok(permit) = tokio::time::timeout(limit, pool.permit(class)).await {
        permits.push(permit);
    }
    permits.len()
}

#[tokio::test]
async fn connections_are_reserved_for_renewals() {
    let pool = pool(64, Duration::from_secs(5));
    let mut permits = Vec::new();
    for class in [Class::Acquire(&NAME), Class::Confirm, Class::Release, Class::Query] {
        while let Ok(permit) = tokio::time::timeout(Duration::from_millis(20), pool.permit(class)).await {
            permits.push(permit);
        }
    }
    assert_eq!((permits.len(), available(&pool, Class::Keep).await), (56, 8));
}

/// A write that ends a session may wait for as long as the server does not execute an earlier write.
#[tokio::test]
async fn releases_do_not_wait_for_the_ends_of_sessions() {
    let pool = pool(64, Duration::from_secs(5));
    let ends = available(&pool, Class::EndSession).await;
    let mut permits = Vec::new();
    for _ in 0..ends {
        permits.push(pool.permit(Class::EndSession).await);
    }
    assert_eq!((ends, available(&pool, Class::Release).await), (4, 32));
}

/// Starts calls without an answer on all permits of attempts, and returns how many permits are free after three store timeouts, or as soon
/// as all are free while other calls are answered.
async fn free_after_a_hang(others_are_answered: bool) -> usize {
    let store_timeout = Duration::from_millis(400);
    let pool = pool(8, store_timeout);
    for _ in 0..5 {
        let permit = pool.permit(Class::Acquire(&NAME)).await;
        // The task goes on without the future.
        drop(pool.run(permit, std::future::pending::<crate::engine::mongodb::Outcome<()>>()));
    }
    assert_eq!(available(&pool, Class::Acquire(&NAME)).await, 0);
    let began = Instant::now();
    if others_are_answered {
        // No other call is answered while the machine stands still.
        while began.elapsed() < Duration::from_secs(10) && available(&pool, Class::Acquire(&NAME)).await < 5 {
            pool.call(Class::Keep, || async { Ok(()) }).await.unwrap();
        }
    } else {
        tokio::time::sleep(store_timeout * 3).await;
    }
    available_within(&pool, Class::Acquire(&NAME), Duration::from_millis(200)).await
}

#[tokio::test]
async fn hung_attempts_release_their_permits_while_other_calls_are_answered() {
    assert_eq!(free_after_a_hang(true).await, 5);
}

#[tokio::test]
async fn hung_attempts_keep_their_permits_while_no_call_is_answered() {
    assert_eq!(free_after_a_hang(false).await, 0);
}

#[tokio::test]
async fn only_a_waiter_that_was_notified_of_a_hand_off_goes_before_new_attempts() {
    two(|ours, theirs| async move {
        let holder = hold(&ours, "n").await;
        let (name, first, second) = (key("n"), waiting(&["n"]), waiting(&["n"]));
        let mut first_changes = wait(&theirs, &first).await;
        let _second_changes = wait(&theirs, &second).await;
        assert_eq!(theirs.class(&[&first, &second]), Class::Acquire(&name));
        release(&ours, &holder).await;
        notified(&mut first_changes).await;
        assert_eq!(theirs.class(&[&first]), Class::Confirm);
        assert_eq!(theirs.class(&[&second]), Class::Acquire(&name));
        assert_eq!(theirs.class(&[&second, &first]), Class::Confirm);
        granted(&theirs, &first).await;
    })
    .await;
}

#[tokio::test]
async fn a_dropped_attempt_does_not_wait_for_the_change_stream() {
    two(|ours, theirs| async move {
        hold(&ours, "n").await;
        theirs.queue.as_ref().unwrap().watcher.hang();
        let limit = Duration::from_millis(300);
        let waiters: Vec<Arc<Claim>> = (0..3).map(|_| Arc::new(waiting(&["n"]))).collect();
        let mut answer = |_, _| ();
        let attempts = refs(&waiters);
        let batch = theirs.try_acquire_all(&attempts, &mut answer);
        assert!(tokio::time::timeout(limit, batch).await.is_err());
        assert!(waiters.iter().all(|claim| !claim.was_sent()), "the batch had a permit");
        for waiter in &waiters {
            assert!(tokio::time::timeout(limit, theirs.try_acquire(waiter)).await.is_err());
            let release = theirs.release(waiter, Duration::ZERO);
            let released = tokio::time::timeout(Duration::from_secs(3), release).await;
            assert_eq!(released.expect("the attempt has ended").unwrap(), Released::NotHeld);
        }
        // Connections are opened for them.
        let limit = Duration::from_secs(3);
        assert_eq!(available_within(&theirs.pool, Class::Acquire(&NAME), limit).await, 40);
    })
    .await;
}
