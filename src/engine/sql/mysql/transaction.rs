//! What a transaction reads and writes: two packets. The first one locks the rows of all names in their order, and reads them and
//! their queues. The second one writes the result.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use super::packet::{Answer, Bytes, CLOCK, NO_WAIT, Nullable, Packet, Row, joined, list, rows};
use super::session::{Begun, MysqlSession};
use super::tables::Tables;
use crate::engine::core::ledger::{self, Changes, Ledger, Position, StoredName, Waiter};
use crate::engine::sql::server::Outcome;
use crate::engine::sql::server::transaction::Plan;
use crate::engine::sql::server::upkeep::EXPIRED_POSITION_KEPT_MS;
use crate::model::Process;

/// How long the server waits for the next statement of a transaction, in seconds. After that it closes the connection of a stopped process,
/// which ends its row locks.
const TRANSACTION_IDLE_TIMEOUT_S: u64 = 2;

/// How many queries one statement combines.
pub(super) const UNION: usize = 32;

/// Begins a transaction, locks the rows of the plan, and reads them and their queues.
pub(super) async fn read(session: &mut MysqlSession, process: &str, plan: &Plan) -> Outcome<Ledger> {
    // An insert would wait for a row that another transaction has locked.
    let existing = match plan.skips_locked {
        true => existing(session, plan).await?,
        false => HashSet::new(),
    };
    let mut packet = Packet::default();
    let Tables { locks, waiters, .. } = &session.server.tables;
    let all = list(plan.names.keys().map(Bytes));
    begin(&mut packet);
    if plan.skips_locked {
        let missing = plan.names.keys().filter(|name| !existing.contains(*name));
        create(&mut packet, locks, missing, session.is_mariadb);
    } else {
        lock(&mut packet, locks, plan, session.is_mariadb);
    }
    packet.add(CLOCK);
    let clock = packet.add("SELECT @u");
    // A row that was not created, and did not exist when the rows were locked, may exist now. Without `lock`, this locks the rows.
    let locked = packet.add(format_args!(
        "SELECT name, owner, expires_at, fence, queued FROM {locks} FORCE INDEX (PRIMARY) WHERE name IN ({all}) FOR UPDATE SKIP LOCKED"
    ));
    let columns = "ticket, name, owner, alive_until, process, hold_ms, host, pid";
    let front = |name| {
        format!(
            "(SELECT {columns} FROM {waiters} WHERE name = {} AND alive_until > @u ORDER BY ticket LIMIT {})",
            Bytes(name),
            plan.front()
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
    ledger_of(session, process, plan, &answers, clock, locked, &queues).ok_or_else(|| session.unexpected())
}

/// Adds the statements that begin a transaction.
pub(super) fn begin(packet: &mut Packet) {
    packet.add(format_args!("SET SESSION wait_timeout = {TRANSACTION_IDLE_TIMEOUT_S}"));
    packet.add("START TRANSACTION");
}

/// Adds the statement that restores the setting which [`begin`] has changed.
fn restore_setting(packet: &mut Packet, session: &MysqlSession) {
    packet.add(format_args!("SET SESSION wait_timeout = {}", session.wait_timeout_s));
}

/// Adds the statements that lock the rows of names in their order, and create missing ones.
///
/// The insert locks a row that exists. A lock of the existing rows after the insert of all missing ones would not lock in order,
/// and could deadlock.
fn lock(packet: &mut Packet, locks: &str, plan: &Plan, is_mariadb: bool) {
    let names: Vec<(&StoredName, &bool)> = plan.names.iter().collect();
    for run in names.chunk_by(|(_, before), (_, next)| before == next) {
        if *run[0].1 {
            create(packet, locks, run.iter().map(|(name, _)| *name), false);
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

/// Adds the statement that creates rows of names. It locks a row that exists. `fails`: at a locked row, instead of a wait.
fn create<'a>(packet: &mut Packet, locks: &str, names: impl Iterator<Item = &'a StoredName>, fails: bool) {
    let rows = list(names.map(|name| format!("({}, 0, 0, 0)", Bytes(name))));
    if rows.is_empty() {
        return;
    }
    let no_wait = if fails { NO_WAIT } else { "" };
    packet.add(format_args!(
        "{no_wait}INSERT INTO {locks} (name, fence, expires_at, since) VALUES {rows} ON DUPLICATE KEY UPDATE fence = fence"
    ));
}

/// Returns which names of a plan have a row. Waits for no lock.
async fn existing(session: &mut MysqlSession, plan: &Plan) -> Outcome<HashSet<StoredName>> {
    let mut packet = Packet::default();
    // A proxy sends a packet that begins with a SELECT to a replica.
    packet.add(CLOCK);
    let names = list(plan.names.keys().map(Bytes));
    let locks = &session.server.tables.locks;
    let existing = packet.add(format_args!("SELECT name FROM {locks} WHERE name IN ({names})"));
    let mut answers = Vec::new();
    session.run(packet, &mut answers).await?;
    let existing = rows(&answers, existing).iter().filter_map(|row| row.bytes(0));
    Ok(existing.map(<[u8]>::to_vec).collect())
}

/// Returns the ledger of what was read. `None`: a row lacks a value, or is missing.
fn ledger_of(
    session: &mut MysqlSession,
    process: &str,
    plan: &Plan,
    answers: &[Answer],
    clock: usize,
    locked: usize,
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
        if known < plan.front() && row.number(4)? > known as i64 {
            with_expired.push(name.clone());
        }
        found.insert(name, ledger::Row::read(row.text(1), row.number(2)?, row.number(3)?));
    }
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
    let entered = enter(&mut packet, waiters, process, &begun, &changes.entered);
    if !changes.rows.is_empty() {
        update(&mut packet, locks, waiters, changes);
    }
    let commit = packet.add("COMMIT");
    restore_setting(&mut packet, session);
    let mut answers = Vec::new();
    if let Err(failure) = session.run(packet, &mut answers).await {
        let is_committed = answers.len() > commit;
        return Err(if is_committed { failure.after_commit() } else { failure });
    }
    let tickets = entered.map(|index| rows(&answers, index)).unwrap_or_default();
    let ticket = |row: &Row| Some((row.text(0)?, row.number(1)?.unsigned_abs()));
    Ok(tickets.iter().filter_map(ticket).collect())
}

/// Adds the statements that enter queues, keep positions there alive, or move them from another name with their ticket. Returns the
/// index of the answer with the tickets.
fn enter(packet: &mut Packet, waiters: &str, process: &str, begun: &Begun, entered: &[Position]) -> Option<usize> {
    if entered.is_empty() {
        return None;
    }
    let ticket = |position: &Position| {
        let ticket = begun.tickets.get(&position.owner).copied();
        ticket.or(position.kept_ticket())
    };
    let values = |position: &Position| {
        let holder = position.waiter.holder.as_deref();
        format!(
            "({}, {}, {}, {}, {}, {}, {}, {})",
            Nullable(ticket(position)),
            Bytes(&position.owner),
            Bytes(&position.name),
            position.alive_until_us,
            position.waiter.hold_ms,
            Nullable(holder.map(|holder| Bytes(&holder.host))),
            Nullable(holder.map(|holder| holder.pid)),
            Bytes(process)
        )
    };
    // Another waiter has the ticket of one only if the tables are new.
    let written = ["name", "alive_until", "hold_ms", "host", "pid", "process"];
    let written =
        list(written.map(|column| format!("{column} = IF(owner = VALUES(owner), VALUES({column}), {column})")));
    let with_ticket = format!("ON DUPLICATE KEY UPDATE {written}");
    // Those with a ticket first: their tickets are smaller.
    for (has_ticket, when_taken) in [(true, &*with_ticket), (false, "")] {
        let positions = entered
            .iter()
            .filter(|position| ticket(position).is_some() == has_ticket);
        let values = list(positions.map(values));
        if !values.is_empty() {
            packet.add(format_args!(
                "INSERT INTO {waiters} (ticket, owner, name, alive_until, hold_ms, host, pid, process) VALUES {values} {when_taken}"
            ));
        }
    }
    let owners = list(entered.iter().map(|position| Bytes(&position.owner)));
    Some(packet.add(format_args!(
        "SELECT owner, ticket FROM {waiters} WHERE owner IN ({owners})"
    )))
}

/// Adds the statement that writes the rows of names, and counts their positions again. The statements before it have changed the
/// positions.
fn update(packet: &mut Packet, locks: &str, waiters: &str, changes: &Changes) {
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
    let values = changes.rows.iter().map(|(name, row)| {
        // Without `since`, the metadata is kept.
        let is_new = row.granted_us.is_some() || row.owner.is_none();
        let holder = row.holder.as_deref();
        format!(
            "({name}, {}, {}, {}, (SELECT COUNT(*) FROM {waiters} WHERE name = {name}), {}, {}, {}, {})",
            Nullable(row.owner.as_ref().map(Bytes)),
            row.fence,
            row.expires_us,
            if is_new { "@u" } else { "NULL" },
            Nullable(holder.map(|process| Bytes(&process.host))),
            Nullable(holder.map(|process| process.pid)),
            Nullable(row.metadata.as_deref().and_then(variable)),
            name = Bytes(name),
        )
    });
    packet.add(format_args!(
        "INSERT INTO {locks} (name, owner, fence, expires_at, queued, since, host, pid, metadata) VALUES {} \
         ON DUPLICATE KEY UPDATE owner = VALUES(owner), fence = VALUES(fence), expires_at = VALUES(expires_at), \
         queued = VALUES(queued), host = COALESCE(VALUES(host), host), pid = COALESCE(VALUES(pid), pid), \
         metadata = IF(VALUES(since) IS NULL, metadata, VALUES(metadata)), since = COALESCE(VALUES(since), since)",
        list(values)
    ));
}

/// Ends a transaction that failed.
pub(super) async fn roll_back(session: &mut MysqlSession) -> Outcome<()> {
    let mut packet = Packet::default();
    packet.add("ROLLBACK");
    restore_setting(&mut packet, session);
    session.run(packet, &mut Vec::new()).await
}
