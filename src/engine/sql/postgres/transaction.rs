//! What a transaction reads and writes: two packets. The first one locks the rows of all names in their order, and reads them and
//! their queues. The second one writes the result.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use tokio_postgres::Row;

use super::session::{PostgresSession, Values};
use super::statements::Sql;
use crate::engine::sql::ledger::{self, Changes, Ledger, Position, StoredName};
use crate::engine::sql::server::error::Failure;
use crate::engine::sql::server::transaction::Plan;
use crate::engine::sql::server::upkeep::EXPIRED_POSITION_KEPT_MS;
use crate::engine::sql::server::waiters::Notification;
use crate::engine::sql::server::{Committed, Outcome};

/// Begins a transaction. A process that is stopped during one holds the locks of its rows: the server ends its session then.
pub(super) const BEGIN: &str =
    "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL idle_in_transaction_session_timeout = 2000";

/// Begins a transaction, locks the rows of the plan, and reads them and their queues.
pub(super) async fn read(session: &PostgresSession, plan: &Plan) -> Outcome<Ledger> {
    let names: Vec<&[u8]> = plan.names.keys().map(Vec::as_slice).collect();
    let created: Vec<bool> = plan.names.values().copied().collect();
    let front = plan.front() as i64;
    let (begun, locked, rows, queue) = tokio::join!(
        biased;
        session.execute(BEGIN),
        async { session.query(Sql::Lock, &[&names, &created]).await },
        async { session.query(Sql::Rows, &[&names]).await },
        async { session.query(Sql::Queue, &[&names, &plan.owners, &front]).await },
    );
    begun?;
    locked?;
    let (rows, queue) = (rows?, queue?);
    let first = rows
        .first()
        .ok_or_else(|| Failure::unexpected(session.links(), "no clock"))?;
    let now_us: i64 = session.get(first, 0)?;
    let mut found = BTreeMap::new();
    for row in &rows {
        if let Some(name) = session.get::<Option<StoredName>>(row, 1)? {
            let row = ledger::Row::read(session.get(row, 2)?, session.get(row, 3)?, session.get(row, 4)?);
            found.insert(name, row);
        }
    }
    let positions: Outcome<Vec<Position>> = queue
        .iter()
        .map(|row| {
            Ok(Position::read(
                session.get(row, 0)?,
                session.get(row, 1)?,
                session.get(row, 2)?,
                session.get(row, 3)?,
                session.get(row, 4)?,
                session.get(row, 5)?,
            ))
        })
        .collect();
    Ok(Ledger::new(now_us, found, positions?))
}

/// Writes the changes of a transaction, and commits it.
pub(super) async fn write(session: &PostgresSession, process: &str, changes: &Changes) -> Outcome<Committed> {
    let names: Vec<&[u8]> = changes.rows.iter().map(|(name, _)| name.as_slice()).collect();
    let (left, calls, entered) = (&changes.left, &changes.called, &changes.entered);
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
    let enter = async {
        if entered.is_empty() {
            return Ok(Vec::new());
        }
        let owners: Vec<&str> = entered.iter().map(|one| one.owner.as_str()).collect();
        let names: Vec<&[u8]> = entered.iter().map(|one| one.name.as_slice()).collect();
        let ends: Vec<i64> = entered.iter().map(|one| one.alive_until_us).collect();
        let reserved: Vec<i32> = entered.iter().map(|one| one.reserve_ms).collect();
        let values: &Values<'_> = &[&owners, &names, &ends, &reserved, &process];
        session.query(Sql::Enter, values).await
    };
    let call = async {
        match calls.is_empty() && changes.notified.is_empty() {
            true => Ok(Vec::new()),
            false => {
                let owners: Vec<&str> = changes.notified.iter().map(|(owner, _)| owner.as_str()).collect();
                let addition = |after: Option<Duration>| after.map_or_else(String::new, Notification::addition);
                let additions: Vec<String> = changes.notified.iter().map(|(_, after)| addition(*after)).collect();
                session.query(Sql::Call, &[calls, &owners, &additions, &process]).await
            }
        }
    };
    let update = async {
        match names.is_empty() {
            true => Ok(Vec::new()),
            false => update(session, &names, changes).await,
        }
    };
    let (leave, enter, call, update, commit) =
        tokio::join!(biased; leave, enter, call, update, session.execute("COMMIT"));
    leave?;
    let (entered, notified) = (enter?, call?);
    update?;
    commit?;
    let mut notifications = Vec::new();
    for row in &notified {
        if session.get(row, 1)? {
            notifications.push(session.get(row, 0)?);
        }
    }
    let ticket = |row: &Row| Ok((session.get(row, 0)?, session.get::<i64>(row, 1)?.unsigned_abs()));
    let tickets: Outcome<HashMap<String, u64>> = entered.iter().map(ticket).collect();
    Ok(Committed {
        tickets: tickets?,
        notifications,
    })
}

/// Writes the rows of names.
async fn update(session: &PostgresSession, names: &[&[u8]], changes: &Changes) -> Outcome<Vec<Row>> {
    let rows = || changes.rows.iter().map(|(_, row)| row);
    let holder = || rows().map(|row| row.holder.as_deref());
    let owners: Vec<Option<&str>> = rows().map(|row| row.owner.as_deref()).collect();
    let ends: Vec<i64> = rows().map(|row| row.expires_us).collect();
    let fences: Vec<i64> = rows().map(|row| row.fence).collect();
    let grants: Vec<bool> = rows().map(|row| row.is_granted).collect();
    let hosts: Vec<Option<&str>> = holder().map(|process| process.map(|one| one.host.as_str())).collect();
    let pids: Vec<Option<i64>> = holder().map(|process| process.map(|one| i64::from(one.pid))).collect();
    let metadata: Vec<Option<&str>> = rows().map(|row| row.metadata.as_deref()).collect();
    let values: &Values<'_> = &[&names, &owners, &ends, &fences, &grants, &hosts, &pids, &metadata];
    session.query(Sql::Write, values).await
}
