//! Many leases in one service: renewed together, spread over time, and independent of each other.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::Ordering::SeqCst;

use tokio::time::Instant;

use super::faults::Fault;
use super::*;
use crate::service::{Event, EventKind};

/// When each lease was granted or renewed, by its name.
type Times = Arc<Mutex<HashMap<String, Vec<Instant>>>>;

/// Creates a service that records its renewals.
fn recorded() -> (Arc<Faulty>, Locks, Times) {
    let engine = Arc::new(Faulty::new(OwnerToken::fresh().as_str()));
    let times = Times::default();
    let record = times.clone();
    let sink = move |event: Event| {
        if matches!(event.kind, EventKind::Acquired | EventKind::Renewed) {
            let name = event.names.unwrap()[0].to_string();
            record.lock().unwrap().entry(name).or_default().push(Instant::now());
        }
    };
    let stall_detector = Arc::new(StallDetector::default());
    let locks = Locks::new(engine.clone(), STORE_TIMEOUT, stall_detector, Some(Arc::new(sink)));
    (engine, locks, times)
}

async fn take_many(locks: &Locks, prefix: &str, count: usize, ttl: u64) -> Vec<Arc<Lease>> {
    let mut leases = Vec::with_capacity(count);
    for i in 0..count {
        leases.push(take(locks, &format!("{prefix}{i}"), options(ttl, 0)).await);
    }
    leases
}

/// Returns the longest time between two renewals of a lease until now.
fn longest_gap(times: &Times) -> Duration {
    let times = times.lock().unwrap();
    let gaps = times.values().flat_map(|times| {
        let until = times.iter().skip(1).copied().chain([Instant::now()]);
        times.iter().zip(until).map(|(from, until)| until - *from)
    });
    gaps.max().unwrap()
}

#[tokio::test(start_paused = true)]
async fn ten_thousand_leases_renew_in_batches_spread_over_time_and_none_is_late() {
    const LEASES: usize = 10_000;
    let (engine, locks, times) = recorded();
    // All at the same moment: the worst case.
    let leases = take_many(&locks, "n", LEASES, 30_000).await;
    tokio::time::sleep(ms(60_000)).await;
    assert!(longest_gap(&times) <= ms(10_000), "{:?}", longest_gap(&times));
    assert!(leases.iter().all(|lease| lease.is_held()));
    let (renewals, batches) = (engine.renewals.load(SeqCst), engine.batches.load(SeqCst));
    assert!(
        renewals as usize >= 6 * LEASES && renewals as usize <= 7 * LEASES,
        "{renewals}"
    );
    assert!(renewals >= 100 * batches, "{renewals} renewals in {batches} batches");

    // The first renewals fall within the last tenth of the third, but not in one instant. Later ones drift apart.
    let mut instants: HashMap<Instant, usize> = HashMap::new();
    let mut sixth = Vec::new();
    for times in times.lock().unwrap().values() {
        *instants.entry(times[1]).or_default() += 1;
        sixth.push(times[6]);
    }
    let most = *instants.values().max().unwrap();
    assert!(most <= LEASES / 20, "{most} renewals in one instant");
    let spread = *sixth.iter().max().unwrap() - *sixth.iter().min().unwrap();
    assert!(spread >= ms(1500), "the sixth renewals fall within {spread:?}");
}

#[tokio::test(start_paused = true)]
async fn few_leases_of_the_same_age_are_renewed_together() {
    let (engine, locks, times) = recorded();
    let _leases = take_many(&locks, "n", 100, 30_000).await;
    tokio::time::sleep(ms(59_000)).await;
    assert_eq!(engine.batches.load(SeqCst), 6);
    assert_eq!(engine.renewals.load(SeqCst), 600);
    assert!(longest_gap(&times) <= ms(10_000));
}

#[tokio::test(start_paused = true)]
async fn the_loss_of_one_lease_does_not_affect_the_others() {
    let (engine, locks) = service();
    let leases = take_many(&locks, "n", 300, 3000).await;
    assert!(another(&engine).force_release(&key("n7")).await.unwrap());
    tokio::time::sleep(ms(1000)).await;
    assert_eq!(leases[7].loss().unwrap().code, Code::Lost);
    tokio::time::sleep(ms(20_000)).await;
    assert_eq!((locks.stats().lost, locks.stats().held), (1, 299));
    assert!(leases.iter().enumerate().all(|(i, lease)| lease.is_held() == (i != 7)));
}

