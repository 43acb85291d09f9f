//! Tests of attempts and releases in batches, and of waiters of other processes that do not confirm.

use super::queue::{hold, notified, positions, release, two, two_within, wait, waiting};
use super::*;
use crate::engine::EngineExt;
use crate::engine::contract::refs;

async fn in_order(engine: &MongodbEngine, claims: &[Arc<Claim>]) -> Vec<Acquired> {
    let mut answers = Vec::new();
    engine
        .try_acquire_all(&refs(claims), &mut |index, answer| {
            answers.push((index, answer.unwrap()))
        })
        .await;
    answers.sort_by_key(|(index, _)| *index);
    assert_eq!(answers.len(), claims.len());
    assert!(claims.iter().all(|claim| claim.was_sent()));
    answers.into_iter().map(|(_, answer)| answer).collect()
}

fn crowd(count: usize) -> Vec<Arc<Claim>> {
    (0..count).map(|_| Arc::new(waiting(&["n"]))).collect()
}

fn owners(claims: &[Arc<Claim>]) -> Vec<String> {
    claims.iter().map(|claim| claim.owner.as_str().to_owned()).collect()
}

#[tokio::test]
async fn a_batch_enters_a_busy_name_in_its_order() {
    two(|ours, theirs| async move {
        let holder = hold(&ours, "n").await;
        let (first, second) = (crowd(64), crowd(5));
        for answer in in_order(&theirs, &first).await {
            assert!(
                matches!(
                    answer,
                    Acquired::Held {
                        retry_after: Some(_),
                        ..
                    }
                ),
                "{answer:?}"
            );
        }
        in_order(&ours, &second).await;
        // A second batch, with some new claims.
        let third = crowd(3);
        let mixed: Vec<Arc<Claim>> = [&first[10..12], &third[..]].concat();
        in_order(&theirs, &mixed).await;
        let expected = owners(&[&first[..], &second, &third].concat());
        assert_eq!(positions(&ours, "n").await, expected);
        release(&ours, &holder).await;
        // The first waiter is served although its attempt shares a batch with others.
        let late = crowd(2);
        let answers = in_order(&theirs, &[late[0].clone(), first[0].clone(), late[1].clone()]).await;
        assert!(matches!(answers[1], Acquired::Granted { .. }), "{answers:?}");
        release(&theirs, &first[0]).await;
        granted(&theirs, &first[1]).await;
        assert_eq!(positions(&ours, "n").await[..3], owners(&first[2..5]));
    })
    .await;
}

#[tokio::test]
async fn a_batch_acquires_a_free_name_for_its_first_claim() {
    two(|ours, theirs| async move {
        let claims = crowd(4);
        let answers = in_order(&theirs, &claims).await;
        assert!(matches!(answers[0], Acquired::Granted { .. }), "{answers:?}");
        assert_eq!(positions(&ours, "n").await, owners(&claims[1..]));
        let mut second_changes = theirs.subscribe(&claims[1], &key("n")).await.unwrap();
        release(&theirs, &claims[0]).await;
        notified(&mut second_changes).await;
        granted(&theirs, &claims[1]).await;
        assert_eq!(granted(&theirs, &claims[1]).await, granted(&theirs, &claims[1]).await);
    })
    .await;
}

#[tokio::test]
async fn claims_of_several_names_in_a_batch_keep_their_order() {
    two(|ours, theirs| async move {
        let holder = hold(&ours, "n").await;
        let mut claims = crowd(3);
        claims.insert(0, Arc::new(waiting(&["n", "o"])));
        claims.insert(2, Arc::new(waiting(&["n", "o"])));
        in_order(&theirs, &claims).await;
        assert_eq!(positions(&ours, "n").await, owners(&claims));
        release(&ours, &holder).await;
        for claim in &claims {
            granted(&theirs, claim).await;
            release(&theirs, claim).await;
        }
    })
    .await;
}

#[tokio::test]
async fn a_dropped_batch_leaves_no_positions() {
    two(|ours, theirs| async move {
        hold(&ours, "n").await;
        let claims = crowd(20);
        let answers = tokio::time::timeout(Duration::from_micros(200), in_order(&theirs, &claims));
        assert!(answers.await.is_err());
        tokio::time::sleep(Duration::from_millis(20)).await;
        let claims: Vec<Claim> = claims.iter().map(|claim| Claim::clone(claim)).collect();
        theirs
            .release_all(&refs(&claims), Duration::ZERO, &mut |_, released| {
                assert_eq!(released.unwrap(), Released::NotHeld)
            })
            .await;
        assert!(positions(&ours, "n").await.is_empty());
    })
    .await;
}

