//! What a transaction reads and writes: two packets. The first one locks the rows of all names in their order, and reads them and
//! their queues. The second one writes the result.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use tokio_postgres::Row;

use super::listener::text_of;
use super::session::{PostgresSession, Values};
use super::single::storable;
use super::statements::Sql;
use crate::engine::core::ledger::{
    self, Changes, Ledger, Notification, Position, StoredName, Waiter, is_share, stored_share,
};
use crate::engine::sql::failure::Failure;
use crate::engine::sql::server::Outcome;
use crate::engine::sql::server::transaction::Plan;
use crate::engine::sql::server::upkeep::EXPIRED_POSITION_KEPT_MS;
use crate::model::{Process, Share};

/// Begins a transaction, locks the rows of the plan, and reads them and their queues.
pub(super) async fn read(session: &PostgresSession, process: &str, plan: &Plan) -> Outcome<Ledger> {
    let names: Vec<&[u8]> = plan.names.keys().map(Vec::as_slice).collect();
    let created: Vec<bool> = plan.names.values().copied().collect();
    let fronts: Vec<i64> = plan.names.keys().map(|name| plan.front(name) as i64).collect();
    let (first, last): (Vec<StoredName>, Vec<StoredName>) = plan.shares().unzip();
    let of_shares = async |statement| match first.is_empty() {
        true => Ok(Vec::new()),
        false => session.query(statement, &[&first, &last]).await,
    };
    let statements = async {
        tokio::join!(
            biased;
            session.execute(session.statements().begin(plan.is_brief)),
            async { session.query(Sql::Lock, &[&names, &created]).await },
            async { session.query(Sql::Rows, &[&names]).await },
            // After the clock was read: what is left is live at that time.
            of_shares(Sql::Expired),
            of_shares(Sql::Shares),
            async { session.query(Sql::Queue, &[&names, &plan.owners, &fronts]).await },
        )
    };
    let (begun, locked, rows, expired, shares, queue) = session.in_one_packet(statements).await;
    begun?;
    locked?;
    let rows = rows?;
    expired?;
    let (shares, queue) = (shares?, queue?);
    let first = rows
        .first()
        .ok_or_else(|| Failure::unexpected(&session.connections().place, "no clock"))?;
    let now_us: i64 = session.get(first, 0)?;
    let mut found = BTreeMap::new();
    for row in &rows {
        if let Some(name) = session.get::<Option<StoredName>>(row, 1)? {
            let row = ledger::Row::read(session.get(row, 2)?, session.get(row, 3)?, session.get(row, 4)?, None);
            found.insert(name, row);
        }
    }
    for row in &shares {
        // What the deletion has left is live, also if the clock was set back since it was read.
        let (end, fence, share) = (
            session.get::<i64>(row, 2)?.max(now_us + 1),
            session.get(row, 3)?,
            stored_share(session.get::<Option<i32>>(row, 4)?, session.get(row, 5)?),
        );
        found.insert(
            session.get(row, 0)?,
            ledger::Row::read(session.get(row, 1)?, end, fence, share),
        );
    }
    if plan.lacks_row(&found) {
        return Err(Failure::unexpected(&session.connections().place, "no row of a name"));
    }
    let positions: Outcome<Vec<Position>> = queue.iter().map(|row| position(session, row, process)).collect();
    Ok(Ledger::new(now_us, found, positions?))
}

/// Reads a position in a queue.
fn position(session: &PostgresSession, row: &Row, process: &str) -> Outcome<Position> {
    let engine: String = session.get(row, 4)?;
    let host: Option<String> = session.get(row, 6)?;
    let pid: Option<i64> = session.get(row, 7)?;
    let waiter = Waiter {
        engine: (engine != process).then_some(engine),
        hold_ms: session.get(row, 5)?,
        holder: host
            .zip(pid)
            .map(|(host, pid)| Arc::new(Process { host, pid: pid as u32 })),
        share: stored_share(session.get::<Option<i32>>(row, 8)?, session.get(row, 9)?),
    };
    let (ticket, name, owner) = (session.get(row, 0)?, session.get(row, 1)?, session.get(row, 2)?);
    Ok(Position::read(ticket, name, owner, session.get(row, 3)?, waiter))
}

