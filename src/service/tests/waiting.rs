//! Waiting: order, deadlines, aborts, and what they leave in the store.

use std::sync::Mutex;
use std::sync::atomic::Ordering::SeqCst;

use super::faults::Fault;
use super::*;
use crate::engine::EngineExt;
use crate::model::{Claim, Process};

fn waiter(locks: &Locks, name: &'static str, wait: u64) -> tokio::task::JoinHandle<Result<Outcome, LockError>> {
    let locks = locks.clone();
    tokio::spawn(async move { attempt(&locks, name, options(30_000, wait)).await })
}

#[tokio::test(start_paused = true)]
async fn a_wait_ends_on_time_and_leaves_the_queue() {
    let (engine, locks) = service();
    let lease = take(&locks, "n", options(30_000, 0)).await;
    let started = tokio::time::Instant::now();
    let outcome = attempt(&locks, "n", options(1000, 250)).await.unwrap();
    assert!(matches!(outcome, Outcome::Busy(_)), "{outcome:?}");
    assert_eq!(started.elapsed(), ms(250));
    settle().await;
    locks.release(&lease).await.unwrap();
    let other = another(&engine);
    take(&other, "n", options(1000, 0)).await;
    let stats = locks.stats();
    assert_eq!((stats.waiting, stats.busy), (0, 1));
}