pub(super) async fn many_releases_release_the_names_of_each_claim(engine: Arc<MongodbEngine>) {
    let held: Vec<Claim> = (0..30).map(|number| claim(&[&format!("n{number}")], LONG)).collect();
    for claim in &held {
        granted(&engine, claim).await;
    }
    let (stranger, several, nothing) = (claim(&["s"], LONG), claim(&["a", "b"], LONG), claim(&["n0", "s"], LONG));
    granted(&engine, &stranger).await;
    granted(&engine, &several).await;
    let mut waiter = claim(&["n3"], LONG);
    waiter.waiting = true;
    busy(&engine, &waiter).await;
    let mut all = held.clone();
    all.extend([several, nothing]);
    let mut answers = vec![None; all.len()];
    engine
        .release_all(&refs(&all), Duration::ZERO, &mut |index, released| {
            answers[index] = Some(released.unwrap())
        })
        .await;
    assert!(
        answers[..31].iter().all(|answer| *answer == Some(Released::Freed)),
        "{answers:?}"
    );
    assert_eq!(answers[31], Some(Released::NotHeld));
    assert_eq!(engine.renew(&stranger, stranger.ttl).await.unwrap(), Renewed::Extended);
    granted(&engine, &waiter).await;
    assert_eq!(engine.locks().count_documents(doc! {}).await.unwrap(), 2);
    let mut again = Vec::new();
    engine
        .release_all(&refs(&all), Duration::ZERO, &mut |_, released| {
            again.push(released.unwrap())
        })
        .await;
    assert!(again.iter().all(|answer| *answer == Released::NotHeld));
}

/// Promise 5. The first waiter's process is stopped.
#[tokio::test]
async fn a_dead_waiter_with_a_short_ttl_blocks_for_no_longer_than_that() {
    for is_granted in [false, true] {
        // Without the event of the hand-off it takes until the next heartbeat, 2 s after the waiter entered.
        two_within(Duration::from_millis(1500), |ours, theirs| async move {
            let mut holder = claim(&["n"], LONG);
            // Without the token the release only reserves the name.
            let fence = granted(&ours, &holder).await;
            holder.fence = is_granted.then_some(fence);
            let mut dead = waiting(&["n"]);
            dead.ttl = Ttl::new(Duration::from_millis(400)).unwrap();
            busy(&theirs, &dead).await;
            let next = waiting(&["n"]);
            let mut next_changes = wait(&ours, &next).await;
            theirs.close().await;
            let released = Instant::now();
            release(&ours, &holder).await;
            let found = document(&ours, "n").await.unwrap();
            assert_eq!(found.contains_key("granted"), is_granted, "{found:?}");
            notified(&mut next_changes).await;
            let took = released.elapsed();
            assert!(took >= Duration::from_millis(390));
            granted(&ours, &next).await;
            took
        })
        .await;
    }
}

/// The stream was opened before a call waited for these names.
#[tokio::test]
async fn names_that_come_later_than_the_stream_wake_their_waiters() {
    // The next heartbeat is 1.5 s after the release.
    two_within(Duration::from_millis(1200), |ours, theirs| async move {
        hold(&ours, "n").await;
        let first = waiting(&["n"]);
        let mut first_changes = wait(&theirs, &first).await;
        let mut longest = Duration::ZERO;
        for is_of_gist in [true, false] {
            let holder = match is_of_gist {
                true => {
                    assert!(gist_acquires(&ours.locks(), "m", LONG).await);
                    None
                }
                false => Some(hold(&ours, "m").await),
            };
            let later = waiting(&["m"]);
            let mut later_changes = wait(&theirs, &later).await;
            tokio::time::sleep(Duration::from_millis(500)).await;
            let released = Instant::now();
            match &holder {
                Some(holder) => release(&ours, holder).await,
                // The waiter polls.
                None => drop(ours.locks().delete_one(doc! { "_id": "m" }).await.unwrap()),
            }
            notified(&mut later_changes).await;
            longest = longest.max(released.elapsed());
            granted(&theirs, &later).await;
            release(&theirs, &later).await;
        }
        ours.force_release(&key("n")).await.unwrap();
        notified(&mut first_changes).await;
        granted(&theirs, &first).await;
        longest
    })
    .await;
}
