//! A cluster of three masters, whose slots move.

use std::time::Instant;

use futures_util::future::join_all;

use super::cluster_nodes::{Nodes, home, one_each, slot_of_name};
use super::*;
use crate::engine::{EngineExt, Renewed, WAITER_LIVENESS};

mod contract {
    use super::*;

    crate::engine::contract::contract_tests!(async |prefix: String| {
        const CLUSTER: &str = "HOLDFAST_TEST_REDIS_CLUSTER_URL";
        let Ok(url) = std::env::var(CLUSTER) else {
            skip(&format!("{CLUSTER} is not set"));
            return None;
        };
        let a: SharedEngine = engine(&url, &prefix).await;
        let b: SharedEngine = engine(&url, &prefix).await;
        Some((a, b))
    });
}

pub(super) fn claim_of(names: &[String]) -> Claim {
    let keys: Vec<Key> = names.iter().map(|name| key(name)).collect();
    Claim::new(
        &keys,
        OwnerToken::fresh(),
        Ttl::clamped(LONG),
        Arc::new(Process::current()),
    )
}

async fn fence_of(engine: &RedisEngine, name: &str) -> Fence {
    engine.inspect(&key(name)).await.unwrap().unwrap().fence.unwrap()
}

#[tokio::test]
async fn names_on_several_masters_are_acquired_together_or_not_at_all() {
    let Some(nodes) = Nodes::start(0).await else { return };
    let (ours, theirs) = (nodes.engine().await, nodes.engine().await);
    let names = one_each();
    let all = claim_of(&names);
    let fence = acquire(&ours, &all).await;
    for name in &names {
        assert_eq!(fence_of(&theirs, name).await, fence, "one fence for all: {name}");
    }
    assert_eq!(acquire(&ours, &all).await, fence, "a retry after a lost reply");
    assert_eq!(
        ours.renew(&all, Ttl::clamped(2 * LONG)).await.unwrap(),
        Renewed::Extended
    );
    let to = OwnerToken::fresh();
    assert_eq!(ours.transfer(&all, &to).await.unwrap(), Renewed::Extended);
    let mut transferred = all.clone();
    transferred.owner = to;
    assert_eq!(ours.renew(&all, all.ttl).await.unwrap(), Renewed::Lost);
    assert_eq!(theirs.list("", PAGE).await.unwrap().len(), 3);
    release(&ours, &transferred).await;
    assert!(theirs.list("", PAGE).await.unwrap().is_empty());

    for busy in &names {
        let holder = claim(busy);
        let single = acquire(&theirs, &holder).await;
        assert!(single > fence, "{busy}");
        let Acquired::Held { key: held, .. } = ours.try_acquire(&all).await.unwrap() else {
            panic!("{busy} is busy");
        };
        assert_eq!(held.as_str(), busy);
        assert_eq!(theirs.list("", PAGE).await.unwrap().len(), 1, "only {busy}");
        release(&theirs, &holder).await;
    }

    // If one name is gone, the claim is lost, and its other names do not change.
    acquire(&ours, &all).await;
    assert!(theirs.force_release(&key(&names[1])).await.unwrap());
    assert_eq!(ours.renew(&all, Ttl::clamped(4 * LONG)).await.unwrap(), Renewed::Lost);
    assert_eq!(ours.transfer(&all, &OwnerToken::fresh()).await.unwrap(), Renewed::Lost);
    for info in theirs.list("", PAGE).await.unwrap() {
        assert!(info.remaining.unwrap() <= LONG, "{}", info.name);
    }
    assert_eq!(ours.release(&all, Duration::ZERO).await.unwrap(), Released::NotHeld);
    assert!(theirs.list("", PAGE).await.unwrap().is_empty());
}

