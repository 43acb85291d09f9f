//! The single statements that change the rows of holders: renewals and releases.
//!
//! They skip rows that another transaction has locked. On MariaDB that takes twice as long, because it creates a temporary table on the
//! disk. So the engine first sends MariaDB a plain `UPDATE` that fails at a locked row. Only after that failure it sends the statement
//! that skips locked rows.

use std::collections::{HashMap, HashSet};

use sqlx::mysql::MySqlArguments;

use super::STATEMENT_BATCH;
use super::checks::NO_LIMIT;
use super::packet::{Bytes, CLOCK, NOW, Packet, Row, list, rows};
use super::prepared::{add, padded, prepared_size};
use super::session::{MysqlSession, Statement};
use super::tables::Tables;
use crate::engine::core::ledger::StoredName;
use crate::engine::sql::failure::Failure;
use crate::engine::sql::server::Outcome;
use crate::engine::sql::server::single_calls::{ReleaseAnswer, ReleasedNames, RenewedOwners, SingleChanges};
use crate::model::{OwnerToken, Ttl};

/// Executes renewals, then releases, each packet within the store timeout. After a failure of the renewals, the releases are not executed and
/// fail with the same failure.
pub(super) async fn change(session: &mut MysqlSession, changes: &SingleChanges) -> (ReleasedNames, RenewedOwners) {
    let renewed = renew_all(session, &changes.renewals).await;
    let released = match &renewed {
        Ok(_) => release(session, &changes.releases).await,
        Err(failure) => Err(failure.clone()),
    };
    (released, renewed)
}

/// Extends leases. Through TLS a statement has [`STATEMENT_BATCH`] of them at most, so that its packet is usually smaller than a TLS record
/// (16 KiB).
async fn renew_all(session: &mut MysqlSession, renewals: &[(StoredName, OwnerToken, Ttl)]) -> RenewedOwners {
    let most = if session.has_tls {
        STATEMENT_BATCH
    } else {
        renewals.len().max(1)
    };
    let mut renewed = HashSet::new();
    for renewals in renewals.chunks(most) {
        renewed.extend(renew(session, renewals).await?);
    }
    Ok(renewed)
}

/// Extends leases of one name each, and never shortens one. Returns the owners of the extended leases.
async fn renew(session: &mut MysqlSession, renewals: &[(StoredName, OwnerToken, Ttl)]) -> RenewedOwners {
    let server = session.server.clone();
    let locks = &server.tables.locks;
    let names = list(renewals.iter().map(|(name, ..)| Bytes(name)));
    let owners = list(renewals.iter().map(|(_, owner, _)| Bytes(owner.as_str())));
    let held = format!("name IN ({names}) AND owner IN ({owners}) AND expires_at > @u");
    let mut owners_of: HashMap<u128, Vec<Bytes<&str>>> = HashMap::new();
    for (_, owner, ttl) in renewals {
        let micros = ttl.duration().as_micros();
        owners_of.entry(micros).or_default().push(Bytes(owner.as_str()));
    }
    // Usually all have the same ttl.
    let mut ttls = owners_of.into_iter();
    let (first, _) = ttls.next().unwrap_or_default();
    let ttl = ttls.fold(first.to_string(), |ttl, (other, owners)| {
        format!("IF(l.owner IN ({}), {other}, {ttl})", list(owners))
    });
    let count = update_renewed(session, &held, &ttl).await?;
    let owner = |(_, owner, _): &(StoredName, OwnerToken, Ttl)| owner.as_str().to_owned();
    if count == renewals.len() as u64 {
        return Ok(renewals.iter().map(owner).collect());
    }
    let mut packet = Packet::default();
    // A proxy sends a packet that begins with a SELECT to a replica.
    packet.add("SET @u = @u");
    let after = packet.add(format_args!(
        "SELECT owner, expires_at - @u FROM {locks} WHERE name IN ({names})"
    ));
    let mut answers = Vec::new();
    session.run_within_limit(packet, &mut answers).await?;
    let remaining_us: HashMap<String, i64> = rows(&answers, after)
        .iter()
        .filter_map(|row| Some((row.text(0)?, row.number(1)?)))
        .collect();
    let is_extended = |(_, owner, ttl): &&(StoredName, OwnerToken, Ttl)| {
        let remaining_us = remaining_us.get(owner.as_str());
        remaining_us.is_some_and(|remaining_us| i128::from(*remaining_us) >= ttl.duration().as_micros() as i128)
    };
    Ok(renewals.iter().filter(is_extended).map(owner).collect())
}

