//! Broken connections, locked tables, a standby, and a process that is stopped in a transaction.

use std::sync::atomic::{AtomicBool, Ordering};

use futures_util::future::join_all;
use tokio::io::{AsyncReadExt, AsyncWriteExt, copy};
use tokio::net::{TcpListener, TcpStream};

use super::*;
use crate::engine::EngineExt;
use crate::engine::contract::{one_succeeds, refs};
use crate::engine::sql::failure::Kind;
use crate::engine::sql::server::connection::open_first;
use crate::model::Key;

/// Forwards connections to a server, but forwards nothing more of the first one that listens. Returns the port.
async fn proxy_without_first_listen(server: u16) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let is_first = Arc::new(AtomicBool::new(true));
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let is_first = is_first.clone();
            tokio::spawn(async move {
                let server = TcpStream::connect(("127.0.0.1", server)).await.unwrap();
                let ((mut from, mut to), (mut back, mut forth)) = (client.into_split(), server.into_split());
                tokio::spawn(async move { copy(&mut back, &mut to).await });
                let mut packet = vec![0; 1 << 16];
                while let Ok(length @ 1..) = from.read(&mut packet).await {
                    let packet = &packet[..length];
                    if packet.windows(6).any(|text| text == b"LISTEN") && is_first.swap(false, Ordering::SeqCst) {
                        std::future::pending::<()>().await;
                    }
                    forth.write_all(packet).await.unwrap();
                }
            });
        }
    });
    port
}

