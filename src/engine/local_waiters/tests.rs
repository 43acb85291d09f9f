//! Checks in time, and grants that have ended.

use super::*;

#[tokio::test(start_paused = true)]
async fn a_lease_end_that_a_heartbeat_reports_is_checked_in_time() {
    let waiters = Arc::new(LocalWaiters::<()>::new());
    let (owner, key) = (OwnerToken::fresh(), Key::new("n").unwrap());
    assert!(waiters.enter(&owner, &key, 1, Some(Duration::from_secs(30)), || ()));
    let began = Instant::now();
    let mut sent = Vec::new();
    let heartbeats = waiters.run_heartbeats(|names| {
        assert_eq!(names, std::slice::from_ref(&key));
        sent.push(began.elapsed());
        // The answer arrives after the task sleeps again.
        let (waiters, key) = (waiters.clone(), key.clone());
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_millis(5)).await;
            waiters.set_lease_end(&key, Some(Duration::from_millis(300)));
        });
    });
    let _ = tokio::time::timeout(HEARTBEAT_INTERVAL + Duration::from_millis(500), heartbeats).await;
    assert_eq!(sent.len(), 2, "{sent:?}");
    assert!(
        sent[0] >= HEARTBEAT_INTERVAL && sent[1] < HEARTBEAT_INTERVAL + Duration::from_millis(310),
        "{sent:?}"
    );
}

#[cfg(any(feature = "mysql", feature = "postgres"))]
#[tokio::test(start_paused = true)]
async fn a_name_is_due_soon_after_half_of_its_time() {
    let waiters = Arc::new(LocalWaiters::<()>::new());
    for (name, seconds) in [("a", 2), ("b", 4)] {
        let left = Some(Duration::from_secs(seconds));
        let _ = waiters.enter(&OwnerToken::fresh(), &Key::new(name).unwrap(), 1, left, || ());
    }
    assert!(waiters.due_soon().is_empty());
    tokio::time::advance(Duration::from_millis(1100)).await;
    assert_eq!(waiters.due_soon(), [Key::new("a").unwrap()]);
    waiters.set_lease_end(&Key::new("a").unwrap(), Some(Duration::from_secs(4)));
    tokio::time::advance(Duration::from_millis(1100)).await;
    assert_eq!(waiters.due_soon(), [Key::new("b").unwrap()]);
}

#[tokio::test(start_paused = true)]
async fn a_grant_that_has_ended_is_not_taken_and_its_waiter_keeps_its_number() {
    use crate::clock::Moment;
    use crate::engine::Subscription;
    use crate::model::Fence;
    let waiters = Arc::new(LocalWaiters::<()>::new());
    let (owner, key) = (OwnerToken::fresh(), Key::new("n").unwrap());
    let mut subscription = waiters.subscribe(&owner);
    let _ = waiters.enter(&owner, &key, 7, None, || ());
    let (fence, second) = (Fence(1), Duration::from_secs(1));
    let hand_off = || HandOff {
        fence,
        until: Moment::now() + second,
    };
    assert!(waiters.grant(&owner, hand_off()));
    tokio::time::advance(second).await;
    subscription.changed().await;
    assert_eq!(subscription.take_hand_off(), None);
    assert_eq!(waiters.number(&owner), 7);
    let fresh = hand_off();
    assert!(waiters.grant(&owner, fresh));
    assert_eq!(subscription.take_hand_off(), Some(fresh));
    assert_eq!(waiters.number(&owner), 0);
    assert!(!waiters.grant(&OwnerToken::fresh(), fresh), "unknown");
    assert!(waiters.has_taken(&owner));
    tokio::time::advance(TAKEN_KEPT + second).await;
    assert!(!waiters.has_taken(&owner) && waiters.state.lock().taken.is_empty());
}

#[cfg(feature = "mongodb")]
#[tokio::test(start_paused = true)]
async fn a_waiter_whose_attempt_releases_what_it_holds_takes_no_grant() {
    use crate::clock::Moment;
    use crate::engine::Subscription;
    use crate::model::Fence;
    let waiters = Arc::new(LocalWaiters::<()>::new());
    let owner = OwnerToken::fresh();
    let mut subscription = waiters.subscribe(&owner);
    let hand_off = HandOff {
        fence: Fence(1),
        until: Moment::now() + Duration::from_secs(1),
    };
    assert!(waiters.grant(&owner, hand_off));
    subscription.changed().await;
    waiters.confirm_hand_offs(&owner);
    assert_eq!(subscription.take_hand_off(), None, "before");
    assert!(waiters.grant(&owner, hand_off));
    subscription.changed().await;
    assert_eq!(subscription.take_hand_off(), None, "after");
}
