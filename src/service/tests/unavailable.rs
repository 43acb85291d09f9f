//! A store that is unavailable for a while, or refuses.

use super::faults::Fault;
use super::*;

#[tokio::test(start_paused = true)]
async fn an_unavailable_store_is_an_error_within_the_timeout() {
    let (engine, locks) = service();
    for fault in [Fault::Refuse, Fault::Hang] {
        engine.set(fault);
        let started = tokio::time::Instant::now();
        let error = attempt(&locks, "n", options(30_000, 0)).await.unwrap_err();
        assert_eq!(
            (error.code, error.retryable, error.engine),
            (Code::Store, true, Some("faulty")),
            "{fault:?}"
        );
        assert_eq!(error.key.as_deref(), Some("n"));
        assert!(started.elapsed() <= STORE_TIMEOUT, "{fault:?}: {:?}", started.elapsed());
        let started = tokio::time::Instant::now();
        let error = attempt(&locks, "n", options(30_000, 2000)).await.unwrap_err();
        assert_eq!(error.code, Code::Store, "{fault:?}");
        assert!(started.elapsed() <= ms(2000), "{fault:?}: {:?}", started.elapsed());
        assert_eq!(
            locks.inspect(&key("n")).await.unwrap_err().code,
            Code::Store,
            "{fault:?}"
        );
    }
    assert!(locks.stats().store_errors >= 6);
    engine.set(Fault::None);
    take(&locks, "n", options(1000, 0)).await;
}

#[tokio::test(start_paused = true)]
async fn an_error_of_the_store_is_reported_although_the_last_attempt_had_no_answer() {
    let (engine, locks) = service();
    engine.set(Fault::Refuse);
    let (acquiring, inspecting) = {
        let (one, other) = (locks.clone(), locks.clone());
        (
            tokio::spawn(async move { attempt(&one, "n", options(30_000, 0)).await.map(drop) }),
            tokio::spawn(async move { other.inspect(&key("n")).await.map(drop) }),
        )
    };
    tokio::time::sleep(ms(700)).await;
    engine.set(Fault::Hang);
    for call in [acquiring, inspecting] {
        let error = call.await.unwrap().unwrap_err();
        assert_eq!((error.code, error.retryable), (Code::Store, true));
        assert!(error.message.contains("refused"), "{}", error.message);
    }
}

#[tokio::test(start_paused = true)]
async fn an_error_names_the_call_and_the_store() {
    let (engine, locks) = service();
    engine.set(Fault::Hang);
    let acquiring = attempt(&locks, "n", options(30_000, 0)).await.map(drop);
    for (op, outcome) in [
        ("acquire", acquiring),
        ("inspect", locks.inspect(&key("n")).await.map(drop)),
        ("ping", locks.ping().await.map(drop)),
    ] {
        let message = outcome.unwrap_err().message;
        assert!(
            message.contains(&format!("faulty: {op} failed: no answer within")) && message.ends_with("ms (h:1)"),
            "{message}"
        );
    }
    engine.set(Fault::Fatal);
    let message = locks.ping().await.unwrap_err().message;
    assert!(message.contains("faulty: ping failed"), "{message}");
}

