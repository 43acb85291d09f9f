//! Hand-offs: the transaction that releases a name makes the first waiter the holder, and its process finds that when it polls.

use super::*;
use crate::engine::{EngineExt, Subscription, WAITER_LIVENESS};
use crate::model::{Fence, Ttl};

/// Waits for a hand-off: a grant in the process that hands off, and otherwise an attempt. Returns its token.
async fn granted(engine: &Arc<ServerEngine>, waiter: &Claim, subscription: &mut Box<dyn Subscription>) -> Fence {
    notified(subscription).await;
    match subscription.take_hand_off() {
        Some(hand_off) => hand_off.fence,
        None => fence(engine, waiter).await,
    }
}

/// Enters the queue of `n`.
async fn enqueue(engine: &Arc<ServerEngine>, waiter: &Claim) -> Box<dyn Subscription> {
    let subscription = engine.subscribe(waiter, &key("n")).await.unwrap();
    busy(engine, waiter).await;
    subscription
}

impl Database {
    /// Whether `n` has this owner.
    async fn is_owned_by(&mut self, owner: &str) -> bool {
        let text = format!("SELECT COUNT(*) FROM locks WHERE name = 'n' AND owner = '{owner}'");
        self.number(&text).await == 1
    }
}

#[tokio::test]
async fn a_release_makes_the_first_waiter_the_holder() {
    let Some(mut database) = Database::create().await else {
        return;
    };
    let (ours, theirs) = (database.engine().await, database.engine().await);
    let (holder, next) = (claim(&["n"]), waiting(&["n"]));
    let before = fence(&ours, &holder).await;
    let mut subscription = enqueue(&theirs, &next).await;
    assert_eq!(release(&ours, &holder).await, Released::Freed);
    assert!(
        database.is_owned_by(next.owner.as_str()).await,
        "in the same transaction"
    );
    let held = ours.inspect(&key("n")).await.unwrap().unwrap();
    assert!(held.remaining.unwrap() <= WAITER_LIVENESS);
    notified(&mut subscription).await;
    assert_eq!(
        subscription.take_hand_off(),
        None,
        "what a check reads may not be on the disk yet"
    );
    let fence = fence(&theirs, &next).await;
    assert!(fence > before);
    assert_eq!(held.fence, Some(fence), "the attempt confirms the grant");
    let info = ours.inspect(&key("n")).await.unwrap().unwrap();
    assert_eq!((info.fence, info.waiting), (Some(fence), Some(0)));
    assert_eq!(info.holder.unwrap().process, *next.process);
    assert!(ours.inspect(&key("n")).await.unwrap().unwrap().remaining.unwrap() > LONG / 2);
    assert_eq!(release(&theirs, &next).await, Released::Freed);
    assert_eq!(database.number("SELECT SUM(queued) FROM locks").await, 0);
    assert_eq!(database.number("SELECT COUNT(*) FROM locks_waiters").await, 0);
}

#[tokio::test]
async fn expired_forced_and_cancelled_leases_are_handed_off_too() {
    let Some(database) = Database::create().await else {
        return;
    };
    let (ours, theirs) = (database.engine().await, database.engine().await);
    let mut holder = claim(&["n"]);
    holder.ttl = Ttl::clamped(Duration::from_secs(3));
    let before = fence(&ours, &holder).await;
    let (first, second, third) = (waiting(&["n"]), waiting(&["n"]), waiting(&["n"]));
    let mut first_subscription = enqueue(&theirs, &first).await;
    let mut second_subscription = enqueue(&ours, &second).await;
    let mut third_subscription = enqueue(&theirs, &third).await;
    let expired = granted(&theirs, &first, &mut first_subscription).await;
    assert!(expired > before);
    assert!(ours.force_release(&key("n")).await.unwrap());
    let forced = granted(&ours, &second, &mut second_subscription).await;
    assert!(forced > expired);
    assert_eq!(theirs.renew(&first, first.ttl).await.unwrap(), Renewed::Lost);
    // A call that was cancelled before it took the grant.
    assert_eq!(release(&ours, &second).await, Released::Freed);
    assert!(granted(&theirs, &third, &mut third_subscription).await > forced);
}

/// The process of the waiter misses the whole hand-off. Its position is gone, and a heartbeat shows that.
#[tokio::test]
async fn a_waiter_that_missed_its_hand_off_enters_again_with_its_ticket() {
    let Some(mut database) = Database::create().await else {
        return;
    };
    let (ours, theirs) = (database.engine().await, database.engine().await);
    let (holder, slow, late) = (claim(&["n"]), waiting(&["n"]), waiting(&["n"]));
    acquire(&ours, &holder).await;
    let mut subscription = enqueue(&theirs, &slow).await;
    let ticket = theirs.waiters.known.position(&slow.owner).unwrap().1;
    database
        .execute("DELETE FROM locks_waiters; UPDATE locks SET queued = 0")
        .await;
    busy(&ours, &late).await;
    notified(&mut subscription).await;
    busy(&theirs, &slow).await;
    assert_eq!(theirs.waiters.known.position(&slow.owner).unwrap().1, ticket);
    assert_eq!(release(&ours, &holder).await, Released::Freed);
    assert!(database.is_owned_by(slow.owner.as_str()).await, "before the later one");
}

#[tokio::test]
async fn a_name_is_reserved_for_claims_that_a_hand_off_cannot_grant() {
    let Some(mut database) = Database::create().await else {
        return;
    };
    let (ours, theirs) = (database.engine().await, database.engine().await);
    let mut with_metadata = waiting(&["n"]);
    with_metadata.metadata = Some("1".into());
    for next in [waiting(&["n", "o"]), with_metadata] {
        let holder = claim(&["n"]);
        let before = fence(&ours, &holder).await;
        let mut subscription = enqueue(&theirs, &next).await;
        assert_eq!(release(&ours, &holder).await, Released::Freed);
        notified(&mut subscription).await;
        assert_eq!(subscription.take_hand_off(), None, "{next:?}");
        assert!(database.is_owned_by(&format!("{}-next", next.owner.as_str())).await);
        assert_eq!(ours.inspect(&key("n")).await.unwrap(), None, "it has no holder");
        busy(&ours, &claim(&["n"])).await;
        assert!(fence(&theirs, &next).await > before);
        assert_eq!(release(&theirs, &next).await, Released::Freed);
    }
}
