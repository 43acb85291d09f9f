//! Nodes that are killed, hang, are slow, lose their data, and return: with 3 and 5 nodes.

use std::time::{SystemTime, UNIX_EPOCH};

use super::*;
use crate::engine::EngineExt;

const SIZES: [usize; 2] = [3, 5];

/// Calls every verb, once or until its nodes answer in time.
async fn works(engine: &QuorumEngine) {
    let mut ours = claim("works");
    ours.metadata = Some("1".into());
    let fence = acquire_soon(engine, &ours).await;
    assert_eq!(renew_soon(engine, &ours).await, Renewed::Extended);
    let other = claim("works");
    let acquired = soon(async || engine.try_acquire(&other).await).await;
    assert!(matches!(acquired, Acquired::Held { .. }), "{acquired:?}");
    let info = soon(async || engine.inspect(&key("works")).await).await.unwrap();
    assert_eq!((info.fence, info.metadata.as_deref()), (Some(fence), Some("1")));
    let listed = soon(async || engine.list("works", PAGE).await).await;
    assert_eq!(listed.len(), 1);
    assert_eq!((listed[0].fence, &listed[0].holder), (Some(fence), &info.holder));
    let next = OwnerToken::fresh();
    let transferred = soon(async || engine.transfer(&ours, &next).await).await;
    assert_eq!(transferred, Renewed::Extended);
    ours.owner = next;
    release_soon(engine, &ours).await;
    // Another claim, because an owner makes no attempt after its release: a node that missed the release still gets it.
    acquire_soon(engine, &claim("works")).await;
    let mut calls = 0;
    let forced = soon(async || {
        calls += 1;
        engine.force_release(&key("works")).await
    })
    .await;
    assert!(forced || calls > 1);
    assert_eq!(soon(async || engine.inspect(&key("works")).await).await, None);
}

#[tokio::test]
async fn a_killed_minority_changes_nothing_and_a_lost_majority_is_an_error() {
    for size in SIZES {
        let Some(mut nodes) = Nodes::start(size).await else {
            return;
        };
        let ours = nodes.with_node_timeout(Duration::from_millis(2500)).await;
        let held = claim("held");
        let fence = acquire(&ours, &held).await;
        for node in 0..size / 2 {
            nodes.0[node].stop();
        }
        works(&ours).await;
        assert_eq!(renew_soon(&ours, &held).await, Renewed::Extended);

        nodes.0[size / 2].stop();
        let fresh = claim("fresh");
        let outcomes = [
            ours.try_acquire(&fresh).await.map(drop),
            renew(&ours, &held).await.map(drop),
            ours.transfer(&held, &OwnerToken::fresh()).await.map(drop),
            ours.release(&fresh, Duration::ZERO).await.map(drop),
            ours.inspect(&key("held")).await.map(drop),
            ours.list("", PAGE).await.map(drop),
            ours.force_release(&key("fresh")).await.map(drop),
            ours.subscribe(&held, &key("held")).await.map(drop),
        ];
        for outcome in outcomes {
            let error = outcome.unwrap_err();
            assert!(error.retryable, "{error}");
            let expected = format!("no majority of the nodes: {} of {size} answered; ", size / 2);
            assert!(error.to_string().contains(&expected), "{error}");
            assert!(
                error.to_string().contains(&nodes.0[size / 2].port.to_string()),
                "{error}"
            );
        }

        // They return without data. Two of three (three of five) did not vote or have lost their vote.
        for node in 0..=size / 2 {
            nodes.0[node].restart().await;
        }
        assert!(acquire_soon(&ours, &claim("held")).await > fence);
        works(&ours).await;
    }
}

