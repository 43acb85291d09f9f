//! What a connection costs, and connections after a panic.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use futures_util::FutureExt;
use futures_util::future::join_all;

use super::super::session::Values;
use super::super::statements::Sql;
use super::*;
use crate::engine::sql::server::connection::{self, open_first};
use crate::engine::{Credentials, EngineExt, Login};
use crate::error::EngineError;

/// Tests that drop a reply count the packets, too.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_transaction_is_two_packets() {
    let Some(database) = Database::create().await else {
        return;
    };
    let proxy = Proxy::start(&database.url).await;
    let engine = open(&proxy.url, &Settings::default()).await;
    let of_one_call = async || {
        let ours = claim(&["n", "o"]);
        let before = proxy.packets();
        acquire(&engine, &ours).await;
        let sent = proxy.packets() - before;
        release(&engine, &ours).await;
        sent
    };
    let mut two_packet_calls = 0;
    // The first calls prepare their statements.
    for _ in 0..400 {
        two_packet_calls += usize::from(of_one_call().await == 2);
    }
    assert!(
        two_packet_calls >= 300,
        "only {two_packet_calls} of 400 transactions were two packets"
    );
}

#[tokio::test]
async fn only_the_first_connection_prepares_all_statements() {
    let Some(database) = Database::create().await else {
        return;
    };
    let config = PostgresConfig::parse(&database.url, &Settings::default()).unwrap();
    let server = PostgresServer::new(config);
    let any: Arc<dyn Server> = server.clone();
    let first: PostgresSession = session_of(open_first(&any).await.unwrap());
    assert_eq!(first.prepared(), server.statements.all().len());
    let second: PostgresSession = session_of(connection::open(&any).await.unwrap());
    assert_eq!(second.prepared(), 0);
    let names: &[&[u8]] = &[b"n"];
    let values: &Values<'_> = &[&names, &"", &1_i64];
    let checked = second
        .connection
        .within_limit(second.packet(second.query(Sql::Check, values)))
        .await;
    assert_eq!(checked.unwrap().len(), 1);
    eventually("the statement is prepared", async || second.prepared() == 1).await;
    assert_eq!(second.query(Sql::Check, values).await.unwrap().len(), 1);

    // Without its tables a new connection checks and creates all of them.
    database.execute("DROP TABLE locks, locks_waiters").await;
    assert!(second.query(Sql::Check, values).await.is_err());
    let third: PostgresSession = session_of(connection::open(&any).await.unwrap());
    assert_eq!(third.query(Sql::Check, values).await.unwrap().len(), 1);
}

#[tokio::test]
async fn a_statement_is_planned_once() {
    let Some(database) = Database::create().await else {
        return;
    };
    let config = PostgresConfig::parse(&database.url, &Settings::default()).unwrap();
    let server: Arc<dyn Server> = PostgresServer::new(config);
    let session: PostgresSession = session_of(open_first(&server).await.unwrap());
    for _ in 0..10 {
        let token = OwnerToken::fresh();
        let (name, owner, metadata) = (&b"n"[..], token.as_str(), None::<&str>);
        let values: &Values<'_> = &[&name, &owner, &1000_i64, &"host", &1_i64, &metadata];
        let rows = session.query(Sql::AcquireOne, values).await.unwrap();
        assert!(rows[0].get::<_, Option<i64>>(0).is_some());
        let released: &Values<'_> = &[&name, &owner];
        assert_eq!(session.query(Sql::ReleaseOne, released).await.unwrap().len(), 1);
    }
    let plans = "SELECT custom_plans, generic_plans FROM pg_prepared_statements WHERE statement NOT LIKE '%pg_prepared%' AND statement NOT LIKE '%has_table_privilege%' AND generic_plans + custom_plans > 0";
    let plans: Vec<(i64, i64)> = session
        .rows(plans)
        .await
        .iter()
        .map(|row| (row.get(0), row.get(1)))
        .collect();
    assert_eq!(plans, [(0, 10), (0, 10)]);
}

