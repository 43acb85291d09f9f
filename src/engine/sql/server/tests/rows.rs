//! The rows of names: their fencing tokens, and how long free names keep them.

use std::collections::HashMap;
use std::time::Duration;

use super::super::connection::open;
use super::super::single_calls::{Attempt, answer_reads, pages};
use super::super::transaction::{Plan, Prefix};
use super::super::upkeep::{SWEEP_LIMIT, SWEEP_ROW, Swept};
use super::*;
use crate::engine::contract::{PAGE, one_succeeds};
use crate::engine::sql::Page;
use crate::engine::sql::failure::Kind;
use crate::engine::sql::jobs::{Job, Reply};
use crate::engine::{EngineExt, Renewed, Warnings};

/// Returns attempts for one name each.
pub(in crate::engine::sql) fn attempts(claims: &[Claim]) -> Vec<Attempt> {
    let stored = |claim: &Claim| claim.keys()[0].as_str().as_bytes().to_vec();
    let attempt = |claim: &Claim| (stored(claim), Arc::new(claim.clone()));
    claims.iter().map(attempt).collect()
}

/// The row of a name that is not created appears while the transaction waits for another row.
pub(in crate::engine::sql) async fn a_transaction_reads_only_rows_that_it_has_locked<D: TestDatabase>(
    database: &mut D,
) {
    let engine = database.engine().await;
    // Where the machine stands still, the transaction finds a locked row.
    one_succeeds(async |round| {
        let [appears, waited_for] = ["n", "z"].map(|name| format!("{name}{round}"));
        insert(database, [(waited_for.clone(), 0, 0)]).await;
        let mut session = open(&engine.waiters.server).await.unwrap();
        let mut plan = Plan::default();
        plan.names.insert(appears.clone().into_bytes(), false);
        plan.names.insert(waited_for.clone().into_bytes(), true);
        database.execute("BEGIN").await;
        let lock = format!("UPDATE locks SET fence = 2 WHERE name = '{waited_for}'");
        database.execute(&lock).await;
        let locking = tokio::spawn(async move {
            let ledger = session.begin("p", &plan).await;
            (session, ledger)
        });
        eventually("the transaction waits", async || {
            database.blocked().await > 0 || locking.is_finished()
        })
        .await;
        acquire(&engine, &claim(&[&appears])).await;
        database.execute("COMMIT").await;
        let (mut session, ledger) = locking.await.unwrap();
        let ledger = match ledger {
            Err(failure) if failure.kind() == Kind::Locked => return Err(failure.to_string()),
            ledger => ledger.unwrap(),
        };
        assert!(ledger.busy_for(&appears.clone().into_bytes()).is_some());
        let unlocked = format!(
            "SELECT COUNT(*) FROM (SELECT name FROM locks WHERE name = '{appears}' LIMIT 1 FOR UPDATE SKIP LOCKED) AS l"
        );
        assert_eq!(database.number(&unlocked).await, 0);
        session.roll_back().await.unwrap();
        assert_eq!(database.number(&unlocked).await, 1);
        Ok(())
    })
    .await;
}

/// The last token of a name is far ahead of the clock. Each statement that grants a name has its own formula.
pub(in crate::engine::sql) async fn fencing_tokens_grow_when_the_clock_steps_back<D: TestDatabase>(database: &mut D) {
    let engine = database.engine().await;
    let mut session = open(&engine.waiters.server).await.unwrap();
    let mut last: HashMap<&str, u64> = HashMap::new();
    let mut grows = |how: &str, name: &'static str, fence: u64| {
        let before = last.insert(name, fence).unwrap_or_default();
        assert!(fence > before, "{how}: {name} has {fence} after {before}");
    };
    for name in ["n", "o"] {
        let ours = claim(&[name]);
        grows("by the clock", name, fence(&engine, &ours).await.0 + 1_000_000_000_000);
        release(&engine, &ours).await;
    }
    database.execute("UPDATE locks SET fence = fence + 1000000000000").await;
    let alone = claim(&["n"]);
    grows("alone", "n", fence(&engine, &alone).await.0);
    release(&engine, &alone).await;
    let batch = [claim(&["n"]), claim(&["o"])];
    let granted = session.attempt(&attempts(&batch)).await.unwrap();
    for (name, ours) in ["n", "o"].into_iter().zip(&batch) {
        grows("in a batch", name, granted.fences[name.as_bytes()].unsigned_abs());
        release(&engine, ours).await;
    }
    let pair = claim(&["n", "o"]);
    let of_pair = fence(&engine, &pair).await.0;
    for name in ["n", "o"] {
        grows("in a transaction", name, of_pair);
    }
    release(&engine, &pair).await;
    let (holder, next) = (claim(&["n"]), waiting(&["n"]));
    grows("alone again", "n", fence(&engine, &holder).await.0);
    let mut subscription = engine.subscribe(&next, &key("n")).await.unwrap();
    busy(&engine, &next).await;
    release(&engine, &holder).await;
    let handed = database.number("SELECT fence FROM locks WHERE name = 'n'").await;
    grows("by a hand-off", "n", handed.unsigned_abs());
    notified(&mut subscription).await;
}

