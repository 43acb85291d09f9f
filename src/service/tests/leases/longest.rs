//! Stores whose leases end with a session: the service shortens a ttl to the longest lease, and renews it.

use std::sync::atomic::Ordering::SeqCst;

use super::super::*;

const LONGEST: u64 = 5000;

fn bounded_service() -> (Arc<Faulty>, Locks) {
    service_with(true, LONGEST)
}

fn not_renewed(ttl_ms: u64) -> AcquireOptions {
    AcquireOptions {
        renew: false,
        ..options(ttl_ms, 0)
    }
}

#[tokio::test(start_paused = true)]
async fn a_longer_ttl_is_renewed_as_the_longest_lease() {
    let (engine, locks) = bounded_service();
    let lease = take(&locks, "n", options(30_000, 0)).await;
    assert!(lease.remaining() <= ms(LONGEST) && lease.remaining() > ms(4900));
    assert_eq!(lease.ttl(), Ttl::clamped(ms(30_000)), "the ttl that was asked for");
    tokio::time::sleep(ms(60_000)).await;
    assert!(lease.is_held());
    let renewals = engine.renewals.load(SeqCst);
    assert!((36..=41).contains(&renewals), "{renewals}");
    assert!(locks.release(&lease).await.unwrap());
    let short = take(&locks, "n", options(900, 0)).await;
    assert_eq!((short.ttl(), short.renew), (Ttl::clamped(ms(900)), true));
    assert!(short.remaining() <= ms(900));
}

#[tokio::test(start_paused = true)]
async fn without_renewal_a_lease_ends_at_its_ttl() {
    let (engine, locks) = bounded_service();
    let lease = take(&locks, "n", not_renewed(12_000)).await;
    assert!(!lease.renew);
    tokio::time::sleep(ms(11_500)).await;
    assert!(lease.is_held() && engine.renewals.load(SeqCst) > 5);
    assert!(is_busy(&another(&engine), "n").await);
    tokio::time::sleep(ms(510)).await;
    assert!(!lease.is_held());
    settle().await;
    let loss = lease.loss().unwrap().message;
    assert!(loss.contains("its ttl has passed, and renewal is off"), "{loss}");
    // Within the allowance for clocks.
    tokio::time::sleep(ms(300)).await;
    assert!(!held_in_store(&engine, "n").await);
    let short = take(&locks, "n", not_renewed(2000)).await;
    let before = engine.renewals.load(SeqCst);
    tokio::time::sleep(ms(2000)).await;
    assert!(!short.is_held());
    assert_eq!(
        engine.renewals.load(SeqCst),
        before,
        "it is shorter than the longest lease"
    );
}

#[tokio::test(start_paused = true)]
async fn an_extension_moves_the_end() {
    let (engine, locks) = bounded_service();
    for ttl_ms in [2000, 8000] {
        let lease = take(&locks, "n", not_renewed(ttl_ms)).await;
        tokio::time::sleep(ms(1000)).await;
        locks.extend(&lease, Ttl::clamped(ms(20_000))).await.unwrap();
        assert_eq!((lease.ttl(), lease.renew), (Ttl::clamped(ms(20_000)), false));
        // It never shortens a lease.
        locks.extend(&lease, Ttl::clamped(ms(10))).await.unwrap();
        tokio::time::sleep(ms(19_500)).await;
        assert!(lease.is_held(), "{ttl_ms}");
        tokio::time::sleep(ms(510)).await;
        assert!(!lease.is_held(), "{ttl_ms}");
        tokio::time::sleep(ms(600)).await;
        assert!(!held_in_store(&engine, "n").await, "{ttl_ms}");
    }
    let capped = AcquireOptions {
        max_hold: Some(ms(9000)),
        ..not_renewed(8000)
    };
    let lease = take(&locks, "n", capped).await;
    locks.extend(&lease, Ttl::clamped(ms(20_000))).await.unwrap();
    tokio::time::sleep(ms(8500)).await;
    assert!(lease.is_held());
    tokio::time::sleep(ms(510)).await;
    assert!(!lease.is_held(), "maxHoldMs counts, too");
    let renewed = take(&locks, "m", options(3000, 0)).await;
    locks.extend(&renewed, Ttl::clamped(ms(60_000))).await.unwrap();
    assert!(renewed.remaining() <= ms(LONGEST));
    tokio::time::sleep(ms(100_000)).await;
    assert!(renewed.is_held());
}
