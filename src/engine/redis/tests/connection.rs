//! Subscriptions, and the one connection for all calls.

use super::super::connection::pubsub::RedisSubscription;
use super::*;
use crate::engine::{EngineExt, Subscription};

/// Subscribes to a channel of this test.
async fn subscribe(ours: &RedisEngine, name: &str) -> RedisSubscription {
    ours.link().subscribe(format!("channel:{name}"), None).await.unwrap()
}

async fn subscribers(other: &mut OtherClient) -> i64 {
    let (_, count): (String, i64) = other.run("PUBSUB NUMSUB channel:n").await;
    count
}

async fn is_notified(subscription: &mut RedisSubscription) -> bool {
    tokio::time::timeout(Duration::from_secs(5), subscription.changed())
        .await
        .is_ok()
}

async fn is_not_notified(subscription: &mut RedisSubscription) -> bool {
    tokio::time::timeout(Duration::from_millis(100), subscription.changed())
        .await
        .is_err()
}

#[tokio::test]
async fn a_channel_is_subscribed_and_unsubscribed_once() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, mut other) = (server.engine().await, server.other().await);
    let mut first = subscribe(&ours, "n").await;
    assert_eq!(
        subscribers(&mut other).await,
        1,
        "confirmed by the server when subscribe returns"
    );
    let mut second = subscribe(&ours, "n").await;
    assert_eq!(subscribers(&mut other).await, 1);
    assert!(is_not_notified(&mut first).await);
    other.run::<()>("PUBLISH channel:n x").await;
    assert!(is_notified(&mut first).await);
    assert!(is_notified(&mut second).await);
    assert!(is_not_notified(&mut second).await, "one message for one change");

    drop(first);
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(subscribers(&mut other).await, 1, "one subscriber is left");
    other.run::<()>("PUBLISH channel:n x").await;
    assert!(is_notified(&mut second).await);
    drop(second);
    eventually("the channel is unsubscribed", async || {
        subscribers(&mut other).await == 0
    })
    .await;
    assert!(ours.link().topics.is_empty());
    let clients: String = other.run("CLIENT LIST").await;
    assert_eq!(
        clients.lines().count(),
        2,
        "the engine's connection and the test's: {clients}"
    );
}

#[tokio::test]
async fn frequent_changes_never_lose_a_subscription() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, mut other) = (server.engine().await, server.other().await);
    for round in 0..200u64 {
        // Some are dropped while they subscribe.
        let _ = tokio::time::timeout(Duration::from_micros(round * 10), subscribe(&ours, "n")).await;
        let mut stays = subscribe(&ours, "n").await;
        if round % 3 == 0 {
            tokio::task::yield_now().await;
        }
        assert_eq!(other.run::<i64>("PUBLISH channel:n x").await, 1, "round {round}");
        assert!(is_notified(&mut stays).await, "round {round}");
    }
    eventually("the channel is unsubscribed", async || {
        subscribers(&mut other).await == 0
    })
    .await;
    assert!(ours.link().topics.is_empty());
}

#[tokio::test]
async fn subscribers_survive_a_lost_connection() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, mut other) = (server.engine().await, server.other().await);
    let mut waiting = Vec::new();
    for i in 0..1200 {
        // More than one SUBSCRIBE command contains.
        waiting.push(subscribe(&ours, &format!("other{i}")).await);
    }
    let mut subscription = subscribe(&ours, "n").await;
    let gone = subscribe(&ours, "gone").await;
    other.run::<()>("CLIENT KILL TYPE pubsub").await;
    drop(gone);
    assert!(
        is_notified(&mut subscription).await,
        "messages may have been lost, so the waiter checks again"
    );
    assert_eq!(subscribers(&mut other).await, 1);
    for subscription in &mut waiting {
        assert!(is_notified(subscription).await);
    }
    assert!(is_not_notified(&mut subscription).await);
    other.run::<()>("PUBLISH channel:n x").await;
    assert!(is_notified(&mut subscription).await);
    eventually("the dropped subscription is gone", async || {
        other.run::<Vec<String>>("PUBSUB CHANNELS *gone").await.is_empty()
    })
    .await;
}

#[tokio::test]
async fn subscribing_amid_lost_connections_leaves_no_channel_behind() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, mut other) = (server.engine().await, server.other().await);
    let until = tokio::time::Instant::now() + Duration::from_secs(2);
    let coming_and_going = (0..20).map(|i| {
        let ours = ours.clone();
        async move {
            while tokio::time::Instant::now() < until {
                let limit = Duration::from_micros(fastrand::u64(1..3000));
                let subscribing = ours.link().subscribe(format!("channel:n{}", i % 4), None).await;
                if let Ok(mut subscription) = subscribing {
                    let _ = tokio::time::timeout(limit, subscription.changed()).await;
                }
            }
        }
    });
    let killing = async {
        while tokio::time::Instant::now() < until {
            other.run::<()>("CLIENT KILL TYPE pubsub").await;
            other.run::<()>("CLIENT KILL TYPE normal SKIPME yes").await;
            tokio::time::sleep(Duration::from_millis(fastrand::u64(1..40))).await;
        }
    };
    tokio::join!(futures_util::future::join_all(coming_and_going), killing);
    eventually("no topic is left", async || ours.link().topics.is_empty()).await;
    let mut last = subscribe(&ours, "n").await;
    eventually("only the last channel is left", async || {
        other.run::<Vec<String>>("PUBSUB CHANNELS *").await == ["channel:n"]
    })
    .await;
    assert_eq!(other.run::<i64>("PUBLISH channel:n x").await, 1);
    assert!(is_notified(&mut last).await);
}