/// Inserts rows of free names: each name, its number of waiters, and since when it is free, in seconds.
async fn insert<D: TestDatabase>(database: &mut D, rows: impl IntoIterator<Item = (String, u32, u64)>) {
    let rows = rows.into_iter().map(|(name, queued, seconds)| {
        let since = D::ago(seconds);
        format!("('{name}', 1, {queued}, {since}, {since})")
    });
    let rows: Vec<String> = rows.collect();
    let text = format!(
        "INSERT INTO locks (name, fence, queued, expires_at, since) VALUES {}",
        rows.join(",")
    );
    database.execute(&text).await;
}

/// Inserts a position that expired.
async fn insert_position<D: TestDatabase>(database: &mut D, name: &str, seconds: u64) {
    let text = format!(
        "INSERT INTO locks_waiters (owner, name, alive_until, process, hold_ms) VALUES ('{name}', '{name}', {}, 'p', 0)",
        D::ago(seconds)
    );
    database.execute(&text).await;
}

async fn count<D: TestDatabase>(database: &mut D, condition: &str) -> i64 {
    database
        .number(&format!("SELECT COUNT(*) FROM locks WHERE {condition}"))
        .await
}

const HOURS: u64 = 2 * 3600;

pub(in crate::engine::sql) async fn a_sweep_removes_old_rows_of_free_names<D: TestDatabase>(database: &mut D) {
    let engine = database.engine().await;
    let (free, held) = (claim(&["free"]), claim(&["held"]));
    acquire(&engine, &free).await;
    acquire(&engine, &held).await;
    release(&engine, &free).await;
    insert(database, [("queued".to_owned(), 1, HOURS)]).await;
    insert_position(database, "queued", 30).await;
    insert_position(database, "expired", 100).await;
    let mut session = open(&engine.waiters.server).await.unwrap();
    let (last, with_expired) = (None, vec![b"expired".to_vec()]);
    assert_eq!(session.sweep(b"").await.unwrap(), Swept { last, with_expired });
    assert_eq!(count(database, "1 = 1").await, 3);
    let text = format!("UPDATE locks SET since = {}", D::ago(HOURS));
    database.execute(&text).await;
    assert_eq!(session.sweep(b"").await.unwrap().last, None);
    assert_eq!(count(database, "name = 'free'").await, 0);
    assert_eq!(count(database, "name IN ('held', 'queued')").await, 2);
    // The holder has ended without a release.
    let text = format!("UPDATE locks SET expires_at = {} WHERE name = 'held'", D::ago(HOURS));
    database.execute(&text).await;
    assert_eq!(session.sweep(b"").await.unwrap().last, None);
    assert_eq!(count(database, "1 = 1").await, 1);
}

pub(in crate::engine::sql) async fn a_sweep_reads_each_row_once<D: TestDatabase>(database: &mut D) {
    let engine = database.engine().await;
    // Released now, and behind them, long ago.
    insert(database, (0..2200).map(|index| (format!("a{index:04}"), 0, 0))).await;
    insert(database, (0..100).map(|index| (format!("b{index}"), 0, HOURS))).await;
    let mut session = open(&engine.waiters.server).await.unwrap();
    let mut last = Vec::new();
    for expected in [Some("a0999"), Some("a1999"), None] {
        let next = session.sweep(&last).await.unwrap().last;
        assert_eq!(next.as_deref(), expected.map(str::as_bytes));
        last = next.unwrap_or_default();
    }
    assert_eq!(count(database, "1 = 1").await, 2200);
}

pub(in crate::engine::sql) async fn a_page_of_a_list_reads_a_limited_number_of_rows<D: TestDatabase>(database: &mut D) {
    let engine = database.engine().await;
    let rows = Page::SIZE as usize;
    insert(database, (0..rows).map(|index| (format!("a{index:05}"), 0, 0))).await;
    acquire(&engine, &claim(&["b"])).await;
    acquire(&engine, &claim(&["c"])).await;
    let listed = engine.list("", PAGE).await.unwrap();
    assert_eq!(listed.iter().map(|lock| &lock.name[..]).collect::<Vec<_>>(), ["b", "c"]);

    let mut session = open(&engine.waiters.server).await.unwrap();
    let mut page = Some(Page::first("", ""));
    for expected in [&[][..], &["b", "c"]] {
        let (reply, answer) = Reply::new();
        let mut jobs = [Job::List(page.take().unwrap(), reply)];
        let prefix = Prefix(String::new());
        let read = session.read(&pages(&jobs)).await.unwrap();
        answer_reads(&mut jobs, &prefix, read);
        jobs.into_iter().for_each(|job| job.answer(None));
        let (found, next) = answer.await.unwrap().unwrap();
        assert_eq!(found.iter().map(|lock| &lock.name[..]).collect::<Vec<_>>(), expected);
        page = next;
    }
    assert!(page.is_none());
}

