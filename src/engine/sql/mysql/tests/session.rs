//! The statements that a session cancels, and those that it prepares.

use std::time::Duration;

use super::super::tests::{Database, connect};
use super::*;
use crate::engine::Settings;
use crate::engine::sql::mysql::transaction;
use crate::engine::sql::server::Session as _;
use crate::engine::sql::server::tests::{TestDatabase, eventually};
use crate::engine::sql::server::transaction::Plan;

/// Another server behind the same address, and this server after a restart, assign the same ids to other connections.
#[tokio::test]
async fn only_statements_of_the_same_server_are_ended() {
    let Some(mut database) = Database::create().await else {
        return;
    };
    let config = MysqlConfig::parse(database.url(), &Settings::default()).unwrap();
    let server = MysqlServer::new(config);
    let mut session = MysqlSession::open(&server).await.unwrap();
    let (mut packet, mut answers) = (Packet::default(), Vec::new());
    packet.add(format_args!("SELECT {SERVER}, CONNECTION_ID()"));
    packet.add("SHOW GLOBAL STATUS LIKE 'Uptime'");
    session.run(packet, &mut answers).await.unwrap();
    let ours = &rows(&answers, 0)[0];
    let (name, id) = (ours.text(0).unwrap(), ours.number(1).unwrap());
    let uptime = Duration::from_secs(rows(&answers, 1)[0].number(1).unwrap().unsigned_abs());
    let thread = |server: &str, since| Thread {
        id,
        server: server.to_owned(),
        since,
    };
    let statement = tokio::spawn(async move {
        let mut packet = Packet::default();
        packet.add("SELECT SLEEP(60)");
        let _ = session.run(packet, &mut Vec::new()).await;
    });
    eventually("the statement is executed", async || database.blocked().await == 1).await;
    let now = Instant::now();
    for other in [
        thread("elsewhere/3306/1", now),
        thread(&name, now - uptime - Duration::from_secs(60)),
    ] {
        server.kill_statement(&other).await.unwrap();
    }
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(!statement.is_finished(), "a statement of another server");
    server.kill_statement(&thread(&name, now)).await.unwrap();
    timeout(Duration::from_secs(10), statement).await.unwrap().unwrap();
}

/// The server would close the connection.
#[tokio::test]
async fn a_packet_that_the_server_refuses_is_not_sent() {
    let Some(database) = Database::create().await else {
        return;
    };
    let config = MysqlConfig::parse(database.url(), &Settings::default()).unwrap();
    let mut session = MysqlSession::open(&MysqlServer::new(config)).await.unwrap();
    let bytes = session.packet_limit;
    let mut large = Packet::default();
    large.add(format_args!("SELECT '{}'", "x".repeat(bytes)));
    let failure = session.run(large, &mut Vec::new()).await.unwrap_err();
    assert_eq!(failure.kind(), Kind::Permanent);
    assert!(failure.to_string().contains("max_allowed_packet"), "{failure}");
    let mut small = Packet::default();
    small.add(format_args!("SELECT '{}'", "x".repeat(bytes - 100)));
    session.run(small, &mut Vec::new()).await.unwrap();
}

/// The next statements of the connection are prepared, too.
#[tokio::test]
async fn a_preparation_that_was_cancelled_is_repeated() {
    let Some(mut database) = Database::create().await else {
        return;
    };
    let settings = Settings {
        store_timeout: Duration::from_millis(700),
        ..Settings::default()
    };
    let config = MysqlConfig::parse(database.url(), &settings).unwrap();
    let mut session = MysqlSession::open(&MysqlServer::new(config)).await.unwrap();
    session.set_up().await.unwrap();
    let text: Arc<str> = "DELETE FROM locks WHERE name = 'n'".into();
    let connection = session.connection.clone();
    database.execute("BEGIN; SELECT 1 FROM locks").await;
    let url = database.url().to_owned();
    let alter = tokio::spawn(async move {
        let statement = sqlx::raw_sql("ALTER TABLE locks COMMENT = 'blocked'");
        connect(&url).await.execute(statement).await.map(|_| ())
    });
    let waiting = "state LIKE 'Waiting for table metadata lock%'";
    eventually("`ALTER TABLE` waits for its metadata lock", async || {
        database.connected(waiting).await == 1
    })
    .await;
    let cancelled = connection.within_limit(session.prepare(text.clone())).await;
    database.execute("COMMIT").await;
    alter.await.unwrap().unwrap();
    assert!(cancelled.is_err() && session.prepares, "{:?}", cancelled.err());
    assert!(session.prepare(text).await.unwrap());
}

/// Single statements use the same connections.
#[tokio::test]
async fn a_transaction_leaves_no_settings_behind() {
    let Some(database) = Database::create().await else {
        return;
    };
    let config = MysqlConfig::parse(database.url(), &Settings::default()).unwrap();
    let mut session = MysqlSession::open(&MysqlServer::new(config)).await.unwrap();
    let settings = async |session: &mut MysqlSession| {
        let (mut packet, mut answers) = (Packet::default(), Vec::new());
        packet.add("SELECT @@SESSION.wait_timeout, @@SESSION.innodb_lock_wait_timeout");
        session.run(packet, &mut answers).await.unwrap();
        [0, 1].map(|column| rows(&answers, 0)[0].number(column).unwrap())
    };
    let before = settings(&mut session).await;
    let mut plan = Plan::default();
    plan.is_brief = true;
    let mut packet = Packet::default();
    transaction::begin(&mut packet, &plan);
    session.run(packet, &mut Vec::new()).await.unwrap();
    assert_ne!(settings(&mut session).await, before);
    session.roll_back().await.unwrap();
    assert_eq!(settings(&mut session).await, before);
}
