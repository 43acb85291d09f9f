//! Order of arrival, for stores that keep a queue (promise 5).

use super::*;

/// Promise 5, for stores that keep a queue.
pub(crate) async fn waiters_are_served_in_order(s: Stores) {
    if !s.a.ordered() {
        return;
    }
    let holder = claim(&["n"], LONG);
    take(&s.a, &holder).await;
    // A waiter waits through one engine, from beginning to end.
    let waiters: Vec<(&SharedEngine, Claim)> = (0..6)
        .map(|i| (if i % 2 == 0 { &s.a } else { &s.b }, waiting(&["n"], LONG)))
        .collect();
    for (engine, waiter) in &waiters {
        busy(engine, waiter).await;
    }
    free(&s.a, &holder).await;
    for (i, (engine, waiter)) in waiters.iter().enumerate() {
        for (engine, late) in waiters[i + 1..].iter().rev() {
            busy(engine, late).await;
        }
        take(engine, waiter).await;
        assert_eq!(free(engine, waiter).await, Released::Freed);
    }
    take(&s.a, &claim(&["n"], SHORT)).await;
}

pub(crate) async fn a_try_never_passes_the_queue(s: Stores) {
    if !s.a.ordered() {
        return;
    }
    let (holder, waiter) = (claim(&["n"], LONG), waiting(&["n"], LONG));
    take(&s.a, &holder).await;
    busy(&s.b, &waiter).await;
    free(&s.a, &holder).await;
    busy(&s.a, &claim(&["n"], LONG)).await;
    busy(&s.a, &claim(&["m", "n"], LONG)).await;
    take(&s.b, &waiter).await;
    free(&s.b, &waiter).await;
    take(&s.a, &claim(&["n"], SHORT)).await;
}

/// The first in the queue dies: the next is served when its place lapses, and it was told when that is.
pub(crate) async fn a_dead_waiter_is_passed_over(s: Stores) {
    if !s.a.ordered() {
        return;
    }
    let (holder, dead, next) = (claim(&["n"], LONG), waiting(&["n"], SHORT), waiting(&["n"], LONG));
    take(&s.a, &holder).await;
    busy(&s.b, &dead).await;
    busy(&s.a, &next).await;
    free(&s.a, &holder).await;
    let started = Instant::now();
    let (_, retry_after) = busy(&s.a, &next).await;
    assert!(retry_after.unwrap() <= SHORT, "{retry_after:?}");
    sleep(SHORT + Duration::from_millis(50)).await;
    take(&s.a, &next).await;
    assert!(started.elapsed() < Duration::from_secs(20));
    // The one that was only slow comes back to its place, in front of whoever came after it.
    let late = waiting(&["n"], LONG);
    busy(&s.a, &late).await;
    busy(&s.b, &dead).await;
    free(&s.a, &next).await;
    busy(&s.a, &late).await;
    take(&s.b, &dead).await;
    free(&s.b, &dead).await;
    take(&s.a, &late).await;
}

pub(crate) async fn giving_up_leaves_the_queue(s: Stores) {
    if !s.a.ordered() {
        return;
    }
    let (holder, quitter, next) = (claim(&["n"], LONG), waiting(&["n"], LONG), waiting(&["n"], LONG));
    take(&s.a, &holder).await;
    busy(&s.b, &quitter).await;
    let mut subscription = s.b.subscribe(&next, &key("n")).await.unwrap();
    busy(&s.b, &next).await;
    free(&s.a, &holder).await;
    assert_eq!(free(&s.b, &quitter).await, Released::NotHeld);
    woken(&mut subscription).await;
    take(&s.b, &next).await;
}

/// A set waits on one name at a time, and keeps its place in the order of arrival when it moves.
pub(crate) async fn a_set_does_not_block_names_it_does_not_wait_on(s: Stores) {
    if !s.a.ordered() {
        return;
    }
    let (on_a, on_b) = (claim(&["a"], LONG), claim(&["b"], LONG));
    take(&s.a, &on_a).await;
    take(&s.a, &on_b).await;
    let set = waiting(&["a", "b"], LONG);
    let mut told = s.b.subscribe(&set, &key("a")).await.unwrap();
    assert_eq!(busy(&s.b, &set).await.0, key("a"));
    let late_on_b = waiting(&["b"], LONG);
    busy(&s.a, &late_on_b).await;
    free(&s.a, &on_a).await;
    woken(&mut told).await;
    assert_eq!(
        busy(&s.b, &set).await.0,
        key("b"),
        "the set moves on to the next busy name"
    );
    let passing = claim(&["a"], LONG);
    take(&s.a, &passing).await;
    free(&s.a, &passing).await;
    free(&s.a, &on_b).await;
    busy(&s.a, &late_on_b).await;
    take(&s.b, &set).await;
    free(&s.b, &set).await;
    take(&s.a, &late_on_b).await;
}
