//! Hand-offs: the transaction that releases a name makes the first waiter the holder.

use tokio_postgres::Row;

use super::session::Values;
use super::statements::Sql;
use super::*;
use crate::engine::contract::one_succeeds;
use crate::engine::{EngineExt, HandOff, Subscription, WAITER_LIVENESS};
use crate::model::{Fence, Ttl};

const LISTENING: &str =
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN%'";

/// Enters the queue of `n`. Waits until `count` engines listen.
async fn enqueue(database: &Database, engine: &Arc<ServerEngine>, waiter: &Claim, count: i64) -> Box<dyn Subscription> {
    let subscription = engine.subscribe(waiter, &key("n")).await.unwrap();
    busy(engine, waiter).await;
    eventually("the engine listens", async || database.number(LISTENING).await == count).await;
    // The last check after LISTEN reads the clock.
    eventually("the clock is known", async || engine.waiters.has_clock()).await;
    subscription
}

/// Waits until a waiter is the holder: by the grant of the hand-off, or where the machine stood still and the message was late, by an
/// attempt. Returns its token.
async fn holds(engine: &Arc<ServerEngine>, waiter: &Claim, subscription: &mut Box<dyn Subscription>) -> Fence {
    notified(subscription).await;
    match subscription.take_hand_off() {
        Some(hand_off) => hand_off.fence,
        None => fence(engine, waiter).await,
    }
}

async fn owner(database: &Database) -> Option<String> {
    let row = database
        .client
        .query_one("SELECT owner FROM locks WHERE name = 'n'", &[]);
    row.await.unwrap().get(0)
}

fn with_metadata(mut claim: Claim) -> Claim {
    claim.metadata = Some("1".into());
    claim
}