#[tokio::test(start_paused = true)]
async fn an_attempt_without_an_answer_prolongs_a_wait_by_a_second_at_most() {
    for unordered in [false, true] {
        let (engine, locks) = service_with(!unordered, 0);
        let other = another(&engine);
        let held = take(&other, "n", options(30_000, 0)).await;
        let started = tokio::time::Instant::now();
        let waiting = [waiter(&locks, "n", 2000), waiter(&locks, "n", 2000)];
        tokio::time::sleep(ms(1900)).await;
        other.release(&held).await.unwrap();
        engine.hang();
        for call in waiting {
            let outcome = call.await.unwrap().unwrap();
            assert!(matches!(outcome, Outcome::Busy(_)), "{outcome:?}");
            assert!(started.elapsed() <= ms(3000), "{:?}", started.elapsed());
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_wait_without_a_limit_ends_with_the_current_lease() {
    let (engine, locks) = service();
    let not_renewed = AcquireOptions {
        renew: false,
        ..options(3_600_000, 0)
    };
    take(&locks, "n", not_renewed).await;
    let other = another(&engine);
    let unlimited = AcquireOptions {
        wait: Wait::Forever,
        ..options(1000, 0)
    };
    let started = tokio::time::Instant::now();
    take(&other, "n", unlimited).await;
    assert!(
        started.elapsed() >= ms(3_600_000) && started.elapsed() < ms(3_600_100),
        "{:?}",
        started.elapsed()
    );
}

/// None of them has a position in the store's queue when the store works again.
#[tokio::test(start_paused = true)]
async fn waiters_whose_attempts_failed_are_served_in_the_order_of_their_calls() {
    for round in 0..5 {
        let (engine, locks) = service();
        engine.set(faults::Fault::Refuse);
        let served = Arc::new(Mutex::new(Vec::new()));
        let mut tasks = Vec::new();
        for i in 0..8 {
            let (locks, served) = (locks.clone(), served.clone());
            tasks.push(tokio::spawn(async move {
                let lease = take(&locks, "n", options(30_000, 60_000)).await;
                served.lock().unwrap().push(i);
                locks.release(&lease).await.unwrap();
            }));
            tokio::time::sleep(ms(17)).await;
        }
        tokio::time::sleep(ms(400 + round * 90)).await;
        engine.set(faults::Fault::None);
        for task in tasks {
            task.await.unwrap();
        }
        assert_eq!(*served.lock().unwrap(), (0..8).collect::<Vec<_>>());
        locks.close().await;
        assert!(locks.shared.attempts.is_empty());
    }
}

#[tokio::test(start_paused = true)]
async fn a_failed_attempt_keeps_its_position_before_later_ones() {
    let (engine, locks) = service();
    engine.set(faults::Fault::RefuseOne);
    let served = Arc::new(Mutex::new(Vec::new()));
    let mut tasks = Vec::new();
    for i in 0..4 {
        let (locks, served) = (locks.clone(), served.clone());
        tasks.push(tokio::spawn(async move {
            let lease = take(&locks, "n", options(30_000, 60_000)).await;
            served.lock().unwrap().push(i);
            locks.release(&lease).await.unwrap();
        }));
        // The last call comes during the pause after the failure, when the store works.
        if i == 2 {
            tokio::time::sleep(ms(3)).await;
        }
    }
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!(*served.lock().unwrap(), [0, 1, 2, 3]);
}

/// For example because another name of these claims lies on a server that is down.
#[tokio::test(start_paused = true)]
async fn claims_that_keep_failing_do_not_stop_other_waiters_of_a_name() {
    let (engine, locks) = service();
    engine.set(faults::Fault::RefuseSets);
    let mut failing = Vec::new();
    for _ in 0..200 {
        let locks = locks.clone();
        failing.push(tokio::spawn(async move {
            locks
                .acquire(Names::unique(&[key("n"), key("other")]), options(30_000, 60_000), None)
                .await
        }));
    }
    tokio::time::sleep(ms(1000)).await;
    let began = tokio::time::Instant::now();
    let lease = take(&locks, "n", options(30_000, 60_000)).await;
    assert!(began.elapsed() <= ms(600), "{:?}", began.elapsed());
    locks.release(&lease).await.unwrap();
    for call in failing {
        let error = call.await.unwrap().unwrap_err();
        assert!(error.message.contains("refused"), "{error}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_lost_request_fails_one_local_waiter_and_not_those_behind_it() {
    let (engine, locks) = service_with(false, 0);
    engine.set(faults::Fault::HangOne);
    let calls: Vec<_> = (0..3).map(|_| waiter(&locks, "n", 60_000)).collect();
    tokio::time::sleep(ms(1000)).await;
    // The store answers other calls meanwhile.
    take(&locks, "other", options(30_000, 1000)).await;
    for (i, call) in calls.into_iter().enumerate() {
        match call.await.unwrap() {
            Ok(Outcome::Acquired(lease)) => {
                assert!(i > 0, "its request was lost");
                locks.release(&lease).await.unwrap();
            }
            outcome => assert!(
                i == 0 && outcome.is_err_and(|error| error.code == Code::Store),
                "call {i}"
            ),
        }
    }
}

/// If the store keeps no queue, one local waiter calls it. The others do not take its missing answer for a busy lock.
#[tokio::test(start_paused = true)]
async fn every_local_waiter_learns_that_the_store_does_not_answer() {
    for fault in [faults::Fault::Hang, faults::Fault::Refuse] {
        let (engine, locks) = service_with(false, 0);
        engine.set(fault);
        let began = tokio::time::Instant::now();
        // The store timeout is 5 s, and never longer than the wait.
        let waits = [60_000, 60_000, 2_000, 8_000];
        let calls: Vec<_> = waits.into_iter().map(|wait| waiter(&locks, "n", wait)).collect();
        for (call, wait) in calls.into_iter().zip(waits) {
            let error = call.await.unwrap().unwrap_err();
            assert_eq!(error.code, Code::Store, "{error}");
            let text = if fault == faults::Fault::Refuse {
                "refused"
            } else {
                "no answer"
            };
            assert!(error.message.contains(text), "{error}");
            assert!(
                began.elapsed() <= ms(5_100),
                "{:?} with a wait of {wait} ms",
                began.elapsed()
            );
        }
        assert_eq!(locks.stats().waiting, 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_local_waiter_finds_the_lock_busy_at_its_deadline_while_the_store_answers_slowly() {
    let (engine, locks) = service_with(false, 0);
    let other = another(&engine);
    take(&other, "n", options(30_000, 0)).await;
    engine.set(faults::Fault::SlowReply(700));
    let began = tokio::time::Instant::now();
    let calls = [waiter(&locks, "n", 10_000), waiter(&locks, "n", 300)];
    settle().await;
    let [_, second] = calls;
    let outcome = second.await.unwrap().unwrap();
    assert!(matches!(outcome, Outcome::Busy(_)), "{outcome:?}");
    assert!(began.elapsed() <= ms(800), "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn waiters_are_served_in_order_across_services() {
    let (engine, locks) = service();
    let other = another(&engine);
    let first = take(&locks, "n", options(30_000, 0)).await;
    let served = Arc::new(Mutex::new(Vec::new()));
    let mut tasks = Vec::new();
    for i in 0..20 {
        let (locks, served) = (if i % 3 == 0 { locks.clone() } else { other.clone() }, served.clone());
        tasks.push(tokio::spawn(async move {
            let lease = take(&locks, "n", options(30_000, 60_000)).await;
            served.lock().unwrap().push(i);
            tokio::time::sleep(ms(10)).await;
            assert!(locks.release(&lease).await.unwrap());
        }));
        settle().await;
    }
    let started = tokio::time::Instant::now();
    locks.release(&first).await.unwrap();
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!(*served.lock().unwrap(), (0..20).collect::<Vec<_>>());
    assert_eq!(started.elapsed(), ms(200), "the release woke each waiter, not a poll");
}

/// If the store keeps no queue, the waiters of a process form one FIFO: one process makes attempts for one waiter at a time.
#[tokio::test(start_paused = true)]
async fn local_waiters_form_one_fifo() {
    let (engine, locks) = service_with(false, 0);
    let first = take(&locks, "n", options(30_000, 0)).await;
    let served = Arc::new(Mutex::new(Vec::new()));
    let mut tasks = Vec::new();
    for i in 0..50 {
        let (locks, served) = (locks.clone(), served.clone());
        tasks.push(tokio::spawn(async move {
            let lease = take(&locks, "n", options(30_000, 60_000)).await;
            served.lock().unwrap().push(i);
            assert!(locks.release(&lease).await.unwrap());
        }));
        settle().await;
    }
    let before = engine.attempts.load(SeqCst);
    assert!(before <= 4, "{before} attempts by 50 waiters of one process");
    tokio::time::sleep(ms(20_000)).await;
    let polls = engine.attempts.load(SeqCst) - before;
    assert!(polls <= 4, "{polls} commands while 50 waiters waited 20 s");
    locks.release(&first).await.unwrap();
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!(*served.lock().unwrap(), (0..50).collect::<Vec<_>>());
}

#[tokio::test(start_paused = true)]
async fn a_waiter_that_leaves_the_fifo_unblocks_the_next_one() {
    let (_, locks) = service_with(false, 0);
    let first = take(&locks, "n", options(30_000, 0)).await;
    let abort = CancellationToken::new();
    let aborted = {
        let (locks, abort) = (locks.clone(), abort.clone());
        tokio::spawn(async move {
            locks
                .acquire(Names::unique(&[key("n")]), options(30_000, 60_000), Some(abort))
                .await
        })
    };
    settle().await;
    let short = waiter(&locks, "n", 100);
    settle().await;
    let long = waiter(&locks, "n", 60_000);
    settle().await;
    abort.cancel();
    assert!(matches!(aborted.await.unwrap().unwrap(), Outcome::Aborted));
    assert!(matches!(short.await.unwrap().unwrap(), Outcome::Busy(_)));
    locks.release(&first).await.unwrap();
    assert!(matches!(long.await.unwrap().unwrap(), Outcome::Acquired(_)));
    assert_eq!(locks.stats().waiting, 0);
}

#[tokio::test(start_paused = true)]
async fn an_aborted_waiter_does_not_block_others() {
    let (engine, locks) = service();
    let other = another(&engine);
    let lease = take(&locks, "n", options(30_000, 0)).await;
    let abort = CancellationToken::new();
    let aborted = {
        let (locks, abort) = (other.clone(), abort.clone());
        tokio::spawn(async move {
            locks
                .acquire(Names::unique(&[key("n")]), options(30_000, 60_000), Some(abort))
                .await
        })
    };
    settle().await;
    abort.cancel();
    assert!(matches!(aborted.await.unwrap().unwrap(), Outcome::Aborted));
    locks.release(&lease).await.unwrap();
    settle().await;
    assert!(!is_busy(&locks, "n").await);
}

#[tokio::test(start_paused = true)]
async fn duplicate_names_count_once() {
    let (_, locks) = service();
    let outcome = locks
        .acquire(Names::unique(&[key("b"), key("a"), key("b")]), options(1000, 0), None)
        .await;
    let Outcome::Acquired(lease) = outcome.unwrap() else {
        panic!("a duplicate name blocks itself")
    };
    assert_eq!(lease.names(), [key("b"), key("a")]);
}

#[tokio::test(start_paused = true)]
async fn overlapping_sets_are_all_served() {
    let sets = [
        vec!["a", "b"],
        vec!["b", "c"],
        vec!["c", "a"],
        vec!["a"],
        vec!["c", "b", "a"],
    ];
    for unordered in [false, true] {
        let (engine, locks) = service_with(!unordered, 0);
        let other = another(&engine);
        let mut tasks = Vec::new();
        for (i, set) in sets.iter().cycle().take(20).enumerate() {
            let locks = if i % 2 == 0 { locks.clone() } else { other.clone() };
            let keys: Vec<Key> = set.iter().map(|name| key(name)).collect();
            tasks.push(tokio::spawn(async move {
                let outcome = locks
                    .acquire(Names::unique(&keys), options(30_000, 600_000), None)
                    .await
                    .unwrap();
                let Outcome::Acquired(lease) = outcome else {
                    panic!("starved: {outcome:?}")
                };
                tokio::time::sleep(ms(5)).await;
                assert!(locks.release(&lease).await.unwrap());
            }));
        }
        for task in tasks {
            task.await.unwrap();
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_busy_outcome_names_the_holder_if_the_options_ask_for_it() {
    let (engine, locks) = service();
    take(&locks, "n", options(60_000, 0)).await;
    let asking = |wait| AcquireOptions {
        report_holder: true,
        ..options(60_000, wait)
    };
    // The holder is read without a wait for its fencing token.
    for (wait, fault) in [(0, Fault::None), (500, Fault::None), (0, Fault::NoToken)] {
        engine.set(fault);
        let Outcome::Busy(Some(busy)) = attempt(&locks, "n", asking(wait)).await.unwrap() else {
            panic!("no holder");
        };
        assert!(busy.is_own && busy.name == key("n"), "{busy:?}");
        let info = busy.info.unwrap();
        assert!(info.is_some_and(|info| info.holder.is_some()), "{fault:?}");
    }
    engine.set(Fault::None);
    // A store that stops answering does not delay the end of the wait.
    let waiter = locks.clone();
    let waiting = asking(500);
    let started = tokio::time::Instant::now();
    let waiter = tokio::spawn(async move { attempt(&waiter, "n", waiting).await });
    tokio::time::sleep(ms(100)).await;
    engine.hang();
    let Outcome::Busy(Some(busy)) = waiter.await.unwrap().unwrap() else {
        panic!("not busy");
    };
    assert!(busy.info.is_err() && busy.name == key("n"), "{busy:?}");
    assert!(started.elapsed() <= ms(1500), "{:?}", started.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_holder_with_the_same_host_and_process_id_is_this_process_only_if_it_has_the_lease() {
    let (engine, locks) = service();
    let is_own = async |locks: &Locks| {
        let asking = AcquireOptions {
            report_holder: true,
            ..options(60_000, 0)
        };
        match attempt(locks, "n", asking).await.unwrap() {
            Outcome::Busy(Some(busy)) => busy.is_own,
            other => panic!("expected a holder, got {other:?}"),
        }
    };
    // A container with the same host name and process id.
    let process = Arc::new(Process::current());
    let theirs = Claim::new(&[key("n")], OwnerToken::fresh(), Ttl::clamped(ms(60_000)), process);
    engine.store().try_acquire(&theirs).await.unwrap();
    assert!(!is_own(&locks).await);
    // This process has the name in another store.
    let (_elsewhere, other) = service();
    take(&other, "n", options(60_000, 0)).await;
    assert!(!is_own(&locks).await);
    engine.store().release(&theirs, Duration::ZERO).await.unwrap();
    // Another service of this process.
    take(&another(&engine), "n", options(60_000, 0)).await;
    assert!(is_own(&locks).await);
}
