//! The queue: who is handed a name, who is passed over, and what is left behind.

use super::*;

async fn quiet(subscription: &mut Box<dyn Subscription>) {
    let told = tokio::time::timeout(Duration::from_millis(100), subscription.changed()).await;
    assert!(told.is_err(), "told without need");
}

#[tokio::test]
async fn a_release_hands_the_name_to_the_first_waiter_and_tells_nobody_else() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, theirs, mut other) = (server.engine().await, server.engine().await, server.other().await);
    let (holder, first, second) = (claim("n"), waiting("n"), waiting("n"));
    let before = take(&ours, &holder).await;
    let mut first_told = wait(&theirs, &first).await;
    let mut second_told = wait(&ours, &second).await;
    quiet(&mut first_told).await;
    free(&ours, &holder).await;
    told(&mut first_told).await;
    quiet(&mut second_told).await;
    // Reserved: busy for everybody, other tools included, and held by nobody.
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

    assert!(take(&theirs, &first).await > before);
    assert_eq!(other.run::<String>("GET lock:n").await, first.owner.as_str());
    free(&theirs, &first).await;
    told(&mut second_told).await;
    take(&ours, &second).await;
    free(&ours, &second).await;
    assert_eq!(
        other.run::<Vec<String>>("KEYS *").await,
        ["holdfast:last"],
        "nobody waits: no queue"
    );
}

#[tokio::test]
async fn a_waiter_whose_connection_is_gone_is_passed_over_at_once() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, theirs) = (server.engine().await, server.engine().await);
    let (holder, next) = (claim("n"), waiting("n"));
    take(&ours, &holder).await;
    let dead: Vec<Claim> = (0..100).map(|_| waiting("n")).collect();
    for dead in &dead {
        drop(wait(&theirs, dead).await);
    }
    let mut next_told = wait(&ours, &next).await;
    theirs.close().await;
    eventually("the connection is gone", async || {
        let mut other = server.other().await;
        other.run::<Vec<String>>("PUBSUB CHANNELS holdfast:to:*").await.len() == 1
    })
    .await;
    free(&ours, &holder).await;
    // In the release itself: no time passes, and no other command is needed.
    assert!(
        tokio::time::timeout(Duration::from_millis(500), next_told.changed())
            .await
            .is_ok()
    );
    take(&ours, &next).await;
}

#[tokio::test]
async fn a_process_that_stands_still_costs_those_behind_it_its_time_once() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, mut other) = (server.engine().await, server.other().await);
    let (holder, next) = (claim("n"), waiting("n"));
    take(&ours, &holder).await;
    // A process that listens, and never answers, with many waiters in front.
    let (mut still, queue) = (server.other().await, "holdfast:queue:{lock:n}");
    still.run::<()>("SUBSCRIBE holdfast:to:00ff").await;
    for i in 0..100 {
        let member = format!("00ff:{:032x}", i);
        other.args::<()>(&["ZADD", queue, &(i + 1).to_string(), &member]).await;
    }
    let mut next_told = wait(&ours, &next).await;
    drop(wait(&ours, &waiting("n")).await);
    let till = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap()
        .as_millis()
        + 4000;
    other.args::<()>(&["ZADD", queue, &format!("-{till}"), "00ff"]).await;
    free(&ours, &holder).await;
    let held: String = other.run("GET lock:n").await;
    assert_eq!(
        held,
        format!("{:032x}-next", 0),
        "it is handed to the one that stands still"
    );
    let left: i64 = other.run("PTTL lock:n").await;
    assert!((1..=2000).contains(&left), "{left}");
    told(&mut next_told).await;
    take(&ours, &next).await;
    assert_eq!(
        other
            .args::<Vec<String>>(&["ZRANGEBYSCORE", queue, "0", "+inf"])
            .await
            .len(),
        1,
        "all of its waiters are passed over at once"
    );
    assert!(
        other.args::<Option<f64>>(&["ZSCORE", queue, "!00ff"]).await.is_some(),
        "they enter again after its next heartbeat"
    );
    assert!(
        other.args::<i64>(&["PTTL", queue]).await > 0,
        "what is left goes away by itself"
    );
}

