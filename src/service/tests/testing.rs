//! `testing.rs`: the clock of a store and of the leases on it moves, and a lease ends in the store.

use super::*;
use crate::engine::memory::MemoryEngine;
use crate::service::testing::{advance, lose};

fn on_memory() -> [Locks; 2] {
    let engine = MemoryEngine::named(OwnerToken::fresh().as_str());
    let detector = || Arc::new(StallDetector::default());
    [(); 2].map(|()| Locks::new(engine.clone(), STORE_TIMEOUT, detector(), None))
}

async fn move_by(services: &[Locks], by: Duration) {
    advance(services, by, async || {}).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn leases_are_renewed_and_expire_at_their_times() {
    let services = on_memory();
    let started = tokio::time::Instant::now();
    let renewed = take(&services[0], "a", options(30_000, 0)).await;
    let expires = AcquireOptions {
        renew: false,
        ..options(30_000, 0)
    };
    let ended = take(&services[1], "b", expires).await;
    move_by(&services, ms(29_600)).await;
    assert!(renewed.remaining() > ms(19_000), "{:?}", renewed.remaining());
    assert!(ended.remaining() <= ms(98), "{:?}", ended.remaining());
    assert!(ended.is_held());
    move_by(&services, ms(100)).await;
    assert!(!ended.is_held(), "after 99 % of the ttl");
    assert!(is_busy(&services[0], "b").await, "until the end of the ttl");
    move_by(&services, ms(300)).await;
    assert!(!is_busy(&services[0], "b").await);
    move_by(&services, Duration::from_secs(3600)).await;
    assert!(renewed.is_held());
    assert_eq!((services[0].stats().lost, services[1].stats().lost), (0, 1));
    assert!(
        started.elapsed() < Duration::from_secs(5),
        "in real time: {:?}",
        started.elapsed()
    );
}

#[tokio::test(start_paused = true)]
async fn a_lost_lease_ends_for_its_holder_and_in_the_store() {
    let services = on_memory();
    let lease = take(&services[1], "a", options(30_000, 0)).await;
    assert!(lose(&services, &key("a")).await.unwrap());
    assert!(lease.loss().is_some());
    assert!(!is_busy(&services[0], "a").await);
    assert!(!lose(&services, &key("a")).await.unwrap(), "it is free");
}

#[tokio::test(start_paused = true)]
async fn the_clock_of_another_store_does_not_move() {
    let services = [service().1];
    let error = advance(&services, ms(1), async || {}).await.unwrap_err();
    assert_eq!(error.code, Code::InvalidArgument);
    assert_eq!(
        lose(&services, &key("a")).await.unwrap_err().code,
        Code::InvalidArgument
    );
}