#[tokio::test]
async fn a_fence_grows_on_every_name_for_any_clocks_of_the_masters() {
    let Some(nodes) = Nodes::start(0).await else { return };
    let ours = nodes.engine().await;
    let names = one_each();
    for (index, name) in names.iter().enumerate() {
        // Far in the future, as after a grant with a wrong clock.
        let ahead = (1u64 << 52) + 1000 * index as u64;
        let mut other = nodes.nodes[index].other().await;
        let record = format!("{ahead} 0123 1 1 h");
        other
            .args::<()>(&["SET", &format!("holdfast:fence:{{lock:{name}}}"), &record])
            .await;
    }
    let all = claim_of(&names);
    let first = acquire(&ours, &all).await;
    assert_eq!(first, Fence((1 << 52) + 2001));
    release(&ours, &all).await;
    for name in &names {
        let single = claim(name);
        assert!(acquire(&ours, &single).await > first, "{name}");
        release(&ours, &single).await;
    }
    let last = acquire(&ours, &claim_of(&names)).await;
    assert!(last > Fence(first.0 + 1));
}

#[tokio::test]
async fn locks_are_kept_while_their_slots_move() {
    let Some(nodes) = Nodes::start(0).await else { return };
    let (ours, theirs) = (nodes.engine().await, nodes.engine().await);
    let name = &one_each()[0];
    let slot = slot_of_name(name);
    let held = claim(name);
    let before = acquire(&ours, &held).await;

    nodes.open(slot, 0, 1).await;
    assert!(matches!(
        theirs.try_acquire(&claim(name)).await,
        Ok(Acquired::Held { .. }) | Err(_)
    ));
    assert_eq!(
        ours.renew(&held, Ttl::clamped(2 * LONG)).await.unwrap(),
        Renewed::Extended,
        "all its keys are on the source"
    );
    nodes.move_keys(slot, 0, 1).await;
    assert_eq!(
        ours.renew(&held, Ttl::clamped(3 * LONG)).await.unwrap(),
        Renewed::Extended,
        "ASK: all its keys are on the target"
    );
    // Its queue does not exist yet, so that neither node can decide whether it is busy, until the move ends.
    let (busy, began) = (claim(name), std::time::Instant::now());
    let (mut tried, ()) = tokio::join!(theirs.try_acquire(&busy), async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        nodes.close(slot, 0, 1).await;
    });
    // Where the machine stood still, the attempt may have ended before the move.
    if began.elapsed() > Duration::from_secs(1) && tried.as_ref().is_err_and(|error| error.retryable) {
        tried = theirs.try_acquire(&busy).await;
    }
    assert!(matches!(tried.unwrap(), Acquired::Held { .. }));
    assert_eq!(ours.renew(&held, held.ttl).await.unwrap(), Renewed::Extended, "MOVED");
    let info = theirs.inspect(&key(name)).await.unwrap().unwrap();
    assert!(info.remaining.unwrap() > 2 * LONG, "{info:?}");
    release(&ours, &held).await;
    assert!(acquire(&theirs, &claim(name)).await > before);
    assert_eq!(
        nodes.nodes[1]
            .other()
            .await
            .run::<i64>(&format!("EXISTS lock:{name}"))
            .await,
        1
    );
}

/// Returns an engine whose calls may take a second.
async fn with_short_timeout(nodes: &Nodes) -> Arc<RedisEngine> {
    let settings = Settings {
        store_timeout: Duration::from_secs(1),
        ..settings("lock:")
    };
    let config = RedisConfig::parse(&nodes.url(), &settings).unwrap();
    RedisEngine::connect(config).await.unwrap()
}

#[tokio::test]
async fn a_slot_that_keeps_moving_is_a_retryable_error() {
    let Some(nodes) = Nodes::start(0).await else { return };
    let ours = with_short_timeout(&nodes).await;
    let name = &one_each()[0];
    let slot = slot_of_name(name);
    nodes.open(slot, 0, 1).await;
    one_is_faster(Duration::from_secs(1), async || {
        let started = Instant::now();
        let error = ours.try_acquire(&claim(name)).await.unwrap_err();
        assert!(error.retryable && error.to_string().contains("TRYAGAIN"), "{error}");
        started.elapsed()
    })
    .await;
    nodes.close(slot, 0, 1).await;
    acquire(&ours, &claim(name)).await;
}

