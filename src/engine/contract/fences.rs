//! Fencing tokens, and claims of several names (promise 4).

use super::*;

/// Promise 4.
pub(crate) async fn fences_grow_across_everything(s: Stores) {
    let mut last = Fence(0);
    let mut grows = |fence: Fence, how: &str| {
        assert!(fence > last, "{how}: {fence:?} after {last:?}");
        assert!(fence.0 < 1 << 53, "{how}: {fence:?} does not fit a double");
        last = fence;
    };
    let released = claim(&["n"], LONG);
    grows(take(&s.a, &released).await, "first");
    free(&s.a, &released).await;
    let expiring = claim(&["n"], Duration::from_millis(40));
    grows(take(&s.b, &expiring).await, "after a release");
    sleep(Duration::from_millis(70)).await;
    grows(take(&s.a, &claim(&["n"], LONG)).await, "after an expiry");
    s.b.force_release(&key("n")).await.unwrap();
    let set = claim(&["m", "n"], LONG);
    grows(take(&s.b, &set).await, "after a forced release, within a set");
    free(&s.b, &set).await;
    let kept = claim(&["n"], LONG);
    grows(take(&s.a, &kept).await, "after a set");
    s.a.release(&kept, Duration::from_millis(40)).await.unwrap();
    sleep(Duration::from_millis(70)).await;
    grows(take(&s.b, &claim(&["n"], SHORT)).await, "after a kept release");
}

/// Promise 4, where clocks are coarse: many holders within one tick.
pub(crate) async fn fences_grow_in_rapid_succession(s: Stores) {
    let mut last = Fence(0);
    for round in 0..200 {
        let engine = if round % 2 == 0 { &s.a } else { &s.b };
        let ours = claim(&["n"], LONG);
        let fence = take(engine, &ours).await;
        assert!(fence > last, "round {round}: {fence:?} after {last:?}");
        last = fence;
        assert_eq!(free(engine, &ours).await, Released::Freed);
    }
}

pub(crate) async fn several_names_are_all_or_nothing(s: Stores) {
    let middle = claim(&["b"], LONG);
    take(&s.a, &middle).await;
    let set = claim(&["c", "a", "b"], LONG);
    assert_eq!(busy(&s.b, &set).await.0, key("b"));
    for name in ["a", "c"] {
        assert_eq!(
            s.a.inspect(&key(name)).await.unwrap(),
            None,
            "{name} was left behind by a busy try"
        );
    }
    free(&s.a, &middle).await;
    take(&s.b, &set).await;
    for name in ["a", "b", "c"] {
        busy(&s.a, &claim(&[name], LONG)).await;
    }
    assert_eq!(free(&s.b, &set).await, Released::Freed);
    take(&s.a, &claim(&["a", "b", "c"], SHORT)).await;
}

pub(crate) async fn several_names_share_one_fence_and_one_fate(s: Stores) {
    // Take `b` a few times, so that its last fence is ahead of that of `a`.
    for _ in 0..3 {
        let ours = claim(&["b"], LONG);
        take(&s.a, &ours).await;
        free(&s.a, &ours).await;
    }
    let set = claim(&["a", "b"], SHORT);
    let fence = take(&s.a, &set).await;
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
    assert_eq!(free(&s.a, &set).await, Released::Freed);
    for name in ["a", "b"] {
        assert!(take(&s.b, &claim(&[name], SHORT)).await > fence, "{name}");
    }
}
