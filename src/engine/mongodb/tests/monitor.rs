//! Tests of documents that are deleted between two commands, by the TTL monitor or another program.

use super::*;
use crate::engine::mongodb::ops::attempts::Caller;
use crate::engine::mongodb::ops::clock_offset::ClockReading;
use crate::engine::{EngineExt, Subscription};

/// Deletes expired documents, as the TTL monitor does, but every few milliseconds.
fn busy_monitor(locks: Collection<Document>) -> tokio::task::AbortHandle {
    tokio::spawn(async move {
        loop {
            let expired = doc! { "expiresAt": { "$lte": DateTime::now() } };
            locks.delete_many(expired).await.unwrap();
            // Other tests use the server, too.
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .abort_handle()
}

/// Leases expire between two commands, and their documents are deleted: every answer is correct, and no token is granted twice.
pub(super) async fn a_lease_that_expires_between_two_commands_is_lost(engine: Arc<MongodbEngine>) {
    let monitor = busy_monitor(engine.locks().clone());
    let granted_so_far = Arc::new(std::sync::Mutex::new(Vec::new()));
    let tasks: Vec<_> = (0..6)
        .map(|task| {
            let (engine, granted_so_far) = (engine.clone(), granted_so_far.clone());
            tokio::spawn(async move {
                for round in 0..40_u64 {
                    let names: &[&str] = if (task + round) % 3 == 0 { &["m", "n"] } else { &["n"] };
                    let mut ours = claim(names, Duration::from_millis(8 + round % 40));
                    ours.waiting = round % 2 == 0;
                    let subscription: Option<Box<dyn Subscription>> = match ours.waiting {
                        true => Some(engine.subscribe(&ours, &key("n")).await.unwrap()),
                        false => None,
                    };
                    let deadline = Instant::now() + Duration::from_secs(60);
                    let mut attempts = 0;
                    let fence = loop {
                        match engine.try_acquire(&ours).await.unwrap() {
                            Acquired::Granted { fence } => break fence,
                            Acquired::Held { retry_after, .. } => {
                                assert!(Instant::now() < deadline, "still busy: {retry_after:?}");
                                attempts += 1;
                                // On a busy machine each lease of a few milliseconds ends before its answer.
                                if attempts % 50 == 0 {
                                    ours.ttl = Ttl::new((ours.ttl.duration() * 2).min(LONG)).unwrap();
                                }
                                let pause = retry_after.unwrap().min(Duration::from_millis(20));
                                tokio::time::sleep(pause).await;
                            }
                        }
                    };
                    granted_so_far.lock().unwrap().push(fence);
                    match round % 4 {
                        0 => drop(engine.renew(&ours, ours.ttl).await.unwrap()),
                        1 => drop(engine.transfer(&ours, &OwnerToken::fresh()).await.unwrap()),
                        _ => {}
                    }
                    engine.release(&ours, Duration::from_millis(round % 3)).await.unwrap();
                    drop(subscription);
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    monitor.abort();
    let mut granted_so_far = granted_so_far.lock().unwrap().clone();
    assert_eq!(granted_so_far.len(), 240);
    granted_so_far.sort_unstable();
    granted_so_far.dedup();
    assert_eq!(granted_so_far.len(), 240, "a token was granted twice");
}

/// The document is deleted after the first step and before the stamp.
pub(super) async fn a_document_that_is_deleted_before_its_stamp_is_acquired_again(engine: Arc<MongodbEngine>) {
    for (name, ttl) in [("m", 4), ("n", 4), ("m", 30), ("n", 30)] {
        let ours = claim(&["m", "n"], Duration::from_secs(ttl));
        // Every grant has a stamp.
        engine.clock_offset.forget();
        let taken = engine
            .acquire_names(&ours, &Caller::default(), None)
            .await
            .unwrap()
            .unwrap();
        engine.locks().delete_one(doc! { "_id": name }).await.unwrap();
        assert_eq!(
            engine
                .stamp_all(&ours, &Caller::default(), &taken, &mut None)
                .await
                .unwrap(),
            None,
            "{name}"
        );
        // Another owner may be faster.
        let theirs = claim(&[name], LONG);
        granted(&engine, &theirs).await;
        busy(&engine, &ours).await;
        assert_eq!(engine.release(&theirs, Duration::ZERO).await.unwrap(), Released::Freed);
        let fence = granted(&engine, &ours).await;
        assert_eq!(engine.inspect(&key(name)).await.unwrap().unwrap().fence, Some(fence));
        assert_eq!(engine.release(&ours, Duration::ZERO).await.unwrap(), Released::Freed);
    }
}

/// The estimated end is wrong.
pub(super) async fn a_wrong_estimate_is_corrected_before_the_grant(engine: Arc<MongodbEngine>) {
    for wrong in [-3_600_000, -5000, 5000, 3_600_000] {
        let ours = claim(&["m", "n"], LONG);
        let now = crate::clock::Moment::now();
        let shown = DateTime::now().timestamp_millis() + wrong;
        engine.clock_offset.set(ClockReading {
            time: DateTime::from_millis(shown),
            sent: now,
            answered: now,
        });
        granted(&engine, &ours).await;
        for name in ["m", "n"] {
            let left = engine.inspect(&key(name)).await.unwrap().unwrap().remaining.unwrap();
            assert!(left <= LONG, "{wrong}: {left:?}");
            assert!(left > LONG - LONG / 10, "{wrong}: {left:?}");
        }
        assert_eq!(engine.release(&ours, Duration::ZERO).await.unwrap(), Released::Freed);
    }
}

/// A process dies between two commands of an acquisition of several names: the names are free at the end of its ttl, and the
/// tokens keep growing.
pub(super) async fn a_crash_at_any_step_blocks_the_names_for_the_ttl_only(engine: Arc<MongodbEngine>) {
    let ttl = Duration::from_millis(1200);
    let mut last = Fence(0);
    for step in ["the first name", "all names", "the first stamp", "all stamps"] {
        // On a machine that stalls, the lease may expire before the crash. Then the test repeats the step.
        let mut attempts = 0;
        let (began, dead) = loop {
            let (began, dead) = (Instant::now(), claim(&["m", "n"], ttl));
            let crashed = crash_after(&engine, &dead, step).await;
            if crashed && began.elapsed() < ttl / 2 {
                break (began, dead);
            }
            attempts += 1;
            assert!(attempts < 10, "{step}: never within {ttl:?}");
            engine.release(&dead, Duration::ZERO).await.unwrap();
        };
        let next = claim(&["m", "n"], LONG);
        let fence = loop {
            match engine.try_acquire(&next).await.unwrap() {
                Acquired::Granted { fence } => break fence,
                Acquired::Held { retry_after, .. } => {
                    // An unverified end may be late by the shortest latency to the server.
                    assert!(retry_after.unwrap() <= ttl + ttl / 4, "{step}: {retry_after:?}");
                    assert!(began.elapsed() < ttl + Duration::from_secs(10), "{step}");
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            }
        };
        // Minus a millisecond, the server's resolution. The two clocks have the same speed.
        assert!(
            began.elapsed() >= ttl - Duration::from_millis(1),
            "{step}: not before its ttl"
        );
        assert!(fence > last, "{step}");
        last = fence;
        assert_eq!(
            engine.release(&dead, Duration::ZERO).await.unwrap(),
            Released::NotHeld,
            "{step}"
        );
        assert_eq!(engine.release(&next, Duration::ZERO).await.unwrap(), Released::Freed);
    }
}

/// Makes the first steps of an acquisition. `false`: the lease expired in the meantime.
async fn crash_after(engine: &MongodbEngine, dead: &Claim, step: &str) -> bool {
    let mut first = claim(&["m"], dead.ttl.duration());
    first.owner = dead.owner.clone();
    let taken = engine
        .acquire_names(
            if step == "the first name" { &first } else { dead },
            &Caller::default(),
            None,
        )
        .await
        .unwrap();
    assert!(taken.is_ok(), "{step}: the names were free");
    if matches!(step, "the first name" | "all names") {
        return true;
    }
    let stamped = if step == "the first stamp" { &first } else { dead };
    let Ok(taken) = engine.acquire_names(stamped, &Caller::default(), None).await.unwrap() else {
        return false;
    };
    engine
        .stamp_all(stamped, &Caller::default(), &taken, &mut None)
        .await
        .unwrap()
        .is_some()
}
