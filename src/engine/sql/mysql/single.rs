//! The single statements: each kind of call is one, and all kinds of a batch are one packet.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::packet::{Answer, CLOCK, Hex, Nullable, Packet, joined, list, rows};
use super::session::MysqlSession;
use super::tables::Tables;
use crate::engine::sql::Page;
use crate::engine::sql::ledger::StoredName;
use crate::engine::sql::server::Outcome;
use crate::engine::sql::server::single_calls::{Answers, Freed, Granted, Lease, SingleCalls, micros};
use crate::model::{Claim, OwnerToken, Ttl};

/// The indexes of the answers to one kind of call: the last one says that all were executed.
#[derive(Clone, Copy, Default)]
struct Part {
    before: usize,
    after: usize,
}

/// Executes calls within the store timeout.
pub(super) async fn execute(session: &mut MysqlSession, calls: &SingleCalls) -> Answers {
    let mut packet = Packet::default();
    packet.add(CLOCK);
    let tables = &session.server.tables;
    let releases = add_releases(&mut packet, tables, &calls.releases);
    let renewals = add_renewals(&mut packet, tables, &calls.renewals);
    let attempts = add_attempts(&mut packet, tables, &calls.attempts);
    let connection = session.connection.clone();
    let mut answers = Vec::new();
    let mut executed = Ok(());
    if calls.releases.len() + calls.renewals.len() + calls.attempts.len() > 0 {
        executed = connection.within_limit(session.run(packet, &mut answers)).await;
    }
    // The kinds before a statement that failed were executed.
    let of = |part: Part| match &executed {
        Err(failure) if part.after >= answers.len() => Err(failure.clone()),
        _ => Ok(()),
    };
    let released = of(releases).map(|()| released(&answers, releases));
    let renewed = of(renewals).map(|()| renewed(&answers, renewals, &calls.renewals));
    let granted = of(attempts).map(|()| granted(&answers, attempts, &calls.attempts));
    let read = match executed.is_err() {
        true => executed.map(|()| Vec::new()),
        false => connection.within_limit(read(session, &calls.reads)).await,
    };
    Answers {
        released,
        renewed,
        granted,
        read,
    }
}

/// Adds the statements that release names without a queue.
fn add_releases(packet: &mut Packet, tables: &Tables, releases: &[(StoredName, OwnerToken)]) -> Part {
    if releases.is_empty() {
        return Part::default();
    }
    let locks = &tables.locks;
    let names = list(releases.iter().map(|(name, _)| Hex(name)));
    let owners = list(releases.iter().map(|(_, owner)| Hex(owner.as_str())));
    let held = format!("name IN ({names}) AND owner IN ({owners})");
    // Also those with a queue: it may end while the update waits for the row.
    let before = packet.add(format_args!(
        "SELECT name, owner, expires_at > @u FROM {locks} WHERE {held}"
    ));
    packet.add(format_args!(
        "UPDATE {locks} FORCE INDEX (PRIMARY) SET owner = NULL, expires_at = 0, since = @u, metadata = NULL \
         WHERE {held} AND queued = 0"
    ));
    // A waiter may have entered the queue since the first statement.
    let after = packet.add(format_args!("SELECT name FROM {locks} WHERE {held}"));
    Part { before, after }
}

fn released(answers: &[Answer], part: Part) -> HashMap<StoredName, Freed> {
    let mut released = HashMap::new();
    if part.after > 0 {
        for row in rows(answers, part.before) {
            let name = row.bytes(0).unwrap_or_default().to_vec();
            released.insert(name, Freed::without_queue(row.is_true(2)));
        }
        for row in rows(answers, part.after) {
            released.remove(row.bytes(0).unwrap_or_default());
        }
    }
    released
}

/// Adds the statements that extend leases of one name each, and never shorten one.
fn add_renewals(packet: &mut Packet, tables: &Tables, renewals: &[(StoredName, OwnerToken, Ttl)]) -> Part {
    if renewals.is_empty() {
        return Part::default();
    }
    let locks = &tables.locks;
    let names = list(renewals.iter().map(|(name, ..)| Hex(name)));
    let owners = list(renewals.iter().map(|(_, owner, _)| Hex(owner.as_str())));
    let held = format!("name IN ({names}) AND owner IN ({owners})");
    let ttls = renewals
        .iter()
        .map(|(_, owner, ttl)| format!("WHEN {} THEN {}", Hex(owner.as_str()), ttl.duration().as_micros()));
    let before = packet.add(format_args!(
        "UPDATE {locks} FORCE INDEX (PRIMARY) SET expires_at = GREATEST(expires_at, @u + CASE owner {} END) \
         WHERE {held} AND expires_at > @u",
        joined(" ", ttls)
    ));
    let after = packet.add(format_args!("SELECT owner, expires_at - @u FROM {locks} WHERE {held}"));
    Part { before, after }
}

fn renewed(answers: &[Answer], part: Part, renewals: &[(StoredName, OwnerToken, Ttl)]) -> HashSet<String> {
    if part.after == 0 {
        return HashSet::new();
    }
    let left: HashMap<String, i64> = rows(answers, part.after)
        .iter()
        .filter_map(|row| Some((row.text(0)?, row.number(1)?)))
        .collect();
    let is_extended = |(_, owner, ttl): &&(StoredName, OwnerToken, Ttl)| {
        let left = left.get(owner.as_str());
        left.is_some_and(|left| i128::from(*left) >= ttl.duration().as_micros() as i128)
    };
    let extended = renewals.iter().filter(is_extended);
    extended.map(|(_, owner, _)| owner.as_str().to_owned()).collect()
}

