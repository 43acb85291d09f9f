//! The contract behind PgBouncer in transaction mode.

use super::*;
use crate::engine::contract::one_succeeds;

const POOLER: &str = "HOLDFAST_TEST_PGBOUNCER_URL";

/// The URL declares the pooler.
mod declared {
    use super::*;

    crate::engine::contract::contract_tests!(async |prefix: String| {
        let url = format!("{}?pooler=transaction", url_of(POOLER)?);
        Some(two(&url, prefix).await)
    });
}

/// A pooler refuses the options of a session.
#[tokio::test]
async fn a_pooler_is_detected_before_the_first_call() {
    let Some(url) = url_of(POOLER) else { return };
    let settings = Settings {
        key_prefix: Some(format!("t{}:", OwnerToken::fresh().as_str())),
        ..Settings::default()
    };
    let engines = [open(&url, &settings).await, open(&url, &settings).await];
    for index in 0..200 {
        let engine = &engines[index % 2];
        let ours = claim(&[OwnerToken::fresh().as_str()]);
        acquire(engine, &ours).await;
        assert_eq!(release(engine, &ours).await, Released::Freed);
    }
    assert!(
        engines
            .iter()
            .all(|engine| server_of::<PostgresServer>(engine).is_pooled())
    );
}

/// A session behind a pooler has no settings, so the statements limit their wait.
#[tokio::test]
async fn a_locked_row_behind_a_pooler_delays_only_the_calls_for_its_name() {
    let Some(url) = url_of(POOLER) else { return };
    let prefix = format!("t{}:", OwnerToken::fresh().as_str());
    let settings = Settings {
        key_prefix: Some(prefix.clone()),
        ..Settings::default()
    };
    let sessions = format!("{}/sessions?pooler=none", url.rsplit_once('/').unwrap().0);
    for engine_url in [format!("{url}?pooler=transaction"), sessions] {
        let engine = open(&engine_url, &settings).await;
        // On a machine that stands still those that share a statement with the locked row may fail with it.
        one_succeeds(async |round| {
            let name = format!("locked{round}");
            let free = claim(&[&name]);
            acquire(&engine, &free).await;
            release(&engine, &free).await;
            let program = connect_plainly(&url).await;
            let lock = format!("BEGIN; SELECT FROM holdfast.locks WHERE name = '{prefix}{name}' FOR UPDATE");
            program.batch_execute(&lock).await.unwrap();
            let mut outcome = Ok(());
            // A statement with one attempt, and a statement with several.
            for count in [0, 8] {
                let locked = attempting(&engine, &claim(&[&name]));
                let others: Vec<Claim> = (0..count).map(|_| claim(&[OwnerToken::fresh().as_str()])).collect();
                outcome = outcome.and(all_granted(&engine, &others).await);
                assert!(locked.await.unwrap().unwrap_err().retryable);
            }
            program.batch_execute("ROLLBACK").await.unwrap();
            outcome
        })
        .await;
    }
}

/// The connection to `listenUrl` is confirmed by a notification. Without it, waiters poll.
#[tokio::test]
async fn waiters_poll_if_listen_url_receives_nothing() {
    let Some(database) = Database::create().await else {
        return;
    };
    for (url, is_notified) in [(url_of(SERVER).unwrap(), false), (database.url.clone(), true)] {
        let settings = Settings {
            listen_url: Some(url),
            ..Settings::default()
        };
        let engine = database.engine_with(settings).await;
        let (holder, waiter) = (claim(&["n"]), waiting(&["n"]));
        acquire(&engine, &holder).await;
        let _subscription = engine.subscribe(&waiter, &key("n")).await.unwrap();
        busy(&engine, &waiter).await;
        // Each confirmation takes 1 s at most.
        let mut seen = Vec::new();
        for _ in 0..30 {
            tokio::time::sleep(Duration::from_millis(100)).await;
            seen.push(engine.waiters.server.is_notified());
        }
        assert_eq!(seen.last(), Some(&is_notified), "{seen:?}");
        assert!(!is_notified || seen.iter().all(|one| *one), "{seen:?}");
        release(&engine, &waiter).await;
        release(&engine, &holder).await;
    }
}

/// The pooler keeps the session of a client, and the URL says so: statements are prepared, and notifications arrive.
#[tokio::test]
async fn a_pooler_of_sessions_can_be_declared() {
    let Some(url) = url_of(POOLER) else { return };
    // A database of the pooler in session mode.
    let sessions = format!("{}/sessions", url.rsplit_once('/').unwrap().0);
    let settings = Settings {
        key_prefix: Some(format!("t{}:", OwnerToken::fresh().as_str())),
        ..Settings::default()
    };
    let url = format!("{sessions}?pooler=none");
    let (ours, theirs) = (open(&url, &settings).await, open(&url, &settings).await);
    let process = &theirs.waiters.process;
    let listening = format!("SELECT count(*) FROM pg_stat_activity WHERE query = 'LISTEN \"holdfast_{process}\"'");
    let watcher = connect_plainly(&sessions).await;
    one_succeeds(async |_| {
        let (holder, next) = (claim(&["n"]), waiting(&["n"]));
        acquire(&ours, &holder).await;
        let mut subscription = theirs.subscribe(&next, &key("n")).await.unwrap();
        busy(&theirs, &next).await;
        eventually("the engine listens", async || {
            watcher.query_one(&listening, &[]).await.unwrap().get::<_, i64>(0) == 1
        })
        .await;
        eventually("the clock is known", async || theirs.waiters.has_clock()).await;
        assert_eq!(release(&ours, &holder).await, Released::Freed);
        notified(&mut subscription).await;
        let hand_off = subscription.take_hand_off();
        if hand_off.is_none() {
            acquire(&theirs, &next).await;
        }
        assert_eq!(release(&theirs, &next).await, Released::Freed);
        hand_off.map(drop).ok_or("not a grant by a notification, but by a poll")
    })
    .await;
    assert!(
        ![&ours, &theirs]
            .into_iter()
            .any(|engine| server_of::<PostgresServer>(engine).is_pooled())
    );
}
