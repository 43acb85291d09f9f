//! Tests of many calls at once, and of calls whose caller is dropped.

use futures_util::FutureExt;
use futures_util::future::join_all;

use super::*;
use crate::engine::EngineExt;
use crate::engine::contract::refs;

/// Acquires the write lock as another program: the writer waits in its first transaction.
async fn blocked(folder: &Path) -> SqliteConnection {
    let mut stranger = raw(folder).await;
    stranger.execute("BEGIN IMMEDIATE").await.unwrap();
    stranger
}

async fn unblock(mut stranger: SqliteConnection) {
    stranger.execute("ROLLBACK").await.unwrap();
    stranger.close().await.unwrap();
}

/// Starts a call and lets the writer start it, if it can.
async fn started<F: Future + Unpin>(call: &mut F) {
    assert!(call.now_or_never().is_none(), "it was answered");
    tokio::time::sleep(Duration::from_millis(50)).await;
}

#[tokio::test]
async fn a_cancelled_attempt_is_never_executed() {
    let folder = folder();
    let engine = open(folder.path()).await;
    let stranger = blocked(folder.path()).await;
    let first = claim(&["first"], 60_000);
    let mut first_call = Box::pin(engine.try_acquire(&first));
    started(&mut first_call).await;
    sent(&first).await;
    let names: Vec<String> = (0..300).map(|n| format!("cancelled {n}")).collect();
    let claims: Vec<Claim> = names.iter().map(|name| claim(&[name], 60_000)).collect();
    let listed: Vec<Arc<Claim>> = (0..3)
        .map(|n| Arc::new(claim(&[&format!("listed {n}")], 60_000)))
        .collect();
    {
        let mut calls: Vec<_> = claims.iter().map(|claim| Box::pin(engine.try_acquire(claim))).collect();
        let mut ignore = |_, _| {};
        let listed = refs(&listed);
        let mut in_order = engine.try_acquire_all(&listed, &mut ignore);
        let renewed = &claims[0];
        let mut renewal = Box::pin(engine.renew(renewed, renewed.ttl));
        for call in &mut calls {
            assert!(call.now_or_never().is_none());
        }
        assert!((&mut in_order).now_or_never().is_none());
        started(&mut renewal).await;
    }
    assert!(!claims.iter().any(Claim::was_sent) && !listed.iter().any(|claim| claim.was_sent()));
    unblock(stranger).await;
    assert!(matches!(first_call.await.unwrap(), Acquired::Granted { .. }));
    assert!(first.was_sent());
    let held = engine.list("", Duration::from_secs(5)).await.unwrap();
    assert_eq!(held.into_iter().map(|info| info.name).collect::<Vec<_>>(), ["first"]);
}

#[tokio::test]
async fn a_release_takes_effect_after_a_cancelled_attempt() {
    let folder = folder();
    let engine = open(folder.path()).await;
    for in_order in [false, true] {
        let stranger = blocked(folder.path()).await;
        let ours = Arc::new(claim(&["n"], 60_000));
        let listed = [ours.clone()];
        let listed = refs(&listed);
        let mut ignore = |_, _| {};
        let mut call = if in_order {
            engine.try_acquire_all(&listed, &mut ignore)
        } else {
            engine.try_acquire(&ours).map(drop).boxed()
        };
        started(&mut call).await;
        sent(&ours).await;
        drop(call);
        assert!(ours.was_sent(), "the writer has begun its transaction");
        let (released, ()) = tokio::join!(engine.release(&ours, Duration::ZERO), async {
            tokio::time::sleep(Duration::from_millis(50)).await;
            unblock(stranger).await;
        });
        released.unwrap();
        assert_eq!(engine.inspect(&key("n")).await.unwrap(), None);
    }
}

/// Renewals and releases wait for one transaction, however many attempts are queued.
#[tokio::test]
async fn renewals_and_releases_go_before_queued_attempts() {
    let folder = folder();
    let engine = open(folder.path()).await;
    let (kept, ended) = (claim(&["kept"], 60_000), claim(&["ended"], 60_000));
    assert!(granted(&engine, &kept).await && granted(&engine, &ended).await);
    let stranger = blocked(folder.path()).await;
    let names: Vec<String> = (0..3000).map(|n| n.to_string()).collect();
    let claims: Vec<Claim> = names.iter().map(|name| claim(&[name], 60_000)).collect();
    let done = std::cell::Cell::new(0);
    let attempts = join_all(claims.iter().map(|claim| async {
        assert!(granted(&engine, claim).await);
        done.set(done.get() + 1);
    }));
    let first = async {
        tokio::time::sleep(Duration::from_millis(50)).await;
        let (renewed, released, ()) = tokio::join!(
            engine.renew(&kept, kept.ttl),
            engine.release(&ended, Duration::ZERO),
            unblock(stranger)
        );
        assert_eq!(
            (renewed.unwrap(), released.unwrap()),
            (Renewed::Extended, Released::Freed)
        );
        done.get()
    };
    let (before, _) = tokio::join!(first, attempts);
    assert!(before <= 256, "{before} attempts were executed before them");
}

