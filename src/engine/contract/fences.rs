//! Fencing tokens, and claims of several names (promise 4).

use super::*;
use crate::engine::EngineExt;

/// Promise 4.
pub(crate) async fn fencing_tokens_grow_with_each_grant(s: Stores) {
    let mut last = Fence(0);
    let mut grows = |fence: Fence, how: &str| {
        assert!(fence > last, "{how}: {fence:?} after {last:?}");
        assert!(fence.0 < 1 << 53, "{how}: {fence:?} does not fit a double");
        last = fence;
    };
    let released = claim(&["n"], LONG);
    grows(acquire(&s.a, &released).await, "first");
    release(&s.a, &released).await;
    let expiring = claim(&["n"], Duration::from_millis(40));
    grows(acquire(&s.b, &expiring).await, "after a release");
    expiry(&s, Duration::from_millis(70)).await;
    grows(acquire(&s.a, &claim(&["n"], LONG)).await, "after an expiry");
    s.b.force_release(&key("n")).await.unwrap();
    let set = claim(&["m", "n"], LONG);
    grows(acquire(&s.b, &set).await, "after a forced release, within a set");
    release(&s.b, &set).await;
    let kept = claim(&["n"], LONG);
    grows(acquire(&s.a, &kept).await, "after a set");
    s.a.release(&kept, Duration::from_millis(40)).await.unwrap();
    expiry(&s, Duration::from_millis(70)).await;
    grows(acquire(&s.b, &claim(&["n"], SHORT)).await, "after a kept release");
}

/// Promise 4, with many holders within one tick of the store's clock.
pub(crate) async fn fencing_tokens_grow_within_one_clock_tick(s: Stores) {
    let mut last = Fence(0);
    for round in 0..200 {
        let engine = if round % 2 == 0 { &s.a } else { &s.b };
        let ours = claim(&["n"], LONG);
        let fence = acquire(engine, &ours).await;
        assert!(fence > last, "round {round}: {fence:?} after {last:?}");
        last = fence;
        assert_eq!(release(engine, &ours).await, Released::Freed);
    }
}

pub(crate) async fn several_names_are_all_or_nothing(s: Stores) {
    let middle = claim(&["b"], LONG);
    acquire(&s.a, &middle).await;
    let set = claim(&["c", "a", "b"], LONG);
    assert_eq!(busy(&s.b, &set).await.0, key("b"));
    for name in ["a", "c"] {
        assert_eq!(
            s.a.inspect(&key(name)).await.unwrap(),
            None,
            "a busy attempt left {name}"
        );
    }
    release(&s.a, &middle).await;
    acquire(&s.b, &set).await;
    for name in ["a", "b", "c"] {
        busy(&s.a, &claim(&[name], LONG)).await;
    }
    assert_eq!(release(&s.b, &set).await, Released::Freed);
    acquire(&s.a, &claim(&["a", "b", "c"], SHORT)).await;
}

pub(crate) async fn several_names_share_one_fencing_token_and_one_lease(s: Stores) {
    // `b` is acquired a few times, so that its last fencing token is ahead of that of `a`.
    for _ in 0..3 {
        let ours = claim(&["b"], LONG);
        acquire(&s.a, &ours).await;
        release(&s.a, &ours).await;
    }
    let set = claim(&["a", "b"], SHORT);
    let fence = acquire(&s.a, &set).await;
    for name in ["a", "b"] {
        assert_eq!(
            s.b.inspect(&key(name)).await.unwrap().unwrap().fence,
            Some(fence),
            "{name}"
        );
    }
    assert_eq!(s.a.renew(&set, Ttl::clamped(LONG)).await.unwrap(), Renewed::Extended);
    sleep(SHORT).await;
    for name in ["a", "b"] {
        busy(&s.b, &claim(&[name], LONG)).await;
    }
    assert_eq!(release(&s.a, &set).await, Released::Freed);
    for name in ["a", "b"] {
        assert!(acquire(&s.b, &claim(&[name], SHORT)).await > fence, "{name}");
    }
}
