//! Many calls at once: the limit of attempts in progress, and the attempts beyond it.

use std::collections::HashSet;

use futures_util::stream::{FuturesUnordered, StreamExt};

use super::*;
use crate::engine::EngineExt;

const CALLS: usize = 2000;
const LIMIT: usize = 512;
const STALL: Duration = Duration::from_millis(300);

fn claims(count: usize) -> Vec<Claim> {
    (0..count).map(|i| claim(&format!("burst{i}"))).collect()
}

/// Returns claims for names that share no counter.
fn claims_apart() -> Vec<Claim> {
    let mut counters = HashSet::new();
    let is_apart = |claim: &Claim| counters.insert(counter(claim.keys()[0].as_str()));
    claims(CALLS).into_iter().filter(is_apart).collect()
}

fn sent(claims: &[Claim]) -> usize {
    claims.iter().filter(|claim| claim.was_sent()).count()
}

impl Nodes {
    /// The lock keys of all nodes.
    async fn locks(&self) -> usize {
        let keys =
            (0..self.0.len()).map(async |node| -> Vec<String> { self.other(node).await.run("KEYS lock:*").await });
        join_all(keys).await.iter().map(Vec::len).sum()
    }

    /// Returns the number of attempts whose votes a node has executed: a vote leaves the counter of its name behind. The script may
    /// repeat a vote by plain commands, where these were executed too late for their floor.
    async fn votes(&self, node: usize) -> usize {
        let keys: Vec<String> = self.other(node).await.run("KEYS holdfast:last:*").await;
        keys.len()
    }
}

#[tokio::test]
async fn attempts_dropped_while_they_wait_for_a_permit_are_never_sent() {
    let Some(nodes) = Nodes::start(3).await else { return };
    let ours = nodes.with_node_timeout(Duration::from_secs(5)).await;
    nodes.load_scripts(&ours).await;
    let before = nodes.votes(0).await;
    (1..3).for_each(|node| nodes.suspend(node));
    let claims = claims_apart();
    let mut calls: FuturesUnordered<_> = claims.iter().map(|claim| ours.try_acquire(claim)).collect();
    let some = tokio::time::timeout(STALL, calls.next()).await;
    assert!(some.is_err(), "there is no majority");
    drop(calls);
    let count = sent(&claims);
    assert!((1..=LIMIT).contains(&count), "{count} were sent");
    (1..3).for_each(|node| nodes.resume(node));
    eventually("nothing is left on the nodes", async || nodes.locks().await == 0).await;
    // The other attempts are not sent later.
    acquire_soon(&ours, &claim("after")).await;
    assert_eq!(sent(&claims), count);
    let votes = nodes.votes(0).await - before;
    assert!(votes <= LIMIT + 2, "{votes} votes for {count} attempts");
}

#[tokio::test]
async fn renewals_and_releases_do_not_wait_for_a_permit() {
    let Some(nodes) = Nodes::start(3).await else { return };
    let ours = nodes.with_node_timeout(Duration::from_secs(20)).await;
    nodes.load_scripts(&ours).await;
    let [kept, freed] = ["kept", "freed"].map(claim);
    acquire(&ours, &kept).await;
    acquire(&ours, &freed).await;
    let before = nodes.votes(0).await;
    let claims = claims_apart();
    let mut calls: FuturesUnordered<_> = claims.iter().map(|claim| ours.try_acquire(claim)).collect();
    (1..3).for_each(|node| nodes.suspend(node));
    let some = tokio::time::timeout(STALL, calls.next()).await;
    assert!(some.is_err(), "there is no majority");
    // The attempts keep their permits: they are not polled.
    (1..3).for_each(|node| nodes.resume(node));
    assert_eq!(renew(&ours, &kept).await.unwrap(), Renewed::Extended);
    release(&ours, &freed).await;
    let votes = nodes.votes(0).await - before;
    assert!((1..=LIMIT).contains(&votes), "{votes} votes");
    while let Some(outcome) = calls.next().await {
        assert!(matches!(outcome, Ok(Acquired::Granted { .. })), "{outcome:?}");
    }
}

