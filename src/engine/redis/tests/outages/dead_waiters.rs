//! Waiters that died or are suspended: the delay for the waiters behind them, and the load of the server.

use super::*;
use crate::engine::EngineExt;
use crate::engine::contract::refs;

const QUEUE: &str = "holdfast:queue:{lock:n}";

/// Adds waiters of processes that are gone, in front of every other.
async fn add_dead(other: &mut OtherClient, count: usize, processes: usize) {
    let till = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap()
        .as_millis()
        + 4000;
    let mut scores: Vec<(String, String)> = Vec::new();
    for process in 0..processes {
        scores.push((format!("-{till}"), format!("{process:016x}")));
    }
    for waiter in 0..count {
        let process = waiter % processes;
        scores.push(((waiter + 1).to_string(), format!("{process:016x}:{waiter:032x}")));
    }
    for some in scores.chunks(1000) {
        let mut args = vec!["ZADD", QUEUE];
        args.extend(
            some.iter()
                .flat_map(|(score, member)| [score.as_str(), member.as_str()]),
        );
        other.args::<()>(&args).await;
    }
}

#[tokio::test]
async fn a_hundred_thousand_dead_waiters_do_not_block_the_server() {
    // First with few processes, then with a process for each waiter.
    for processes in [10, 100_000] {
        // One script takes about 1 ms, and more where the machine stands still. Without a limit each script takes a second.
        one_succeeds(async |_| {
            let Some(server) = Server::start(&["--slowlog-log-slower-than", "100000"]).await else {
                return Ok(());
            };
            let (ours, theirs, mut other) = (server.engine().await, server.engine().await, server.other().await);
            let (holder, next) = (claim("n"), waiting("n"));
            acquire(&ours, &holder).await;
            let mut next_subscription = enqueue(&theirs, &next).await;
            add_dead(&mut other, 100_000, processes).await;
            other.run::<()>("SLOWLOG RESET").await;
            release(&ours, &holder).await;
            notified(&mut next_subscription).await;
            acquire(&theirs, &next).await;
            release(&theirs, &next).await;
            // Another owner takes the name while no live waiter is in the queue.
            let stranger = claim("n");
            acquire(&ours, &stranger).await;
            release(&ours, &stranger).await;
            let slow: i64 = other.run("SLOWLOG LEN").await;
            let stats: String = other.run("INFO commandstats").await;
            let field = |line: &str, name: &str| -> f64 {
                let found = line.split([':', ',']).find_map(|field| field.strip_prefix(name));
                found.unwrap().trim().parse().unwrap()
            };
            let line = stats.lines().find(|line| line.starts_with("cmdstat_evalsha:")).unwrap();
            let (calls, average) = (field(line, "calls="), field(line, "usec_per_call="));
            let what = format!("{processes} processes: {calls} scripts of {average} µs, {slow} of more than 100 ms");
            eprintln!("{what}");
            assert!(calls < 2000.0, "{what}");
            (slow == 0 && average < 20_000.0).then_some(()).ok_or(what)
        })
        .await;
    }
}

#[tokio::test]
async fn a_call_that_does_not_wait_gets_a_free_name_behind_dead_waiters() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, mut other) = (server.engine().await, server.other().await);
    add_dead(&mut other, 2000, 3).await;
    let any = claim("n");
    acquire(&ours, &any).await;
    release(&ours, &any).await;
    assert_eq!(other.run::<i64>(&format!("EXISTS {QUEUE}")).await, 0);
}

#[tokio::test]
async fn a_process_that_was_skipped_enters_the_queue_again() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, theirs, mut other) = (server.engine().await, server.engine().await, server.other().await);
    let (holder, first, second, third) = (claim("n"), waiting("n"), waiting("n"), waiting("n"));
    acquire(&ours, &holder).await;
    let mut first_subscription = enqueue(&theirs, &first).await;
    let mut second_subscription = enqueue(&ours, &second).await;
    // The first one's process counts as dead: as if it had stood still.
    other.args::<()>(&["ZADD", QUEUE, "-1", &theirs.waiters.process]).await;
    release(&ours, &holder).await;
    notified(&mut second_subscription).await;
    acquire(&ours, &second).await;
    let mut third_subscription = enqueue(&ours, &third).await;
    // After its next heartbeat it enters again, in front of the waiter that came later.
    notified(&mut first_subscription).await;
    assert!(matches!(
        theirs.try_acquire(&first).await.unwrap(),
        Acquired::Held { .. }
    ));
    release(&ours, &second).await;
    notified(&mut first_subscription).await;
    acquire(&theirs, &first).await;
    release(&theirs, &first).await;
    notified(&mut third_subscription).await;
}

