//! Reads, notifications and other tools, while the nodes differ.

use super::*;
use crate::engine::EngineExt;

#[tokio::test]
async fn a_lock_of_a_minority_is_not_held() {
    let Some(nodes) = Nodes::start(3).await else { return };
    let ours = nodes.engine().await;
    nodes.other(0).await.run::<()>("SET lock:n theirs PX 60000").await;
    assert_eq!(ours.inspect(&key("n")).await.unwrap(), None);
    assert_eq!(ours.list("", PAGE).await.unwrap(), []);
    assert!(!ours.force_release(&key("n")).await.unwrap(), "it was not held");
    // But the key is deleted.
    nodes.are_free(&[0], "n").await;

    nodes.other(0).await.run::<()>("SET lock:n theirs PX 60000").await;
    let held = claim("n");
    acquire(&ours, &held).await;
    assert_eq!(ours.list("", PAGE).await.unwrap().len(), 1);
    assert_eq!(renew(&ours, &held).await.unwrap(), Renewed::Extended);
    assert_eq!(
        nodes.get(&[0], "lock:n").await,
        [Some("theirs".to_owned())],
        "healing does not replace another holder"
    );
    release(&ours, &held).await;
    assert_eq!(nodes.get(&[0], "lock:n").await, [Some("theirs".to_owned())]);
}

#[tokio::test]
async fn another_tool_that_holds_a_majority_excludes_ours_and_is_shown() {
    let Some(nodes) = Nodes::start(3).await else { return };
    let ours = nodes.engine().await;
    for node in 0..3 {
        let line = "SET lock:n theirs NX PX 6000";
        assert_eq!(
            nodes.other(node).await.run::<Option<String>>(line).await.as_deref(),
            Some("OK")
        );
    }
    let seconds = |from: u64, to: u64| Duration::from_secs(from)..=Duration::from_secs(to);
    assert!(seconds(4, 6).contains(&busy(&ours, &claim("n")).await.unwrap()));
    let info = ours.inspect(&key("n")).await.unwrap().unwrap();
    assert!(seconds(4, 6).contains(&info.remaining.unwrap()), "{info:?}");
    assert_eq!((info.fence, info.holder), (None, None));
    assert_eq!(ours.list("", PAGE).await.unwrap().len(), 1);
    let held = claim("m");
    acquire(&ours, &held).await;
    assert_eq!(
        nodes
            .other(0)
            .await
            .run::<Option<String>>("SET lock:m theirs NX PX 5000")
            .await,
        None
    );
    assert!(ours.force_release(&key("n")).await.unwrap());
    acquire(&ours, &claim("n")).await;
}

/// With a silent node, one of two nodes that differ may be part of a majority: a read has the same result as an attempt.
#[tokio::test]
async fn a_name_that_may_be_held_is_shown_as_held() {
    let Some(mut nodes) = Nodes::start(3).await else { return };
    let ours = nodes.with_node_timeout(Duration::from_millis(2500)).await;
    let held = claim("n");
    let fence = acquire(&ours, &held).await;
    nodes.all_have(&[0, 1, 2], "n").await;
    nodes.other(0).await.run::<()>("FLUSHALL").await;
    nodes.0[1].stop();
    assert_eq!(ours.inspect(&key("n")).await.unwrap().unwrap().fence, Some(fence));
    assert_eq!(ours.list("", PAGE).await.unwrap().len(), 1);
    busy(&ours, &claim("n")).await;
    assert!(ours.force_release(&key("n")).await.unwrap());
    acquire_soon(&ours, &claim("n")).await;
}

/// After a split vote the retry comes soon, at random. It comes later if the conflicting vote is an old one that was left behind.
#[tokio::test]
async fn a_split_vote_is_retried_at_random() {
    let Some(nodes) = Nodes::start(3).await else { return };
    let ours = nodes.engine().await;
    let script = include_str!("../../quorum/scripts/acquire.lua");
    for node in 0..3 {
        let owner = OwnerToken::fresh();
        let args = [owner.as_str(), "1", "60000", "120000", "0", "1", "h"];
        let counter = counter("n");
        let keys = ["3", "lock:n", "holdfast:fence:{lock:n}", &counter];
        let call = [&["EVAL", script], &keys[..], &args[..]].concat();
        let _: Vec<::redis::Value> = nodes.other(node).await.args(&call).await;
    }
    let mut pauses = std::collections::BTreeSet::new();
    for _ in 0..20 {
        let pause = busy(&ours, &claim("n")).await.unwrap();
        assert!(pause < Duration::from_secs(2), "{pause:?}");
        pauses.insert(pause);
    }
    assert!(pauses.len() > 10, "{pauses:?}");
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(busy(&ours, &claim("n")).await.unwrap() > Duration::from_millis(200));
    // The age of a vote by plain commands follows from its number.
    let now = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap();
    for node in 0..3 {
        let value = format!("{}.{}", OwnerToken::fresh().as_str(), now.as_micros() - 1_000_000);
        let mut other = nodes.other(node).await;
        other.args::<()>(&["SET", "lock:m", &value, "PX", "60000"]).await;
    }
    assert!(busy(&ours, &claim("m")).await.unwrap() > Duration::from_millis(200));
}

