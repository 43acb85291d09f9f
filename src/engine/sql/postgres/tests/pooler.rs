//! The contract behind PgBouncer in transaction mode.

use super::*;

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
    assert!(engines.iter().all(|engine| engine.server.is_pooled()));
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
    let (holder, next) = (claim(&["n"]), waiting(&["n"]));
    acquire(&ours, &holder).await;
    let mut subscription = theirs.subscribe(&next, &key("n")).await.unwrap();
    busy(&theirs, &next).await;
    let process = &theirs.waiters.process;
    let listening = format!("SELECT count(*) FROM pg_stat_activity WHERE query = 'LISTEN \"holdfast_{process}\"'");
    let watcher = connect(&sessions).await;
    eventually("the engine listens", async || {
        watcher.query_one(&listening, &[]).await.unwrap().get::<_, i64>(0) == 1
    })
    .await;
    eventually("the clock is known", async || theirs.waiters.has_clock()).await;
    assert_eq!(release(&ours, &holder).await, Released::Freed);
    notified(&mut subscription).await;
    assert!(
        subscription.take_hand_off().is_some(),
        "a grant by a notification, not by a poll"
    );
    assert_eq!(release(&theirs, &next).await, Released::Freed);
    assert!(!ours.server.is_pooled() && !theirs.server.is_pooled());
}
