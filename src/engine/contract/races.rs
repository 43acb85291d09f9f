//! Concurrent claims, and dropped calls.

use super::*;
use crate::engine::EngineExt;

/// Promise 1 under load, checked with an unprotected counter.
pub(crate) async fn claims_racing_for_one_name_never_overlap(s: Stores) {
    const TASKS: usize = 8;
    const ROUNDS: usize = 10;
    let counter = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let mut tasks = Vec::new();
    for task in 0..TASKS {
        let engine = if task % 2 == 0 { s.a.clone() } else { s.b.clone() };
        let counter = counter.clone();
        tasks.push(tokio::spawn(async move {
            for _ in 0..ROUNDS {
                let ours = claim(&["n"], LONG);
                while !is_granted(&engine, &ours).await {
                    sleep(Duration::from_millis(fastrand::u64(1..8))).await;
                }
                let seen = counter.load(std::sync::atomic::Ordering::SeqCst);
                sleep(Duration::from_millis(1)).await;
                counter.store(seen + 1, std::sync::atomic::Ordering::SeqCst);
                assert_eq!(release(&engine, &ours).await, Released::Freed);
            }
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!(counter.load(std::sync::atomic::Ordering::SeqCst), TASKS * ROUNDS);
}

pub(crate) async fn overlapping_sets_never_deadlock(s: Stores) {
    let sets: [&[&str]; 4] = [&["a", "b"], &["b", "c"], &["c", "a"], &["c", "b", "a"]];
    let mut tasks = Vec::new();
    for (task, set) in sets.into_iter().enumerate() {
        let engine = if task % 2 == 0 { s.a.clone() } else { s.b.clone() };
        tasks.push(tokio::spawn(async move {
            for _ in 0..5 {
                let ours = waiting(set, LONG);
                while !is_granted(&engine, &ours).await {
                    sleep(Duration::from_millis(fastrand::u64(1..8))).await;
                }
                sleep(Duration::from_millis(1)).await;
                assert_eq!(release(&engine, &ours).await, Released::Freed);
            }
        }));
    }
    let all = async {
        for task in tasks {
            task.await.unwrap();
        }
    };
    tokio::time::timeout(Duration::from_secs(30), all)
        .await
        .expect("a deadlock");
}

pub(crate) async fn renewal_racing_release_leaves_nothing(s: Stores) {
    for _ in 0..20 {
        let ours = claim(&["n"], LONG);
        acquire(&s.a, &ours).await;
        let renewing = unlocked(async || s.b.renew(&ours, ours.ttl).await);
        let (_, released) = tokio::join!(renewing, release(&s.a, &ours));
        assert_eq!(released, Released::Freed);
        assert_eq!(
            s.a.inspect(&key("n")).await.unwrap(),
            None,
            "a renewal re-created the lock"
        );
    }
}

/// A dropped attempt leaves at most a lease, which its owner token can release.
pub(crate) async fn a_dropped_call_has_no_side_effect(s: Stores) {
    for round in 0..20u64 {
        let ours = claim(&["n"], LONG);
        let _ = tokio::time::timeout(Duration::from_micros(round * 40), s.a.try_acquire(&ours)).await;
        // After this, what was sent has arrived.
        sleep(Duration::from_millis(10)).await;
        release(&s.a, &ours).await;
        assert_eq!(s.b.inspect(&key("n")).await.unwrap(), None, "round {round}");
    }
    let last = claim(&["n"], LONG);
    acquire(&s.a, &last).await;
    release(&s.a, &last).await;
}