#[tokio::test]
async fn a_lost_connection_is_noticed_by_the_next_call_at_the_latest() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, mut other) = (server.engine().await, server.other().await);
    let held = claim("n");
    acquire(&ours, &held).await;
    for _ in 0..5 {
        other.run::<()>("CLIENT KILL TYPE normal SKIPME yes").await;
        match ours.release(&claim("n"), Duration::ZERO).await {
            Ok(released) => assert_eq!(released, Released::NotHeld),
            Err(error) => {
                assert!(error.retryable, "{error}");
                ours.inspect(&key("n")).await.unwrap();
            }
        }
    }
    release(&ours, &held).await;
}

#[tokio::test]
async fn many_calls_at_once_share_one_connection_even_from_nothing() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, mut other) = (server.engine().await, server.other().await);
    let before: String = other.run("INFO stats").await;
    other.run::<()>("CLIENT KILL TYPE normal SKIPME yes").await;
    eventually("the loss is known", async || ours.link().existing().await.is_none()).await;
    let claims: Vec<Claim> = (0..300).map(|i| claim(&format!("n{i}"))).collect();
    let tries = claims.iter().map(|claim| ours.try_acquire(claim));
    for outcome in futures_util::future::join_all(tries).await {
        assert!(matches!(outcome.unwrap(), Acquired::Granted { .. }));
    }
    let after: String = other.run("INFO stats").await;
    let connections = |stats: &str| {
        stats
            .lines()
            .find_map(|line| line.strip_prefix("total_connections_received:")?.parse::<u64>().ok())
            .unwrap()
    };
    assert_eq!(connections(&after), connections(&before) + 1);
}

#[tokio::test]
async fn a_flushed_script_cache_is_filled_again() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, mut other) = (server.engine().await, server.other().await);
    let flushing = async {
        for _ in 0..200 {
            other.run::<()>("SCRIPT FLUSH").await;
        }
    };
    let locking = async {
        for _ in 0..100 {
            let ours_now = claim("n");
            acquire(&ours, &ours_now).await;
            ours.renew(&ours_now, ours_now.ttl).await.unwrap();
            ours.inspect(&key("n")).await.unwrap().unwrap();
            ours.list("", PAGE).await.unwrap();
            release(&ours, &ours_now).await;
            assert!(!ours.force_release(&key("n")).await.unwrap());
        }
    };
    tokio::join!(flushing, locking);
    let other_again: String = server.other().await.run("INFO commandstats").await;
    let sources = other_again
        .lines()
        .find(|line| line.starts_with("cmdstat_eval:"))
        .expect("texts were sent")
        .to_owned();
    eprintln!("{sources}");
}

#[tokio::test]
async fn a_closed_engine_refuses_calls_and_leaves_nothing_behind() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, mut other) = (server.engine().await, server.other().await);
    let subscription = subscribe(&ours, "n").await;
    ours.close().await;
    let error = ours.try_acquire(&claim("n")).await.unwrap_err();
    assert!(!error.retryable);
    let closed = format!(
        "redis: acquire failed: the connection to {} was closed by this side",
        ours.describe().address
    );
    assert_eq!(error.to_string(), closed);
    eventually("the connection is gone", async || {
        other.run::<String>("CLIENT LIST").await.lines().count() == 1
    })
    .await;
    drop(subscription);
    ours.close().await;
}

/// An event loop that ends while calls are in flight, as that of a worker thread.
#[cfg(unix)]
#[derive(Debug)]
struct EndingLoop(Arc<dyn EventLoop>, Mutex<Vec<tokio::task::AbortHandle>>);

#[cfg(unix)]
impl EventLoop for EndingLoop {
    fn is_here(&self) -> bool {
        self.0.is_here()
    }

    fn serve(&self, socket: Arc<dyn Socket>) {
        self.0.serve(socket);
    }

    fn spawn(&self, future: Pin<Box<dyn Future<Output = ()> + Send>>) {
        self.1.lock().unwrap().push(tokio::spawn(future).abort_handle());
    }

    fn watch(&self, _: Weak<dyn Socket>) {}
}

#[cfg(unix)]
#[tokio::test]
async fn the_end_of_the_event_loop_ends_the_connection_and_its_calls() {
    let Some(server) = Server::start(&[]).await else { return };
    let event_loop = Arc::new(EndingLoop(TestLoop::here(), Mutex::default()));
    let settings = Settings {
        event_loop: Some(event_loop.clone()),
        ..settings("lock:")
    };
    let ours = RedisEngine::connect(RedisConfig::parse(&server.url(), &settings).unwrap())
        .await
        .unwrap();
    let mut other = server.other().await;
    server.suspend();
    let connection = Arc::downgrade(&ours.link().current().unwrap());
    let (engine, in_flight) = (ours.clone(), claim("n"));
    let call = tokio::spawn(async move { engine.try_acquire(&in_flight).await });
    tokio::time::sleep(Duration::from_millis(100)).await;
    event_loop.1.lock().unwrap().iter().for_each(|task| task.abort());
    let ended = tokio::time::timeout(Duration::from_secs(3), call).await;
    assert!(
        ended
            .expect("before the limit of a silence")
            .unwrap()
            .unwrap_err()
            .retryable
    );
    eventually("the connection is dropped", async || connection.strong_count() == 0).await;
    server.resume();
    eventually("the socket is closed", async || {
        let clients: String = other.run("CLIENT LIST").await;
        clients.lines().count() == 1
    })
    .await;
}
