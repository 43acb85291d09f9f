//! Waiters are served in order of arrival, in stores that keep a queue (promise 5).

use super::*;

/// Promise 5.
pub(crate) async fn waiters_are_served_in_order(s: Stores) {
    if !s.a.ordered() {
        return;
    }
    let holder = claim(&["n"], LONG);
    acquire(&s.a, &holder).await;
    // Each waiter uses one engine for all of its attempts.
    let waiters: Vec<(&SharedEngine, Claim)> = (0..6)
        .map(|i| (if i % 2 == 0 { &s.a } else { &s.b }, waiting(&["n"], LONG)))
        .collect();
    for (engine, waiter) in &waiters {
        busy(engine, waiter).await;
    }
    release(&s.a, &holder).await;
    for (i, (engine, waiter)) in waiters.iter().enumerate() {
        for (engine, late) in waiters[i + 1..].iter().rev() {
            busy(engine, late).await;
        }
        acquire(engine, waiter).await;
        assert_eq!(release(engine, waiter).await, Released::Freed);
    }
    acquire(&s.a, &claim(&["n"], SHORT)).await;
}

pub(crate) async fn an_attempt_never_passes_the_queue(s: Stores) {
    if !s.a.ordered() {
        return;
    }
    let (holder, waiter) = (claim(&["n"], LONG), waiting(&["n"], LONG));
    acquire(&s.a, &holder).await;
    busy(&s.b, &waiter).await;
    release(&s.a, &holder).await;
    busy(&s.a, &claim(&["n"], LONG)).await;
    busy(&s.a, &claim(&["m", "n"], LONG)).await;
    acquire(&s.b, &waiter).await;
    release(&s.b, &waiter).await;
    acquire(&s.a, &claim(&["n"], SHORT)).await;
}

/// The first waiter dies. The next one is served when the position of the first expires, and knows that time from `retry_after`.
pub(crate) async fn a_dead_waiter_is_skipped(s: Stores) {
    if !s.a.ordered() {
        return;
    }
    let (holder, dead, next) = (claim(&["n"], LONG), waiting(&["n"], SHORT), waiting(&["n"], LONG));
    acquire(&s.a, &holder).await;
    busy(&s.b, &dead).await;
    busy(&s.a, &next).await;
    release(&s.a, &holder).await;
    let started = Instant::now();
    let (_, retry_after) = busy(&s.a, &next).await;
    assert!(retry_after.unwrap() <= SHORT, "{retry_after:?}");
    sleep(SHORT + Duration::from_millis(50)).await;
    acquire(&s.a, &next).await;
    assert!(started.elapsed() < Duration::from_secs(20));
    // Elsewhere the process of a waiter keeps its positions alive.
    if matches!(s.a.name(), "memory" | "sqlite") {
        assert_eq!(s.a.inspect(&key("n")).await.unwrap().unwrap().waiting, Some(0));
    }
    // A waiter that was only slow keeps its position, ahead of those that came after it.
    let late = waiting(&["n"], LONG);
    busy(&s.a, &late).await;
    busy(&s.b, &dead).await;
    release(&s.a, &next).await;
    busy(&s.a, &late).await;
    acquire(&s.b, &dead).await;
    release(&s.b, &dead).await;
    acquire(&s.a, &late).await;
}

pub(crate) async fn a_release_by_a_waiter_removes_its_position(s: Stores) {
    if !s.a.ordered() {
        return;
    }
    let (holder, leaving, next) = (claim(&["n"], LONG), waiting(&["n"], LONG), waiting(&["n"], LONG));
    acquire(&s.a, &holder).await;
    busy(&s.b, &leaving).await;
    let mut subscription = s.b.subscribe(&next, &key("n")).await.unwrap();
    busy(&s.b, &next).await;
    release(&s.a, &holder).await;
    // In some stores the hand-off has made it the holder.
    release(&s.b, &leaving).await;
    woken(&mut subscription).await;
    acquire(&s.b, &next).await;
}

/// A claim of several names waits for one name at a time, and keeps its number when it moves to the queue of another name.
pub(crate) async fn a_set_does_not_block_names_it_does_not_wait_on(s: Stores) {
    if !s.a.ordered() {
        return;
    }
    let (on_a, on_b) = (claim(&["a"], LONG), claim(&["b"], LONG));
    acquire(&s.a, &on_a).await;
    acquire(&s.a, &on_b).await;
    let set = waiting(&["a", "b"], LONG);
    let mut subscription = s.b.subscribe(&set, &key("a")).await.unwrap();
    assert_eq!(busy(&s.b, &set).await.0, key("a"));
    let late_on_b = waiting(&["b"], LONG);
    busy(&s.a, &late_on_b).await;
    release(&s.a, &on_a).await;
    woken(&mut subscription).await;
    assert_eq!(
        busy(&s.b, &set).await.0,
        key("b"),
        "the set moves on to the next busy name"
    );
    let passing = claim(&["a"], LONG);
    acquire(&s.a, &passing).await;
    release(&s.a, &passing).await;
    release(&s.a, &on_b).await;
    busy(&s.a, &late_on_b).await;
    acquire(&s.b, &set).await;
    release(&s.b, &set).await;
    acquire(&s.a, &late_on_b).await;
}

/// Three waiters wait for the same two names. Two of them each have a reservation of one name and need the other name. The attempts
/// run one after the other, because a hand-off wakes one waiter. If each attempt handed off its reservation, no waiter would ever get
/// both names.
pub(crate) async fn waiters_for_the_same_names_do_not_block_each_other(s: Stores) {
    // On MongoDB, and with names of several slots of a cluster, such waiters can block each other for seconds (docs/stores/).
    if !s.a.ordered() || s.a.name() == "mongodb" {
        return;
    }
    let (on_a, on_b) = (claim(&["{s}a"], LONG), claim(&["{s}b"], LONG));
    let (first, second, third) = (
        waiting(&["{s}a", "{s}b"], LONG),
        waiting(&["{s}a", "{s}b"], LONG),
        waiting(&["{s}a", "{s}b"], LONG),
    );
    acquire(&s.a, &on_b).await;
    assert_eq!(busy(&s.b, &second).await.0, key("{s}b"));
    acquire(&s.a, &on_a).await;
    assert_eq!(busy(&s.a, &first).await.0, key("{s}a"));
    assert_eq!(busy(&s.a, &third).await.0, key("{s}a"));
    release(&s.a, &on_a).await;
    release(&s.a, &on_b).await;
    // The names are handed off now: `a` to the first waiter, `b` to the second one.
    let mut waiters = vec![(&s.a, first), (&s.b, second), (&s.a, third)];
    while !waiters.is_empty() {
        let before = waiters.len();
        for _ in 0..3 {
            for (engine, waiter) in std::mem::take(&mut waiters) {
                match engine.try_acquire(&waiter).await.unwrap() {
                    Acquired::Granted { .. } => assert_eq!(release(engine, &waiter).await, Released::Freed),
                    Acquired::Held { .. } => waiters.push((engine, waiter)),
                }
            }
        }
        assert!(waiters.len() < before, "nine attempts and no grant");
    }
    // No reservation is left.
    acquire(&s.a, &claim(&["{s}a", "{s}b"], SHORT)).await;
}