#[tokio::test(start_paused = true)]
async fn a_renewal_that_fails_or_hangs_does_not_affect_the_others() {
    for fault in [Fault::Refuse, Fault::Hang, Fault::Swallow, Fault::Fatal] {
        let (engine, locks, times) = recorded();
        let leases = take_many(&locks, "n", 50, 3000).await;
        let bad = take(&locks, "bad", options(3000, 0)).await;
        engine.set_for("bad", fault);
        tokio::time::sleep(ms(2900)).await;
        assert!(bad.is_held(), "{fault:?}: unknown until the deadline");
        tokio::time::sleep(ms(3000)).await;
        if fault != Fault::Swallow {
            assert!(bad.loss().unwrap().cause.is_some(), "{fault:?}");
        }
        times.lock().unwrap().remove("bad");
        assert!(longest_gap(&times) <= ms(1000), "{fault:?}: {:?}", longest_gap(&times));
        assert!(leases.iter().all(|lease| lease.is_held()), "{fault:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_batch_without_an_answer_does_not_delay_later_batches() {
    let (engine, locks, times) = recorded();
    let first = take_many(&locks, "first", 50, 60_000).await;
    tokio::time::sleep(ms(2500)).await;
    let second = take_many(&locks, "second", 50, 60_000).await;
    engine.set_for("first", Fault::Hang);
    // The first ones are sent from 18 s on, with a timeout of about 4 s. The second ones are due at 22.5 s.
    tokio::time::sleep(ms(20_000)).await;
    let renewed = |name: &str| times.lock().unwrap()[name].len() - 1;
    assert_eq!((renewed("first0"), renewed("second0")), (0, 1));
    tokio::time::sleep(ms(20_000)).await;
    engine.set(Fault::None);
    tokio::time::sleep(ms(60_000)).await;
    assert!(first.iter().chain(&second).all(|lease| lease.is_held()));
    assert_eq!(locks.stats().lost, 0);
}

#[tokio::test(start_paused = true)]
async fn renewals_are_retried_in_batches_during_an_outage() {
    let (engine, locks) = service();
    let leases = take_many(&locks, "n", 2000, 30_000).await;
    engine.set(Fault::Refuse);
    tokio::time::sleep(ms(27_000)).await;
    let (attempts, calls) = (engine.renewals.load(SeqCst), engine.batches.load(SeqCst));
    assert!(attempts >= 10 * calls, "{attempts} renewals in {calls} calls");
    engine.set(Fault::None);
    tokio::time::sleep(ms(60_000)).await;
    assert!(leases.iter().all(|lease| lease.is_held()));
}

/// The timeout of a renewal depends on the ttl.
#[tokio::test(start_paused = true)]
async fn leases_with_different_renewal_timeouts_share_no_batch() {
    let (engine, locks) = service();
    let long = take_many(&locks, "long", 10, 30_000).await;
    tokio::time::sleep(ms(8100)).await;
    let short = take_many(&locks, "short", 10, 3000).await;
    engine.set_for("long", Fault::SlowReply(1000));
    tokio::time::sleep(ms(30_000)).await;
    assert!(long.iter().chain(&short).all(|lease| lease.is_held()));
    assert_eq!(locks.stats().store_errors, 0, "an answer in time counted as a timeout");
}

#[tokio::test(start_paused = true)]
async fn a_release_during_a_batch_releases_the_lock() {
    let (engine, locks) = service();
    let leases = take_many(&locks, "n", 20, 900).await;
    engine.set(Fault::SlowReply(40));
    // Sent from 270 ms on, answered from 310 ms on.
    tokio::time::sleep(ms(305)).await;
    assert_eq!((engine.renewals.load(SeqCst), locks.stats().renewed), (20, 0));
    assert!(locks.release(&leases[3]).await.unwrap());
    assert!(!held_in_store(&engine, "n3").await);
    engine.set(Fault::None);
    tokio::time::sleep(ms(5000)).await;
    assert!(!held_in_store(&engine, "n3").await, "the renewal re-created it");
    assert!(leases.iter().enumerate().all(|(i, lease)| lease.is_held() == (i != 3)));
    assert_eq!((locks.stats().lost, locks.stats().held), (0, 19));
}

#[tokio::test(start_paused = true)]
async fn an_extension_during_a_batch_takes_effect_after_it() {
    let (engine, locks) = service();
    let leases = take_many(&locks, "n", 20, 900).await;
    engine.set(Fault::SlowReply(40));
    tokio::time::sleep(ms(305)).await;
    assert_eq!((engine.renewals.load(SeqCst), locks.stats().renewed), (20, 0));
    locks.extend(&leases[3], Ttl::clamped(ms(60_000))).await.unwrap();
    assert!(leases[3].remaining() > ms(50_000));
    engine.set(Fault::None);
    tokio::time::sleep(ms(5000)).await;
    assert!(leases.iter().all(|lease| lease.is_held()));
}

#[tokio::test(start_paused = true)]
async fn a_batch_does_not_wait_for_a_lease_that_is_being_extended() {
    for fault in [Fault::SlowReply(140), Fault::Hang] {
        let (engine, locks, times) = recorded();
        let leases = take_many(&locks, "n", 20, 900).await;
        let busy = take(&locks, "busy", options(900, 0)).await;
        engine.set_for("busy", fault);
        tokio::time::sleep(ms(200)).await;
        let extending = {
            let (locks, busy) = (locks.clone(), busy.clone());
            tokio::spawn(async move { locks.extend(&busy, Ttl::clamped(ms(900))).await })
        };
        tokio::time::sleep(ms(400)).await;
        engine.set(Fault::None);
        extending.await.unwrap().unwrap();
        tokio::time::sleep(ms(5000)).await;
        assert!(busy.is_held(), "{fault:?}");
        assert!(leases.iter().all(|lease| lease.is_held()), "{fault:?}");
        times.lock().unwrap().remove("busy");
        assert!(longest_gap(&times) <= ms(300), "{fault:?}: {:?}", longest_gap(&times));
    }
}

#[tokio::test(start_paused = true)]
async fn a_close_during_a_batch_leaves_nothing() {
    let (engine, locks) = service();
    let leases = take_many(&locks, "n", 20, 900).await;
    engine.set(Fault::SlowReply(40));
    tokio::time::sleep(ms(305)).await;
    assert_eq!((engine.renewals.load(SeqCst), locks.stats().renewed), (20, 0));
    locks.close().await;
    assert!(leases.iter().all(|lease| !lease.is_held()));
    for i in 0..20 {
        assert!(!held_in_store(&engine, &format!("n{i}")).await, "n{i}");
    }
    let renewals = engine.renewals.load(SeqCst);
    tokio::time::sleep(ms(5000)).await;
    assert_eq!(engine.renewals.load(SeqCst), renewals, "renewed after the close");
}