#[tokio::test]
async fn nodes_that_do_not_agree_are_a_retryable_error() {
    let Some(nodes) = Nodes::start(0).await else { return };
    let ours = with_short_timeout(&nodes).await;
    let name = &one_each()[0];
    let slot = slot_of_name(name);
    // Each of the two nodes names the other as the one that serves the slot: a move that was ended in the wrong order.
    let mut other = nodes.nodes[0].other().await;
    other
        .run::<()>(&format!("CLUSTER SETSLOT {slot} NODE {}", nodes.id(1).await))
        .await;
    for error in [
        ours.try_acquire(&claim(name)).await.unwrap_err(),
        ours.try_acquire(&waiting(name)).await.unwrap_err(),
    ] {
        assert!(
            error.retryable && error.to_string().contains("do not agree yet"),
            "{error}"
        );
    }
    nodes.close(slot, 0, 1).await;
    acquire(&ours, &claim(name)).await;
}

#[tokio::test]
async fn waiters_are_notified_on_every_node_that_their_slot_moves_to() {
    let Some(nodes) = Nodes::start(0).await else { return };
    let (ours, theirs) = (nodes.engine().await, nodes.engine().await);
    let name = &one_each()[0];
    let slot = slot_of_name(name);
    let holder = claim(name);
    acquire(&ours, &holder).await;
    let waiters = [waiting(name), waiting(name), waiting(name), waiting(name)];
    let mut subscriptions = Vec::new();
    for waiter in &waiters {
        subscriptions.push(enqueue(&theirs, waiter).await);
    }
    let mut holder = (ours.clone(), holder);
    for (index, (from, to)) in [(0, 1), (1, 2), (2, 0), (0, 2)].into_iter().enumerate() {
        nodes.move_slot(slot, from, to).await;
        release(&holder.0, &holder.1).await;
        // A notification may be the one of the move.
        within(30, "the next in the queue gets the name", async || {
            let _ = tokio::time::timeout(Duration::from_secs(10), subscriptions[index].changed()).await;
            matches!(theirs.try_acquire(&waiters[index]).await, Ok(Acquired::Granted { .. }))
        })
        .await;
        for later in &waiters[index + 1..] {
            assert!(
                matches!(theirs.try_acquire(later).await.unwrap(), Acquired::Held { .. }),
                "in the order of arrival"
            );
        }
        holder = (theirs.clone(), waiters[index].clone());
    }
    // A notification by the hand-off itself, on the node where the slot is now, and not the check after a move.
    let (next, after) = (waiting(name), holder);
    let mut subscription = enqueue(&ours, &next).await;
    release(&after.0, &after.1).await;
    tokio::time::timeout(Duration::from_secs(1), subscription.changed())
        .await
        .expect("a notification by the release, long before the next heartbeat");
    acquire(&ours, &next).await;
    release(&ours, &next).await;
    let mut subscribers = 0;
    eventually("no subscription is left", async || {
        subscribers = 0;
        for node in &nodes.nodes {
            let channels: Vec<String> = node.other().await.run("PUBSUB SHARDCHANNELS").await;
            subscribers += channels.len();
        }
        subscribers == 0
    })
    .await;
}

