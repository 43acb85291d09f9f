//! The single statements.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::fmt::Write;

use futures_util::future::{OptionFuture, join_all};
use tokio_postgres::Row;

use super::session::{PostgresSession, Values};
use super::statements::Sql;
use crate::engine::RESERVATION;
use crate::engine::core::ledger::{Content, Notification, StoredName, stored_share};
use crate::engine::hand_off::GrantTimes;
use crate::engine::sql::failure::Kind;
use crate::engine::sql::server::Outcome;
use crate::engine::sql::server::single_calls::{
    Attempt, Granted, PageRead, ReleaseAnswer, ReleasedNames, RenewedOwners, SingleChanges, micros,
};
use crate::engine::sql::{Lease, Page};
use crate::model::{Claim, Fence, OwnerToken, Ttl};

/// Executes releases and renewals. The statements are sent at the same time.
pub(super) async fn change(
    session: &PostgresSession,
    process: &str,
    changes: &SingleChanges,
) -> (ReleasedNames, RenewedOwners) {
    let connection = &session.connection;
    let (released, renewed) = tokio::join!(
        biased;
        some(!changes.releases.is_empty(), || connection.within_limit(session.packet(release(session, process, changes)))),
        some(!changes.renewals.is_empty(), || connection.within_limit(session.packet(renew(session, &changes.renewals)))),
    );
    (
        released.unwrap_or_else(|| Ok(HashMap::new())),
        renewed.unwrap_or_else(|| Ok(HashSet::new())),
    )
}

/// Returns the statements of a kind if it has calls.
fn some<F: Future>(has_calls: bool, statements: impl FnOnce() -> F) -> OptionFuture<F> {
    has_calls.then(statements).into()
}

/// Releases names, and hands those with a queue off.
async fn release(session: &PostgresSession, process: &str, changes: &SingleChanges) -> ReleasedNames {
    let mut released = HashMap::new();
    if !changes.expects_queue {
        released = release_without_queue(session, &changes.releases).await?;
    }
    let others = changes.releases.iter().filter(|(name, _)| !released.contains_key(name));
    let (names, owners): (Vec<&[u8]>, Vec<&str>) = others.map(|(name, owner)| (&name[..], owner.as_str())).unzip();
    if names.is_empty() {
        return Ok(released);
    }
    let values: &Values<'_> = &[&names, &owners, &process, &(RESERVATION.as_millis() as i64)];
    match session.query(Sql::HandOff, values).await {
        Ok(rows) => {
            for row in &rows {
                released.insert(session.get(row, 0)?, release_answer(session, row)?);
            }
        }
        // The first statement has released some names. A transaction answers the other releases.
        Err(failure)
            if !released.is_empty()
                && (failure.kind().is_left_to_transactions() || failure.kind() == Kind::NoTable) => {}
        Err(failure) => return Err(failure),
    }
    Ok(released)
}

async fn release_without_queue(session: &PostgresSession, releases: &[(StoredName, OwnerToken)]) -> ReleasedNames {
    if let [(name, owner)] = releases {
        let rows = session.query(Sql::ReleaseOne, &[name, &owner.as_str()]).await?;
        let released = rows
            .iter()
            .map(|row| Ok((name.clone(), ReleaseAnswer::without_queue(session.get(row, 0)?))));
        return released.collect();
    }
    let names: Vec<&[u8]> = releases.iter().map(|(name, _)| name.as_slice()).collect();
    let owners: Vec<&str> = releases.iter().map(|(_, owner)| owner.as_str()).collect();
    let rows = session.query(Sql::Release, &[&names, &owners]).await?;
    let released = rows
        .iter()
        .map(|row| Ok((session.get(row, 0)?, ReleaseAnswer::without_queue(session.get(row, 1)?))));
    released.collect()
}

fn release_answer(session: &PostgresSession, row: &Row) -> Outcome<ReleaseAnswer> {
    let next = match session.get::<Option<String>>(row, 3)? {
        Some(owner) => {
            let number = |column| session.get::<i64>(row, column).map(i64::unsigned_abs);
            let times = GrantTimes {
                granted_us: number(5)?,
                until_us: number(6)?,
            };
            let content = Content::Granted(Fence(number(4)?), times);
            Some(Notification {
                engine: None,
                owner,
                content,
            })
        }
        None => None,
    };
    Ok(ReleaseAnswer {
        is_live: session.get(row, 1)?,
        is_handed_off: session.get(row, 2)?,
        next,
    })
}

async fn renew(session: &PostgresSession, renewals: &[(StoredName, OwnerToken, Ttl)]) -> RenewedOwners {
    let names: Vec<&[u8]> = renewals.iter().map(|(name, ..)| name.as_slice()).collect();
    let owners: Vec<&str> = renewals.iter().map(|(_, owner, _)| owner.as_str()).collect();
    let ttls: Vec<i64> = renewals.iter().map(|(.., ttl)| ttl.as_millis() as i64).collect();
    let rows = session.query(Sql::Renew, &[&names, &owners, &ttls]).await?;
    rows.iter().map(|row| session.get(row, 0)).collect()
}

