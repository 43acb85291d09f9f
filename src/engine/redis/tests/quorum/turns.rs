//! The order of services that compete for a name without a queue.

use super::*;
use crate::engine::EngineExt;

/// Acquires a name like a call of the service that waits.
async fn wait_for(engine: &QuorumEngine, claim: &Claim) {
    let mut subscription = None;
    loop {
        match engine.try_acquire(claim).await {
            Ok(Acquired::Granted { .. }) => return,
            Ok(Acquired::Held { retry_after, .. }) => match &mut subscription {
                None => subscription = Some(engine.subscribe(claim, &claim.keys()[0]).await.unwrap()),
                Some(subscription) => {
                    let changed = subscription.changed();
                    let _ = tokio::time::timeout(retry_after.unwrap_or(LONG), changed).await;
                }
            },
            Err(error) => assert!(error.retryable, "{error}"),
        }
    }
}

#[tokio::test]
async fn a_service_that_releases_leaves_a_waiting_one_its_turn() {
    let Some(nodes) = Nodes::start(3).await else { return };
    let (ours, theirs) = (nodes.engine().await, nodes.engine().await);
    const ROUNDS: usize = 20;
    // Where the machine stands still, the other service has not subscribed yet.
    one_succeeds(async |_| {
        let mut won_again = 0;
        for _ in 0..ROUNDS {
            let (first, again, other) = (claim("n"), claim("n"), claim("n"));
            wait_for(&ours, &first).await;
            let releasing = async {
                // The other service has subscribed, and waits.
                tokio::time::sleep(Duration::from_millis(100)).await;
                ours.release(&first, Duration::ZERO).await.unwrap();
                if let Ok(Acquired::Granted { .. }) = ours.try_acquire(&again).await {
                    ours.release(&again, Duration::ZERO).await.unwrap();
                    return 1;
                }
                0
            };
            let waiting = async {
                wait_for(&theirs, &other).await;
                tokio::time::sleep(Duration::from_millis(50)).await;
                theirs.release(&other, Duration::ZERO).await.unwrap();
            };
            won_again += tokio::join!(releasing, waiting).0;
        }
        (won_again <= ROUNDS / 4).then_some(()).ok_or(won_again)
    })
    .await;
}
