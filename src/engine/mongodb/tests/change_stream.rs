//! The change stream of the queue.

use futures_util::StreamExt;
use mongodb::change_stream::ChangeStream;
use mongodb::options::ReadConcern;

use super::queue::{
    eventually, hold, notified, positions, quiet, release, two, two_succeed, two_within, wait, waiting,
};
use super::*;
use crate::engine::EngineExt;
use crate::engine::local_waiters::HEARTBEAT_INTERVAL;
use crate::engine::mongodb::error::Failure;
use crate::engine::mongodb::fields::QUEUE;
use crate::engine::mongodb::queue::change_event::{self, Change, change_of};
use crate::stall_detector::StallDetector;

/// The stream closes some time after the last waiter left.
#[tokio::test]
async fn the_stream_is_open_while_there_are_waiters() {
    two(|ours, theirs| async move {
        let is_open = || theirs.queue.as_ref().unwrap().watcher.is_open();
        let waiter = waiting(&["n"]);
        granted(&theirs, &waiter).await;
        assert!(!is_open(), "there are no waiters");
        release(&theirs, &waiter).await;
        for _ in 0..2 {
            let holder = claim(&["n"], LONG);
            granted(&ours, &holder).await;
            let first = waiting(&["n"]);
            let mut first_changes = wait(&theirs, &first).await;
            assert!(is_open());
            release(&ours, &holder).await;
            notified(&mut first_changes).await;
            granted(&theirs, &first).await;
            release(&theirs, &first).await;
            eventually("the stream is closed", async || !is_open()).await;
        }
    })
    .await;
}

/// Dropping the collection ends the stream.
#[tokio::test]
async fn a_stream_that_ended_is_opened_again_and_waiters_are_notified() {
    two(|ours, theirs| async move {
        granted(&ours, &claim(&["n"], LONG)).await;
        let first = waiting(&["n"]);
        let mut first_changes = wait(&theirs, &first).await;
        ours.locks().drop().await.unwrap();
        notified(&mut first_changes).await;
        let taken = granted(&ours, &claim(&["m"], LONG)).await;
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            let holder = claim(&["k"], LONG);
            granted(&ours, &holder).await;
            let next = waiting(&["k"]);
            // Returns when the new stream is open.
            let mut next_changes = wait(&theirs, &next).await;
            release(&ours, &holder).await;
            let notified = tokio::time::timeout(Duration::from_millis(1000), next_changes.changed()).await;
            let fence = granted(&theirs, &next).await;
            assert!(fence > taken);
            release(&theirs, &next).await;
            if notified.is_ok() {
                break;
            }
            assert!(Instant::now() < deadline, "no new stream");
        }
    })
    .await;
}

/// A user without the right to a change stream polls, and not any more when the user has it.
#[tokio::test]
async fn a_change_stream_that_was_refused_once_is_used_again() {
    two(|ours, theirs| async move {
        let admin = theirs.pool.connected().client.database("admin");
        let refusal = Failure::from(admin.run_command(doc! { "nonsense": 1 }).await.unwrap_err());
        assert!(refusal.is_without_change_streams(), "{refusal}");
        let holder = hold(&ours, "n").await;
        theirs.queue.as_ref().unwrap().watcher.refuse(refusal);
        let (first, second) = (waiting(&["n"]), waiting(&["n"]));
        let mut first_changes = wait(&theirs, &first).await;
        let mut second_changes = wait(&theirs, &second).await;
        let began = Instant::now();
        for changes in [&mut first_changes, &mut second_changes] {
            notified(changes).await;
        }
        assert!(!theirs.queue.as_ref().unwrap().watcher.is_open() || began.elapsed() > Duration::from_secs(1));
        // Each poll is an attempt, which requests the stream again after a while.
        eventually("the stream is open", async || {
            busy(&theirs, &first).await;
            theirs.queue.as_ref().unwrap().watcher.is_open()
        })
        .await;
        // Both wait for their notifications again.
        for (waiter, changes) in [(&first, &mut first_changes), (&second, &mut second_changes)] {
            while tokio::time::timeout(Duration::from_millis(1), changes.changed())
                .await
                .is_ok()
            {
                busy(&theirs, waiter).await;
            }
            quiet(changes, 1000).await;
        }
        release(&ours, &holder).await;
        for (waiter, changes) in [(&first, &mut first_changes), (&second, &mut second_changes)] {
            notified(changes).await;
            granted(&theirs, waiter).await;
            release(&theirs, waiter).await;
        }
    })
    .await;
}

