//! The calls of one transaction, without a store.

use std::sync::Arc;

use super::*;
use crate::engine::hand_off::GrantTimes;
use crate::model::{Key, Process};

const NOW: i64 = 1_700_000_000_000_000;

fn claim(names: &[&str], waiting: bool) -> (Claim, Vec<StoredName>) {
    let keys: Vec<Key> = names.iter().map(|name| Key::new(name).unwrap()).collect();
    let ttl = Ttl::clamped(Duration::from_millis(800));
    let mut claim = Claim::new(&keys, OwnerToken::fresh(), ttl, Arc::new(Process::current()));
    claim.waiting = waiting;
    let names = claim
        .keys()
        .iter()
        .map(|key| key.as_str().as_bytes().to_vec())
        .collect();
    (claim, names)
}

fn ledger(rows: &[(&str, Row)], positions: Vec<Position>) -> Ledger {
    let rows = rows.iter().map(|(name, row)| (name.as_bytes().to_vec(), row.clone()));
    Ledger::new(NOW, rows.collect(), positions)
}

fn held(owner: &str) -> Row {
    Row::read(Some(owner.to_owned()), NOW + 5_000_000, 7, None)
}

/// A waiter of another engine.
fn waiter(ticket: i64, name: &str, owner: &str) -> Position {
    let waiter = Waiter {
        engine: Some("other".to_owned()),
        holder: Some(Arc::new(elsewhere())),
        hold_ms: 2000,
        share: None,
    };
    Position::read(
        ticket,
        name.as_bytes().to_vec(),
        owner.to_owned(),
        NOW + 4_000_000,
        waiter,
    )
}

fn elsewhere() -> Process {
    Process {
        host: "elsewhere".to_owned(),
        pid: 7,
    }
}

/// Releases the name `n`, which has these positions.
fn released(positions: Vec<Position>) -> Changes {
    let (holder, n) = claim(&["n"], false);
    let mut ledger = ledger(&[("n", held(holder.owner.as_str()))], positions);
    assert_eq!(ledger.release(&holder, &n, Duration::ZERO), Released::Freed);
    ledger.finish()
}

fn content(changes: &Changes) -> Vec<(&str, Content)> {
    changes
        .notifications
        .iter()
        .map(|notification| (notification.owner.as_str(), notification.content))
        .collect()
}

/// A grant of `ms` that follows the token 7.
fn granted(ms: u64) -> Content {
    let granted_us = NOW.unsigned_abs();
    let until_us = granted_us + ms * 1000;
    Content::Granted(Fence(granted_us), GrantTimes { granted_us, until_us })
}

/// Each of two waiters for both names has one of them reserved, and needs the other one.
#[test]
fn waiters_for_several_names_wait_in_the_order_of_names() {
    let ((first, names), (second, _)) = (claim(&["a", "b"], true), claim(&["a", "b"], true));
    let reserved = |claim: &Claim| held(&format!("{}{RESERVED}", claim.owner.as_str()));
    let mut before = ledger(&[("a", reserved(&first)), ("b", reserved(&second))], Vec::new());
    assert!(matches!(before.attempt(&first, &names), Acquired::Held { key, .. } if key.as_str() == "b"));
    assert!(matches!(before.attempt(&second, &names), Acquired::Held { key, .. } if key.as_str() == "a"));
    // The second one has released `b`, which is then reserved for the first one.
    let changes = before.finish();
    assert_eq!(content(&changes), [(first.owner.as_str(), Content::MayBeFree)]);
    let rows = changes.rows.into_iter().chain([(names[0].clone(), reserved(&first))]);
    let mut after = Ledger::new(NOW, rows.collect(), Vec::new());
    assert!(matches!(after.attempt(&first, &names), Acquired::Granted { .. }));
    // It keeps the names before the busy one, for its ttl, and no others.
    let (of_three, three) = claim(&["a", "b", "c"], true);
    let rows = [("b", held("holder")), ("c", reserved(&of_three))];
    let mut busy = ledger(&rows, Vec::new());
    busy.attempt(&of_three, &three);
    assert_eq!(busy.busy_for(&three[0]), Some(Duration::from_millis(800)));
    assert_eq!(busy.busy_for(&three[2]), None);
    // A call that does not wait keeps nothing.
    let mut tried = ledger(&rows, Vec::new());
    tried.attempt(&claim(&["a", "b", "c"], false).0, &three);
    assert_eq!(tried.busy_for(&three[0]), None);
}

/// The ttl is 800 ms.
#[test]
fn a_reservation_is_written_again_when_60_percent_of_its_time_is_left() {
    let (waiter, names) = claim(&["a", "b"], true);
    for (left_us, is_written) in [(481_000, false), (479_000, true)] {
        let reserved = Row::read(
            Some(format!("{}{RESERVED}", waiter.owner.as_str())),
            NOW + left_us,
            7,
            None,
        );
        let mut busy = ledger(&[("a", reserved), ("b", held("holder"))], Vec::new());
        busy.attempt(&waiter, &names);
        let expected = if is_written { 800_000 } else { left_us };
        assert_eq!(busy.busy_for(&names[0]), Some(Duration::from_micros(expected as u64)));
        let changes = busy.finish();
        assert_eq!(changes.rows.iter().any(|(name, _)| *name == names[0]), is_written);
    }
}

