//! What a transaction reads and writes: two packets. The first one locks the rows of all names in their order, and reads them and
//! their queues. The second one writes the result.

mod shares;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use self::shares::{SHARE_COLUMNS, live_shares, share_columns, share_values};
pub(super) use self::shares::{range, share};
use super::packet::{Answer, Bytes, CLOCK, Nullable, Packet, Row, joined, list, rows};
use super::session::{Begun, MysqlSession};
use super::tables::Tables;
use crate::engine::core::ledger::{self, Changes, Ledger, Position, StoredName, Waiter, is_share};
use crate::engine::sql::server::transaction::Plan;
use crate::engine::sql::server::upkeep::EXPIRED_POSITION_KEPT_MS;
use crate::engine::sql::server::{LOCK_WAIT, Outcome};
use crate::model::Process;

/// How long the server waits for the next statement of a transaction, in seconds. After that it closes the connection of a stopped process,
/// which ends its row locks.
const TRANSACTION_IDLE_TIMEOUT_S: u64 = 2;

/// How many queries one statement combines.
pub(super) const UNION: usize = 32;

/// Begins a transaction, locks the rows of the plan, and reads them and their queues.
pub(super) async fn read(session: &mut MysqlSession, process: &str, plan: &Plan) -> Outcome<Ledger> {
    let mut packet = Packet::default();
    let Tables { locks, waiters, .. } = &session.server.tables;
    let all = list(plan.names.keys().map(Bytes));
    if plan.is_brief && !session.is_mariadb {
        // MySQL's shortest lock timeout is 1 s. So these statements, before the transaction, fail at a locked row. Within it their
        // locks would not be in order.
        packet.add(CLOCK);
        for name in plan.names.keys().map(Bytes) {
            packet.add(format_args!(
                "SELECT 1 FROM {locks} WHERE name = {name} FOR UPDATE NOWAIT"
            ));
        }
    }
    begin(&mut packet, plan);
    lock(&mut packet, locks, plan, session.is_mariadb);
    packet.add(CLOCK);
    let clock = packet.add("SELECT @u");
    // A row that was not created, and did not exist when the rows were locked, may exist now.
    let locked = packet.add(format_args!(
        "SELECT name, owner, expires_at, fence, queued FROM {locks} FORCE INDEX (PRIMARY) WHERE name IN ({all}) FOR UPDATE SKIP LOCKED"
    ));
    let shares: Vec<String> = plan.shares().map(|(first, end)| range(&first, &end)).collect();
    let shares = joined(" OR ", shares);
    let shares = (!shares.is_empty()).then(|| {
        packet.add(format_args!(
            "SELECT {SHARE_COLUMNS} FROM {locks} FORCE INDEX (PRIMARY) WHERE {shares}"
        ))
    });
    let columns = format!(
        "ticket, name, owner, alive_until, process, hold_ms, host, pid{}",
        shares.map_or("", |_| ", permits, permit_limit")
    );
    let front = |name: &&StoredName| {
        format!(
            "(SELECT {columns} FROM {waiters} WHERE name = {} AND alive_until > @u ORDER BY ticket LIMIT {})",
            Bytes(name),
            plan.front(name)
        )
    };
    let names: Vec<&StoredName> = plan.names.keys().collect();
    let mut queues = Vec::new();
    for names in names.chunks(UNION) {
        queues.push(packet.add(joined(" UNION ALL ", names.iter().map(front))));
    }
    if !plan.owners.is_empty() {
        let owners = list(plan.owners.iter().map(Bytes));
        queues.push(packet.add(format_args!(
            "SELECT {columns} FROM {waiters} WHERE owner IN ({owners})"
        )));
    }
    let mut answers = Vec::new();
    session.run(packet, &mut answers).await?;
    let shares = match shares {
        Some(index) => live_shares(session, rows(&answers, index), rows(&answers, clock)).await?,
        None => Some(Vec::new()),
    };
    let shares = shares.ok_or_else(|| session.unexpected())?;
    ledger_of(session, process, plan, &answers, clock, (locked, shares), &queues).ok_or_else(|| session.unexpected())
}

