//! Connections that end.

use std::time::Duration;

use super::*;
use crate::engine::Renewed;
use crate::engine::contract::PAGE;

/// A caller leaves while a connection is being opened.
pub(in crate::engine::sql) async fn an_attempt_that_waits_for_a_connection_is_not_sent_when_it_is_dropped<
    D: TestDatabase,
>(
    database: &mut D,
) {
    let proxy = Proxy::start(database.url()).await;
    let engine = database.open(&proxy.url).await;
    proxy.set_open(false);
    for connection in database.connections().await {
        database.end(connection).await;
    }
    let abandoned = claim(&["n"]);
    // Until the engine has noticed the end of its connection.
    while let Ok(answer) = tokio::time::timeout(Duration::from_millis(300), engine.try_acquire(&abandoned)).await {
        assert!(answer.is_err(), "{answer:?}");
    }
    proxy.set_open(true);
    acquire(&engine, &claim(&["after"])).await;
    let held = engine.list("", PAGE).await.unwrap();
    assert_eq!(held.into_iter().map(|info| info.name).collect::<Vec<_>>(), ["after"]);
}

/// The connection of the single statements, that of the transactions, and the one that listens.
pub(in crate::engine::sql) async fn each_connection_is_opened_again_when_it_ends_alone<D: TestDatabase>(
    database: &mut D,
) {
    let theirs = database.engine().await;
    let (pair, held) = (claim(&["a", "b"]), claim(&["held"]));
    acquire(&theirs, &pair).await;
    release(&theirs, &pair).await;
    let of_theirs = database.connections().await;
    let ours = database.engine().await;
    acquire(&ours, &held).await;
    // Opens the other connections.
    busy(&ours, &waiting(&["held"])).await;
    let expected = 2 + usize::from(ours.server.is_notified());
    let of_ours = async |database: &mut D| {
        let mut all = database.connections().await;
        all.retain(|one| !of_theirs.contains(one));
        all
    };
    eventually("all connections are open", async || {
        of_ours(database).await.len() == expected
    })
    .await;
    let first = of_ours(database).await;
    for (index, ended) in first.iter().enumerate() {
        let name = format!("n{index}");
        let (holder, waiter) = (claim(&[&name]), waiting(&[&name]));
        acquire(&theirs, &holder).await;
        let mut subscription = ours.subscribe(&waiter, &key(&name)).await.unwrap();
        busy(&ours, &waiter).await;
        database.end(*ended).await;
        eventually("the lease is renewed", async || {
            matches!(ours.renew(&held, held.ttl).await, Ok(Renewed::Extended))
        })
        .await;
        eventually("two names are granted", async || {
            matches!(ours.try_acquire(&pair).await, Ok(Acquired::Granted { .. }))
        })
        .await;
        assert_eq!(release(&ours, &pair).await, Released::Freed);
        assert_eq!(release(&theirs, &holder).await, Released::Freed);
        notified(&mut subscription).await;
        eventually("the waiter is granted the name", async || {
            matches!(ours.try_acquire(&waiter).await, Ok(Acquired::Granted { .. }))
        })
        .await;
        assert_eq!(release(&ours, &waiter).await, Released::Freed);
        eventually("it is open again", async || of_ours(database).await.len() == expected).await;
        let now = of_ours(database).await;
        assert!(
            !now.contains(ended) && first[index + 1..].iter().all(|other| now.contains(other)),
            "{first:?}, {now:?}"
        );
    }
}