#[tokio::test]
async fn a_message_of_the_remaining_nodes_notifies_a_waiter() {
    for size in [3, 5] {
        let Some(mut nodes) = Nodes::start(size).await else {
            return;
        };
        let (ours, theirs) = (nodes.engine().await, nodes.engine().await);
        let held = claim("n");
        acquire(&theirs, &held).await;
        for node in 0..size / 2 {
            nodes.0[node].stop();
        }
        let waiter = claim("n");
        let mut subscription = ours.subscribe(&waiter, &key("n")).await.unwrap();
        busy(&ours, &waiter).await;
        release(&theirs, &held).await;
        tokio::time::timeout(Duration::from_secs(5), subscription.changed())
            .await
            .expect("a notification");
        let fence = acquire(&ours, &waiter).await;
        release(&ours, &waiter).await;

        // The other nodes return, and notify from then on.
        for node in 0..size / 2 {
            nodes.0[node].restart().await;
        }
        for node in size / 2 + 1..size {
            nodes.0[node].stop();
        }
        let (held, waiter) = (claim("n"), claim("n"));
        assert!(acquire_soon(&theirs, &held).await > fence);
        eventually("a notification by the nodes that returned", async || {
            let granted = async {
                loop {
                    subscription.changed().await;
                    if matches!(ours.try_acquire(&waiter).await, Ok(Acquired::Granted { .. })) {
                        return;
                    }
                }
            };
            theirs.release(&held, Duration::ZERO).await.unwrap();
            tokio::time::timeout(Duration::from_secs(5), granted).await.is_ok()
        })
        .await;
    }
}

#[tokio::test]
async fn a_flushed_script_cache_changes_nothing() {
    let Some(nodes) = Nodes::start(3).await else { return };
    let ours = nodes.engine().await;
    let flush = async || {
        for node in 0..3 {
            nodes.other(node).await.run::<()>("SCRIPT FLUSH").await;
        }
    };
    for _ in 0..2 {
        let held = claim("n");
        acquire(&ours, &held).await;
        flush().await;
        assert_eq!(renew(&ours, &held).await.unwrap(), Renewed::Extended);
        flush().await;
        assert!(ours.inspect(&key("n")).await.unwrap().is_some());
        flush().await;
        release(&ours, &held).await;
        flush().await;
    }
}

/// The rights in the documentation of the engine suffice for every verb.
#[tokio::test]
async fn a_user_with_the_documented_rights_can_do_everything() {
    let Some(nodes) = Nodes::start(3).await else { return };
    let page = include_str!("../../quorum/mod.rs");
    let rule: String = page
        .lines()
        .skip_while(|line| !line.contains("ACL SETUSER"))
        .take_while(|line| !line.contains("```"))
        .map(|line| line.trim_start_matches("//!"))
        .collect();
    let words: Vec<&str> = rule
        .split_whitespace()
        .map(|word| word.trim_start_matches(">PASSWORD"))
        .collect();
    let words: Vec<&str> = words
        .into_iter()
        .map(|word| if word.is_empty() { ">secret" } else { word })
        .collect();
    for node in 0..3 {
        nodes.other(node).await.args::<()>(&words).await;
    }
    let urls: Vec<String> = nodes
        .0
        .iter()
        .map(|server| server.url().replace("//", "//holdfast:secret@"))
        .collect();
    let config = QuorumConfig::parse(&urls, &settings("lock:")).unwrap();
    let ours = QuorumEngine::connect(config).await.unwrap();
    let mut subscription = ours.subscribe(&claim("n"), &key("n")).await.unwrap();
    // A larger last token on one node, so that the others have to be raised.
    nodes.set_last_fence(0, "n", 9_000_000_000_000_000).await;
    for keep in [0, 1] {
        let mut held = claim("n");
        held.metadata = Some("1".into());
        acquire_soon(&ours, &held).await;
        // A node that executed the last release late gets the lock with the first renewal.
        eventually("all nodes have the lock", async || {
            let renewed = renew(&ours, &held).await.is_ok();
            renewed && nodes.get(&[0, 1, 2], "lock:n").await.iter().all(Option::is_some)
        })
        .await;
        nodes.other(2).await.run::<()>("FLUSHALL").await;
        eventually("the node is healed", async || {
            assert_eq!(renew(&ours, &held).await.unwrap(), Renewed::Extended);
            nodes.get(&[2], "lock:n").await[0].is_some()
        })
        .await;
        let next = OwnerToken::fresh();
        assert_eq!(ours.transfer(&held, &next).await.unwrap(), Renewed::Extended);
        held.owner = next;
        assert_eq!(ours.list("", PAGE).await.unwrap().len(), 1);
        let keep = Duration::from_millis(keep);
        assert_eq!(ours.release(&held, keep).await.unwrap(), Released::Freed);
        tokio::time::timeout(Duration::from_secs(5), subscription.changed())
            .await
            .expect("a notification");
    }
    acquire_soon(&ours, &claim("n")).await;
    assert!(ours.force_release(&key("n")).await.unwrap());
    nodes.are_free(&[0, 1, 2], "n").await;
    // An attempt that fails and is rolled back.
    for node in [0, 1] {
        nodes.other(node).await.run::<()>("SET lock:n theirs").await;
    }
    busy(&ours, &claim("n")).await;
    nodes.are_free(&[2], "n").await;
}
