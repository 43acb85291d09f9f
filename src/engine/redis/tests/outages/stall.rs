//! Attempts that are dropped while the server is suspended, and releases of abandoned claims.

use futures_util::future::join_all;
use futures_util::stream::{FuturesUnordered, StreamExt};

use super::*;
use crate::engine::contract::refs;
use crate::engine::{EngineExt, Result};

/// Opens an engine with or without an event loop.
pub(in super::super) async fn opened(server: &Server, on_event_loop: bool) -> Arc<RedisEngine> {
    let settings = Settings {
        event_loop: on_event_loop.then(TestLoop::here),
        tls: server.tls(),
        ..settings("lock:")
    };
    let engine = RedisEngine::connect(RedisConfig::parse(&server.url(), &settings).unwrap())
        .await
        .unwrap();
    // Load the scripts into the server.
    let warm = claim("warm");
    acquire(&engine, &warm).await;
    release(&engine, &warm).await;
    engine
}

async fn release_all(engine: &RedisEngine, claims: &[Claim]) -> Vec<Result<Released>> {
    let mut answers: Vec<Option<Result<Released>>> = claims.iter().map(|_| None).collect();
    engine
        .release_all(&refs(claims), Duration::ZERO, &mut |index, released| {
            assert!(answers[index].replace(released).is_none(), "one answer each");
        })
        .await;
    answers.into_iter().map(Option::unwrap).collect()
}

/// Checks that a limited number of attempts is sent during a stall, and that few commands release them afterwards.
async fn a_stall(tls: bool, on_event_loop: bool, waiting: bool) {
    const CALLS: usize = 4000;
    let Some(server) = Server::start_with(tls).await else {
        return;
    };
    let ours = opened(&server, on_event_loop).await;
    let mut other = server.other().await;
    server.suspend();
    let mut claims: Vec<Claim> = (0..CALLS).map(|i| claim(&format!("stall{i}"))).collect();
    for claim in &mut claims {
        claim.waiting = waiting;
    }
    let mut calls: FuturesUnordered<_> = claims.iter().map(|claim| ours.try_acquire(claim)).collect();
    let some = tokio::time::timeout(Duration::from_millis(300), calls.next()).await;
    assert!(some.is_err(), "the server is suspended");
    drop(calls);
    let sent: Vec<Claim> = claims.into_iter().filter(Claim::was_sent).collect();
    assert!((1..=1024).contains(&sent.len()), "{} were sent", sent.len());
    server.resume();
    let before = other.scripts().await;
    let mut released = 0;
    for claims in sent.chunks(256) {
        for answer in release_all(&ours, claims).await {
            released += usize::from(answer.unwrap() == Released::Freed);
        }
    }
    // Each release takes effect after the attempt of its claim.
    let keys: Vec<String> = other.run("KEYS lock:*").await;
    assert_eq!(keys, [""; 0]);
    // A dropped attempt that was marked is removed if its bytes were not in the write buffer yet.
    assert!((1..=sent.len()).contains(&released), "{released} of {}", sent.len());
    let scripts = other.scripts().await - before;
    assert!(scripts <= 1024 + 16, "{scripts} scripts");
    let after = claim("after");
    acquire(&ours, &after).await;
    release(&ours, &after).await;
}

#[tokio::test]
async fn attempts_dropped_in_a_stall_are_not_sent_later() {
    a_stall(false, false, false).await;
    a_stall(false, false, true).await;
}

#[cfg(unix)]
#[tokio::test]
async fn attempts_dropped_in_a_stall_are_not_sent_later_on_an_event_loop() {
    for tls in [false, true] {
        a_stall(tls, true, false).await;
        a_stall(tls, true, true).await;
    }
}

#[cfg(unix)]
#[tokio::test]
async fn an_attempt_dropped_in_the_tick_of_its_call_is_not_sent() {
    for tls in [false, true] {
        dropped_in_its_tick(tls).await;
    }
}