#[tokio::test]
async fn a_release_makes_the_first_waiter_the_holder() {
    let Some(database) = Database::create().await else {
        return;
    };
    let (ours, theirs) = (database.engine().await, database.engine().await);
    one_succeeds(async |_| {
        let (holder, next) = (claim(&["n"]), waiting(&["n"]));
        let before = fence(&ours, &holder).await;
        let mut subscription = enqueue(&database, &theirs, &next, 1).await;
        assert_eq!(release(&ours, &holder).await, Released::Freed);
        assert_eq!(
            owner(&database).await.as_deref(),
            Some(next.owner.as_str()),
            "in the same commit"
        );
        notified(&mut subscription).await;
        let Some(HandOff { fence, until }) = subscription.take_hand_off() else {
            acquire(&theirs, &next).await;
            assert_eq!(release(&theirs, &next).await, Released::Freed);
            return Err("the message is late");
        };
        assert!(fence > before);
        assert!(until < crate::clock::Moment::now() + WAITER_LIVENESS);
        let info = ours.inspect(&key("n")).await.unwrap().unwrap();
        assert_eq!((info.fence, info.waiting), (Some(fence), Some(0)));
        assert_eq!(info.holder.unwrap().process, *next.process);
        assert!(info.remaining.unwrap() <= WAITER_LIVENESS);
        assert_eq!(theirs.renew(&next, next.ttl).await.unwrap(), Renewed::Extended);
        assert!(ours.inspect(&key("n")).await.unwrap().unwrap().remaining.unwrap() > LONG / 2);
        assert_eq!(release(&theirs, &next).await, Released::Freed);
        assert_eq!(database.number("SELECT sum(queued) FROM locks").await, 0);
        assert_eq!(database.number("SELECT count(*) FROM locks_waiters").await, 0);
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn expired_forced_and_cancelled_leases_are_handed_off_too() {
    let Some(database) = Database::create().await else {
        return;
    };
    let (ours, theirs) = (database.engine().await, database.engine().await);
    let mut holder = claim(&["n"]);
    holder.ttl = Ttl::clamped(Duration::from_secs(3));
    let before = fence(&ours, &holder).await;
    let (first, second, third) = (waiting(&["n"]), waiting(&["n"]), waiting(&["n"]));
    let mut first_subscription = enqueue(&database, &theirs, &first, 1).await;
    let mut second_subscription = enqueue(&database, &ours, &second, 2).await;
    let mut third_subscription = enqueue(&database, &theirs, &third, 2).await;
    let expired = holds(&theirs, &first, &mut first_subscription).await;
    assert!(expired > before);
    assert!(ours.force_release(&key("n")).await.unwrap());
    let forced = holds(&ours, &second, &mut second_subscription).await;
    assert!(forced > expired);
    assert_eq!(theirs.renew(&first, first.ttl).await.unwrap(), Renewed::Lost);
    // A call that was cancelled before it took the grant.
    assert_eq!(release(&ours, &second).await, Released::Freed);
    assert!(holds(&theirs, &third, &mut third_subscription).await > forced);
}

#[tokio::test]
async fn a_hand_off_whose_message_is_lost_or_late_is_confirmed() {
    let Some(database) = Database::create().await else {
        return;
    };
    let (ours, theirs) = (database.engine().await, database.engine().await);
    for is_lost in [false, true] {
        let (holder, next) = (claim(&["n"]), waiting(&["n"]));
        acquire(&ours, &holder).await;
        let mut subscription = enqueue(&database, &theirs, &next, 1).await;
        match is_lost {
            true => theirs.waiters.close(),
            // A clock reading that no grant can be compared with.
            false => theirs.waiters.read_clock(crate::clock::Moment::now() + LONG, 0),
        }
        assert_eq!(release(&ours, &holder).await, Released::Freed);
        if is_lost {
            theirs.waiters.check(vec![key("n")]);
        }
        notified(&mut subscription).await;
        assert_eq!(subscription.take_hand_off(), None);
        let handed = ours.inspect(&key("n")).await.unwrap().unwrap();
        assert_eq!(Some(fence(&theirs, &next).await), handed.fence, "the same grant");
        let left = ours.inspect(&key("n")).await.unwrap().unwrap().remaining.unwrap();
        assert!(left > LONG / 2, "of its whole ttl: {left:?}");
        release(&theirs, &next).await;
    }
}

/// The process of the waiter misses the whole hand-off. Its position is gone, and a heartbeat shows that.
#[tokio::test]
async fn a_waiter_that_missed_its_hand_off_enters_again_with_its_ticket() {
    let Some(database) = Database::create().await else {
        return;
    };
    let (ours, theirs) = (database.engine().await, database.engine().await);
    let (holder, slow, late) = (claim(&["n"]), waiting(&["n"]), waiting(&["n"]));
    acquire(&ours, &holder).await;
    let mut subscription = enqueue(&database, &theirs, &slow, 1).await;
    let ticket = theirs.waiters.known.position(&slow.owner).unwrap().1;
    database
        .execute("DELETE FROM locks_waiters; UPDATE locks SET queued = 0")
        .await;
    busy(&ours, &late).await;
    notified(&mut subscription).await;
    busy(&theirs, &slow).await;
    assert_eq!(theirs.waiters.known.position(&slow.owner).unwrap().1, ticket);
    assert_eq!(release(&ours, &holder).await, Released::Freed);
    assert_eq!(
        owner(&database).await.as_deref(),
        Some(slow.owner.as_str()),
        "before the later one"
    );
}

#[tokio::test]
async fn a_name_is_reserved_for_claims_that_a_hand_off_cannot_grant() {
    let Some(database) = Database::create().await else {
        return;
    };
    let (ours, theirs) = (database.engine().await, database.engine().await);
    for next in [waiting(&["n", "o"]), with_metadata(waiting(&["n"]))] {
        let holder = claim(&["n"]);
        let before = fence(&ours, &holder).await;
        let mut subscription = enqueue(&database, &theirs, &next, 1).await;
        assert_eq!(release(&ours, &holder).await, Released::Freed);
        notified(&mut subscription).await;
        assert_eq!(subscription.take_hand_off(), None, "{next:?}");
        let reserved = format!("{}-next", next.owner.as_str());
        assert_eq!(owner(&database).await, Some(reserved));
        assert_eq!(ours.inspect(&key("n")).await.unwrap(), None, "it has no holder");
        busy(&ours, &claim(&["n"])).await;
        assert!(fence(&theirs, &next).await > before);
        assert_eq!(release(&theirs, &next).await, Released::Freed);
    }
}

#[tokio::test]
async fn a_waiter_behind_a_pooler_finds_its_grant_when_it_polls() {
    let Some(database) = Database::create().await else {
        return;
    };
    let ours = database.engine().await;
    let theirs = open(&format!("{}?pooler=transaction", database.url), &Settings::default()).await;
    let (holder, next) = (claim(&["n"]), waiting(&["n"]));
    acquire(&ours, &holder).await;
    let mut subscription = theirs.subscribe(&next, &key("n")).await.unwrap();
    busy(&theirs, &next).await;
    assert_eq!(release(&ours, &holder).await, Released::Freed);
    assert_eq!(owner(&database).await.as_deref(), Some(next.owner.as_str()));
    notified(&mut subscription).await;
    assert_eq!(database.number(LISTENING).await, 0);
    acquire(&theirs, &next).await;
    assert_eq!(release(&theirs, &next).await, Released::Freed);
}

/// Releases with the one statement, for `process`. Returns its answer.
async fn released_in_one(client: &Client, engine: &ServerEngine, holder: &Claim, process: &str) -> Vec<Row> {
    let server: Arc<PostgresServer> = server_of(engine);
    let text = server.statements.get(Sql::HandOff).text(true);
    let (names, owners) = (vec![&b"n"[..]], vec![holder.owner.as_str()]);
    // Without SKIP LOCKED, a row lock delays the statement after its snapshot.
    let statement = client.prepare(&text.replace("SKIP LOCKED", "")).await.unwrap();
    let values: &Values<'_> = &[&names, &owners, &process, &2000_i64];
    client.query(&statement, values).await.unwrap()
}

#[tokio::test]
async fn a_release_hands_off_in_one_statement() {
    let Some(database) = Database::create().await else {
        return;
    };
    let (ours, theirs) = (database.engine().await, database.engine().await);
    let (holder, first, second) = (claim(&["n"]), waiting(&["n"]), waiting(&["n"]));
    let before = fence(&ours, &holder).await;
    let mut first_subscription = enqueue(&database, &theirs, &first, 1).await;
    let _second_subscription = enqueue(&database, &theirs, &second, 1).await;
    let rows = released_in_one(&database.client, &ours, &holder, &ours.waiters.process).await;
    assert_eq!(rows.len(), 1);
    assert!(rows[0].get::<_, bool>(1) && rows[0].get::<_, bool>(2));
    assert_eq!(rows[0].get::<_, Option<String>>(3), None, "a waiter of another process");
    let granted = holds(&theirs, &first, &mut first_subscription).await;
    assert!(granted > before);
    assert_eq!(database.number("SELECT sum(queued) FROM locks").await, 1);
    let rows = released_in_one(&database.client, &theirs, &first, &theirs.waiters.process).await;
    assert_eq!(
        rows[0].get::<_, Option<String>>(3).as_deref(),
        Some(second.owner.as_str())
    );
    assert!(rows[0].get::<_, i64>(4) as u64 > granted.0);
    let lasts_us = rows[0].get::<_, i64>(6) - rows[0].get::<_, i64>(5);
    assert!((2_000_000..=4_500_000).contains(&lasts_us), "{lasts_us} µs");
    assert_eq!(release(&theirs, &second).await, Released::Freed);
}

#[tokio::test]
async fn an_engine_listens_only_while_it_has_waiters() {
    let Some(database) = Database::create().await else {
        return;
    };
    let (ours, theirs) = (database.engine().await, database.engine().await);
    let (holder, next) = (claim(&["n"]), waiting(&["n"]));
    // The column is 'off' if the commit of the statement does not wait for the disk: there is no hand-off.
    let notified = |rows: &[Row]| rows[0].get::<_, Option<String>>(7).as_deref() != Some("off");
    acquire(&ours, &holder).await;
    let rows = released_in_one(&database.client, &ours, &holder, &ours.waiters.process).await;
    assert!(!notified(&rows), "there are no waiters");
    for without_waiters in [claim(&["n"]), claim(&["n", "o"])] {
        acquire(&ours, &without_waiters).await;
        release(&ours, &without_waiters).await;
    }
    acquire(&ours, &holder).await;
    assert_eq!(database.number(LISTENING).await, 0);
    let subscription = enqueue(&database, &theirs, &next, 1).await;
    let rows = released_in_one(&database.client, &ours, &holder, &ours.waiters.process).await;
    assert!(notified(&rows));
    assert_eq!(release(&theirs, &next).await, Released::Freed);
    drop(subscription);
    // Every check has ended.
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(database.number(LISTENING).await, 1, "for the next waiter");
    advance(Duration::from_secs(31)).await;
    eventually("the engine does not listen", async || {
        database.number(LISTENING).await == 0
    })
    .await;
    acquire(&ours, &holder).await;
    enqueue(&database, &theirs, &next, 1).await;
}

/// Until it is open, waiters depend on the next heartbeat.
#[tokio::test]
async fn the_connection_that_listens_is_opened_again_at_once() {
    let Some(database) = Database::create().await else {
        return;
    };
    let (ours, theirs) = (database.engine().await, database.engine().await);
    let mut pauses = Vec::new();
    // The machine may stand still for a second.
    for _ in 0..3 {
        let (holder, next) = (claim(&["n"]), waiting(&["n"]));
        acquire(&ours, &holder).await;
        let mut subscription = enqueue(&database, &theirs, &next, 1).await;
        let listener = LISTENING.replace("count(*)", "coalesce(max(pid), 0)::bigint");
        let ended = database.number(&listener).await;
        database.execute(&format!("SELECT pg_terminate_backend({ended})")).await;
        let began = std::time::Instant::now();
        eventually("the engine listens", async || {
            ![0, ended].contains(&database.number(&listener).await)
        })
        .await;
        eventually("the clock is known", async || theirs.waiters.has_clock()).await;
        pauses.push(began.elapsed());
        assert_eq!(release(&ours, &holder).await, Released::Freed);
        holds(&theirs, &next, &mut subscription).await;
        assert_eq!(release(&theirs, &next).await, Released::Freed);
    }
    assert!(pauses.iter().min() < Some(&Duration::from_secs(1)), "{pauses:?}");
}

/// The snapshot of the statement has a waiter that leaves before the statement has the row's lock.
#[tokio::test]
async fn a_queue_that_changes_under_a_release_is_left_to_a_transaction() {
    let Some(mut database) = Database::create().await else {
        return;
    };
    let (ours, theirs) = (database.engine().await, database.engine().await);
    let (holder, first, second) = (claim(&["n"]), waiting(&["n"]), waiting(&["n"]));
    acquire(&ours, &holder).await;
    let _first_subscription = enqueue(&database, &theirs, &first, 1).await;
    let _second_subscription = enqueue(&database, &theirs, &second, 1).await;
    let other = connect(&database.url).await;
    let watcher = connect(&database.url).await;
    let leaving = database.client.transaction().await.unwrap();
    leaving
        .batch_execute("UPDATE locks SET queued = 1; DELETE FROM locks_waiters WHERE ticket = 1")
        .await
        .unwrap();
    let released = released_in_one(&other, &ours, &holder, "p");
    let left = async {
        let waiting =
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
        eventually("the statement waits", async || {
            watcher.query_one(waiting, &[]).await.unwrap().get::<_, i64>(0) == 1
        })
        .await;
        leaving.commit().await.unwrap();
    };
    let (rows, ()) = tokio::join!(released, left);
    assert!(rows.is_empty(), "it would be handed off to a waiter that has left");
    assert_eq!(release(&ours, &holder).await, Released::Freed);
    assert_eq!(owner(&database).await.as_deref(), Some(second.owner.as_str()));
}

#[tokio::test]
async fn a_hand_off_that_would_be_short_takes_a_transaction() {
    let Some(database) = Database::create().await else {
        return;
    };
    let (ours, theirs) = (database.engine().await, database.engine().await);
    let mut short = waiting(&["n"]);
    short.ttl = Ttl::clamped(Duration::from_secs(1));
    for (next, change) in [
        (short, "SELECT"),
        (
            waiting(&["n"]),
            "UPDATE locks_waiters SET alive_until = now() + interval '1 second'",
        ),
    ] {
        let holder = claim(&["n"]);
        acquire(&ours, &holder).await;
        let mut subscription = enqueue(&database, &theirs, &next, 1).await;
        database.execute(change).await;
        assert!(released_in_one(&database.client, &ours, &holder, "p").await.is_empty());
        assert_eq!(release(&ours, &holder).await, Released::Freed);
        notified(&mut subscription).await;
        acquire(&theirs, &next).await;
        assert_eq!(release(&theirs, &next).await, Released::Freed);
    }
}

/// Of two releases, the first statement commits one. The other one needs the table of the queue, which is locked.
#[tokio::test]
async fn a_failed_hand_off_fails_no_release() {
    let Some(mut database) = Database::create().await else {
        return;
    };
    let engine = database.engine().await;
    let (held, lost) = (claim(&["held"]), claim(&["lost"]));
    acquire(&engine, &held).await;
    acquire(&engine, &claim(&["lost"])).await;
    database.execute("BEGIN; LOCK TABLE locks_waiters").await;
    let failed = std::cell::Cell::new(false);
    let releases = async {
        tokio::join!(
            release(&engine, &held),
            repeated(async || {
                let released = engine.release(&lost, Duration::ZERO).await;
                failed.set(released.is_err());
                released
            })
        )
    };
    let unlock = async {
        eventually("the hand-off waits", async || database.blocked().await == 1).await;
        let what = "the statement has failed, and the transaction that follows it";
        eventually(what, async || failed.get()).await;
        database.execute("ROLLBACK").await;
    };
    let ((held, lost), ()) = tokio::join!(releases, unlock);
    assert_eq!((held, lost), (Released::Freed, Released::NotHeld));
}
