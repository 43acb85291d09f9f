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
