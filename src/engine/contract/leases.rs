//! Leases: one holder, its owner token, expiry, renewal (promises 1, 3 and 7).

use super::*;
use crate::engine::EngineExt;

/// Promise 1: a name is granted to one owner at a time.
pub(crate) async fn one_holder(s: Stores) {
    let (first, second) = (claim(&["n"], LONG), claim(&["n"], LONG));
    acquire(&s.a, &first).await;
    assert_eq!(busy(&s.b, &second).await.0, key("n"));
    assert_eq!(busy(&s.a, &second).await.0, key("n"), "busy for the same process, too");
    assert_eq!(release(&s.a, &first).await, Released::Freed);
    acquire(&s.b, &second).await;
    assert_eq!(busy(&s.a, &first).await.0, key("n"));
    assert_eq!(release(&s.b, &second).await, Released::Freed);
}

/// Promise 3.
pub(crate) async fn only_the_owner_releases(s: Stores) {
    let (holder, other) = (claim(&["n"], LONG), claim(&["n"], LONG));
    acquire(&s.a, &holder).await;
    assert_eq!(release(&s.b, &other).await, Released::NotHeld);
    assert_eq!(s.b.renew(&other, other.ttl).await.unwrap(), Renewed::Lost);
    busy(&s.b, &other).await;
    assert_eq!(
        release(&s.b, &holder).await,
        Released::Freed,
        "the owner is identified by its token, not by its connection"
    );
    assert_eq!(release(&s.a, &holder).await, Released::NotHeld, "a second release");
    let never = claim(&["never-acquired"], LONG);
    assert_eq!(release(&s.a, &never).await, Released::NotHeld);
}

/// Promise 1: a name is free as soon as its lease has expired, without a clean-up.
pub(crate) async fn an_expired_name_is_free_at_once(s: Stores) {
    let (first, second) = (claim(&["n"], SHORT), claim(&["n"], LONG));
    acquire(&s.a, &first).await;
    let granted = Instant::now();
    busy(&s.b, &second).await;
    expiry(&s, SHORT + Duration::from_millis(30)).await;
    acquire(&s.b, &second).await;
    assert!(
        granted.elapsed() < SHORT + Duration::from_secs(20),
        "this machine is too slow for this test"
    );
    assert_eq!(release(&s.a, &first).await, Released::NotHeld);
    busy(&s.a, &claim(&["n"], LONG)).await;
    release(&s.b, &second).await;
}

/// Promise 3: a retry after a lost reply is granted, with the same fencing token and the full ttl.
pub(crate) async fn acquire_is_idempotent_by_owner(s: Stores) {
    let ours = claim(&["n", "m"], LONG);
    let fence = acquire(&s.a, &ours).await;
    sleep(Duration::from_millis(2400)).await;
    let asked = Instant::now();
    assert_eq!(acquire(&s.b, &ours).await, fence);
    for name in ["n", "m"] {
        busy(&s.b, &claim(&[name], LONG)).await;
        let left = s.a.inspect(&key(name)).await.unwrap().unwrap().remaining.unwrap();
        assert!(left + asked.elapsed() >= LONG - CLOCK_ERROR, "{name}: {left:?}");
    }
    assert_eq!(release(&s.a, &ours).await, Released::Freed);
}

/// The first request is delayed, its retry is granted, the lease is extended, and then the first request arrives.
pub(crate) async fn a_late_retry_does_not_shorten_the_lease(s: Stores) {
    let ours = claim(&["n", "m"], SHORT);
    let fence = acquire(&s.a, &ours).await;
    assert_eq!(s.a.renew(&ours, Ttl::clamped(LONG)).await.unwrap(), Renewed::Extended);
    assert_eq!(acquire(&s.b, &ours).await, fence);
    for name in ["n", "m"] {
        let left = s.a.inspect(&key(name)).await.unwrap().unwrap().remaining.unwrap();
        assert!(left > SHORT, "{left:?}");
    }
}

pub(crate) async fn renewal_extends_and_never_shortens(s: Stores) {
    let ours = claim(&["n"], SHORT);
    acquire(&s.a, &ours).await;
    assert_eq!(s.a.renew(&ours, Ttl::clamped(LONG)).await.unwrap(), Renewed::Extended);
    assert_eq!(s.a.renew(&ours, Ttl::clamped(SHORT)).await.unwrap(), Renewed::Extended);
    sleep(SHORT + Duration::from_millis(30)).await;
    busy(&s.b, &claim(&["n"], LONG)).await;
    let info = s.b.inspect(&key("n")).await.unwrap().unwrap();
    assert!(info.remaining.unwrap() > Duration::from_secs(20), "{info:?}");
    release(&s.a, &ours).await;
}

/// Promise 7.
pub(crate) async fn renewal_never_recreates_a_lock(s: Stores) {
    let expired = claim(&["n"], Duration::from_millis(60));
    acquire(&s.a, &expired).await;
    expiry(&s, Duration::from_millis(90)).await;
    assert_eq!(s.a.renew(&expired, Ttl::clamped(LONG)).await.unwrap(), Renewed::Lost);
    assert_eq!(s.b.inspect(&key("n")).await.unwrap(), None);

    let forced = claim(&["m", "o"], LONG);
    acquire(&s.a, &forced).await;
    assert!(s.b.force_release(&key("m")).await.unwrap());
    assert_eq!(s.a.renew(&forced, Ttl::clamped(LONG)).await.unwrap(), Renewed::Lost);
    assert_eq!(s.b.inspect(&key("m")).await.unwrap(), None);
    assert_eq!(release(&s.a, &forced).await, Released::NotHeld, "one name was not held");
    acquire(&s.b, &claim(&["m", "o"], SHORT)).await;
}

/// Promise 3: a holder whose lease has expired cannot release its successor's lease.
pub(crate) async fn a_former_holder_cannot_change_its_successors_lease(s: Stores) {
    let (stale, successor) = (claim(&["n"], Duration::from_millis(60)), claim(&["n"], LONG));
    acquire(&s.a, &stale).await;
    expiry(&s, Duration::from_millis(90)).await;
    let fence = acquire(&s.b, &successor).await;
    assert_eq!(release(&s.a, &stale).await, Released::NotHeld);
    assert_eq!(s.a.renew(&stale, stale.ttl).await.unwrap(), Renewed::Lost);
    assert_eq!(s.a.release(&stale, LONG).await.unwrap(), Released::NotHeld);
    let info = s.a.inspect(&key("n")).await.unwrap().unwrap();
    assert_eq!(info.fence, Some(fence));
    assert_eq!(release(&s.b, &successor).await, Released::Freed);
}