#[tokio::test]
async fn a_suspended_waiter_with_a_short_ttl_blocks_the_next_for_its_ttl() {
    // 0.4 s. Without the notification of the next process it is the next heartbeat, some 2 s later.
    one_is_faster(Duration::from_millis(1300), async || {
        let Some(server) = Server::start(&[]).await else {
            return Duration::ZERO;
        };
        let (ours, mut other) = (server.engine().await, server.other().await);
        let (holder, next) = (claim("n"), waiting("n"));
        acquire(&ours, &holder).await;
        // A process that receives messages and never answers.
        let mut still = server.other().await;
        still.run::<()>("SUBSCRIBE holdfast:to:00ff").await;
        let mut next_subscription = enqueue(&ours, &next).await;
        let till = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .unwrap()
            .as_millis()
            + 4000;
        other
            .args::<()>(&["ZADD", QUEUE, "1", &format!("00ff:{:032x}:400", 1)])
            .await;
        other.args::<()>(&["ZADD", QUEUE, &format!("-{till}"), "00ff"]).await;
        let began = tokio::time::Instant::now();
        release(&ours, &holder).await;
        let held: String = other.run("GET lock:n").await;
        assert_eq!(held, format!("{:032x}-next", 1));
        notified(&mut next_subscription).await;
        acquire(&ours, &next).await;
        began.elapsed()
    })
    .await;
}

#[tokio::test]
async fn a_claim_of_several_names_that_continues_to_wait_keeps_its_process_alive() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, theirs, mut other) = (server.engine().await, server.engine().await, server.other().await);
    let (x, y) = (claim("n"), claim("y"));
    acquire(&ours, &x).await;
    acquire(&ours, &y).await;
    let mut both = Claim::new(
        &[key("n"), key("y")],
        OwnerToken::fresh(),
        Ttl::clamped(Duration::from_millis(300)),
        Arc::new(Process::current()),
    );
    both.waiting = true;
    // Two claims of one process: first a claim of both names, behind it a claim of the first name.
    let (mut both_subscription, behind) = (enqueue(&theirs, &both).await, waiting("n"));
    let mut behind_subscription = enqueue(&theirs, &behind).await;
    // A waiter of another process comes last.
    let last = waiting("n");
    let mut last_subscription = enqueue(&ours, &last).await;
    release(&ours, &x).await;
    notified(&mut both_subscription).await;
    // The other name is busy: the first one goes to the waiter behind, and the liveness of the process stays.
    assert!(matches!(
        theirs.try_acquire(&both).await.unwrap(),
        Acquired::Held { key, .. } if key.as_str() == "y"
    ));
    notified(&mut behind_subscription).await;
    acquire(&theirs, &behind).await;
    let left = waiting("n");
    drop(enqueue(&theirs, &left).await);
    let till: String = other.args(&["ZSCORE", QUEUE, &theirs.waiters.process]).await;
    let now: Vec<String> = other.run("TIME").await;
    let alive = -till.parse::<f64>().unwrap() - now[0].parse::<f64>().unwrap() * 1000.0;
    assert!(alive > 2500.0, "alive for {alive} ms");
    let quiet = tokio::time::timeout(Duration::from_millis(100), last_subscription.changed()).await;
    assert!(quiet.is_err());
}

/// Returns the owners of the queue's waiters, in the order of service.
async fn served(other: &mut OtherClient, queue: &str) -> Vec<String> {
    let members: Vec<String> = other.args(&["ZRANGEBYSCORE", queue, "0", "+inf"]).await;
    let owner = |member: &String| member.split(':').nth(1).unwrap().to_owned();
    members.iter().map(owner).collect()
}

#[tokio::test]
async fn attempts_in_order_take_effect_in_order() {
    for names in [&["n"][..], &["n", "z"]] {
        // The server has no script yet, and the engine no subscription.
        let Some(server) = Server::start(&[]).await else { return };
        let (ours, mut other) = (server.engine().await, server.other().await);
        let names: Vec<Key> = names.iter().map(|name| key(name)).collect();
        let claims: Vec<Arc<Claim>> = (0..64)
            .map(|_| {
                let ttl = Ttl::clamped(LONG);
                let mut claim = Claim::new(&names, OwnerToken::fresh(), ttl, Arc::new(Process::current()));
                claim.waiting = true;
                Arc::new(claim)
            })
            .collect();
        for round in 0..2 {
            let mut answers: Vec<Option<Acquired>> = vec![None; claims.len()];
            ours.try_acquire_all(&refs(&claims), &mut |index, answer| {
                answers[index] = Some(answer.unwrap())
            })
            .await;
            let granted = |answer: &Option<Acquired>| matches!(answer, Some(Acquired::Granted { .. }));
            assert!(granted(&answers[0]), "{:?}", answers[0]);
            assert!(answers[1..].iter().all(|answer| answer.is_some() && !granted(answer)));
            assert!(claims.iter().all(|claim| claim.was_sent()));
            let order: Vec<String> = claims[1..]
                .iter()
                .map(|claim| claim.owner.as_str().to_owned())
                .collect();
            assert_eq!(served(&mut other, QUEUE).await, order, "round {round}");
            other.run::<()>("SCRIPT FLUSH").await;
        }
    }
}

