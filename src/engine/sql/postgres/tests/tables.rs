//! Tables, privileges, and what stays in the tables.

use futures_util::future::join_all;

use super::*;
use crate::engine::EngineExt;
use crate::engine::sql::postgres::session::PLAN_AGE;
use crate::engine::sql::server::connection;
use crate::model::Ttl;

impl Database {
    /// Creates a role with privileges, and returns its URL.
    async fn role(&self, privileges: &[&str]) -> String {
        let role = format!("r{}", &self.name[1..20]);
        self.execute(&format!("CREATE ROLE {role} LOGIN")).await;
        for privilege in privileges {
            self.execute(&format!("GRANT {privilege} TO {role}")).await;
        }
        self.url.replace("holdfast@", &format!("{role}@"))
    }
}

/// Connects, and expects a permanent error with a text.
async fn refused(url: &str, settings: &Settings, text: &str) {
    let config = PostgresConfig::parse(url, settings).unwrap();
    let error = super::super::connect(config).await.unwrap_err();
    assert!(!error.retryable && error.to_string().contains(text), "{error}");
}

#[tokio::test]
async fn many_processes_create_the_tables_at_once() {
    let Some(database) = Database::create().await else {
        return;
    };
    let engines = join_all((0..8).map(|_| database.engine())).await;
    let ours = claim(&["n"]);
    acquire(&engines[0], &ours).await;
    busy(&engines[7], &claim(&["n"])).await;
}

#[tokio::test]
async fn a_role_with_the_documented_privileges_is_enough() {
    let Some(database) = Database::create().await else {
        return;
    };
    let settings = || Settings {
        table: "app.locks".into(),
        ..Settings::default()
    };
    // The first connect needs the privilege to create.
    let owner = database.engine_with(settings()).await;
    let url = database
        .role(&[
            "USAGE ON SCHEMA app",
            "SELECT, INSERT, UPDATE, DELETE ON app.locks, app.locks_waiters",
        ])
        .await;
    let engine = open(&url, &settings()).await;
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
        table: "app.others".into(),
        ..Settings::default()
    };
    refused(
        &url,
        &others,
        "permission denied for schema app [42501] (the user needs the privileges USAGE",
    )
    .await;
}

/// `connect` finds a missing privilege, not the first call that finds a queue.
#[tokio::test]
async fn a_missing_privilege_fails_the_connection() {
    let Some(database) = Database::create().await else {
        return;
    };
    database.engine().await;
    let url = database
        .role(&[
            "USAGE ON SCHEMA holdfast",
            "SELECT, INSERT, UPDATE, DELETE ON locks",
            "SELECT, INSERT, UPDATE ON locks_waiters",
        ])
        .await;
    let text = "lacks the privilege DELETE on \"holdfast\".\"locks_waiters\" (the user needs";
    refused(&url, &Settings::default(), text).await;
}

/// Summer time begins in the session's time zone while the lease lasts.
#[tokio::test]
async fn a_day_of_a_lease_has_24_hours() {
    let Some(database) = Database::create().await else {
        return;
    };
    let day = database
        .number("SELECT least(extract(doy FROM now() + interval '10 days'), 365)::bigint")
        .await;
    let url = format!(
        "{}?options=-c%20timezone%3DAAA0BBB-1%2CJ{day}%2CJ{}",
        database.url,
        (day + 100) % 365 + 1
    );
    let engine = open(&url, &Settings::default()).await;
    let mut long = claim(&["n"]);
    long.ttl = Ttl::clamped(Duration::from_secs(20 * 86_400));
    for path in ["a new row", "a row that exists", "the same owner"] {
        acquire(&engine, &long).await;
        let left = engine.inspect(&key("n")).await.unwrap().unwrap().remaining.unwrap();
        assert!(
            long.ttl.duration() - left < Duration::from_secs(600),
            "{path}: {left:?}"
        );
        if path == "a new row" {
            assert_eq!(release(&engine, &long).await, Released::Freed);
        }
    }
}

