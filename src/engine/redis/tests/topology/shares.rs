//! Shared names with replicas and in a cluster.

use super::cluster_nodes::{Nodes, home, slot_of_name};
use super::replicas::{acquire_with_replicas, with_min_replicas};
use super::*;
use crate::engine::Renewed;
use crate::engine::redis::tests::renewal::renew_all;
use crate::engine::redis::tests::shares::{holders, share};
use crate::model::Share;

const HOLDERS: &str = "holdfast:shared:lock:{n}";
const FENCE: &str = "holdfast:fence:{n}holdfast:shared:lock:{n}";
const DAY_MS: i64 = 24 * 60 * 60 * 1000;

#[tokio::test]
async fn a_share_that_no_replica_acknowledged_is_rolled_back() {
    let Some(server) = Server::start(&[]).await else { return };
    let Some(replica) = server.replica(&[]).await else {
        return;
    };
    let ours = with_min_replicas(&server.url(), 1).await;
    let mut other = server.other().await;
    let (holder, mut next) = (share("n", 1, 1), share("n", 1, 1));
    next.waiting = true;
    acquire_with_replicas(&ours, &holder).await;
    let mut subscription = enqueue(&ours, &next).await;
    release(&ours, &holder).await;
    notified(&mut subscription).await;
    assert_eq!(subscription.take_hand_off(), None, "the replicas would not have it");
    assert!(holders(&ours, "n").await.is_empty(), "only reserved");
    acquire_with_replicas(&ours, &next).await;
    release(&ours, &next).await;
    replica.suspend();
    assert!(ours.try_acquire(&holder).await.unwrap_err().retryable);
    let left: i64 = other.run("EXISTS holdfast:shared:lock:n").await;
    assert_eq!(left, 0, "rolled back");
    replica.resume();
}

#[tokio::test]
async fn shares_of_a_slot_that_moves_are_read_renewed_and_released() {
    let Some(nodes) = Nodes::start(0).await else { return };
    let ours = nodes.engine().await;
    let slot = slot_of_name("{n}");
    let (from, to) = (home(slot), (home(slot) + 1) % 3);
    for is_half_moved in [false, true] {
        let shares = [share("{n}", 1, 3), share("{n}", 1, 3), share("{n}", 1, 3)];
        for share in &shares {
            acquire(&ours, share).await;
        }
        nodes.open(slot, from, to).await;
        let mut source = nodes.nodes[from].other().await;
        if is_half_moved {
            // The holders move. The last token stays.
            let port = nodes.nodes[to].port.to_string();
            let moved = ["MIGRATE", "127.0.0.1", &port, HOLDERS, "0", "5000"];
            assert_eq!(source.args::<String>(&moved).await, "OK");
        }
        assert_eq!(holders(&ours, "{n}").await.len(), 3);
        let answers = renew_all(&ours, &shares, LONG * 3).await;
        assert!(
            answers.iter().all(|answer| matches!(answer, Ok(Renewed::Extended))),
            "{answers:?}"
        );
        assert!(
            holders(&ours, "{n}").await[0]
                .remaining
                .is_some_and(|left| left > LONG * 2)
        );
        release(&ours, &shares[0]).await;
        assert_eq!(ours.release(&shares[1], LONG).await.unwrap(), Released::Freed);
        assert_eq!(holders(&ours, "{n}").await.len(), 2, "one is kept");
        assert!(ours.force_release(&key("{n}").shared()).await.unwrap());
        assert!(!ours.force_release(&key("{n}").shared()).await.unwrap());
        let error = ours.try_acquire(&shares[0]).await.unwrap_err();
        assert!(error.retryable && error.to_string().contains("TRYAGAIN"), "{error}");
        source.run::<()>(&format!("CLUSTER SETSLOT {slot} STABLE")).await;
        let mut target = nodes.nodes[to].other().await;
        target.run::<()>(&format!("CLUSTER SETSLOT {slot} STABLE")).await;
        acquire(&ours, &shares[0]).await;
        release(&ours, &shares[0]).await;
    }
}

#[tokio::test]
async fn the_last_token_of_a_shared_name_outlives_its_longest_lease_by_a_day() {
    let Some(nodes) = Nodes::start(0).await else { return };
    let (ours, theirs) = (nodes.engine().await, nodes.engine().await);
    let mut other = nodes.nodes[home(slot_of_name("{n}"))].other().await;
    let lasts = async |other: &mut OtherClient| other.run::<i64>(&format!("PTTL {FENCE}")).await;
    let (mut long, short, mut next) = (share("{n}", 1, 2), share("{n}", 1, 2), share("{n}", 1, 2));
    long.ttl = Ttl::clamped(Duration::from_secs(48 * 60 * 60));
    next.waiting = true;
    acquire(&ours, &long).await;
    let first = acquire(&ours, &short).await;
    assert!(lasts(&mut other).await > 3 * DAY_MS - 60_000);
    let mut subscription = enqueue(&theirs, &next).await;
    release(&ours, &short).await;
    notified(&mut subscription).await;
    let second = subscription.take_hand_off().expect("a grant").fence;
    assert!(second > first);
    assert!(
        lasts(&mut other).await > 3 * DAY_MS - 60_000,
        "a short lease beside a long one"
    );
    assert_eq!(other.run::<u64>(&format!("GET {FENCE}")).await, second.0);
    release(&ours, &long).await;
    release(&theirs, &next).await;
    let left = lasts(&mut other).await;
    assert!((DAY_MS - 60_000..=DAY_MS).contains(&left), "{left}");
    // The clock alone does not make it grow.
    let ahead = second.0 + 3_600_000_000;
    other.run::<()>(&format!("SET {FENCE} {ahead}")).await;
    let mut reader = share("{n}", 1, 1);
    reader.share = Some(Share::READER);
    assert_eq!(acquire(&ours, &reader).await.0, ahead + 1);
    assert_eq!(acquire(&ours, &reader).await.0, ahead + 1, "a retry");
    // A renewal keeps it for a day after the new end.
    reader.ttl = Ttl::clamped(Duration::from_secs(7200));
    assert_eq!(ours.renew(&reader, reader.ttl).await.unwrap(), Renewed::Extended);
    assert!(lasts(&mut other).await > DAY_MS + 3_600_000);
}
