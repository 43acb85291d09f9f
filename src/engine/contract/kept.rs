//! `minHoldMs`: names that stay busy after their release.

use super::*;
use crate::engine::EngineExt;

/// `minHoldMs`: the release keeps the name busy, and the owner does not hold it any more.
pub(crate) async fn a_kept_name_stays_busy(s: Stores) {
    let ours = claim(&["n", "m"], LONG);
    acquire(&s.a, &ours).await;
    let released = Instant::now();
    assert_eq!(s.a.release(&ours, SHORT).await.unwrap(), Released::Freed);
    let kept = Instant::now();
    let (_, retry_after) = busy(&s.b, &claim(&["n"], LONG)).await;
    assert!(retry_after.unwrap() <= SHORT, "{retry_after:?}");
    busy(&s.b, &claim(&["m"], LONG)).await;
    assert_eq!(s.a.renew(&ours, ours.ttl).await.unwrap(), Renewed::Lost, "released");
    assert_eq!(release(&s.a, &ours).await, Released::NotHeld, "released");
    if released.elapsed() < SHORT {
        busy(&s.b, &claim(&["n"], LONG)).await;
    }
    // The time counts from when the store executed the release. The last node of a quorum may do so a little later.
    expiry(&s, SHORT.saturating_sub(kept.elapsed()) + Duration::from_millis(100)).await;
    acquire(&s.b, &claim(&["n", "m"], SHORT)).await;
}

/// The time of each name begins with its own release, also where the locks of a process share a session or an etcd lease.
pub(crate) async fn a_name_stays_busy_from_its_own_release(s: Stores) {
    const KEEP: Duration = Duration::from_secs(2);
    let [first, second] = ["first", "second"].map(|name| claim(&[name], LONG));
    acquire(&s.a, &first).await;
    acquire(&s.a, &second).await;
    assert_eq!(s.a.release(&first, KEEP).await.unwrap(), Released::Freed);
    sleep(KEEP).await;
    let released = Instant::now();
    assert_eq!(s.a.release(&second, KEEP).await.unwrap(), Released::Freed);
    granted_after(&s.b, "second", released, KEEP).await;
    acquire(&s.b, &claim(&["first"], LONG)).await;
}

/// The process that released the name has ended. Its waiters have no hand-off then.
pub(crate) async fn a_kept_name_outlasts_its_process(s: Stores) {
    let ours = claim(&["n"], LONG);
    let fence = acquire(&s.a, &ours).await;
    let waiter = waiting(&["n"], LONG);
    let mut subscription = s.b.subscribe(&waiter, &key("n")).await.unwrap();
    busy(&s.b, &waiter).await;
    let released = Instant::now();
    assert_eq!(s.a.release(&ours, SHORT).await.unwrap(), Released::Freed);
    s.a.close().await;
    let waiting = async {
        loop {
            if let Some(hand_off) = subscription.take_hand_off() {
                return hand_off.fence;
            }
            let remaining = match s.b.try_acquire(&waiter).await.unwrap() {
                Acquired::Granted { fence } => return fence,
                Acquired::Held { retry_after, .. } => retry_after.unwrap_or(SHORT),
            };
            let poll = if subscription.is_reliable() {
                4 * LONG
            } else {
                remaining
            };
            tokio::select! {
                () = subscription.changed() => {}
                () = sleep(poll) => {}
            }
        }
    };
    let next = tokio::time::timeout(2 * LONG, waiting).await.expect("it stays busy");
    assert!(released.elapsed() >= SHORT, "early: {:?}", released.elapsed());
    assert!(next > fence);
    assert!(s.b.inspect(&key("n")).await.unwrap().is_some());
}

/// Waits until a name is free, which must not be before it was kept for `keep`.
async fn granted_after(engine: &SharedEngine, name: &str, released: Instant, keep: Duration) {
    let next = claim(&[name], LONG);
    while let Acquired::Held { .. } = engine.try_acquire(&next).await.unwrap() {
        assert!(released.elapsed() < keep + LONG, "it stays busy");
        sleep(Duration::from_millis(50)).await;
    }
    assert!(released.elapsed() >= keep, "early: {:?}", released.elapsed());
}
