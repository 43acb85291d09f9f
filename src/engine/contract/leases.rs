//! Holding: one holder, its owner token, expiry, renewal (promises 1, 3 and 7).

use super::*;

/// Promise 1: while one holds, nobody else is granted; once it is free, the next is.
pub(crate) async fn one_holder(s: Stores) {
    let (first, second) = (claim(&["n"], LONG), claim(&["n"], LONG));
    take(&s.a, &first).await;
    assert_eq!(busy(&s.b, &second).await.0, key("n"));
    assert_eq!(
        busy(&s.a, &second).await.0,
        key("n"),
        "the same process is no exception"
    );
    assert_eq!(free(&s.a, &first).await, Released::Freed);
    take(&s.b, &second).await;
    assert_eq!(busy(&s.a, &first).await.0, key("n"));
    assert_eq!(free(&s.b, &second).await, Released::Freed);
}

/// Promise 3.
pub(crate) async fn only_the_owner_releases(s: Stores) {
    let (holder, stranger) = (claim(&["n"], LONG), claim(&["n"], LONG));
    take(&s.a, &holder).await;
    assert_eq!(free(&s.b, &stranger).await, Released::NotHeld);
    assert_eq!(s.b.renew(&stranger, stranger.ttl).await.unwrap(), Renewed::Lost);
    busy(&s.b, &stranger).await;
    assert_eq!(
        free(&s.b, &holder).await,
        Released::Freed,
        "the owner is known by its token, not by its connection"
    );
    assert_eq!(
        free(&s.a, &holder).await,
        Released::NotHeld,
        "a second release frees nothing"
    );
    let never = claim(&["never-taken"], LONG);
    assert_eq!(free(&s.a, &never).await, Released::NotHeld);
}

/// Promise 1: a lease past its end is free at once, not when some clean-up comes round.
pub(crate) async fn expiry_frees_at_once(s: Stores) {
    let (first, second) = (claim(&["n"], SHORT), claim(&["n"], LONG));
    take(&s.a, &first).await;
    let granted = Instant::now();
    busy(&s.b, &second).await;
    sleep(SHORT + Duration::from_millis(30)).await;
    take(&s.b, &second).await;
    assert!(
        granted.elapsed() < SHORT + Duration::from_secs(20),
        "this machine is too slow for the test to mean anything"
    );
    assert_eq!(free(&s.a, &first).await, Released::NotHeld);
    busy(&s.a, &claim(&["n"], LONG)).await;
    free(&s.b, &second).await;
}

/// Promise 3: a retry after a lost reply does not block itself, keeps its fence, and gets a full ttl.
pub(crate) async fn acquire_is_idempotent_by_owner(s: Stores) {
    let ours = claim(&["n", "m"], Duration::from_secs(2));
    let fence = take(&s.a, &ours).await;
    sleep(Duration::from_millis(1200)).await;
    assert_eq!(take(&s.b, &ours).await, fence);
    sleep(Duration::from_millis(1200)).await;
    busy(&s.b, &claim(&["n"], LONG)).await;
    busy(&s.b, &claim(&["m"], LONG)).await;
    assert_eq!(free(&s.a, &ours).await, Released::Freed);
}

/// A renewal adds time; one that is carried out late must not take time away.
/// The trap: the first request lay in a buffer, its retry was granted and extended, and then the first one arrives.
pub(crate) async fn a_late_retry_takes_nothing_away(s: Stores) {
    let ours = claim(&["n", "m"], SHORT);
    let fence = take(&s.a, &ours).await;
    assert_eq!(s.a.renew(&ours, Ttl::clamped(LONG)).await.unwrap(), Renewed::Extended);
    assert_eq!(take(&s.b, &ours).await, fence);
    for name in ["n", "m"] {
        let left = s.a.inspect(&key(name)).await.unwrap().unwrap().remaining.unwrap();
        assert!(left > SHORT, "{left:?}");
    }
}

pub(crate) async fn renewal_extends_and_never_shortens(s: Stores) {
    let ours = claim(&["n"], SHORT);
    take(&s.a, &ours).await;
    assert_eq!(s.a.renew(&ours, Ttl::clamped(LONG)).await.unwrap(), Renewed::Extended);
    assert_eq!(s.a.renew(&ours, Ttl::clamped(SHORT)).await.unwrap(), Renewed::Extended);
    sleep(SHORT + Duration::from_millis(30)).await;
    busy(&s.b, &claim(&["n"], LONG)).await;
    let info = s.b.inspect(&key("n")).await.unwrap().unwrap();
    assert!(info.remaining.unwrap() > Duration::from_secs(20), "{info:?}");
    free(&s.a, &ours).await;
}

/// Promise 7: what vanished stays away.
pub(crate) async fn renewal_never_recreates(s: Stores) {
    let expired = claim(&["n"], Duration::from_millis(60));
    take(&s.a, &expired).await;
    sleep(Duration::from_millis(90)).await;
    assert_eq!(s.a.renew(&expired, Ttl::clamped(LONG)).await.unwrap(), Renewed::Lost);
    assert_eq!(s.b.inspect(&key("n")).await.unwrap(), None);

    let forced = claim(&["m", "o"], LONG);
    take(&s.a, &forced).await;
    assert!(s.b.force_release(&key("m")).await.unwrap());
    assert_eq!(s.a.renew(&forced, Ttl::clamped(LONG)).await.unwrap(), Renewed::Lost);
    assert_eq!(s.b.inspect(&key("m")).await.unwrap(), None);
    assert_eq!(free(&s.a, &forced).await, Released::NotHeld, "not all of it was held");
    take(&s.b, &claim(&["m", "o"], SHORT)).await;
}

/// The gist's worst fault: a holder that outlived its lease frees whoever came after it.
pub(crate) async fn a_stale_holder_cannot_touch_its_successor(s: Stores) {
    let (stale, successor) = (claim(&["n"], Duration::from_millis(60)), claim(&["n"], LONG));
    take(&s.a, &stale).await;
    sleep(Duration::from_millis(90)).await;
    let fence = take(&s.b, &successor).await;
    assert_eq!(free(&s.a, &stale).await, Released::NotHeld);
    assert_eq!(s.a.renew(&stale, stale.ttl).await.unwrap(), Renewed::Lost);
    assert_eq!(s.a.release(&stale, LONG).await.unwrap(), Released::NotHeld);
    let info = s.a.inspect(&key("n")).await.unwrap().unwrap();
    assert_eq!(info.fence, Some(fence));
    assert_eq!(free(&s.b, &successor).await, Released::Freed);
}
