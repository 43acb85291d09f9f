//! Hand-offs that are grants.

use super::*;
use crate::clock::Moment;
use crate::engine::{EngineExt, HandOff, Renewed, WAITER_LIVENESS};

/// Waits until a waiter is the holder: by the grant of the hand-off, or where the machine stood still and the message was late, by an
/// attempt. Returns its token.
async fn holds(engine: &RedisEngine, waiter: &Claim, subscription: &mut Box<dyn Subscription>) -> Fence {
    notified(subscription).await;
    match subscription.take_hand_off() {
        Some(hand_off) => hand_off.fence,
        None => acquire(engine, waiter).await,
    }
}

/// Returns the channel and a waiter's member of the queue, as the engine has written it.
async fn member(engine: &RedisEngine, other: &mut OtherClient, claim: &Claim) -> (String, String) {
    let queue: Vec<String> = other.run("ZRANGEBYSCORE holdfast:queue:{lock:n} 0 +inf").await;
    let member = queue.into_iter().find(|member| member.contains(claim.owner.as_str()));
    (format!("holdfast:to:{}", engine.waiters.process), member.unwrap())
}

async fn server_us(other: &mut OtherClient) -> u64 {
    let time: Vec<u64> = other.run("TIME").await;
    time[0] * 1_000_000 + time[1]
}

#[tokio::test]
async fn the_release_makes_the_first_waiter_the_holder() {
    one_succeeds(async |_| {
        let Some(server) = Server::start(&[]).await else {
            return Ok(());
        };
        let (ours, theirs, mut other) = (server.engine().await, server.engine().await, server.other().await);
        let (holder, first, second) = (claim("n"), waiting("n"), waiting("n"));
        let before = acquire(&ours, &holder).await;
        let mut first_subscription = enqueue(&theirs, &first).await;
        let mut second_subscription = enqueue(&ours, &second).await;
        let released = Moment::now();
        release(&ours, &holder).await;
        notified(&mut first_subscription).await;
        let Some(HandOff { fence, until }) = first_subscription.take_hand_off() else {
            return Err("the message is late");
        };
        assert!(fence > before);
        // As long as its process counts as alive.
        assert!(until < released + WAITER_LIVENESS && !until.is_past());
        assert_eq!(first_subscription.take_hand_off(), None, "once");
        assert_eq!(second_subscription.take_hand_off(), None);
        assert_eq!(other.run::<String>("GET lock:n").await, first.owner.as_str());
        let left: i64 = other.run("PTTL lock:n").await;
        assert!((1..=4500).contains(&left), "{left}");
        assert!(other.run::<i64>("PTTL holdfast:fence:{lock:n}").await > 3_600_000);
        assert_eq!(other.run::<u64>("GET holdfast:last").await, fence.0);

        let info = ours.inspect(&key("n")).await.unwrap().unwrap();
        assert_eq!(info.fence, Some(fence));
        let shown = info.holder.unwrap();
        assert_eq!(shown.process, *first.process);
        assert!(server_us(&mut other).await / 1000 - shown.since_ms < 60_000);
        assert!(matches!(
            ours.try_acquire(&claim("n")).await.unwrap(),
            Acquired::Held { .. }
        ));
        assert_eq!(theirs.renew(&first, first.ttl).await.unwrap(), Renewed::Extended);
        assert!(other.run::<i64>("PTTL lock:n").await > 20_000);

        release(&theirs, &first).await;
        assert!(holds(&ours, &second, &mut second_subscription).await > fence);
        release(&ours, &second).await;
        assert_eq!(other.run::<Vec<String>>("KEYS *").await, ["holdfast:last"]);
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn a_server_that_refuses_writes_announces_no_grant() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, theirs, mut other) = (server.engine().await, server.engine().await, server.other().await);
    let (holder, next) = (claim("n"), waiting("n"));
    acquire(&ours, &holder).await;
    let mut subscription = enqueue(&theirs, &next).await;
    other.run::<()>("REPLICAOF 127.0.0.1 1").await;
    for _ in 0..2 {
        ours.release(&holder, Duration::ZERO).await.unwrap_err();
    }
    assert_eq!(other.run::<String>("GET lock:n").await, holder.owner.as_str());
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(subscription.take_hand_off(), None);
    other.run::<()>("REPLICAOF NO ONE").await;
    eventually("the name is released", async || {
        ours.release(&holder, Duration::ZERO).await.is_ok()
    })
    .await;
    // At once, or where its process has missed a heartbeat, after the next one.
    eventually("the waiter is the holder", async || {
        matches!(theirs.try_acquire(&next).await, Ok(Acquired::Granted { .. }))
    })
    .await;
    assert_eq!(other.run::<String>("GET lock:n").await, next.owner.as_str());
}

#[tokio::test]
async fn a_full_server_hands_off() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, mut other) = (server.engine().await, server.other().await);
    let (holder, next) = (claim("n"), waiting("n"));
    acquire(&ours, &holder).await;
    let mut subscription = enqueue(&ours, &next).await;
    other.run::<()>("CONFIG SET maxmemory 1").await;
    release(&ours, &holder).await;
    assert_eq!(other.run::<String>("GET lock:n").await, next.owner.as_str());
    notified(&mut subscription).await;
}

