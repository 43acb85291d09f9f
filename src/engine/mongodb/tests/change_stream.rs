//! The change stream of the queue.

use super::queue::{eventually, hold, notified, quiet, release, two, wait, waiting};
use super::*;
use crate::engine::mongodb::error::Failure;

/// The stream closes some time after the last waiter left.
#[tokio::test]
async fn the_stream_is_open_while_there_are_waiters() {
    two(|ours, theirs| async move {
        let is_open = || theirs.queue.as_ref().unwrap().is_stream_open();
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
        theirs.queue.as_ref().unwrap().refuse_stream(refusal);
        let (first, second) = (waiting(&["n"]), waiting(&["n"]));
        let mut first_changes = wait(&theirs, &first).await;
        let mut second_changes = wait(&theirs, &second).await;
        let began = Instant::now();
        for changes in [&mut first_changes, &mut second_changes] {
            notified(changes).await;
        }
        assert!(!theirs.queue.as_ref().unwrap().is_stream_open() || began.elapsed() > Duration::from_secs(1));
        // Each poll is an attempt, which requests the stream again after a while.
        eventually("the stream is open", async || {
            busy(&theirs, &first).await;
            theirs.queue.as_ref().unwrap().is_stream_open()
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

#[tokio::test]
async fn a_stream_of_all_names_is_narrowed_when_few_are_waited_for() {
    two(|ours, theirs| async move {
        let names: Vec<String> = (0..60).map(|index| format!("n{index}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        granted(&ours, &claim(&names, LONG)).await;
        let waiters: Vec<Claim> = names.iter().map(|name| waiting(&[name])).collect();
        for waiter in &waiters {
            busy(&theirs, waiter).await;
        }
        let queue = theirs.queue.as_ref().unwrap();
        eventually("the stream has all names", async || queue.covered_by_stream().is_none()).await;
        for waiter in &waiters[1..] {
            theirs.release(waiter, Duration::ZERO).await.unwrap();
        }
        // It may have been opened again while some of these were waited for, and covers up to 16 spare names.
        let is_narrow = async || queue.covered_by_stream().is_some_and(|count| count <= 18);
        eventually("the stream has few names", is_narrow).await;
    })
    .await;
}
