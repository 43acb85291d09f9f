//! Broken connections, locked tables, and a process that is stopped in a transaction.

use std::panic::{AssertUnwindSafe, resume_unwind};

use futures_util::FutureExt as _;
use futures_util::future::join_all;

use super::*;
use crate::engine::EngineExt;
use crate::engine::contract::refs;
use crate::engine::sql::mysql::STATEMENT_BATCH;
use crate::engine::sql::mysql::transaction::begin;

/// Opens an engine with a store timeout of 700 ms. The tables exist: creating them may take longer.
async fn open_brief(url: &str) -> Arc<ServerEngine> {
    let settings = Settings {
        store_timeout: Duration::from_millis(700),
        ..Settings::default()
    };
    repeated(async || {
        let config = MysqlConfig::parse(url, &settings).unwrap();
        crate::engine::sql::mysql::connect(config).await
    })
    .await
}

/// Makes an attempt for a free name. Repeats it where the store timeout was too short.
async fn acquire_soon(engine: &Arc<ServerEngine>, claim: &Claim) {
    let acquired = repeated(async || engine.try_acquire(claim).await).await;
    assert!(matches!(acquired, Acquired::Granted { .. }), "{acquired:?}");
}

#[tokio::test]
async fn ended_connections_are_opened_again() {
    let Some(mut database) = Database::create().await else {
        return;
    };
    let engine = database.engine().await;
    let (holder, waiter) = (claim(&["n"]), waiting(&["n"]));
    acquire(&engine, &holder).await;
    let mut subscription = engine.subscribe(&waiter, &key("n")).await.unwrap();
    busy(&engine, &waiter).await;
    assert!(database.terminate().await >= 1);
    eventually("the lease is renewed", async || {
        matches!(engine.renew(&holder, holder.ttl).await, Ok(Renewed::Extended))
    })
    .await;
    eventually("the lease is released", async || {
        matches!(
            engine.release(&holder, Duration::ZERO).await,
            Ok(Released::Freed | Released::NotHeld)
        )
    })
    .await;
    tokio::time::timeout(Duration::from_secs(5), subscription.changed())
        .await
        .unwrap();
    eventually("the waiter is granted the name", async || {
        matches!(engine.try_acquire(&waiter).await, Ok(Acquired::Granted { .. }))
    })
    .await;
}

/// The server closes a connection that was not used for some time, and the next call does not fail.
#[tokio::test]
async fn a_connection_that_was_closed_while_it_was_idle_is_opened_again() {
    let Some(mut database) = Database::create().await else {
        return;
    };
    let engine = database.engine().await;
    let ours = claim(&["n"]);
    acquire(&engine, &ours).await;
    assert_eq!(database.terminate().await, 1);
    tokio::time::sleep(Duration::from_millis(1100)).await;
    assert_eq!(release(&engine, &ours).await, Released::Freed);
}

/// No process is notified: the process of the first waiter finds that the name is free.
#[tokio::test]
async fn a_waiter_of_another_process_is_served() {
    let Some(database) = Database::create().await else {
        return;
    };
    let (engine, other) = (database.engine().await, database.engine().await);
    let (holder, first, second) = (claim(&["n"]), waiting(&["n"]), waiting(&["n"]));
    acquire(&other, &holder).await;
    for (engine, waiter) in [(&engine, &first), (&other, &second)] {
        let subscription = engine.subscribe(waiter, &key("n")).await.unwrap();
        busy(engine, waiter).await;
        // Dropping it would end the wait.
        std::mem::forget(subscription);
    }
    assert_eq!(release(&other, &holder).await, Released::Freed);
    busy(&other, &second).await;
    let mut subscription = engine.subscribe(&first, &key("n")).await.unwrap();
    tokio::time::timeout(Duration::from_secs(5), subscription.changed())
        .await
        .unwrap();
    acquire(&engine, &first).await;
    busy(&other, &second).await;
}

