//! Shares: their rows, their ends, and their waiters.

use std::time::Duration;

use super::super::connection::open;
use super::super::upkeep::Swept;
use super::*;
use crate::engine::contract::one_is_faster;
use crate::engine::{Read, Renewed};
use crate::model::Share;

/// Creates a claim on permits of the shared name `n`.
pub(in crate::engine::sql) fn share(permits: u32, limit: u32) -> Claim {
    let keys = [key("n").shared()];
    let mut claim = Claim::new(
        &keys,
        OwnerToken::fresh(),
        Ttl::clamped(LONG),
        Arc::new(Process::current()),
    );
    claim.share = Share::new(permits, limit);
    claim
}

pub(in crate::engine::sql) fn waiting_share(permits: u32, limit: u32) -> Claim {
    let mut claim = share(permits, limit);
    claim.waiting = true;
    claim
}

/// Enters the queue. Returns the subscription.
async fn enter(engine: &Arc<ServerEngine>, claim: &Claim) -> Box<dyn Subscription> {
    let subscription = engine.subscribe(claim, &claim.keys()[0]).await.unwrap();
    busy(engine, claim).await;
    subscription
}

/// Waits for the grant of a waiter, which makes no attempt without a notification.
async fn granted(engine: &Arc<ServerEngine>, claim: &Claim, subscription: &mut Box<dyn Subscription>) {
    loop {
        notified(subscription).await;
        if subscription.take_hand_off().is_some()
            || matches!(engine.try_acquire(claim).await.unwrap(), Acquired::Granted { .. })
        {
            return;
        }
    }
}

async fn holders(engine: &Arc<ServerEngine>) -> usize {
    let (key, waits_for_token) = (&key("n").shared(), true);
    engine.read(Read::Name { key, waits_for_token }).await.unwrap().len()
}

/// A renewal was executed in time, and is not committed when another process makes an attempt, after the end that the share had before.
pub(in crate::engine::sql) async fn a_share_whose_renewal_is_not_committed_is_held<D: TestDatabase>(database: &mut D) {
    let engine = database.engine().await;
    let (holder, other) = (share(1, 1), share(1, 1));
    acquire(&engine, &holder).await;
    let owner = format!("owner = '{}'", holder.owner.as_str());
    let ends = |at: String| format!("UPDATE locks SET expires_at = {at} WHERE {owner}");
    database.execute(&ends(D::after(300))).await;
    // By default a statement without an index locks all rows on MySQL.
    database.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED").await;
    database.execute("BEGIN").await;
    database.execute(&ends(D::after(30_000))).await;
    tokio::time::sleep(Duration::from_millis(400)).await;
    let attempt = tokio::spawn({
        let (engine, other) = (engine.clone(), other.clone());
        async move { engine.try_acquire(&other).await }
    });
    eventually("the attempt waits", async || {
        database.blocked().await > 0 || attempt.is_finished()
    })
    .await;
    database.execute("COMMIT").await;
    match attempt.await.unwrap() {
        Ok(acquired) => assert!(matches!(acquired, Acquired::Held { .. }), "{acquired:?}"),
        Err(error) => assert!(error.is_locked, "{error:?}"),
    }
    busy(&engine, &other).await;
    assert_eq!(engine.renew(&holder, holder.ttl).await.unwrap(), Renewed::Extended);
}

/// The lease of a dead holder ends between two heartbeats.
pub(in crate::engine::sql) async fn a_waiter_is_granted_when_the_share_of_a_dead_holder_ends<D: TestDatabase>(
    database: &mut D,
) {
    let (ours, theirs) = (&database.engine().await, &database.engine().await);
    one_is_faster(Duration::from_millis(1200), async || {
        let (mut dead, lives) = (share(1, 2), share(1, 2));
        dead.ttl = Ttl::clamped(Duration::from_millis(300));
        acquire(theirs, &lives).await;
        acquire(theirs, &dead).await;
        let waiter = waiting_share(1, 2);
        let mut subscription = enter(ours, &waiter).await;
        let began = tokio::time::Instant::now();
        granted(ours, &waiter, &mut subscription).await;
        let took = began.elapsed();
        assert_eq!(holders(theirs).await, 2);
        for claim in [&lives, &waiter] {
            assert_eq!(release(ours, claim).await, Released::Freed);
        }
        took
    })
    .await;
}