#[test]
fn the_calls_of_one_transaction_follow_each_other() {
    let ((first, n), (second, _)) = (claim(&["n"], true), claim(&["n"], true));
    let mut ledger = ledger(&[("n", Row::default())], Vec::new());
    assert!(matches!(ledger.attempt(&first, &n), Acquired::Granted { .. }));
    assert!(matches!(ledger.attempt(&second, &n), Acquired::Held { .. }));
    assert_eq!(ledger.release(&first, &n, Duration::ZERO), Released::Freed);
    let (third, _) = claim(&["n"], false);
    assert!(
        matches!(ledger.attempt(&third, &n), Acquired::Held { .. }),
        "behind the queue"
    );
    let changes = ledger.finish();
    assert_eq!(
        ledger.busy_for(&n[0]),
        Some(Duration::from_millis(800)),
        "of the second"
    );
    assert_eq!((changes.notifications.len(), changes.entered.len()), (1, 0));
    let (row, notification) = (&changes.rows[0].1, &changes.notifications[0]);
    assert_eq!(row.owner.as_deref(), Some(second.owner.as_str()));
    assert!(row.fence > NOW, "the first one has the token of the clock");
    assert!(matches!(notification.content, Content::Granted(fence, _) if fence.0 == row.fence.unsigned_abs()));
    assert_eq!(notification.engine, None);
}

#[test]
fn a_free_name_goes_to_its_first_live_waiter() {
    let dead = Position {
        alive_until_us: NOW - 1,
        ..waiter(2, "n", "w2")
    };
    let changes = released(vec![waiter(9, "n", "w9"), waiter(3, "n", "w3"), dead]);
    assert_eq!(content(&changes), [("w3", granted(2000))]);
    assert_eq!(changes.left, ["w3"]);
    let (_, row) = &changes.rows[0];
    assert_eq!((row.owner.as_deref(), row.fence), (Some("w3"), NOW));
    assert_eq!(row.expires_us, NOW + 2_000_000);
    assert_eq!(row.holder.as_deref(), Some(&elsewhere()));
}

#[test]
fn a_token_of_a_hand_off_is_larger_than_the_last_one() {
    let row = Row::read(Some("x".to_owned()), NOW - 1, NOW + 50, None);
    let mut ledger = ledger(&[("n", row)], vec![waiter(3, "n", "w3")]);
    assert_eq!(ledger.finish().rows[0].1.fence, NOW + 51, "the clock was set back");
}

#[test]
fn a_name_is_reserved_for_a_waiter_that_has_to_make_an_attempt() {
    let (set, names) = claim(&["a", "n"], true);
    let mut own = waiter(1, "n", set.owner.as_str());
    own.waiter.holder = None;
    let changes = released(vec![own, waiter(5, "n", "w5")]);
    assert_eq!(content(&changes), [(set.owner.as_str(), Content::MayBeFree)]);
    let (_, reserved) = &changes.rows[0];
    assert_eq!(reserved.fence, 7, "a reservation needs no token");
    let after = |a: Row| ledger(&[("a", a), ("n", reserved.clone())], vec![waiter(5, "n", "w5")]);

    let mut free = after(Row::default());
    assert!(matches!(
        free.attempt(&claim(&["n"], false).0, &names[1..]),
        Acquired::Held { .. }
    ));
    assert_eq!(free.renew(&set, &names[1..], set.ttl), Renewed::Lost);
    assert!(matches!(free.attempt(&set, &names), Acquired::Granted { .. }));

    let mut busy = after(held("x"));
    busy.remember(&set.owner, 1);
    assert!(matches!(busy.attempt(&set, &names), Acquired::Held { .. }));
    let changes = busy.finish();
    assert_eq!(changes.entered[0].kept_ticket(), Some(1), "it keeps its position");
    assert_eq!(
        content(&changes),
        [("w5", granted(2000))],
        "the name goes to the next waiter"
    );

    let mut cancelled = after(Row::default());
    assert_eq!(cancelled.release(&set, &names, Duration::ZERO), Released::NotHeld);
    assert_eq!(content(&cancelled.finish()), [("w5", granted(2000))]);
}

#[test]
fn a_slow_waiter_keeps_its_position() {
    let (slow, n) = claim(&["n"], true);
    let mut ledger = ledger(&[("n", held("x"))], vec![waiter(5, "n", "w5")]);
    ledger.remember(&slow.owner, 3);
    assert!(matches!(ledger.attempt(&slow, &n), Acquired::Held { .. }));
    assert_eq!(ledger.live(&n[0]).next().unwrap().owner, slow.owner.as_str());
    assert_eq!(ledger.finish().entered[0].kept_ticket(), Some(3));
}

