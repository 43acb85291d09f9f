//! The messages of hand-offs, on a connection that an event loop polls.

use super::outages::stall::opened;
use super::*;
use crate::engine::EngineExt;

/// Returns the number of subscriptions to the channel of a process.
async fn subscriptions(engine: &RedisEngine, other: &mut OtherClient) -> i64 {
    let channel = format!("holdfast:to:{}", engine.waiters.process);
    let counts: (String, i64) = other.run(&format!("PUBSUB NUMSUB {channel}")).await;
    counts.1
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
async fn the_channel_is_subscribed_once_and_each_message_is_delivered_once() {
    for tls in [false, true] {
        let Some(server) = Server::start_with(tls).await else {
            return;
        };
        let (ours, mut other) = (opened(&server, true).await, server.other().await);
        assert_eq!(subscriptions(&ours, &mut other).await, 0, "no call has waited");
        granted(&ours, &ours, "a grant in its process").await;
        assert_eq!(subscriptions(&ours, &mut other).await, 1);
        // Claims with metadata confirm by an attempt, after which a second message would find no waiter.
        let mut counts = Vec::new();
        for _ in 0..4 {
            let (mut holder, mut next) = (claim("n"), waiting("n"));
            (holder.metadata, next.metadata) = (Some("1".into()), Some("2".into()));
            acquire(&ours, &holder).await;
            let mut subscription = enqueue(&ours, &next).await;
            let before = other.scripts().await;
            release(&ours, &holder).await;
            notified(&mut subscription).await;
            acquire(&ours, &next).await;
            drop(subscription);
            tokio::time::sleep(Duration::from_millis(100)).await;
            counts.push(other.scripts().await - before);
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
async fn a_process_without_a_subscription_does_not_enter_a_queue() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, theirs, mut other) = (
        opened(&server, true).await,
        opened(&server, false).await,
        server.other().await,
    );
    let new = opened(&server, true).await;
    let _channel = ours.waiters.listen(0).await.unwrap();
    other.run::<()>("ACL SETUSER default -subscribe").await;
    for _ in 0..3 {
        granted(&theirs, &ours, "a grant by the subscription from before").await;
    }
    assert_eq!(subscriptions(&ours, &mut other).await, 1);
    let holder = claim("n");
    acquire(&ours, &holder).await;
    assert!(new.try_acquire(&waiting("n")).await.is_err());
    assert!(new.waiters.channel(0).is_none());
    let queue: Vec<String> = other.run("ZRANGEBYSCORE holdfast:queue:{lock:n} -inf +inf").await;
    assert!(queue.is_empty(), "{queue:?}");
}

#[tokio::test]
async fn no_hand_off_is_lost_while_connections_end_and_begin() {
    for tls in [false, true] {
        let Some(server) = Server::start_with(tls).await else {
            return;
        };
        let (ours, theirs, mut other) = (
            opened(&server, true).await,
            opened(&server, false).await,
            server.other().await,
        );
        for _ in 0..10 {
            let (holder, next) = (claim("n"), waiting("n"));
            acquire(&theirs, &holder).await;
            let mut subscription = enqueue(&ours, &next).await;
            // The message is on its way when the connection ends.
            let connection = ours.link().connection().await.unwrap();
            let delay = Duration::from_millis(fastrand::u64(..3));
            tokio::join!(release(&theirs, &holder), async {
                tokio::time::sleep(delay).await;
                connection.wire.end();
            });
            notified(&mut subscription).await;
            if subscription.take_hand_off().is_none() {
                eventually("an attempt finds the hand-off", async || {
                    matches!(ours.try_acquire(&next).await, Ok(Acquired::Granted { .. }))
                })
                .await;
            }
            drop(subscription);
            // The connection may end during the call.
            eventually("a release", async || ours.release(&next, Duration::ZERO).await.is_ok()).await;
            granted(&theirs, &ours, "a grant on the next connection").await;
        }
        let number = || ours.link().current().map(|connection| connection.generation);
        let before = number();
        other.run::<()>("CLIENT KILL TYPE PUBSUB").await;
        // A call before that would fail.
        eventually("the end of the connection", async || number() != before).await;
        granted(&theirs, &ours, "a grant after the server has closed the connection").await;
    }
}
