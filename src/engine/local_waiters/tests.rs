//! Checks in time, and grants that have ended.

use super::*;
use crate::model::Process;
use crate::stall_detector::StallDetector;

fn claim(key: &Key, ttl: Duration) -> Claim {
    let process = Arc::new(Process::current());
    Claim::new(
        std::slice::from_ref(key),
        OwnerToken::fresh(),
        Ttl::clamped(ttl),
        process,
    )
}

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
    let key = Key::new("n").unwrap();
    let claim = claim(&key, Duration::from_secs(30));
    let (owner, mut subscription) = (claim.owner.clone(), waiters.subscribe(&claim));
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

#[tokio::test(start_paused = true)]
async fn a_waiter_whose_attempt_releases_what_it_holds_takes_no_grant() {
    use crate::clock::Moment;
    use crate::engine::Subscription;
    use crate::model::Fence;
    let waiters = Arc::new(LocalWaiters::<()>::new());
    let claim = claim(&Key::new("n").unwrap(), Duration::from_secs(30));
    let (owner, mut subscription) = (claim.owner.clone(), waiters.subscribe(&claim));
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

#[tokio::test(start_paused = true)]
async fn no_heartbeats_are_sent_for_an_event_loop_that_has_not_responded_for_a_third_of_the_ttl() {
    let waiters = Arc::new(LocalWaiters::<()>::new());
    let detector = Arc::new(StallDetector::new(|| {}));
    let _ = waiters.stall_detector.set(detector.clone());
    let mut subscriptions = Vec::new();
    for (name, ttl_s) in [("short", 3), ("long", 30)] {
        let key = Key::new(name).unwrap();
        let claim = claim(&key, Duration::from_secs(ttl_s));
        subscriptions.push(waiters.subscribe(&claim));
        let _ = waiters.enter(&claim.owner, &key, 1, None, || ());
    }
    let sent = Mutex::new(HashMap::<String, u32>::new());
    let count = |name: &str| sent.lock().get(name).copied().unwrap_or_default();
    let mut heartbeats = Box::pin(waiters.run_heartbeats(|names| {
        for name in names {
            *sent.lock().entry(name.as_str().to_owned()).or_default() += 1;
        }
    }));
    let _ = tokio::time::timeout(Duration::from_secs(7), &mut heartbeats).await;
    assert_eq!(count("short"), 1, "the first one sends the ping");
    assert_eq!(count("long"), 3);
    let _ = tokio::time::timeout(Duration::from_secs(10), &mut heartbeats).await;
    let before = count("long");
    assert!(before < 8, "{before}");
    detector.responded();
    let _ = tokio::time::timeout(Duration::from_secs(3), &mut heartbeats).await;
    assert_eq!((count("short"), count("long")), (2, before + 2));
}
