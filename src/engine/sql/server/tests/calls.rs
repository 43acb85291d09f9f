//! Calls that are made at the same time.

use std::time::{Duration, Instant};

use futures_util::future::join_all;

use super::*;
use crate::engine::contract::{PAGE, one_is_faster, one_succeeds, refs};
use crate::engine::{EngineExt, Renewed};

/// Locks the row of a free name as another program.
pub(in crate::engine::sql) async fn lock_row<D: TestDatabase>(
    database: &mut D,
    engine: &Arc<ServerEngine>,
    name: &str,
) {
    let first = claim(&[name]);
    acquire(engine, &first).await;
    assert_eq!(release(engine, &first).await, Released::Freed);
    database.execute("BEGIN").await;
    let text = format!("SELECT name FROM locks WHERE name = '{name}' FOR UPDATE");
    database.execute(&text).await;
}

pub(in crate::engine::sql) async fn calls_at_the_same_time_share_statements<D: TestDatabase>(database: &mut D) {
    let proxy = Proxy::start(database.url()).await;
    let engine = database.open(&proxy.url).await;
    let mut sent = Vec::new();
    // In the first round, connections are opened and statements are prepared.
    for _ in 0..2 {
        let claims: Vec<Claim> = (0..64).map(|index| claim(&[&format!("n{index}")])).collect();
        let before = proxy.packets();
        join_all(claims.iter().map(|claim| acquire(&engine, claim))).await;
        let granted = proxy.packets();
        let renewed = join_all(claims.iter().map(|claim| engine.renew(claim, claim.ttl))).await;
        assert!(renewed.iter().all(|one| matches!(one, Ok(Renewed::Extended))));
        let extended = proxy.packets();
        let released = join_all(claims.iter().map(|claim| release(&engine, claim))).await;
        assert_eq!(released, [Released::Freed; 64]);
        sent = vec![granted - before, extended - granted, proxy.packets() - extended];
    }
    assert!(
        sent.iter().all(|packets| *packets <= 8),
        "packets for 64 calls: {sent:?}"
    );
    assert_eq!(engine.list("", PAGE).await.unwrap(), []);
}

pub(in crate::engine::sql) async fn other_calls_do_not_wait_for_attempts<D: TestDatabase>(database: &mut D) {
    let engine = database.engine().await;
    // On a machine that stands still the attempt finds the locked row first.
    one_succeeds(async |round| {
        let late_name = format!("late{round}");
        let (held, late) = (claim(&["held"]), claim(&[&late_name]));
        acquire(&engine, &held).await;
        lock_row(database, &engine, &late_name).await;
        let attempt = attempting(&engine, &late);
        eventually("the attempt waits for the row", async || {
            database.blocked().await == 1 || attempt.is_finished()
        })
        .await;
        assert_eq!(engine.renew(&held, held.ttl).await.unwrap(), Renewed::Extended);
        assert_eq!(release(&engine, &held).await, Released::Freed);
        let has_waited = !attempt.is_finished();
        database.execute("ROLLBACK").await;
        let acquired = match answer(attempt.await.unwrap()) {
            Some(acquired) => acquired,
            None => repeated(async || engine.try_acquire(&late).await).await,
        };
        assert!(matches!(acquired, Acquired::Granted { .. }), "{acquired:?}");
        has_waited
            .then_some(())
            .ok_or("the attempt was not on another connection")
    })
    .await;
}

pub(in crate::engine::sql) async fn a_release_follows_an_abandoned_attempt<D: TestDatabase>(database: &mut D) {
    let engine = database.engine().await;
    // On a machine that stands still the attempt or the release finds the locked row.
    one_succeeds(async |round| {
        let name = format!("n{round}");
        lock_row(database, &engine, &name).await;
        let abandoned = claim(&[&name]);
        tokio::select! {
            biased;
            () = eventually("the attempt waits for the row", async || {
                abandoned.was_sent() && database.blocked().await > 0
            }) => {}
            acquired = engine.try_acquire(&abandoned) => {
                assert!(answer(acquired).is_none(), "the row is locked");
            }
        }
        let releasing = tokio::spawn({
            let (engine, abandoned) = (engine.clone(), abandoned.clone());
            async move { engine.release(&abandoned, Duration::ZERO).await }
        });
        tokio::time::sleep(Duration::from_millis(200)).await;
        database.execute("ROLLBACK").await;
        let released = match answer(releasing.await.unwrap()) {
            Some(released) => released,
            None => repeated(async || engine.release(&abandoned, Duration::ZERO).await).await,
        };
        assert!(engine.inspect(&key(&name)).await.unwrap().is_none());
        (released == Released::Freed).then_some(()).ok_or(released)
    })
    .await;
}