/// If the process of the waiter dies, the earlier names are free soon. A grant of all names has the whole ttl.
#[tokio::test]
async fn a_waiter_of_several_slots_holds_the_earlier_ones_for_a_short_time() {
    let Some(nodes) = Nodes::start(0).await else { return };
    let (ours, theirs) = (nodes.engine().await, nodes.engine().await);
    let names = one_each();
    let busy = claim(&names[2]);
    acquire(&theirs, &busy).await;
    let mut all = claim_of(&names);
    (all.waiting, all.ttl) = (true, Ttl::clamped(LONG * 20));
    let _subscription = ours.subscribe(&all, &key(&names[2])).await.unwrap();
    let left = async || {
        let info = theirs.inspect(&key(&names[0])).await.unwrap();
        info.and_then(|info| info.remaining)
    };
    for is_held in [false, true] {
        let tried = ours.try_acquire(&all).await.unwrap();
        assert!(matches!(tried, Acquired::Held { .. }), "{tried:?}");
        let left = left().await;
        assert_eq!(left.is_some(), is_held, "from the second attempt on");
        assert!(left.is_none_or(|left| left <= WAITER_LIVENESS), "{left:?}");
    }
    release(&theirs, &busy).await;
    eventually("a grant", async || {
        matches!(ours.try_acquire(&all).await.unwrap(), Acquired::Granted { .. })
    })
    .await;
    for name in &names {
        let info = theirs.inspect(&key(name)).await.unwrap().expect("the holder");
        assert!(info.remaining > Some(LONG * 19), "{:?}", info.remaining);
    }
    release(&ours, &all).await;
}

#[tokio::test]
async fn a_hand_off_grants_a_name_and_not_a_part_of_a_claim() {
    let Some(nodes) = Nodes::start(0).await else { return };
    let (ours, theirs) = (nodes.engine().await, nodes.engine().await);
    let names = one_each();
    let (holder, next, mut set) = (claim(&names[0]), waiting(&names[0]), claim_of(&names));
    set.waiting = true;
    let before = acquire(&ours, &holder).await;
    let mut next_subscription = enqueue(&theirs, &next).await;
    let mut set_subscription = theirs.subscribe(&set, &set.keys()[0]).await.unwrap();
    assert!(matches!(theirs.try_acquire(&set).await.unwrap(), Acquired::Held { key, .. } if key.as_str() == names[0]));
    release(&ours, &holder).await;
    notified(&mut next_subscription).await;
    // None where the machine stood still and the message was late.
    let granted = match next_subscription.take_hand_off() {
        Some(hand_off) => hand_off.fence,
        None => acquire(&theirs, &next).await,
    };
    assert!(granted > before);
    assert_eq!(fence_of(&ours, &names[0]).await, granted);
    assert_eq!(theirs.renew(&next, next.ttl).await.unwrap(), Renewed::Extended);
    release(&theirs, &next).await;
    notified(&mut set_subscription).await;
    assert_eq!(set_subscription.take_hand_off(), None);
    assert!(ours.inspect(&key(&names[0])).await.unwrap().is_none(), "reserved");
    assert!(acquire(&theirs, &set).await > granted);
    release(&theirs, &set).await;
}

#[tokio::test]
async fn a_master_that_is_lost_is_replaced_by_its_replica() {
    let Some(mut nodes) = Nodes::start(3).await else { return };
    let (ours, theirs) = (nodes.engine().await, nodes.engine().await);
    let names = one_each();
    let all = claim_of(&names);
    let before = acquire(&ours, &all).await;
    let waiter = waiting(&names[0]);
    let mut subscription = enqueue(&theirs, &waiter).await;
    nodes.wait_for_replication(&names[0]).await;
    nodes.nodes[0].stop();
    within(60, "a renewal on the replica", async || {
        matches!(
            tokio::time::timeout(Duration::from_secs(1), ours.renew(&all, all.ttl)).await,
            Ok(Ok(Renewed::Extended))
        )
    })
    .await;
    within(60, "all names are released", async || {
        matches!(ours.release(&all, Duration::ZERO).await, Ok(Released::Freed))
    })
    .await;
    within(60, "the waiter gets the name", async || {
        let _ = tokio::time::timeout(Duration::from_secs(5), subscription.changed()).await;
        matches!(theirs.try_acquire(&waiter).await, Ok(Acquired::Granted { fence }) if fence > before)
    })
    .await;
}