/// Returns metadata, which is JSON text, as the database can store it: with escapes if not every character is in its encoding.
pub(super) fn storable<'m>(session: &PostgresSession, metadata: Option<&'m str>) -> Option<Cow<'m, str>> {
    let metadata = metadata?;
    if session.is_utf8 || metadata.is_ascii() {
        return Some(metadata.into());
    }
    let mut escaped = String::with_capacity(metadata.len() * 2);
    for unit in metadata.encode_utf16() {
        match u8::try_from(unit).ok().filter(u8::is_ascii) {
            Some(byte) => escaped.push(char::from(byte)),
            // Writing to a string does not fail.
            None => _ = write!(escaped, "\\u{unit:04x}"),
        }
    }
    Some(escaped.into())
}

/// Makes attempts for different names.
pub(super) async fn attempt(session: &PostgresSession, attempts: &[Attempt]) -> Outcome<Granted> {
    let mut answer = Granted::default();
    if let [(name, claim)] = attempts {
        for row in &grant_one(session, name, claim).await? {
            let fence: Option<i64> = session.get(row, 0)?;
            answer.fences.extend(fence.map(|fence| (name.clone(), fence)));
            if let Some(owner) = session.get::<Option<String>>(row, 1)? {
                answer.held.insert(name.clone(), (owner, micros(session.get(row, 2)?)));
            }
        }
        return Ok(answer);
    }
    let names: Vec<&[u8]> = attempts.iter().map(|(name, _)| name.as_slice()).collect();
    for row in &grant(session, attempts, &names).await? {
        let name: StoredName = session.get(row, 0)?;
        if let Some(owner) = session.get::<Option<String>>(row, 2)? {
            answer.held.insert(name, (owner, micros(session.get(row, 3)?)));
        } else {
            answer.fences.insert(name, session.get(row, 1)?);
        }
    }
    Ok(answer)
}

async fn grant_one(session: &PostgresSession, name: &StoredName, claim: &Claim) -> Outcome<Vec<Row>> {
    let (owner, ttl) = (claim.owner.as_str(), claim.ttl.as_millis() as i64);
    let (host, pid) = (claim.process.host.as_str(), i64::from(claim.process.pid));
    let values: &Values<'_> = &[
        name,
        &owner,
        &ttl,
        &host,
        &pid,
        &storable(session, claim.metadata.as_deref()),
    ];
    session.query(Sql::AcquireOne, values).await
}

async fn grant(session: &PostgresSession, attempts: &[Attempt], names: &[&[u8]]) -> Outcome<Vec<Row>> {
    let claims = || attempts.iter().map(|(_, claim)| claim);
    let owners: Vec<&str> = claims().map(|claim| claim.owner.as_str()).collect();
    let ttls: Vec<i64> = claims().map(|claim| claim.ttl.as_millis() as i64).collect();
    let hosts: Vec<&str> = claims().map(|claim| claim.process.host.as_str()).collect();
    let pids: Vec<i64> = claims().map(|claim| i64::from(claim.process.pid)).collect();
    let metadata: Vec<Option<Cow<'_, str>>> = claims()
        .map(|claim| storable(session, claim.metadata.as_deref()))
        .collect();
    let values: &Values<'_> = &[&names, &owners, &ttls, &hosts, &pids, &metadata];
    session.query(Sql::Acquire, values).await
}

/// Number of pages that are read before the others. The server executes their statements one after the other, and each may wait
/// [`LOCK_WAIT`] for a locked table. Four such waits are shorter than the default store timeout.
///
/// [`LOCK_WAIT`]: crate::engine::sql::server::LOCK_WAIT
const FIRST_PAGES: usize = 4;

/// Reads pages of leases, and pipelines their statements. After an error also waits for the other replies, so that no statement is left on
/// the connection.
pub(super) async fn read(session: &PostgresSession, pages: &[Page]) -> Outcome<Vec<PageRead>> {
    let mut read = Vec::with_capacity(pages.len());
    let (first, others) = pages.split_at(pages.len().min(FIRST_PAGES));
    for pages in [first, others] {
        for page in join_all(pages.iter().map(|page| read_page(session, page))).await {
            read.push(page?);
        }
    }
    Ok(read)
}

/// Reads the leases of a page, sorted by name.
async fn read_page(session: &PostgresSession, page: &Page) -> Outcome<PageRead> {
    let values: &Values<'_> = &[&page.start, &page.end, &Page::SIZE];
    let rows = session.query(Sql::List, values).await?;
    let leases: Outcome<Vec<Lease>> = rows.iter().filter_map(|row| lease(session, row).transpose()).collect();
    let last = rows.last().map(|row| session.get(row, 0)).transpose()?;
    Ok(PageRead {
        leases: leases?,
        next: page.next(last, rows.len()),
    })
}

/// Reads the lease of a row. `None`: the name is free.
fn lease(session: &PostgresSession, row: &Row) -> Outcome<Option<Lease>> {
    let Some(remaining) = session.get(row, 1)? else {
        return Ok(None);
    };
    Ok(Some(Lease {
        name: session.get(row, 0)?,
        remaining: micros(remaining),
        fence: session.get(row, 2)?,
        host: session.get(row, 3)?,
        pid: session.get(row, 4)?,
        since_ms: session.get(row, 5)?,
        metadata: session.get(row, 6)?,
        waiting: session.get(row, 7)?,
        share: stored_share(session.get::<Option<i32>>(row, 8)?, session.get(row, 9)?),
    }))
}