/// On a slow network the next check is due when the last one ends.
#[tokio::test]
async fn checks_without_a_pause_do_not_stop_the_calls() {
    let Some(database) = Database::create().await else {
        return;
    };
    let engine = database.engine().await;
    let waiters = engine.waiters.clone();
    let checks = tokio::spawn(async move {
        loop {
            waiters.check(vec![key("n")]);
            tokio::task::yield_now().await;
        }
    });
    let ours = claim(&["n"]);
    let calls = async {
        for _ in 0..5 {
            acquire(&engine, &ours).await;
            assert_eq!(release(&engine, &ours).await, Released::Freed);
        }
    };
    let done = tokio::time::timeout(Duration::from_secs(20), calls).await;
    checks.abort();
    assert!(done.is_ok(), "the calls wait behind the checks");
}

#[tokio::test]
async fn a_locked_table_delays_calls_and_leaves_no_statement_behind() {
    let Some(mut database) = Database::create().await else {
        return;
    };
    drop(database.engine().await);
    let engine = open_brief(&database.url).await;
    let mut watcher = Database {
        client: connect(&url_of(SERVER).unwrap()).await,
        name: String::new(),
        user: database.user.clone(),
        url: String::new(),
        settings: None,
    };
    database.execute("LOCK TABLES locks WRITE, locks_waiters WRITE").await;
    let claims: Vec<Claim> = (0..3).map(|index| claim(&[&format!("n{index}")])).collect();
    for claim in &claims {
        let error = engine.try_acquire(claim).await.unwrap_err();
        assert!(
            error.retryable && error.to_string().contains("no answer within"),
            "{error}"
        );
    }
    eventually("no statement waits", async || {
        watcher.connected("command = 'Query'").await == 0
    })
    .await;
    database.execute("UNLOCK TABLES").await;
    acquire_soon(&engine, &claim(&["after"])).await;
    let held = repeated(async || engine.list("", PAGE).await).await;
    assert_eq!(held.into_iter().map(|info| info.name).collect::<Vec<_>>(), ["after"]);
}

/// The locks of a stopped process end with its connection, and the other calls of the same names go on.
#[tokio::test]
async fn a_transaction_without_an_end_is_ended_by_the_server() {
    let Some(database) = Database::create().await else {
        return;
    };
    let engine = database.engine().await;
    let ours = claim(&["n"]);
    acquire(&engine, &ours).await;
    let mut stopped = connect(&database.url).await;
    let mut packet = Packet::default();
    begin(&mut packet, &Plan::default());
    packet.add("SELECT 1 FROM locks WHERE name = 'n' FOR UPDATE");
    stopped
        .execute(sqlx::raw_sql(AssertSqlSafe(packet.text)))
        .await
        .unwrap();
    let released = repeated(async || engine.release(&ours, Duration::ZERO).await).await;
    assert_eq!(released, Released::Freed);
    assert!(stopped.ping().await.is_err());
}

/// A server that logs statements instead of rows refuses `READ COMMITTED`. Meanwhile the tests of the contract use both isolation levels.
#[tokio::test]
async fn both_isolation_levels_have_one_holder_at_a_time() {
    let Some(mut database) = Database::create().await else {
        return;
    };
    let alone = database.alone().await;
    let outcome = AssertUnwindSafe(both_formats_have_one_holder(&database))
        .catch_unwind()
        .await;
    set_binlog_format("MIXED").await;
    drop(alone);
    outcome.unwrap_or_else(|panic| resume_unwind(panic));
    let old = "SELECT COUNT(*) FROM locks WHERE owner IS NOT NULL";
    assert_eq!(database.number(old).await, 0);
}

async fn set_binlog_format(format: &str) {
    let mut server = connect(&url_of(SERVER).unwrap()).await;
    let text = format!("SET GLOBAL binlog_format = '{format}'");
    server.execute(AssertSqlSafe(text)).await.unwrap();
}

