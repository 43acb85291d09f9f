//! Tests of leases, of the order of waiters, and of expired rows.

use super::*;
use crate::engine::{EngineExt, Subscription};

#[tokio::test]
async fn expired_rows_of_one_time_names_are_removed() {
    let folder = folder();
    let engine = open(folder.path()).await;
    for round in 0..300 {
        assert!(
            granted(
                &engine,
                &claim(&[&format!("once-{round}"), &format!("twice-{round}")], 1)
            )
            .await
        );
    }
    let waiter = waiting(&["busy"], 1);
    assert!(granted(&engine, &claim(&["busy"], 60_000)).await);
    assert!(!granted(&engine, &waiter).await);
    tokio::time::sleep(Duration::from_millis(20)).await;
    let mut raw = raw(folder.path()).await;
    let left = count(&mut raw, "locks").await;
    assert!(left < 50, "{left} rows were left while names came");
    // Each further grant removes expired rows, and the position that expired a minute ago.
    raw.execute("UPDATE locks_waiters SET alive_until = alive_until - 61000")
        .await
        .unwrap();
    for round in 0..left {
        let last = claim(&[&format!("more-{round}")], 60_000);
        assert!(granted(&engine, &last).await);
        engine.release(&last, Duration::ZERO).await.unwrap();
    }
    assert_eq!(count(&mut raw, "locks").await, 1);
    assert_eq!(count(&mut raw, "locks_waiters").await, 0);
    assert_eq!(count(&mut raw, "locks_fence").await, 1);
}

/// No further call removes rows.
#[tokio::test]
async fn a_sweep_continues_until_no_row_is_left() {
    let folder = folder();
    let engine = open(folder.path()).await;
    let names: Vec<String> = (0..1200).map(|n| n.to_string()).collect();
    let many: Vec<&str> = names.iter().map(String::as_str).collect();
    assert!(granted(&engine, &claim(&many, 1)).await);
    assert!(granted(&engine, &claim(&["stays"], 60_000)).await);
    engine.close().await;
    let statements = Arc::new(Statements::new("locks"));
    let verbs = Verbs {
        statements: statements.clone(),
        wakeup: Arc::default(),
        prefix: String::new(),
    };
    let config = config(folder.path(), &Settings::default());
    let mut file = File::new(config, statements, verbs.wakeup.clone());
    let connection = file.connection().await.unwrap();
    let mut rounds = 1;
    while verbs
        .sweep(&mut statements::Transaction::new(connection))
        .await
        .unwrap()
    {
        rounds += 1;
    }
    assert_eq!(rounds, 3);
    assert_eq!(count(&mut raw(folder.path()).await, "locks").await, 1);
}

/// A repeated attempt extends the lease from the current time, even just before its end.
#[tokio::test]
async fn a_retry_at_the_last_moment_is_consistent() {
    let folder = folder();
    let engine = open(folder.path()).await;
    for _ in 0..30 {
        let ours = claim(&["n", "m"], 5);
        assert!(granted(&engine, &ours).await);
        tokio::time::sleep(Duration::from_micros(fastrand::u64(2000..5500))).await;
        let mut again = ours.clone();
        again.ttl = Ttl::clamped(Duration::from_secs(60));
        assert!(granted(&engine, &again).await);
        assert_eq!(engine.release(&again, Duration::ZERO).await.unwrap(), Released::Freed);
    }
}

/// Acquires `n` on the first engine, and lets two claims of the second one wait for it.
async fn held_with_two_waiters(a: &SqliteEngine, b: &SqliteEngine) -> (Claim, [(Claim, Box<dyn Subscription>); 2]) {
    let holder = claim(&["n"], 60_000);
    assert!(granted(a, &holder).await);
    let (first, second) = (waiting(&["n"], 60_000), waiting(&["n"], 60_000));
    let first_changes = b.subscribe(&first, &key("n")).await.unwrap();
    let second_changes = b.subscribe(&second, &key("n")).await.unwrap();
    assert!(!granted(b, &first).await);
    assert!(!granted(b, &second).await);
    (holder, [(first, first_changes), (second, second_changes)])
}

#[tokio::test]
async fn only_the_first_waiter_is_notified() {
    let folder = folder();
    let (a, b) = (open(folder.path()).await, open(folder.path()).await);
    let (holder, [(first, mut first_changes), (second, mut second_changes)]) = held_with_two_waiters(&a, &b).await;
    a.release(&holder, Duration::ZERO).await.unwrap();
    tokio::time::timeout(Duration::from_secs(5), first_changes.changed())
        .await
        .expect("the first was not notified");
    assert!(
        tokio::time::timeout(Duration::from_millis(100), second_changes.changed())
            .await
            .is_err()
    );
    assert!(!granted(&b, &second).await);
    assert!(granted(&b, &first).await);
}

/// As in another container than the holder's, whose loopback interface no datagram leaves.
#[tokio::test]
async fn a_waiter_that_receives_no_datagrams_finds_a_release() {
    let folder = folder();
    let (a, b) = (open(folder.path()).await, open(folder.path()).await);
    let (holder, [(first, mut first_changes), (_second, mut second_changes)]) = held_with_two_waiters(&a, &b).await;
    let mut raw = raw(folder.path()).await;
    raw.execute("UPDATE locks_waiters SET wake_port = NULL").await.unwrap();
    // Other commits wake no waiter of a busy name.
    for name in ["x", "y", "z"] {
        assert!(granted(&a, &claim(&[name], 60_000)).await);
        let woken = tokio::time::timeout(Duration::from_millis(100), first_changes.changed()).await;
        assert!(woken.is_err(), "woken by {name}");
    }
    a.release(&holder, Duration::ZERO).await.unwrap();
    tokio::time::timeout(Duration::from_secs(5), first_changes.changed())
        .await
        .expect("the first was not woken");
    let woken = tokio::time::timeout(Duration::from_millis(100), second_changes.changed()).await;
    assert!(woken.is_err(), "only the first is woken");
    assert!(granted(&b, &first).await);
}