#[tokio::test]
async fn a_master_that_hangs_is_replaced_by_its_replica() {
    let Some(nodes) = Nodes::start(3).await else { return };
    let ours = nodes.engine().await;
    let names = one_each();
    let claims: Vec<Claim> = names.iter().map(|name| claim(name)).collect();
    for claim in &claims {
        acquire(&ours, claim).await;
    }
    nodes.wait_for_replication(&names[0]).await;
    nodes.nodes[0].suspend();
    // The other masters are not affected.
    for claim in &claims[1..] {
        assert_eq!(ours.renew(claim, claim.ttl).await.unwrap(), Renewed::Extended);
    }
    within(60, "a renewal on the replica", async || {
        matches!(
            tokio::time::timeout(Duration::from_millis(500), ours.renew(&claims[0], claims[0].ttl)).await,
            Ok(Ok(Renewed::Extended))
        )
    })
    .await;
    nodes.nodes[0].resume();
    assert_eq!(ours.renew(&claims[0], claims[0].ttl).await.unwrap(), Renewed::Extended);
}

#[tokio::test]
async fn many_calls_cross_a_move_of_many_slots() {
    let Some(nodes) = Nodes::start(0).await else { return };
    let (ours, theirs) = (nodes.engine().await, nodes.engine().await);
    let names: Vec<String> = (0..40).map(|i| format!("many{i}")).collect();
    let counters: Vec<_> = names.iter().map(|_| std::cell::Cell::new(0u32)).collect();
    let done = std::cell::Cell::new(false);
    // Two engines acquire and release each name while the slots move: never both at once.
    let work = names.iter().zip(&counters).flat_map(|(name, inside)| {
        [&ours, &theirs].map(|engine| {
            let done = &done;
            async move {
                let (mut last, mut rounds) = (Fence(0), 0u32);
                while !done.get() || rounds == 0 {
                    let claim = claim(name);
                    match engine.try_acquire(&claim).await {
                        Ok(Acquired::Granted { fence }) => {
                            assert!(fence > last);
                            last = fence;
                            inside.set(inside.get() + 1);
                            assert_eq!(inside.get(), 1, "{name}");
                            tokio::task::yield_now().await;
                            inside.set(inside.get() - 1);
                            rounds += 1;
                            while let Err(error) = engine.release(&claim, Duration::ZERO).await {
                                assert!(error.retryable, "{error}");
                            }
                        }
                        Ok(Acquired::Held { .. }) => tokio::task::yield_now().await,
                        Err(error) => assert!(error.retryable, "{error}"),
                    }
                }
            }
        })
    });
    let moves = async {
        for name in &names {
            let slot = slot_of_name(name);
            let from = home(slot);
            nodes.move_slot(slot, from, (from + 1) % 3).await;
        }
        done.set(true);
    };
    tokio::join!(join_all(work), moves);
}

#[tokio::test]
async fn errors_of_a_cluster_name_their_cause() {
    let parse = |url: &str| RedisConfig::parse(url, &Settings::default());
    let Some(single) = Server::start(&[]).await else { return };
    let url = format!("redis+cluster://127.0.0.1:{}", single.port);
    let error = RedisEngine::connect(parse(&url).unwrap()).await.unwrap_err();
    assert!(
        !error.retryable
            && error
                .to_string()
                .contains(&format!("127.0.0.1:{} is not a node", single.port)),
        "{error}"
    );
    let gone = format!("redis+cluster://127.0.0.1:{},127.0.0.1:{}", free_port(), free_port());
    let error = RedisEngine::connect(parse(&gone).unwrap()).await.unwrap_err();
    assert!(
        error.retryable && error.to_string().contains("no connection to"),
        "{error}"
    );
    let Some(empty) = Server::start(&["--cluster-enabled", "yes"]).await else {
        return;
    };
    let url = format!("redis+cluster://127.0.0.1:{}", empty.port);
    let error = RedisEngine::connect(parse(&url).unwrap()).await.unwrap_err();
    assert!(
        error.retryable && error.to_string().contains("no node of the cluster serves"),
        "{error}"
    );
}
