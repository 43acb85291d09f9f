//! Connections that end.

use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::Instant;

use super::super::Outcome;
use super::super::connection::open;
use super::super::pool::Pool;
use super::*;
use crate::engine::contract::PAGE;
use crate::engine::{EngineExt, Renewed, Settings};

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

/// The connections of the calls, more than one if several are under way, and the one that listens.
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
    let needed = 1 + usize::from(ours.waiters.server.is_notified());
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

/// A pooler may accept logins and have no connection to the server for them.
pub(in crate::engine::sql) async fn new_connections_that_hang_delay_no_call<D: TestDatabase>(database: &mut D) {
    let proxy = Proxy::start(database.url()).await;
    let engine = database.open(&proxy.url).await;
    let first = database.connections().await;
    proxy.hang_after(D::LOGIN_PACKETS);
    let held = claim(&["held"]);
    acquire(&engine, &held).await;
    // Longer than the store timeout, after which a connection counts as silent.
    let end = Instant::now() + Duration::from_secs(12);
    let pairs = |names: &'static [&'static str]| {
        let engine = &engine;
        async move {
            while Instant::now() < end {
                let pair = claim(names);
                acquire(engine, &pair).await;
                release(engine, &pair).await;
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
    };
    let renewals = async {
        while Instant::now() < end {
            assert_eq!(engine.renew(&held, held.ttl).await.unwrap(), Renewed::Extended);
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    let lists = async {
        while Instant::now() < end {
            engine.list("", PAGE).await.unwrap();
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::join!(pairs(&["a"]), pairs(&["b"]), pairs(&["c", "d"]), renewals, lists);
    let open = database.connections().await;
    assert!(first.iter().all(|one| open.contains(one)), "{first:?}, {open:?}");
}

pub(in crate::engine::sql) async fn calls_share_the_connections_that_are_allowed<D: TestDatabase>(database: &mut D) {
    for most in [1, 2] {
        let before = database.connections().await;
        let max_connections = Some(most);
        let settings = || Settings {
            max_connections,
            ..Settings::default()
        };
        let engine = database.open_with(database.url(), &settings()).await;
        let held = claim(&["held"]);
        acquire(&engine, &held).await;
        let waiter = waiting(&["held"]);
        let mut subscription = engine.subscribe(&waiter, &key("held")).await.unwrap();
        busy(&engine, &waiter).await;
        let calls = (0..16).map(|index| {
            let (engine, held) = (&engine, &held);
            async move {
                let (one, two) = (format!("n{index}"), format!("o{index}"));
                for _ in 0..10 {
                    let names = [one.as_str(), two.as_str()];
                    let pair = claim(&names[..if index % 4 == 0 { 2 } else { 1 }]);
                    acquire(engine, &pair).await;
                    assert_eq!(engine.renew(held, held.ttl).await.unwrap(), Renewed::Extended);
                    engine.list("", PAGE).await.unwrap();
                    release(engine, &pair).await;
                }
            }
        });
        join_all(calls).await;
        let mut open = database.connections().await;
        open.retain(|one| !before.contains(one));
        assert!((1..=most as usize).contains(&open.len()), "{most}: {open:?}");
        assert_eq!(release(&engine, &held).await, Released::Freed);
        notified(&mut subscription).await;
        acquire(&engine, &waiter).await;
        assert_eq!(release(&engine, &waiter).await, Released::Freed);
        engine.close().await;
    }
}

pub(in crate::engine::sql) async fn idle_connections_are_closed<D: TestDatabase>(database: &mut D) {
    let engine = database.engine().await;
    let calls = (0..8).map(|index| {
        let engine = &engine;
        async move {
            let (one, two) = (format!("n{index}"), format!("o{index}"));
            for _ in 0..20 {
                let names = [one.as_str(), two.as_str()];
                let pair = claim(&names[..if index % 2 == 0 { 2 } else { 1 }]);
                acquire(engine, &pair).await;
                engine.list("", PAGE).await.unwrap();
                release(engine, &pair).await;
            }
        }
    });
    join_all(calls).await;
    assert!(database.connections().await.len() > 1);
    let mut open = Vec::new();
    for _ in 0..40 {
        open = database.connections().await;
        if open.len() == 1 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    assert_eq!(open.len(), 1, "{open:?}");
    let after = claim(&["after"]);
    acquire(&engine, &after).await;
    release(&engine, &after).await;
    assert_eq!(database.connections().await, open);
}

/// Returns a pool of its own for the server of an engine.
async fn pool_of(engine: &ServerEngine) -> Arc<Pool> {
    Pool::new(
        engine.waiters.server.clone(),
        open(&engine.waiters.server).await.unwrap(),
    )
}

/// A network path drops the packets of all connections, after a packet that took long.
pub(in crate::engine::sql) async fn silent_connections_delay_no_new_one<D: TestDatabase>(database: &mut D) {
    for is_full in [false, true] {
        let proxy = Proxy::start(database.url()).await;
        let settings = Settings {
            store_timeout: Duration::from_secs(10),
            ..Settings::default()
        };
        let engine = database.open_with(&proxy.url, &settings).await;
        let pool = pool_of(&engine).await;
        let mut checkouts = Vec::new();
        for _ in 0..engine.waiters.server.most_for_calls() {
            checkouts.push(pool.checkout().await.unwrap());
        }
        let mut used = checkouts.remove(0);
        let connection = used.session().unwrap().connection().clone();
        let slow = async {
            tokio::time::sleep(Duration::from_millis(2500)).await;
            Ok(())
        };
        connection.within_limit(slow).await.unwrap();
        proxy.drop_packets();
        let silence = connection
            .within(Duration::from_millis(500), used.session().unwrap().ping())
            .await;
        drop(checkouts);
        if !is_full {
            assert!(used.settle(silence).is_err());
        }
        let mut new = pool.checkout().await.unwrap();
        let answer = new.session().unwrap().ping().await;
        assert!(new.settle(answer).is_ok());
        drop(used);
    }
}

/// A pooler whose new connections hang has an open one that answers its test late, after another one was silent.
pub(in crate::engine::sql) async fn a_connection_with_a_late_answer_is_used_while_new_ones_hang<D: TestDatabase>(
    database: &mut D,
) {
    for is_full in [false, true] {
        let proxy = Proxy::delayed(database.url(), Duration::from_millis(300)).await;
        let needed = 2 + u32::from(database.engine().await.waiters.server.is_notified());
        let settings = Settings {
            max_connections: is_full.then_some(needed),
            ..Settings::default()
        };
        let engine = database.open_with(&proxy.url, &settings).await;
        let pool = pool_of(&engine).await;
        let mut used = pool.checkout().await.unwrap();
        drop(pool.checkout().await.unwrap());
        proxy.hang_after(D::LOGIN_PACKETS);
        let connection = used.session().unwrap().connection().clone();
        connection.within_limit(used.session().unwrap().ping()).await.unwrap();
        let silence = connection.within(Duration::from_millis(500), std::future::pending::<Outcome<()>>());
        let silence = silence.await;
        if !is_full {
            assert!(used.settle(silence).is_err());
        }
        let mut late = pool.checkout().await.unwrap();
        let answer = late.session().unwrap().ping().await;
        assert!(late.settle(answer).is_ok());
        drop(used);
    }
}

pub(in crate::engine::sql) async fn a_call_that_gets_no_connection_is_told_which_there_are<D: TestDatabase>(
    database: &mut D,
) {
    let settings = Settings {
        store_timeout: Duration::from_secs(2),
        ..Settings::default()
    };
    let proxy = Proxy::start(database.url()).await;
    let engine = database.open_with(&proxy.url, &settings).await;
    let pool = pool_of(&engine).await;
    let _used = pool.checkout().await.unwrap();
    proxy.set_open(false);
    let failure = pool.checkout().await.err().unwrap().to_string();
    assert!(
        failure.contains("no free connection within 2000 ms: 1 in use, and no other one could be opened"),
        "{failure}"
    );
}
