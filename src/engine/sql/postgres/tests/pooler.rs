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

/// The errors of prepared statements show that there is a pooler.
#[tokio::test]
async fn a_pooler_is_detected() {
    let Some(url) = url_of(POOLER) else { return };
    let settings = Settings {
        key_prefix: Some(format!("t{}:", OwnerToken::fresh().as_str())),
        ..Settings::default()
    };
    let engines = [open(&url, &settings).await, open(&url, &settings).await];
    for index in 0..200 {
        let engine = &engines[index % 2];
        eventually("the pooler is detected", async || {
            // The release may be the call that fails.
            let ours = claim(&[OwnerToken::fresh().as_str()]);
            matches!(engine.try_acquire(&ours).await, Ok(Acquired::Granted { .. }))
                && matches!(engine.release(&ours, Duration::ZERO).await, Ok(Released::Freed))
        })
        .await;
    }
}