/// Adds the statements that begin a transaction.
pub(super) fn begin(packet: &mut Packet, plan: &Plan) {
    // MySQL treats 0 as 1, its minimum.
    let lock_wait_s = if plan.is_brief { 0 } else { LOCK_WAIT.as_secs() };
    packet.add(format_args!(
        "SET SESSION wait_timeout = {TRANSACTION_IDLE_TIMEOUT_S}, innodb_lock_wait_timeout = {lock_wait_s}"
    ));
    packet.add("START TRANSACTION");
}

/// Adds the statement that restores the settings which [`begin`] has changed.
fn restore_settings(packet: &mut Packet, session: &MysqlSession) {
    let (wait_timeout_s, lock_wait_s) = (session.wait_timeout_s, LOCK_WAIT.as_secs());
    packet.add(format_args!(
        "SET SESSION wait_timeout = {wait_timeout_s}, innodb_lock_wait_timeout = {lock_wait_s}"
    ));
}

/// Adds the statements that lock the rows of names in their order, and create missing ones.
///
/// The insert locks a row that exists. A lock of the existing rows after the insert of all missing ones would not lock in order,
/// and could deadlock.
fn lock(packet: &mut Packet, locks: &str, plan: &Plan, is_mariadb: bool) {
    let names: Vec<(&StoredName, &bool)> = plan.names.iter().collect();
    for run in names.chunk_by(|(_, before), (_, next)| before == next) {
        if *run[0].1 {
            let rows = run.iter().map(|(name, _)| format!("({}, 0, 0, 0)", Bytes(name)));
            packet.add(format_args!(
                "INSERT INTO {locks} (name, fence, expires_at, since) VALUES {} ON DUPLICATE KEY UPDATE fence = fence",
                list(rows)
            ));
            continue;
        }
        // For several names in a small table MySQL reads all rows, and locks them.
        for names in run.chunks(if is_mariadb { run.len() } else { 1 }) {
            let names = list(names.iter().map(|(name, _)| Bytes(name)));
            packet.add(format_args!(
                "SELECT 1 FROM {locks} FORCE INDEX (PRIMARY) WHERE name IN ({names}) ORDER BY name FOR UPDATE"
            ));
        }
    }
}

/// Returns the ledger of what was read. `None`: a row lacks a value, or is missing.
fn ledger_of(
    session: &mut MysqlSession,
    process: &str,
    plan: &Plan,
    answers: &[Answer],
    clock: usize,
    (locked, shares): (usize, Vec<(StoredName, ledger::Row)>),
    queues: &[usize],
) -> Option<Ledger> {
    let now_us = rows(answers, clock).first()?.number(0)?;
    let mut positions: BTreeMap<i64, Position> = BTreeMap::new();
    let mut tickets = HashMap::new();
    // The position of a call's owner may be among the first ones, too.
    for row in queues.iter().flat_map(|index| rows(answers, *index)) {
        let position = position(row, process)?;
        let ticket = row.number(0)?;
        tickets.insert(position.owner.clone(), ticket);
        positions.insert(ticket, position);
    }
    let mut found = BTreeMap::new();
    let mut with_expired = Vec::new();
    for row in rows(answers, locked) {
        let name = row.bytes(0)?.to_vec();
        let known = positions.values().filter(|position| position.name == name).count();
        // All live positions are known, and there are more positions.
        if known < plan.front(&name) && row.number(4)? > known as i64 {
            with_expired.push(name.clone());
        }
        found.insert(
            name,
            ledger::Row::read(row.text(1), row.number(2)?, row.number(3)?, None),
        );
    }
    found.extend(shares);
    if plan.lacks_row(&found) {
        return None;
    }
    session.begun = Begun { tickets, with_expired };
    Some(Ledger::new(now_us, found, positions.into_values().collect()))
}

/// Reads a position in a queue. `None`: the row lacks a value.
fn position(row: &Row, process: &str) -> Option<Position> {
    let engine = row.text(4)?;
    let holder = |host| {
        let pid = row.number(7)? as u32;
        Some(Arc::new(Process { host, pid }))
    };
    let waiter = Waiter {
        engine: (engine != process).then_some(engine),
        holder: row.text(6).and_then(holder),
        hold_ms: i32::try_from(row.number(5)?).ok()?,
        share: share(row, 8),
    };
    let (ticket, name, owner) = (row.number(0)?, row.bytes(1)?.to_vec(), row.text(2)?);
    Some(Position::read(ticket, name, owner, row.number(3)?, waiter))
}