async fn both_formats_have_one_holder(database: &Database) {
    for format in ["STATEMENT", "MIXED"] {
        set_binlog_format(format).await;
        let engines = [database.engine().await, database.engine().await];
        let counter = std::cell::Cell::new(0);
        let loops = (0..8).map(|index| {
            let (engine, counter) = (&engines[index % 2], &counter);
            async move {
                for round in 0..6 {
                    let names = [&["n"][..], &["n", "m"], &["o", "n"]][round % 3];
                    let ours = claim(names);
                    while !is_granted(engine, &ours).await {
                        tokio::time::sleep(Duration::from_millis(fastrand::u64(1..5))).await;
                    }
                    let seen = counter.get();
                    tokio::task::yield_now().await;
                    counter.set(seen + 1);
                    let released = repeated(async || engine.release(&ours, Duration::ZERO).await).await;
                    assert_eq!(released, Released::Freed);
                }
            }
        });
        join_all(loops).await;
        assert_eq!(counter.get(), 48);
    }
}

/// The server rolls back the transaction of the engine, which has changed fewer rows than the other one. The engine repeats it.
#[tokio::test]
async fn a_deadlock_does_not_fail_the_call() {
    let Some(mut database) = Database::create().await else {
        return;
    };
    let engine = database.engine().await;
    let pair = claim(&["a", "b"]);
    acquire(&engine, &pair).await;
    release(&engine, &pair).await;
    let rows: Vec<String> = (0..20).map(|index| format!("('x{index}', 1, 0, 0)")).collect();
    let insert = format!(
        "INSERT INTO locks (name, fence, expires_at, since) VALUES {}",
        rows.join(",")
    );
    let lock = |name: &str| format!("SELECT 1 FROM locks WHERE name = '{name}' FOR UPDATE");
    for statement in ["BEGIN", &insert, &lock("b")] {
        database.execute(statement).await;
    }
    let attempt = tokio::spawn({
        let (engine, pair) = (engine.clone(), pair.clone());
        async move { engine.try_acquire(&pair).await }
    });
    let mut watcher = connect(&database.url).await;
    eventually("the engine has locked a row", async || {
        let text = format!("{} NOWAIT", lock("a"));
        watcher.execute(AssertSqlSafe(text)).await.is_err()
    })
    .await;
    database.execute(&lock("a")).await;
    assert!(!attempt.is_finished(), "the other transaction has both rows");
    database.execute("ROLLBACK").await;
    assert!(matches!(attempt.await.unwrap(), Ok(Acquired::Granted { .. })));
}

#[tokio::test]
async fn a_dropped_attempt_is_never_executed_later() {
    let Some(mut database) = Database::create().await else {
        return;
    };
    let engine = database.engine().await;
    database.execute("LOCK TABLES locks WRITE, locks_waiters WRITE").await;
    let names: Vec<String> = (0..500).map(|index| format!("n{index}")).collect();
    let claims: Vec<Claim> = names.iter().map(|name| claim(&[name])).collect();
    let calls = join_all(claims.iter().map(|claim| engine.try_acquire(claim)));
    let dropped = tokio::time::timeout(Duration::from_millis(300), calls).await;
    assert!(dropped.is_err(), "the table is locked");
    let sent: Vec<Claim> = claims.into_iter().filter(Claim::was_sent).collect();
    assert!((1..=STATEMENT_BATCH).contains(&sent.len()), "{} were sent", sent.len());
    database.execute("UNLOCK TABLES").await;
    let mut released = 0;
    engine
        .release_all(&refs(&sent), Duration::ZERO, &mut |_, answer| {
            released += usize::from(answer.is_ok());
        })
        .await;
    assert_eq!(released, sent.len());
    assert_eq!(engine.list("", PAGE).await.unwrap(), []);
}

/// The driver does not detect it, so an idle connection is tested.
#[tokio::test]
async fn a_call_is_executed_after_a_path_forgot_the_idle_connections() {
    let Some(database) = Database::create().await else {
        return;
    };
    let proxy = Proxy::start(&database.url).await;
    let engine = database.open(&proxy.url).await;
    acquire(&engine, &claim(&["n"])).await;
    tokio::time::sleep(Duration::from_millis(1100)).await;
    proxy.drop_packets();
    acquire(&engine, &claim(&["o"])).await;
}