#[tokio::test]
async fn a_hung_minority_delays_no_call() {
    for size in SIZES {
        let Some(nodes) = Nodes::start(size).await else { return };
        // A call that waited for a hung node would wait for this time.
        let ours = nodes.with_node_timeout(Duration::from_secs(30)).await;
        for node in 0..size / 2 {
            nodes.suspend(node);
        }
        let waited = tokio::time::timeout(Duration::from_secs(15), async {
            for _ in 0..3 {
                let held = claim("n");
                acquire(&ours, &held).await;
                assert_eq!(renew(&ours, &held).await.unwrap(), Renewed::Extended);
                assert!(ours.inspect(&key("n")).await.unwrap().is_some());
                busy(&ours, &claim("n")).await;
                ours.subscribe(&held, &key("n")).await.unwrap();
                release(&ours, &held).await;
            }
        });
        waited.await.expect("no call waits for a hung minority");
        for node in 0..size / 2 {
            nodes.resume(node);
        }
        // Their late votes are rolled back.
        nodes.are_free(&(0..size).collect::<Vec<_>>(), "n").await;
    }
}

/// One node has the vote of another attempt, one votes, and one hangs.
#[tokio::test]
async fn a_split_vote_does_not_wait_for_a_hung_node() {
    let Some(nodes) = Nodes::start(3).await else { return };
    let ours = nodes.with_node_timeout(Duration::from_secs(30)).await;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    nodes.suspend(2);
    for (age, is_short) in [(Duration::ZERO, true), (Duration::from_secs(10), false)] {
        let name = format!("split{is_short}");
        let vote = format!("{}.{}", OwnerToken::fresh().as_str(), (now - age).as_micros());
        let set: String = nodes
            .other(1)
            .await
            .args(&["SET", &format!("lock:{name}"), &vote, "PX", "60000"])
            .await;
        assert_eq!(set, "OK");
        let attempt = claim(&name);
        let attempt = tokio::time::timeout(Duration::from_secs(10), busy(&ours, &attempt));
        let retry_after = attempt.await.expect("it does not wait for the hung node").unwrap();
        // A young vote is about to be rolled back. An old one may be that of a lease.
        assert_eq!(retry_after < Duration::from_secs(10), is_short, "{retry_after:?}");
        nodes.are_free(&[0], &name).await;
    }
    nodes.resume(2);
    for name in ["splittrue", "splitfalse"] {
        nodes.are_free(&[0, 2], name).await;
    }
}

#[tokio::test]
async fn a_hung_majority_is_an_error_within_the_time_limit() {
    for size in SIZES {
        let Some(nodes) = Nodes::start(size).await else { return };
        let ours = nodes.with_node_timeout(Duration::from_millis(300)).await;
        for node in 0..=size / 2 {
            nodes.suspend(node);
        }
        let error = tokio::time::timeout(Duration::from_secs(15), ours.try_acquire(&claim("n")))
            .await
            .expect("an answer although the nodes give none")
            .unwrap_err();
        assert!(error.retryable);
        assert!(error.to_string().contains("no answer within 300 ms"), "{error}");
        for node in 0..=size / 2 {
            nodes.resume(node);
        }
        // Nothing is left of the attempt, on the nodes that voted in time and on those that did so late.
        nodes.are_free(&(0..size).collect::<Vec<_>>(), "n").await;
        works(&ours).await;
    }
}

#[tokio::test]
async fn slow_nodes_have_as_much_time_as_the_lease_allows() {
    for size in SIZES {
        let Some(nodes) = Nodes::start(size).await else { return };
        let ours = nodes.with_node_timeout(Duration::from_secs(10)).await;
        for node in 0..=size / 2 {
            nodes.other(node).await.run::<()>("CLIENT PAUSE 800 ALL").await;
        }
        let long = claim("n");
        acquire(&ours, &long).await;
        release(&ours, &long).await;

        for node in 0..=size / 2 {
            nodes.suspend(node);
        }
        let mut brief = claim("n");
        brief.ttl = Ttl::clamped(Duration::from_millis(900));
        let error = ours.try_acquire(&brief).await.unwrap_err();
        for node in 0..=size / 2 {
            nodes.resume(node);
        }
        assert!(error.retryable, "{error}");
        assert!(
            error.to_string().contains("no answer within 300 ms"),
            "a third of the ttl: {error}"
        );
        nodes.are_free(&(0..size).collect::<Vec<_>>(), "n").await;
    }
}

