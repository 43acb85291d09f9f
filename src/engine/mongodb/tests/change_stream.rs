//! The change stream of the queue.

use super::queue::{eventually, hold, notified, quiet, release, two, wait, waiting};
use super::*;
use crate::engine::local_waiters::HEARTBEAT_INTERVAL;
use crate::engine::mongodb::error::Failure;

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
    two(|ours, theirs| async move {
        let holder = hold(&ours, "n").await;
        let (first, second) = (waiting(&["n"]), waiting(&["n"]));
        let mut first_changes = wait(&theirs, &first).await;
        let mut second_changes = wait(&theirs, &second).await;
        let deleted = Instant::now();
        ours.locks().delete_one(doc! { "_id": "n" }).await.unwrap();
        notified(&mut first_changes).await;
        let late = deleted.elapsed();
        assert!(late < HEARTBEAT_INTERVAL + Duration::from_millis(800), "{late:?}");
        granted(&theirs, &first).await;
        notified(&mut second_changes).await;
        busy(&theirs, &second).await;
        assert_eq!(ours.release(&holder, Duration::ZERO).await.unwrap(), Released::NotHeld);
        release(&theirs, &first).await;
        notified(&mut second_changes).await;
        granted(&theirs, &second).await;
    })
    .await;
}

/// The lease of the holder would end later. The release that keeps the name busy is an event, so a waiter is not late.
#[tokio::test]
async fn a_name_that_is_kept_busy_goes_to_its_waiter_at_the_end_of_that_time() {
    two(|ours, theirs| async move {
        let holder = hold(&ours, "n").await;
        let first = waiting(&["n"]);
        let mut first_changes = wait(&theirs, &first).await;
        let released = Instant::now();
        let keep = Duration::from_millis(300);
        assert_eq!(ours.release(&holder, keep).await.unwrap(), Released::Freed);
        notified(&mut first_changes).await;
        granted(&theirs, &first).await;
        let after = released.elapsed();
        // The next heartbeat is 2 s after the waiter entered.
        assert!(after >= keep && after < Duration::from_millis(1500), "{after:?}");
    })
    .await;
}