/// The stream has no deletions: the next heartbeat shows them.
#[tokio::test]
async fn a_name_that_another_program_deletes_wakes_its_waiters_in_their_order() {
    two_within(
        HEARTBEAT_INTERVAL + Duration::from_millis(800),
        |ours, theirs| async move {
            let holder = hold(&ours, "n").await;
            let (first, second) = (waiting(&["n"]), waiting(&["n"]));
            let mut first_changes = wait(&theirs, &first).await;
            let mut second_changes = wait(&theirs, &second).await;
            let deleted = Instant::now();
            ours.locks().delete_one(doc! { "_id": "n" }).await.unwrap();
            notified(&mut first_changes).await;
            // The second one is notified some time after the first.
            let second_change = tokio::time::timeout(Duration::from_millis(1), second_changes.changed());
            if second_change.await.is_ok() {
                return LONG;
            }
            let late = deleted.elapsed();
            granted(&theirs, &first).await;
            notified(&mut second_changes).await;
            busy(&theirs, &second).await;
            assert_eq!(ours.release(&holder, Duration::ZERO).await.unwrap(), Released::NotHeld);
            release(&theirs, &first).await;
            notified(&mut second_changes).await;
            granted(&theirs, &second).await;
            late
        },
    )
    .await;
}

/// The process that finds the deletion first is served first. The others return with their numbers.
#[tokio::test]
async fn a_name_that_is_deleted_goes_to_one_process_and_the_other_keeps_its_number() {
    two(|ours, theirs| async move {
        hold(&ours, "n").await;
        let (here, there) = (waiting(&["n"]), waiting(&["n"]));
        let mut here_changes = wait(&ours, &here).await;
        let mut there_changes = wait(&theirs, &there).await;
        let number = |engine: &Arc<MongodbEngine>, claim: &Claim| {
            let queue = engine.queue.as_ref().unwrap();
            queue.known.number(&claim.owner)
        };
        let before = (number(&ours, &here), number(&theirs, &there));
        assert!(before.0 > 0 && before.0 < before.1);
        ours.locks().delete_one(doc! { "_id": "n" }).await.unwrap();
        let mut first = tokio::select! {
            () = notified(&mut here_changes) => true,
            () = notified(&mut there_changes) => false,
        };
        let outcome = match first {
            true => ours.try_acquire(&here).await.unwrap(),
            false => theirs.try_acquire(&there).await.unwrap(),
        };
        if !matches!(outcome, Acquired::Granted { .. }) {
            // The other one has made its attempt in the meantime.
            first = !first;
        }
        let (holder, holding) = if first { (&ours, &here) } else { (&theirs, &there) };
        let (other, behind) = if first { (&theirs, &there) } else { (&ours, &here) };
        let mut changes = if first { there_changes } else { here_changes };
        granted(holder, holding).await;
        eventually("the other one is in the queue", async || {
            let _ = tokio::time::timeout(Duration::from_secs(3), changes.changed()).await;
            busy(other, behind).await;
            positions(&ours, "n").await == [behind.owner.as_str()]
        })
        .await;
        let kept = if first { before.1 } else { before.0 };
        assert_eq!(number(other, behind), kept);
        release(holder, holding).await;
        notified(&mut changes).await;
        granted(other, behind).await;
        release(other, behind).await;
    })
    .await;
}