#[cfg(unix)]
async fn dropped_in_its_tick(tls: bool) {
    let Some(server) = Server::start_with(tls).await else {
        return;
    };
    let (ours, mut other) = (opened(&server, true).await, server.other().await);
    let plain: Vec<Claim> = (0..2).map(|i| claim(&format!("plain{i}"))).collect();
    let mut several = Claim::new(
        &[key("a"), key("b")],
        OwnerToken::fresh(),
        Ttl::clamped(LONG),
        Arc::new(Process::current()),
    );
    several.metadata = Some("1".into());
    macro_rules! begin {
        ($claim:expr) => {{
            let mut call = Box::pin(ours.try_acquire($claim));
            assert!(futures_util::poll!(&mut call).is_pending());
            call
        }};
    }
    let mut calls = Vec::new();
    for claim in &plain {
        calls.push(begin!(claim));
    }
    drop(calls);
    drop(begin!(&several));
    let last = claim("last");
    acquire(&ours, &last).await;
    let keys: Vec<String> = other.run("KEYS lock:*").await;
    assert!(keys.iter().all(|key| key == "lock:last"), "{keys:?}");
}

/// Only its own request is removed from the write buffer, also where it shares commands with others.
#[cfg(unix)]
#[tokio::test]
async fn a_call_dropped_while_the_socket_is_full_does_not_end_the_connection() {
    for tls in [false, true] {
        dropped_while_the_socket_is_full(tls, Duration::from_millis(100)).await;
    }
}

/// Its own request is removed also after a silence that ends the connection for new calls.
#[cfg(unix)]
#[tokio::test]
async fn a_call_dropped_after_a_silence_is_not_sent_while_other_callers_keep_the_connection() {
    dropped_while_the_socket_is_full(false, Duration::from_secs(5)).await;
}

#[cfg(unix)]
async fn dropped_while_the_socket_is_full(tls: bool, after: Duration) {
    const LARGE: usize = 128;
    let Some(server) = Server::start_with(tls).await else {
        return;
    };
    let (ours, mut other) = (opened(&server, true).await, server.other().await);
    let large = |i: usize| {
        // All of them are more than the socket's buffers hold.
        let mut claim = claim(&format!("large{i}"));
        claim.metadata = Some("x".repeat(256 * 1024).into());
        claim
    };
    // The server knows the script from here on.
    let first = large(LARGE);
    acquire(&ours, &first).await;
    release(&ours, &first).await;
    let number = || ours.link().current().map(|connection| connection.generation);
    let before = number();
    server.suspend();
    let mut claims: Vec<Claim> = (0..LARGE).map(large).collect();
    claims.extend((0..3).map(|i| claim(&format!("small{i}"))));
    let mut calls: Vec<_> = claims.iter().map(|claim| Box::pin(ours.try_acquire(claim))).collect();
    for call in &mut calls {
        assert!(futures_util::poll!(call).is_pending());
    }
    // The driver writes what the socket takes: the first request and some more.
    tokio::time::sleep(after).await;
    for dropped in [LARGE + 1, LARGE - 1, 0] {
        drop(calls.remove(dropped));
    }
    server.resume();
    let mut fences = BTreeSet::new();
    for answer in join_all(calls).await {
        match answer.unwrap() {
            Acquired::Granted { fence } => assert!(fences.insert(fence.0)),
            held => panic!("{held:?}"),
        }
    }
    let exists = [0, LARGE - 1, LARGE, LARGE + 1].map(|i| format!("lock:{}", claims[i].keys()[0].as_str()));
    let mut answers = Vec::new();
    for key in &exists {
        answers.push(other.args::<i64>(&["EXISTS", key]).await);
    }
    assert_eq!(answers, [1, 0, 1, 0], "{exists:?}: what was sent, and what was not");
    assert_eq!(number() == before, after < ours.link().silence_limit());
    acquire(&ours, &claim("after")).await;
}

#[tokio::test]
async fn a_release_after_a_dropped_attempt_takes_effect_after_it() {
    for (tls, on_event_loop) in [(false, false), (false, cfg!(unix)), (true, cfg!(unix))] {
        let Some(server) = Server::start_with(tls).await else {
            return;
        };
        let (ours, mut other) = (opened(&server, on_event_loop).await, server.other().await);
        let mut claim = claim("n");
        claim.waiting = true;
        server.suspend();
        let tried = tokio::time::timeout(Duration::from_millis(100), ours.try_acquire(&claim)).await;
        assert!(tried.is_err() && claim.was_sent());
        // From another thread, like the service's task for abandoned claims.
        let (engine, abandoned) = (ours.clone(), claim.clone());
        let released = tokio::spawn(async move { engine.release(&abandoned, Duration::ZERO).await });
        tokio::time::sleep(Duration::from_millis(50)).await;
        server.resume();
        assert_eq!(released.await.unwrap().unwrap(), Released::Freed);
        assert_eq!(other.run::<i64>("EXISTS lock:n").await, 0);
    }
}