/// Each loop reads 64 names at once, so that more reads wait than a transaction executes.
#[tokio::test]
async fn attempts_are_made_while_loops_poll_inspect() {
    let folder = folder();
    let engine = open(folder.path()).await;
    let reads = std::cell::Cell::new(0);
    let poll = || async {
        for _ in 0..60 {
            let inspected = (0..64).map(|_| async {
                assert_eq!(engine.inspect(&key("n")).await.unwrap(), None);
                reads.set(reads.get() + 1);
            });
            join_all(inspected).await;
        }
    };
    let polls = join_all((0..8).map(|_| poll()));
    let names: Vec<String> = (0..100).map(|n| format!("attempt {n}")).collect();
    let claims: Vec<Claim> = names.iter().map(|name| claim(&[name], 60_000)).collect();
    let attempts = async {
        let granted = join_all(claims.iter().map(|claim| granted(&engine, claim))).await;
        assert_eq!(granted, [true; 100]);
        reads.get()
    };
    let (before, _) = tokio::join!(attempts, polls);
    assert!(
        before <= 60 * 64 * 8 / 4,
        "{before} reads were answered before 100 attempts"
    );
}

#[tokio::test]
async fn attempts_are_made_during_a_flood_of_releases() {
    let folder = folder();
    let engine = open(folder.path()).await;
    let names: Vec<String> = (0..10_000).map(|n| n.to_string()).collect();
    let claims: Vec<Claim> = names.iter().map(|name| claim(&[name], 60_000)).collect();
    let released = std::cell::Cell::new(0);
    let releases = join_all(claims.iter().map(|claim| async {
        engine.release(claim, Duration::ZERO).await.unwrap();
        released.set(released.get() + 1);
    }));
    let attempts = async {
        let attempts: Vec<Claim> = (0..100).map(|n| claim(&[&format!("attempt {n}")], 60_000)).collect();
        let granted = join_all(attempts.iter().map(|claim| granted(&engine, claim))).await;
        assert_eq!(granted, [true; 100]);
        released.get()
    };
    let (_, before) = tokio::join!(releases, attempts);
    assert!(before <= 2500, "{before} releases were answered before 100 attempts");
}

#[tokio::test]
async fn attempts_in_order_take_effect_in_order() {
    let folder = folder();
    let (engine, other) = (open(folder.path()).await, open(folder.path()).await);
    let waiters: Vec<Arc<Claim>> = (0..20).map(|_| Arc::new(waiting(&["n"], 60_000))).collect();
    let mut answers = Vec::new();
    let mut collect = |index, answer: Result<Acquired>| answers.push((index, answer.unwrap()));
    engine.try_acquire_all(&refs(&waiters), &mut collect).await;
    assert_eq!(
        answers.iter().map(|(index, _)| *index).collect::<Vec<_>>(),
        (0..20).collect::<Vec<_>>()
    );
    assert!(matches!(answers[0].1, Acquired::Granted { .. }));
    assert!(
        answers[1..]
            .iter()
            .all(|(_, answer)| matches!(answer, Acquired::Held { .. }))
    );
    assert!(waiters.iter().all(|claim| claim.was_sent()));
    for pair in waiters.windows(2) {
        assert_eq!(other.release(&pair[0], Duration::ZERO).await.unwrap(), Released::Freed);
        for later in waiters
            .iter()
            .skip_while(|claim| claim.owner != pair[1].owner)
            .skip(1)
            .take(2)
        {
            assert!(!granted(&other, later).await, "out of order");
        }
        assert!(granted(&other, &pair[1]).await);
    }
}