#[tokio::test]
async fn a_short_ttl_is_no_shorter_wait_and_no_longer_hold_up() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, theirs, mut other) = (server.engine().await, server.engine().await, server.other().await);
    let (holder, mut first, next) = (claim("n"), waiting("n"), waiting("n"));
    first.ttl = Ttl::clamped(Duration::from_millis(250));
    take(&ours, &holder).await;
    let mut first_told = wait(&theirs, &first).await;
    let mut next_told = wait(&ours, &next).await;
    tokio::time::sleep(Duration::from_millis(600)).await;
    free(&ours, &holder).await;
    told(&mut first_told).await;
    let left: i64 = other.run("PTTL lock:n").await;
    assert!(left <= 250, "{left}");
    take(&theirs, &first).await;
    free(&theirs, &first).await;
    told(&mut next_told).await;
    take(&ours, &next).await;
    // Its release finds the place by the same member, and deletes the empty queue.
    drop(wait(&theirs, &first).await);
    assert_eq!(theirs.release(&first, Duration::ZERO).await.unwrap(), Released::NotHeld);
    assert_eq!(
        other.run::<i64>("EXISTS holdfast:queue:{lock:n}").await,
        0,
        "nobody waits"
    );
    free(&ours, &next).await;
    assert_eq!(other.run::<Vec<String>>("KEYS *").await, ["holdfast:last"]);
}

#[tokio::test]
async fn places_that_their_process_does_not_know_hold_nobody_up() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, mut other) = (server.engine().await, server.other().await);
    let (holder, next) = (claim("n"), waiting("n"));
    take(&ours, &holder).await;
    let mut next_told = wait(&ours, &next).await;
    // As a try that is carried out after its clean-up leaves them, or a restart with older data.
    let ghosts = |i: u32| format!("{}:{i:032x}", ours.waiters.process);
    for i in 1..=50 {
        other
            .args::<()>(&["ZADD", "holdfast:queue:{lock:n}", &i.to_string(), &ghosts(i)])
            .await;
    }
    free(&ours, &holder).await;
    told(&mut next_told).await;
    take(&ours, &next).await;
    // What somebody holds by now is not taken away by a message that comes late.
    let late = format!("{}:{} lock:n", ours.waiters.process, next.owner.as_str());
    other
        .args::<()>(&["PUBLISH", &format!("holdfast:to:{}", ours.waiters.process), &late])
        .await;
    drop(next_told);
    other
        .args::<()>(&["PUBLISH", &format!("holdfast:to:{}", ours.waiters.process), &late])
        .await;
    // One more round trip on the same connection, after the one that the message led to.
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(other.run::<String>("GET lock:n").await, next.owner.as_str());
    free(&ours, &next).await;
    assert_eq!(other.run::<Vec<String>>("KEYS *").await, ["holdfast:last"]);
}

#[tokio::test]
async fn a_process_that_comes_back_serves_its_own_waiters_in_order() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, theirs, mut other) = (server.engine().await, server.engine().await, server.other().await);
    let holder = claim("n");
    take(&theirs, &holder).await;
    let (first, second) = (waiting("n"), waiting("n"));
    let mut first_told = wait(&ours, &first).await;
    let mut second_told = wait(&ours, &second).await;
    // It was silent for too long, and its second waiter is the quicker one to ask.
    other
        .args::<()>(&["ZADD", "holdfast:queue:{lock:n}", "-1", &ours.waiters.process])
        .await;
    other.run::<()>("DEL lock:n").await;
    assert!(matches!(
        ours.try_acquire(&second).await.unwrap(),
        Acquired::Held { .. }
    ));
    told(&mut first_told).await;
    take(&ours, &first).await;
    free(&ours, &first).await;
    told(&mut second_told).await;
    take(&ours, &second).await;
}

#[tokio::test]
async fn the_queue_of_a_holder_that_died_moves_at_its_expiry() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, theirs) = (server.engine().await, server.engine().await);
    let mut holder = claim("n");
    holder.ttl = Ttl::clamped(Duration::from_millis(700));
    take(&ours, &holder).await;
    let (first, second) = (waiting("n"), waiting("n"));
    let mut first_told = wait(&ours, &first).await;
    let mut second_told = wait(&theirs, &second).await;
    // A renewal in between: who waits learns of the later end by itself.
    ours.renew(&holder, Ttl::clamped(Duration::from_millis(1500)))
        .await
        .unwrap();
    told(&mut first_told).await;
    quiet(&mut second_told).await;
    take(&ours, &first).await;
}