#[tokio::test]
async fn tables_with_other_columns_are_a_permanent_error() {
    let Some(database) = Database::create().await else {
        return;
    };
    database
        .execute("CREATE SCHEMA holdfast; CREATE TABLE holdfast.locks (name bytea PRIMARY KEY)")
        .await;
    let text = "[42703] (a table of this name is not one of holdfast";
    refused(&database.url, &Settings::default(), text).await;
}

/// The `search_path` of a session is that of another program behind a pooler, or that of the role.
#[tokio::test]
async fn engines_with_different_search_paths_use_the_same_table() {
    let Some(database) = Database::create().await else {
        return;
    };
    let engine = database.engine().await;
    database.execute("CREATE SCHEMA other").await;
    let with_path = format!("{}?options=-c%20search_path%3Dother", database.url);
    let other = open(&with_path, &Settings::default()).await;
    acquire(&engine, &claim(&["n"])).await;
    busy(&other, &claim(&["n"])).await;
}

/// Not every encoding has the characters of the metadata.
#[tokio::test]
async fn metadata_has_any_character_in_a_database_of_any_encoding() {
    let Some(database) = Database::create().await else {
        return;
    };
    for encoding in ["LATIN1", "EUC_JP", "SQL_ASCII", "UTF8"] {
        let name = format!("{}_{}", database.name, encoding.to_lowercase());
        database
            .execute(&format!(
                "CREATE DATABASE {name} ENCODING '{encoding}' LOCALE 'C' TEMPLATE template0"
            ))
            .await;
        let engine = open(&database.url.replace(&database.name, &name), &Settings::default()).await;
        let (mut emoji, other, mut several) = (claim(&["\u{1f512}"]), claim(&["b"]), claim(&["c", "d"]));
        emoji.metadata = Some("{\"\u{1f512}\":\"ü\\n\"}".into());
        several.metadata = emoji.metadata.clone();
        let claims = [&emoji, &other, &several];
        join_all(claims.map(|claim| acquire(&engine, claim))).await;
        for name in ["\u{1f512}", "d"] {
            let info = engine.inspect(&key(name)).await.unwrap().unwrap();
            let escaped = "{\"\\ud83d\\udd12\":\"\\u00fc\\n\"}";
            let expected = if encoding == "UTF8" {
                emoji.metadata.as_deref()
            } else {
                Some(escaped)
            };
            assert_eq!(info.metadata.as_deref(), expected, "{encoding}");
        }
    }
}

/// Each statement reads all versions of its rows that the snapshot may need.
#[tokio::test]
async fn an_old_snapshot_is_named_in_a_warning() {
    let Some(database) = Database::create().await else {
        return;
    };
    let engine = database.engine().await;
    acquire(&engine, &claim(&["n"])).await;
    let mut session = connection::open(&engine.waiters.server).await.unwrap();
    // Each block with a handler has a transaction id of its own.
    let many_versions = "DO $$ BEGIN FOR i IN 1..1200 LOOP \
         BEGIN FOR j IN 1..10 LOOP UPDATE locks SET pid = j; END LOOP; EXCEPTION WHEN division_by_zero THEN NULL; END; \
         END LOOP; END $$";
    let dump = connect(&database.url).await;
    dump.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT FROM locks")
        .await
        .unwrap();
    let pid: i32 = dump.query_one("SELECT pg_backend_pid()", &[]).await.unwrap().get(0);
    assert_eq!(session.slowness_warning().await.unwrap(), None);
    database.execute(many_versions).await;
    let mut warning = None;
    eventually("the server has counted the versions", async || {
        warning = session.slowness_warning().await.unwrap();
        warning.is_some()
    })
    .await;
    assert!(warning.unwrap().contains(&format!("that of the process {pid}, ")));
    dump.batch_execute("COMMIT").await.unwrap();
    assert_eq!(session.slowness_warning().await.unwrap(), None);
}

