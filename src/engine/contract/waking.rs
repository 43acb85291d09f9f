//! Notifications of waiters.

use super::*;
use crate::engine::EngineExt;

/// A release between the busy attempt and the wait.
pub(crate) async fn a_change_after_subscribing_is_not_missed(s: Stores) {
    let (holder, waiter) = (claim(&["n"], LONG), waiting(&["n"], LONG));
    acquire(&s.a, &holder).await;
    let mut subscription = s.b.subscribe(&waiter, &key("n")).await.unwrap();
    busy(&s.b, &waiter).await;
    release(&s.a, &holder).await;
    sleep(Duration::from_millis(50)).await;
    woken(&mut subscription).await;
    acquire(&s.b, &waiter).await;
    let next = waiting(&["n"], LONG);
    let mut subscription = s.a.subscribe(&next, &key("n")).await.unwrap();
    busy(&s.a, &next).await;
    assert!(s.b.force_release(&key("n")).await.unwrap());
    woken(&mut subscription).await;
    acquire(&s.a, &next).await;
    release(&s.a, &next).await;
}

pub(crate) async fn a_kept_release_wakes_waiters(s: Stores) {
    let (holder, waiter) = (claim(&["n"], LONG), waiting(&["n"], LONG));
    acquire(&s.a, &holder).await;
    let mut subscription = s.b.subscribe(&waiter, &key("n")).await.unwrap();
    busy(&s.b, &waiter).await;
    s.a.release(&holder, SHORT).await.unwrap();
    woken(&mut subscription).await;
    let deadline = Instant::now() + Duration::from_secs(5);
    loop {
        match s.b.try_acquire(&waiter).await.unwrap() {
            Acquired::Granted { .. } => break,
            Acquired::Held { retry_after, .. } => {
                assert!(
                    retry_after.unwrap() <= SHORT + CLOCK_ERROR,
                    "the waiter does not know the new end: {retry_after:?}"
                );
                assert!(Instant::now() < deadline, "still busy");
                sleep(retry_after.unwrap().min(Duration::from_millis(50))).await;
            }
        }
    }
    release(&s.b, &waiter).await;
}

/// An expiry needs no notification: `retry_after` is its time.
pub(crate) async fn retry_after_is_bounded_by_the_lease(s: Stores) {
    acquire(&s.a, &claim(&["n"], SHORT)).await;
    for ours in [claim(&["n"], LONG), waiting(&["n"], LONG)] {
        let (_, retry_after) = busy(&s.b, &ours).await;
        assert!(retry_after.unwrap() <= SHORT + CLOCK_ERROR, "{retry_after:?}");
        release(&s.b, &ours).await;
    }
}
