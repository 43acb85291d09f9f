//! The queue: hand-offs, skipped waiters, and the keys that are left.

use super::*;
use crate::engine::EngineExt;

async fn not_notified(subscription: &mut Box<dyn Subscription>) {
    let outcome = tokio::time::timeout(Duration::from_millis(100), subscription.changed()).await;
    assert!(outcome.is_err(), "notified without a reason");
}

#[tokio::test]
async fn a_release_hands_off_the_name_to_the_first_waiter_and_notifies_no_other() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, theirs, mut other) = (server.engine().await, server.engine().await, server.other().await);
    let (holder, mut first, second) = (claim("n"), waiting("n"), waiting("n"));
    // A hand-off does not write metadata, so this waiter has to confirm.
    first.metadata = Some("{}".into());
    let before = acquire(&ours, &holder).await;
    let mut first_subscription = enqueue(&theirs, &first).await;
    let mut second_subscription = enqueue(&ours, &second).await;
    not_notified(&mut first_subscription).await;
    release(&ours, &holder).await;
    notified(&mut first_subscription).await;
    // A machine that stands still does not end the reservation.
    assert_eq!(other.run::<i64>("PEXPIRE lock:n 30000").await, 1);
    assert_eq!(first_subscription.take_hand_off(), None);
    not_notified(&mut second_subscription).await;
    // Reserved: busy for every claim and every tool, and without a holder.
    assert_eq!(
        other.run::<String>("GET lock:n").await,
        format!("{}-next", first.owner.as_str())
    );
    assert!(matches!(
        ours.try_acquire(&claim("n")).await.unwrap(),
        Acquired::Held { .. }
    ));
    assert_eq!(other.run::<Option<String>>("SET lock:n x PX 1000 NX").await, None);
    assert_eq!(ours.inspect(&key("n")).await.unwrap(), None);
    assert!(ours.list("", PAGE).await.unwrap().is_empty());
    assert!(!ours.force_release(&key("n")).await.unwrap());
    assert_eq!(
        ours.renew(&first, first.ttl).await.unwrap(),
        crate::engine::Renewed::Lost
    );

    assert!(acquire(&theirs, &first).await > before);
    assert_eq!(other.run::<String>("GET lock:n").await, first.owner.as_str());
    release(&theirs, &first).await;
    notified(&mut second_subscription).await;
    acquire(&ours, &second).await;
    release(&ours, &second).await;
    assert_eq!(
        other.run::<Vec<String>>("KEYS *").await,
        ["holdfast:last"],
        "no waiter, no queue"
    );
}

#[tokio::test]
async fn a_waiter_without_a_connection_is_skipped_at_once() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, theirs) = (server.engine().await, server.engine().await);
    let (holder, next) = (claim("n"), waiting("n"));
    acquire(&ours, &holder).await;
    let dead: Vec<Claim> = (0..100).map(|_| waiting("n")).collect();
    for dead in &dead {
        drop(enqueue(&theirs, dead).await);
    }
    let mut next_subscription = enqueue(&ours, &next).await;
    theirs.close().await;
    eventually("the connection is gone", async || {
        let mut other = server.other().await;
        other.run::<Vec<String>>("PUBSUB CHANNELS holdfast:to:*").await.len() == 1
    })
    .await;
    release(&ours, &holder).await;
    // The release itself skips them: without a delay, and without another command.
    assert!(
        tokio::time::timeout(Duration::from_millis(500), next_subscription.changed())
            .await
            .is_ok()
    );
    acquire(&ours, &next).await;
}