#[test]
fn a_position_moves_with_its_order() {
    let (set, names) = claim(&["a", "b"], true);
    let own = waiter(1, "a", set.owner.as_str());
    let rows = [("a", Row::default()), ("b", held("x"))];
    let mut ledger = ledger(&rows, vec![own, waiter(5, "b", "w5"), waiter(6, "a", "w6")]);
    let Acquired::Held { key, .. } = ledger.attempt(&set, &names) else {
        panic!("b is held");
    };
    assert_eq!(key.as_str(), "b");
    assert_eq!(ledger.live(&names[1]).next().unwrap().owner, set.owner.as_str());
    let changes = ledger.finish();
    assert!(changes.notifications.is_empty(), "the free name is kept");
    assert_eq!(
        ledger.busy_for(&names[0]),
        Some(Duration::from_millis(800)),
        "for the ttl of the set"
    );
    assert_eq!(
        (changes.entered[0].name.as_slice(), changes.entered[0].kept_ticket()),
        (&b"b"[..], None)
    );
    assert_eq!(changes.rows.len(), 2, "both queues are counted again");
}

#[test]
fn a_kept_name_is_busy_and_its_first_waiter_knows() {
    let (holder, n) = claim(&["n"], false);
    let mut ledger = ledger(&[("n", held(holder.owner.as_str()))], vec![waiter(3, "n", "w3")]);
    assert_eq!(ledger.release(&holder, &n, Duration::from_millis(50)), Released::Freed);
    assert_eq!(ledger.busy_for(&n[0]), Some(Duration::from_millis(50)));
    assert_eq!(ledger.renew(&holder, &n, holder.ttl), Renewed::Lost);
    assert_eq!(content(&ledger.finish()), [("w3", Content::MayBeFree)]);
}

#[test]
fn the_next_waiter_knows_when_a_short_hand_off_ends() {
    let mut brief = waiter(3, "n", "w3");
    brief.waiter.hold_ms = 400;
    let changes = released(vec![brief, waiter(4, "n", "w4"), waiter(5, "n", "w5")]);
    let after = Content::FreeAfter(Duration::from_millis(400));
    assert_eq!(content(&changes), [("w3", granted(400)), ("w4", after)]);
}

#[test]
fn a_hand_off_ends_with_the_liveness_of_its_process() {
    let dead = Position {
        alive_until_us: NOW + 500_000,
        ..waiter(3, "n", "w3")
    };
    let changes = released(vec![dead, waiter(4, "n", "w4")]);
    let after = Content::FreeAfter(Duration::from_millis(500));
    assert_eq!(content(&changes), [("w3", granted(500)), ("w4", after)]);
}

/// As in `memory:`, with one ledger for all calls.
#[test]
fn without_hand_offs_the_first_waiter_is_notified_and_keeps_its_position() {
    let ((mut holder, n), (dead, _), (next, _), (late, _)) = (
        claim(&["n"], false),
        claim(&["n"], true),
        claim(&["n"], true),
        claim(&["n"], false),
    );
    holder.ttl = Ttl::clamped(Duration::from_secs(60));
    let mut store = Ledger::default();
    let call = |store: &mut Ledger, ms: i64, claim: &Claim| {
        store.begin(NOW + ms * 1000, &n);
        (store.attempt(claim, &n), store.finish())
    };
    assert!(matches!(call(&mut store, 0, &holder).0, Acquired::Granted { .. }));
    assert!(matches!(call(&mut store, 1, &dead).0, Acquired::Held { .. }));
    let (answer, _) = call(&mut store, 700, &next);
    let Acquired::Held { retry_after, .. } = answer else {
        panic!("{answer:?}")
    };
    assert_eq!(
        retry_after,
        Some(Duration::from_millis(101)),
        "the one ahead may be dead"
    );
    store.begin(NOW + 750_000, &n);
    store.release(&holder, &n, Duration::ZERO);
    let changes = store.finish();
    assert_eq!(content(&changes), [(dead.owner.as_str(), Content::MayBeFree)]);
    assert!(changes.rows[0].1.owner.is_none() && changes.left.is_empty());
    // Its position lives for the ttl, 800 ms, and is found again.
    let (answer, changes) = call(&mut store, 802, &late);
    assert!(matches!(answer, Acquired::Held { .. }), "behind the queue");
    assert_eq!(content(&changes), [(next.owner.as_str(), Content::MayBeFree)]);
    let (answer, changes) = call(&mut store, 803, &dead);
    assert!(matches!(answer, Acquired::Granted { .. }));
    assert_eq!(changes.left, [dead.owner.as_str()]);
    assert_eq!(store.queues.len(), 1);
}

/// The tables were created again, with new tickets.
#[test]
fn a_ticket_of_two_waiters_removes_neither_of_them() {
    let (slow, n) = claim(&["n"], true);
    let mut ledger = ledger(&[("n", held("x"))], vec![waiter(3, "n", "w3")]);
    ledger.remember(&slow.owner, 3);
    assert!(matches!(ledger.attempt(&slow, &n), Acquired::Held { .. }));
    assert_eq!(ledger.live(&n[0]).count(), 2);
}
