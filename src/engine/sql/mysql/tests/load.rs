//! Many waiters, and large claims.

use futures_util::future::join_all;
use tokio::time::{Instant, sleep};

use super::*;
use crate::engine::EngineExt;
use crate::engine::sql::mysql::STATEMENT_BATCH;
use crate::model::Ttl;

#[tokio::test]
async fn the_positions_of_many_waiters_stay_alive() {
    let Some(mut database) = Database::create().await else {
        return;
    };
    let (ours, theirs) = (database.engine().await, database.engine().await);
    let count = 6_000;
    let names: Vec<String> = (0..count).map(|index| format!("a-name-of-a-job-{index:08}")).collect();
    let holders: Vec<Claim> = names.iter().map(|name| claim(&[name])).collect();
    for some in holders.chunks(500) {
        for acquired in join_all(some.iter().map(|holder| theirs.try_acquire(holder))).await {
            acquired.unwrap();
        }
    }
    let waiters: Vec<Claim> = names.iter().map(|name| waiting(&[name])).collect();
    for some in waiters.chunks(500) {
        for waiter in some {
            std::mem::forget(ours.subscribe(waiter, &waiter.keys()[0]).await.unwrap());
        }
        let _ = join_all(some.iter().map(|waiter| ours.try_acquire(waiter))).await;
    }
    let now = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))";
    let alive = format!("SELECT COUNT(*) FROM locks_waiters WHERE alive_until > {now}");
    sleep(Duration::from_secs(5)).await;
    let mut seen = Vec::new();
    // Where the machine stands still, positions end. They come back with the next heartbeat.
    for _ in 0..3 {
        let mut block = Vec::new();
        for _ in 0..5 {
            sleep(Duration::from_secs(1)).await;
            let began = Instant::now();
            let renewed = ours.renew(&claim(&["other"]), Ttl::clamped(LONG)).await.is_ok();
            block.push((database.number(&alive).await, renewed, began.elapsed().as_millis()));
        }
        if block.iter().all(|(alive, ..)| *alive == count) {
            return;
        }
        seen.push(block);
    }
    panic!("live positions of {count}, whether a renewal succeeds, and its ms, each second: {seen:?}");
}

/// Each claim is valid, and fits into a packet of the server with its default settings.
#[tokio::test]
async fn large_claims_do_not_fail_together() {
    let Some(database) = Database::create().await else {
        return;
    };
    let engine = database.engine().await;
    let metadata: Arc<str> = format!("\"{}\"", "m".repeat(16 * 1024 - 2)).into();
    let mut claims: Vec<Claim> = (0..80)
        .map(|index| {
            let names: Vec<String> = (0..10).map(|name| format!("n{index}-{name}")).collect();
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            let mut claim = claim(&names);
            claim.metadata = Some(metadata.clone());
            claim
        })
        .collect();
    claims.push(claim(&["small", "names"]));
    let answers = join_all(claims.iter().map(|claim| engine.try_acquire(claim))).await;
    let failed: Vec<String> = answers
        .iter()
        .filter_map(|answer| answer.as_ref().err())
        .map(ToString::to_string)
        .collect();
    assert!(failed.is_empty(), "{} failed: {:?}", failed.len(), failed.first());
}

#[tokio::test]
async fn a_packet_is_smaller_than_a_tls_record() {
    let Some(database) = Database::create().await else {
        return;
    };
    let proxy = Proxy::start(database.url()).await;
    let engine = database.open(&proxy.url).await;
    let names: Vec<String> = (0..256)
        .map(|index| format!("invoices:customer:number:{index:05}"))
        .collect();
    let holders: Vec<Claim> = names.iter().map(|name| claim(&[name])).collect();
    join_all(holders.iter().map(|holder| acquire(&engine, holder))).await;
    let renewed = join_all(
        holders[..STATEMENT_BATCH]
            .iter()
            .map(|holder| engine.renew(holder, holder.ttl)),
    )
    .await;
    assert!(renewed.iter().all(|one| matches!(one, Ok(Renewed::Extended))));
    let waiters: Vec<Claim> = names.iter().map(|name| waiting(&[name])).collect();
    join_all(waiters.iter().map(|waiter| busy(&engine, waiter))).await;
    let released = join_all(holders.iter().map(|holder| release(&engine, holder))).await;
    assert_eq!(released, [Released::Freed; 256]);
    let largest = proxy.largest_packet();
    assert!((4096..16_384).contains(&largest), "{largest} bytes");
}