/// Writes the changes of a transaction, and commits it. Returns the tickets of the positions. Other processes find their hand-offs when they
/// poll.
pub(super) async fn write(
    session: &mut MysqlSession,
    process: &str,
    changes: &Changes,
) -> Outcome<HashMap<String, u64>> {
    let mut packet = Packet::default();
    let begun = std::mem::take(&mut session.begun);
    let Tables { locks, waiters, .. } = &session.server.tables;
    let left: Vec<&i64> = changes
        .left
        .iter()
        .filter_map(|owner| begun.tickets.get(owner))
        .collect();
    if !left.is_empty() {
        packet.add(format_args!("DELETE FROM {waiters} WHERE ticket IN ({})", list(left)));
    }
    let is_written = |name: &&StoredName| changes.rows.iter().any(|(written, _)| written == *name);
    let with_expired = list(begun.with_expired.iter().filter(is_written).map(Bytes));
    if !with_expired.is_empty() {
        packet.add(format_args!(
            "DELETE FROM {waiters} WHERE name IN ({with_expired}) AND alive_until < @u - {}",
            EXPIRED_POSITION_KEPT_MS * 1000
        ));
    }
    let mut tickets: HashMap<String, u64> = HashMap::new();
    let entered = enter(&mut packet, waiters, process, &begun, changes, &mut tickets);
    if !changes.rows.is_empty() {
        update(&mut packet, locks, waiters, changes);
    }
    let commit = packet.add("COMMIT");
    restore_settings(&mut packet, session);
    let mut answers = Vec::new();
    if let Err(failure) = session.run(packet, &mut answers).await {
        let is_committed = answers.len() > commit;
        return Err(if is_committed { failure.after_commit() } else { failure });
    }
    for row in entered.map(|index| rows(&answers, index)).unwrap_or_default() {
        if let (Some(owner), Some(ticket)) = (row.text(0), row.number(1)) {
            tickets.insert(owner, ticket.unsigned_abs());
        }
    }
    Ok(tickets)
}

/// Adds the statements that enter queues, keep positions there alive, or move them from another name with their ticket. Returns the
/// index of the answer with the tickets of new positions, and adds the others.
fn enter(
    packet: &mut Packet,
    waiters: &str,
    process: &str,
    begun: &Begun,
    changes: &Changes,
    tickets: &mut HashMap<String, u64>,
) -> Option<usize> {
    let (known, new): (Vec<_>, Vec<_>) = changes
        .entered
        .iter()
        .partition(|entered| begun.tickets.contains_key(&entered.owner));
    for entered in known {
        let ticket = begun.tickets.get(&entered.owner).copied().unwrap_or_default();
        tickets.insert(entered.owner.clone(), ticket.unsigned_abs());
        let holder = entered.waiter.holder.as_deref();
        packet.add(format_args!(
            "UPDATE {waiters} SET name = {}, alive_until = {}, hold_ms = {}, host = {}, pid = {}, process = {} WHERE ticket = {ticket}",
            Bytes(&entered.name),
            entered.alive_until_us,
            entered.waiter.hold_ms,
            Nullable(holder.map(|holder| Bytes(&holder.host))),
            Nullable(holder.map(|holder| holder.pid)),
            Bytes(process),
        ));
    }
    if new.is_empty() {
        return None;
    }
    let columns = share_columns(new.iter().map(|entered| entered.waiter.share));
    let values = |entered: &&Position| {
        let holder = entered.waiter.holder.as_deref();
        format!(
            "({}, {}, {}, {}, {}, {}, {}, {}{})",
            Nullable(entered.kept_ticket()),
            Bytes(&entered.owner),
            Bytes(&entered.name),
            entered.alive_until_us,
            entered.waiter.hold_ms,
            Nullable(holder.map(|holder| Bytes(&holder.host))),
            Nullable(holder.map(|holder| holder.pid)),
            Bytes(process),
            share_values(columns, entered.waiter.share)
        )
    };
    // Those that enter again first: their tickets are smaller. Another waiter has the ticket of one only if the tables are new.
    let (again, first): (Vec<_>, Vec<_>) = new.iter().partition(|entered| entered.kept_ticket().is_some());
    for (entered, when_taken) in [(again, "ON DUPLICATE KEY UPDATE ticket = ticket"), (first, "")] {
        let values = list(entered.into_iter().map(values));
        if !values.is_empty() {
            packet.add(format_args!(
                "INSERT INTO {waiters} (ticket, owner, name, alive_until, hold_ms, host, pid, process{columns}) VALUES {values} {when_taken}"
            ));
        }
    }
    let owners = list(new.iter().map(|entered| Bytes(&entered.owner)));
    Some(packet.add(format_args!(
        "SELECT owner, ticket FROM {waiters} WHERE owner IN ({owners})"
    )))
}

