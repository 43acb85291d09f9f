//! Hand-offs that are grants.

use super::queue::{eventually, notified, positions, release, two, two_succeed, two_within, wait, waiting};
use mongodb::bson::Timestamp;

use super::*;
use crate::engine::contract::refs;
use crate::engine::mongodb::fields::{FENCE, GRANTED, QUEUE, RESERVED};
use crate::engine::mongodb::ops::fence::Stamp;
use crate::engine::mongodb::queue::change_event::Change;
use crate::engine::mongodb::queue::hand_off::Grant;
use crate::engine::mongodb::queue::pipelines::{self, Waiter};
use crate::engine::{EngineExt, Subscription, WAITER_LIVENESS};

/// Acquires a free name. The claim has its token, as that of a lease.
async fn lease(engine: &MongodbEngine, names: &[&str]) -> Claim {
    let mut holder = claim(names, LONG);
    holder.fence = Some(granted(engine, &holder).await);
    holder
}

/// Waits until a waiter is the holder: by the grant of the hand-off, or where the machine stood still and the event was late, by
/// the attempt that follows. The claim gets the token.
async fn holds(engine: &MongodbEngine, subscription: &mut Box<dyn Subscription>, claim: &mut Claim) -> Fence {
    for _ in 0..10 {
        notified(subscription).await;
        let fence = match subscription.take_hand_off() {
            Some(hand_off) => hand_off.fence,
            None => match engine.try_acquire(claim).await.unwrap() {
                Acquired::Granted { fence } => fence,
                Acquired::Held { .. } => continue,
            },
        };
        claim.fence = Some(fence);
        return fence;
    }
    panic!("it is not the holder after 10 notifications");
}

async fn is_granted(engine: &MongodbEngine) -> bool {
    document(engine, "n").await.unwrap().contains_key(GRANTED)
}

#[tokio::test]
async fn a_release_makes_the_next_waiter_the_holder() {
    two_succeed(|ours, theirs| async move {
        let holder = lease(&ours, &["n"]).await;
        let (mut first, mut second) = (waiting(&["n"]), waiting(&["n"]));
        let mut first_changes = wait(&theirs, &first).await;
        let mut second_changes = wait(&theirs, &second).await;
        let before = crate::clock::Moment::now();
        release(&ours, &holder).await;
        notified(&mut first_changes).await;
        let Some(hand_off) = first_changes.take_hand_off() else {
            return Err("the event is late");
        };
        first.fence = Some(hand_off.fence);
        assert!(hand_off.fence > holder.fence.unwrap());
        assert!(!hand_off.until.is_past() && hand_off.until < before + Duration::from_secs(4));
        assert_eq!(first_changes.take_hand_off(), None, "once");
        assert_eq!(second_changes.take_hand_off(), None);
        let info = ours.inspect(&key("n")).await.unwrap().unwrap();
        assert_eq!(info.fence, first.fence);
        assert_eq!(info.holder.unwrap().process, Process::current());
        assert!(info.remaining.unwrap() <= Duration::from_secs(2), "a short lease");
        assert!(is_granted(&ours).await);
        busy(&ours, &claim(&["n"], LONG)).await;

        assert_eq!(theirs.renew(&first, first.ttl).await.unwrap(), Renewed::Extended);
        let info = ours.inspect(&key("n")).await.unwrap().unwrap();
        assert!(info.remaining.unwrap() > LONG / 2, "{info:?}");
        assert_eq!(info.fence, first.fence);
        assert!(!is_granted(&ours).await, "confirmed");
        assert_eq!(positions(&ours, "n").await, [second.owner.as_str()]);

        release(&theirs, &first).await;
        let next = holds(&theirs, &mut second_changes, &mut second).await;
        assert!(next > hand_off.fence);
        release(&theirs, &second).await;
        assert_eq!(document(&ours, "n").await, None, "there are no waiters any more");
        assert!(granted(&ours, &claim(&["n"], LONG)).await > next);
        Ok(())
    })
    .await;
}

