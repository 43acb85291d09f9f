//! The calls of one transaction, without a store.

use std::sync::Arc;

use super::*;
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
    Row::read(Some(owner.to_owned()), NOW + 5_000_000, 7)
}

fn waiter(ticket: i64, name: &str, owner: &str) -> Position {
    Position::read(
        ticket,
        name.as_bytes().to_vec(),
        owner.to_owned(),
        NOW + 1_000_000,
        false,
        2000,
    )
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
    assert_eq!(changes.called, [second.owner.as_str()]);
    assert_eq!((changes.entered.len(), changes.entered[0].reserve_ms), (1, 800));
    assert_eq!(changes.rows.len(), 1);
    assert!(changes.rows[0].1.owner.is_none() && changes.rows[0].1.fence >= NOW);
}

#[test]
fn the_first_waiter_of_a_free_name_is_called_once() {
    let release = |is_called: bool| {
        let (holder, n) = claim(&["n"], false);
        let mut first = waiter(3, "n", "w3");
        first.is_called = is_called;
        let dead = Position::read(2, b"n".to_vec(), "w2".to_owned(), NOW - 1, false, 2000);
        let mut ledger = ledger(
            &[("n", held(holder.owner.as_str()))],
            vec![waiter(9, "n", "w9"), first, dead],
        );
        ledger.release(&holder, &n, Duration::ZERO);
        ledger.finish().called
    };
    assert_eq!(release(false), ["w3"]);
    assert_eq!(release(true), [""; 0]);
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
    assert_eq!(ledger.first(&names[1]).unwrap().owner, set.owner.as_str());
    let changes = ledger.finish();
    assert_eq!(changes.called, ["w6"], "the next waiter of the free name");
    assert_eq!(changes.entered[0].name, b"b");
    assert_eq!(changes.rows.len(), 2, "both queues are counted again");
}

#[test]
fn a_kept_name_is_busy_and_its_first_waiter_knows() {
    let (holder, n) = claim(&["n"], false);
    let mut ledger = ledger(&[("n", held(holder.owner.as_str()))], vec![waiter(3, "n", "w3")]);
    assert_eq!(ledger.release(&holder, &n, Duration::from_millis(50)), Released::Freed);
    assert_eq!(ledger.busy_for(&n[0]), Some(Duration::from_millis(50)));
    assert_eq!(ledger.renew(&holder, &n, holder.ttl), Renewed::Lost);
    let changes = ledger.finish();
    assert_eq!(
        (changes.called.len(), changes.notified),
        (0, vec![("w3".to_owned(), None)])
    );
}
#[test]
fn the_next_waiter_knows_when_the_short_time_of_the_first_one_ends() {
    let (holder, n) = claim(&["n"], false);
    let mut brief = waiter(3, "n", "w3");
    brief.reserve_ms = 400;
    let positions = vec![brief, waiter(4, "n", "w4"), waiter(5, "n", "w5")];
    let mut ledger = ledger(&[("n", held(holder.owner.as_str()))], positions);
    ledger.release(&holder, &n, Duration::ZERO);
    let changes = ledger.finish();
    assert_eq!(changes.called, ["w3"]);
    assert_eq!(changes.notified, [("w4".to_owned(), Some(Duration::from_millis(400)))]);
}