#[tokio::test]
async fn whoever_gives_up_hands_on_what_was_handed_to_it() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, mut other) = (server.engine().await, server.other().await);
    let (holder, first, second) = (claim("n"), waiting("n"), waiting("n"));
    take(&ours, &holder).await;
    let mut first_told = wait(&ours, &first).await;
    let mut second_told = wait(&ours, &second).await;
    free(&ours, &holder).await;
    told(&mut first_told).await;
    assert_eq!(ours.release(&first, Duration::ZERO).await.unwrap(), Released::NotHeld);
    told(&mut second_told).await;
    assert_eq!(ours.release(&second, Duration::ZERO).await.unwrap(), Released::NotHeld);
    assert_eq!(other.run::<Vec<String>>("KEYS *").await, ["holdfast:last"]);
}

#[tokio::test]
async fn waiters_find_their_places_again_after_the_store_was_emptied() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, mut other) = (server.engine().await, server.other().await);
    take(&ours, &claim("n")).await;
    let waiters: Vec<Claim> = (0..5).map(|_| waiting("n")).collect();
    let mut ears = Vec::new();
    for waiter in &waiters {
        ears.push(wait(&ours, waiter).await);
    }
    other.run::<()>("FLUSHALL").await;
    // Somebody else is quicker.
    let quick = claim("n");
    take(&ours, &quick).await;
    for (ear, waiter) in ears.iter_mut().zip(&waiters).rev() {
        told(ear).await;
        assert!(matches!(ours.try_acquire(waiter).await.unwrap(), Acquired::Held { .. }));
    }
    free(&ours, &quick).await;
    for (i, waiter) in waiters.iter().enumerate() {
        for late in &waiters[i + 1..] {
            assert!(matches!(ours.try_acquire(late).await.unwrap(), Acquired::Held { .. }));
        }
        take(&ours, waiter).await;
        free(&ours, waiter).await;
    }
}

#[tokio::test]
async fn waiting_sends_nothing_but_one_sign_of_life_for_all() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, mut other) = (server.engine().await, server.other().await);
    let mut ears = Vec::new();
    for name in ["a", "b", "c"] {
        take(&ours, &claim(name)).await;
        for _ in 0..100 {
            ears.push(wait(&ours, &waiting(name)).await);
        }
    }
    let calls = async |other: &mut Other| {
        let stats: String = other.run("INFO commandstats").await;
        let line = stats.lines().find(|line| line.starts_with("cmdstat_evalsha:")).unwrap();
        let calls = line.split(['=', ',']).nth(1).unwrap();
        calls.parse::<u32>().unwrap()
    };
    let before = calls(&mut other).await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    let sent = calls(&mut other).await - before;
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
    take(&ours, &holder).await;
    wait(&theirs, &waiting("n")).await;
    theirs.close().await;
    drop(theirs);
    let left: i64 = other.run("PTTL holdfast:queue:{lock:n}").await;
    assert!((60_000..=70_000).contains(&left), "{left}");
    // Long after: forgotten by whoever hands the name on.
    other.run::<()>("PERSIST holdfast:queue:{lock:n}").await;
    let members: Vec<String> = other.run("ZRANGE holdfast:queue:{lock:n} 0 -1").await;
    let process = members.iter().find(|member| !member.contains(':')).unwrap();
    other
        .args::<()>(&["ZADD", "holdfast:queue:{lock:n}", "-1000", process])
        .await;
    free(&ours, &holder).await;
    assert_eq!(other.run::<i64>("EXISTS holdfast:queue:{lock:n} lock:n").await, 0);
}

#[tokio::test]
async fn a_set_gives_back_the_name_it_was_handed_while_another_is_busy() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, mut other) = (server.engine().await, server.other().await);
    let (on_a, on_b) = (claim("a"), claim("b"));
    take(&ours, &on_a).await;
    take(&ours, &on_b).await;
    let mut set = Claim::new(
        &[key("a"), key("b")],
        OwnerToken::fresh(),
        Ttl::clamped(LONG),
        Arc::new(Process::current()),
    );
    set.waiting = true;
    let mut set_told = wait(&ours, &set).await;
    let behind = waiting("a");
    let mut behind_told = wait(&ours, &behind).await;
    free(&ours, &on_a).await;
    told(&mut set_told).await;
    assert!(matches!(
        ours.try_acquire(&set).await.unwrap(),
        Acquired::Held { key, .. } if key.as_str() == "b"
    ));
    told(&mut behind_told).await;
    take(&ours, &behind).await;
    free(&ours, &behind).await;
    assert_eq!(other.run::<i64>("EXISTS lock:a").await, 0);
    free(&ours, &on_b).await;
    told(&mut set_told).await;
    take(&ours, &set).await;
    assert_eq!(
        other
            .run::<i64>("EXISTS holdfast:queue:{lock:a} holdfast:queue:{lock:b}")
            .await,
        0
    );
}