/// Adds the statements that grant names without a queue that are free, and names that the same owner holds already.
fn add_attempts(packet: &mut Packet, tables: &Tables, attempts: &[(StoredName, Arc<Claim>)]) -> Part {
    if attempts.is_empty() {
        return Part::default();
    }
    let locks = &tables.locks;
    let mut sorted: Vec<_> = attempts.iter().collect();
    sorted.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
    let grants = sorted.iter().map(|(name, claim)| {
        format!(
            "({}, {}, @u, @u + {}, @u, {}, {}, {})",
            Hex(name),
            Hex(claim.owner.as_str()),
            claim.ttl.duration().as_micros(),
            Hex(&claim.process.host),
            claim.process.pid,
            Nullable(claim.metadata.as_deref().map(Hex)),
        )
    });
    // Assigned from left to right: the condition does not depend on the columns that are assigned before it.
    let free = "queued = 0 AND expires_at <= @u";
    let before = packet.add(format_args!(
        "INSERT INTO {locks} (name, owner, fence, expires_at, since, host, pid, metadata) VALUES {} \
         ON DUPLICATE KEY UPDATE fence = IF({free}, GREATEST(fence + 1, VALUES(fence)), fence), \
         since = IF({free}, VALUES(since), since), host = IF({free}, VALUES(host), host), \
         pid = IF({free}, VALUES(pid), pid), metadata = IF({free}, VALUES(metadata), metadata), \
         owner = IF({free}, VALUES(owner), owner), \
         expires_at = IF(owner = VALUES(owner) AND queued = 0, GREATEST(expires_at, VALUES(expires_at)), expires_at)",
        list(grants)
    ));
    let after = packet.add(format_args!(
        "SELECT name, owner, fence, expires_at - @u, queued FROM {locks} WHERE name IN ({}) AND owner IS NOT NULL",
        list(attempts.iter().map(|(name, _)| Hex(name)))
    ));
    Part { before, after }
}

fn granted(answers: &[Answer], part: Part, attempts: &[(StoredName, Arc<Claim>)]) -> Granted {
    let mut granted = Granted::default();
    if part.after == 0 {
        return granted;
    }
    for row in rows(answers, part.after) {
        let (Some(name), Some(owner), Some(left)) = (row.bytes(0), row.text(1), row.number(3)) else {
            continue;
        };
        let Some((_, claim)) = attempts.iter().find(|(one, _)| one == name) else {
            continue;
        };
        // A lease that is shorter was not granted by this statement: a waiter has entered the queue and left it.
        let is_whole = i128::from(left) >= claim.ttl.duration().as_micros() as i128;
        if owner != claim.owner.as_str() {
            if left > 0 {
                granted.held.insert(name.to_vec(), (owner, micros(left)));
            }
        } else if !row.is_true(4)
            && is_whole
            && let Some(fence) = row.number(2)
        {
            granted.fences.insert(name.to_vec(), fence);
        }
    }
    granted
}

/// Reads pages of leases, each sorted by name. A reserved name has no holder.
async fn read(session: &mut MysqlSession, pages: &[Page]) -> Outcome<Vec<Vec<Lease>>> {
    let mut packet = Packet::default();
    if pages.is_empty() {
        return Ok(Vec::new());
    }
    packet.add(CLOCK);
    let read_only = packet.add("SELECT @@GLOBAL.read_only");
    let Tables { locks, waiters, .. } = &session.server.tables;
    let mut indexes = Vec::new();
    for page in pages {
        let end = page.end.as_ref().map(|end| format!("AND l.name < {}", Hex(end)));
        indexes.push(packet.add(format_args!(
            "SELECT l.name, l.expires_at - @u, l.fence, l.host, l.pid, l.since DIV 1000, l.metadata, \
             (SELECT COUNT(*) FROM {waiters} AS w WHERE w.name = l.name AND w.alive_until > @u) \
             FROM {locks} AS l WHERE l.name >= {} {} AND l.owner IS NOT NULL AND l.owner NOT LIKE '%-next' AND l.expires_at > @u \
             ORDER BY l.name LIMIT {}",
            Hex(&page.start),
            end.unwrap_or_default(),
            Page::SIZE,
        )));
    }
    let mut answers = Vec::new();
    session.run(packet, &mut answers).await?;
    session.check_writable(&answers, read_only)?;
    let lease = |row: &super::packet::Row| {
        Some(Lease {
            name: row.bytes(0)?.to_vec(),
            remaining: micros(row.number(1)?),
            fence: row.number(2)?,
            host: row.text(3),
            pid: row.number(4),
            since_ms: row.number(5),
            metadata: row.text(6),
            waiting: row.number(7)?,
        })
    };
    let leases = |index: &usize| rows(&answers, *index).iter().map(lease).collect();
    let read: Option<Vec<Vec<Lease>>> = indexes.iter().map(leases).collect();
    read.ok_or_else(|| session.unexpected())
}