pub(in crate::engine::sql) async fn two_releases_of_a_name_at_once_have_their_own_answers<D: TestDatabase>(
    database: &mut D,
) {
    let engine = database.engine().await;
    let (earlier, holder) = (claim(&["n"]), claim(&["n"]));
    acquire(&engine, &holder).await;
    let released = tokio::join!(release(&engine, &earlier), release(&engine, &holder));
    assert_eq!(released, (Released::NotHeld, Released::Freed));
}

/// Returns the answer to a call. `None`: it has failed with a retryable error, because it found a locked row.
fn answer<T>(outcome: crate::engine::Result<T>) -> Option<T> {
    match outcome {
        Err(error) if error.retryable => None,
        outcome => Some(outcome.unwrap()),
    }
}

/// Repeats a call that fails with a retryable error, as the service does, for the default store timeout.
pub(in crate::engine::sql) async fn repeated<T>(mut call: impl AsyncFnMut() -> crate::engine::Result<T>) -> T {
    let mut errors = Vec::new();
    let repeating = async {
        loop {
            match call().await {
                Err(error) if error.retryable => errors.push(error.to_string()),
                outcome => return outcome.unwrap(),
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let answer = tokio::time::timeout(Duration::from_secs(10), repeating).await;
    answer.unwrap_or_else(|_| panic!("the call still fails: {errors:?}"))
}

/// Makes attempts at the same time. Returns an error if not all are granted.
pub(in crate::engine::sql) async fn all_granted(engine: &Arc<ServerEngine>, claims: &[Claim]) -> Result<(), String> {
    let acquired = join_all(claims.iter().map(|ours| engine.try_acquire(ours))).await;
    let is_granted = |one: &crate::engine::Result<Acquired>| matches!(one, Ok(Acquired::Granted { .. }));
    let failed = acquired.into_iter().find(|one| !is_granted(one));
    failed.map_or(Ok(()), |failed| Err(format!("{failed:?}")))
}

pub(in crate::engine::sql) async fn the_holder_does_not_wait_for_an_attempt_that_found_a_locked_row<D: TestDatabase>(
    database: &mut D,
) {
    let engine = database.engine().await;
    let held = claim(&["a", "b"]);
    acquire(&engine, &held).await;
    lock_row(database, &engine, "locked").await;
    let ours = claim(&["a", "locked"]);
    let attempt = attempting(&engine, &ours);
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(engine.renew(&held, held.ttl).await.unwrap(), Renewed::Extended);
    assert_eq!(release(&engine, &held).await, Released::Freed);
    assert!(attempt.await.unwrap().unwrap_err().retryable);
    database.execute("ROLLBACK").await;
    acquire(&engine, &ours).await;
}

/// Another program has locked the rows of two leases and that of a free name. Only the calls for these names wait, although they share
/// statements and transactions with others.
pub(in crate::engine::sql) async fn a_locked_row_delays_only_the_calls_for_its_name<D: TestDatabase>(database: &mut D) {
    let engine = database.engine().await;
    one_succeeds(async |round| {
        let named = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|name| format!("{name}{round}")).collect();
            claim(&names.iter().map(String::as_str).collect::<Vec<_>>())
        };
        let (locked, free) = ([named(&["first"]), named(&["second"])], named(&["free"]));
        let others = [named(&["a", "b"]), named(&["c", "d"]), named(&["e"]), named(&["f"])];
        for held in others.iter().chain(&locked).chain([&free]) {
            acquire(&engine, held).await;
        }
        release(&engine, &free).await;
        let rows = format!("name IN ('first{round}', 'second{round}', 'free{round}')");
        database.execute("BEGIN").await;
        database
            .execute(&format!("UPDATE locks SET pid = 1 WHERE {rows}"))
            .await;
        let renew = |ours: &Claim| {
            let (engine, ours) = (engine.clone(), ours.clone());
            tokio::spawn(async move { engine.renew(&ours, ours.ttl).await })
        };
        let first = renew(&locked[0]);
        // A transaction waits for the row.
        tokio::time::sleep(Duration::from_millis(300)).await;
        // Meanwhile the renewal of the second locked lease shares the next transaction with the renewals of leases of several names.
        let second = renew(&locked[1]);
        let attempt = attempting(&engine, &free);
        let outcome = are_answered(&engine, &others, &[named(&["n"]), named(&["n", "m"])]).await;
        let still_locked = format!("SELECT COUNT(*) FROM locks WHERE pid = 1 AND {rows}");
        assert_eq!(database.number(&still_locked).await, 3, "they are still locked");
        database.execute("COMMIT").await;
        for renewed in [first.await.unwrap(), second.await.unwrap()].map(answer) {
            assert!(matches!(renewed, Some(Renewed::Extended) | None), "{renewed:?}");
        }
        let acquired = answer(attempt.await.unwrap());
        assert!(
            matches!(acquired, Some(Acquired::Granted { .. }) | None),
            "{acquired:?}"
        );
        for held in &locked {
            eventually("the lease is renewed", async || {
                matches!(engine.renew(held, held.ttl).await, Ok(Renewed::Extended))
            })
            .await;
        }
        outcome
    })
    .await;
}

/// Renews leases at the same time. Acquires and releases free names, one after the other. Returns the first error: on a machine that stands
/// still, these calls may fail with those that find a locked row.
async fn are_answered(engine: &Arc<ServerEngine>, held: &[Claim], free: &[Claim]) -> crate::engine::Result<()> {
    for renewed in join_all(held.iter().map(|held| engine.renew(held, held.ttl))).await {
        assert_eq!(renewed?, Renewed::Extended);
    }
    for ours in free {
        let acquired = engine.try_acquire(ours).await?;
        assert!(matches!(acquired, Acquired::Granted { .. }), "{acquired:?}");
        assert_eq!(engine.release(ours, Duration::ZERO).await?, Released::Freed);
    }
    Ok(())
}

/// Callers have less time than the store timeout, and are dropped. The calls that share their statement are executed without them.
pub(in crate::engine::sql) async fn a_locked_row_rejects_no_other_call_when_callers_are_dropped<D: TestDatabase>(
    database: &mut D,
) {
    let engine = database.engine().await;
    one_succeeds(async |round| {
        let locked = format!("locked{round}");
        lock_row(database, &engine, &locked).await;
        let waits = [200, 300].map(|ms| {
            let (engine, ours) = (engine.clone(), claim(&[&locked]));
            tokio::spawn(
                async move { tokio::time::timeout(Duration::from_millis(ms), engine.try_acquire(&ours)).await },
            )
        });
        let others: Vec<Claim> = (0..8).map(|index| claim(&[&format!("n{round}-{index}")])).collect();
        let outcome = all_granted(&engine, &others).await;
        for attempt in waits {
            assert!(!matches!(attempt.await.unwrap(), Ok(Ok(_))), "the row is locked");
        }
        database.execute("ROLLBACK").await;
        outcome
    })
    .await;
}

/// The rows of ten leases are locked. A renewal of two names waits for one of them at most.
pub(in crate::engine::sql) async fn many_locked_rows_delay_other_calls_once<D: TestDatabase>(database: &mut D) {
    let engine = database.engine().await;
    let names: Vec<String> = (0..10).map(|index| format!("locked{index}")).collect();
    let (locked, pair) = (names.iter().map(|name| claim(&[name])), claim(&["a", "b"]));
    let locked: Vec<Claim> = locked.collect();
    for held in locked.iter().chain([&pair]) {
        acquire(&engine, held).await;
    }
    database.execute("BEGIN").await;
    for name in &names {
        database
            .execute(&format!("UPDATE locks SET pid = 1 WHERE name = '{name}'"))
            .await;
    }
    let releases = locked.iter().map(|held| {
        let (engine, held) = (engine.clone(), held.clone());
        tokio::spawn(async move { engine.release(&held, Duration::ZERO).await })
    });
    let releases: Vec<_> = releases.collect();
    tokio::time::sleep(Duration::from_millis(300)).await;
    for _ in 0..2 {
        assert_eq!(engine.renew(&pair, pair.ttl).await.unwrap(), Renewed::Extended);
    }
    for release in releases {
        assert!(release.await.unwrap().unwrap_err().retryable);
    }
    database.execute("COMMIT").await;
    for held in &locked {
        assert_eq!(release(&engine, held).await, Released::Freed);
    }
}

pub(in crate::engine::sql) async fn claims_are_released_beside_one_with_a_locked_row<D: TestDatabase>(
    database: &mut D,
) {
    let engine = database.engine().await;
    one_succeeds(async |round| {
        let names: Vec<String> = (0..20).map(|index| format!("n{round}-{index}")).collect();
        let claims: Vec<Claim> = names.iter().map(|name| claim(&[name])).collect();
        for held in &claims {
            acquire(&engine, held).await;
        }
        database.execute("BEGIN").await;
        let lock = format!("UPDATE locks SET pid = 1 WHERE name = '{}'", names[7]);
        database.execute(&lock).await;
        let renewing = tokio::spawn({
            let (engine, locked) = (engine.clone(), claims[7].clone());
            async move { engine.renew(&locked, locked.ttl).await }
        });
        tokio::time::sleep(Duration::from_millis(100)).await;
        let mut failed = Vec::new();
        let mut answer = |index, released: crate::engine::Result<Released>| match released {
            Ok(released) => assert_eq!(released, Released::Freed),
            Err(error) => failed.push((index, error.retryable)),
        };
        engine.release_all(&refs(&claims), Duration::ZERO, &mut answer).await;
        assert!(failed.contains(&(7, true)), "{failed:?}");
        let prefix = format!("n{round}-");
        assert_eq!(engine.list(&prefix, PAGE).await.unwrap().len(), failed.len());
        assert!(renewing.await.unwrap().unwrap_err().retryable);
        database.execute("COMMIT").await;
        assert_eq!(release(&engine, &claims[7]).await, Released::Freed);
        (failed.len() == 1).then_some(()).ok_or(failed)
    })
    .await;
}

/// The leases that two waiters wait for have ended, and the row of one is locked. The other name is handed off, and calls for other names
/// are answered.
pub(in crate::engine::sql) async fn a_locked_row_before_a_waiter_delays_no_other_call_for_long<D: TestDatabase>(
    database: &mut D,
) {
    let engine = database.engine().await;
    let mut subscriptions = Vec::new();
    for name in ["n", "m"] {
        let waiter = waiting(&[name]);
        acquire(&engine, &claim(&[name])).await;
        subscriptions.push(engine.subscribe(&waiter, &key(name)).await.unwrap());
        busy(&engine, &waiter).await;
    }
    database.execute("BEGIN").await;
    database
        .execute(&format!("UPDATE locks SET expires_at = {}", D::ago(1)))
        .await;
    database.execute("COMMIT").await;
    database.execute("BEGIN").await;
    database
        .execute("SELECT name FROM locks WHERE name = 'n' FOR UPDATE")
        .await;
    notified(&mut subscriptions[1]).await;
    for _ in 0..4 {
        let pair = claim(&["a", "b"]);
        let acquired = tokio::time::timeout(Duration::from_secs(10), engine.try_acquire(&pair)).await;
        assert!(matches!(acquired, Ok(Ok(Acquired::Granted { .. }))), "{acquired:?}");
        assert_eq!(release(&engine, &pair).await, Released::Freed);
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    database.execute("ROLLBACK").await;
}

/// Another program inserts the rows of new names, and has not committed: they cannot be read. Calls that share a transaction with an attempt
/// for such a name do not fail with it.
pub(in crate::engine::sql) async fn an_uncommitted_row_delays_other_calls_once<D: TestDatabase>(database: &mut D) {
    let engine = database.engine().await;
    let pairs = [claim(&["a", "b"]), claim(&["c", "d"])];
    for pair in &pairs {
        acquire(&engine, pair).await;
    }
    one_succeeds(async |round| {
        database.execute("BEGIN").await;
        let (ended, new) = (D::ago(1), [1, 2].map(|index| format!("new{round}-{index}")));
        for name in &new {
            database
                .execute(&format!(
                    "INSERT INTO locks (name, fence, expires_at, since) VALUES ('{name}', 1, {ended}, {ended})"
                ))
                .await;
        }
        let first = attempting(&engine, &claim(&[&new[0], &format!("e{round}")]));
        tokio::time::sleep(Duration::from_millis(300)).await;
        // They share the next transaction.
        let attempts = [first, attempting(&engine, &claim(&[&new[1], &format!("f{round}")]))];
        let outcome = are_answered(&engine, &pairs, &[]).await;
        database.execute("ROLLBACK").await;
        for attempt in attempts {
            answer(attempt.await.unwrap());
        }
        outcome
    })
    .await;
}

/// As before, with attempts that go on. Neither renewals nor attempts for other names wait for each of them.
pub(in crate::engine::sql) async fn many_uncommitted_rows_do_not_block_other_calls<D: TestDatabase>(database: &mut D) {
    let engine = database.engine().await;
    let pair = claim(&["a", "b"]);
    acquire(&engine, &pair).await;
    database.execute("BEGIN").await;
    let ended = D::ago(1);
    for index in 0..20 {
        let row = format!("'new{index}', 1, {ended}, {ended}");
        let insert = format!("INSERT INTO locks (name, fence, expires_at, since) VALUES ({row})");
        database.execute(&insert).await;
    }
    let attempts = tokio::spawn({
        let engine = engine.clone();
        async move {
            for index in 0.. {
                // Three for each name.
                let name = format!("new{}", index / 3 % 20);
                drop(attempting(&engine, &claim(&[&name, &format!("other{index}")])));
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    });
    tokio::time::sleep(Duration::from_millis(300)).await;
    // A wait of a second for each would take longer.
    one_is_faster(Duration::from_secs(12), async || {
        let began = Instant::now();
        for index in 0..16 {
            let ours = claim(&[&format!("n{index}"), "m"]);
            let acquired = repeated(async || engine.try_acquire(&ours).await).await;
            assert!(matches!(acquired, Acquired::Granted { .. }), "{acquired:?}");
            let renewed = repeated(async || engine.renew(&pair, pair.ttl).await).await;
            assert_eq!(renewed, Renewed::Extended);
            let released = repeated(async || engine.release(&ours, Duration::ZERO).await).await;
            assert_eq!(released, Released::Freed);
        }
        began.elapsed()
    })
    .await;
    attempts.abort();
    database.execute("ROLLBACK").await;
}

/// Half of a burst is for a locked row. Only the first statement waits for it.
pub(in crate::engine::sql) async fn a_burst_for_a_locked_row_delays_other_calls_once<D: TestDatabase>(
    database: &mut D,
) {
    let engine = database.engine().await;
    one_succeeds(async |round| {
        let name = format!("locked{round}");
        lock_row(database, &engine, &name).await;
        let (mut locked, mut others) = (Vec::new(), Vec::new());
        for index in 0..engine.waiters.server.statement_limit().claims * 10 {
            locked.push(attempting(&engine, &claim(&[&name])));
            others.push(attempting(&engine, &claim(&[&format!("n{round}-{index}")])));
        }
        let acquired = tokio::time::timeout(Duration::from_secs(10), join_all(others)).await;
        locked.iter().for_each(|attempt| attempt.abort());
        database.execute("ROLLBACK").await;
        let Ok(acquired) = acquired else {
            return Err("other calls have waited for each statement with the locked row".to_owned());
        };
        // On a machine that stands still those that share a statement with the locked row may fail with it.
        let mut acquired = acquired.into_iter().map(|acquired| acquired.unwrap());
        let failed = acquired.find(|acquired| !matches!(acquired, Ok(Acquired::Granted { .. })));
        failed.map_or(Ok(()), |failed| Err(format!("{failed:?}")))
    })
    .await;
}

/// A release waits for a locked row. A renewal at the same time does not: the lease would end first.
pub(in crate::engine::sql) async fn a_release_that_waits_delays_no_renewal<D: TestDatabase>(database: &mut D) {
    let engine = database.engine().await;
    let mut renewed = Vec::new();
    // The machine may be suspended for longer than the lease.
    for round in 0..5 {
        let (locked, mut short) = (claim(&[&format!("locked{round}")]), claim(&[&format!("n{round}")]));
        acquire(&engine, &locked).await;
        database.execute("BEGIN").await;
        let lock = format!("UPDATE locks SET pid = 1 WHERE name = 'locked{round}'");
        database.execute(&lock).await;
        short.ttl = Ttl::clamped(Duration::from_millis(900));
        acquire(&engine, &short).await;
        let releasing = tokio::spawn({
            let (engine, locked) = (engine.clone(), locked.clone());
            async move { engine.release(&locked, Duration::ZERO).await }
        });
        eventually("the release waits", async || database.blocked().await > 0).await;
        renewed.push(engine.renew(&short, short.ttl).await);
        database.execute("COMMIT").await;
        let released = match answer(releasing.await.unwrap()) {
            Some(released) => released,
            None => repeated(async || engine.release(&locked, Duration::ZERO).await).await,
        };
        assert_eq!(released, Released::Freed);
        if matches!(renewed.last(), Some(Ok(Renewed::Extended))) {
            return;
        }
    }
    panic!("{renewed:?}");
}
