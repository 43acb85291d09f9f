//! What a service does beside its calls: the heartbeat, the checks of its waiters, and the sweep.

use std::collections::{HashMap, HashSet};

use super::packet::{Bytes, CLOCK, Packet, Row, joined, list, rows};
use super::session::MysqlSession;
use super::tables::Tables;
use super::transaction::{UNION, range, share};
use crate::engine::core::ledger::{StoredName, bounds, is_share, is_shared};
use crate::engine::sql::failure::Kind;
use crate::engine::sql::server::Outcome;
use crate::engine::sql::server::single_calls::micros;
use crate::engine::sql::server::upkeep::{
    Checked, CheckedName, CheckedShare, EXPIRED_POSITION_KEPT_MS, FREE_ROW_KEPT_S, LIVENESS_MS, SWEEP_INTERVAL,
    SWEEP_LIMIT, SWEEP_NAMES, SWEEP_ROW, Swept,
};
use crate::engine::sql::server::waiters::{AHEAD, CheckedLease};
use crate::model::OwnerToken;

/// A `LIMIT` above any result. With a `LIMIT` the server does not merge the subquery into the outer statement.
pub(super) const NO_LIMIT: u64 = 1 << 32;

/// Sends the heartbeat of this process, `except` for these owners, and reads the lease and the queue of each name.
pub(super) async fn check(
    session: &mut MysqlSession,
    process: &str,
    names: &[StoredName],
    except: Option<&[OwnerToken]>,
) -> Outcome<Checked> {
    let mut packet = Packet::default();
    packet.add(CLOCK);
    let server = session.server.clone();
    let Tables { locks, waiters, .. } = &server.tables;
    let process = Bytes(process);
    let kept = except.map(|except| {
        // An empty list is no SQL. No owner is empty.
        let except = list(except.iter().map(OwnerToken::as_str).chain([""]).map(Bytes));
        // Skips positions that another transaction has locked: that transaction writes them.
        packet.add(format_args!(
            "UPDATE {waiters} AS w JOIN (SELECT ticket FROM {waiters} WHERE process = {process} AND owner NOT IN ({except}) \
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
    let (mut leases, mut queues, mut shares) = (Vec::new(), Vec::new(), Vec::new());
    for names in names.chunks(UNION) {
        if !leases.is_empty() {
            session.run(std::mem::take(&mut packet), &mut answers).await?;
        }
        leases.push(answers.len() + packet.add(format_args!(
            "SELECT name, expires_at - @u, owner, @u - since FROM {locks} WHERE name IN ({}) AND owner IS NOT NULL AND expires_at > @u",
            list(names.iter().map(Bytes))
        )));
        queues.push(answers.len() + packet.add(joined(" UNION ALL ", names.iter().map(first))));
        let first = answers.len();
        let added = add_shares(&mut packet, &server.tables, names);
        shares.extend(added.into_iter().map(|index| first + index));
    }
    session.run(packet, &mut answers).await?;
    let mut leases: HashMap<StoredName, CheckedLease> = leases
        .iter()
        .flat_map(|index| rows(&answers, *index))
        .filter_map(|row| Some((row.bytes(0)?.to_vec(), lease(row, 1, 3, 2)?)))
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
        shares: shares
            .iter()
            .flat_map(|index| rows(&answers, *index))
            .filter_map(checked_share)
            .collect(),
        now_us: rows(&answers, clock).first().and_then(|row| row.number(0)),
        kept: kept.iter().filter_map(|row| row.text(0)).collect(),
    })
}

/// Adds the statements that read the shares of the shared names, and their first waiters. Returns the indexes of their answers.
fn add_shares(packet: &mut Packet, tables: &Tables, names: &[StoredName]) -> Vec<usize> {
    let Tables { locks, waiters, .. } = tables;
    let shared: Vec<&StoredName> = names.iter().filter(|name| is_shared(name)).collect();
    let of_name = |name: &&StoredName| {
        let (first, end) = bounds(name);
        range(&first, &end)
    };
    let first = |name: &&StoredName| {
        let name = Bytes(name);
        format!(
            "(SELECT name, permits, permit_limit, NULL FROM {waiters} WHERE name = {name} AND alive_until > @u ORDER BY ticket LIMIT 1)"
        )
    };
    let ranges = joined(" OR ", shared.iter().map(of_name));
    let statements = [
        format!(
            "SELECT name, permits, permit_limit, owner, expires_at - @u, @u - since FROM {locks} FORCE INDEX (PRIMARY) \
             WHERE ({ranges}) AND expires_at > @u"
        ),
        joined(" UNION ALL ", shared.iter().map(first)),
    ];
    let statements = statements.into_iter().filter(|_| !shared.is_empty());
    statements.map(|statement| packet.add(statement)).collect()
}

/// Reads the lease of a row. `None`: it lacks a value.
fn lease(row: &Row, remaining: usize, age: usize, holder: usize) -> Option<CheckedLease> {
    Some(CheckedLease {
        remaining: micros(row.number(remaining)?),
        age: micros(row.number(age).unwrap_or_default()),
        holder: row.text(holder)?,
    })
}

/// Reads a share, or the first waiter of a shared name.
fn checked_share(row: &Row) -> Option<CheckedShare> {
    Some(CheckedShare {
        name: row.bytes(0)?.to_vec(),
        share: share(row, 1),
        lease: lease(row, 4, 5, 3),
    })
}

/// Claims the sweep of this interval. `false`: another process has done that.
pub(super) async fn claim_sweep(session: &mut MysqlSession) -> Outcome<bool> {
    let locks = &session.server.tables.locks;
    let (row, interval) = (Bytes(SWEEP_ROW), SWEEP_INTERVAL.as_micros());
    let mut packet = Packet::default();
    packet.add(CLOCK);
    // A row that says otherwise for longer than two intervals was written before the clock was set back.
    packet.add(format_args!(
        "INSERT INTO {locks} (name, fence, expires_at, since) VALUES ({row}, 0, @u + {interval}, @u) ON DUPLICATE KEY UPDATE \
         since = IF(expires_at <= @u OR expires_at > @u + 2 * {interval}, @u, since), expires_at = IF(since = @u, @u + {interval}, expires_at)"
    ));
    let claimed = packet.add(format_args!("SELECT since = @u FROM {locks} WHERE name = {row}"));
    let mut answers = Vec::new();
    session.run(packet, &mut answers).await?;
    Ok(rows(&answers, claimed).first().is_some_and(|row| row.is_true(0)))
}

/// Returns the shared names among these that have shares: their rows stay.
async fn names_with_shares(session: &mut MysqlSession, names: &[&[u8]]) -> Outcome<HashSet<StoredName>> {
    let locks = &session.server.tables.locks;
    let shared: Vec<StoredName> = names
        .iter()
        .filter(|name| is_shared(name))
        .map(|name| name.to_vec())
        .collect();
    let mut packet = Packet::default();
    let mut found = Vec::new();
    for names in shared.chunks(UNION) {
        let first = |name: &StoredName| {
            let (first, end) = bounds(name);
            format!(
                "(SELECT {} FROM {locks} WHERE {} LIMIT 1)",
                Bytes(name),
                range(&first, &end)
            )
        };
        found.push(packet.add(joined(" UNION ALL ", names.iter().map(first))));
    }
    let mut answers = Vec::new();
    if !found.is_empty() {
        session.run(packet, &mut answers).await?;
    }
    let found = found.iter().flat_map(|index| rows(&answers, *index));
    Ok(found.filter_map(|row| Some(row.bytes(0)?.to_vec())).collect())
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
    // In two transactions: others lock names before the shares of any of them.
    let (shares, mut others): (Vec<&[u8]>, Vec<&[u8]>) = old.partition(|name| is_share(name));
    let used = names_with_shares(session, &others).await?;
    others.retain(|name| !used.contains(*name));
    for names in [shares, others].into_iter().filter(|names| !names.is_empty()) {
        let names = list(names.into_iter().map(Bytes));
        delete.add(format_args!("DELETE FROM {locks} WHERE name IN ({names}) AND {is_old}"));
    }
    if !delete.text.is_empty() {
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

/// Returns warnings: a crash of the server may lose committed transactions because of a setting, the server is read-only, or the
/// cluster accepts writes on several nodes.
pub(super) async fn warnings(session: &mut MysqlSession) -> Outcome<Vec<String>> {
    let mut packet = Packet::default();
    // With a binary log, a commit that is not in it is rolled back when the server restarts.
    let settings =
        packet.add("SELECT @@GLOBAL.innodb_flush_log_at_trx_commit, IF(@@GLOBAL.log_bin, @@GLOBAL.sync_binlog, 1)");
    let galera = packet.add("SHOW GLOBAL STATUS LIKE 'wsrep_cluster_size'");
    let group = packet.add("SHOW GLOBAL VARIABLES LIKE 'group_replication_single_primary_mode'");
    let mut answers = Vec::new();
    let executed = session.run(packet, &mut answers).await;
    // A proxy may not know the later statements.
    if answers.is_empty() {
        executed?;
    }
    let address = &session.server.connections.place.address;
    let settings = rows(&answers, settings).first();
    let names = ["innodb_flush_log_at_trx_commit", "sync_binlog"];
    let mut risks = names.iter().enumerate().filter_map(|(index, name)| {
        let value = settings?.number(index).filter(|value| *value != 1)?;
        Some((name, value))
    });
    let mut warnings = Vec::new();
    if let Some((name, value)) = risks.next() {
        warnings.push(format!(
            "{address} has {name} = {value}: a crash of the server or its machine may lose locks that were just granted; other \
             callers may then acquire them. Set it to 1: SET GLOBAL {name} = 1, and in the configuration of the server"
        ));
    }
    if !session.was_writable {
        warnings.push(format!(
            "{address} is read-only, such as a replica: locks that it shows may be old, and none can be acquired there, unless the user \
             may write in spite of it. The URL must lead to the primary"
        ));
    }
    let value = |index| rows(&answers, index).first().and_then(|row: &Row| row.text(1));
    let nodes = value(galera).and_then(|nodes| nodes.parse::<u32>().ok());
    if nodes.is_some_and(|nodes| nodes > 1) || value(group).is_some_and(|value| value == "OFF") {
        warnings.push(format!(
            "{address} is a node of a cluster that accepts writes on several nodes (Galera, or Group Replication with several primaries): \
             each node has its own clock, so two callers may hold a lock at the same time if they use different nodes. Let all services \
             use one node"
        ));
    }
    Ok(warnings)
}