#[tokio::test]
async fn a_suspended_process_delays_the_waiters_behind_it_once() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, mut other) = (server.engine().await, server.other().await);
    let (holder, next) = (claim("n"), waiting("n"));
    acquire(&ours, &holder).await;
    // A process that receives messages and never answers, with many waiters in front.
    let (mut still, queue) = (server.other().await, "holdfast:queue:{lock:n}");
    still.run::<()>("SUBSCRIBE holdfast:to:00ff").await;
    for i in 0..100 {
        let member = format!("00ff:{:032x}", i);
        other.args::<()>(&["ZADD", queue, &(i + 1).to_string(), &member]).await;
    }
    let mut next_subscription = enqueue(&ours, &next).await;
    drop(enqueue(&ours, &waiting("n")).await);
    let till = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap()
        .as_millis()
        + 4000;
    other.args::<()>(&["ZADD", queue, &format!("-{till}"), "00ff"]).await;
    release(&ours, &holder).await;
    let held: String = other.run("GET lock:n").await;
    assert_eq!(
        held,
        format!("{:032x}-next", 0),
        "it is handed off to the suspended process"
    );
    let left: i64 = other.run("PTTL lock:n").await;
    assert!((1..=4000).contains(&left), "{left}");
    notified(&mut next_subscription).await;
    acquire(&ours, &next).await;
    assert_eq!(
        other
            .args::<Vec<String>>(&["ZRANGEBYSCORE", queue, "0", "+inf"])
            .await
            .len(),
        1,
        "all of its waiters are skipped at once"
    );
    assert!(
        other.args::<Option<f64>>(&["ZSCORE", queue, "!00ff"]).await.is_some(),
        "they enter again after its next heartbeat"
    );
    assert!(other.args::<i64>(&["PTTL", queue]).await > 0, "the rest expires");
}

#[tokio::test]
async fn a_short_ttl_neither_shortens_the_wait_nor_delays_the_next_waiter() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, theirs, mut other) = (server.engine().await, server.engine().await, server.other().await);
    let (holder, mut first, next) = (claim("n"), waiting("n"), waiting("n"));
    first.ttl = Ttl::clamped(Duration::from_millis(250));
    acquire(&ours, &holder).await;
    let mut first_subscription = enqueue(&theirs, &first).await;
    let mut next_subscription = enqueue(&ours, &next).await;
    tokio::time::sleep(Duration::from_millis(600)).await;
    release(&ours, &holder).await;
    notified(&mut first_subscription).await;
    let left: i64 = other.run("PTTL lock:n").await;
    assert!(left <= 250, "{left}");
    acquire(&theirs, &first).await;
    release(&theirs, &first).await;
    notified(&mut next_subscription).await;
    acquire(&ours, &next).await;
    // Its release finds the position by the same member, and deletes the empty queue.
    drop(enqueue(&theirs, &first).await);
    assert_eq!(theirs.release(&first, Duration::ZERO).await.unwrap(), Released::NotHeld);
    assert_eq!(
        other.run::<i64>("EXISTS holdfast:queue:{lock:n}").await,
        0,
        "no waiter is left"
    );
    release(&ours, &next).await;
    assert_eq!(other.run::<Vec<String>>("KEYS *").await, ["holdfast:last"]);
}

#[tokio::test]
async fn positions_unknown_to_their_process_delay_no_waiter() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, mut other) = (server.engine().await, server.other().await);
    let (holder, next) = (claim("n"), waiting("n"));
    acquire(&ours, &holder).await;
    let mut next_subscription = enqueue(&ours, &next).await;
    // As left by an attempt that is executed after its clean-up, or by a restart with older data.
    let ghosts = |i: u32| format!("{}:{i:032x}", ours.waiters.process);
    for i in 1..=50 {
        other
            .args::<()>(&["ZADD", "holdfast:queue:{lock:n}", &i.to_string(), &ghosts(i)])
            .await;
    }
    release(&ours, &holder).await;
    notified(&mut next_subscription).await;
    acquire(&ours, &next).await;
    // A late message does not end the lease of the current holder.
    let late = format!("{}:{} lock:n", ours.waiters.process, next.owner.as_str());
    other
        .args::<()>(&["PUBLISH", &format!("holdfast:to:{}", ours.waiters.process), &late])
        .await;
    drop(next_subscription);
    other
        .args::<()>(&["PUBLISH", &format!("holdfast:to:{}", ours.waiters.process), &late])
        .await;
    // More time than the round trip that the message causes.
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(other.run::<String>("GET lock:n").await, next.owner.as_str());
    release(&ours, &next).await;
    assert_eq!(other.run::<Vec<String>>("KEYS *").await, ["holdfast:last"]);
}