/// One heartbeat for several names: one is gone, one has another holder now, one is as before.
#[tokio::test]
async fn a_heartbeat_of_several_names_finds_those_that_were_deleted() {
    two(|ours, theirs| async move {
        let mut waiters = Vec::new();
        for name in ["gone", "again", "same"] {
            hold(&ours, name).await;
            let waiter = waiting(&[name]);
            waiters.push((wait(&theirs, &waiter).await, waiter));
        }
        let [(gone_changes, gone), (again_changes, again), (same_changes, _)] = &mut waiters[..] else {
            unreachable!()
        };
        let lost = doc! { "_id": { "$in": ["gone", "again"] } };
        ours.locks().delete_many(lost).await.unwrap();
        let holder = hold(&ours, "again").await;
        notified(gone_changes).await;
        granted(&theirs, gone).await;
        notified(again_changes).await;
        busy(&theirs, again).await;
        assert_eq!(positions(&ours, "again").await, [again.owner.as_str()]);
        release(&ours, &holder).await;
        notified(again_changes).await;
        granted(&theirs, again).await;
        quiet(same_changes, 1).await;
    })
    .await;
}

/// Opens the stream of a process.
async fn stream_of(engine: &MongodbEngine, process: &str) -> ChangeStream<Document> {
    let locks = engine.locks();
    let watch = locks.watch().pipeline(change_event::pipeline(process));
    watch.read_concern(ReadConcern::majority()).await.unwrap().with_type()
}

/// Returns the events of the stream so far.
async fn events(engine: &MongodbEngine, stream: &mut ChangeStream<Document>, process: &str) -> Vec<Change> {
    // The last event is a replacement.
    let last = doc! { "_id": format!("last-{process}") };
    let locks = engine.locks();
    locks.insert_one(last.clone()).await.unwrap();
    let check = doc! { "check": format!("{process}:7:1") };
    locks.replace_one(last, check).await.unwrap();
    let mut events = Vec::new();
    loop {
        let event = tokio::time::timeout(Duration::from_secs(10), stream.next()).await;
        let change = change_of(&event.expect("the last event").unwrap().unwrap(), process).unwrap();
        if matches!(&change, Change::Check { id, after } if id.as_str().unwrap().starts_with("last-") && after.as_millis() == 7)
        {
            return events;
        }
        events.push(change);
    }
}

#[tokio::test]
async fn an_event_goes_only_to_the_process_that_it_is_for() {
    two(|ours, theirs| async move {
        let process = theirs.queue.as_ref().unwrap().process.clone();
        let mut stream = stream_of(&ours, &process).await;
        let mut of_nobody = stream_of(&ours, "0").await;
        let lease = async |engine: &MongodbEngine, name: &str| {
            let mut holder = claim(&[name], LONG);
            holder.fence = Some(granted(engine, &holder).await);
            holder
        };
        let keep = Duration::from_millis(300);
        // A short hand-off to one process, with a waiter of the other one behind it, and then a minimum hold.
        let holder = lease(&ours, "a").await;
        let (mut first, second) = (waiting(&["a"]), waiting(&["a"]));
        first.ttl = Ttl::new(Duration::from_millis(3800)).unwrap();
        let mut first_changes = wait(&ours, &first).await;
        let mut second_changes = wait(&theirs, &second).await;
        assert_eq!(ours.renew(&holder, holder.ttl).await.unwrap(), Renewed::Extended);
        release(&ours, &holder).await;
        notified(&mut first_changes).await;
        granted(&ours, &first).await;
        assert_eq!(ours.release(&first, keep).await.unwrap(), Released::Freed);
        notified(&mut second_changes).await;
        granted(&theirs, &second).await;
        release(&theirs, &second).await;
        let next = second.owner;
        // A long hand-off and a minimum hold of a name for which this process does not wait any more.
        let holder = lease(&theirs, "b").await;
        let (mut first, second) = (waiting(&["b"]), waiting(&["b"]));
        let mut first_changes = wait(&ours, &first).await;
        let _second_changes = wait(&theirs, &second).await;
        release(&theirs, &holder).await;
        notified(&mut first_changes).await;
        first.fence = Some(granted(&ours, &first).await);
        assert_eq!(ours.renew(&first, first.ttl).await.unwrap(), Renewed::Extended);
        theirs
            .queue
            .as_ref()
            .unwrap()
            .leave(&key("b"), &second.owner)
            .await
            .unwrap();
        assert_eq!(ours.release(&first, keep).await.unwrap(), Released::Freed);
        ours.locks().delete_one(doc! { "_id": "b" }).await.unwrap();

        let check = |ms| Change::Check {
            id: "a".into(),
            after: Duration::from_millis(ms),
        };
        let handed_off = Change::HandedOff {
            id: "a".into(),
            owner: next,
        };
        assert_eq!(
            events(&ours, &mut stream, &process).await,
            [check(1900), check(300), handed_off]
        );
        assert_eq!(events(&ours, &mut of_nobody, "0").await, []);
    })
    .await;
}

