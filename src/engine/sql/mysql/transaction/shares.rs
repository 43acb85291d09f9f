//! The rows of shares in a transaction.

use super::super::packet::{Bytes, Packet, Row, list, rows};
use super::super::session::MysqlSession;
use super::super::tables::Tables;
use crate::engine::core::ledger::{self, StoredName, stored_share};
use crate::engine::sql::server::Outcome;
use crate::model::Share;

/// The columns that [`live_shares`] reads.
pub(super) const SHARE_COLUMNS: &str = "name, owner, expires_at, fence, permits, permit_limit";

/// Removes the shares that have ended, and returns the others. `None`: a row lacks a value.
///
/// A renewal of an ended share may not be committed yet. The deletion waits for it, and keeps the share: a transaction that only left out
/// ended ones would count it as free. It has the names of the shares, because a range also locks the row behind it, which is that of another
/// name.
pub(super) async fn live_shares(
    session: &mut MysqlSession,
    found: &[Row],
    clock: &[Row],
) -> Outcome<Option<Vec<(StoredName, ledger::Row)>>> {
    let Some(now_us) = clock.first().and_then(|row| row.number(0)) else {
        return Ok(None);
    };
    let all: Option<Vec<_>> = found.iter().map(stored_row).collect();
    let Some(all) = all else { return Ok(None) };
    let (mut live, ended): (Vec<_>, Vec<_>) = all.into_iter().partition(|(_, row)| row.expires_us > now_us);
    if ended.is_empty() {
        return Ok(Some(live));
    }
    let Tables { locks, .. } = &session.server.tables;
    let names = list(ended.iter().map(|(name, _)| Bytes(name)));
    let mut packet = Packet::default();
    packet.add(format_args!(
        "DELETE FROM {locks} WHERE name IN ({names}) AND expires_at <= @u"
    ));
    let kept = packet.add(format_args!(
        "SELECT {SHARE_COLUMNS} FROM {locks} FORCE INDEX (PRIMARY) WHERE name IN ({names}) FOR UPDATE"
    ));
    let mut answers = Vec::new();
    session.run(packet, &mut answers).await?;
    let kept: Option<Vec<_>> = rows(&answers, kept).iter().map(stored_row).collect();
    Ok(kept.map(|kept| {
        live.extend(kept);
        live
    }))
}

/// Reads the row of a share. `None`: it lacks a value.
fn stored_row(row: &Row) -> Option<(StoredName, ledger::Row)> {
    let share = ledger::Row::read(row.text(1), row.number(2)?, row.number(3)?, share(row, 4));
    Some((row.bytes(0)?.to_vec(), share))
}

/// Returns the condition of the stored names from `first` to the one before `end`.
pub(in super::super) fn range(first: &StoredName, end: &StoredName) -> String {
    format!("(name >= {} AND name < {})", Bytes(first), Bytes(end))
}

/// Reads permits, and their limit from the next column.
pub(in super::super) fn share(row: &Row, column: usize) -> Option<Share> {
    stored_share(row.number(column), row.number(column + 1))
}

/// Returns the columns of shares. Without shares they are left out, which makes packets smaller.
pub(super) fn share_columns(mut shares: impl Iterator<Item = Option<Share>>) -> &'static str {
    match shares.any(|share| share.is_some()) {
        true => ", permits, permit_limit",
        false => "",
    }
}

/// Returns the values of these columns.
pub(super) fn share_values(columns: &str, share: Option<Share>) -> String {
    match share {
        _ if columns.is_empty() => String::new(),
        Some(share) => format!(", {}, {}", share.permits(), share.limit()),
        None => ", NULL, NULL".to_owned(),
    }
}
