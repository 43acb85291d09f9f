//! Late and lost answers: nothing is left behind.

use super::*;
use crate::engine::EngineExt;
use crate::engine::contract::refs;

/// One node is busy, one gives its vote, one hangs: the attempt fails, and the late vote is rolled back.
#[tokio::test]
async fn a_failed_attempt_is_rolled_back_on_every_node() {
    let Some(nodes) = Nodes::start(3).await else { return };
    let ours = nodes.with_node_timeout(Duration::from_millis(400)).await;
    nodes.load_scripts(&ours).await;
    nodes.other(0).await.run::<()>("SET lock:n theirs PX 20000").await;
    nodes.suspend(2);
    let retry_after = busy(&ours, &claim("n")).await;
    assert!(retry_after.is_some());
    assert_eq!(nodes.get(&[1], "lock:n").await, [None], "rolled back before the answer");
    assert!(
        nodes.last_fences(&[1], "n").await[0].is_some(),
        "the node gave its vote"
    );
    nodes.resume(2);
    eventually("the late vote", async || {
        nodes.last_fences(&[2], "n").await[0].is_some()
    })
    .await;
    nodes.are_free(&[2], "n").await;
    assert_eq!(nodes.get(&[0], "lock:n").await, [Some("theirs".to_owned())]);
}

/// The same, and the service is closed while the vote is in flight: the close waits until it is rolled back.
#[tokio::test]
async fn a_close_waits_for_the_rollback_of_a_vote_in_flight() {
    let Some(nodes) = Nodes::start(3).await else { return };
    let ours = nodes.with_node_timeout(Duration::from_secs(10)).await;
    nodes.load_scripts(&ours).await;
    nodes.other(0).await.run::<()>("SET lock:n theirs PX 20000").await;
    nodes.suspend(2);
    busy(&ours, &claim("n")).await;
    let resuming = async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        nodes.resume(2);
    };
    tokio::join!(ours.close(), resuming);
    assert!(
        nodes.last_fences(&[2], "n").await[0].is_some(),
        "the node gave its vote"
    );
    assert_eq!(nodes.get(&[1, 2], "lock:n").await, [None, None]);
}

/// A lease is granted and released while a node hangs. The node then executes both, in any order.
#[tokio::test]
async fn a_late_vote_of_a_released_lease_is_rolled_back() {
    let Some(nodes) = Nodes::start(3).await else { return };
    // A timeout so short that the connection is replaced between the two: the release may overtake the vote.
    let ours = nodes.with_node_timeout(Duration::from_secs(1)).await;
    nodes.load_scripts(&ours).await;
    nodes.suspend(2);
    let held = claim("n");
    acquire_soon(&ours, &held).await;
    tokio::time::sleep(Duration::from_millis(1500)).await;
    release_soon(&ours, &held).await;
    tokio::time::sleep(Duration::from_millis(1500)).await;
    nodes.resume(2);
    eventually("the late vote", async || {
        nodes.last_fences(&[2], "n").await[0].is_some()
    })
    .await;
    nodes.are_free(&[0, 1, 2], "n").await;
}

/// A late vote of a lease that is still held is kept.
#[tokio::test]
async fn a_late_vote_of_a_held_lease_stays() {
    let Some(nodes) = Nodes::start(3).await else { return };
    let ours = nodes.engine().await;
    nodes.suspend(2);
    let held = claim("n");
    acquire(&ours, &held).await;
    nodes.resume(2);
    let value = nodes.get(&[0], "lock:n").await;
    eventually("the late vote", async || nodes.get(&[2], "lock:n").await == value).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(nodes.get(&[2], "lock:n").await, value);
    release(&ours, &held).await;
    nodes.are_free(&[0, 1, 2], "n").await;
}

