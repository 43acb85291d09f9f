//! The single statements, in each mode in which a server executes them.

use std::collections::{HashMap, HashSet};
use std::panic::{AssertUnwindSafe, resume_unwind};

use futures_util::FutureExt as _;

use super::*;
use crate::engine::core::ledger::StoredName;
use crate::engine::sql::mysql::packet::rows;
use crate::engine::sql::server::single_calls::{Attempt, Granted, SingleChanges};
use crate::model::Ttl;

/// The modes: whether the server prepares statements, and whether an `INSERT` returns rows.
const MODES: [(bool, bool); 4] = [(true, true), (true, false), (false, true), (false, false)];

impl Database {
    async fn session(&self) -> MysqlSession {
        let config = MysqlConfig::parse(&self.url, &Settings::default()).unwrap();
        let mut session = MysqlSession::open(&MysqlServer::new(config)).await.unwrap();
        session.set_up().await.unwrap();
        session
    }

    /// Opens a connection that executes single statements in this mode. `None`: the server does not support the mode.
    async fn session_with(&self, (prepares, is_mariadb): (bool, bool)) -> Option<MysqlSession> {
        let mut session = self.session().await;
        let is_possible = session.is_mariadb || !is_mariadb;
        (session.prepares, session.is_mariadb) = (prepares, is_mariadb);
        is_possible.then_some(session)
    }
}

fn stored(claim: &Claim) -> StoredName {
    claim.keys()[0].as_str().as_bytes().to_vec()
}

async fn attempt(session: &mut MysqlSession, claims: &[&Claim]) -> Granted {
    let attempt = |claim: &&Claim| (stored(claim), Arc::new((*claim).clone()));
    let attempts: Vec<Attempt> = claims.iter().map(attempt).collect();
    session.attempt(&attempts).await.unwrap()
}

/// Grants a name, and returns its token.
async fn fence(session: &mut MysqlSession, claim: &Claim) -> i64 {
    attempt(session, &[claim]).await.fences[&stored(claim)]
}

/// Returns the names that were released, and whether each lease was live.
async fn release_all(session: &mut MysqlSession, claims: &[&Claim]) -> HashMap<String, bool> {
    let release = |claim: &&Claim| (stored(claim), claim.owner.clone());
    let changes = SingleChanges {
        releases: claims.iter().map(release).collect(),
        ..SingleChanges::default()
    };
    let (released, _) = session.change("p", &changes).await;
    let names = released.unwrap().into_iter();
    names
        .map(|(name, answer)| (String::from_utf8(name).unwrap(), answer.is_live))
        .collect()
}

/// Returns how many statements of a session were prepared, and how many of these were executed.
async fn prepared(session: &mut MysqlSession) -> (i64, i64) {
    let mut packet = Packet::default();
    let (prepared, executed) = (
        packet.add("SHOW SESSION STATUS LIKE 'Com_stmt_prepare'"),
        packet.add("SHOW SESSION STATUS LIKE 'Com_stmt_execute'"),
    );
    let mut answers = Vec::new();
    session.run(packet, &mut answers).await.unwrap();
    let number = |index| rows(&answers, index)[0].number(1).unwrap();
    (number(prepared), number(executed))
}

/// Returns how many statements of a kind a session has executed.
async fn executed(session: &mut MysqlSession, kind: &str) -> i64 {
    let mut packet = Packet::default();
    packet.add(format_args!("SHOW SESSION STATUS LIKE 'Com_{kind}'"));
    let mut answers = Vec::new();
    session.run(packet, &mut answers).await.unwrap();
    rows(&answers, 0)[0].number(1).unwrap()
}