/// Executes the statement that renews. Returns the number of leases that were extended or that already end later.
async fn update_renewed(session: &mut MysqlSession, held: &str, ttl: &str) -> Outcome<u64> {
    let server = session.server.clone();
    let locks = &server.tables.locks;
    let set = format!("SET l.expires_at = GREATEST(l.expires_at, @u + {ttl})");
    if session.is_mariadb {
        let renew_or_fail = format!(
            "SET STATEMENT innodb_lock_wait_timeout = 0 FOR UPDATE {locks} AS l FORCE INDEX (PRIMARY) {set} WHERE {held}"
        );
        match update_with_clock(session, &renew_or_fail).await {
            Err(failure) if failure.is_reported_lock() => {}
            updated => return updated,
        }
    }
    let renew_unlocked = format!(
        "UPDATE (SELECT name FROM {locks} FORCE INDEX (PRIMARY) WHERE {held} LIMIT {NO_LIMIT} FOR UPDATE SKIP LOCKED) AS k \
         STRAIGHT_JOIN {locks} AS l FORCE INDEX (PRIMARY) ON l.name = k.name {set}"
    );
    update_with_clock(session, &renew_unlocked).await
}

/// Sets `@u` to the server's clock, then executes an `UPDATE` in the same packet. Returns the number of matched rows, not of changed rows:
/// the driver sets `CLIENT_FOUND_ROWS`.
async fn update_with_clock(session: &mut MysqlSession, update: &str) -> Outcome<u64> {
    let mut packet = Packet::default();
    packet.add(CLOCK);
    packet.add(update);
    let mut answers = Vec::new();
    session.run_within_limit(packet, &mut answers).await?;
    Ok(answers.last().map_or(0, |answer| answer.affected))
}

/// Releases live leases of names without a queue.
async fn release(session: &mut MysqlSession, releases: &[(StoredName, OwnerToken)]) -> ReleasedNames {
    if releases.is_empty() {
        return Ok(HashMap::new());
    }
    let release_answer = |(name, _): &(StoredName, OwnerToken)| (name.clone(), ReleaseAnswer::without_queue(true));
    let (affected, released_at) = update_released(session, releases).await?;
    if affected == releases.len() as u64 {
        return Ok(releases.iter().map(release_answer).collect());
    }
    if affected == 0 {
        return Ok(HashMap::new());
    }
    // Some names have a queue, their row was locked, or their lease is lost.
    let mut packet = Packet::default();
    // A proxy sends a packet that begins with a SELECT to a replica.
    packet.add(CLOCK);
    let after = packet.add(format_args!(
        "SELECT name, owner, since = {released_at}, since > {released_at} FROM {} WHERE name IN ({})",
        session.server.tables.locks,
        list(releases.iter().map(|(name, _)| Bytes(name))),
    ));
    let mut answers = Vec::new();
    let read = session.run_within_limit(packet, &mut answers).await;
    read.map_err(Failure::after_commit)?;
    let after: HashMap<&[u8], &Row> = rows(&answers, after)
        .iter()
        .filter_map(|row| Some((row.bytes(0)?, row)))
        .collect();
    let (mut released, mut granted_since, mut lost) = (Vec::new(), Vec::new(), Vec::new());
    for release @ (name, owner) in releases {
        match after.get(&name[..]) {
            // It has a queue, or the row was locked: a transaction releases it.
            Some(row) if row.bytes(1) == Some(owner.as_str().as_bytes()) => {}
            Some(row) if row.bytes(1).is_none() && row.is_true(2) => released.push(release),
            Some(row) if row.is_true(2) || row.is_true(3) => granted_since.push(release),
            _ => lost.push(release),
        }
    }
    // `affected` is the number of released names. If it covers all names that may have been released, all were. A later grant may have a
    // smaller `since` than the release: its statement read the clock before it waited for the row. A transaction answers the other calls.
    for unclear in [granted_since, lost] {
        if affected >= (released.len() + unclear.len()) as u64 {
            released.extend(unclear);
        }
    }
    Ok(released.into_iter().map(release_answer).collect())
}

