//! Waiters are served in order of arrival, in stores that keep a queue (promise 5).

use super::*;
use crate::engine::EngineExt;

/// Promise 5.
pub(crate) async fn waiters_are_served_in_order(s: Stores) {
    if !s.a.describe().ordered {
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
    if !s.a.describe().ordered {
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
    if !s.a.describe().ordered {
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
    expiry(&s, SHORT + Duration::from_millis(50)).await;
    acquire(&s.a, &next).await;
    assert!(started.elapsed() < Duration::from_secs(20));
    // Elsewhere the process of a waiter keeps its positions alive.
    if matches!(s.a.describe().name, "memory" | "sqlite") {
        assert_eq!(s.a.inspect(&key("n")).await.unwrap().unwrap().waiting, Some(0));
    }
}

/// A waiter whose position expired keeps it, ahead of those that came after it, if it was only slow.
#[allow(dead_code, reason = "not a case of stores where the order of entries is the lock")]
pub(crate) async fn a_slow_waiter_keeps_its_position(s: Stores) {
    if !s.a.describe().ordered {
        return;
    }
    let (holder, slow, next) = (claim(&["n"], LONG), waiting(&["n"], SHORT), waiting(&["n"], LONG));
    acquire(&s.a, &holder).await;
    busy(&s.b, &slow).await;
    busy(&s.a, &next).await;
    release(&s.a, &holder).await;
    expiry(&s, SHORT + Duration::from_millis(50)).await;
    acquire(&s.a, &next).await;
    let late = waiting(&["n"], LONG);
    busy(&s.a, &late).await;
    busy(&s.b, &slow).await;
    release(&s.a, &next).await;
    busy(&s.a, &late).await;
    acquire(&s.b, &slow).await;
    release(&s.b, &slow).await;
    acquire(&s.a, &late).await;
}

pub(crate) async fn a_release_by_a_waiter_removes_its_position(s: Stores) {
    if !s.a.describe().ordered {
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

/// A claim of several names waits for one name at a time, in their order. It blocks the name that it waits for, and those before
/// it.
pub(crate) async fn a_set_does_not_block_names_after_the_one_it_waits_on(s: Stores) {
    moving_set(&s, false).await;
}

/// A claim of several names keeps its number when it moves to the queue of another name.
#[allow(dead_code, reason = "not a case of stores where the order of entries is the lock")]
pub(crate) async fn a_set_keeps_its_number(s: Stores) {
    moving_set(&s, true).await;
}

/// A set waits for its first name, then for the second one. `is_before`: it keeps its number, and is served before a waiter that
/// came while it waited for the first name.
async fn moving_set(s: &Stores, is_before: bool) {
    if !s.a.describe().ordered {
        return;
    }
    let (on_a, on_b) = (claim(&["{s}a"], LONG), claim(&["{s}b"], LONG));
    acquire(&s.a, &on_a).await;
    acquire(&s.a, &on_b).await;
    let set = waiting(&["{s}a", "{s}b"], LONG);
    let mut subscription = s.b.subscribe(&set, &key("{s}a")).await.unwrap();
    assert_eq!(busy(&s.b, &set).await.0, key("{s}a"));
    release(&s.a, &on_b).await;
    let on_b = claim(&["{s}b"], LONG);
    acquire(&s.a, &on_b).await;
    let late_on_b = waiting(&["{s}b"], LONG);
    if is_before {
        busy(&s.a, &late_on_b).await;
    }
    release(&s.a, &on_a).await;
    woken(&mut subscription).await;
    assert_eq!(
        busy(&s.b, &set).await.0,
        key("{s}b"),
        "the set moves on to the next busy name"
    );
    if !is_before {
        busy(&s.a, &late_on_b).await;
    }
    // MongoDB rolls back the names before a busy one ("One of each").
    if s.a.describe().name != "mongodb" {
        busy(&s.a, &claim(&["{s}a"], LONG)).await;
        let info = s.a.inspect(&key("{s}a")).await.unwrap();
        assert!(info.is_none(), "it has no holder: {info:?}");
        assert_eq!(busy(&s.b, &set).await.0, key("{s}b"), "it is still reserved");
    }
    release(&s.a, &on_b).await;
    busy(&s.a, &late_on_b).await;
    acquire(&s.b, &set).await;
    release(&s.b, &set).await;
    acquire(&s.a, &late_on_b).await;
}

/// A name of a set is free, with a waiter that came earlier: its holder's lease has expired. The set waits for a later name, and
/// must not reserve the free one before that waiter.
pub(crate) async fn a_set_does_not_overtake_the_waiters_of_its_names(s: Stores) {
    if !s.a.describe().ordered {
        return;
    }
    let short = claim(&["{s}a"], SHORT);
    acquire(&s.a, &short).await;
    let on_b = claim(&["{s}b"], LONG);
    acquire(&s.a, &on_b).await;
    let first = waiting(&["{s}a"], LONG);
    busy(&s.b, &first).await;
    let set = waiting(&["{s}a", "{s}b"], LONG);
    expiry(&s, SHORT + Duration::from_millis(1)).await;
    busy(&s.a, &set).await;
    acquire(&s.b, &first).await;
    release(&s.b, &first).await;
    release(&s.a, &on_b).await;
    acquire(&s.a, &set).await;
}

/// Other callers keep each name of a set busy all the time. If the set rolled back the names before a busy one, it would never be
/// granted all of them.
pub(crate) async fn a_set_is_served_while_other_callers_keep_its_names_busy(s: Stores) {
    // MongoDB rolls back the names before a busy one ("One of each").
    if !s.a.describe().ordered || s.a.describe().name == "mongodb" {
        return;
    }
    let names = ["a", "b", "c"];
    let mut holders: Vec<Option<Claim>> = Vec::new();
    for name in names {
        let holder = claim(&[name], LONG);
        acquire(&s.a, &holder).await;
        holders.push(Some(holder));
    }
    let set = waiting(&names, LONG);
    let mut later: Vec<Claim> = names.iter().map(|name| waiting(&[name], LONG)).collect();
    busy(&s.b, &set).await;
    for waiter in &later {
        busy(&s.a, waiter).await;
    }
    let mut is_granted = false;
    for _ in 0..3 {
        for (index, name) in names.iter().enumerate() {
            if let Some(holder) = holders[index].take() {
                release(&s.a, &holder).await;
            }
            is_granted |= matches!(s.b.try_acquire(&set).await.unwrap(), Acquired::Granted { .. });
            if is_granted {
                break;
            }
            if let Acquired::Granted { .. } = s.a.try_acquire(&later[index]).await.unwrap() {
                let next = waiting(&[name], LONG);
                busy(&s.a, &next).await;
                holders[index] = Some(std::mem::replace(&mut later[index], next));
            }
        }
        if is_granted {
            break;
        }
    }
    assert!(is_granted, "three releases of each name, and no grant");
    assert_eq!(release(&s.b, &set).await, Released::Freed);
    for waiter in &later {
        acquire(&s.a, waiter).await;
    }
}

/// A waiter that leaves, and one that died, block the names before the one that they waited for no longer than a lease.
pub(crate) async fn names_that_a_set_keeps_are_free_after_it(s: Stores) {
    if !s.a.describe().ordered || s.a.describe().name == "mongodb" {
        return;
    }
    let on_b = claim(&["{s}b"], LONG);
    acquire(&s.a, &on_b).await;
    let (leaving, dead) = (waiting(&["{s}a", "{s}b"], LONG), waiting(&["{s}a", "{s}b"], SHORT));
    assert_eq!(busy(&s.b, &leaving).await.0, key("{s}b"));
    busy(&s.a, &claim(&["{s}a"], LONG)).await;
    release(&s.b, &leaving).await;
    let on_a = claim(&["{s}a"], LONG);
    acquire(&s.a, &on_a).await;
    release(&s.a, &on_a).await;
    assert_eq!(busy(&s.b, &dead).await.0, key("{s}b"));
    busy(&s.a, &on_a).await;
    expiry(&s, SHORT + Duration::from_millis(50)).await;
    acquire(&s.a, &on_a).await;
}

/// Three waiters wait for the same two names. If each attempt that finds a name busy handed off its reservation, no waiter might
/// ever get both names.
pub(crate) async fn waiters_for_the_same_names_do_not_block_each_other(s: Stores) {
    // On MongoDB such waiters can block each other for seconds (docs/stores/).
    if !s.a.describe().ordered || s.a.describe().name == "mongodb" {
        return;
    }
    let (on_a, on_b) = (claim(&["{s}a"], LONG), claim(&["{s}b"], LONG));
    let (first, second, third) = (
        waiting(&["{s}a", "{s}b"], LONG),
        waiting(&["{s}a", "{s}b"], LONG),
        waiting(&["{s}a", "{s}b"], LONG),
    );
    acquire(&s.a, &on_a).await;
    acquire(&s.a, &on_b).await;
    assert_eq!(busy(&s.a, &first).await.0, key("{s}a"));
    assert_eq!(busy(&s.b, &second).await.0, key("{s}a"));
    assert_eq!(busy(&s.a, &third).await.0, key("{s}a"));
    release(&s.a, &on_a).await;
    release(&s.a, &on_b).await;
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