#[tokio::test(start_paused = true)]
async fn a_permanent_error_is_not_retried() {
    let (engine, locks) = service();
    engine.set(Fault::Fatal);
    let started = tokio::time::Instant::now();
    let error = attempt(&locks, "n", options(30_000, 9000)).await.unwrap_err();
    assert_eq!((error.code, error.retryable), (Code::Store, false));
    assert_eq!(started.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn an_attempt_is_retried_through_a_short_outage() {
    let (engine, locks) = service();
    engine.set(Fault::Refuse);
    let taking = {
        let locks = locks.clone();
        tokio::spawn(async move { attempt(&locks, "n", options(30_000, 0)).await })
    };
    tokio::time::sleep(ms(700)).await;
    engine.set(Fault::None);
    assert!(matches!(taking.await.unwrap().unwrap(), Outcome::Acquired(_)));
}

/// Options of a call that waits for the store, too.
fn through_outages(wait: u64) -> AcquireOptions {
    AcquireOptions {
        waits_for_store: true,
        ..options(30_000, wait)
    }
}

#[tokio::test(start_paused = true)]
async fn a_call_that_waits_for_the_store_gets_the_lock_after_an_outage() {
    for fault in [Fault::Refuse, Fault::Hang] {
        for unordered in [false, true] {
            let (engine, locks) = service_with(!unordered, 0);
            engine.set(fault);
            let calls: Vec<_> = (0..3)
                .map(|_| {
                    let locks = locks.clone();
                    let options = AcquireOptions {
                        wait: Wait::Forever,
                        ..through_outages(1)
                    };
                    tokio::spawn(async move {
                        let lease = take(&locks, "n", options).await;
                        locks.release(&lease).await.unwrap();
                    })
                })
                .collect();
            tokio::time::sleep(4 * STORE_TIMEOUT).await;
            assert!(
                calls.iter().all(|call| !call.is_finished()),
                "{fault:?}, unordered: {unordered}"
            );
            engine.set(Fault::None);
            for call in calls {
                call.await.unwrap();
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_is_granted_after_an_outage_stays_in_the_store() {
    let (engine, locks) = service();
    engine.set(Fault::Hang);
    let taking = {
        let locks = locks.clone();
        tokio::spawn(async move { take(&locks, "n", through_outages(600_000)).await })
    };
    tokio::time::sleep(4 * STORE_TIMEOUT).await;
    engine.set(Fault::None);
    let lease = taking.await.unwrap();
    // Longer than the last repetition of a release in the background.
    for _ in 0..70 {
        tokio::time::sleep(ms(1000)).await;
        let held = locks.inspect(&key("n")).await.unwrap().pop().unwrap();
        assert_eq!(held.fence, Some(lease.fence()));
        assert!(lease.is_held());
    }
}

#[tokio::test(start_paused = true)]
async fn a_wait_for_the_store_ends_at_its_deadline_with_the_error_of_the_store() {
    for fault in [Fault::Refuse, Fault::Hang] {
        for unordered in [false, true] {
            let (engine, locks) = service_with(!unordered, 0);
            engine.set(fault);
            let started = tokio::time::Instant::now();
            let calls = (0..3).map(|_| attempt(&locks, "n", through_outages(20_000)));
            for outcome in futures_util::future::join_all(calls).await {
                assert_eq!(code(outcome), Code::Store, "{fault:?}, unordered: {unordered}");
            }
            let took = started.elapsed();
            assert!(
                took >= ms(20_000) && took <= ms(21_100),
                "{fault:?}, unordered: {unordered}: {took:?}"
            );
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_call_that_fails_does_not_wait_behind_one_that_waits_for_the_store() {
    for fault in [Fault::Refuse, Fault::Hang] {
        let (engine, locks) = service_with(false, 0);
        engine.set(fault);
        let waiting = {
            let locks = locks.clone();
            tokio::spawn(async move { attempt(&locks, "n", through_outages(600_000)).await })
        };
        settle().await;
        let started = tokio::time::Instant::now();
        let forever = AcquireOptions {
            wait: Wait::Forever,
            ..options(30_000, 1)
        };
        assert_eq!(code(attempt(&locks, "n", forever).await), Code::Store, "{fault:?}");
        assert!(
            started.elapsed() <= STORE_TIMEOUT + ms(100),
            "{fault:?}: {:?}",
            started.elapsed()
        );
        assert!(!waiting.is_finished());
        engine.set(Fault::None);
        assert!(matches!(waiting.await.unwrap().unwrap(), Outcome::Acquired(_)));
    }
}

#[tokio::test(start_paused = true)]
async fn an_error_that_no_waiting_ends_rejects_at_once() {
    let (engine, locks) = service();
    engine.set(Fault::Fatal);
    let started = tokio::time::Instant::now();
    assert_eq!(code(attempt(&locks, "n", through_outages(60_000)).await), Code::Store);
    assert!(started.elapsed() < ms(100));
}

#[tokio::test(start_paused = true)]
async fn a_store_that_fails_and_then_hangs_costs_one_store_timeout() {
    let (engine, locks) = service();
    engine.set(Fault::Refuse);
    let started = tokio::time::Instant::now();
    let hang = async {
        tokio::time::sleep(STORE_TIMEOUT / 2).await;
        engine.hang();
    };
    let (list, ()) = tokio::join!(locks.list(""), hang);
    assert!(list.unwrap_err().retryable);
    assert_eq!(started.elapsed(), STORE_TIMEOUT);
}

#[tokio::test(start_paused = true)]
async fn a_page_without_an_answer_ends_the_call() {
    let (engine, locks) = service();
    engine.hang();
    let started = tokio::time::Instant::now();
    let error = locks.list("").await.unwrap_err();
    assert!(error.retryable, "{error}");
    assert_eq!(started.elapsed(), STORE_TIMEOUT);
}