#[tokio::test]
async fn a_renewal_heals_wiped_and_returning_nodes() {
    for size in SIZES {
        let Some(mut nodes) = Nodes::start(size).await else {
            return;
        };
        nodes.0[0].stop();
        let ours = nodes.with_node_timeout(Duration::from_millis(2500)).await;
        let mut held = claim("n");
        held.metadata = Some(r#"{"a": 1}"#.into());
        let fence = acquire(&ours, &held).await;
        nodes.all_have(&(1..size).collect::<Vec<_>>(), "n").await;
        let before = ours.inspect(&key("n")).await.unwrap().unwrap();
        // A node that was down at the grant, and in the larger quorum one that has lost its data.
        nodes.0[0].restart().await;
        let mut empty = vec![0];
        if size > 3 {
            nodes.other(1).await.run::<()>("FLUSHALL").await;
            empty.push(1);
        }
        let value = nodes.get(&[size - 1], "lock:n").await;
        eventually("the nodes are healed", async || {
            assert_eq!(renew(&ours, &held).await.unwrap(), Renewed::Extended);
            nodes.get(&empty, "lock:n").await.iter().all(|found| *found == value[0])
        })
        .await;
        for node in &empty {
            let mut other = nodes.other(*node).await;
            let left: i64 = other.run("PTTL lock:n").await;
            assert!(left > 0 && left <= 30_000, "{left}");
            let record: String = other.run("GET holdfast:fence:{lock:n}").await;
            assert!(
                record.starts_with(&format!("{} {} ", fence.0, held.owner.as_str())),
                "{record}"
            );
        }
        // Now the lease survives the loss of nodes that granted it, up to a minority.
        for node in size - size / 2..size {
            nodes.0[node].stop();
        }
        eventually("the renewal", async || {
            matches!(renew(&ours, &held).await, Ok(Renewed::Extended))
        })
        .await;
        let after = ours.inspect(&key("n")).await.unwrap().unwrap();
        assert_eq!(
            (after.fence, after.holder, after.metadata),
            (before.fence, before.holder, before.metadata)
        );
        busy(&ours, &claim("n")).await;
        release(&ours, &held).await;
    }
}

#[tokio::test]
async fn a_lease_that_the_majority_lost_is_not_created_again() {
    for size in SIZES {
        let Some(nodes) = Nodes::start(size).await else { return };
        let ours = nodes.engine().await;
        let held = claim("n");
        acquire(&ours, &held).await;
        nodes.all_have(&(0..size).collect::<Vec<_>>(), "n").await;
        let wiped: Vec<usize> = (0..=size / 2).collect();
        for node in &wiped {
            nodes.other(*node).await.run::<()>("FLUSHALL").await;
        }
        assert_eq!(renew(&ours, &held).await.unwrap(), Renewed::Lost);
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert!(nodes.get(&wiped, "lock:n").await.iter().all(Option::is_none));
        assert_eq!(ours.inspect(&key("n")).await.unwrap(), None, "a minority holds nothing");
        assert_eq!(ours.release(&held, Duration::ZERO).await.unwrap(), Released::NotHeld);
        let next = claim("n");
        acquire(&ours, &next).await;
        release(&ours, &next).await;
    }
}

#[tokio::test]
async fn a_node_may_answer_a_release_after_the_engine_was_dropped() {
    let Some(nodes) = Nodes::start(3).await else { return };
    for _ in 0..200 {
        let ours = nodes.engine().await;
        let held = claim("n");
        acquire_soon(&ours, &held).await;
        release(&ours, &held).await;
        drop(ours);
        // The last answer arrives: it is the last owner of the engine.
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

#[tokio::test]
async fn with_too_few_answers_a_renewal_is_unknown_and_not_lost() {
    let Some(mut nodes) = Nodes::start(3).await else { return };
    let ours = nodes.with_node_timeout(Duration::from_millis(2500)).await;
    let held = claim("n");
    acquire(&ours, &held).await;
    nodes.all_have(&[0, 1, 2], "n").await;
    nodes.other(0).await.run::<()>("FLUSHALL").await;
    nodes.0[1].stop();
    // One node has it, one does not, one is silent.
    let error = renew(&ours, &held).await.unwrap_err();
    assert!(error.retryable);
    assert!(error.to_string().contains("2 of 3 answered"), "{error}");
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(nodes.get(&[0], "lock:n").await, [None], "no majority, no healing");
}

#[tokio::test]
async fn a_released_lock_is_not_healed() {
    let Some(nodes) = Nodes::start(3).await else { return };
    let ours = nodes.engine().await;
    let held = claim("n");
    acquire(&ours, &held).await;
    nodes.all_have(&[0, 1, 2], "n").await;
    nodes.record(0, "n").await;
    // The release has reached only one node when a renewal arrives.
    let mut other = nodes.other(0).await;
    let sources = [
        "../../quorum/scripts/release.lua",
        "../../quorum/scripts/force_release.lua",
    ];
    let scripts = [
        concat!(
            include_str!("../../quorum/scripts/release_one.lua"),
            include_str!("../../quorum/scripts/release.lua")
        ),
        include_str!("../../quorum/scripts/force_release.lua"),
    ];
    for (source, script) in sources.into_iter().zip(scripts) {
        let keys = ["3", "lock:n", "holdfast:fence:{lock:n}", "holdfast:metadata:{lock:n}"];
        let args = [&["EVAL", script], &keys[..], &[held.owner.as_str(), "0", "0"]].concat();
        assert_eq!(other.args::<i64>(&args).await, 1, "{source}");
        for _ in 0..5 {
            assert_eq!(renew(&ours, &held).await.unwrap(), Renewed::Extended);
            tokio::time::sleep(Duration::from_millis(20)).await;
            assert_eq!(nodes.get(&[0], "lock:n").await, [None], "{source}");
        }
        // A lock that vanished without a release is healed.
        other.run::<()>("DEL holdfast:fence:{lock:n}").await;
        eventually("the node is healed", async || {
            renew(&ours, &held).await.unwrap();
            nodes.get(&[0], "lock:n").await[0].is_some()
        })
        .await;
    }
    release(&ours, &held).await;
    nodes.are_free(&[0, 1, 2], "n").await;
}

#[tokio::test]
async fn connecting_needs_a_majority_and_no_rejection() {
    let Some(mut nodes) = Nodes::start(3).await else { return };
    nodes.0[0].stop();
    works(&*nodes.engine().await).await;
    nodes.0[1].stop();
    let error = QuorumEngine::connect(nodes.config("lock:", Duration::from_secs(2)))
        .await
        .unwrap_err();
    assert!(error.retryable);
    assert!(
        error.to_string().starts_with(
            "redis: connect failed: no majority of the nodes: 1 of 3 answered; no connection to 127.0.0.1:"
        ),
        "{error}"
    );
    nodes.0[0].restart().await;
    nodes.0[1].restart().await;
    nodes.other(2).await.run::<()>("CONFIG SET requirepass secret").await;
    let error = QuorumEngine::connect(nodes.config("lock:", Duration::from_secs(20)))
        .await
        .unwrap_err();
    assert!(!error.retryable && error.to_string().contains("NOAUTH"), "{error}");
}

#[tokio::test]
async fn a_permanent_error_on_a_majority_is_not_retryable() {
    let Some(nodes) = Nodes::start(3).await else { return };
    let ours = nodes.engine().await;
    nodes.other(0).await.run::<()>("LPUSH lock:n x").await;
    let held = claim("n");
    acquire(&ours, &held).await;
    release(&ours, &held).await;
    nodes.other(1).await.run::<()>("LPUSH lock:n x").await;
    let error = ours.try_acquire(&held).await.unwrap_err();
    assert!(
        !error.retryable && error.to_string().contains("has a value of another type"),
        "{error}"
    );
    nodes.are_free(&[2], "n").await;
}