#[tokio::test]
async fn many_claims_are_released_by_few_commands() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, theirs, mut other) = (server.engine().await, server.engine().await, server.other().await);
    let process = Arc::new(Process::current());
    let mut claims: Vec<Claim> = (0..100).map(|i| claim(&format!("n{i}"))).collect();
    claims.extend((0..50).map(|i| {
        let names = [key(&format!("a{i}")), key(&format!("b{i}"))];
        Claim::new(&names, OwnerToken::fresh(), Ttl::clamped(LONG), process.clone())
    }));
    claims[3].metadata = Some("{}".into());
    for claim in &claims {
        acquire(&ours, claim).await;
    }
    // Waiters with places in queues, a stranger's lock, and a claim that holds nothing.
    let held = claim("held");
    acquire(&theirs, &held).await;
    for _ in 0..50 {
        let waiter = waiting("held");
        drop(enqueue(&ours, &waiter).await);
        claims.push(waiter);
    }
    claims.push(Claim::new(
        &[key("held")],
        OwnerToken::fresh(),
        Ttl::clamped(LONG),
        process,
    ));
    // The first call may have to send the script.
    release_all(&ours, &[claim("warm"), claim("warmer")]).await;
    // The records of the grants are written a moment later.
    other.recorded(201).await;
    let before = other.scripts().await;
    let released = release_all(&ours, &claims).await;
    let scripts = other.scripts().await - before;
    for (index, released) in released.into_iter().enumerate() {
        let expected = if index < 150 {
            Released::Freed
        } else {
            Released::NotHeld
        };
        assert_eq!(released.unwrap(), expected, "{index}");
    }
    assert!(scripts <= 3, "{scripts}");
    let keys: BTreeSet<String> = other.run::<Vec<String>>("KEYS *").await.into_iter().collect();
    let kept: Vec<&str> = keys.iter().map(String::as_str).collect();
    assert_eq!(kept, ["holdfast:fence:{lock:held}", "holdfast:last", "lock:held"]);
}

#[tokio::test]
async fn renewals_and_releases_do_not_wait_behind_attempts() {
    let Some(server) = Server::start(&[]).await else { return };
    let ours = opened(&server, false).await;
    let held = claim("held");
    acquire(&ours, &held).await;
    server.suspend();
    let claims: Vec<Claim> = (0..5000).map(|i| claim(&format!("n{i}"))).collect();
    let attempts = join_all(claims.iter().map(|claim| ours.try_acquire(claim)));
    let renewal = async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        let renewed = ours.renew(&held, held.ttl);
        server.resume();
        renewed.await.unwrap();
        // Attempts beyond the limit were not sent before it.
        claims.iter().filter(|claim| claim.was_sent()).count()
    };
    let (_, sent) = tokio::join!(attempts, renewal);
    assert!(
        sent < claims.len(),
        "{sent} attempts were sent before the renewal was answered"
    );
}

#[tokio::test]
async fn a_list_that_has_no_answer_ends_with_the_time_of_its_page() {
    let Some(server) = Server::start(&[]).await else { return };
    let ours = opened(&server, false).await;
    server.suspend();
    let list = ours.list("", Duration::from_millis(200));
    let error = tokio::time::timeout(Duration::from_secs(4), list)
        .await
        .expect("the page's time")
        .unwrap_err();
    server.resume();
    assert!(error.retryable && error.to_string().contains("list"), "{error}");
}

#[tokio::test]
async fn errors_of_the_acl_are_not_retryable() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, mut other) = (server.engine().await, server.other().await);
    let held = claim("n");
    acquire(&ours, &held).await;
    other.run::<()>("ACL SETUSER default -eval -evalsha").await;
    let failed = [
        ours.release(&held, Duration::ZERO).await.unwrap_err(),
        release_all(&ours, &[held.clone(), claim("m")])
            .await
            .remove(0)
            .unwrap_err(),
        ours.try_acquire(&claim("m")).await.unwrap_err(),
    ];
    assert!(failed.iter().all(|error| !error.retryable), "{failed:?}");
}
