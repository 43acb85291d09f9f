//! The messages of hand-offs on the connection that the event loop polls.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use super::outages::stall::opened;
use super::*;

/// An event loop as [`TestLoop`], which a test can block.
#[derive(Debug)]
struct Blockable(std::thread::ThreadId, Arc<AtomicBool>);

impl EventLoop for Blockable {
    fn is_here(&self) -> bool {
        std::thread::current().id() == self.0
    }

    fn serve(&self, socket: Arc<dyn Socket>) {
        let is_blocked = self.1.clone();
        tokio::spawn(async move {
            while is_blocked.load(Relaxed) || socket.flush() && socket.readable() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        });
    }

    fn spawn(&self, future: Pin<Box<dyn Future<Output = ()> + Send>>) {
        tokio::spawn(future);
    }

    fn watch(&self, _: Weak<dyn Socket>) {}
}

/// Returns the number of subscriptions to the channel of a process.
async fn subscriptions(engine: &RedisEngine, other: &mut OtherClient) -> i64 {
    let channel = format!("holdfast:to:{}", engine.waiters.process);
    let counts: (String, i64) = other.run(&format!("PUBSUB NUMSUB {channel}")).await;
    counts.1
}

fn is_subscribed(engine: &RedisEngine) -> bool {
    let fast_path = engine.link().current_fast_path();
    fast_path.is_some_and(|fast_path| fast_path.is_subscribed())
}

/// Makes an attempt of a waiter, which opens a fast path where there is none.
async fn until_subscribed(engine: &RedisEngine) {
    eventually("a subscription on the fast path", async || {
        let (holder, next) = (claim("opening"), waiting("opening"));
        acquire(engine, &holder).await;
        drop(enqueue(engine, &next).await);
        for claim in [&next, &holder] {
            engine.release(claim, Duration::ZERO).await.unwrap();
        }
        is_subscribed(engine)
    })
    .await;
}

/// Hands a name off from one engine to the other. Returns whether the first message was a grant.
async fn hand_off(from: &RedisEngine, to: &RedisEngine) -> bool {
    let (holder, next) = (claim("n"), waiting("n"));
    acquire(from, &holder).await;
    let mut subscription = enqueue(to, &next).await;
    release(from, &holder).await;
    notified(&mut subscription).await;
    let is_grant = subscription.take_hand_off().is_some();
    drop(subscription);
    to.release(&next, Duration::ZERO).await.unwrap();
    is_grant
}

/// Hands names off until a message is in time to be a grant. Every message has to arrive.
async fn granted(from: &RedisEngine, to: &RedisEngine, when: &str) {
    eventually(when, async || hand_off(from, to).await).await;
}

#[tokio::test]
async fn the_channel_is_subscribed_on_both_connections_and_each_message_is_delivered_once() {
    for tls in [false, true] {
        let Some(server) = Server::start_with(tls).await else {
            return;
        };
        let (ours, mut other) = (opened(&server, true).await, server.other().await);
        assert_eq!(subscriptions(&ours, &mut other).await, 0, "no call has waited");
        until_subscribed(&ours).await;
        assert_eq!(subscriptions(&ours, &mut other).await, 2);
        granted(&ours, &ours, "a grant in its process").await;
        // Claims with metadata confirm by an attempt, after which a second message would find no waiter.
        let scripts = async |other: &mut OtherClient| -> i64 {
            let stats: String = other.run("INFO commandstats").await;
            let line = stats
                .lines()
                .find_map(|line| line.strip_prefix("cmdstat_evalsha:calls="));
            line.unwrap().split(',').next().unwrap().parse().unwrap()
        };
        let mut counts = Vec::new();
        for _ in 0..4 {
            let (mut holder, mut next) = (claim("n"), waiting("n"));
            (holder.metadata, next.metadata) = (Some("1".into()), Some("2".into()));
            acquire(&ours, &holder).await;
            let mut subscription = enqueue(&ours, &next).await;
            let before = scripts(&mut other).await;
            release(&ours, &holder).await;
            notified(&mut subscription).await;
            acquire(&ours, &next).await;
            drop(subscription);
            tokio::time::sleep(Duration::from_millis(100)).await;
            counts.push(scripts(&mut other).await - before);
            release(&ours, &next).await;
        }
        // A heartbeat may come in between. The first scripts contained their text.
        assert_eq!(
            counts[1..].iter().min(),
            Some(&2),
            "the release and the attempt: {counts:?}"
        );
    }
}