/// The grant of one write has no token in its document for a while.
#[tokio::test]
async fn a_name_without_a_written_token_is_granted_with_a_larger_one() {
    two(|ours, theirs| async move {
        let mut last = Fence(0);
        for round in 0..5 {
            let holder = lease(&ours, &["n"]).await;
            ours.unwritten.as_ref().unwrap().clear();
            assert!(holder.fence.unwrap() > last);
            let mut waiters: Vec<Claim> = (0..3).map(|_| waiting(&["n"])).collect();
            let mut subscriptions = Vec::new();
            for waiter in &waiters {
                subscriptions.push(wait(&theirs, waiter).await);
            }
            if round == 0 {
                assert!(!document(&ours, "n").await.unwrap().contains_key(FENCE));
            }
            last = holder.fence.unwrap();
            release(&ours, &holder).await;
            for (waiter, changes) in waiters.iter_mut().zip(&mut subscriptions) {
                let fence = holds(&theirs, changes, waiter).await;
                assert!(fence > last, "{fence:?} after {last:?}");
                last = fence;
                let shown = ours.inspect(&key("n")).await.unwrap().unwrap().fence;
                assert_eq!(shown, Some(last), "the token of the document");
                assert_eq!(granted(&theirs, waiter).await, last, "the same to an attempt");
                release(&theirs, waiter).await;
            }
        }
    })
    .await;
}

#[tokio::test]
async fn a_waiter_confirms_where_the_clocks_do_not_fit() {
    two(|ours, theirs| async move {
        for step in [None, Some(-10_000), Some(10_000)] {
            let holder = lease(&ours, &["n"]).await;
            let waiter = waiting(&["n"]);
            let mut changes = wait(&theirs, &waiter).await;
            theirs.queue.as_ref().unwrap().clock.step(step);
            release(&ours, &holder).await;
            notified(&mut changes).await;
            assert_eq!(changes.take_hand_off(), None, "{step:?}");
            let shown = ours.inspect(&key("n")).await.unwrap().unwrap();
            let fence = granted(&theirs, &waiter).await;
            assert!(fence > holder.fence.unwrap() && shown.fence == Some(fence), "{step:?}");
            assert!(!is_granted(&ours).await, "confirmed");
            let info = ours.inspect(&key("n")).await.unwrap().unwrap();
            assert!(info.remaining.unwrap() > LONG / 2, "{info:?}");
            release(&theirs, &waiter).await;
        }
    })
    .await;
}

