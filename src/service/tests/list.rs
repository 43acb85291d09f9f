//! `list` on a store that fails.

use super::faults::Fault;
use super::*;

#[tokio::test(start_paused = true)]
async fn each_page_of_a_retry_has_the_whole_store_timeout() {
    let (engine, locks) = service();
    let held = take(&locks, "n", options(60_000, 0)).await;
    engine.set(Fault::Refuse);
    let recovery = async {
        tokio::time::sleep(STORE_TIMEOUT / 2).await;
        engine.set(Fault::SlowReply(STORE_TIMEOUT.as_millis() as u64 * 3 / 4));
    };
    let (list, ()) = tokio::join!(locks.list(""), recovery);
    assert_eq!(list.unwrap().len(), 1);
    locks.release(&held).await.unwrap();
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
