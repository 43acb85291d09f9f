//! Leases of hand-offs, and releases that the store executes late.

use std::sync::Mutex;
use std::sync::atomic::Ordering::SeqCst;

use super::faults::Fault;
use super::*;
use crate::service::{Event, EventKind};

/// Returns a service whose store grants with the release, the lease of a call that waited there, and what it emitted.
async fn handed_off(options: AcquireOptions) -> (Arc<Faulty>, Locks, Arc<Lease>, Arc<Mutex<Vec<EventKind>>>) {
    let engine = Arc::new(Faulty::new(OwnerToken::fresh().as_str()));
    engine.hands_off.store(true, SeqCst);
    let seen = Arc::new(Mutex::new(Vec::new()));
    let emitted = seen.clone();
    let sink = move |event: Event| emitted.lock().unwrap().push(event.kind);
    let detector = Arc::new(StallDetector::default());
    let locks = Locks::new(engine.clone(), STORE_TIMEOUT, detector, Some(Arc::new(sink)));
    let other = another(&engine);
    let held = take(&other, "n", AcquireOptions::default()).await;
    let (lease, ()) = tokio::join!(take(&locks, "n", options), async {
        settle().await;
        other.release(&held).await.unwrap();
    });
    assert_eq!(engine.attempts.load(SeqCst), 2, "one for each lease");
    (engine, locks, lease, seen)
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_was_handed_off_is_extended_to_its_ttl() {
    for renew in [false, true] {
        let options = AcquireOptions {
            renew,
            ..options(30_000, 60_000)
        };
        let (engine, locks, lease, seen) = handed_off(options).await;
        assert!(lease.remaining() <= ms(1978), "{:?}", lease.remaining());
        assert_eq!(engine.renewals.load(SeqCst), 0);
        tokio::time::sleep(ms(15)).await;
        assert!(lease.remaining() > ms(29_600), "{:?}", lease.remaining());
        assert_eq!(engine.renewals.load(SeqCst), 1);
        assert_eq!((locks.stats().acquired, locks.stats().renewed), (1, 0));
        assert_eq!(*seen.lock().unwrap(), [EventKind::Waiting, EventKind::Acquired]);
        tokio::time::sleep(ms(20_000)).await;
        assert_eq!(engine.renewals.load(SeqCst) > 1, renew);
        assert!(locks.release(&lease).await.unwrap());
    }
}

#[tokio::test(start_paused = true)]
async fn a_hand_off_that_is_received_after_its_end_is_granted_too_late() {
    let engine = Arc::new(Faulty::new(OwnerToken::fresh().as_str()));
    engine.hands_off.store(true, SeqCst);
    engine.hands_off_late.store(true, SeqCst);
    let (other, locks) = (another(&engine), another(&engine));
    let held = take(&other, "n", AcquireOptions::default()).await;
    let (outcome, ()) = tokio::join!(attempt(&locks, "n", options(30_000, 3)), async {
        settle().await;
        other.release(&held).await.unwrap();
    });
    let error = outcome.unwrap_err();
    assert!(
        error.message.contains("granted too late") && error.message.contains("of its lease, which is short at first"),
        "{error}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_release_right_after_a_hand_off_is_the_only_command() {
    let (engine, locks, lease, _) = handed_off(options(30_000, 60_000)).await;
    assert!(locks.release(&lease).await.unwrap());
    tokio::time::sleep(ms(100)).await;
    assert_eq!(engine.renewals.load(SeqCst), 0);
    assert_eq!(engine.attempts.load(SeqCst), 2);
}

#[tokio::test(start_paused = true)]
async fn a_release_does_not_wait_for_the_extension_of_a_hand_off() {
    let (engine, locks, lease, _) = handed_off(options(30_000, 60_000)).await;
    engine.set(Fault::HangOne);
    tokio::time::sleep(ms(15)).await;
    assert_eq!(engine.renewals.load(SeqCst), 1);
    let started = tokio::time::Instant::now();
    assert!(locks.release(&lease).await.unwrap());
    assert_eq!(started.elapsed(), ms(0));
    assert!(!held_in_store(&engine, "n").await);
}

#[tokio::test(start_paused = true)]
async fn a_hand_off_that_cannot_be_extended_is_lost_at_its_end() {
    let options = AcquireOptions {
        renew: false,
        ..options(30_000, 60_000)
    };
    let (engine, locks, lease, _) = handed_off(options).await;
    // Executed, but the answers are lost: the store has the lease for its ttl.
    engine.set(Fault::LoseReply);
    tokio::time::sleep(ms(1900)).await;
    assert!(lease.is_held());
    tokio::time::sleep(ms(90)).await;
    let loss = lease.loss().unwrap();
    assert!(
        loss.message.contains("it could not be renewed in time"),
        "{}",
        loss.message
    );
    settle().await;
    assert!(!held_in_store(&engine, "n").await, "it is released in the background");
    assert_eq!(locks.stats().lost, 1);
}

#[tokio::test(start_paused = true)]
async fn a_hand_off_survives_a_first_renewal_without_an_answer() {
    let options = AcquireOptions {
        renew: false,
        stall_limit: Duration::ZERO,
        ..options(30_000, 60_000)
    };
    let (engine, _, lease, _) = handed_off(options).await;
    engine.set(Fault::HangOne);
    tokio::time::sleep(ms(1900)).await;
    assert!(
        lease.is_held() && lease.remaining() > ms(27_000),
        "{:?}",
        lease.remaining()
    );
    assert!(held_in_store(&engine, "n").await);
}

#[tokio::test(start_paused = true)]
async fn an_extension_of_a_hand_off_does_not_replace_the_ttl() {
    let (_, locks, lease, seen) = handed_off(options(30_000, 60_000)).await;
    locks.extend(&lease, Ttl::clamped(ms(1000))).await.unwrap();
    assert!(lease.remaining() > ms(29_600), "{:?}", lease.remaining());
    assert_eq!(locks.stats().renewed, 1);
    assert_eq!(seen.lock().unwrap().last(), Some(&EventKind::Renewed));
}

#[tokio::test(start_paused = true)]
async fn a_job_that_ended_before_its_lease_is_no_loss_although_its_release_is_executed_after_it() {
    let (engine, locks, lease, seen) = handed_off(options(30_000, 60_000)).await;
    engine.set(Fault::Stall(2500));
    assert!(lease.is_held());
    assert!(locks.release(&lease).await.unwrap(), "it was held until the call");
    assert_eq!((locks.stats().released, locks.stats().lost), (1, 0));
    assert_eq!(seen.lock().unwrap().last(), Some(&EventKind::Released));
    engine.set(Fault::None);
    assert!(!is_busy(&locks, "n").await);

    // The minimum hold counts, although the lease has expired.
    let min_hold = AcquireOptions {
        min_hold: ms(10_000),
        ..options(1000, 0)
    };
    let lease = take(&locks, "kept", min_hold).await;
    engine.set(Fault::Stall(1500));
    assert!(locks.release(&lease).await.unwrap());
    engine.set(Fault::None);
    tokio::time::sleep(ms(2000)).await;
    assert!(is_busy(&locks, "kept").await);
}

#[tokio::test(start_paused = true)]
async fn a_lock_that_is_gone_before_the_end_of_its_lease_is_a_loss_at_its_release() {
    let (engine, locks, lease, seen) = handed_off(options(30_000, 60_000)).await;
    engine.store().force_release(&key("n")).await.unwrap();
    engine.set(Fault::Stall(100));
    assert!(!locks.release(&lease).await.unwrap());
    assert_eq!((locks.stats().released, locks.stats().lost), (0, 1));
    assert_eq!(seen.lock().unwrap().last(), Some(&EventKind::Lost));
}