#[tokio::test]
async fn a_second_message_of_a_grant_does_not_end_its_lease() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, theirs, mut other) = (server.engine().await, server.engine().await, server.other().await);
    let (holder, next) = (claim("n"), waiting("n"));
    acquire(&ours, &holder).await;
    let mut subscription = enqueue(&theirs, &next).await;
    let (channel, member) = member(&theirs, &mut other, &next).await;
    release(&ours, &holder).await;
    let fence = holds(&theirs, &next, &mut subscription).await;
    drop(subscription);
    let granted_us = server_us(&mut other).await;
    let until_ms = granted_us / 1000 + other.run::<u64>("PTTL lock:n").await;
    let message = format!("grant:{}:{granted_us}:{until_ms} {member} lock:n", fence.0);
    let mut repeat = async |when: &str| {
        other.args::<()>(&["PUBLISH", &channel, &message]).await;
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert_eq!(other.run::<String>("GET lock:n").await, next.owner.as_str(), "{when}");
    };
    repeat("just after the grant").await;
    assert_eq!(theirs.renew(&next, next.ttl).await.unwrap(), Renewed::Extended);
    tokio::time::sleep(Duration::from_millis(3200)).await;
    // The next grant removes the first one from the engine's memory.
    let (holder, later) = (claim("m"), waiting("m"));
    acquire(&ours, &holder).await;
    let mut subscription = enqueue(&theirs, &later).await;
    release(&ours, &holder).await;
    holds(&theirs, &later, &mut subscription).await;
    assert!(!theirs.waiters.known.has_taken(&next.owner));
    repeat("after an extension").await;
}

#[tokio::test]
async fn an_attempt_finds_a_grant_whose_message_was_not_taken() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, mut other) = (server.engine().await, server.other().await);
    one_succeeds(async |_| {
        let (holder, next) = (claim("n"), waiting("n"));
        acquire(&ours, &holder).await;
        let mut subscription = enqueue(&ours, &next).await;
        release(&ours, &holder).await;
        notified(&mut subscription).await;
        let fence = acquire(&ours, &next).await;
        assert!(other.run::<i64>("PTTL lock:n").await > 20_000);
        let taken = subscription.take_hand_off();
        release(&ours, &next).await;
        assert_eq!(other.run::<Vec<String>>("KEYS *").await, ["holdfast:last"]);
        assert_eq!(
            taken.as_ref().map_or(fence, |hand_off| hand_off.fence),
            fence,
            "the same grant"
        );
        taken.map(drop).ok_or("the message is late")
    })
    .await;
}

#[tokio::test]
async fn a_message_whose_times_do_not_fit_is_a_wake_up() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, mut other) = (server.engine().await, server.other().await);
    acquire(&ours, &claim("n")).await;
    let next = waiting("n");
    let mut subscription = enqueue(&ours, &next).await;
    let (channel, member) = member(&ours, &mut other, &next).await;
    for (late_ms, lasts_ms, is_grant) in [(0, 2000, true), (300, 2000, false), (-100, 2000, false), (0, 1, false)] {
        // Where the machine stands still, the message is late.
        one_succeeds(async |_| {
            let began = Moment::now();
            let granted_us = server_us(&mut other).await.saturating_add_signed(late_ms * -1000);
            let until_ms = granted_us / 1000 + lasts_ms;
            let message = format!("grant:7:{granted_us}:{until_ms} {member} lock:n");
            other.args::<()>(&["PUBLISH", &channel, &message]).await;
            notified(&mut subscription).await;
            let fence = subscription.take_hand_off().map(|hand_off| hand_off.fence);
            let took = began.elapsed();
            if took > Duration::from_millis(50) {
                return Err(took);
            }
            assert_eq!(fence, is_grant.then_some(Fence(7)), "{message}");
            Ok(())
        })
        .await;
    }
}