/// The release wakes the first waiter, which is dead. The next one makes an attempt when that position expires.
#[tokio::test]
async fn a_dead_waiter_blocks_the_next_for_its_ttl() {
    let folder = folder();
    let engine = open(folder.path()).await;
    let (holder, dead, next) = (claim(&["n"], 60_000), waiting(&["n"], 400), waiting(&["n"], 60_000));
    assert!(granted(&engine, &holder).await && !granted(&engine, &dead).await);
    let answer = engine.try_acquire(&next).await.unwrap();
    let Acquired::Held { retry_after, .. } = answer else {
        panic!("{answer:?}")
    };
    assert!(retry_after.unwrap() <= Duration::from_millis(400), "{retry_after:?}");
    engine.release(&holder, Duration::ZERO).await.unwrap();
    tokio::time::sleep(Duration::from_millis(401)).await;
    assert!(granted(&engine, &next).await);
    // A waiter without a position is behind the last one, too.
    let later = waiting(&["n"], 60_000);
    let answer = engine.try_acquire(&waiting(&["n"], 300)).await.unwrap();
    assert!(matches!(answer, Acquired::Held { .. }));
    let Acquired::Held { retry_after, .. } = engine.try_acquire(&later).await.unwrap() else {
        panic!()
    };
    assert!(retry_after.unwrap() <= Duration::from_millis(300), "{retry_after:?}");
}

#[tokio::test]
async fn a_claim_that_leaves_wakes_the_waiters_of_the_names_that_it_kept() {
    let folder = folder();
    let (a, b) = (open(folder.path()).await, open(folder.path()).await);
    let (on_a, on_b) = (claim(&["a"], 60_000), claim(&["b"], 60_000));
    assert!(granted(&a, &on_a).await && granted(&a, &on_b).await);
    let (set, behind) = (waiting(&["a", "b"], 60_000), waiting(&["a"], 60_000));
    let mut changes = b.subscribe(&behind, &key("a")).await.unwrap();
    assert!(!granted(&a, &set).await);
    assert!(!granted(&b, &behind).await);
    a.release(&on_a, Duration::ZERO).await.unwrap();
    assert!(
        tokio::time::timeout(Duration::from_millis(100), changes.changed())
            .await
            .is_err(),
        "the set is first"
    );
    assert!(!granted(&a, &set).await, "it keeps `a`");
    assert!(!granted(&b, &behind).await);
    a.release(&set, Duration::ZERO).await.unwrap();
    tokio::time::timeout(Duration::from_secs(5), changes.changed())
        .await
        .expect("the next waiter was not notified");
    assert!(granted(&b, &behind).await);
}

/// A claim is held as a whole or not at all, also after one of its names was released by force.
#[tokio::test]
async fn a_claim_that_lost_one_name_releases_the_others() {
    let folder = folder();
    let engine = open(folder.path()).await;
    let set = waiting(&["a", "b"], 60_000);
    assert!(granted(&engine, &set).await);
    assert!(engine.force_release(&key("b")).await.unwrap());
    let other = claim(&["b"], 60_000);
    assert!(granted(&engine, &other).await);
    let answer = engine.try_acquire(&set).await.unwrap();
    assert!(
        matches!(&answer, Acquired::Held { key: busy, .. } if *busy == key("b")),
        "{answer:?}"
    );
    assert_eq!(engine.inspect(&key("a")).await.unwrap(), None);
    engine.release(&other, Duration::ZERO).await.unwrap();
    assert!(
        !granted(&engine, &claim(&["b"], 60_000)).await,
        "the set has a position in the queue"
    );
    assert!(granted(&engine, &set).await);
}

/// The duration of a call does not depend on the number of leases and waiters.
#[tokio::test]
async fn no_statement_scans_a_table() {
    let folder = folder();
    open(folder.path()).await;
    let mut raw = raw(folder.path()).await;
    let files = [
        include_str!("../statements/snapshot.sql"),
        include_str!("../statements/grant.sql"),
        include_str!("../statements/grant_again.sql"),
        include_str!("../statements/queue/enqueue.sql"),
        include_str!("../statements/queue/next_waiters.sql"),
        include_str!("../statements/renew.sql"),
        include_str!("../statements/release.sql"),
        include_str!("../statements/force_release.sql"),
        include_str!("../statements/sweep.sql"),
    ];
    let lines = files
        .iter()
        .flat_map(|file| file.lines())
        .filter(|line| !line.starts_with("--"));
    let text = lines.collect::<Vec<_>>().join("\n").replace("{table}", "locks");
    for statement in text.split(';').filter(|statement| !statement.trim().is_empty()) {
        let explain = format!("EXPLAIN QUERY PLAN {statement}");
        let steps = raw.fetch_all(sqlx::query(sqlx::AssertSqlSafe(explain))).await.unwrap();
        for step in steps {
            let step: String = step.get("detail");
            let harmless = [
                "claimed VIRTUAL",
                "claims",
                "clock",
                "concerned",
                "fence",
                "locks_fence",
                "CONSTANT ROW",
            ];
            let scanned = step.strip_prefix("SCAN ");
            assert!(
                scanned.is_none_or(|table| harmless.iter().any(|word| table.starts_with(word))),
                "{step} in {statement}"
            );
        }
    }
}
