//! `minReplicas`.

use std::time::Instant;

use futures_util::future::join_all;

use super::*;
use crate::engine::{EngineExt, Renewed};
use crate::error::EngineError;

pub(super) async fn with_min_replicas(url: &str, min_replicas: u32) -> Arc<RedisEngine> {
    let settings = Settings {
        min_replicas,
        ..settings("lock:")
    };
    RedisEngine::connect(RedisConfig::parse(url, &settings).unwrap())
        .await
        .unwrap()
}

fn assert_unacknowledged(error: EngineError, acknowledged: u32, wanted: u32) {
    let expected = format!("{acknowledged} of the {wanted} replicas that minReplicas asks for have acknowledged");
    assert!(
        error.retryable && error.to_string().contains(&expected),
        "{acknowledged} of {wanted}: {error}"
    );
}

/// Acquires a name once the replicas keep up (on a busy machine this may need several attempts).
pub(super) async fn acquire_with_replicas(engine: &RedisEngine, claim: &Claim) -> Fence {
    let mut granted = None;
    within(60, "replicas that keep up", async || {
        granted = match engine.try_acquire(claim).await {
            Ok(Acquired::Granted { fence }) => Some(fence),
            Ok(held) => panic!("{held:?}"),
            Err(error) => {
                assert!(error.retryable, "{error}");
                None
            }
        };
        granted.is_some()
    })
    .await;
    granted.unwrap()
}

async fn extended(engine: &RedisEngine, claim: &Claim) {
    within(60, "replicas that keep up", async || {
        matches!(engine.renew(claim, claim.ttl).await, Ok(Renewed::Extended))
    })
    .await;
}

#[tokio::test]
async fn a_grant_that_too_few_replicas_acknowledged_is_rolled_back() {
    let Some(server) = Server::start(&[]).await else { return };
    let Some(replica) = server.replica(&[]).await else {
        return;
    };
    let ours = with_min_replicas(&server.url(), 1).await;
    let (mut there, mut other) = (replica.other().await, server.other().await);
    let first = claim("n");
    let before = acquire_with_replicas(&ours, &first).await;
    assert_eq!(
        there.run::<String>("GET lock:n").await,
        first.owner.as_str(),
        "the replica has it before the caller does"
    );
    release(&ours, &first).await;

    let greedy = with_min_replicas(&server.url(), 2).await;
    within(60, "a replica that keeps up", async || {
        let error = greedy.try_acquire(&claim("n")).await.unwrap_err().to_string();
        error.contains("1 of the 2 replicas that minReplicas asks for")
    })
    .await;
    assert_eq!(other.run::<i64>("EXISTS lock:n").await, 0, "rolled back");

    replica.suspend();
    assert_unacknowledged(ours.try_acquire(&claim("n")).await.unwrap_err(), 0, 1);
    assert_eq!(other.run::<i64>("EXISTS lock:n").await, 0, "rolled back");
    let careless = server.engine().await;
    let holder = claim("n");
    acquire(&careless, &holder).await;
    assert!(
        matches!(ours.try_acquire(&claim("n")).await.unwrap(), Acquired::Held { .. }),
        "busy needs no replica"
    );
    release(&careless, &holder).await;
    replica.resume();
    assert!(acquire_with_replicas(&ours, &first).await > before);
    assert_eq!(there.run::<String>("GET lock:n").await, first.owner.as_str());
}

#[tokio::test]
async fn a_renewal_that_no_replica_acknowledged_does_not_count() {
    let Some(server) = Server::start(&[]).await else { return };
    let Some(replica) = server.replica(&[]).await else {
        return;
    };
    let ours = with_min_replicas(&server.url(), 1).await;
    let holder = claim("n");
    acquire_with_replicas(&ours, &holder).await;
    extended(&ours, &holder).await;
    // So long that the later renewals change nothing and write nothing.
    let longer = Ttl::clamped(2 * LONG);
    replica.suspend();
    assert_unacknowledged(ours.renew(&holder, longer).await.unwrap_err(), 0, 1);
    assert_unacknowledged(ours.renew(&holder, holder.ttl).await.unwrap_err(), 0, 1);
    let elsewhere = with_min_replicas(&server.url(), 1).await;
    assert_unacknowledged(elsewhere.renew(&holder, holder.ttl).await.unwrap_err(), 0, 1);
    let to = OwnerToken::fresh();
    assert_unacknowledged(ours.transfer(&holder, &to).await.unwrap_err(), 0, 1);
    assert_eq!(
        ours.renew(&claim("n"), longer).await.unwrap(),
        Renewed::Lost,
        "a lost lease is lost, for any number of replicas"
    );
    replica.resume();
    within(60, "the replica keeps up again", async || {
        matches!(ours.transfer(&holder, &to).await, Ok(Renewed::Extended))
    })
    .await;
}

#[tokio::test]
async fn many_callers_share_a_wait_for_the_replicas_and_others_do_not_wait() {
    let Some(server) = Server::start(&[]).await else { return };
    let Some(replica) = server.replica(&[]).await else {
        return;
    };
    let ours = with_min_replicas(&server.url(), 1).await;
    let claims: Vec<Claim> = (0..100).map(|i| claim(&format!("n{i}"))).collect();
    join_all(claims.iter().map(|claim| acquire_with_replicas(&ours, claim))).await;
    replica.suspend();
    let commands = async || {
        let stats: String = server.other().await.run("INFO commandstats").await;
        let wait = stats.lines().find_map(|line| line.strip_prefix("cmdstat_wait:calls="));
        wait.unwrap().split(',').next().unwrap().parse::<u32>().unwrap()
    };
    let (started, before) = (Instant::now(), commands().await);
    let outcomes = tokio::spawn({
        let (ours, claims) = (ours.clone(), claims.clone());
        async move { join_all(claims.iter().map(|claim| ours.try_acquire(claim))).await }
    });
    eventually("a call waits for the replica", async || commands().await > before).await;
    ours.inspect(&key("n0")).await.unwrap();
    assert!(!outcomes.is_finished(), "reads do not wait for replicas");
    for outcome in outcomes.await.unwrap() {
        assert_unacknowledged(outcome.unwrap_err(), 0, 1);
    }
    // Without sharing they would send 100.
    let sent = commands().await - before;
    assert!(sent <= 10, "{sent} times WAIT, {:?}", started.elapsed());
    replica.resume();
}