#[tokio::test]
async fn a_refused_subscription_leaves_the_process_on_the_ordinary_connection() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, theirs, mut other) = (
        opened(&server, true).await,
        opened(&server, false).await,
        server.other().await,
    );
    let new = opened(&server, true).await;
    // Only the second subscription is refused.
    let _channel = ours.waiters.listen(0).await.unwrap();
    other.run::<()>("ACL SETUSER default -subscribe").await;
    for _ in 0..3 {
        granted(&theirs, &ours, "a grant on the ordinary connection").await;
        assert!(!is_subscribed(&ours));
    }
    assert!(ours.link().current_fast_path().is_some());
    assert_eq!(subscriptions(&ours, &mut other).await, 1);
    // A process that was never subscribed does not enter a queue.
    let holder = claim("n");
    acquire(&ours, &holder).await;
    assert!(new.try_acquire(&waiting("n")).await.is_err());
    assert!(new.waiters.channel(0).is_none() && !is_subscribed(&new));
    let queue: Vec<String> = other.run("ZRANGEBYSCORE holdfast:queue:{lock:n} -inf +inf").await;
    assert!(queue.is_empty(), "{queue:?}");
}

#[tokio::test]
async fn no_hand_off_is_lost_while_fast_paths_end_and_begin() {
    for tls in [false, true] {
        let Some(server) = Server::start_with(tls).await else {
            return;
        };
        let (ours, theirs, mut other) = (
            opened(&server, true).await,
            opened(&server, false).await,
            server.other().await,
        );
        let mut grants = 0;
        for _ in 0..10 {
            until_subscribed(&ours).await;
            let (holder, next) = (claim("n"), waiting("n"));
            acquire(&theirs, &holder).await;
            let mut subscription = enqueue(&ours, &next).await;
            // The message is on its way on both connections when the fast path ends.
            let fast_path = ours.link().current_fast_path().unwrap();
            let delay = Duration::from_millis(fastrand::u64(..3));
            tokio::join!(release(&theirs, &holder), async {
                tokio::time::sleep(delay).await;
                fast_path.end();
            });
            assert!(!fast_path.is_subscribed());
            notified(&mut subscription).await;
            grants += usize::from(subscription.take_hand_off().is_some());
            ours.release(&next, Duration::ZERO).await.unwrap();
            granted(&theirs, &ours, "a grant without a fast path").await;
        }
        // A message that was late is no grant.
        assert!(grants >= 7, "{grants} grants");
        // The ordinary connection ends. The fast path is a subscription, too.
        until_subscribed(&ours).await;
        other.run::<()>("CLIENT KILL TYPE PUBSUB").await;
        granted(&theirs, &ours, "a grant on other connections").await;
    }
}

#[tokio::test]
async fn a_message_is_delivered_while_the_event_loop_is_blocked_and_its_late_copy_does_no_harm() {
    for tls in [false, true] {
        let Some(server) = Server::start_with(tls).await else {
            return;
        };
        let (theirs, mut other) = (opened(&server, false).await, server.other().await);
        let is_blocked = Arc::new(AtomicBool::new(false));
        let settings = Settings {
            event_loop: Some(Arc::new(Blockable(std::thread::current().id(), is_blocked.clone()))),
            tls: server.tls(),
            ..settings("lock:")
        };
        let ours = RedisConfig::parse(&server.url(), &settings).unwrap();
        let ours = RedisEngine::connect(ours).await.unwrap();
        until_subscribed(&ours).await;
        eventually("a grant while the event loop is blocked", async || {
            let (holder, next) = (claim("n"), waiting("n"));
            acquire(&theirs, &holder).await;
            let mut subscription = enqueue(&ours, &next).await;
            is_blocked.store(true, Relaxed);
            release(&theirs, &holder).await;
            notified(&mut subscription).await;
            let is_grant = subscription.take_hand_off().is_some();
            drop(subscription);
            assert!(is_subscribed(&ours), "nothing has read the copy");
            is_blocked.store(false, Relaxed);
            tokio::time::sleep(Duration::from_millis(100)).await;
            if is_grant {
                assert_eq!(other.run::<String>("GET lock:n").await, next.owner.as_str());
            }
            ours.release(&next, Duration::ZERO).await.unwrap();
            is_grant
        })
        .await;
    }
}