/// The caller is dropped during an attempt, before a majority has answered.
#[tokio::test]
async fn an_attempt_whose_caller_was_dropped_is_rolled_back() {
    let Some(nodes) = Nodes::start(3).await else { return };
    let ours = nodes.with_node_timeout(Duration::from_secs(5)).await;
    nodes.suspend(1);
    nodes.suspend(2);
    let abandoned = tokio::time::timeout(Duration::from_millis(200), ours.try_acquire(&claim("n"))).await;
    assert!(abandoned.is_err());
    nodes.resume(1);
    nodes.resume(2);
    eventually("the late votes", async || {
        nodes.last_fences(&[1, 2], "n").await.iter().all(Option::is_some)
    })
    .await;
    nodes.are_free(&[1, 2], "n").await;
}

/// Each attempt has its own value: the rollback of a failed attempt does not remove the vote of the next.
#[tokio::test]
async fn every_attempt_has_a_fresh_value() {
    let Some(nodes) = Nodes::start(3).await else { return };
    let ours = nodes.engine().await;
    let held = claim("n");
    let mut seen = std::collections::BTreeSet::new();
    for _ in 0..3 {
        acquire(&ours, &held).await;
        let values = nodes.all_have(&[0, 1, 2], "n").await;
        let value = values[0].clone().unwrap();
        assert!(value.starts_with(held.owner.as_str()), "{value}");
        assert!(seen.insert(value), "used before");
    }
    let old = seen.first().unwrap();
    let keys = ["2", "lock:n", "holdfast:metadata:{lock:n}"];
    let rollback = [
        &["EVAL", include_str!("../../quorum/scripts/rollback.lua")],
        &keys[..],
        &[old.as_str()],
    ]
    .concat();
    for node in 0..3 {
        assert_eq!(nodes.other(node).await.args::<i64>(&rollback).await, 0);
    }
    assert_eq!(renew(&ours, &held).await.unwrap(), Renewed::Extended);

    // The vote of an earlier attempt that is executed after that of a later one changes nothing.
    let vote = include_str!("../../quorum/scripts/acquire.lua");
    let counter = counter("n");
    let keys = ["3", "lock:n", "holdfast:fence:{lock:n}", &counter];
    let args = [held.owner.as_str(), "1", "30000", "60000", "0", "1", "h"];
    let late = [&["EVAL", vote], &keys[..], &args[..]].concat();
    let before = nodes.get(&[0], "lock:n").await;
    let _: Vec<::redis::Value> = nodes.other(0).await.args(&late).await;
    assert_eq!(nodes.get(&[0], "lock:n").await, before);
    release(&ours, &held).await;
}

/// A node that missed a release gets it when it is back.
#[tokio::test]
async fn a_release_is_repeated_until_the_node_confirms_it() {
    let Some(nodes) = Nodes::start(3).await else { return };
    let ours = nodes.with_node_timeout(Duration::from_millis(2500)).await;
    let held = claim("n");
    acquire(&ours, &held).await;
    let mut other = nodes.other(2).await;
    eventually("the third vote", async || other.run::<i64>("EXISTS lock:n").await == 1).await;
    // The node refuses connections for some time.
    other.run::<()>("CONFIG SET maxclients 1").await;
    other.run::<i64>("CLIENT KILL TYPE normal").await;
    release(&ours, &held).await;
    assert_eq!(other.run::<i64>("EXISTS lock:n").await, 1);
    other.run::<()>("CONFIG SET maxclients 1000").await;
    nodes.are_free(&[2], "n").await;
}

#[tokio::test]
async fn a_close_waits_for_the_releases_in_flight() {
    let Some(nodes) = Nodes::start(3).await else { return };
    let ours = nodes.with_node_timeout(Duration::from_secs(5)).await;
    let held = claim("n");
    acquire(&ours, &held).await;
    let mut other = nodes.other(2).await;
    eventually("the third vote", async || other.run::<i64>("EXISTS lock:n").await == 1).await;
    other.run::<()>("CLIENT PAUSE 400 ALL").await;
    release(&ours, &held).await;
    ours.close().await;
    assert_eq!(nodes.get(&[2], "lock:n").await, [None]);
}