/// The name has no waiters when the stream is opened.
#[tokio::test]
async fn a_waiter_behind_a_dead_one_gets_the_name_when_a_short_hand_off_ends() {
    // The next heartbeat is 2 s after the waiter entered.
    two_within(Duration::from_millis(1700), |ours, theirs| async move {
        hold(&ours, "earlier").await;
        let _earlier = wait(&theirs, &waiting(&["earlier"])).await;
        let holder = hold(&ours, "n").await;
        let (mut dead, next) = (waiting(&["n"]), waiting(&["n"]));
        dead.ttl = Ttl::new(Duration::from_millis(400)).unwrap();
        busy(&ours, &dead).await;
        ours.queue.as_ref().unwrap().close();
        let mut next_changes = wait(&theirs, &next).await;
        let released = Instant::now();
        release(&ours, &holder).await;
        notified(&mut next_changes).await;
        granted(&theirs, &next).await;
        let after = released.elapsed();
        assert!(after >= Duration::from_millis(350), "{after:?}");
        after
    })
    .await;
}

/// The waiters of a stalled event loop are skipped.
#[tokio::test]
async fn a_name_that_is_kept_busy_does_not_keep_the_waiters_of_a_stalled_event_loop_alive() {
    two_succeed(|ours, theirs| async move {
        let detector = Arc::new(StallDetector::new(|| {}));
        let _ = theirs.describe().detector.unwrap().set(detector.clone());
        let mut waiters = Vec::new();
        for name in ["m", "n"] {
            let holder = hold(&ours, name).await;
            let mut waiter = waiting(&[name]);
            waiter.ttl = Ttl::new(Duration::from_secs(3)).unwrap();
            waiters.push((wait(&theirs, &waiter).await, waiter, holder));
        }
        detector.ping();
        tokio::time::sleep(Duration::from_millis(1300)).await;
        let live_until = async || {
            let mut ends = Vec::new();
            for name in ["m", "n"] {
                let document = document(&ours, name).await?;
                let queue = document.get_array(QUEUE).unwrap();
                ends.push(*queue[0].as_document().unwrap().get_datetime("until").unwrap());
            }
            Some(ends)
        };
        let before = live_until().await;
        for (_, _, holder) in &waiters {
            let kept = ours.release(holder, Duration::from_millis(2500)).await.unwrap();
            assert_eq!(kept, Released::Freed);
        }
        tokio::time::sleep(Duration::from_millis(800)).await;
        let after = live_until().await;
        // Where the machine stood still, a name is free.
        if before.is_none() || after.is_none() {
            return Err("the names were not busy for long enough");
        }
        assert_eq!(after, before, "a heartbeat of a stalled event loop");
        detector.responded();
        for (changes, waiter, _) in &mut waiters {
            notified(changes).await;
            granted(&theirs, waiter).await;
        }
        Ok(())
    })
    .await;
}

/// The lease of the holder would end later. The release that keeps the name busy is an event, so a waiter is not late.
#[tokio::test]
async fn a_name_that_is_kept_busy_goes_to_its_waiter_at_the_end_of_that_time() {
    // The next heartbeat is 2 s after the waiter entered.
    two_within(Duration::from_millis(1500), |ours, theirs| async move {
        hold(&ours, "earlier").await;
        let _earlier = wait(&theirs, &waiting(&["earlier"])).await;
        let holder = hold(&ours, "n").await;
        let first = waiting(&["n"]);
        let mut first_changes = wait(&theirs, &first).await;
        let released = Instant::now();
        let keep = Duration::from_millis(300);
        assert_eq!(ours.release(&holder, keep).await.unwrap(), Released::Freed);
        notified(&mut first_changes).await;
        granted(&theirs, &first).await;
        let after = released.elapsed();
        assert!(after >= keep, "{after:?}");
        after
    })
    .await;
}
