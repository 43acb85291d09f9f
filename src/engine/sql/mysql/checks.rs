//! What a service does beside its calls: the heartbeat, the checks of its waiters, and the sweep.

use std::collections::HashMap;

use super::packet::{Bytes, CLOCK, Packet, Row, joined, list, rows};
use super::session::MysqlSession;
use super::tables::Tables;
use super::transaction::UNION;
use crate::engine::sql::ledger::StoredName;
use crate::engine::sql::server::Outcome;
use crate::engine::sql::server::error::Kind;
use crate::engine::sql::server::single_calls::micros;
use crate::engine::sql::server::upkeep::{
    Checked, CheckedName, EXPIRED_POSITION_KEPT_MS, FREE_ROW_KEPT_S, LIVENESS_MS, SWEEP_LIMIT, SWEEP_NAMES, Swept,
};
use crate::engine::sql::server::waiters::{AHEAD, CheckedLease};

/// A `LIMIT` above any result. With a `LIMIT` the server does not merge the subquery into the outer statement.
pub(super) const NO_LIMIT: u64 = 1 << 32;

/// Sends the heartbeat of this process if it is due, and reads the lease and the queue of each name.
pub(super) async fn check(
    session: &mut MysqlSession,
    process: &str,
    names: &[StoredName],
    is_heartbeat: bool,
) -> Outcome<Checked> {
    let mut packet = Packet::default();
    packet.add(CLOCK);
    let server = session.server.clone();
    let Tables { locks, waiters, .. } = &server.tables;
    let process = Bytes(process);
    let kept = is_heartbeat.then(|| {
        // Skips positions that another transaction has locked: that transaction writes them.
        packet.add(format_args!(
            "UPDATE {waiters} AS w JOIN (SELECT ticket FROM {waiters} WHERE process = {process} \
             LIMIT {NO_LIMIT} FOR UPDATE SKIP LOCKED) AS own ON own.ticket = w.ticket SET w.alive_until = @u + {}",
            LIVENESS_MS * 1000
        ));
        packet.add(format_args!("SELECT owner FROM {waiters} WHERE process = {process}"))
    });
    let clock = packet.add("SELECT @u");
    let first = |name| {
        format!(
            "(SELECT name, process = {process} FROM {waiters} WHERE name = {} AND alive_until > @u ORDER BY ticket LIMIT {AHEAD})",
            Bytes(name)
        )
    };
    let mut answers = Vec::new();
    let (mut leases, mut queues) = (Vec::new(), Vec::new());
    for names in names.chunks(UNION) {
        if !leases.is_empty() {
            session.run(std::mem::take(&mut packet), &mut answers).await?;
        }
        leases.push(answers.len() + packet.add(format_args!(
            "SELECT name, expires_at - @u, owner, @u - since FROM {locks} WHERE name IN ({}) AND owner IS NOT NULL AND expires_at > @u",
            list(names.iter().map(Bytes))
        )));
        queues.push(answers.len() + packet.add(joined(" UNION ALL ", names.iter().map(first))));
    }
    session.run(packet, &mut answers).await?;
    let lease = |row: &Row| {
        let lease = CheckedLease {
            remaining: micros(row.number(1)?),
            age: micros(row.number(3).unwrap_or_default()),
            holder: row.text(2)?,
        };
        Some((row.bytes(0)?.to_vec(), lease))
    };
    let mut leases: HashMap<StoredName, CheckedLease> = leases
        .iter()
        .flat_map(|index| rows(&answers, *index))
        .filter_map(lease)
        .collect();
    // The first waiters of each name, and whether each is of this process.
    let mut firsts: HashMap<&[u8], Vec<bool>> = HashMap::new();
    for row in queues.iter().flat_map(|index| rows(&answers, *index)) {
        if let Some(name) = row.bytes(0) {
            firsts.entry(name).or_default().push(row.is_true(1));
        }
    }
    let checked = names.iter().map(|name| {
        let first = firsts.get(name.as_slice());
        let ahead = first.and_then(|first| first.iter().position(|is_own| *is_own));
        CheckedName {
            lease: leases.remove(name),
            has_waiters: first.is_some(),
            ahead: ahead.map_or(AHEAD, |ahead| ahead as u64),
            name: name.clone(),
        }
    });
    let kept = kept.map(|index| rows(&answers, index)).unwrap_or_default();
    Ok(Checked {
        names: checked.collect(),
        now_us: rows(&answers, clock).first().and_then(|row| row.number(0)),
        kept: kept.iter().filter_map(|row| row.text(0)).collect(),
    })
}

/// Reads rows after `after`, and removes those of names that have been free for long.
pub(super) async fn sweep(session: &mut MysqlSession, after: &[u8]) -> Outcome<Swept> {
    let Tables { locks, waiters, .. } = &session.server.tables;
    let kept = FREE_ROW_KEPT_S * 1_000_000;
    let is_old = format!("queued = 0 AND expires_at < @u - {kept} AND (owner IS NOT NULL OR since < @u - {kept})");
    let mut packet = Packet::default();
    packet.add(CLOCK);
    // Read without locks: a statement that changes rows locks all that it reads.
    let page = packet.add(format_args!(
        "SELECT name, {is_old} FROM {locks} WHERE name > {} ORDER BY name LIMIT {SWEEP_LIMIT}",
        Bytes(after)
    ));
    let with_expired = packet.add(format_args!(
        "SELECT DISTINCT name FROM {waiters} WHERE alive_until < @u - {} LIMIT {SWEEP_NAMES}",
        EXPIRED_POSITION_KEPT_MS * 1000
    ));
    let mut answers = Vec::new();
    let mut delete = Packet::default();
    let locks = locks.clone();
    session.run(packet, &mut answers).await?;
    let page = rows(&answers, page);
    let old = page.iter().filter(|row| row.is_true(1)).filter_map(|row| row.bytes(0));
    let names = list(old.map(Bytes));
    if !names.is_empty() {
        delete.add(format_args!("DELETE FROM {locks} WHERE name IN ({names}) AND {is_old}"));
        match session.run(delete, &mut Vec::new()).await {
            // Another program has locked a row, or the server ended the statement: a later sweep removes this page.
            Err(failure) if matches!(failure.kind(), Kind::Locked | Kind::Cancelled) => {}
            outcome => outcome?,
        }
    }
    let name = |row: &Row| row.bytes(0).map(<[u8]>::to_vec);
    let is_full = page.len() as i64 == SWEEP_LIMIT;
    Ok(Swept {
        last: page.last().filter(|_| is_full).and_then(name),
        with_expired: rows(&answers, with_expired).iter().filter_map(name).collect(),
    })
}
