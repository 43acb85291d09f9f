//! Many callers, callers with short limits, and large claims.

use std::sync::atomic::{AtomicUsize, Ordering};

use futures_util::future::join_all;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::*;
use crate::engine::sql::mysql::STATEMENT_BATCH;
use crate::model::Ttl;

/// Forwards what it reads after `delay`.
async fn forward(mut from: tokio::net::tcp::OwnedReadHalf, mut to: tokio::net::tcp::OwnedWriteHalf, delay: Duration) {
    let (sender, mut receiver) = mpsc::unbounded_channel::<(Instant, Vec<u8>)>();
    tokio::spawn(async move {
        while let Some((at, bytes)) = receiver.recv().await {
            sleep_until(at).await;
            if to.write_all(&bytes).await.is_err() {
                return;
            }
        }
    });
    let mut buffer = vec![0; 65536];
    while let Ok(count @ 1..) = from.read(&mut buffer).await {
        let _ = sender.send((Instant::now() + delay, buffer[..count].to_vec()));
    }
}

/// Starts a proxy that delays both directions, and returns the URL through it and its number of connections.
async fn delayed(url: &str, delay: Duration) -> (String, Arc<AtomicUsize>) {
    let (head, rest) = url.rsplit_once('@').unwrap();
    let (host, path) = rest.split_once('/').unwrap();
    let host = host.to_owned();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let count = Arc::new(AtomicUsize::new(0));
    let counted = count.clone();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            counted.fetch_add(1, Ordering::Relaxed);
            let server = TcpStream::connect(&host).await.unwrap();
            for stream in [&client, &server] {
                stream.set_nodelay(true).unwrap();
            }
            let ((from_client, to_client), (from_server, to_server)) = (client.into_split(), server.into_split());
            tokio::spawn(forward(from_client, to_server, delay));
            tokio::spawn(forward(from_server, to_client, delay));
        }
    });
    (format!("{head}@127.0.0.1:{port}/{path}"), count)
}

/// A server that answers after 400 ms, and callers that wait for 300 ms.
#[tokio::test]
async fn callers_with_a_short_limit_do_not_fail_the_calls_of_others() {
    let Some(database) = Database::create().await else {
        return;
    };
    let (url, connections) = delayed(&database.url, Duration::from_millis(200)).await;
    let engine = open(&url, &Settings::default()).await;
    let holder = claim(&["n"]);
    acquire(&engine, &holder).await;
    // Alone they succeed.
    for _ in 0..5 {
        assert_eq!(engine.renew(&holder, holder.ttl).await.unwrap(), Renewed::Extended);
    }
    let impatient = engine.clone();
    let impatient = tokio::spawn(async move {
        for index in 0.. {
            let engine = impatient.clone();
            tokio::spawn(async move {
                let theirs = claim(&[&format!("x{index}")]);
                let _ = timeout(Duration::from_millis(300), engine.try_acquire(&theirs)).await;
            });
            sleep(Duration::from_millis(25)).await;
        }
    });
    sleep(Duration::from_millis(300)).await;
    let (mut renewals, mut attempts) = (Vec::new(), Vec::new());
    let began = Instant::now();
    for index in 0..6 {
        renewals.push(engine.renew(&holder, holder.ttl).await);
        let patient = claim(&[&format!("y{index}")]);
        attempts.push(engine.try_acquire(&patient).await);
    }
    impatient.abort();
    let (took, opened) = (began.elapsed(), connections.load(Ordering::Relaxed));
    let of_renewals: Vec<String> = renewals
        .into_iter()
        .filter_map(|one| Some(one.err()?.to_string()))
        .collect();
    let of_attempts: Vec<String> = attempts
        .into_iter()
        .filter_map(|one| Some(one.err()?.to_string()))
        .collect();
    assert!(
        of_renewals.is_empty() && of_attempts.is_empty() && opened <= 8,
        "failed renewals: {of_renewals:?}; failed attempts: {of_attempts:?}; {opened} connections in {took:?}"
    );
}

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
    let mut seen = Vec::new();
    for _ in 0..10 {
        sleep(Duration::from_secs(1)).await;
        let began = Instant::now();
        let renewed = ours.renew(&claim(&["other"]), Ttl::clamped(LONG)).await.is_ok();
        seen.push((database.number(&alive).await, renewed, began.elapsed().as_millis()));
    }
    assert!(
        seen[5..].iter().all(|(alive, ..)| *alive == count),
        "live positions of {count}, whether a renewal succeeds, and its ms, each second: {seen:?}"
    );
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