/// As with `CREATE SCHEMA … AUTHORIZATION`, and without it.
#[tokio::test]
async fn a_role_creates_tables_in_a_schema_of_its_own_or_learns_which_privilege_it_needs() {
    let Some(database) = Database::create().await else {
        return;
    };
    let url = database.role(&[]).await;
    let text = "permission denied for database";
    refused(&url, &Settings::default(), text).await;
    let advice = "or on the database if the schema is missing: CREATE SCHEMA";
    refused(&url, &Settings::default(), advice).await;
    let role = url.split(['/', '@']).nth(2).unwrap();
    database
        .execute(&format!("CREATE SCHEMA holdfast AUTHORIZATION {role}"))
        .await;
    acquire(&open(&url, &Settings::default()).await, &claim(&["n"])).await;
}

#[tokio::test]
async fn a_position_leaves_nothing_behind() {
    let Some(database) = Database::create().await else {
        return;
    };
    let engine = database.engine().await;
    let (holder, set, other) = (claim(&["a"]), waiting(&["a", "b"]), claim(&["b"]));
    acquire(&engine, &holder).await;
    acquire(&engine, &other).await;
    busy(&engine, &set).await;
    let queued = "SELECT sum(queued) FROM locks WHERE name =";
    assert_eq!(database.number(&format!("{queued} 'a'")).await, 1);
    release(&engine, &holder).await;
    busy(&engine, &set).await;
    assert_eq!(database.number(&format!("{queued} 'a'")).await, 0, "it has moved");
    assert_eq!(database.number(&format!("{queued} 'b'")).await, 1);
    release(&engine, &set).await;
    assert_eq!(database.number(&format!("{queued} 'b'")).await, 0);
    assert_eq!(database.number("SELECT count(*) FROM locks_waiters").await, 0);
}

#[tokio::test]
async fn a_busy_attempt_writes_nothing() {
    let Some(database) = Database::create().await else {
        return;
    };
    let engine = database.engine().await;
    acquire(&engine, &claim(&["n"])).await;
    let row = async || {
        let text = "SELECT concat(ctid, xmin, xmax) FROM locks WHERE name = 'n'";
        database.client.query_one(text, &[]).await.unwrap().get::<_, String>(0)
    };
    let before = row().await;
    for _ in 0..20 {
        busy(&engine, &claim(&["n"])).await;
    }
    assert_eq!(row().await, before, "the row is not even locked");
    busy(&engine, &waiting(&["n"])).await;
    assert_ne!(row().await, before, "the number of waiters");
}

/// The server makes its plans while the table is almost empty, and uses them when it is large.
#[tokio::test]
async fn no_call_scans_a_table_that_has_grown() {
    for rows in [0, 3] {
        let Some(database) = Database::create().await else {
            return;
        };
        // The creation of an index counts as a scan.
        database.engine().await.close().await;
        let open = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'holdfast'";
        eventually("the connection has ended", async || database.number(open).await == 0).await;
        let insert = |first: u32, last: u32| {
            format!(
                "INSERT INTO locks (name, fence, expires_at) \
                 SELECT convert_to('row' || i, 'UTF8'), 1, 'epoch' FROM generate_series({first}, {last}) AS i"
            )
        };
        database.execute(&insert(1, rows)).await;
        database.execute("ANALYZE locks, locks_waiters").await;
        database.execute("SELECT pg_stat_reset()").await;
        let (engine, other) = (database.engine().await, database.engine().await);
        let calls = async |round: usize| {
            let claims: Vec<Claim> = (0..40).map(|index| claim(&[&format!("{round}-{index}")])).collect();
            join_all(claims.iter().map(|claim| acquire(&engine, claim))).await;
            join_all(claims.iter().map(|claim| engine.renew(claim, claim.ttl))).await;
            let waiter = waiting(&[&format!("{round}-0")]);
            busy(&other, &waiter).await;
            let released = join_all(claims.iter().map(|claim| release(&engine, claim))).await;
            assert_eq!(released, [Released::Freed; 40]);
            release(&other, &waiter).await;
            let (one, heavy) = (share(1, 2), waiting_share(2, 2));
            acquire(&engine, &one).await;
            busy(&other, &heavy).await;
            engine.waiters.check(vec![key("n").shared()]);
            release(&engine, &one).await;
            release(&other, &heavy).await;
        };
        calls(0).await;
        database.execute(&insert(rows + 1, 20_000)).await;
        advance(PLAN_AGE).await;
        // The server discards the plans. A connection counts its reads with the first call after a second.
        calls(1).await;
        tokio::time::sleep(Duration::from_millis(1200)).await;
        calls(2).await;
        database.execute("SELECT pg_stat_reset()").await;
        for round in 3..20 {
            calls(round).await;
        }
        engine.close().await;
        other.close().await;
        // A connection has counted its scans when it has ended.
        eventually("the connections have ended", async || database.number(open).await == 0).await;
        let count = async |column: &str| {
            let sum = format!("SELECT coalesce(sum({column}), 0)::bigint FROM pg_stat_user_tables");
            database.number(&sum).await
        };
        assert!(count("idx_scan").await > 2000);
        assert_eq!(count("seq_scan").await, 0);
        let read = count("idx_tup_fetch").await;
        assert!(read < 100_000, "{read} rows, with plans for {rows}");
    }
}

