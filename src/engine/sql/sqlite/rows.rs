//! The rows that scripts return.

use std::time::Duration;

use sqlx::Row;
use sqlx::sqlite::SqliteRow;

use super::statements::Answers;
use crate::engine::core::ledger::decide::{HeldLease, NameState, Snapshot};
use crate::engine::core::ledger::stored_share;
use crate::engine::sql::Lease;
use crate::engine::sql::udp_wakeup::Address;
use crate::model::{MAX_PERMITS, Share, Sums};

/// Returns the rows of one statement of a script.
pub(super) fn rows(answers: &Answers, statement: usize) -> &[SqliteRow] {
    answers.get(statement).map_or(&[], |answer| answer.rows.as_slice())
}

/// Returns the store's clock, in milliseconds, and the snapshot for an attempt.
pub(super) fn snapshot(rows: &[SqliteRow]) -> sqlx::Result<(i64, Snapshot)> {
    // Without rows, the row of the last fencing token was deleted.
    let first = rows.first().ok_or(sqlx::Error::RowNotFound)?;
    let now: i64 = first.try_get(0)?;
    let until = |row: &SqliteRow, column: usize| -> sqlx::Result<Option<Duration>> {
        let at = row.try_get::<Option<i64>, _>(column)?;
        Ok(at.map(|at| millis(at - now)))
    };
    let names = rows.iter().map(|row| {
        let lease = match row.try_get::<Option<bool>, _>(2)? {
            Some(is_own) => Some(HeldLease {
                is_own,
                remaining: until(row, 3)?.unwrap_or_default(),
                fence: row.try_get::<i64, _>(4)? as u64,
            }),
            None => None,
        };
        Ok(NameState {
            lease,
            first_ahead: until(row, 5)?,
            last_ahead: until(row, 6)?,
        })
    });
    let snapshot = Snapshot {
        now_micros: now.max(0).unsigned_abs() * 1000,
        last_fence: first.try_get::<i64, _>(1)? as u64,
        names: names.collect::<sqlx::Result<_>>()?,
    };
    Ok((now, snapshot))
}

/// Completes the state of a name for an attempt to get a share of it. Returns the next waiter if it fits, too, after a grant.
pub(super) fn apply_share(
    share: Share,
    row: &SqliteRow,
    now: i64,
    name: &mut NameState,
) -> sqlx::Result<Option<Address>> {
    let used = row.try_get::<i64, _>(7)?.unsigned_abs();
    let least: Option<u32> = row.try_get(8)?;
    let others = Sums {
        used,
        least: least.unwrap_or(MAX_PERMITS),
    };
    let with_own = others.with(share);
    if name.lease.is_none() && !with_own.is_within_limits() {
        name.lease = Some(HeldLease {
            is_own: false,
            remaining: millis(row.try_get::<i64, _>(9)? - now),
            fence: 0,
        });
    }
    let next = stored_share(row.try_get::<Option<i64>, _>(12)?, row.try_get(13)?);
    let next = next.filter(|next| with_own.with(*next).is_within_limits());
    Ok(address(row, 10)?.filter(|_| next.is_some()))
}

pub(super) fn lease(row: &SqliteRow) -> sqlx::Result<Lease> {
    Ok(Lease {
        name: row.try_get(0)?,
        remaining: millis(row.try_get(1)?),
        fence: row.try_get(2)?,
        host: row.try_get(3)?,
        pid: row.try_get(4)?,
        since_ms: row.try_get(5)?,
        metadata: row.try_get(6)?,
        waiting: row.try_get(7)?,
        share: stored_share(row.try_get::<Option<i64>, _>(8)?, row.try_get(9)?),
    })
}

/// Returns a span of milliseconds, zero when it is negative.
pub(super) fn millis(span: i64) -> Duration {
    Duration::from_millis(span.max(0).unsigned_abs())
}

/// Adds the addresses that the first statement of a script returned.
pub(super) fn read_addresses(answers: &Answers, to_wake: &mut Vec<Address>) -> sqlx::Result<()> {
    for row in rows(answers, 0) {
        to_wake.extend(address(row, 0)?);
    }
    Ok(())
}

/// Reads an address: the port, and the number from the next column.
pub(super) fn address(row: &SqliteRow, column: usize) -> sqlx::Result<Option<Address>> {
    let id: Option<i64> = row.try_get(column + 1)?;
    let port: Option<i64> = row.try_get(column)?;
    let port = port.and_then(|port| u16::try_from(port).ok());
    Ok(id.map(|id| Address { port, id: id as u64 }))
}
