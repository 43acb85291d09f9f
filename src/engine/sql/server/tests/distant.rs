//! A distant server: each packet is delayed.

use futures_util::future::join_all;
use tokio::time::{sleep, timeout};

use super::*;
use crate::engine::{EngineExt, Renewed};

/// A server that answers after 400 ms, and callers with a timeout of 300 ms.
pub(in crate::engine::sql) async fn callers_with_a_short_timeout_do_not_fail_the_calls_of_others<D: TestDatabase>(
    database: &mut D,
) {
    let proxy = Proxy::delayed(database.url(), Duration::from_millis(200)).await;
    let engine = database.open(&proxy.url).await;
    let holder = claim(&["n"]);
    acquire(&engine, &holder).await;
    // Alone they succeed.
    for _ in 0..5 {
        assert_eq!(engine.renew(&holder, holder.ttl).await.unwrap(), Renewed::Extended);
    }
    let other = engine.clone();
    let short_timeouts = tokio::spawn(async move {
        for index in 0.. {
            let engine = other.clone();
            tokio::spawn(async move {
                let theirs = claim(&[&format!("x{index}")]);
                let _ = timeout(Duration::from_millis(300), engine.try_acquire(&theirs)).await;
            });
            sleep(Duration::from_millis(25)).await;
        }
    });
    sleep(Duration::from_millis(300)).await;
    let mut rounds = Vec::new();
    // The machine may stand still.
    for round in 0..3 {
        let opened = proxy.connections();
        let mut failed = Vec::new();
        for index in 0..6 {
            let renewed = engine.renew(&holder, holder.ttl).await.map(drop);
            let ours = claim(&[&format!("y{round}-{index}")]);
            let granted = engine.try_acquire(&ours).await.map(drop);
            let failures = [renewed, granted].into_iter().filter_map(Result::err);
            failed.extend(failures.map(|failure| failure.to_string()));
        }
        let opened = proxy.connections() - opened;
        if failed.is_empty() && opened <= 4 {
            short_timeouts.abort();
            return;
        }
        rounds.push((failed, opened));
    }
    panic!("failures, and the number of new connections: {rounds:?}");
}

/// A statement with half of the calls would take as long as one with all of them.
pub(in crate::engine::sql) async fn a_statement_to_a_distant_server_takes_all_calls<D: TestDatabase>(database: &mut D) {
    let proxy = Proxy::delayed(database.url(), Duration::from_millis(50)).await;
    let engine = database.open(&proxy.url).await;
    let claims: Vec<Claim> = (0..60).map(|index| claim(&[&format!("n{index}")])).collect();
    for acquired in join_all(claims.iter().map(|claim| engine.try_acquire(claim))).await {
        acquired.unwrap();
    }
    // All grants of a statement have the same `since`.
    let clocks = "SELECT COUNT(DISTINCT since) FROM locks";
    assert_eq!(database.number(clocks).await, 1);
}