/// Both are in one test: the second part changes the limit of the server, on which the counts of the first part depend.
#[tokio::test]
async fn a_pair_is_two_prepared_statements_and_text_above_the_limit_of_the_server() {
    let Some(mut database) = Database::create().await else {
        return;
    };
    for mode in [(true, true), (true, false)] {
        let Some(mut session) = database.session_with(mode).await else {
            continue;
        };
        let selects = executed(&mut session, "select").await;
        for _ in 0..3 {
            let ours = claim(&["n"]);
            fence(&mut session, &ours).await;
            assert_eq!(release_all(&mut session, &[&ours]).await.len(), 1);
        }
        assert_eq!(prepared(&mut session).await, (2, 6), "{mode:?}");
        assert_eq!(executed(&mut session, "select").await, selects, "{mode:?}");
    }
    // Each size is prepared once, and no statement is closed.
    let mut session = database.session().await;
    let all: Vec<Claim> = (0..STATEMENT_BATCH)
        .map(|index| claim(&[&format!("n{index}")]))
        .collect();
    for _ in 0..2 {
        for count in [1, 2, 3, 4, 5, 7, 12, 15, 20, 30, 40, 60] {
            let some: Vec<&Claim> = all[..count].iter().collect();
            assert_eq!(attempt(&mut session, &some).await.fences.len(), count);
            assert_eq!(release_all(&mut session, &some).await.len(), count);
        }
    }
    let of_attempts = if session.is_mariadb { 12 } else { 1 };
    assert_eq!(prepared(&mut session).await.0, of_attempts + 12);

    let alone = database.alone().await;
    let limit = database.number("SELECT @@GLOBAL.max_prepared_stmt_count").await;
    database.execute("SET GLOBAL max_prepared_stmt_count = 0").await;
    let outcome = AssertUnwindSafe(works_without_preparations(&database))
        .catch_unwind()
        .await;
    database
        .execute(&format!("SET GLOBAL max_prepared_stmt_count = {limit}"))
        .await;
    drop(alone);
    outcome.unwrap_or_else(|panic| resume_unwind(panic));
}

async fn works_without_preparations(database: &Database) {
    let mut session = database.session().await;
    let ours = [claim(&["a"]), claim(&["b"])];
    let ours: Vec<&Claim> = ours.iter().collect();
    assert_eq!(attempt(&mut session, &ours).await.fences.len(), 2);
    assert_eq!(release_all(&mut session, &ours).await.len(), 2);
    assert!(!session.prepares);
    let mut session = database.session().await;
    fence(&mut session, ours[0]).await;
    assert!(!session.prepares);
}

#[tokio::test]
async fn an_attempt_has_the_same_answer_in_each_mode() {
    let Some(mut database) = Database::create().await else {
        return;
    };
    for mode in MODES {
        let Some(mut session) = database.session_with(mode).await else {
            continue;
        };
        database.execute("DELETE FROM locks").await;
        let (mut ours, theirs) = (claim(&["n"]), claim(&["n"]));
        ours.metadata = Some("\"a\\\\b'ü\"".into());
        let first = fence(&mut session, &ours).await;
        let stored_fence = "SELECT fence FROM locks";
        assert_eq!(database.number(stored_fence).await, first, "{mode:?}");
        let is_stored = "SELECT COUNT(*) FROM locks WHERE metadata = '\"a\\\\\\\\b''ü\"' AND pid > 0 AND host <> ''";
        assert_eq!(database.number(is_stored).await, 1, "{mode:?}");
        assert_eq!(fence(&mut session, &ours).await, first, "{mode:?}: again");
        let busy = attempt(&mut session, &[&theirs]).await;
        assert!(busy.fences.is_empty(), "{mode:?}");
        let (owner, left) = &busy.held[&stored(&theirs)];
        assert_eq!(owner, ours.owner.as_str(), "{mode:?}");
        assert!(*left > LONG / 2 && *left <= LONG, "{mode:?}: {left:?}");
        assert_eq!(database.number(stored_fence).await, first, "{mode:?}");
        // A name with a queue is granted neither to its owner nor to others, also after the end of the lease.
        database.execute("UPDATE locks SET queued = 1").await;
        assert!(attempt(&mut session, &[&ours]).await.fences.is_empty(), "{mode:?}");
        database.execute("UPDATE locks SET expires_at = 1").await;
        for claim in [&ours, &theirs] {
            let answer = attempt(&mut session, &[claim]).await;
            assert!(answer.fences.is_empty() && answer.held.is_empty(), "{mode:?}");
        }
        // An expired lease, whose token is of a clock that was ahead.
        let ahead = first + 1_000_000_000_000;
        let text = format!("UPDATE locks SET queued = 0, fence = {ahead}");
        database.execute(&text).await;
        assert_eq!(fence(&mut session, &theirs).await, ahead + 1, "{mode:?}");
        assert_eq!(database.number(stored_fence).await, ahead + 1, "{mode:?}");

        // Five names in another order than that of the locks, of which one is busy.
        let several = ["e", "n", "c", "a", "d"].map(|name| claim(&[name]));
        let several: Vec<&Claim> = several.iter().collect();
        let answer = attempt(&mut session, &several).await;
        let granted: HashSet<&[u8]> = answer.fences.keys().map(Vec::as_slice).collect();
        assert_eq!(granted, HashSet::from([&b"a"[..], b"c", b"d", b"e"]), "{mode:?}");
        assert_eq!(answer.held.keys().collect::<Vec<_>>(), [b"n"], "{mode:?}");
    }
}

