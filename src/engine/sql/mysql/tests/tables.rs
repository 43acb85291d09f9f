//! Tables, privileges, and what stays in the tables.

use futures_util::future::join_all;

use super::*;
use crate::engine::EngineExt;
use crate::engine::sql::server::connection;
use crate::engine::sql::server::single_calls::SingleChanges;

async fn refused(url: &str, settings: &Settings) -> String {
    let config = MysqlConfig::parse(url, settings).unwrap();
    let error = super::super::connect(config).await.unwrap_err();
    assert!(!error.retryable, "{error}");
    error.to_string()
}

#[tokio::test]
async fn many_processes_create_the_tables_at_once() {
    let Some(database) = Database::create().await else {
        return;
    };
    let engines = join_all((0..8).map(|_| database.engine())).await;
    acquire(&engines[0], &claim(&["n"])).await;
    busy(&engines[7], &claim(&["n"])).await;
}

#[tokio::test]
async fn a_user_with_the_documented_privileges_is_enough() {
    let Some(mut database) = Database::create().await else {
        return;
    };
    let name = database.name.clone();
    let settings = || Settings {
        table: format!("{name}.locks"),
        ..Settings::default()
    };
    // The first connect needs the privilege to create.
    let owner = database.engine_with(settings()).await;
    let user = format!("r{}", &name[1..24]);
    database
        .execute(&format!(
            "CREATE USER {user}; \
             GRANT SELECT, INSERT, UPDATE, DELETE ON {name}.locks TO {user}; \
             GRANT SELECT, INSERT, UPDATE, DELETE ON {name}.locks_waiters TO {user}"
        ))
        .await;
    let url = database.url.replace(&database.user, &user);
    // It has privileges on the tables only, and names no database.
    let (server, _) = url.rsplit_once('/').unwrap();
    let engine = open(server, &settings()).await;
    let (holder, waiter) = (claim(&["n", "m"]), waiting(&["n"]));
    acquire(&engine, &holder).await;
    busy(&owner, &claim(&["n"])).await;
    let mut subscription = engine.subscribe(&waiter, &key("n")).await.unwrap();
    busy(&engine, &waiter).await;
    assert_eq!(engine.renew(&holder, holder.ttl).await.unwrap(), Renewed::Extended);
    assert_eq!(release(&engine, &holder).await, Released::Freed);
    tokio::time::timeout(Duration::from_secs(5), subscription.changed())
        .await
        .unwrap();
    acquire(&engine, &waiter).await;
    assert_eq!(engine.list("", PAGE).await.unwrap().len(), 1);
    assert!(engine.force_release(&key("n")).await.unwrap());

    let others = Settings {
        table: format!("{name}.others"),
        ..Settings::default()
    };
    let message = refused(server, &others).await;
    assert!(message.contains("denied"), "{message}");
}

#[tokio::test]
async fn tables_with_other_columns_or_without_a_key_are_refused_with_their_name() {
    let Some(mut database) = Database::create().await else {
        return;
    };
    database
        .execute("CREATE TABLE locks (name varbinary(640) PRIMARY KEY)")
        .await;
    let message = refused(&database.url, &Settings::default()).await;
    assert!(
        message.contains(".locks.owner'") && message.contains("option table"),
        "{message}"
    );
    database.execute("DROP TABLE locks").await;
    drop(database.engine().await);
    // Without its key two rows could have one name.
    database.execute("ALTER TABLE locks DROP PRIMARY KEY").await;
    let message = refused(&database.url, &Settings::default()).await;
    assert!(
        message.contains("table 'locks'") && message.contains("option table"),
        "{message}"
    );
}

/// A proxy may share a connection to the server with another program.
#[tokio::test]
async fn a_session_with_another_database_uses_the_same_tables() {
    let Some(database) = Database::create().await else {
        return;
    };
    let engine = database.engine().await;
    acquire(&engine, &claim(&["n"])).await;
    let mut session: MysqlSession = session_of(connection::open(&engine.waiters.server).await.unwrap());
    let mut packet = Packet::default();
    packet.add("USE information_schema");
    session.run(packet, &mut Vec::new()).await.unwrap();
    let granted = session.attempt(&attempts(&[claim(&["n"])])).await.unwrap();
    assert!(granted.fences.is_empty() && granted.held.len() == 1);
    session.set_up().await.unwrap();
}

#[tokio::test]
async fn another_storage_engine_is_refused_with_its_name() {
    let Some(mut database) = Database::create().await else {
        return;
    };
    drop(database.engine().await);
    database.execute("ALTER TABLE locks_waiters ENGINE = MEMORY").await;
    let message = refused(&database.url, &Settings::default()).await;
    assert!(
        message.contains("locks_waiters has the storage engine MEMORY instead of InnoDB: ALTER TABLE locks_waiters"),
        "{message}"
    );
}

#[tokio::test]
async fn a_position_leaves_nothing_behind() {
    let Some(mut database) = Database::create().await else {
        return;
    };
    let engine = database.engine().await;
    let (holder, set, other) = (claim(&["a"]), waiting(&["a", "b"]), claim(&["b"]));
    acquire(&engine, &holder).await;
    acquire(&engine, &other).await;
    busy(&engine, &set).await;
    let queued = "SELECT queued FROM locks WHERE name =";
    assert_eq!(database.number(&format!("{queued} 'a'")).await, 1);
    release(&engine, &holder).await;
    busy(&engine, &set).await;
    assert_eq!(database.number(&format!("{queued} 'a'")).await, 0, "it has moved");
    assert_eq!(database.number(&format!("{queued} 'b'")).await, 1);
    release(&engine, &set).await;
    assert_eq!(database.number(&format!("{queued} 'b'")).await, 0);
    assert_eq!(database.number("SELECT COUNT(*) FROM locks_waiters").await, 0);
}

