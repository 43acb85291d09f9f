//! Several servers behind one address. Here a cluster of one node, which also refuses commands with keys of several slots.

use super::cluster_nodes::one_each;
use super::*;
use crate::engine::EngineExt;
use crate::engine::contract::refs;

#[tokio::test]
async fn a_server_with_several_shards_has_tokens_for_each_name() {
    let Some(server) = Server::start(&["--cluster-enabled", "yes"]).await else {
        return;
    };
    let mut other = server.other().await;
    other.run::<()>("CLUSTER ADDSLOTSRANGE 0 16383").await;
    within(60, "a cluster that works", async || {
        other.run::<String>("CLUSTER INFO").await.contains("cluster_state:ok")
    })
    .await;
    let url = format!("{}?sharded=true", server.url());
    let (ours, theirs) = (engine(&url, "lock:").await, engine(&url, "lock:").await);
    let keys = one_each().map(|name| key(&name));
    let all = || {
        let process = Arc::new(Process::current());
        let mut all = Claim::new(&keys, OwnerToken::fresh(), Ttl::clamped(LONG), process);
        all.waiting = true;
        all
    };
    let (first, second) = (all(), all());
    let before = acquire(&ours, &first).await;
    let mut subscription = enqueue(&theirs, &second).await;
    let single = waiting("single");
    let other_single = waiting("single");
    acquire(&ours, &single).await;
    let mut other_subscription = enqueue(&theirs, &other_single).await;
    assert_eq!(ours.list("", crate::engine::contract::PAGE).await.unwrap().len(), 4);
    let mut renewed = 0;
    let renewals = [&first, &single].map(|claim| crate::engine::Renewal { claim, ttl: claim.ttl });
    ours.renew_all(&renewals, &mut |_, answer| {
        assert_eq!(answer.unwrap(), crate::engine::Renewed::Extended);
        renewed += 1;
    })
    .await;
    assert_eq!(renewed, 2);
    release(&ours, &first).await;
    release(&ours, &single).await;
    notified(&mut subscription).await;
    notified(&mut other_subscription).await;
    acquire(&theirs, &other_single).await;
    let mut after = None;
    eventually("a grant", async || match theirs.try_acquire(&second).await.unwrap() {
        Acquired::Granted { fence } => after.replace(fence).is_none(),
        Acquired::Held { .. } => false,
    })
    .await;
    assert!(after > Some(before));
    let mut released = 0;
    theirs
        .release_all(&refs(&[second, other_single]), Duration::ZERO, &mut |_, answer| {
            assert_eq!(answer.unwrap(), Released::Freed);
            released += 1;
        })
        .await;
    assert_eq!(released, 2);
    assert_eq!(other.run::<i64>("EXISTS holdfast:last").await, 0);
}