#[tokio::test]
async fn an_idle_engine_sends_nothing() {
    let Some(database) = Database::create().await else {
        return;
    };
    let engine = database.engine().await;
    let (holder, waiter) = (claim(&["n"]), waiting(&["n"]));
    acquire(&engine, &holder).await;
    busy(&engine, &waiter).await;
    for claim in [&holder, &waiter] {
        release(&engine, claim).await;
    }
    // A statement that was executed for the first time is prepared after that.
    tokio::time::sleep(Duration::from_millis(500)).await;
    let last = "SELECT (date_part('epoch', max(state_change)) * 1e6)::bigint FROM pg_stat_activity \
                WHERE datname = current_database() AND application_name = 'holdfast'";
    let before = database.number(last).await;
    // Longer than two heartbeats of waiters.
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(database.number(last).await, before);
}

#[tokio::test]
async fn one_heartbeat_keeps_the_positions_of_all_waiters() {
    let Some(database) = Database::create().await else {
        return;
    };
    let proxy = Proxy::start(&database.url).await;
    let (theirs, ours) = (database.engine().await, open(&proxy.url, &Settings::default()).await);
    let names: Vec<String> = (0..200).map(|index| format!("n{index}")).collect();
    let holders: Vec<Claim> = names.iter().map(|name| claim(&[name])).collect();
    join_all(holders.iter().map(|holder| acquire(&theirs, holder))).await;
    let waiters: Vec<Claim> = names.iter().map(|name| waiting(&[name])).collect();
    join_all(waiters.iter().map(|waiter| busy(&ours, waiter))).await;
    let last = "SELECT (date_part('epoch', max(alive_until)) * 1e6)::bigint FROM locks_waiters";
    let (before, sent) = (database.number(last).await, proxy.packets());
    let alive = format!("SELECT count(*) FROM locks_waiters WHERE date_part('epoch', alive_until) * 1e6 > {before}");
    eventually("all positions are kept", async || database.number(&alive).await == 200).await;
    let sent = proxy.packets() - sent;
    assert!(sent <= 20, "{sent} packets for 200 waiters");
}

/// The caller's function runs within the task of a connection, as a driver does.
#[tokio::test]
async fn an_engine_whose_task_panicked_opens_its_connections_again() {
    let Some(database) = Database::create().await else {
        return;
    };
    let is_broken = Arc::new(AtomicBool::new(false));
    let asked = is_broken.clone();
    let credentials = Credentials::new(move || {
        assert!(!asked.load(SeqCst), "as a bug would");
        let login = Login {
            username: Some("holdfast".to_owned()),
            password: "x".to_owned(),
        };
        async { Ok(login) }.boxed()
    });
    let settings = Settings {
        credentials: Some(Arc::new(credentials)),
        ..Settings::default()
    };
    let engine = database.engine_with(settings).await;
    is_broken.store(true, SeqCst);
    database.terminate().await;
    // A statement, a transaction, a read, and a renewal: each opens its connection.
    let (one, two) = (claim(&["n"]), claim(&["a", "b"]));
    eventually("each call fails because of the bug", async || {
        let errors = [
            engine.try_acquire(&one).await.err(),
            engine.try_acquire(&two).await.err(),
            engine.inspect(&key("n")).await.err(),
            engine.renew(&one, one.ttl).await.err(),
        ];
        let is_bug = |error: &Option<EngineError>| {
            let error = error.as_ref().expect("an error");
            assert!(error.retryable, "{error}");
            error.to_string().contains("panicked")
        };
        errors.iter().all(is_bug)
    })
    .await;
    is_broken.store(false, SeqCst);
    eventually("the connections are opened again", async || {
        let calls = (engine.try_acquire(&one).await, engine.try_acquire(&two).await);
        matches!(calls, (Ok(Acquired::Granted { .. }), Ok(Acquired::Granted { .. })))
    })
    .await;
    assert_eq!(engine.renew(&one, one.ttl).await.unwrap(), Renewed::Extended);
    assert!(engine.inspect(&key("n")).await.unwrap().is_some());
}
