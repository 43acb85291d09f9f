//! Leases: renewal, loss, and their limits.

mod longest;

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use super::faults::Fault;
use super::*;
use crate::service::{Event, EventKind};

fn loss_of(lease: &Arc<Lease>) -> Arc<Mutex<Option<LockError>>> {
    let seen = Arc::new(Mutex::new(None));
    let sink = seen.clone();
    lease.on_loss(Box::new(move |loss| *sink.lock().unwrap() = Some(loss)));
    seen
}

#[tokio::test(start_paused = true)]
async fn a_lease_is_renewed_at_a_third_of_its_ttl() {
    let (engine, locks) = service();
    let lease = take(&locks, "n", options(900, 0)).await;
    tokio::time::sleep(ms(9050)).await;
    assert!(lease.is_held());
    let renewals = engine.renewals.load(SeqCst);
    // At a third, or up to a tenth of it earlier.
    assert!((30..=33).contains(&renewals), "{renewals} renewals in ten ttls");
    assert!(is_busy(&another(&engine), "n").await);
    assert!(locks.release(&lease).await.unwrap());
    tokio::time::sleep(ms(2000)).await;
    assert_eq!(
        engine.renewals.load(SeqCst),
        renewals,
        "a released lease is not renewed"
    );
}

#[tokio::test(start_paused = true)]
async fn the_local_deadline_is_before_the_expiry_in_the_store() {
    let (engine, locks) = service();
    let lease = take(
        &locks,
        "n",
        AcquireOptions {
            renew: false,
            ..options(10_000, 0)
        },
    )
    .await;
    let loss = loss_of(&lease);
    assert!(lease.remaining() <= ms(9898));
    tokio::time::sleep(ms(9890)).await;
    assert!(lease.is_held());
    tokio::time::sleep(ms(20)).await;
    assert!(!lease.is_held());
    settle().await;
    assert_eq!(loss.lock().unwrap().as_ref().unwrap().code, Code::Lost);
    assert!(held_in_store(&engine, "n").await, "it has not expired in the store");
    assert!(
        !locks.release(&lease).await.unwrap(),
        "the lease was lost before the release"
    );
    assert!(
        !held_in_store(&engine, "n").await,
        "the release makes the name free early"
    );
}