/// Adds the statements that write the rows of names, and count their positions again, and those of shares. The statements before have changed
/// the positions.
///
/// The lease of an owner is never shortened: a share may have been renewed since it was read.
fn update(packet: &mut Packet, locks: &str, waiters: &str, changes: &Changes) {
    let is_gone = |(name, row): &&(StoredName, ledger::Row)| row.owner.is_none() && is_share(name);
    let (gone, written): (Vec<_>, Vec<_>) = changes.rows.iter().partition(is_gone);
    if !gone.is_empty() {
        let names = list(gone.iter().map(|(name, _)| Bytes(name)));
        packet.add(format_args!(
            "DELETE l FROM {locks} AS l FORCE INDEX (PRIMARY) WHERE name IN ({names})"
        ));
    }
    if written.is_empty() {
        return;
    }
    // Each text is sent once, for any number of names: the server limits the size of a packet.
    let texts: BTreeSet<&str> = changes
        .rows
        .iter()
        .filter_map(|(_, row)| row.metadata.as_deref())
        .collect();
    for (index, text) in texts.iter().enumerate() {
        packet.add(format_args!("SET @m{index} = {}", Bytes(text)));
    }
    let variable = |text: &str| {
        texts
            .iter()
            .position(|one| *one == text)
            .map(|index| format!("@m{index}"))
    };
    let columns = share_columns(written.iter().map(|(_, row)| row.share));
    let values = written.iter().map(|(name, row)| {
        // Without `since`, the metadata is kept.
        let is_new = row.granted_us.is_some() || row.owner.is_none();
        let holder = row.holder.as_deref();
        format!(
            "({name}, {}, {}, {}, (SELECT COUNT(*) FROM {waiters} WHERE name = {name}), {}, {}, {}, {}{})",
            Nullable(row.owner.as_ref().map(Bytes)),
            row.fence,
            row.expires_us,
            if is_new { "@u" } else { "NULL" },
            Nullable(holder.map(|process| Bytes(&process.host))),
            Nullable(holder.map(|process| process.pid)),
            Nullable(row.metadata.as_deref().and_then(variable)),
            share_values(columns, row.share),
            name = Bytes(name),
        )
    });
    packet.add(format_args!(
        "INSERT INTO {locks} (name, owner, fence, expires_at, queued, since, host, pid, metadata{columns}) VALUES {} \
         ON DUPLICATE KEY UPDATE expires_at = IF(owner = VALUES(owner), GREATEST(expires_at, VALUES(expires_at)), VALUES(expires_at)), \
         owner = VALUES(owner), fence = VALUES(fence), \
         queued = VALUES(queued), host = COALESCE(VALUES(host), host), pid = COALESCE(VALUES(pid), pid), \
         metadata = IF(VALUES(since) IS NULL, metadata, VALUES(metadata)), since = COALESCE(VALUES(since), since)",
        list(values)
    ));
}

/// Ends a transaction that failed.
pub(super) async fn roll_back(session: &mut MysqlSession) -> Outcome<()> {
    let mut packet = Packet::default();
    packet.add("ROLLBACK");
    restore_settings(&mut packet, session);
    session.run(packet, &mut Vec::new()).await
}
