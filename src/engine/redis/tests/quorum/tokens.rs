//! Fencing tokens with changing majorities and nodes that lose their data, and the number of requests for a grant.

use super::*;
use crate::engine::EngineExt;

/// For any minority that is down, although each of its nodes returns without data.
#[tokio::test]
async fn tokens_grow_across_any_sequence_of_majorities_with_wiped_minorities() {
    for (size, rounds) in [(3, 12), (5, 8)] {
        let Some(mut nodes) = Nodes::start(size).await else {
            return;
        };
        let engines = [
            nodes.with_node_timeout(Duration::from_millis(2500)).await,
            nodes.with_node_timeout(Duration::from_millis(2500)).await,
        ];
        let mut last = Fence(0);
        let mut away: Vec<usize> = Vec::new();
        for round in 0..rounds {
            for node in away.drain(..) {
                nodes.0[node].restart().await;
            }
            // One minority after the other.
            away = (0..size / 2).map(|step| (round * (size / 2) + step) % size).collect();
            for node in &away {
                nodes.0[*node].stop();
            }
            for engine in &engines {
                let ours = claim("n");
                let fence = acquire_soon(engine, &ours).await;
                assert!(fence > last, "{size} nodes, round {round}: {fence:?} after {last:?}");
                last = fence;
                release(engine, &ours).await;
            }
        }
    }
}

/// Larger than every clock, so that only the counters decide.
const AHEAD: u64 = 9_000_000_000_000_000;

#[tokio::test]
async fn the_largest_of_different_proposals_is_written_to_a_majority() {
    let Some(mut nodes) = Nodes::start(3).await else { return };
    let ours = nodes.with_node_timeout(Duration::from_millis(2500)).await;
    nodes.set_last_fence(0, "n", AHEAD).await;
    nodes.0[2].stop();
    let first = claim("n");
    let fence = acquire_soon(&ours, &first).await;
    assert_eq!(fence, Fence(AHEAD + 1));
    assert_eq!(nodes.last_fences(&[0, 1], "n").await, [Some(fence.0); 2]);
    for node in [0, 1] {
        let record = nodes.record(node, "n").await;
        let start = format!("{} {} ", fence.0, first.owner.as_str());
        assert!(record.starts_with(&start), "{record}");
    }
    assert_eq!(ours.inspect(&key("n")).await.unwrap().unwrap().fence, Some(fence));
    release(&ours, &first).await;
    // The node that knew it first is down, and one that never knew it is back.
    nodes.0[0].stop();
    nodes.0[2].restart().await;
    let second = claim("n");
    assert_eq!(acquire_soon(&ours, &second).await, Fence(AHEAD + 2));
    release(&ours, &second).await;
}

/// A set of names has one token, larger than the last tokens of its names on the nodes that voted.
#[tokio::test]
async fn the_fence_of_a_set_is_agreed_on_for_all_its_names() {
    let Some(nodes) = Nodes::start(3).await else { return };
    let ours = nodes.engine().await;
    for (node, name, fence) in [(0, "a", AHEAD + 5), (1, "b", AHEAD + 9), (2, "a", AHEAD + 7)] {
        nodes.set_last_fence(node, name, fence).await;
    }
    let set = Claim::new(
        &[key("a"), key("b")],
        OwnerToken::fresh(),
        Ttl::clamped(LONG),
        Arc::new(Process::current()),
    );
    let fence = acquire(&ours, &set).await;
    assert!(fence >= Fence(AHEAD + 8), "{fence:?}");
    for name in ["a", "b"] {
        assert_eq!(
            ours.inspect(&key(name)).await.unwrap().unwrap().fence,
            Some(fence),
            "{name}"
        );
    }
    release(&ours, &set).await;
    for name in ["a", "b"] {
        assert!(acquire(&ours, &claim(name)).await > fence, "{name}");
    }
}

/// A node whose disk lost the last writes returns with an older token, while the node with the last one is down.
#[tokio::test]
async fn a_node_that_returns_with_old_data_creates_no_old_token() {
    let Some(mut nodes) = Nodes::start(3).await else { return };
    nodes.0[2].stop();
    let ours = nodes.with_node_timeout(Duration::from_millis(2500)).await;
    let first = claim("n");
    let old = acquire_soon(&ours, &first).await;
    release(&ours, &first).await;
    let data = nodes.last_fences(&[0], "n").await[0].unwrap();
    let second = claim("n");
    let fence = acquire(&ours, &second).await;
    assert!(fence > old);
    release(&ours, &second).await;
    // Longer than the limit for the difference of a floor and a node's clock.
    tokio::time::sleep(Duration::from_millis(150)).await;
    nodes.set_last_fence(0, "n", data).await;
    nodes.0[1].stop();
    nodes.0[2].restart().await;
    assert!(acquire_soon(&ours, &claim("n")).await > fence);
}

/// A floor that differs from a node's clock does not count.
#[tokio::test]
async fn a_wrong_estimate_of_the_clocks_does_not_become_a_token() {
    let Some(nodes) = Nodes::start(3).await else { return };
    let mut other = nodes.other(0).await;
    let script = include_str!("../../quorum/scripts/acquire.lua");
    let counter = counter("n");
    for floor in ["0", "1", &AHEAD.to_string()] {
        let owner = OwnerToken::fresh();
        let call = [
            "EVAL",
            script,
            "3",
            "lock:n",
            "holdfast:fence:{lock:n}",
            &counter,
            owner.as_str(),
            "1",
            "1",
            "60000",
            floor,
            "1",
            "h",
        ];
        let answer: Vec<i64> = other.args(&call).await;
        assert_eq!(answer[0], 1);
        assert!(answer[1].abs_diff(answer[2]) < 1_000_000, "{answer:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// A grant takes one round trip if the nodes agree, and otherwise two.
#[tokio::test]
async fn a_grant_is_usually_one_round_trip() {
    const ROUNDS: i64 = 50;
    let Some(nodes) = Nodes::start(3).await else { return };
    let engine = nodes.engine().await;
    // The nodes know the scripts from here on.
    let warm = claim("warm");
    acquire(&engine, &warm).await;
    release(&engine, &warm).await;
    let calls = async || {
        let mut most = 0;
        for node in 0..3 {
            let stats: String = nodes.other(node).await.run("INFO commandstats").await;
            let line = stats
                .lines()
                .find_map(|line| line.strip_prefix("cmdstat_evalsha:calls="));
            let count: i64 = line
                .and_then(|line| line.split(',').next())
                .map_or(0, |count| count.parse().unwrap());
            most = most.max(count);
        }
        most
    };
    let before = calls().await;
    for round in 0..ROUNDS {
        // The same name, and one that was never used.
        for name in ["n".to_owned(), format!("once {round}")] {
            let ours = claim(&name);
            acquire(&engine, &ours).await;
            // A vote that is answered after the begin of the release would need one more rollback.
            nodes.all_have(&[0, 1, 2], &name).await;
            tokio::time::sleep(Duration::from_millis(1)).await;
            release(&engine, &ours).await;
        }
    }
    // The releases, and the records of grants, unless a grant was released before its record was written.
    let (least, needed) = (2 * ROUNDS, 4 * ROUNDS);
    let used = calls().await - before;
    // A few more on a busy machine: a node uses its own clock for a late request.
    assert!(
        used >= least && used <= needed + ROUNDS / 2,
        "{used} calls for {needed}"
    );
}