#[tokio::test(start_paused = true)]
async fn a_failed_renewal_is_not_a_loss() {
    let (engine, locks) = service();
    for fault in [Fault::Refuse, Fault::Hang, Fault::LoseReply] {
        let lease = take(&locks, "n", options(3000, 0)).await;
        let loss = loss_of(&lease);
        engine.set(fault);
        tokio::time::sleep(ms(2400)).await;
        assert!(lease.is_held(), "{fault:?}");
        engine.set(Fault::None);
        tokio::time::sleep(ms(60_000)).await;
        assert!(lease.is_held(), "{fault:?}");
        assert!(loss.lock().unwrap().is_none(), "{fault:?}");
        assert!(locks.release(&lease).await.unwrap(), "{fault:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_outage_longer_than_the_lease_is_a_loss_in_time() {
    let (engine, locks) = service();
    for fault in [Fault::Refuse, Fault::Hang] {
        let lease = take(&locks, "n", options(3000, 0)).await;
        let loss = loss_of(&lease);
        engine.set(fault);
        tokio::time::sleep(ms(2980)).await;
        let loss = loss
            .lock()
            .unwrap()
            .take()
            .unwrap_or_else(|| panic!("{fault:?}: no loss"));
        assert_eq!((loss.code, loss.key.as_deref()), (Code::Lost, Some("n")));
        assert!(loss.cause.is_some(), "{fault:?}: {loss}");
        assert!(
            held_in_store(&engine, "n").await,
            "{fault:?}: the loss is reported before the lease expires in the store"
        );
        engine.set(Fault::None);
        tokio::time::sleep(ms(5000)).await;
        assert!(
            !held_in_store(&engine, "n").await,
            "{fault:?}: a renewal re-created it, or it was not released"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_deleted_lock_is_lost_at_the_next_renewal() {
    let (engine, locks) = service();
    let lease = take(&locks, "n", options(3000, 0)).await;
    let loss = loss_of(&lease);
    assert!(another(&engine).force_release(&key("n")).await.unwrap());
    tokio::time::sleep(ms(1010)).await;
    assert_eq!(loss.lock().unwrap().as_ref().unwrap().code, Code::Lost);
    assert!(!lease.is_held());
    assert!(!held_in_store(&engine, "n").await);
    assert_eq!(
        locks.extend(&lease, Ttl::clamped(ms(1000))).await.unwrap_err().code,
        Code::Lost
    );
    assert!(!locks.release(&lease).await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn a_loss_is_reported_to_a_sink_that_is_set_later() {
    let (_, locks) = service();
    let lease = take(
        &locks,
        "n",
        AcquireOptions {
            renew: false,
            ..options(100, 0)
        },
    )
    .await;
    tokio::time::sleep(ms(200)).await;
    assert!(loss_of(&lease).lock().unwrap().is_some());
    let released = take(&locks, "m", options(100, 0)).await;
    let loss = loss_of(&released);
    locks.release(&released).await.unwrap();
    tokio::time::sleep(ms(500)).await;
    assert!(loss.lock().unwrap().is_none(), "a release is not a loss");
}

#[tokio::test(start_paused = true)]
async fn max_hold_ends_a_lease_that_is_renewed() {
    let (engine, locks) = service();
    let limited = AcquireOptions {
        max_hold: Some(ms(2000)),
        ..options(900, 0)
    };
    let lease = take(&locks, "n", limited).await;
    tokio::time::sleep(ms(1900)).await;
    assert!(lease.is_held());
    tokio::time::sleep(ms(120)).await;
    assert!(!lease.is_held());
    assert!(lease.loss().unwrap().message.contains("maxHoldMs"));
    tokio::time::sleep(ms(50)).await;
    assert!(!is_busy(&another(&engine), "n").await);
}

#[tokio::test(start_paused = true)]
async fn min_hold_keeps_the_name_busy() {
    let (engine, locks) = service();
    let short = AcquireOptions {
        min_hold: ms(1000),
        ..options(30_000, 0)
    };
    let lease = take(&locks, "n", short.clone()).await;
    tokio::time::sleep(ms(300)).await;
    assert!(locks.release(&lease).await.unwrap());
    assert!(!lease.is_held());
    let other = another(&engine);
    tokio::time::sleep(ms(650)).await;
    assert!(is_busy(&other, "n").await);
    tokio::time::sleep(ms(60)).await;
    assert!(!is_busy(&other, "n").await);
    tokio::time::sleep(ms(100)).await;
    let lease = take(&locks, "n", short).await;
    tokio::time::sleep(ms(1100)).await;
    assert!(locks.release(&lease).await.unwrap());
    assert!(
        !is_busy(&other, "n").await,
        "after the minimum, the name is free at once"
    );
}

#[tokio::test(start_paused = true)]
async fn renewal_pauses_while_the_event_loop_does_not_respond() {
    let engine = Arc::new(Faulty::new(OwnerToken::fresh().as_str()));
    let alive = Arc::new(AtomicBool::new(true));
    let stall_detector = Arc::new_cyclic(|stall_detector: &std::sync::Weak<StallDetector>| {
        let (stall_detector, alive) = (stall_detector.clone(), alive.clone());
        StallDetector::new(move || {
            if alive.load(SeqCst)
                && let Some(stall_detector) = stall_detector.upgrade()
            {
                tokio::spawn(async move { stall_detector.responded() });
            }
        })
    });
    let locks = Locks::new(engine.clone(), STORE_TIMEOUT, stall_detector.clone(), None);
    let limited = AcquireOptions {
        stall_limit: ms(5000),
        ..options(900, 0)
    };
    let lease = take(&locks, "n", limited).await;
    tokio::time::sleep(ms(20_000)).await;
    assert!(lease.is_held(), "the event loop responds");
    alive.store(false, SeqCst);
    tokio::time::sleep(ms(4500)).await;
    assert!(lease.is_held(), "the event loop is busy for less than the limit");
    tokio::time::sleep(ms(2500)).await;
    assert!(!lease.is_held());
    assert!(!is_busy(&another(&engine), "n").await);
}

#[tokio::test(start_paused = true)]
async fn extend_adds_time_and_raises_later_renewals() {
    let (engine, locks) = service();
    let lease = take(
        &locks,
        "n",
        AcquireOptions {
            renew: false,
            ..options(1000, 0)
        },
    )
    .await;
    locks.extend(&lease, Ttl::clamped(ms(10_000))).await.unwrap();
    assert!(lease.remaining() > ms(9800));
    locks.extend(&lease, Ttl::clamped(ms(100))).await.unwrap();
    assert!(lease.remaining() > ms(9800), "never shortens");
    tokio::time::sleep(ms(9000)).await;
    assert!(lease.is_held());
    assert_eq!(engine.renewals.load(SeqCst), 2, "an extension does not turn renewal on");
    tokio::time::sleep(ms(1000)).await;
    assert_eq!(
        locks.extend(&lease, Ttl::clamped(ms(1000))).await.unwrap_err().code,
        Code::Lost
    );
    locks.release(&lease).await.unwrap();
    let released = take(&locks, "n", options(1000, 0)).await;
    locks.release(&released).await.unwrap();
    assert_eq!(
        locks.extend(&released, Ttl::clamped(ms(1000))).await.unwrap_err().code,
        Code::Lost
    );
}

#[tokio::test(start_paused = true)]
async fn a_release_waits_for_the_renewal_in_progress() {
    let (engine, locks) = service();
    let lease = take(&locks, "n", options(900, 0)).await;
    engine.set(Fault::SlowReply(40));
    tokio::time::sleep(ms(310)).await;
    assert!(locks.release(&lease).await.unwrap());
    assert!(!held_in_store(&engine, "n").await);
    tokio::time::sleep(ms(2000)).await;
    assert!(!held_in_store(&engine, "n").await);
}

#[tokio::test(start_paused = true)]
async fn events_are_emitted_in_order() {
    let engine = Arc::new(Faulty::new(OwnerToken::fresh().as_str()));
    let emitted: Arc<Mutex<Vec<(EventKind, String)>>> = Arc::default();
    let record = emitted.clone();
    let sink = move |event: Event| {
        let has_lease = !matches!(event.kind, EventKind::Waiting | EventKind::Timeout);
        assert_eq!(event.fence.is_some(), has_lease);
        record
            .lock()
            .unwrap()
            .push((event.kind, event.names.unwrap()[0].to_string()));
    };
    let locks = Locks::new(
        engine,
        STORE_TIMEOUT,
        Arc::new(StallDetector::default()),
        Some(Arc::new(sink)),
    );
    let lease = take(&locks, "n", options(900, 0)).await;
    tokio::time::sleep(ms(310)).await;
    assert!(matches!(
        attempt(&locks, "n", options(900, 50)).await.unwrap(),
        Outcome::Busy(_)
    ));
    locks.release(&lease).await.unwrap();
    take(
        &locks,
        "m",
        AcquireOptions {
            renew: false,
            ..options(100, 0)
        },
    )
    .await;
    tokio::time::sleep(ms(200)).await;
    use EventKind::{Acquired, Lost, Released, Renewed, Timeout, Waiting};
    let expected = [
        (Acquired, "n"),
        (Renewed, "n"),
        (Waiting, "n"),
        (Timeout, "n"),
        (Released, "n"),
        (Acquired, "m"),
        (Lost, "m"),
    ];
    assert_eq!(
        *emitted.lock().unwrap(),
        expected.map(|(kind, name)| (kind, name.to_owned()))
    );
}

#[tokio::test(start_paused = true)]
async fn operations_of_one_lease_do_not_overlap() {
    let (engine, locks) = service();
    let (lease, other) = (
        take(&locks, "n", options(30_000, 0)).await,
        take(&locks, "m", options(30_000, 0)).await,
    );
    engine.set(Fault::SlowReply(50));
    let started = tokio::time::Instant::now();
    let extend = |lease: &Arc<Lease>| {
        let (locks, lease) = (locks.clone(), lease.clone());
        tokio::spawn(async move {
            locks.extend(&lease, Ttl::clamped(ms(30_000))).await.unwrap();
            started.elapsed().as_millis()
        })
    };
    let extensions = [extend(&lease), extend(&lease), extend(&lease), extend(&other)];
    let mut ends = Vec::new();
    for extension in extensions {
        ends.push(extension.await.unwrap());
    }
    assert_eq!(ends, [50, 100, 150, 50]);
    let last = extend(&lease);
    settle().await;
    assert!(locks.release(&lease).await.unwrap());
    assert_eq!(started.elapsed(), ms(250), "after the extension");
    assert_eq!(last.await.unwrap(), 200);
}