#[tokio::test]
async fn a_reading_of_the_clock_counts_only_for_its_connection() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, mut other) = (server.engine().await, server.other().await);
    acquire(&ours, &claim("n")).await;
    let next = waiting("n");
    let mut subscription = enqueue(&ours, &next).await;
    other.run::<()>("CLIENT KILL TYPE pubsub").await;
    notified(&mut subscription).await;
    let (channel, member) = member(&ours, &mut other, &next).await;
    let granted_us = server_us(&mut other).await;
    let until_ms = granted_us / 1000 + 2000;
    eventually("the channel is subscribed again", async || {
        let message = format!("grant:7:{granted_us}:{until_ms} {member} lock:n");
        other.args::<i64>(&["PUBLISH", &channel, &message]).await == 1
    })
    .await;
    notified(&mut subscription).await;
    assert_eq!(subscription.take_hand_off(), None);
}

#[tokio::test]
async fn claims_that_a_hand_off_cannot_grant_confirm() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, mut other) = (server.engine().await, server.other().await);
    let replicated = Settings {
        min_replicas: 1,
        ..settings("lock:")
    };
    let replicated = RedisConfig::parse(&server.url(), &replicated).unwrap();
    let replicated = RedisEngine::connect(replicated).await.unwrap();
    let mut set = Claim::new(
        &[key("n"), key("other")],
        OwnerToken::fresh(),
        Ttl::clamped(LONG),
        Arc::new(Process::current()),
    );
    set.waiting = true;
    let mut odd = waiting("n");
    odd.process = Arc::new(Process {
        host: "a host:1".into(),
        pid: 1,
    });
    for (engine, next) in [(&replicated, waiting("n")), (&ours, set), (&ours, odd)] {
        let holder = claim("n");
        acquire(&ours, &holder).await;
        let mut subscription = enqueue(engine, &next).await;
        release(&ours, &holder).await;
        notified(&mut subscription).await;
        assert_eq!(subscription.take_hand_off(), None, "{next:?}");
        let reserved = format!("{}-next", next.owner.as_str());
        assert_eq!(other.run::<String>("GET lock:n").await, reserved, "{next:?}");
        assert_eq!(engine.release(&next, Duration::ZERO).await.unwrap(), Released::NotHeld);
    }
}

#[tokio::test]
async fn a_granted_waiter_that_its_process_does_not_know_delays_no_other() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, mut other) = (server.engine().await, server.other().await);
    let (holder, next) = (claim("n"), waiting("n"));
    acquire(&ours, &holder).await;
    let mut next_subscription = enqueue(&ours, &next).await;
    for i in 1..=50 {
        let ghost = format!("{}:{i:032x}:1@host", ours.waiters.process);
        other
            .args::<()>(&["ZADD", "holdfast:queue:{lock:n}", &i.to_string(), &ghost])
            .await;
    }
    release(&ours, &holder).await;
    let fence = holds(&ours, &next, &mut next_subscription).await;
    drop(next_subscription);
    release(&ours, &next).await;
    assert_eq!(other.run::<Vec<String>>("KEYS *").await, ["holdfast:last"]);
    assert!(acquire(&ours, &holder).await > fence);
}

#[tokio::test]
async fn a_late_message_does_not_end_a_lease_that_an_attempt_has_found() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, mut other) = (server.engine().await, server.other().await);
    let (holder, next) = (claim("n"), waiting("n"));
    acquire(&ours, &holder).await;
    let mut subscription = enqueue(&ours, &next).await;
    let (channel, member) = member(&ours, &mut other, &next).await;
    release(&ours, &holder).await;
    notified(&mut subscription).await;
    let fence = acquire(&ours, &next).await.0;
    drop(subscription);
    let granted_us = server_us(&mut other).await;
    let message = format!(
        "grant:{fence}:{granted_us}:{} {member} lock:n",
        granted_us / 1000 + 2000
    );
    other.args::<()>(&["PUBLISH", &channel, &message]).await;
    // More time than the round trip that the message causes.
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(other.run::<String>("GET lock:n").await, next.owner.as_str());
}