pub(in crate::engine::sql) async fn one_process_sweeps_in_each_interval<D: TestDatabase>(database: &mut D) {
    let engines = [database.engine().await, database.engine().await];
    let mut sessions = Vec::new();
    for engine in &engines {
        sessions.push(open(&engine.waiters.server).await.unwrap());
    }
    // Never swept, swept long ago, and before the clock was set back.
    for due in [None, Some(D::ago(1)), Some(D::after(3_600_000))] {
        if let Some(due) = due {
            database.execute(&format!("UPDATE locks SET expires_at = {due}")).await;
        }
        let mut claimed = Vec::new();
        for session in &mut sessions {
            claimed.push(session.claim_sweep().await.unwrap());
        }
        assert_eq!(claimed, [true, false]);
    }
    assert!(engines[0].list("", PAGE).await.unwrap().is_empty());
    assert_eq!(sessions[0].sweep(SWEEP_ROW).await.unwrap().last, None);
    assert_eq!(count(database, "name = ''").await, 1);
}

/// A sweep begins some minutes after a call, and continues until it has read all rows.
pub(in crate::engine::sql) async fn the_engine_sweeps<D: TestDatabase>(database: &mut D) {
    let minutes = Duration::from_secs(601);
    let engine = database.engine().await;
    insert(database, (0..SWEEP_LIMIT).map(|index| (format!("a{index:04}"), 0, 0))).await;
    insert(database, [("queued".to_owned(), 1, HOURS)]).await;
    for (name, seconds) in [("expired", 100), ("recent", 30)] {
        insert(database, [(name.to_owned(), 1, 0)]).await;
        insert_position(database, name, seconds).await;
    }
    for _ in 0..2 {
        // Waits for the end of the last sweep, and starts the time to the next one.
        assert_eq!(engine.inspect(&key("n")).await.unwrap(), None);
        insert(database, [("old".to_owned(), 0, HOURS)]).await;
        let is_due = format!("UPDATE locks SET expires_at = {} WHERE name = ''", D::ago(1));
        database.execute(&is_due).await;
        advance(minutes).await;
        eventually("the old row is removed", async || {
            count(database, "name = 'old'").await == 0
        })
        .await;
        // Waits for the end of the transaction, too: the clock is changed next.
        eventually("the position is removed", async || {
            database.number("SELECT COUNT(*) FROM locks_waiters").await == 1
        })
        .await;
    }
    assert_eq!(count(database, "name = 'expired' AND queued = 0").await, 1);
    assert_eq!(count(database, "queued = 1").await, 2, "with waiters, also an old one");
    assert_eq!(count(database, "name <> ''").await, SWEEP_LIMIT + 3);
}

/// Migration tools drop tables that they do not know.
pub(in crate::engine::sql) async fn dropped_tables_are_created_again_with_a_warning<D: TestDatabase>(database: &mut D) {
    let (report, reported) = std::sync::mpsc::channel();
    let warnings = Warnings::new(move |text| _ = report.send(text.to_owned()));
    let settings = Settings {
        warnings: Some(Arc::new(warnings)),
        ..Settings::default()
    };
    let engine = database.open_with(database.url(), &settings).await;
    let held = claim(&["n"]);
    acquire(&engine, &held).await;
    database.execute("DROP TABLE locks, locks_waiters").await;
    let error = engine.renew(&held, held.ttl).await.unwrap_err();
    assert!(error.retryable, "the next call creates them: {error}");
    let text = reported.try_recv().unwrap();
    assert!(text.contains("were dropped while this service ran"), "{text}");
    assert_eq!(engine.renew(&held, held.ttl).await.unwrap(), Renewed::Lost);
    acquire(&engine, &claim(&["n"])).await;
}

/// The metadata of all names together is larger than a packet that a server accepts.
pub(in crate::engine::sql) async fn many_names_with_large_metadata_are_granted_together<D: TestDatabase>(
    database: &mut D,
) {
    let settings = Settings {
        store_timeout: LONG,
        ..Settings::default()
    };
    let engine = database.open_with(database.url(), &settings).await;
    let names: Vec<String> = (0..1000).map(|index| format!("{index:0>500}ü")).collect();
    let mut large = claim(&names.iter().map(String::as_str).collect::<Vec<_>>());
    large.metadata = Some(format!("\"{}ü\"", "x".repeat(16_000)).into());
    acquire(&engine, &large).await;
    let info = engine.inspect(&key(&names[999])).await.unwrap().unwrap();
    assert!(info.metadata.unwrap().len() > 16_000);
    assert_eq!(release(&engine, &large).await, Released::Freed);
}