/// One bounded list has all removals for a node that is down.
#[tokio::test]
async fn a_node_that_is_down_costs_a_bounded_list() {
    let Some(mut nodes) = Nodes::start(3).await else { return };
    let ours = nodes.with_node_timeout(Duration::from_secs(2)).await;
    nodes.0[2].stop();
    let tasks = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
    let before = tasks();
    for round in 0..20 {
        let claims: Vec<Claim> = (0..50).map(|n| claim(&format!("{round} {n}"))).collect();
        join_all(claims.iter().map(|claim| acquire_soon(&ours, claim))).await;
        join_all(claims.iter().map(|claim| release(&ours, claim))).await;
    }
    eventually("the tasks of the calls end", async || tasks() <= before + 20).await;
    // At most two for each: the release, and the vote that was in flight when the node went down.
    let left = ours.cleanup_len(2);
    assert!(left <= 1100, "{left} entries");
}

/// A vote without a connection is never sent after its attempt has ended.
#[tokio::test]
async fn a_vote_that_was_not_sent_is_dropped() {
    let Some(nodes) = Nodes::start(3).await else { return };
    let ours = nodes.with_node_timeout(Duration::from_secs(2)).await;
    nodes.load_scripts(&ours).await;
    for node in 0..3 {
        nodes.suspend(node);
        // The next call needs a new connection, whose login is not answered.
        ours.disconnect(node).await;
    }
    let dropped = claim("n");
    let abandoned = tokio::time::timeout(Duration::from_millis(200), ours.try_acquire(&dropped)).await;
    assert!(abandoned.is_err());
    assert!(!dropped.was_sent());
    (0..3).for_each(|node| nodes.resume(node));
    acquire_soon(&ours, &claim("other")).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    let counts = nodes.last_fences(&[0, 1, 2], "n").await;
    assert!(counts.iter().all(Option::is_none), "a vote was given: {counts:?}");
}

/// Many releases in one call: each gets its answer, and a node that was down gets them after its restart.
#[tokio::test]
async fn releases_in_batches_reach_every_node() {
    let Some(nodes) = Nodes::start(3).await else { return };
    let ours = nodes.with_node_timeout(Duration::from_millis(2500)).await;
    let claims: Vec<Claim> = (0..150).map(|n| claim(&format!("n{n}"))).collect();
    for held in &claims[1..] {
        acquire_soon(&ours, held).await;
    }
    for held in &claims[1..] {
        nodes.all_have(&[0, 1, 2], held.keys()[0].as_str()).await;
    }
    nodes.suspend(2);
    let mut answers = vec![None; claims.len()];
    let mut collect = |index: usize, answer: EngineResult<Released>| answers[index] = Some(answer.unwrap());
    ours.release_all(&refs(&claims), Duration::ZERO, &mut collect).await;
    assert_eq!(answers[0], Some(Released::NotHeld));
    assert!(answers[1..].iter().all(|answer| *answer == Some(Released::Freed)));
    nodes.resume(2);
    for held in &claims {
        nodes.are_free(&[0, 1, 2], held.keys()[0].as_str()).await;
    }
}

/// The mark of a long lease, too.
#[tokio::test]
async fn a_mark_of_a_release_lasts_an_hour_at_most() {
    let Some(nodes) = Nodes::start(3).await else { return };
    let ours = nodes.engine().await;
    let days = Ttl::clamped(Duration::from_secs(20 * 24 * 3600));
    for how in ["release", "keep", "force"] {
        let mut held = claim(how);
        held.ttl = days;
        acquire_soon(&ours, &held).await;
        nodes.all_have(&[0, 1, 2], how).await;
        for node in 0..3 {
            nodes.record(node, how).await;
        }
        match how {
            "release" => assert_eq!(ours.release(&held, Duration::ZERO).await.unwrap(), Released::Freed),
            "keep" => assert_eq!(
                ours.release(&held, Duration::from_millis(1)).await.unwrap(),
                Released::Freed
            ),
            _ => assert!(ours.force_release(&key(how)).await.unwrap()),
        }
        nodes.are_free(&[0, 1, 2], how).await;
        for node in 0..3 {
            let mark = format!("holdfast:fence:{{lock:{how}}}");
            let left: i64 = nodes.other(node).await.args(&["PTTL", &mark]).await;
            assert!((1..=3_600_001).contains(&left), "{how}: {left} ms");
        }
    }
}