/// Attempts that share a pipeline, behind more dead waiters than one script removes.
#[tokio::test]
async fn attempts_in_order_take_effect_in_order_behind_dead_waiters() {
    // One script removes 256. The last count leaves each attempt of the pipeline undecided.
    for dead in [300, 700, 2000] {
        let Some(server) = Server::start(&[]).await else { return };
        let (ours, mut other) = (server.engine().await, server.other().await);
        // Open this process's channel.
        let held = claim("held");
        acquire(&ours, &held).await;
        let _subscription = enqueue(&ours, &waiting("held")).await;
        add_dead(&mut other, dead, 3).await;
        let claims: Vec<Arc<Claim>> = (0..4).map(|_| Arc::new(waiting("n"))).collect();
        let mut granted = Vec::new();
        ours.try_acquire_all(&refs(&claims), &mut |index, acquired| {
            if let Acquired::Granted { .. } = acquired.unwrap() {
                granted.push(index);
            }
        })
        .await;
        assert_eq!(granted, [0], "behind {dead} dead waiters");
        let order: Vec<String> = claims[1..]
            .iter()
            .map(|claim| claim.owner.as_str().to_owned())
            .collect();
        assert_eq!(served(&mut other, QUEUE).await, order);
        release(&ours, &claims[0]).await;
        acquire(&ours, &claims[1]).await;
    }
}

/// An attempt that is undecided because of its second name goes before a later attempt for the first name.
#[tokio::test]
async fn an_undecided_attempt_of_two_names_is_granted_before_a_later_one_of_its_first_name() {
    let Some(server) = Server::start(&[]).await else { return };
    let (ours, mut other) = (server.engine().await, server.other().await);
    let held = claim("held");
    acquire(&ours, &held).await;
    let _subscription = enqueue(&ours, &waiting("held")).await;
    add_dead(&mut other, 300, 3).await;
    let mut both = Claim::new(
        &[key("a"), key("n")],
        OwnerToken::fresh(),
        Ttl::clamped(LONG),
        Arc::new(Process::current()),
    );
    both.waiting = true;
    let claims = [Arc::new(both), Arc::new(waiting("a"))];
    let mut granted = Vec::new();
    ours.try_acquire_all(&refs(&claims), &mut |index, acquired| {
        if let Acquired::Granted { .. } = acquired.unwrap() {
            granted.push(index);
        }
    })
    .await;
    assert_eq!(granted, [0]);
    release(&ours, &claims[0]).await;
    acquire(&ours, &claims[1]).await;
    release(&ours, &claims[1]).await;
    assert_eq!(other.run::<i64>("EXISTS holdfast:queue:{lock:a}").await, 0);
}

#[tokio::test]
async fn a_fence_companion_of_a_cluster_outlives_a_release_by_a_day() {
    let Some(server) = Server::start(&["--cluster-enabled", "yes", "--cluster-announce-ip", "127.0.0.1"]).await else {
        return;
    };
    let mut other = server.other().await;
    other.run::<()>("CLUSTER ADDSLOTSRANGE 0 16383").await;
    eventually("a cluster that serves", async || {
        other.run::<String>("CLUSTER INFO").await.contains("cluster_state:ok")
    })
    .await;
    let ours = engine(&server.url().replace("redis:", "redis+cluster:"), "lock:").await;
    let long = || {
        let ttl = Ttl::clamped(Duration::from_secs(20 * 24 * 3600));
        Claim::new(&[key("n")], OwnerToken::fresh(), ttl, Arc::new(Process::current()))
    };
    for how in 0..4 {
        let held = long();
        acquire(&ours, &held).await;
        match how {
            0 => release(&ours, &held).await,
            1 => assert!(ours.force_release(&key("n")).await.unwrap()),
            2 => {
                // Two claims share a script.
                let mut released = Vec::new();
                ours.release_all(&[&held, &claim("{n}")], Duration::ZERO, &mut |index, answer| {
                    released.push((index, answer.unwrap()))
                })
                .await;
                assert!(released.contains(&(0, Released::Freed)), "{released:?}");
            }
            _ => {
                let keep = Duration::from_millis(500);
                assert_eq!(ours.release(&held, keep).await.unwrap(), Released::Freed);
            }
        }
        let left: i64 = other.run("PTTL holdfast:fence:{lock:n}").await;
        assert!((1..=25 * 3_600_000 + 60_000).contains(&left), "{left} ms, after {how}");
    }
}