/// Opens an engine with a store timeout of 700 ms. The tables exist: creating them may take longer.
async fn open_brief(url: &str) -> Arc<ServerEngine> {
    let settings = Settings {
        store_timeout: Duration::from_millis(700),
        ..Settings::default()
    };
    repeated(async || {
        let config = PostgresConfig::parse(url, &settings).unwrap();
        crate::engine::sql::postgres::connect(config).await
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
    let Some(database) = Database::create().await else {
        return;
    };
    let engine = database.engine().await;
    let (holder, waiter) = (claim(&["n"]), waiting(&["n"]));
    acquire(&engine, &holder).await;
    let mut subscription = engine.subscribe(&waiter, &key("n")).await.unwrap();
    busy(&engine, &waiter).await;
    let listening = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN%'";
    eventually("the engine listens", async || database.number(listening).await == 1).await;
    assert!(database.terminate().await >= 2);
    eventually("the lease is renewed", async || {
        matches!(engine.renew(&holder, holder.ttl).await, Ok(Renewed::Extended))
    })
    .await;
    eventually("the engine listens again", async || {
        database.number(listening).await == 1
    })
    .await;
    assert_eq!(release(&engine, &holder).await, Released::Freed);
    tokio::time::timeout(Duration::from_secs(5), subscription.changed())
        .await
        .unwrap();
    acquire(&engine, &waiter).await;
}

/// A connection falls silent between its login and LISTEN.
#[tokio::test]
async fn a_silent_listener_is_replaced() {
    let Some(database) = Database::create().await else {
        return;
    };
    let (server, name) = database.url.rsplit_once('/').unwrap();
    let (server, port) = server.rsplit_once(':').unwrap();
    let proxy = proxy_without_first_listen(port.parse().unwrap()).await;
    drop(database.engine().await);
    let engine = open_brief(&format!("{server}:{proxy}/{name}")).await;
    acquire_soon(&engine, &claim(&["n"])).await;
    let waiter = waiting(&["n"]);
    let acquired = repeated(async || engine.try_acquire(&waiter).await).await;
    assert!(matches!(acquired, Acquired::Held { .. }), "{acquired:?}");
    let listening = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN%'";
    eventually("the engine listens", async || database.number(listening).await == 1).await;
}

/// The name is released while the process of the first waiter does not listen.
#[tokio::test]
async fn a_lost_notification_is_found() {
    let Some(database) = Database::create().await else {
        return;
    };
    let (engine, other) = (database.engine().await, database.engine().await);
    let (holder, waiter) = (claim(&["n"]), waiting(&["n"]));
    acquire(&other, &holder).await;
    let mut subscription = engine.subscribe(&waiter, &key("n")).await.unwrap();
    busy(&engine, &waiter).await;
    engine.waiters.close();
    assert_eq!(release(&other, &holder).await, Released::Freed);
    let lost = tokio::time::timeout(Duration::from_millis(300), subscription.changed()).await;
    assert!(lost.is_err(), "the engine does not listen");
    engine.waiters.check(vec![key("n")]);
    tokio::time::timeout(Duration::from_secs(5), subscription.changed())
        .await
        .unwrap();
    acquire(&engine, &waiter).await;
}

/// An operator unlocks a name by hand, with the row of the table.
#[tokio::test]
async fn the_waiters_of_a_deleted_row_are_served() {
    let Some(database) = Database::create().await else {
        return;
    };
    let engine = database.engine().await;
    let (holder, waiter) = (claim(&["n"]), waiting(&["n"]));
    acquire(&engine, &holder).await;
    let mut subscription = engine.subscribe(&waiter, &key("n")).await.unwrap();
    busy(&engine, &waiter).await;
    database.execute("DELETE FROM locks").await;
    tokio::time::timeout(Duration::from_secs(10), subscription.changed())
        .await
        .expect("the heartbeat finds a free name");
    acquire(&engine, &waiter).await;
}

#[tokio::test]
async fn a_transaction_fails_with_the_error_of_its_first_statement() {
    let Some(mut database) = Database::create().await else {
        return;
    };
    let url = format!("{}?options=-c%20lock_timeout%3D200", database.url);
    let engine = open(&url, &Settings::default()).await;
    acquire(&engine, &claim(&["n"])).await;
    let lock = database.client.transaction().await.unwrap();
    lock.batch_execute("LOCK TABLE locks_waiters IN SHARE MODE")
        .await
        .unwrap();
    let error = engine.try_acquire(&waiting(&["n"])).await.unwrap_err();
    assert!(error.retryable && error.to_string().contains("[55P03]"), "{error}");
}

#[tokio::test]
async fn a_locked_table_delays_calls_and_leaves_no_statement_behind() {
    let Some(mut database) = Database::create().await else {
        return;
    };
    // The statements have no lock timeout.
    let url = format!("{}?options=-c%20lock_timeout%3D0", database.url);
    drop(database.engine().await);
    let engine = open_brief(&url).await;
    let watcher = connect(&database.url).await;
    let lock = database.client.transaction().await.unwrap();
    lock.batch_execute("LOCK TABLE locks").await.unwrap();
    let claims: Vec<Claim> = (0..3).map(|index| claim(&[&format!("n{index}")])).collect();
    for claim in &claims {
        let error = engine.try_acquire(claim).await.unwrap_err();
        assert!(
            error.retryable && error.to_string().contains("no answer within"),
            "{error}"
        );
    }
    let blocked =
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
    eventually("no statement waits", async || {
        watcher.query_one(blocked, &[]).await.unwrap().get::<_, i64>(0) == 0
    })
    .await;
    lock.rollback().await.unwrap();
    acquire_soon(&engine, &claim(&["after"])).await;
    let held = repeated(async || engine.list("", PAGE).await).await;
    assert_eq!(held.into_iter().map(|info| info.name).collect::<Vec<_>>(), ["after"]);
}

/// With a store timeout of less than 2 s, calls that share a statement with one for a locked row are executed without it.
#[tokio::test]
async fn a_locked_row_rejects_no_other_call_with_a_short_store_timeout() {
    let Some(mut database) = Database::create().await else {
        return;
    };
    drop(database.engine().await);
    let engine = open_brief(&database.url).await;
    a_locked_row_rejects_no_other_call(&mut database, &engine).await;
}

/// The server ends a statement before it has waited for `LOCK_WAIT`.
#[tokio::test]
async fn a_locked_row_rejects_no_other_call_with_a_short_statement_timeout() {
    let Some(mut database) = Database::create().await else {
        return;
    };
    // Creates the tables without the limit.
    drop(database.engine().await);
    let text = format!("ALTER DATABASE {} SET statement_timeout = '500ms'", database.name);
    database.execute(&text).await;
    let engine = database.engine().await;
    a_locked_row_rejects_no_other_call(&mut database, &engine).await;
}

async fn a_locked_row_rejects_no_other_call(database: &mut Database, engine: &Arc<ServerEngine>) {
    lock_row(database, engine, "locked").await;
    // The machine may stand still for longer than the store timeout.
    one_succeeds(async |round| {
        let locked = attempting(engine, &claim(&["locked"]));
        let others: Vec<Claim> = (0..8).map(|index| claim(&[&format!("n{round}-{index}")])).collect();
        let outcome = all_granted(engine, &others).await;
        let _ = locked.await;
        outcome
    })
    .await;
}

/// The locks of a stopped process end with its session, and the other calls of the same names go on.
#[tokio::test]
async fn a_transaction_without_an_end_is_ended_by_the_server() {
    let Some(database) = Database::create().await else {
        return;
    };
    let engine = database.engine().await;
    let ours = claim(&["n"]);
    acquire(&engine, &ours).await;
    let stopped = connect(&database.url).await;
    stopped
        .batch_execute(server_of::<PostgresServer>(&engine).statements.begin(false))
        .await
        .unwrap();
    stopped
        .batch_execute("SELECT FROM locks WHERE name = 'n' FOR UPDATE")
        .await
        .unwrap();
    let released = repeated(async || engine.release(&ours, Duration::ZERO).await).await;
    assert_eq!(released, Released::Freed);
    assert!(stopped.is_closed());
}

#[tokio::test]
async fn a_read_only_server_is_a_retryable_error() {
    let Some(database) = Database::create().await else {
        return;
    };
    let engine = database.engine().await;
    let name = &database.name;
    let read_only = |value: &str| format!("ALTER DATABASE {name} SET default_transaction_read_only = {value}");
    database.execute(&read_only("on")).await;
    database.terminate().await;
    let ours = claim(&["n"]);
    eventually("the new connection cannot write", async || {
        let error = engine.try_acquire(&ours).await.err();
        error.is_some_and(|error| error.retryable && error.to_string().contains("does not allow writes"))
    })
    .await;
    let writable = connect(&database.url).await;
    writable
        .batch_execute("SET default_transaction_read_only = off")
        .await
        .unwrap();
    writable.batch_execute(&read_only("off")).await.unwrap();
    database.terminate().await;
    eventually("the server can write", async || engine.try_acquire(&ours).await.is_ok()).await;
}

#[tokio::test]
async fn other_default_isolation_levels_change_nothing() {
    let Some(database) = Database::create().await else {
        return;
    };
    for level in ["repeatable read", "serializable"] {
        let name = &database.name;
        database
            .execute(&format!(
                "ALTER DATABASE {name} SET default_transaction_isolation = '{level}'"
            ))
            .await;
        let engines = [database.engine().await, database.engine().await];
        let counter = std::cell::Cell::new(0);
        let loops = (0..8).map(|index| {
            let (engine, counter) = (&engines[index % 2], &counter);
            async move {
                for _ in 0..5 {
                    let ours = claim(&["n"]);
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
        assert_eq!(counter.get(), 40);
    }
}

/// A single statement whose snapshot is older than the row fails. The call is then made in a transaction, which reads committed rows.
#[tokio::test]
async fn a_serialization_failure_does_not_fail_the_call() {
    let Some(mut database) = Database::create().await else {
        return;
    };
    for level in ["repeatable read", "serializable"] {
        let name = &database.name;
        let text = format!("ALTER DATABASE {name} SET default_transaction_isolation = '{level}'");
        database.execute(&text).await;
        let engine = database.engine().await;
        let first = claim(&["n"]);
        acquire(&engine, &first).await;
        release(&engine, &first).await;
        let mut session = open_first(&engine.waiters.server).await.unwrap();
        let (alone, ours) = ([claim(&["n"])], claim(&["n"]));
        for is_alone in [true, false] {
            database.execute("BEGIN; UPDATE locks SET pid = pid + 1").await;
            let attempt = async {
                match is_alone {
                    true => {
                        let granted = session.attempt(&attempts(&alone)).await;
                        let failure = granted.err().expect("a serialization failure");
                        assert_eq!(failure.kind(), Kind::Conflict, "{failure}");
                    }
                    false => acquire(&engine, &ours).await,
                }
            };
            let commit = async {
                eventually("the statement waits", async || database.blocked().await == 1).await;
                database.execute("COMMIT").await;
            };
            tokio::join!(attempt, commit);
        }
        assert_eq!(release(&engine, &ours).await, Released::Freed);
    }
}

#[tokio::test]
async fn a_dropped_attempt_is_never_executed_later() {
    let Some(mut database) = Database::create().await else {
        return;
    };
    let engine = database.engine().await;
    let lock = database.client.transaction().await.unwrap();
    lock.batch_execute("LOCK TABLE locks").await.unwrap();
    let names: Vec<String> = (0..500).map(|index| format!("n{index}")).collect();
    let claims: Vec<Claim> = names.iter().map(|name| claim(&[name])).collect();
    let calls = join_all(claims.iter().map(|claim| engine.try_acquire(claim)));
    let dropped = tokio::time::timeout(Duration::from_millis(300), calls).await;
    assert!(dropped.is_err(), "the table is locked");
    let sent: Vec<Claim> = claims.into_iter().filter(Claim::was_sent).collect();
    assert!(
        (1..=engine.waiters.server.statement_limit().claims).contains(&sent.len()),
        "{} were sent",
        sent.len()
    );
    lock.rollback().await.unwrap();
    let mut released = 0;
    engine
        .release_all(&refs(&sent), Duration::ZERO, &mut |_, answer| {
            released += usize::from(answer.is_ok());
        })
        .await;
    assert_eq!(released, sent.len());
    assert_eq!(engine.list("", PAGE).await.unwrap(), []);
}

/// Another program refers to the row of a lease by a foreign key, which locks it `FOR KEY SHARE`.
#[tokio::test]
async fn a_foreign_key_releases_no_name() {
    let Some(database) = Database::create().await else {
        return;
    };
    let engine = database.engine().await;
    let (one, pair) = (claim(&["n"]), claim(&["a", "b"]));
    acquire(&engine, &one).await;
    acquire(&engine, &pair).await;
    database
        .execute("CREATE TABLE jobs (lock bytea REFERENCES locks (name))")
        .await;
    database.execute("BEGIN").await;
    database.execute("INSERT INTO jobs VALUES ('n'), ('a')").await;
    busy(&engine, &claim(&["m", "n"])).await;
    for held in [one, pair] {
        assert_eq!(engine.renew(&held, held.ttl).await.unwrap(), Renewed::Extended);
        assert_eq!(release(&engine, &held).await, Released::Freed);
    }
    database.execute("ROLLBACK").await;
}

/// Each of their statements waits for `LOCK_WAIT`, one after the other. If all were sent at once, they would together wait for longer than
/// the store timeout.
#[tokio::test]
async fn many_reads_of_a_locked_table_do_not_count_as_silence() {
    let Some(database) = Database::create().await else {
        return;
    };
    let engine = database.engine().await;
    database.execute("BEGIN; LOCK TABLE locks").await;
    let names: Vec<Key> = (0..20).map(|index| key(&format!("n{index}"))).collect();
    let mut silent = Vec::new();
    // The machine may stand still.
    for _ in 0..3 {
        let read = join_all(names.iter().map(|name| engine.inspect(name))).await;
        let failures = read.into_iter().map(|one| one.unwrap_err().to_string());
        let others: Vec<String> = failures.filter(|failure| !failure.contains("[55P03]")).collect();
        if others.is_empty() {
            return;
        }
        silent.push(others);
    }
    panic!("{silent:?}");
}