/// Nothing changes but the time: the position of a waiter for several permits ends.
pub(in crate::engine::sql) async fn a_waiter_behind_a_dead_heavy_one_is_granted<D: TestDatabase>(database: &mut D) {
    let (ours, dead) = (&database.engine().await, &database.engine().await);
    let (holder, heavy, light) = (share(1, 2), waiting_share(2, 2), waiting_share(1, 2));
    acquire(ours, &holder).await;
    busy(dead, &heavy).await;
    let mut subscription = enter(ours, &light).await;
    dead.waiters.close();
    let (process, soon) = (&dead.waiters.process, D::after(100));
    let text = format!("UPDATE locks_waiters SET alive_until = {soon} WHERE process = '{process}'");
    database.execute(&text).await;
    granted(ours, &light, &mut subscription).await;
    assert_eq!(holders(dead).await, 2);
}

/// The transaction of the waiter for several permits grants the others, and not a later check.
pub(in crate::engine::sql) async fn a_waiter_that_leaves_hands_off_to_those_behind_it<D: TestDatabase>(
    database: &mut D,
) {
    let (ours, theirs) = (&database.engine().await, &database.engine().await);
    let (holder, heavy) = (share(1, 3), waiting_share(3, 3));
    acquire(ours, &holder).await;
    let _heavy = enter(ours, &heavy).await;
    let (light, other) = (waiting_share(1, 3), waiting_share(1, 3));
    let mut subscriptions = [enter(theirs, &light).await, enter(ours, &other).await];
    assert_eq!(release(ours, &heavy).await, Released::NotHeld);
    assert_eq!(holders(ours).await, 3);
    granted(theirs, &light, &mut subscriptions[0]).await;
    granted(ours, &other, &mut subscriptions[1]).await;
}

pub(in crate::engine::sql) async fn a_release_grants_more_waiters_than_one_transaction<D: TestDatabase>(
    database: &mut D,
) {
    let (ours, theirs) = (&database.engine().await, &database.engine().await);
    let writer = share(200, 200);
    acquire(ours, &writer).await;
    let mut waiters = Vec::new();
    for index in 0..140 {
        let (engine, claim) = (if index % 2 == 0 { ours } else { theirs }, waiting_share(1, 200));
        let subscription = enter(engine, &claim).await;
        waiters.push((engine, claim, subscription));
    }
    release(ours, &writer).await;
    let first = holders(ours).await;
    assert!(first >= 64, "{first} with the release");
    for (engine, claim, subscription) in &mut waiters {
        granted(engine, claim, subscription).await;
    }
    assert_eq!(holders(ours).await, 140);
}

pub(in crate::engine::sql) async fn a_sweep_removes_ended_shares_and_then_their_name<D: TestDatabase>(
    database: &mut D,
) {
    let engine = database.engine().await;
    acquire(&engine, &share(1, 1)).await;
    let mut session = open(&engine.waiters.server).await.unwrap();
    for (change, rows) in [("since", 2), ("expires_at", 1), ("since", 0)] {
        let text = format!("UPDATE locks SET {change} = {}", D::ago(2 * 3600));
        database.execute(&text).await;
        let swept = session.sweep(b"").await.unwrap();
        assert_eq!(
            swept,
            Swept {
                last: None,
                with_expired: Vec::new()
            }
        );
        assert_eq!(database.number("SELECT COUNT(*) FROM locks").await, rows, "{change}");
    }
}
