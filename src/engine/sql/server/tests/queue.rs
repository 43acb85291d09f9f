//! The positions of waiters.

use std::sync::Arc;
use std::time::Duration;

use super::super::connection::open;
use super::*;
use crate::model::Ttl;
use crate::stall_detector::StallDetector;

/// A check reads how long the lease has lasted, and how many waiters of other processes are ahead of those of this one.
pub(in crate::engine::sql) async fn a_check_counts_the_waiters_ahead<D: TestDatabase>(database: &mut D) {
    let (ours, theirs) = (&database.engine().await, &database.engine().await);
    acquire(ours, &claim(&["n"])).await;
    let queue = [theirs, theirs, ours].map(|engine| (engine, waiting(&["n"])));
    let mut subscriptions = Vec::new();
    for (engine, waiter) in &queue {
        subscriptions.push(engine.subscribe(waiter, &key("n")).await.unwrap());
        busy(engine, waiter).await;
    }
    let mut session = open(&ours.waiters.server).await.unwrap();
    let mut ages = Vec::new();
    for (engine, ahead) in [(ours, 2), (theirs, 0)] {
        let process = &engine.waiters.process;
        let checked = session.check(process, &[b"n".to_vec()], None).await.unwrap();
        let name = &checked.names[0];
        assert!(name.has_waiters);
        assert_eq!(name.ahead, ahead);
        ages.push(name.lease.as_ref().unwrap().age);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(ages[1] > ages[0], "{ages:?}");
}

pub(in crate::engine::sql) async fn positions_that_expired_long_ago_are_removed_with_the_next_change<
    D: TestDatabase,
>(
    database: &mut D,
) {
    let engine = database.engine().await;
    let (holder, old, recent) = (claim(&["n"]), waiting(&["n"]), waiting(&["n"]));
    acquire(&engine, &holder).await;
    // Without a heartbeat.
    engine.waiters.close();
    for (waiter, seconds) in [(old, 100), (recent, 30)] {
        busy(&engine, &waiter).await;
        let (owner, ended) = (waiter.owner.as_str(), D::ago(seconds));
        let text = format!("UPDATE locks_waiters SET alive_until = {ended} WHERE owner = '{owner}'");
        database.execute(&text).await;
    }
    assert_eq!(release(&engine, &holder).await, Released::Freed);
    assert_eq!(database.number("SELECT COUNT(*) FROM locks_waiters").await, 1);
    assert_eq!(database.number("SELECT SUM(queued) FROM locks").await, 1);
}

pub(in crate::engine::sql) async fn a_waiter_behind_a_dead_process_is_served_when_its_hand_off_ends<D: TestDatabase>(
    database: &mut D,
) {
    let (ours, dead) = (&database.engine().await, &database.engine().await);
    // The machine may stand still: the median of three rounds counts.
    let mut took = Vec::new();
    for round in 0..3 {
        let name = format!("n{round}");
        let holder = claim(&[&name]);
        acquire(ours, &holder).await;
        let waiter = waiting(&[&name]);
        for _ in 0..2 {
            busy(dead, &waiting(&[&name])).await;
        }
        let mut subscription = ours.subscribe(&waiter, &key(&name)).await.unwrap();
        busy(ours, &waiter).await;
        dead.waiters.close();
        // The name is free, and what remains of the dead process is half a second of liveness.
        let soon = D::after(500);
        let process = &dead.waiters.process;
        database
            .execute(&format!(
                "UPDATE locks_waiters SET alive_until = {soon} WHERE process = '{process}'"
            ))
            .await;
        let past = D::ago(1);
        database
            .execute(&format!(
                "UPDATE locks SET owner = NULL, expires_at = {past} WHERE name = '{name}'"
            ))
            .await;
        let began = tokio::time::Instant::now();
        ours.waiters.check(vec![key(&name)]);
        tokio::time::timeout(Duration::from_secs(20), subscription.changed())
            .await
            .expect("the waiter is served");
        took.push(began.elapsed());
    }
    took.sort();
    assert!(took[1] < Duration::from_millis(1500), "{took:?}");
}

/// The holder has died, and the waiter's process has not checked the name since the end of the lease.
pub(in crate::engine::sql) async fn an_attempt_at_the_end_of_a_lease_does_not_pass_the_queue<D: TestDatabase>(
    database: &mut D,
) {
    let (ours, theirs) = (&database.engine().await, &database.engine().await);
    let waiter = waiting(&["n"]);
    acquire(ours, &claim(&["n"])).await;
    busy(theirs, &waiter).await;
    theirs.waiters.close();
    let past = D::ago(1);
    database.execute(&format!("UPDATE locks SET expires_at = {past}")).await;
    busy(ours, &claim(&["n"])).await;
    acquire(theirs, &waiter).await;
}

/// The heartbeats for a waiter with a long ttl go on meanwhile.
pub(in crate::engine::sql) async fn waiters_whose_event_loop_hangs_for_their_ttl_lose_their_positions<
    D: TestDatabase,
>(
    database: &mut D,
) {
    let (ours, theirs) = (&database.engine().await, &database.engine().await);
    let detector = Arc::new(StallDetector::new(|| {}));
    let _ = theirs.describe().detector.unwrap().set(detector.clone());
    let mut subscriptions = Vec::new();
    for (name, ttl_s) in [("x", 3), ("y", 300)] {
        acquire(ours, &claim(&[name])).await;
        let mut waiter = waiting(&[name]);
        waiter.ttl = Ttl::clamped(Duration::from_secs(ttl_s));
        subscriptions.push(theirs.subscribe(&waiter, &key(name)).await.unwrap());
        busy(theirs, &waiter).await;
    }
    detector.ping();
    let alive = async |database: &mut D, name: &str| {
        let now = D::ago(0);
        let text = format!("SELECT COUNT(*) FROM locks_waiters WHERE name = '{name}' AND alive_until > {now}");
        database.number(&text).await == 1
    };
    eventually("the position has expired", async || !alive(database, "x").await).await;
    // Longer than a position without heartbeats.
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert!(!alive(database, "x").await);
    eventually("the other one is kept", async || alive(database, "y").await).await;
    eventually("it is kept again", async || {
        detector.responded();
        alive(database, "x").await
    })
    .await;
}

/// Where waiters poll, as behind a pooler in transaction mode, the first waiter of a queue polls often, and the others rarely.
pub(in crate::engine::sql) async fn waiters_behind_others_poll_rarely<D: TestDatabase>(database: &mut D) {
    const WAITERS: usize = 39;
    let proxy = Proxy::start(database.url()).await;
    let url = format!("{}{}", proxy.url, D::POLLING);
    let mut holder = claim(&["n"]);
    holder.ttl = Ttl::clamped(LONG * 10);
    acquire(&database.engine().await, &holder).await;
    let mut waiters = Vec::new();
    for _ in 0..WAITERS {
        let (engine, waiter) = (database.open(&url).await, waiting(&["n"]));
        let subscription = engine.subscribe(&waiter, &key("n")).await.unwrap();
        busy(&engine, &waiter).await;
        assert!(!engine.waiters.server.is_notified());
        waiters.push((engine, subscription));
    }
    // They poll more often while a lease is young.
    let old = D::ago(60);
    database.execute(&format!("UPDATE locks SET since = {old}")).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    let (before, began) = (proxy.packets(), tokio::time::Instant::now());
    tokio::time::sleep(Duration::from_secs(4)).await;
    let per_second = (proxy.packets() - before) as f64 / began.elapsed().as_secs_f64();
    // Each of them polls at least once per 1.5 s. If all of them polled like the first, that would be 260 per second.
    assert!((10.0..120.0).contains(&per_second), "{per_second} packets per second");
    assert_eq!(
        database.number("SELECT COUNT(*) FROM locks_waiters").await,
        WAITERS as i64
    );
}