#[tokio::test]
async fn a_process_that_returns_serves_its_own_waiters_in_order() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, theirs, mut other) = (server.engine().await, server.engine().await, server.other().await);
    let holder = claim("n");
    acquire(&theirs, &holder).await;
    let (first, second) = (waiting("n"), waiting("n"));
    let mut first_subscription = enqueue(&ours, &first).await;
    let mut second_subscription = enqueue(&ours, &second).await;
    // Its last heartbeat is too old, and its second waiter is the first to make an attempt.
    other
        .args::<()>(&["ZADD", "holdfast:queue:{lock:n}", "-1", &ours.waiters.process])
        .await;
    other.run::<()>("DEL lock:n").await;
    assert!(matches!(
        ours.try_acquire(&second).await.unwrap(),
        Acquired::Held { .. }
    ));
    notified(&mut first_subscription).await;
    acquire(&ours, &first).await;
    release(&ours, &first).await;
    notified(&mut second_subscription).await;
    acquire(&ours, &second).await;
}

#[tokio::test]
async fn the_queue_of_a_holder_that_died_moves_at_its_expiry() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, theirs) = (server.engine().await, server.engine().await);
    let mut holder = claim("n");
    holder.ttl = Ttl::clamped(Duration::from_secs(2));
    acquire(&ours, &holder).await;
    let (first, second) = (waiting("n"), waiting("n"));
    let mut first_subscription = enqueue(&ours, &first).await;
    let mut second_subscription = enqueue(&theirs, &second).await;
    // After this renewal the waiters learn the later end of the lease without a message.
    ours.renew(&holder, Ttl::clamped(Duration::from_secs(3))).await.unwrap();
    notified(&mut first_subscription).await;
    not_notified(&mut second_subscription).await;
    acquire(&ours, &first).await;
}

#[tokio::test]
async fn a_cancelled_waiter_hands_off_the_name_it_got() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, mut other) = (server.engine().await, server.other().await);
    let (holder, first, second) = (claim("n"), waiting("n"), waiting("n"));
    acquire(&ours, &holder).await;
    let mut first_subscription = enqueue(&ours, &first).await;
    let mut second_subscription = enqueue(&ours, &second).await;
    release(&ours, &holder).await;
    notified(&mut first_subscription).await;
    release(&ours, &first).await;
    notified(&mut second_subscription).await;
    release(&ours, &second).await;
    assert_eq!(other.run::<Vec<String>>("KEYS *").await, ["holdfast:last"]);
}

#[tokio::test]
async fn waiters_enter_the_queue_again_in_order_after_a_flush() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, mut other) = (server.engine().await, server.other().await);
    acquire(&ours, &claim("n")).await;
    let waiters: Vec<Claim> = (0..5).map(|_| waiting("n")).collect();
    let mut subscriptions = Vec::new();
    for waiter in &waiters {
        subscriptions.push(enqueue(&ours, waiter).await);
    }
    other.run::<()>("FLUSHALL").await;
    // Another claim acquires the name first.
    let quick = claim("n");
    acquire(&ours, &quick).await;
    for (subscription, waiter) in subscriptions.iter_mut().zip(&waiters).rev() {
        notified(subscription).await;
        assert!(matches!(ours.try_acquire(waiter).await.unwrap(), Acquired::Held { .. }));
    }
    release(&ours, &quick).await;
    for (i, waiter) in waiters.iter().enumerate() {
        for late in &waiters[i + 1..] {
            assert!(matches!(ours.try_acquire(late).await.unwrap(), Acquired::Held { .. }));
        }
        acquire(&ours, waiter).await;
        release(&ours, waiter).await;
    }
}

#[tokio::test]
async fn waiting_sends_only_one_heartbeat_for_all() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, mut other) = (server.engine().await, server.other().await);
    let mut subscriptions = Vec::new();
    for name in ["a", "b", "c"] {
        acquire(&ours, &claim(name)).await;
        for _ in 0..100 {
            subscriptions.push(enqueue(&ours, &waiting(name)).await);
        }
    }
    // The records of the grants are written a moment later.
    other.recorded(3).await;
    let before = other.scripts().await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    let sent = other.scripts().await - before;
    assert!((1..5).contains(&sent), "{sent} scripts in 5 s");
    let alive: f64 = other
        .args::<f64>(&["ZSCORE", "holdfast:queue:{lock:b}", &ours.waiters.process])
        .await;
    assert!(alive < 0.0);
}

