//! Rows that another program has locked, and how little the other calls wait for them.

use std::time::Duration;

use futures_util::future::join_all;
use parking_lot::Mutex;

use super::*;
use crate::engine::contract::{one_succeeds, refs};
use crate::engine::{EngineExt, Renewed};

/// A transaction for each of the other calls would be twice as many packets.
pub(in crate::engine::sql) async fn a_locked_row_costs_the_calls_beside_it_few_packets<D: TestDatabase>(
    database: &mut D,
) {
    let proxy = Proxy::start(database.url()).await;
    let engine = database.open(&proxy.url).await;
    // On a machine that stands still those that share a statement with the locked row may fail with it.
    one_succeeds(async |round| {
        let name = format!("locked{round}");
        lock_row(database, &engine, &name).await;
        let before = proxy.packets();
        let locked = attempting(&engine, &claim(&[&name]));
        let others: Vec<Claim> = (0..256).map(|index| claim(&[&format!("n{round}-{index}")])).collect();
        let acquired = tokio::time::timeout(Duration::from_secs(10), all_granted(&engine, &others)).await;
        assert!(locked.await.unwrap().unwrap_err().retryable);
        let packets = proxy.packets() - before;
        database.execute("ROLLBACK").await;
        acquired.map_err(|_| "not within 10 s".to_owned())??;
        (packets <= 64)
            .then_some(())
            .ok_or_else(|| format!("{packets} packets"))
    })
    .await;
}

/// Calls for several names that find a locked row do not say which of them is locked.
pub(in crate::engine::sql) async fn names_beside_a_locked_one_are_not_recorded_as_locked<D: TestDatabase>(
    database: &mut D,
) {
    let proxy = Proxy::start(database.url()).await;
    let engine = database.open(&proxy.url).await;
    let names: Vec<String> = (0..40).map(|index| format!("n{index}")).collect();
    let claims: Vec<Claim> = names.iter().map(|name| claim(&[name])).collect();
    join_all(claims.iter().map(|ours| acquire(&engine, ours))).await;
    database.execute("BEGIN").await;
    database.execute("UPDATE locks SET pid = 1 WHERE name = 'n0'").await;
    let failed = Mutex::new(Vec::new());
    engine
        .release_all(&refs(&claims), Duration::ZERO, &mut |index, released| match released {
            Ok(released) => assert_eq!(released, Released::Freed),
            Err(error) => failed.lock().push((index, error.retryable)),
        })
        .await;
    assert_eq!(*failed.lock(), [(0, true)]);
    let before = proxy.packets();
    let again: Vec<Claim> = names[1..].iter().map(|name| claim(&[name])).collect();
    join_all(again.iter().map(|ours| acquire(&engine, ours))).await;
    let packets = proxy.packets() - before;
    assert!(packets <= 12, "{packets} packets");
    database.execute("ROLLBACK").await;
}

/// The attempts of a batch find 60 locked rows. The lease of the renewal was recorded as locked, because an attempt for one of its names and
/// for a locked one has failed.
pub(in crate::engine::sql) async fn a_renewal_goes_before_attempts_that_find_locked_rows<D: TestDatabase>(
    database: &mut D,
) {
    let engine = database.engine().await;
    let held = claim(&["a", "b"]);
    acquire(&engine, &held).await;
    let locked: Vec<String> = (0..60).map(|index| format!("locked{index}")).collect();
    let claims: Vec<Claim> = locked.iter().map(|name| claim(&[name])).collect();
    join_all(claims.iter().map(|ours| acquire(&engine, ours))).await;
    join_all(claims.iter().map(|ours| release(&engine, ours))).await;
    database.execute("BEGIN").await;
    database
        .execute("SELECT name FROM locks WHERE name LIKE 'locked%' FOR UPDATE")
        .await;
    assert!(
        engine
            .try_acquire(&claim(&["a", "locked0"]))
            .await
            .unwrap_err()
            .retryable
    );
    let pair = |name: &String| claim(&[name, &format!("of {name}")]);
    let first = attempting(&engine, &pair(&locked[1]));
    eventually("the first attempt waits", async || {
        database.blocked().await > 0 || first.is_finished()
    })
    .await;
    // They share the next transaction.
    let attempts: Vec<_> = locked[2..]
        .iter()
        .map(|name| attempting(&engine, &pair(name)))
        .collect();
    assert_eq!(engine.renew(&held, held.ttl).await.unwrap(), Renewed::Extended);
    for attempt in attempts.into_iter().chain([first]) {
        assert!(attempt.await.unwrap().unwrap_err().retryable);
    }
    database.execute("ROLLBACK").await;
}

/// The row is unlocked as soon as the first waiter has failed.
pub(in crate::engine::sql) async fn waiters_of_a_locked_name_keep_their_order<D: TestDatabase>(database: &mut D) {
    let engine = database.engine().await;
    lock_row(database, &engine, "n").await;
    let claims: Vec<Arc<Claim>> = (0..64).map(|_| Arc::new(waiting(&["n"]))).collect();
    let answers = Mutex::new(Vec::new());
    let mut answer = |index, acquired: crate::engine::Result<Acquired>| answers.lock().push((index, acquired));
    let unlock = async {
        eventually("the first waiter has failed", async || !answers.lock().is_empty()).await;
        database.execute("ROLLBACK").await;
    };
    let attempts = refs(&claims);
    tokio::join!(engine.try_acquire_all(&attempts, &mut answer), unlock);
    let answers = answers.into_inner();
    assert_eq!(answers.len(), claims.len());
    let has_failed: Vec<bool> = answers.iter().map(|(_, acquired)| acquired.is_err()).collect();
    assert!(
        has_failed.is_sorted(),
        "a later waiter has passed one that failed: {has_failed:?}"
    );
    assert!(has_failed[63], "the row was not locked");
}
