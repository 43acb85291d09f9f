//! The single statements, one for each kind of call.
//!
//! `updates.rs` has the releases and renewals. Attempts and releases are prepared, because the server takes longer to parse them than to execute
//! them. On MariaDB an attempt returns the rows. On MySQL the insert id answers an attempt for one name. Several attempts are text there,
//! with a `SELECT`. So are all attempts on a server that cannot prepare statements.

use sqlx::mysql::MySqlArguments;

use super::packet::{Bytes, CLOCK, NOW, Nullable, Packet, Row, list, rows};
use super::prepared::{add, padded, prepared_size};
use super::session::{MysqlSession, Statement};
use super::tables::Tables;
use super::transaction::share;
use crate::engine::sql::server::Outcome;
use crate::engine::sql::server::single_calls::{Attempt, Granted, PageRead, micros};
use crate::engine::sql::{Lease, Page};

/// The columns that [`granted`] reads. The remaining time of the lease follows them.
const ATTEMPT_COLUMNS: &str = "name, owner, fence, queued";

/// The fencing token after an attempt. `{free}` is the condition on which the attempt grants the name.
const FENCE: &str = "IF({free}, GREATEST(fence + 1, VALUES(fence)), fence)";
/// [`FENCE`], with the fencing token of the grant, or 0, as the insert id.
const FENCE_AS_ID: &str = "IF({free}, LAST_INSERT_ID(GREATEST(fence + 1, VALUES(fence))), \
                           fence + 0 * LAST_INSERT_ID(IF(owner = VALUES(owner) AND queued = 0, fence, 0)))";
/// The smallest insert id that counts as a fencing token: the clock of the year 2001. The values of an `AUTO_INCREMENT` column are smaller.
const LEAST_FENCE: u64 = 1_000_000_000_000_000;

/// Grants names without a queue that are free, and names that the same owner holds already.
pub(super) async fn attempt(session: &mut MysqlSession, attempts: &[Attempt]) -> Outcome<Granted> {
    // The rows are locked in this order.
    let mut sorted: Vec<_> = attempts.iter().collect();
    sorted.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
    let mut is_made = false;
    if session.prepares && session.is_mariadb {
        let size = prepared_size(sorted.len());
        let text = |tables: &Tables| {
            let values = format!("(?, ?, {NOW}, since, since + ?, ?, ?, ?)");
            let text = attempt_statement(tables, &list(std::iter::repeat_n(values, size)), FENCE);
            format!("{text} RETURNING {ATTEMPT_COLUMNS}, expires_at - {NOW}")
        };
        let arguments = arguments_of(padded(&sorted).copied());
        let prepared = session.run_prepared(Statement::Attempt(size), text, arguments);
        if let Some(answer) = prepared.await? {
            return Ok(granted(&answer.rows, &sorted));
        }
    } else if session.prepares
        && let [attempt @ (name, claim)] = sorted[..]
    {
        let text = |tables: &Tables| {
            let values = format!("(?, ?, LAST_INSERT_ID({NOW}), since, since + ?, ?, ?, ?)");
            attempt_statement(tables, &values, FENCE_AS_ID)
        };
        let prepared = session.run_prepared(Statement::AttemptOne, text, arguments_of([attempt]));
        if let Some(answer) = prepared.await? {
            let mut granted = Granted::default();
            if answer.insert_id >= LEAST_FENCE {
                granted.fences.insert(name.clone(), answer.insert_id.cast_signed());
            }
            // A waiter continues with a transaction, and needs no answer here.
            if answer.insert_id >= LEAST_FENCE || claim.waiting {
                return Ok(granted);
            }
            is_made = true;
        }
    }
    let locks = &session.server.tables.locks;
    let mut packet = Packet::default();
    packet.add(CLOCK);
    if !is_made {
        let values = sorted.iter().map(|(name, claim)| {
            format!(
                "({}, {}, @u, @u, @u + {}, {}, {}, {})",
                Bytes(name),
                Bytes(claim.owner.as_str()),
                claim.ttl.duration().as_micros(),
                Bytes(&claim.process.host),
                claim.process.pid,
                Nullable(claim.metadata.as_deref().map(Bytes)),
            )
        });
        packet.add(attempt_statement(&session.server.tables, &list(values), FENCE));
    }
    let after = packet.add(format_args!(
        "SELECT {ATTEMPT_COLUMNS}, expires_at - @u FROM {locks} WHERE name IN ({})",
        list(sorted.iter().map(|(name, _)| Bytes(name)))
    ));
    let mut answers = Vec::new();
    session.run_within_limit(packet, &mut answers).await?;
    Ok(granted(rows(&answers, after), &sorted))
}

