//! Users with limited rights on some nodes, and a node that evicts locks.

use super::super::connect_checks::{Missing, eviction_is_reported, missing_rights_are_named, with_long_timeout};
use super::super::security::set_user;
use super::*;
use crate::engine::EngineExt;

const LOGIN: &str = "holdfast:pw@";

impl Nodes {
    /// Creates the user on each node.
    async fn set_users(&self) {
        for node in &self.0 {
            set_user(&mut node.other().await, "pw", &[]).await;
        }
    }
}

#[tokio::test]
async fn a_right_that_is_missing_on_one_node_is_named() {
    let Some(nodes) = Nodes::start(3).await else { return };
    nodes.set_users().await;
    let also: [Missing; 1] = [(&["-zscore"], "ZSCORE")];
    for node in &nodes.0[1..] {
        missing_rights_are_named(node, &[], &also, async || {
            QuorumEngine::connect(nodes.config_for(LOGIN, &with_long_timeout())).await
        })
        .await;
    }
}

#[tokio::test]
async fn a_node_that_evicts_locks_is_reported() {
    let Some(nodes) = Nodes::start(3).await else { return };
    let node = &nodes.0[2];
    eviction_is_reported(node, &node.address(), async |settings: &Settings| {
        QuorumEngine::connect(nodes.config_for("", settings)).await
    })
    .await;
}

/// A majority still grants locks. The node keeps no vote that it could not remove.
#[tokio::test]
async fn a_node_that_refuses_scripts_keeps_no_votes() {
    let Some(nodes) = Nodes::start(3).await else { return };
    nodes.set_users().await;
    let ours = QuorumEngine::connect(nodes.config_for(LOGIN, &with_long_timeout()))
        .await
        .unwrap();
    let pair = async |name: &str| {
        let claim = claim(name);
        acquire(&ours, &claim).await;
        release(&ours, &claim).await;
    };
    for _ in 0..3 {
        pair("before").await;
        nodes.are_free(&[0, 1, 2], "before").await;
    }
    let mut other = nodes.other(0).await;
    // Two scripts of the check, and at most two for each pair: plain commands acquire.
    let stats: String = other.run("INFO commandstats").await;
    let scripts = stats.lines().filter(|line| line.starts_with("cmdstat_eval"));
    let calls = |line: &str| -> Option<u32> { line.split(['=', ',']).nth(1)?.parse().ok() };
    let scripts: u32 = scripts.filter_map(calls).sum();
    assert!(scripts < 2 + 2 * 3, "{stats}");
    other.run::<()>("ACL SETUSER holdfast -eval -evalsha").await;
    // The first vote may be one of plain commands: the node has refused nothing yet.
    pair("first").await;
    eventually("a refusal", async || {
        let log: Vec<::redis::Value> = other.run("ACL LOG").await;
        !log.is_empty()
    })
    .await;
    // Gives the engine time to read the refusal.
    for _ in 0..20 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let held = claim("held");
    acquire(&ours, &held).await;
    for name in ["a", "b", "c"] {
        pair(name).await;
    }
    let left: Vec<String> = other.run("KEYS lock:*").await;
    assert!(left.is_empty() || left == ["lock:first"], "{left:?}");

    // Without a majority an attempt fails, and leaves nothing on the other nodes either.
    nodes
        .other(1)
        .await
        .run::<()>("ACL SETUSER holdfast -eval -evalsha")
        .await;
    assert!(ours.release(&held, Duration::ZERO).await.is_err());
    for name in ["d", "e"] {
        let error = ours.try_acquire(&claim(name)).await.unwrap_err();
        assert!(!error.retryable && error.to_string().contains("NOPERM"), "{error}");
        nodes.are_free(&[0, 1, 2], name).await;
    }
    for node in [0, 1] {
        nodes
            .other(node)
            .await
            .run::<()>("ACL SETUSER holdfast +eval +evalsha")
            .await;
    }
    acquire_soon(&ours, &claim("after")).await;
}