/// The insert id is then the value of the column.
#[tokio::test]
async fn a_column_with_auto_increment_is_not_the_fencing_token() {
    let Some(mut database) = Database::create().await else {
        return;
    };
    let mut session = database.session_with((true, false)).await.unwrap();
    let text = "ALTER TABLE locks ADD COLUMN id bigint NOT NULL AUTO_INCREMENT UNIQUE";
    database.execute(text).await;
    // A transaction answers instead.
    let answer = attempt(&mut session, &[&claim(&["n"])]).await;
    assert!(answer.fences.is_empty(), "{:?}", answer.fences);
}

#[tokio::test]
async fn an_attempt_of_a_waiter_for_a_busy_name_is_one_statement() {
    let Some(database) = Database::create().await else {
        return;
    };
    let mut session = database.session_with((true, false)).await.unwrap();
    fence(&mut session, &claim(&["n"])).await;
    let selects = executed(&mut session, "select").await;
    let answer = attempt(&mut session, &[&waiting(&["n"])]).await;
    assert!(answer.fences.is_empty() && answer.held.is_empty());
    assert_eq!(
        executed(&mut session, "select").await,
        selects,
        "it goes on to a transaction"
    );
}

#[tokio::test]
async fn a_release_has_the_same_answer_in_each_mode() {
    let Some(mut database) = Database::create().await else {
        return;
    };
    for mode in MODES {
        let Some(mut session) = database.session_with(mode).await else {
            continue;
        };
        database.execute("DELETE FROM locks").await;
        let names = ["live", "released", "granted", "expired", "queued", "last"];
        let claims = names.map(|name| claim(&[name]));
        let claims: Vec<&Claim> = claims.iter().collect();
        assert_eq!(attempt(&mut session, &claims).await.fences.len(), 6, "{mode:?}");
        let never = claim(&["never"]);
        database
            .execute(
                "UPDATE locks SET expires_at = 1 WHERE name IN ('released', 'granted', 'expired'); \
                 UPDATE locks SET owner = NULL WHERE name = 'released'; \
                 UPDATE locks SET queued = 1 WHERE name = 'queued'",
            )
            .await;
        fence(&mut session, &claim(&["granted"])).await;
        let mut all = claims.clone();
        all.push(&never);
        // The others need a transaction, which answers that a lease was lost.
        let expected = HashMap::from([("live".to_owned(), true), ("last".to_owned(), true)]);
        assert_eq!(release_all(&mut session, &all).await, expected, "{mode:?}");
        assert!(release_all(&mut session, &all).await.is_empty(), "{mode:?}");
        let held = "SELECT COUNT(*) FROM locks WHERE owner IS NOT NULL";
        assert_eq!(database.number(held).await, 3, "{mode:?}");
        for claim in [claims[3], claims[4]] {
            assert!(release_all(&mut session, &[claim]).await.is_empty(), "{mode:?}");
        }
        let free =
            "SELECT COUNT(*) FROM locks WHERE owner IS NULL AND expires_at = 0 AND metadata IS NULL AND since > 0";
        assert_eq!(database.number(free).await, 2, "{mode:?}");
    }
}

/// The statement neither waits for the row nor fails. A transaction answers the release of its name.
#[tokio::test]
async fn a_locked_row_is_skipped_by_a_renewal_and_a_release() {
    let Some(mut database) = Database::create().await else {
        return;
    };
    let mut session = database.session().await;
    let (free, locked) = (claim(&["free"]), claim(&["locked"]));
    attempt(&mut session, &[&free, &locked]).await;
    database
        .execute("BEGIN; SELECT name FROM locks WHERE name = 'locked' FOR UPDATE")
        .await;
    let renewal = |claim: &Claim| (stored(claim), claim.owner.clone(), claim.ttl);
    let changes = SingleChanges {
        renewals: [&free, &locked].map(renewal).into(),
        ..SingleChanges::default()
    };
    // A statement that waited for the row would exceed the store timeout.
    let mut packet = Packet::default();
    packet.add("SET SESSION innodb_lock_wait_timeout = 30");
    session.run(packet, &mut Vec::new()).await.unwrap();
    let (_, renewed) = session.change("p", &changes).await;
    assert_eq!(renewed.unwrap(), [free.owner.as_str().to_owned()].into());
    let expected = HashMap::from([("free".to_owned(), true)]);
    assert_eq!(release_all(&mut session, &[&free, &locked]).await, expected);
    let mut packet = Packet::default();
    packet.add("SELECT @@SESSION.innodb_lock_wait_timeout");
    let mut answers = Vec::new();
    session.run(packet, &mut answers).await.unwrap();
    assert_eq!(
        rows(&answers, 0)[0].number(0),
        Some(30),
        "a failed statement restores the setting"
    );
}