#[tokio::test]
async fn many_releases_share_a_transaction() {
    let folder = folder();
    let engine = open(folder.path()).await;
    let names: Vec<String> = (0..256).map(|n| n.to_string()).collect();
    let claims: Vec<Claim> = names.iter().map(|name| claim(&[name], 60_000)).collect();
    for held in &claims[1..] {
        assert!(granted(&engine, held).await);
    }
    let mut answers = Vec::new();
    let mut collect = |_, answer: Result<Released>| answers.push(answer.unwrap());
    engine.release_all(&refs(&claims), Duration::ZERO, &mut collect).await;
    assert_eq!(answers[0], Released::NotHeld);
    assert_eq!(answers[1..], [Released::Freed; 255]);
    assert!(engine.list("", Duration::from_secs(5)).await.unwrap().is_empty());
}

/// A claim that fails for a reason of its own does not make others fail.
#[tokio::test]
async fn a_bad_claim_fails_alone() {
    let folder = folder();
    let engine = open(folder.path()).await;
    let claims = [
        claim(&["good"], 60_000),
        claim(&["bad"], 60_000),
        claim(&["fine"], 60_000),
    ];
    for held in &claims {
        assert!(granted(&engine, held).await);
    }
    raw(folder.path())
        .await
        .execute(
            "CREATE TRIGGER bad BEFORE DELETE ON locks WHEN old.name = x'626164' BEGIN SELECT raise(ABORT, 'bad'); END",
        )
        .await
        .unwrap();
    let mut failed = Vec::new();
    let mut collect = |index, answer: Result<Released>| failed.extend(answer.err().map(|_| index));
    engine.release_all(&refs(&claims), Duration::ZERO, &mut collect).await;
    assert_eq!(failed, [1]);
}

#[tokio::test]
async fn a_list_comes_in_pages() {
    let folder = folder();
    let engine = open(folder.path()).await;
    let mut names: Vec<String> = (0..2500).map(|n| format!("page {n}")).collect();
    let many: Vec<&str> = names.iter().map(String::as_str).collect();
    assert!(granted(&engine, &claim(&many, 60_000)).await);
    assert!(granted(&engine, &claim(&["a", "z"], 60_000)).await);
    let listed = engine.list("page ", Duration::from_secs(5)).await.unwrap();
    names.sort();
    assert_eq!(listed.into_iter().map(|info| info.name).collect::<Vec<_>>(), names);
    // Each page has its own limit. Here the first one waits behind a transaction that cannot begin.
    let stranger = blocked(folder.path()).await;
    let ours = claim(&["n"], 60_000);
    let mut call = Box::pin(engine.try_acquire(&ours));
    started(&mut call).await;
    let error = engine.list("", Duration::from_millis(100)).await.unwrap_err();
    assert!(error.retryable && error.to_string().contains("100 ms"), "{error}");
    unblock(stranger).await;
    assert!(matches!(call.await.unwrap(), Acquired::Granted { .. }));
}

/// 20 000 free names at once: each call is granted or cancelled in time and leaves nothing, and a renewed lease survives.
#[tokio::test]
async fn a_burst_is_answered_or_leaves_nothing() {
    let folder = folder();
    let engine = open(folder.path()).await;
    let kept = claim(&["kept"], 10_000);
    assert!(granted(&engine, &kept).await);
    let renewals = async {
        loop {
            tokio::time::sleep(Duration::from_secs(1)).await;
            assert_eq!(engine.renew(&kept, kept.ttl).await.unwrap(), Renewed::Extended);
        }
    };
    let names: Vec<String> = (0..20_000).map(|n| n.to_string()).collect();
    let claims: Vec<Claim> = names.iter().map(|name| claim(&[name], 60_000)).collect();
    let limit = Duration::from_secs(2);
    let attempts = join_all(claims.iter().map(|claim| async {
        match tokio::time::timeout(limit, engine.try_acquire(claim)).await {
            Ok(answer) => assert!(matches!(answer.unwrap(), Acquired::Granted { .. })),
            Err(_) => return true,
        }
        false
    }));
    let timed_out = tokio::select! {
        timed_out = attempts => timed_out,
        () = renewals => unreachable!(),
    };
    let (timed_out, done): (Vec<_>, Vec<_>) = claims.into_iter().zip(timed_out).partition(|(_, timed_out)| *timed_out);
    let sent: Vec<Claim> = timed_out
        .iter()
        .map(|(claim, _)| claim)
        .filter(|claim| claim.was_sent())
        .cloned()
        .collect();
    engine.release_all(&refs(&sent), Duration::ZERO, &mut |_, _| {}).await;
    let held = engine.list("", Duration::from_secs(5)).await.unwrap();
    assert_eq!(held.len(), done.len() + 1);
}