/// Returns the values of the statement of attempts.
fn arguments_of<'a>(attempts: impl IntoIterator<Item = &'a Attempt>) -> MySqlArguments {
    let mut arguments = MySqlArguments::default();
    for (name, claim) in attempts {
        add(&mut arguments, &name[..]);
        add(&mut arguments, claim.owner.as_str().as_bytes());
        add(&mut arguments, claim.ttl.duration().as_micros() as i64);
        add(&mut arguments, claim.process.host.as_bytes());
        add(&mut arguments, i64::from(claim.process.pid));
        add(&mut arguments, claim.metadata.as_deref().map(str::as_bytes));
    }
    arguments
}

/// Returns the statement that makes attempts. Its values have the clock as `since`.
fn attempt_statement(tables: &Tables, values: &str, fence: &str) -> String {
    let locks = &tables.locks;
    // Assigned from left to right: the condition does not depend on the columns that are assigned before it.
    let free = "queued = 0 AND expires_at <= VALUES(since)";
    let fence = fence.replace("{free}", free);
    format!(
        "INSERT INTO {locks} (name, owner, since, fence, expires_at, host, pid, metadata) VALUES {values} \
         ON DUPLICATE KEY UPDATE fence = {fence}, since = IF({free}, VALUES(since), since), \
         host = IF({free}, VALUES(host), host), pid = IF({free}, VALUES(pid), pid), \
         metadata = IF({free}, VALUES(metadata), metadata), owner = IF({free}, VALUES(owner), owner), \
         expires_at = IF(owner = VALUES(owner) AND queued = 0, GREATEST(expires_at, VALUES(expires_at)), expires_at)"
    )
}

/// Returns the answers to attempts, which are sorted by name.
fn granted(attempt_rows: &[Row], attempts: &[&Attempt]) -> Granted {
    let mut granted = Granted::default();
    for row in attempt_rows {
        let (Some(name), Some(owner)) = (row.bytes(0), row.text(1)) else {
            continue;
        };
        let (Some(fence), Some(remaining_us)) = (row.number(2), row.number(4)) else {
            continue;
        };
        let Ok(index) = attempts.binary_search_by(|(of_attempt, _)| of_attempt.as_slice().cmp(name)) else {
            continue;
        };
        let claim = &attempts[index].1;
        // A lease that is shorter was not granted by this statement: a waiter has entered the queue and left it.
        let is_whole = i128::from(remaining_us) >= claim.ttl.duration().as_micros() as i128;
        if owner != claim.owner.as_str() {
            if remaining_us > 0 {
                granted.held.insert(name.to_vec(), (owner, micros(remaining_us)));
            }
        } else if !row.is_true(3) && is_whole {
            granted.fences.insert(name.to_vec(), fence);
        }
    }
    granted
}

/// Reads pages of leases, each sorted by name. A reserved name has no holder.
pub(super) async fn read(session: &mut MysqlSession, pages: &[Page]) -> Outcome<Vec<PageRead>> {
    let mut packet = Packet::default();
    // A proxy sends a packet that begins with a SELECT to a replica.
    packet.add(CLOCK);
    let read_only = packet.add("SELECT @@GLOBAL.read_only");
    let Tables { locks, waiters, .. } = &session.server.tables;
    let is_held = "l.owner NOT LIKE '%-next' AND l.expires_at > @u";
    // The queue of a share is that of its name, which lacks a byte and the owner token.
    let queue = "IF(l.permits IS NULL, l.name, SUBSTRING(l.name, 1, LENGTH(l.name) - 33))";
    let mut indexes = Vec::new();
    for page in pages {
        indexes.push(packet.add(format_args!(
            "SELECT l.name, IF({is_held}, l.expires_at - @u, NULL), l.fence, l.host, l.pid, l.since DIV 1000, l.metadata, \
             IF({is_held}, (SELECT COUNT(*) FROM {waiters} AS w WHERE w.name = {queue} AND w.alive_until > @u), 0), l.permits, l.permit_limit \
             FROM {locks} AS l WHERE l.name >= {} AND l.name < {} ORDER BY l.name LIMIT {}",
            Bytes(&page.start),
            Bytes(&page.end),
            Page::SIZE,
        )));
    }
    let mut answers = Vec::new();
    session.run_within_limit(packet, &mut answers).await?;
    session.check_writable(&answers, read_only)?;
    let lease = |row: &Row| {
        Some(Lease {
            name: row.bytes(0)?.to_vec(),
            remaining: micros(row.number(1)?),
            fence: row.number(2)?,
            host: row.text(3),
            pid: row.number(4),
            since_ms: row.number(5),
            metadata: row.text(6),
            waiting: row.number(7)?,
            share: share(row, 8),
        })
    };
    let read = |(index, page): (usize, &Page)| {
        let rows = rows(&answers, index);
        PageRead {
            leases: rows.iter().filter_map(lease).collect(),
            next: page.next(rows.last().and_then(|last| last.bytes(0)), rows.len()),
        }
    };
    Ok(indexes.into_iter().zip(pages).map(read).collect())
}
