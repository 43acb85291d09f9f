//! `list` on a store that fails.

use super::faults::Fault;
use super::*;

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
