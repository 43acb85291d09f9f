//! The statements that a session ends.

use super::super::tests::Database;
use super::*;
use crate::engine::Settings;
use crate::engine::sql::server::tests::{TestDatabase, eventually};

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
