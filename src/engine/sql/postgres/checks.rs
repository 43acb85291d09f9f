//! What a service does beside its calls: the checks of its server, the heartbeat, the checks of its waiters, and the sweep.

use std::collections::HashSet;

use super::error::{MISSING_PRIVILEGE, READ_ONLY};
use super::session::{PostgresSession, Values};
use super::statements::Sql;
use crate::engine::core::ledger::{StoredName, bounds, is_shared, stored_share};
use crate::engine::sql::failure::{Failure, Kind};
use crate::engine::sql::server::Outcome;
use crate::engine::sql::server::products::OF_POSTGRES;
use crate::engine::sql::server::single_calls::micros;
use crate::engine::sql::server::upkeep::{
    Checked, CheckedName, CheckedShare, EXPIRED_POSITION_KEPT_MS, FREE_ROW_KEPT_S, LIVENESS_MS, SWEEP_INTERVAL,
    SWEEP_LIMIT, SWEEP_NAMES, SWEEP_ROW, Swept,
};
use crate::engine::sql::server::waiters::{AHEAD, CheckedLease};
use crate::model::OwnerToken;

/// Checks that the server is PostgreSQL, and accepts writes.
pub(super) async fn check_server(session: &PostgresSession) -> Outcome<()> {
    let query = "SELECT current_setting('transaction_read_only') || ' ' || version()";
    let server: String = session.value_of(query, &[]).await?;
    let (read_only, version) = server.split_once(' ').unwrap_or_default();
    if let Some(failure) = OF_POSTGRES.failure(session.connections(), version) {
        return Err(failure);
    }
    match read_only {
        "on" => {
            let message = format!("the server does not allow writes ({READ_ONLY})");
            Err(Failure::new(&session.connections().place, Kind::Broken, message))
        }
        _ => Ok(()),
    }
}

/// Creates the tables, and their schema if it is missing.
pub(super) async fn create_tables(session: &PostgresSession) -> Outcome<()> {
    let statements = session.statements();
    let text = "SELECT EXISTS (SELECT FROM pg_catalog.pg_namespace WHERE nspname = $1)";
    let has_schema = session.value_of(text, &[statements.schema.as_str()]).await?;
    session.execute(&statements.create(has_schema)).await
}

/// Checks that this user has all privileges that calls need. Without this check the first call that finds a queue would fail.
pub(super) async fn check_privileges(session: &PostgresSession) -> Outcome<()> {
    let missing = session.query(Sql::Privileges, &[]).await?;
    let Some(row) = missing.first() else { return Ok(()) };
    let (table, privilege): (&str, &str) = (session.get(row, 0)?, session.get(row, 1)?);
    let message = format!("this user lacks the privilege {privilege} on {table} ({MISSING_PRIVILEGE})");
    Err(Failure::new(&session.connections().place, Kind::Permanent, message))
}

/// Sends the heartbeat of this process, `except` for these owners, and reads the lease and the queue of each name.
pub(super) async fn check(
    session: &PostgresSession,
    process: &str,
    names: &[StoredName],
    except: Option<&[OwnerToken]>,
) -> Outcome<Checked> {
    let heartbeat = async {
        let Some(except) = except else { return Ok(Vec::new()) };
        let except: Vec<&str> = except.iter().map(OwnerToken::as_str).collect();
        let values: &Values<'_> = &[&process, &LIVENESS_MS, &except];
        session.query(Sql::Heartbeat, values).await
    };
    let shared: Vec<&StoredName> = names.iter().filter(|name| is_shared(name)).collect();
    let (first, last): (Vec<StoredName>, Vec<StoredName>) = shared.iter().map(|name| bounds(name)).unzip();
    let shares = async {
        match shared.is_empty() {
            true => Ok(Vec::new()),
            false => session.query(Sql::CheckShares, &[&shared, &first, &last]).await,
        }
    };
    let (kept, checked, shares) = tokio::join!(
        biased;
        heartbeat,
        async { session.query(Sql::Check, &[&names, &process, &(AHEAD as i64)]).await },
        shares,
    );
    let kept: Outcome<HashSet<String>> = kept?.iter().map(|row| session.get(row, 0)).collect();
    let (checked, shares) = (checked?, shares?);
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
    let shares = shares.iter().map(|row| {
        let holder: Option<String> = session.get(row, 1)?;
        let span = |column| Ok(micros(session.get::<Option<i64>>(row, column)?.unwrap_or_default()));
        Ok(CheckedShare {
            name: session.get(row, 0)?,
            share: stored_share(session.get::<Option<i32>>(row, 2)?, session.get(row, 3)?),
            lease: match holder {
                Some(holder) => Some(CheckedLease {
                    remaining: span(4)?,
                    age: span(5)?,
                    holder,
                }),
                None => None,
            },
        })
    });
    Ok(Checked {
        now_us,
        kept: kept?,
        names: names.collect::<Outcome<_>>()?,
        shares: shares.collect::<Outcome<_>>()?,
    })
}

/// Claims the sweep of this interval. `false`: another process has done that.
pub(super) async fn claim_sweep(session: &PostgresSession) -> Outcome<bool> {
    let interval_ms = SWEEP_INTERVAL.as_millis() as i64;
    let claimed = session.query(Sql::ClaimSweep, &[&SWEEP_ROW, &interval_ms]).await?;
    Ok(!claimed.is_empty())
}

/// Returns a warning if an old snapshot keeps many versions of rows.
pub(super) async fn slowness_warning(session: &PostgresSession) -> Outcome<Option<String>> {
    let found = session.query(Sql::OldSnapshot, &[]).await?;
    let Some(row) = found.first() else { return Ok(None) };
    let (what, address) = (session.get::<&str>(row, 0)?, &session.connections().place.address);
    Ok(Some(format!(
        "the locks at {address} become slower the longer an old snapshot exists: that of {what}, for example of pg_dump or of a transaction \
         that was left open. End it, or set idle_in_transaction_session_timeout"
    )))
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