/// A lease whose name is granted again at once does not count as lost.
#[tokio::test]
async fn a_name_that_is_granted_again_at_once_counts_as_released() {
    let Some(mut database) = Database::create().await else {
        return;
    };
    let mut session = database.session().await;
    let (first, second, queued) = (claim(&["a"]), claim(&["b"]), claim(&["q"]));
    let all = [&first, &second, &queued];
    attempt(&mut session, &all).await;
    database
        .execute(
            "UPDATE locks SET queued = 1 WHERE name = 'q'; \
             CREATE TRIGGER again BEFORE UPDATE ON locks FOR EACH ROW \
             SET NEW.owner = IF(NEW.name = 'a' AND NEW.owner IS NULL, 'another', NEW.owner)",
        )
        .await;
    let released = release_all(&mut session, &all).await;
    database.execute("DROP TRIGGER again").await;
    assert_eq!(
        released,
        HashMap::from([("a".to_owned(), true), ("b".to_owned(), true)])
    );
}

#[tokio::test]
async fn a_release_beside_a_lost_lease_is_one_although_the_name_is_granted_again() {
    let Some(mut database) = Database::create().await else {
        return;
    };
    let (mut session, mut other) = (database.session().await, database.session().await);
    let mut answered = 0;
    for _ in 0..40 {
        let (held, lost, next) = (claim(&["a"]), claim(&["l"]), claim(&["a"]));
        attempt(&mut session, &[&held, &lost]).await;
        database
            .execute("UPDATE locks SET owner = 'another' WHERE name = 'l'")
            .await;
        let (both, again) = ([&held, &lost], [&next]);
        let granted_again = async { while attempt(&mut other, &again).await.fences.is_empty() {} };
        let (released, ()) = tokio::join!(release_all(&mut session, &both), granted_again);
        // Empty if the clock of the grant is older than the release for which it waited. The engine would then use a transaction.
        if !released.is_empty() {
            assert_eq!(released, HashMap::from([("a".to_owned(), true)]));
            answered += 1;
        }
        release_all(&mut other, &[&next]).await;
        database.execute("DELETE FROM locks WHERE name = 'l'").await;
    }
    assert!(answered > 0);
}

#[tokio::test]
async fn releases_and_renewals_of_one_call_are_both_executed() {
    let Some(database) = Database::create().await else {
        return;
    };
    let mut session = database.session().await;
    let (released, renewed) = (claim(&["a"]), claim(&["b"]));
    attempt(&mut session, &[&released, &renewed]).await;
    let changes = SingleChanges {
        releases: vec![(stored(&released), released.owner.clone())],
        renewals: vec![(stored(&renewed), renewed.owner.clone(), Ttl::clamped(LONG * 2))],
        ..SingleChanges::default()
    };
    let (released, renewed) = session.change("p", &changes).await;
    assert_eq!(released.unwrap().len(), 1);
    assert_eq!(renewed.unwrap().len(), 1);
}

#[tokio::test]
async fn renewals_share_a_statement_and_fewer_through_tls() {
    let Some(database) = Database::create().await else {
        return;
    };
    let mut session = database.session().await;
    let claims: Vec<Claim> = (0..2 * STATEMENT_BATCH + 1)
        .map(|index| claim(&[&format!("n{index}")]))
        .collect();
    for some in claims.chunks(STATEMENT_BATCH) {
        attempt(&mut session, &some.iter().collect::<Vec<_>>()).await;
    }
    let ttl = Ttl::clamped(Duration::from_secs(60));
    let renewal = |claim: &Claim| (stored(claim), claim.owner.clone(), ttl);
    let changes = SingleChanges {
        renewals: claims.iter().map(renewal).collect(),
        ..SingleChanges::default()
    };
    // MySQL's update has a join, to skip locked rows. MariaDB's has one only after the plain `UPDATE` found a locked row.
    let kind = if session.is_mariadb { "update" } else { "update_multi" };
    for (has_tls, statements) in [(false, 1), (true, 3)] {
        session.has_tls = has_tls;
        let before = executed(&mut session, kind).await;
        let (_, renewed) = session.change("p", &changes).await;
        assert_eq!(renewed.unwrap().len(), claims.len());
        assert_eq!(executed(&mut session, kind).await - before, statements);
    }
}