#[tokio::test]
async fn a_late_event_releases_nothing_that_is_in_use() {
    two_succeed(|ours, theirs| async move {
        for is_confirmed in [true, false] {
            let holder = lease(&ours, &["n"]).await;
            let mut first = waiting(&["n"]);
            let mut changes = wait(&theirs, &first).await;
            release(&ours, &holder).await;
            notified(&mut changes).await;
            let found = document(&ours, "n").await.unwrap();
            let Ok(text) = found.get_str(GRANTED) else {
                return Err("the hand-off has ended");
            };
            let (_, grant) = Grant::parse(text).unwrap();
            if is_confirmed {
                first.fence = Some(granted(&theirs, &first).await);
            } else {
                let Some(hand_off) = changes.take_hand_off() else {
                    return Err("the event is late");
                };
                first.fence = Some(hand_off.fence);
            }
            drop(changes);
            let queue = theirs.queue.as_ref().unwrap();
            for _ in 0..3 {
                let (id, grants) = ("n".into(), vec![grant.clone()]);
                queue.deliver(Change::Granted { id, grants });
                tokio::time::sleep(Duration::from_millis(100)).await;
                assert_eq!(theirs.renew(&first, first.ttl).await.unwrap(), Renewed::Extended);
            }
            release(&theirs, &first).await;
        }
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn the_grant_of_an_unknown_waiter_goes_to_the_next() {
    // Otherwise it is released with a heartbeat, after 2 s.
    two_within(Duration::from_millis(1400), |ours, theirs| async move {
        let holder = lease(&ours, &["n"]).await;
        let (unknown, next) = (waiting(&["n"]), waiting(&["n"]));
        busy(&theirs, &unknown).await;
        theirs.queue.as_ref().unwrap().known.leave(&unknown.owner);
        let mut next_changes = wait(&theirs, &next).await;
        let released = Instant::now();
        release(&ours, &holder).await;
        notified(&mut next_changes).await;
        granted(&theirs, &next).await;
        released.elapsed()
    })
    .await;
}

#[tokio::test]
async fn a_waiter_that_gave_up_releases_its_grant() {
    two(|ours, theirs| async move {
        for together in [false, true] {
            let holder = lease(&ours, &["n"]).await;
            let waiter = waiting(&["n"]);
            let mut changes = wait(&theirs, &waiter).await;
            release(&ours, &holder).await;
            notified(&mut changes).await;
            drop(changes);
            if together {
                theirs
                    .release_all(&[&waiter, &waiting(&["other"])], Duration::ZERO, &mut |_, answer| {
                        answer.unwrap();
                    })
                    .await;
            } else {
                theirs.release(&waiter, Duration::ZERO).await.unwrap();
            }
            assert_eq!(document(&ours, "n").await, None, "together: {together}");
        }
    })
    .await;
}

#[tokio::test]
async fn a_dead_waiter_blocks_the_name_for_2_s() {
    two(|ours, theirs| async move {
        let holder = lease(&ours, &["n"]).await;
        let (dead, mut next) = (waiting(&["n"]), waiting(&["n"]));
        busy(&theirs, &dead).await;
        let mut next_changes = wait(&ours, &next).await;
        theirs.close().await;
        let released = Instant::now();
        release(&ours, &holder).await;
        notified(&mut next_changes).await;
        let fence = granted(&ours, &next).await;
        assert!(
            fence.0 > holder.fence.unwrap().0 + 1,
            "after the token of the dead waiter"
        );
        assert!(
            released.elapsed() >= Duration::from_millis(1900),
            "the grant was cut short"
        );
        next.fence = Some(fence);
        release(&ours, &next).await;
    })
    .await;
}

/// The waiters of several names, and those with metadata, confirm. So do the waiters of a name that is released by force.
#[tokio::test]
async fn other_waiters_get_a_reservation() {
    two(|ours, theirs| async move {
        let mut with_metadata = waiting(&["n"]);
        with_metadata.metadata = Some("{}".into());
        for (waiter, by_force) in [
            (waiting(&["n", "o"]), false),
            (with_metadata, false),
            (waiting(&["n"]), true),
        ] {
            let holder = lease(&ours, &["n"]).await;
            let mut changes = wait(&theirs, &waiter).await;
            if by_force {
                assert!(ours.force_release(&key("n")).await.unwrap());
            } else {
                release(&ours, &holder).await;
            }
            notified(&mut changes).await;
            assert_eq!(changes.take_hand_off(), None);
            let found = document(&ours, "n").await.unwrap();
            assert!(
                found.contains_key(RESERVED) && !found.contains_key(GRANTED),
                "{found:?}"
            );
            let fence = granted(&theirs, &waiter).await;
            assert!(fence > holder.fence.unwrap());
            release(&theirs, &waiter).await;
        }
    })
    .await;
}

/// Both names of a lease have waiters: each gets its own name, with the next token.
#[tokio::test]
async fn a_release_of_several_names_grants_each_to_its_waiter() {
    two(|ours, theirs| async move {
        let holder = lease(&ours, &["m", "n"]).await;
        let mut waiters = [waiting(&["m"]), waiting(&["n"])];
        let mut subscriptions = Vec::new();
        for waiter in &waiters {
            subscriptions.push(wait(&theirs, waiter).await);
        }
        release(&ours, &holder).await;
        for (waiter, changes) in waiters.iter_mut().zip(&mut subscriptions) {
            let fence = holds(&theirs, changes, waiter).await;
            assert!(fence > holder.fence.unwrap());
            assert_eq!(granted(&theirs, waiter).await, fence);
            release(&theirs, waiter).await;
        }
    })
    .await;
}

/// A name that is always handed off gets a new stamp before the tokens of a second are used up.
#[tokio::test]
async fn grants_do_not_use_up_the_tokens_of_a_second() {
    two(|ours, theirs| async move {
        let mut holder = lease(&ours, &["n"]).await;
        assert_eq!(ours.renew(&holder, holder.ttl).await.unwrap(), Renewed::Extended);
        let set = doc! { "$set": { "handed": 100_000_i64 } };
        ours.locks().update_one(doc! { "_id": "n" }, set).await.unwrap();
        holder.fence = ours.inspect(&key("n")).await.unwrap().unwrap().fence;
        let waiter = waiting(&["n"]);
        let mut changes = wait(&theirs, &waiter).await;
        // In reality this many hand-offs take longer, and the server's clock ticks with each.
        tokio::time::sleep(Duration::from_millis(1100)).await;
        release(&ours, &holder).await;
        notified(&mut changes).await;
        assert_eq!(changes.take_hand_off(), None);
        let fence = granted(&theirs, &waiter).await;
        assert!(
            fence > holder.fence.unwrap() && fence.0 % 1_000_000 < 100_000,
            "a new stamp"
        );
        release(&theirs, &waiter).await;
    })
    .await;
}

/// The hand-off limits the liveness of the waiter's process, which has other waiters, to a second here.
#[tokio::test]
async fn a_process_with_other_waiters_stays_alive() {
    two_within(Duration::from_millis(1500), |ours, theirs| async move {
        let holder = lease(&ours, &["n"]).await;
        let (mut first, mut second) = (waiting(&["n"]), waiting(&["n"]));
        for waiter in [&mut first, &mut second] {
            waiter.ttl = Ttl::new(Duration::from_secs(2)).unwrap();
        }
        let mut changes = wait(&theirs, &first).await;
        busy(&theirs, &second).await;
        release(&ours, &holder).await;
        notified(&mut changes).await;
        // None where the machine stood still.
        let Some(hand_off) = changes.take_hand_off() else {
            return LONG;
        };
        first.fence = Some(hand_off.fence);
        let until = async || {
            let document = document(&ours, "n").await.unwrap();
            let entry = document.get_array(QUEUE).unwrap()[0].as_document().unwrap().clone();
            entry.get_datetime("until").unwrap().timestamp_millis()
        };
        let shortened = until().await;
        if theirs.renew(&first, first.ttl).await.unwrap() == Renewed::Lost {
            return LONG;
        }
        eventually("a heartbeat", async || until().await > shortened).await;
        // How long after the hand-off the heartbeat came.
        let after = until().await - shortened + 1000 - WAITER_LIVENESS.as_millis() as i64;
        release(&theirs, &first).await;
        Duration::from_millis(after.max(0).unsigned_abs())
    })
    .await;
}

/// The answer to its first attempt was lost, and so was the event of its grant.
#[tokio::test]
async fn a_holder_does_not_enter_the_queue_of_its_own_name() {
    two(|ours, theirs| async move {
        let holder = lease(&ours, &["n"]).await;
        let waiters = [waiting(&["n"]), waiting(&["n"])];
        busy(&theirs, &waiters[0]).await;
        let queue = theirs.queue.as_ref().unwrap();
        queue.watcher.hang();
        queue.known.leave(&waiters[0].owner);
        release(&ours, &holder).await;
        assert!(is_granted(&ours).await);
        let process = Waiter {
            process: &queue.process,
            number: 0,
            takes_grants: true,
        };
        let entering = pipelines::enter(waiters.iter().take(1), &process);
        ours.locks().update_one(doc! { "_id": "n" }, entering).await.unwrap();
        assert!(positions(&ours, "n").await.is_empty());
        let claims = [Arc::new(waiters[1].clone()), Arc::new(waiters[0].clone())];
        let mut answers = vec![None, None];
        theirs
            .try_acquire_all(&refs(&claims), &mut |index, answer| {
                answers[index] = Some(answer.unwrap())
            })
            .await;
        assert!(matches!(answers[0], Some(Acquired::Held { .. })), "{answers:?}");
        assert!(matches!(answers[1], Some(Acquired::Granted { .. })), "{answers:?}");
        assert_eq!(positions(&ours, "n").await, [waiters[1].owner.as_str()]);
        release(&theirs, &waiters[0]).await;
        granted(&theirs, &waiters[1]).await;
    })
    .await;
}

#[tokio::test]
async fn a_heartbeat_finds_a_grant_whose_event_was_lost() {
    two(|ours, theirs| async move {
        let holder = lease(&ours, &["n"]).await;
        let (first, second) = (waiting(&["n"]), waiting(&["n"]));
        let mut changes = wait(&theirs, &first).await;
        busy(&theirs, &second).await;
        let queue = theirs.queue.as_ref().unwrap();
        queue.watcher.hang();
        release(&ours, &holder).await;
        // The next heartbeat may come at the end of the hand-off, after 2 s.
        queue.deliver(Change::Gap);
        notified(&mut changes).await;
        assert_eq!(changes.take_hand_off(), None);
        // Where the machine stood still, the hand-off has ended, and the heartbeat reserves the name for the second.
        let is_late = async || !is_granted(&ours).await;
        let mut found = false;
        eventually("its attempt is a confirmation", async || {
            found = queue.known.has_reservation(&first.owner);
            found || is_late().await
        })
        .await;
        if found {
            assert!(!queue.known.has_reservation(&second.owner));
            granted(&theirs, &first).await;
            release(&theirs, &first).await;
            granted(&theirs, &second).await;
        }
    })
    .await;
}

/// An attempt that cannot get its stamp releases what it found. The event of the grant comes before or after that.
#[tokio::test]
async fn a_rolled_back_grant_is_not_taken() {
    two(|ours, theirs| async move {
        for is_late in [false, true] {
            let holder = lease(&ours, &["n"]).await;
            let waiter = waiting(&["n"]);
            let mut changes = wait(&theirs, &waiter).await;
            release(&ours, &holder).await;
            notified(&mut changes).await;
            let found = document(&ours, "n").await.unwrap();
            let (tick, handed) = Stamp::of(&found).unwrap().order();
            let (_waiting, _working, caller) = theirs.attempts.begin(vec![waiter.owner.clone()]);
            // A rollback of an earlier attempt is late: the claim was handed off the name since.
            let earlier = Some((tick, handed - 1));
            theirs.roll_back(&waiter, &caller, 1, earlier).await.unwrap();
            assert_eq!(document(&ours, "n").await.unwrap(), found);
            theirs
                .roll_back(&waiter, &caller, 1, Some((tick, handed)))
                .await
                .unwrap();
            assert_eq!(document(&ours, "n").await, None);
            if is_late {
                let (_, grant) = Grant::parse(found.get_str(GRANTED).unwrap()).unwrap();
                let (id, grants) = ("n".into(), vec![grant]);
                theirs.queue.as_ref().unwrap().deliver(Change::Granted { id, grants });
                notified(&mut changes).await;
            }
            assert_eq!(changes.take_hand_off(), None, "late: {is_late}");
        }
    })
    .await;
}

/// The reservation is confirmed with the next token, and there is none in the second of the stamp.
#[tokio::test]
async fn the_last_token_of_a_second_is_followed_by_a_stamp() {
    two(|ours, theirs| async move {
        let holder = lease(&ours, &["n"]).await;
        let second = Stamp::tick_of(holder.fence.unwrap()).time;
        let last = Bson::Timestamp(Timestamp {
            time: second,
            increment: 999_999,
        });
        let set = doc! { "$set": { FENCE: last } };
        ours.unwritten.as_ref().unwrap().clear();
        ours.locks().update_one(doc! { "_id": "n" }, set).await.unwrap();
        let waiter = waiting(&["n"]);
        let mut changes = wait(&theirs, &waiter).await;
        // The server's clock is in a later second.
        tokio::time::sleep(Duration::from_millis(1100)).await;
        assert!(ours.force_release(&key("n")).await.unwrap());
        notified(&mut changes).await;
        let fence = granted(&theirs, &waiter).await;
        assert!(fence.0 / 1_000_000 > u64::from(second), "{fence:?}");
        release(&theirs, &waiter).await;
    })
    .await;
}