#[tokio::test]
async fn a_stopped_process_delays_the_waiters_behind_it_once() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, mut other) = (server.engine().await, server.other().await);
    let (holder, next) = (claim("n"), waiting("n"));
    acquire(&ours, &holder).await;
    // A process that receives messages and never answers, with many waiters in front.
    let (mut still, queue) = (server.other().await, "holdfast:queue:{lock:n}");
    still.run::<()>("SUBSCRIBE holdfast:to:00ff").await;
    for i in 0..100 {
        let member = format!("00ff:{i:032x}:1@host");
        other.args::<()>(&["ZADD", queue, &(i + 1).to_string(), &member]).await;
    }
    let mut next_subscription = enqueue(&ours, &next).await;
    let till = server_us(&mut other).await / 1000 + 4000;
    other.args::<()>(&["ZADD", queue, &format!("-{till}"), "00ff"]).await;
    release(&ours, &holder).await;
    assert_eq!(other.run::<String>("GET lock:n").await, format!("{:032x}", 0));
    assert!(other.run::<i64>("PTTL lock:n").await <= 4000);
    let fence = holds(&ours, &next, &mut next_subscription).await;
    assert_eq!(other.run::<String>("GET lock:n").await, next.owner.as_str());
    assert_eq!(other.run::<u64>("GET holdfast:last").await, fence.0);
    assert_eq!(
        other.run::<i64>(&format!("ZCOUNT {queue} 0 +inf")).await,
        0,
        "all of its waiters are skipped at once"
    );
}

#[tokio::test]
async fn a_process_with_a_granted_waiter_stays_alive_for_its_other_waiters() {
    // Not only with the next regular heartbeat, which may come after the end of the hand-off's lease.
    one_is_faster(Duration::from_millis(1400), async || {
        let Some(server) = Server::start(&[]).await else {
            return Duration::ZERO;
        };
        let (ours, mut other) = (server.engine().await, server.other().await);
        let (holder, mut first, second) = (claim("n"), waiting("n"), waiting("n"));
        first.ttl = Ttl::clamped(Duration::from_millis(1500));
        acquire(&ours, &holder).await;
        let mut subscription = enqueue(&ours, &first).await;
        drop(enqueue(&ours, &second).await);
        release(&ours, &holder).await;
        notified(&mut subscription).await;
        // None where the machine stood still.
        if subscription.take_hand_off().is_none() {
            return LONG;
        }
        let alive = async |other: &mut OtherClient| {
            let score: f64 = other
                .args(&["ZSCORE", "holdfast:queue:{lock:n}", &ours.waiters.process])
                .await;
            -score - server_us(other).await as f64 / 1000.0
        };
        assert!(alive(&mut other).await <= 1500.0);
        let began = Moment::now();
        eventually("a heartbeat", async || alive(&mut other).await > 2500.0).await;
        began.elapsed()
    })
    .await;
}

#[tokio::test]
async fn an_expired_and_a_forced_release_grant_too() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, theirs) = (server.engine().await, server.engine().await);
    let mut holder = claim("n");
    holder.ttl = Ttl::clamped(Duration::from_secs(2));
    let before = acquire(&ours, &holder).await;
    let (first, second, third) = (waiting("n"), waiting("n"), waiting("n"));
    let mut first_subscription = enqueue(&theirs, &first).await;
    let mut second_subscription = enqueue(&ours, &second).await;
    let mut third_subscription = enqueue(&ours, &third).await;
    let expired = holds(&theirs, &first, &mut first_subscription).await;
    assert!(expired > before);
    assert!(ours.force_release(&key("n")).await.unwrap());
    let forced = holds(&ours, &second, &mut second_subscription).await;
    assert!(forced > expired);
    assert_eq!(theirs.renew(&first, first.ttl).await.unwrap(), Renewed::Lost);
    // A cancelled waiter hands off what it was granted.
    assert_eq!(ours.release(&second, Duration::ZERO).await.unwrap(), Released::Freed);
    assert!(holds(&ours, &third, &mut third_subscription).await > forced);
}

#[tokio::test]
async fn a_hand_off_by_an_older_version_is_confirmed() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, mut other) = (server.engine().await, server.other().await);
    acquire(&ours, &claim("n")).await;
    let next = waiting("n");
    let mut subscription = enqueue(&ours, &next).await;
    let (channel, member) = member(&ours, &mut other, &next).await;
    // What its script does with any waiter.
    let reserved = format!("{}-next", next.owner.as_str());
    other.args::<()>(&["SET", "lock:n", &reserved, "PX", "2000"]).await;
    let message = format!("{member} lock:n");
    other.args::<()>(&["PUBLISH", &channel, &message]).await;
    notified(&mut subscription).await;
    assert_eq!(subscription.take_hand_off(), None);
    acquire(&ours, &next).await;
    assert_eq!(other.run::<String>("GET lock:n").await, next.owner.as_str());
    release(&ours, &next).await;
}
