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

/// The URL says that there is no pooler that changes sessions: options are not sent.
#[tokio::test]
async fn a_pooler_of_sessions_can_be_declared() {
    let Some(url) = url_of(POOLER) else { return };
    let engine = open(&format!("{url}?pooler=none"), &Settings::default()).await;
    assert!(!engine.server.is_pooled());
}