/// Executes the statement that releases. Returns how many names were released, and the time of their release.
async fn update_released(session: &mut MysqlSession, releases: &[(StoredName, OwnerToken)]) -> Outcome<(u64, u64)> {
    if session.is_mariadb {
        match execute(session, releases, release_or_fail).await {
            Err(failure) if failure.is_reported_lock() => {}
            executed => return executed,
        }
        return execute_text(session, releases, release_unlocked).await;
    }
    execute(session, releases, release_unlocked).await
}

/// Returns the text of a statement for the texts of its names and owners.
type Text = fn(&Tables, &str, &str) -> String;

/// Executes a prepared statement, or a text where the server cannot prepare it.
async fn execute(session: &mut MysqlSession, releases: &[(StoredName, OwnerToken)], text: Text) -> Outcome<(u64, u64)> {
    if session.prepares {
        let mut arguments = MySqlArguments::default();
        padded(releases).for_each(|(name, _)| add(&mut arguments, &name[..]));
        padded(releases).for_each(|(_, owner)| add(&mut arguments, owner.as_str().as_bytes()));
        let size = prepared_size(releases.len());
        let prepared = |tables: &Tables| {
            let marks = list(std::iter::repeat_n('?', size));
            text(tables, &marks, &marks)
        };
        let prepared = session.run_prepared(Statement::Release(size), prepared, arguments);
        if let Some(answer) = prepared.await? {
            return Ok((answer.affected, answer.insert_id));
        }
    }
    execute_text(session, releases, text).await
}

async fn execute_text(
    session: &mut MysqlSession,
    releases: &[(StoredName, OwnerToken)],
    text: Text,
) -> Outcome<(u64, u64)> {
    let names = list(releases.iter().map(|(name, _)| Bytes(name)));
    let owners = list(releases.iter().map(|(_, owner)| Bytes(owner.as_str())));
    let mut packet = Packet::default();
    packet.add(text(&session.server.tables, &names, &owners));
    let mut answers = Vec::new();
    session.run_within_limit(packet, &mut answers).await?;
    let answer = answers.first().ok_or_else(|| session.unexpected())?;
    Ok((answer.affected, answer.insert_id))
}

/// Returns the statement that releases rows that are not locked. Its insert id is the time of the release.
fn release_unlocked(tables: &Tables, names: &str, owners: &str) -> String {
    let locks = &tables.locks;
    format!(
        "UPDATE (SELECT name FROM {locks} FORCE INDEX (PRIMARY) \
         WHERE name IN ({names}) AND owner IN ({owners}) AND queued = 0 AND expires_at > {NOW} \
         LIMIT {NO_LIMIT} FOR UPDATE SKIP LOCKED) AS k STRAIGHT_JOIN {locks} AS l FORCE INDEX (PRIMARY) ON l.name = k.name \
         SET l.owner = NULL, l.expires_at = 0, l.since = LAST_INSERT_ID({NOW}), l.metadata = NULL"
    )
}

/// Returns MariaDB's statement that releases rows, and fails if one is locked. Its insert id is the time of the release.
fn release_or_fail(tables: &Tables, names: &str, owners: &str) -> String {
    format!(
        "SET STATEMENT innodb_lock_wait_timeout = 0 FOR UPDATE {} FORCE INDEX (PRIMARY) \
         SET owner = NULL, expires_at = 0, since = LAST_INSERT_ID({NOW}), metadata = NULL \
         WHERE name IN ({names}) AND owner IN ({owners}) AND queued = 0 AND expires_at > {NOW}",
        tables.locks
    )
}