#[tokio::test]
async fn a_queue_whose_processes_all_died_leaves_nothing() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, theirs, mut other) = (server.engine().await, server.engine().await, server.other().await);
    let holder = claim("n");
    acquire(&ours, &holder).await;
    enqueue(&theirs, &waiting("n")).await;
    theirs.close().await;
    drop(theirs);
    let left: i64 = other.run("PTTL holdfast:queue:{lock:n}").await;
    assert!((60_000..=70_000).contains(&left), "{left}");
    // Long after that, the next hand-off deletes it.
    other.run::<()>("PERSIST holdfast:queue:{lock:n}").await;
    let members: Vec<String> = other.run("ZRANGE holdfast:queue:{lock:n} 0 -1").await;
    let process = members.iter().find(|member| !member.contains(':')).unwrap();
    other
        .args::<()>(&["ZADD", "holdfast:queue:{lock:n}", "-1000", process])
        .await;
    release(&ours, &holder).await;
    assert_eq!(other.run::<i64>("EXISTS holdfast:queue:{lock:n} lock:n").await, 0);
}

fn waiting_for_a_and_b() -> Claim {
    let (owner, process) = (OwnerToken::fresh(), Arc::new(Process::current()));
    let mut set = Claim::new(&[key("a"), key("b")], owner, Ttl::clamped(LONG), process);
    set.waiting = true;
    set
}

#[tokio::test]
async fn a_set_hands_off_a_name_while_another_is_busy() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, mut other) = (server.engine().await, server.other().await);
    let (on_a, on_b) = (claim("a"), claim("b"));
    acquire(&ours, &on_a).await;
    acquire(&ours, &on_b).await;
    let set = waiting_for_a_and_b();
    let mut set_subscription = enqueue(&ours, &set).await;
    let behind = waiting("a");
    let mut behind_subscription = enqueue(&ours, &behind).await;
    release(&ours, &on_a).await;
    notified(&mut set_subscription).await;
    assert!(matches!(
        ours.try_acquire(&set).await.unwrap(),
        Acquired::Held { key, .. } if key.as_str() == "b"
    ));
    notified(&mut behind_subscription).await;
    acquire(&ours, &behind).await;
    release(&ours, &behind).await;
    assert_eq!(other.run::<i64>("EXISTS lock:a").await, 0);
    release(&ours, &on_b).await;
    notified(&mut set_subscription).await;
    acquire(&ours, &set).await;
    assert_eq!(
        other
            .run::<i64>("EXISTS holdfast:queue:{lock:a} holdfast:queue:{lock:b}")
            .await,
        0
    );
}

#[tokio::test]
async fn a_waiter_releases_the_reservation_that_it_kept() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, mut other) = (server.engine().await, server.other().await);
    let (first, behind, on_b) = (waiting_for_a_and_b(), waiting("a"), claim("b"));
    acquire(&ours, &on_b).await;
    // It keeps `a`.
    enqueue(&ours, &first).await;
    enqueue(&ours, &behind).await;
    ours.release(&behind, Duration::ZERO).await.unwrap();
    assert_eq!(other.run::<i64>("EXISTS holdfast:queue:{lock:a}").await, 0);
    assert_eq!(other.run::<i64>("EXISTS lock:a").await, 1);
    ours.release(&first, Duration::ZERO).await.unwrap();
    assert_eq!(other.run::<i64>("EXISTS lock:a").await, 0);
    release(&ours, &on_b).await;
    assert_eq!(other.run::<Vec<String>>("KEYS *").await, ["holdfast:last"]);
}

/// The holder of a free name is gone, and its waiter was not notified. A set that waits for a later name must not reserve the free one.
#[tokio::test]
async fn a_set_passes_a_free_name_to_its_first_waiter() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, theirs, mut other) = (server.engine().await, server.engine().await, server.other().await);
    let (on_a, on_b, first) = (claim("a"), claim("b"), waiting("a"));
    acquire(&ours, &on_a).await;
    acquire(&ours, &on_b).await;
    let _subscription = enqueue(&theirs, &first).await;
    let set = waiting_for_a_and_b();
    assert_eq!(other.run::<i64>("DEL lock:a").await, 1);
    assert!(matches!(ours.try_acquire(&set).await.unwrap(), Acquired::Held { .. }));
    assert_eq!(other.run::<String>("GET lock:a").await, first.owner.as_str());
}
