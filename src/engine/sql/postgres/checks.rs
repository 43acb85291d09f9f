//! What a service does beside its calls: the heartbeat, the checks of its waiters, and the sweep.

use std::collections::HashSet;

use super::session::PostgresSession;
use super::statements::Sql;
use crate::engine::sql::ledger::StoredName;
use crate::engine::sql::server::Outcome;
use crate::engine::sql::server::single_calls::micros;
use crate::engine::sql::server::upkeep::{
    Checked, CheckedName, EXPIRED_POSITION_KEPT_MS, FREE_ROW_KEPT_S, LIVENESS_MS, SWEEP_LIMIT, SWEEP_NAMES, Swept,
};
use crate::engine::sql::server::waiters::{AHEAD, CheckedLease};

/// Sends the heartbeat of this process if it is due, and reads the lease and the queue of each name.
pub(super) async fn check(
    session: &PostgresSession,
    process: &str,
    names: &[StoredName],
    is_heartbeat: bool,
) -> Outcome<Checked> {
    let heartbeat = async {
        match is_heartbeat {
            true => session.query(Sql::Heartbeat, &[&process, &LIVENESS_MS]).await,
            false => Ok(Vec::new()),
        }
    };
    let (kept, checked) = tokio::join!(
        biased;
        heartbeat,
        async { session.query(Sql::Check, &[&names, &process, &(AHEAD as i64)]).await },
    );
    let kept: Outcome<HashSet<String>> = kept?.iter().map(|row| session.get(row, 0)).collect();
    let checked = checked?;
    let now_us = checked.first().map(|row| session.get(row, 1)).transpose()?;
    let names = checked.iter().map(|row| {
        let remaining: Option<i64> = session.get(row, 2)?;
        let holder = session.get::<Option<String>>(row, 3)?.unwrap_or_default();
        let age = micros(session.get::<Option<i64>>(row, 6)?.unwrap_or_default());
        Ok(CheckedName {
            name: session.get(row, 0)?,
            lease: remaining.map(|remaining| CheckedLease {
                remaining: micros(remaining),
                age,
                holder,
            }),
            has_waiters: session.get(row, 4)?,
            ahead: session.get::<i64>(row, 5)?.unsigned_abs(),
        })
    });
    Ok(Checked {
        now_us,
        kept: kept?,
        names: names.collect::<Outcome<_>>()?,
    })
}

/// Reads rows after `after`, and removes those of names that have been free for long.
pub(super) async fn sweep(session: &PostgresSession, after: &[u8]) -> Outcome<Swept> {
    let read = session
        .query(Sql::Sweep, &[&FREE_ROW_KEPT_S, &SWEEP_LIMIT, &after])
        .await?;
    let mut last = None;
    if let Some(row) = read.first()
        && session.get::<i64>(row, 1)? == SWEEP_LIMIT
    {
        last = Some(session.get(row, 0)?);
    }
    let with_expired = session.query(Sql::ExpiredPositions, &[&EXPIRED_POSITION_KEPT_MS, &SWEEP_NAMES]);
    let with_expired: Outcome<Vec<StoredName>> = with_expired.await?.iter().map(|row| session.get(row, 0)).collect();
    let with_expired = with_expired?;
    Ok(Swept { last, with_expired })
}
