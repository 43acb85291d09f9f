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

/// Repeats a call until a connection that is open executes it.
async fn retried<T>(what: &str, mut call: impl AsyncFnMut() -> crate::engine::Result<T>) -> T {
    let mut answer = None;
    eventually(what, async || {
        answer = call().await.ok();
        answer.is_some()
    })
    .await;
    answer.unwrap()
}

/// The connections of the single statements, more than one if a check is under way, that of the transactions, and the one that listens.
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
    let needed = 2 + usize::from(ours.server.is_notified());
    let of_ours = async |database: &mut D| {
        let mut all = database.connections().await;
        all.retain(|one| !of_theirs.contains(one));
        all
    };
    let are_open = async |database: &mut D| of_ours(database).await.len() >= needed;
    eventually("the connections are open", async || are_open(database).await).await;
    let first = of_ours(database).await;
    for (index, ended) in first.iter().enumerate() {
        let name = format!("n{index}");
        let (holder, waiter) = (claim(&[&name]), waiting(&[&name]));
        acquire(&theirs, &holder).await;
        let mut subscription = ours.subscribe(&waiter, &key(&name)).await.unwrap();
        retried("the waiter enters", async || ours.try_acquire(&waiter).await).await;
        database.end(*ended).await;
        let renewed = retried("the lease is renewed", async || ours.renew(&held, held.ttl).await).await;
        assert_eq!(renewed, Renewed::Extended);
        let granted = retried("two names are granted", async || ours.try_acquire(&pair).await).await;
        assert!(matches!(granted, Acquired::Granted { .. }), "{granted:?}");
        retried("they are released", async || ours.release(&pair, Duration::ZERO).await).await;
        assert_eq!(release(&theirs, &holder).await, Released::Freed);
        notified(&mut subscription).await;
        eventually("the waiter is granted the name", async || {
            matches!(ours.try_acquire(&waiter).await, Ok(Acquired::Granted { .. }))
        })
        .await;
        retried("it is released", async || ours.release(&waiter, Duration::ZERO).await).await;
        eventually("as many are open again", async || are_open(database).await).await;
        let now = of_ours(database).await;
        assert!(
            !now.contains(ended) && first[index + 1..].iter().all(|other| now.contains(other)),
            "{first:?}, {now:?}"
        );
    }
}