/// The plan of a list is made once for all ranges.
#[tokio::test]
async fn inspect_and_a_page_of_a_list_read_no_rows_behind_their_range() {
    let Some(database) = Database::create().await else {
        return;
    };
    let engine = database.engine().await;
    database
        .execute(
            "INSERT INTO locks (name, fence, expires_at, queued) \
             SELECT convert_to('n' || lpad(i::text, 6, '0'), 'UTF8'), 1, 'epoch', 0 FROM generate_series(1, 50000) AS i",
        )
        .await;
    database.execute("SELECT pg_stat_reset()").await;
    for _ in 0..10 {
        assert_eq!(engine.inspect(&key("n000001")).await.unwrap(), None);
        assert!(engine.list("n0000", PAGE).await.unwrap().is_empty());
    }
    engine.close().await;
    let open =
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'holdfast'";
    // A connection has counted its reads when it has ended.
    eventually("the connections have ended", async || database.number(open).await == 0).await;
    let read = "SELECT idx_tup_fetch + seq_tup_read FROM pg_stat_user_tables WHERE relname = 'locks'";
    let read = database.number(read).await;
    assert!((100..20_000).contains(&read), "{read} rows");
}

/// Other products have the protocol of PostgreSQL, and not its guarantees.
#[tokio::test]
async fn another_product_is_refused_by_its_version() {
    let Some(database) = Database::create().await else {
        return;
    };
    let version = "CockroachDB CCL v23.1.11";
    let name = &database.name;
    for text in [
        "CREATE SCHEMA other".to_owned(),
        format!("CREATE FUNCTION other.version() RETURNS text LANGUAGE sql AS $$ SELECT '{version}' $$"),
        format!("ALTER DATABASE {name} SET search_path = other, pg_catalog, public"),
    ] {
        database.execute(&text).await;
    }
    let config = PostgresConfig::parse(&database.url, &Settings::default()).unwrap();
    let error = super::super::connect(config).await.unwrap_err();
    let text = error.to_string();
    assert!(
        !error.retryable && text.contains("this server is CockroachDB (CockroachDB CCL v23.1.11)"),
        "{text}"
    );
    assert_eq!(
        database
            .number("SELECT count(*) FROM pg_tables WHERE tablename = 'locks'")
            .await,
        0
    );
}

/// The error of the first statement is the cause of all others in its transaction.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_empty_database_is_set_up_by_every_first_connection() {
    let Some(database) = Database::create().await else {
        return;
    };
    for _ in 0..50 {
        database.execute("DROP TABLE IF EXISTS locks, locks_waiters").await;
        database.engine().await.close().await;
    }
}