/// Two names that a collation takes for equal, and those with an end that a collation ignores, are different locks.
#[tokio::test]
async fn names_are_bytes() {
    let Some(database) = Database::create().await else {
        return;
    };
    let engine = database.engine().await;
    let names = ["straße", "strasse", "STRASSE", "n", "n ", "e\u{301}", "é", "'\\\"`;--"];
    for name in names {
        acquire(&engine, &claim(&[name])).await;
    }
    let mut found: Vec<String> = engine
        .list("", PAGE)
        .await
        .unwrap()
        .into_iter()
        .map(|info| info.name)
        .collect();
    let mut expected = names.map(str::to_owned);
    found.sort();
    expected.sort();
    assert_eq!(found, expected);
}

/// With a large table, each statement reads the rows of its names only.
#[tokio::test]
async fn no_call_scans_a_table() {
    let Some(mut database) = Database::create().await else {
        return;
    };
    let engine = database.engine().await;
    for statement in [
        "SET SESSION cte_max_recursion_depth = 5000",
        "SET SESSION max_recursive_iterations = 5000",
    ] {
        // The first one is for MySQL, the second one for MariaDB.
        let _ = database.client.execute(statement).await;
    }
    let numbers = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 4000)";
    database
        .execute(&format!(
            "INSERT INTO locks (name, fence, expires_at, since) {numbers} SELECT CONCAT('x', i), 0, 0, 0 FROM n; \
             INSERT INTO locks_waiters (owner, name, alive_until, process, hold_ms) {numbers} \
             SELECT CONCAT('o', i), CONCAT('x', i), 0, 'p', 0 FROM n; \
             ANALYZE TABLE locks, locks_waiters"
        ))
        .await;
    let config = MysqlConfig::parse(&database.url, &Settings::default()).unwrap();
    let mut session = MysqlSession::open(&MysqlServer::new(config)).await.unwrap();
    session.set_up().await.unwrap();
    let holders: Vec<Claim> = (0..64).map(|index| claim(&[&format!("n{index}")])).collect();
    let stored = |claim: &Claim| claim.keys()[0].as_str().as_bytes().to_vec();
    let before = scanned(&mut session).await;
    let releases = holders.iter().map(|claim| (stored(claim), claim.owner.clone()));
    let renewals = holders
        .iter()
        .map(|claim| (stored(claim), claim.owner.clone(), claim.ttl));
    // The second round executes the statements as text, with `SKIP LOCKED`: MariaDB's releases and renewals after a locked row.
    for (is_mariadb, prepares) in [(session.is_mariadb, session.prepares), (false, false)] {
        (session.is_mariadb, session.prepares) = (is_mariadb, prepares);
        assert_eq!(session.attempt(&attempts(&holders)).await.unwrap().fences.len(), 64);
        let mut changes = SingleChanges {
            renewals: renewals.clone().collect(),
            ..SingleChanges::default()
        };
        assert_eq!(session.change("p", &changes).await.1.unwrap().len(), 64);
        changes.renewals.clear();
        changes.releases = releases.clone().collect();
        assert_eq!(session.change("p", &changes).await.0.unwrap().len(), 64);
    }
    let names: Vec<StoredName> = holders.iter().map(stored).collect();
    session.check("p", &names, None).await.unwrap();
    let rows = scanned(&mut session).await - before;
    assert!(rows < 1000, "{rows} rows were read by scans");
    session.check("p", &names, Some(&[])).await.unwrap();
    let alive = "SELECT COUNT(*) FROM locks_waiters WHERE process = 'p' AND alive_until > 0";
    assert_eq!(database.number(alive).await, 4000, "the heartbeat of all positions");
    // The same in transactions.
    let (set, other) = (waiting(&["a", "b"]), claim(&["b"]));
    acquire(&engine, &other).await;
    busy(&engine, &set).await;
    release(&engine, &other).await;
    acquire(&engine, &set).await;
}

/// Returns how many rows the statements of a session have read in scans.
async fn scanned(session: &mut MysqlSession) -> i64 {
    let mut packet = Packet::default();
    let index = packet.add("SHOW SESSION STATUS LIKE 'Handler_read_rnd_next'");
    let mut answers = Vec::new();
    session.run(packet, &mut answers).await.unwrap();
    answers[index].rows[0].number(1).unwrap()
}

#[tokio::test]
async fn locked_rows_are_left_to_a_later_sweep() {
    let Some(mut database) = Database::create().await else {
        return;
    };
    let engine = database.engine().await;
    let mut session = connection::open(&engine.waiters.server).await.unwrap();
    database
        .execute("INSERT INTO locks (name, fence, expires_at, since) VALUES ('old', 1, 0, 0)")
        .await;
    database
        .execute("BEGIN; SELECT 1 FROM locks WHERE name = 'old' FOR UPDATE")
        .await;
    assert_eq!(session.sweep(b"").await.unwrap().last, None);
    database.execute("ROLLBACK").await;
    assert_eq!(session.sweep(b"").await.unwrap().last, None);
    assert_eq!(database.number("SELECT COUNT(*) FROM locks").await, 0);
}