/// After a stall the queue is full of calls that are about to time out.
#[tokio::test]
async fn a_new_call_after_a_stall_is_served_before_the_calls_that_waited() {
    let Some(nodes) = Nodes::start(3).await else { return };
    let ours = nodes.with_node_timeout(Duration::from_secs(20)).await;
    nodes.load_scripts(&ours).await;
    (1..3).for_each(|node| nodes.suspend(node));
    let claims = claims(CALLS);
    let mut calls = FuturesUnordered::new();
    for claim in &claims {
        // All of them wait before the new one is called, on a slow machine, too.
        let mut call = Box::pin(ours.try_acquire(claim));
        assert!(futures_util::poll!(&mut call).is_pending());
        calls.push(call);
        tokio::task::yield_now().await;
    }
    // Longer than 500 ms.
    let some = tokio::time::timeout(Duration::from_secs(1), calls.next()).await;
    assert!(some.is_err(), "there is no majority");
    let new = claim("new");
    let mut call = Box::pin(ours.try_acquire(&new));
    assert!(futures_util::poll!(&mut call).is_pending());
    assert!(!new.was_sent(), "every permit is in use");
    (1..3).for_each(|node| nodes.resume(node));
    let mut before = 0;
    let answer = loop {
        tokio::select! {
            biased;
            answer = &mut call => break answer,
            Some(_) = calls.next() => before += 1,
        }
    };
    assert!(matches!(answer, Ok(Acquired::Granted { .. })), "{answer:?}");
    assert!(
        before < CALLS - CALLS / 10,
        "{before} of {CALLS} calls were served before it"
    );
}

#[tokio::test]
async fn a_call_that_waits_for_a_permit_is_small() {
    let Some(nodes) = Nodes::start(3).await else { return };
    let ours = nodes.engine().await;
    let waits = claim("waits");
    let (claims, mut ignore) = ([&waits], |_, _| {});
    let size = size_of_val(&*ours.try_acquire_all(&claims, &mut ignore));
    assert!(size <= 512, "{size} bytes");
}

/// A vote that the socket has not accepted is not sent after its attempt was dropped.
#[tokio::test]
async fn a_vote_in_the_write_buffer_is_not_sent_after_its_attempt_was_dropped() {
    const LARGE: usize = 128;
    let Some(nodes) = Nodes::start(3).await else { return };
    let ours = nodes.with_node_timeout(Duration::from_secs(5)).await;
    // A lock with metadata is acquired by the script: the nodes know it from here on.
    let mut first = claim("first");
    first.metadata = Some("1".into());
    acquire_soon(&ours, &first).await;
    nodes.all_have(&[0, 1, 2], "first").await;
    release(&ours, &first).await;
    nodes.are_free(&[0, 1, 2], "first").await;
    let before = nodes.votes(1).await;
    (1..3).for_each(|node| nodes.suspend(node));
    let mut claims = claims(LARGE);
    for claim in &mut claims {
        // All of them are more than the socket's buffers hold.
        claim.metadata = Some("x".repeat(256 * 1024).into());
    }
    let calls = join_all(claims.iter().map(|claim| ours.try_acquire(claim)));
    assert!(
        tokio::time::timeout(STALL, calls).await.is_err(),
        "there is no majority"
    );
    (1..3).for_each(|node| nodes.resume(node));
    eventually("nothing is left on the nodes", async || nodes.locks().await == 0).await;
    acquire_soon(&ours, &claim("after")).await;
    let votes = nodes.votes(1).await - before;
    assert!(votes < LARGE / 2, "{votes} of {LARGE} votes were sent");
}

/// The votes of other attempts on the same connection are not affected.
#[tokio::test]
async fn an_attempt_dropped_while_a_socket_is_full_does_not_end_the_connection() {
    const LARGE: usize = 128;
    let Some(nodes) = Nodes::start(3).await else { return };
    let ours = nodes.with_node_timeout(Duration::from_secs(10)).await;
    let large = |mut claim: Claim| {
        // All of them are more than the socket's buffers hold.
        claim.metadata = Some("x".repeat(256 * 1024).into());
        claim
    };
    let first = large(claim("first"));
    acquire_soon(&ours, &first).await;
    nodes.all_have(&[0, 1, 2], "first").await;
    release(&ours, &first).await;
    nodes.are_free(&[0, 1, 2], "first").await;
    (1..3).for_each(|node| nodes.suspend(node));
    let claims: Vec<Claim> = claims(LARGE).into_iter().map(large).collect();
    let mut calls: Vec<_> = claims.iter().map(|claim| Box::pin(ours.try_acquire(claim))).collect();
    for call in &mut calls {
        assert!(futures_util::poll!(call).is_pending());
    }
    // The drivers write what the sockets take: the first request and some more.
    tokio::time::sleep(Duration::from_millis(100)).await;
    for dropped in [LARGE - 1, 0] {
        drop(calls.remove(dropped));
    }
    (1..3).for_each(|node| nodes.resume(node));
    for answer in join_all(calls).await {
        assert!(matches!(answer, Ok(Acquired::Granted { .. })), "{answer:?}");
    }
    // A vote leaves the counter of its name behind.
    let counter = async |index: usize| nodes.last_fences(&[1], claims[index].keys()[0].as_str()).await[0];
    assert!(counter(0).await.is_some(), "what was sent");
    assert_eq!(counter(LARGE - 1).await, None, "what was in the write buffer");
    for dropped in [0, LARGE - 1] {
        nodes.are_free(&[0, 1, 2], claims[dropped].keys()[0].as_str()).await;
    }
}
