//! A slot that moves for long, because the move was interrupted: no node has all keys of a name.

use super::cluster_nodes::{Nodes, home, slot_of_name};
use super::*;
use crate::engine::redis::tests::renewal::renew_all;
use crate::engine::{EngineExt, Renewed};

#[tokio::test]
async fn a_held_name_of_a_slot_that_moves_is_read_renewed_and_released() {
    let Some(nodes) = Nodes::start(0).await else { return };
    let ours = nodes.engine().await;
    let slot = slot_of_name("{n}");
    let (from, to) = (home(slot), (home(slot) + 1) % 3);
    for is_half_moved in [false, true] {
        let (mut held, beside) = (claim("{n}"), claim("{n}2"));
        held.metadata = Some("1".into());
        acquire(&ours, &held).await;
        acquire(&ours, &beside).await;
        nodes.open(slot, from, to).await;
        if is_half_moved {
            // The lock key moves. Its companions stay.
            let port = nodes.nodes[to].port.to_string();
            let mut source = nodes.nodes[from].other().await;
            let moved = ["MIGRATE", "127.0.0.1", &port, "lock:{n}", "0", "5000"];
            assert_eq!(source.args::<String>(&moved).await, "OK");
        }
        let info = ours.inspect(&held.keys()[0]).await.unwrap().expect("a holder");
        assert_eq!(info.holder.is_some_and(|holder| holder.is_known()), !is_half_moved);
        let answers = renew_all(&ours, &[held.clone(), beside.clone()], LONG * 3).await;
        assert!(
            answers.iter().all(|answer| matches!(answer, Ok(Renewed::Extended))),
            "{answers:?}"
        );
        let info = ours.inspect(&held.keys()[0]).await.unwrap().expect("a holder");
        assert!(
            info.remaining.is_some_and(|left| left > LONG * 2),
            "{:?}",
            info.remaining
        );
        assert_eq!(
            ours.release(&claim("{n}"), Duration::ZERO).await.unwrap(),
            Released::NotHeld,
            "another owner"
        );
        release(&ours, &held).await;
        release(&ours, &beside).await;
        // No node has all keys of a free name: the error says what to do.
        let error = ours.try_acquire(&claim("{n}")).await.unwrap_err();
        assert!(error.retryable, "{error}");
        let error = error.to_string();
        assert!(error.contains("TRYAGAIN") && error.contains("--cluster fix"), "{error}");
        let mut source = nodes.nodes[from].other().await;
        source.run::<()>(&format!("CLUSTER SETSLOT {slot} STABLE")).await;
        let mut target = nodes.nodes[to].other().await;
        target.run::<()>(&format!("CLUSTER SETSLOT {slot} STABLE")).await;
        let next = claim("{n}");
        acquire(&ours, &next).await;
        release(&ours, &next).await;
    }
}
