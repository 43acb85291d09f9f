//! Fencing tokens over shifting majorities, wiped and restarted nodes; and what a grant costs.

use super::*;

/// Whichever minority is away, and although each node that was away comes back empty.
#[tokio::test]
async fn tokens_grow_across_any_sequence_of_majorities_with_wiped_minorities() {
    for (size, rounds) in [(3, 12), (5, 8)] {
        let Some(mut nodes) = Nodes::start(size).await else {
            return;
        };
        let engines = [
            nodes.patient(Duration::from_millis(500)).await,
            nodes.patient(Duration::from_millis(500)).await,
        ];
        let mut last = Fence(0);
        let mut away: Vec<usize> = Vec::new();
        for round in 0..rounds {
            for node in away.drain(..) {
                nodes.0[node].restart().await;
            }
            // Every minority in turn.
            away = (0..size / 2).map(|step| (round * (size / 2) + step) % size).collect();
            for node in &away {
                nodes.0[*node].stop();
            }
            for engine in &engines {
                let ours = claim("n");
                let fence = take_soon(engine, &ours).await;
                assert!(fence > last, "{size} nodes, round {round}: {fence:?} after {last:?}");
                last = fence;
                free(engine, &ours).await;
            }
        }
    }
}

/// Far ahead of every clock, so that only the counters speak.
const AHEAD: u64 = 9_000_000_000_000_000;

#[tokio::test]
async fn where_nodes_disagree_the_largest_is_written_back_to_a_majority() {
    let Some(mut nodes) = Nodes::start(3).await else { return };
    let ours = nodes.patient(Duration::from_millis(500)).await;
    nodes.count(0, "n", AHEAD).await;
    nodes.0[2].stop();
    let first = claim("n");
    let fence = take_soon(&ours, &first).await;
    assert_eq!(fence, Fence(AHEAD + 1));
    assert_eq!(nodes.counts(&[0, 1], "n").await, [Some(fence.0); 2]);
    for node in [0, 1] {
        let record = nodes.record(node, "n").await;
        let told = format!("{} {} ", fence.0, first.owner.as_str());
        assert!(record.starts_with(&told), "{record}");
    }
    assert_eq!(ours.inspect(&key("n")).await.unwrap().unwrap().fence, Some(fence));
    free(&ours, &first).await;
    // The node that knew it first is gone, and one that never did is back.
    nodes.0[0].stop();
    nodes.0[2].restart().await;
    let second = claim("n");
    assert_eq!(take_soon(&ours, &second).await, Fence(AHEAD + 2));
    free(&ours, &second).await;
}

/// A set of names has one fence, larger than those of all its names on all nodes.
#[tokio::test]
async fn the_fence_of_a_set_is_agreed_on_for_all_its_names() {
    let Some(nodes) = Nodes::start(3).await else { return };
    let ours = nodes.engine().await;
    for (node, name, fence) in [(0, "a", AHEAD + 5), (1, "b", AHEAD + 9), (2, "a", AHEAD + 7)] {
        nodes.count(node, name, fence).await;
    }
    let set = Claim::new(
        &[key("a"), key("b")],
        OwnerToken::fresh(),
        Ttl::clamped(LONG),
        Arc::new(Process::current()),
    );
    let fence = take(&ours, &set).await;
    assert!(fence >= Fence(AHEAD + 8), "{fence:?}");
    for name in ["a", "b"] {
        assert_eq!(
            ours.inspect(&key(name)).await.unwrap().unwrap().fence,
            Some(fence),
            "{name}"
        );
    }
    free(&ours, &set).await;
    for name in ["a", "b"] {
        assert!(take(&ours, &claim(name)).await > fence, "{name}");
    }
}

/// A node whose disk lost the last writes comes back with an older fence; the one that knows better is away.
#[tokio::test]
async fn a_node_that_comes_back_with_old_data_makes_no_old_token() {
    let Some(mut nodes) = Nodes::start(3).await else { return };
    nodes.0[2].stop();
    let ours = nodes.patient(Duration::from_millis(500)).await;
    let first = claim("n");
    let old = take_soon(&ours, &first).await;
    free(&ours, &first).await;
    let data = nodes.counts(&[0], "n").await[0].unwrap();
    let second = claim("n");
    let fence = take(&ours, &second).await;
    assert!(fence > old);
    free(&ours, &second).await;
    // Longer than nodes' clocks may differ for a request to count as punctual.
    tokio::time::sleep(Duration::from_millis(150)).await;
    nodes.count(0, "n", data).await;
    nodes.0[1].stop();
    nodes.0[2].restart().await;
    assert!(take_soon(&ours, &claim("n")).await > fence);
}

/// A floor that is not what a node's own clock shows does not count.
#[tokio::test]
async fn a_wrong_idea_of_the_clocks_does_not_get_into_a_token() {
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

/// A grant is one round trip where the nodes agree, and two where they do not.
#[tokio::test]
async fn a_grant_is_one_round_trip_as_a_rule() {
    const ROUNDS: i64 = 50;
    let Some(nodes) = Nodes::start(3).await else { return };
    let engine = nodes.engine().await;
    // The scripts are known from here on.
    let warm = claim("warm");
    take(&engine, &warm).await;
    free(&engine, &warm).await;
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
            take(&engine, &ours).await;
            // A vote that is answered after the release has begun would be taken back once more.
            nodes.all_have(&[0, 1, 2], &name).await;
            tokio::time::sleep(Duration::from_millis(1)).await;
            free(&engine, &ours).await;
        }
    }
    let (least, needed) = if by_lanes() {
        // The releases; and what is told of a grant, unless it was released before that was written down.
        (2 * ROUNDS, 4 * ROUNDS)
    } else {
        (4 * ROUNDS, 4 * ROUNDS)
    };
    let used = calls().await - before;
    // A few more on a machine that is busy: a request that was late to a node counts by that node's clock.
    assert!(
        used >= least && used <= needed + ROUNDS / 2,
        "{used} calls for {needed}"
    );
}
