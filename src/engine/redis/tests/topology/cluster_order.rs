//! The order of the calls to the masters of a cluster, on an event loop.

use futures_util::future::join_all;

use super::cluster_nodes::{Nodes, one_each, slot_of_name};
use super::*;
use crate::engine::{EngineExt, Renewed};

async fn cycle(engine: &RedisEngine, name: &str) {
    let claim = claim(name);
    acquire(engine, &claim).await;
    assert_eq!(engine.renew(&claim, claim.ttl).await.unwrap(), Renewed::Extended);
    release(engine, &claim).await;
}

#[tokio::test]
async fn calls_on_an_event_loop_follow_a_slot_that_moves() {
    let Some(nodes) = Nodes::start(0).await else { return };
    let ours = nodes.engine_on_event_loop().await;
    let name = &one_each()[0];
    let slot = slot_of_name(name);
    let held = claim(name);
    let before = acquire(&ours, &held).await;
    nodes.open(slot, 0, 1).await;
    nodes.move_keys(slot, 0, 1).await;
    assert_eq!(
        ours.renew(&held, Ttl::clamped(2 * LONG)).await.unwrap(),
        Renewed::Extended,
        "ASK"
    );
    nodes.close(slot, 0, 1).await;
    assert_eq!(
        ours.renew(&held, Ttl::clamped(2 * LONG)).await.unwrap(),
        Renewed::Extended,
        "MOVED"
    );
    assert!(matches!(
        ours.try_acquire(&claim(name)).await.unwrap(),
        Acquired::Held { .. }
    ));
    release(&ours, &held).await;
    cycle(&ours, name).await;
    assert!(acquire(&ours, &claim(name)).await > before);
}

/// Suspends a node, and drops an attempt that is sent to it.
///
/// Redis reads at most 32 KB of a connection at a time. More than that, and less than the sockets take, is sent before the
/// attempt. So when the node resumes, it reads a command on another connection first, if there is one.
async fn drop_attempt(engine: &Arc<RedisEngine>, nodes: &Nodes, index: usize, name: &str) -> Claim {
    for node in &nodes.nodes {
        // The others do not consider it down.
        let mut other = node.other().await;
        other.run::<()>("CONFIG SET cluster-node-timeout 30000").await;
    }
    let Route::Cluster(cluster) = &engine.route else {
        unreachable!()
    };
    let link = cluster.serving(slot_of_name(name)).await.unwrap();
    link.connection().await.unwrap();
    nodes.nodes[index].suspend();
    let (others, claimed) = (engine.clone(), claim(name));
    tokio::spawn(async move {
        let claims: Vec<Claim> = (0..220).map(|_| claim(claimed.keys()[0].as_str())).collect();
        join_all(claims.iter().map(|claim| others.renew(claim, claim.ttl))).await;
    });
    tokio::task::yield_now().await;
    let dropped = claim(name);
    let tried = tokio::time::timeout(Duration::from_millis(300), engine.try_acquire(&dropped)).await;
    assert!(tried.is_err() && dropped.was_sent());
    dropped
}

/// Releases a claim on another thread, like the service's task for abandoned claims.
fn release_elsewhere(engine: &Arc<RedisEngine>, dropped: Claim) -> tokio::task::JoinHandle<Released> {
    let (engine, runtime) = (engine.clone(), tokio::runtime::Handle::current());
    tokio::task::spawn_blocking(move || {
        // With another claim of the slot: they share a script.
        let other = claim(dropped.keys()[0].as_str());
        let mut outcomes = [None; 2];
        runtime.block_on(
            engine.release_all(&[&dropped, &other], Duration::ZERO, &mut |index, released| {
                outcomes[index] = Some(released.unwrap())
            }),
        );
        assert_eq!(outcomes[1], Some(Released::NotHeld));
        outcomes[0].unwrap()
    })
}

#[tokio::test]
async fn a_release_takes_effect_after_an_attempt_that_was_dropped() {
    let Some(nodes) = Nodes::start(0).await else { return };
    let ours = nodes.engine_on_event_loop().await;
    let names = one_each();
    join_all(names.iter().map(|name| cycle(&ours, name))).await;
    let dropped = drop_attempt(&ours, &nodes, 0, &names[0]).await;
    // A node that hangs does not delay the calls of other slots.
    cycle(&ours, &names[1]).await;
    let released = release_elsewhere(&ours, dropped);
    tokio::time::sleep(Duration::from_millis(200)).await;
    nodes.nodes[0].resume();
    assert_eq!(released.await.unwrap(), Released::Freed);
    let mut other = nodes.nodes[0].other().await;
    assert_eq!(other.run::<i64>(&format!("EXISTS lock:{}", names[0])).await, 0);
}