/// Writes the changes of a transaction, and commits it. Returns the tickets of the positions.
pub(super) async fn write(
    session: &PostgresSession,
    process: &str,
    changes: &Changes,
) -> Outcome<HashMap<String, u64>> {
    let (shares, rows): (Vec<&Written>, Vec<&Written>) = changes.rows.iter().partition(|(name, _)| is_share(name));
    let names: Vec<&[u8]> = rows.iter().map(|(name, _)| name.as_slice()).collect();
    let left = &changes.left;
    let leave = async {
        match left.is_empty() && names.is_empty() {
            true => Ok(Vec::new()),
            false => {
                session
                    .query(Sql::Leave, &[left, &names, &EXPIRED_POSITION_KEPT_MS])
                    .await
            }
        }
    };
    let notify = async {
        // This process needs no message.
        let of_others = |notification: &Notification| Some((notification.engine.clone()?, text_of(notification)));
        let (channels, texts): (Vec<String>, Vec<String>) = changes.notifications.iter().filter_map(of_others).unzip();
        match channels.is_empty() {
            true => Ok(Vec::new()),
            false => session.query(Sql::Notify, &[&channels, &texts]).await,
        }
    };
    let (leave, entered, notified, updated, shared, commit) = tokio::join!(
        biased;
        leave,
        enter(session, process, changes),
        notify,
        update(session, Sql::Write, &rows),
        update(session, Sql::WriteShares, &shares),
        session.execute("COMMIT")
    );
    // After the first failure the others only say that the transaction has failed.
    leave?;
    let entered = entered?;
    notified?;
    updated?;
    shared?;
    commit?;
    let ticket = |row: &Row| Ok((session.get(row, 0)?, session.get::<i64>(row, 1)?.unsigned_abs()));
    entered.iter().map(ticket).collect()
}

/// Writes positions.
async fn enter(session: &PostgresSession, process: &str, changes: &Changes) -> Outcome<Vec<Row>> {
    let entered = || changes.entered.iter();
    if changes.entered.is_empty() {
        return Ok(Vec::new());
    }
    let owners: Vec<&str> = entered().map(|one| one.owner.as_str()).collect();
    let names: Vec<&[u8]> = entered().map(|one| one.name.as_slice()).collect();
    let ends: Vec<i64> = entered().map(|one| one.alive_until_us).collect();
    let holds: Vec<i32> = entered().map(|one| one.waiter.hold_ms).collect();
    let holder = || entered().map(|one| one.waiter.holder.as_deref());
    let hosts: Vec<Option<&str>> = holder().map(|process| process.map(|one| one.host.as_str())).collect();
    let pids: Vec<Option<i64>> = holder().map(|process| process.map(|one| i64::from(one.pid))).collect();
    let tickets: Vec<Option<i64>> = entered().map(Position::kept_ticket).collect();
    let (permits, limits) = columns(entered().map(|one| one.waiter.share));
    let values: &Values<'_> = &[
        &owners, &names, &ends, &holds, &hosts, &pids, &tickets, &process, &permits, &limits,
    ];
    session.query(Sql::Enter, values).await
}

/// Returns the columns of shares: permits, and their limits.
fn columns(shares: impl Iterator<Item = Option<Share>>) -> (Vec<Option<i32>>, Vec<Option<i32>>) {
    let numbers = |share: Option<Share>| share.map(|share| (share.permits() as i32, share.limit() as i32));
    shares.map(numbers).map(Option::unzip).unzip()
}

/// A name, and its row.
type Written = (StoredName, ledger::Row);

/// Writes the rows of names, or those of shares.
async fn update(session: &PostgresSession, statement: Sql, written: &[&Written]) -> Outcome<Vec<Row>> {
    if written.is_empty() {
        return Ok(Vec::new());
    }
    let names: Vec<&[u8]> = written.iter().map(|(name, _)| name.as_slice()).collect();
    let rows = || written.iter().map(|(_, row)| row);
    let holder = || rows().map(|row| row.holder.as_deref());
    let owners: Vec<Option<&str>> = rows().map(|row| row.owner.as_deref()).collect();
    let ends: Vec<i64> = rows().map(|row| row.expires_us).collect();
    let fences: Vec<i64> = rows().map(|row| row.fence).collect();
    let grants: Vec<bool> = rows().map(|row| row.granted_us.is_some()).collect();
    let hosts: Vec<Option<&str>> = holder().map(|process| process.map(|one| one.host.as_str())).collect();
    let pids: Vec<Option<i64>> = holder().map(|process| process.map(|one| i64::from(one.pid))).collect();
    let metadata: Vec<Option<Cow<'_, str>>> = rows().map(|row| storable(session, row.metadata.as_deref())).collect();
    let (permits, limits) = columns(rows().map(|row| row.share));
    let values: &Values<'_> = &[
        &names, &owners, &ends, &fences, &grants, &hosts, &pids, &metadata, &permits, &limits,
    ];
    session
        .query(statement, &values[..session.statements().get(statement).types.len()])
        .await
}
