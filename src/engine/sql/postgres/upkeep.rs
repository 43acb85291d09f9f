//! What a service does beside its calls: the heartbeat, the checks of its waiters, and the sweep.

use std::collections::HashSet;
use std::time::Duration;

use tokio::time::Instant;
use tokio_postgres::Row;

use super::error::Failure;
use super::session::Server;
use super::single::Shared;
use super::slot::Slot;
use super::statements::Sql;
use super::transaction::{EXPIRED_POSITION_KEPT_MS, get, micros};
use super::worker::{Names, Outcome};
use crate::clock::Moment;
use crate::engine::WAITER_LIVENESS;
use crate::engine::local_waiters::{HEARTBEAT_INTERVAL, RESERVATION};
use crate::engine::sql::ledger::{RESERVED, StoredName};
use crate::model::{Key, OwnerToken};

/// How long a free name keeps its row, and its last fencing token, in seconds.
const FREE_ROW_KEPT_S: i64 = 3600;
/// Maximum number of rows that one statement of a sweep removes.
const SWEEP_LIMIT: i64 = 500;
/// The time between two statements of a sweep, for calls.
const SWEEP_GAP: Duration = Duration::from_millis(20);
/// Maximum number of names of one transaction of a sweep.
const SWEEP_NAMES: i64 = 64;

/// Reads the owner of a position.
fn owner(server: &Server, row: &Row) -> Outcome<OwnerToken> {
    OwnerToken::parse(get(server, row, 0)?).map_err(|_| Failure::unexpected(&server.address, "an owner"))
}

impl Shared {
    /// Sends the heartbeat of this process if it is due, and checks what its waiters wait for.
    pub(super) async fn check(&self, mut slot: Slot, mut names: Vec<Key>) -> Slot {
        names.sort_unstable();
        names.dedup();
        if let Err(failure) = self.check_names(&mut slot, &names).await {
            // Each waiter makes an attempt, gets the error itself, and knows its own deadline.
            tracing::debug!(%failure, "a heartbeat failed");
            names.iter().for_each(|key| self.waiters.known.wake(key));
        }
        slot
    }

    async fn check_names(&self, slot: &mut Slot, names: &[Key]) -> Outcome<()> {
        let now = Instant::now();
        let last = *self.timers.heartbeat_at.lock();
        let is_due = last.is_none_or(|at| now - at >= HEARTBEAT_INTERVAL * 3 / 4);
        let stored: Vec<StoredName> = names.iter().map(|key| self.prefix.stored(key)).collect();
        let process = &self.waiters.process;
        let session = slot.session().await?;
        let statements = async {
            let liveness = WAITER_LIVENESS.as_millis() as i64;
            let heartbeat = async {
                match is_due {
                    true => session.query(Sql::Heartbeat, &[process, &liveness]).await,
                    false => Ok(Vec::new()),
                }
            };
            let (kept, checked) = tokio::join!(
                biased;
                heartbeat,
                async { session.query(Sql::Check, &[&stored]).await },
            );
            Ok((kept?, checked?))
        };
        let sent = Moment::now();
        // The positions of this process expire without a heartbeat.
        let limit = self.server.config.store_timeout.min(HEARTBEAT_INTERVAL);
        let outcome = session.within(limit, statements).await;
        let (kept, checked) = slot.settle(outcome)?;
        let kept: Outcome<HashSet<OwnerToken>> = kept.iter().map(|row| owner(&self.server, row)).collect();
        let kept = kept?;
        if is_due {
            *self.timers.heartbeat_at.lock() = Some(now);
            // Others were handed a name, and the message was lost.
            names.iter().for_each(|key| self.waiters.known.wake_others(key, &kept));
        }
        let mut free = Vec::new();
        for row in &checked {
            let name: StoredName = get(&self.server, row, 0)?;
            let Some(key) = stored.iter().position(|one| *one == name).map(|index| &names[index]) else {
                continue;
            };
            self.waiters.read_clock(sent, get(&self.server, row, 1)?);
            let lease: Option<i64> = get(&self.server, row, 2)?;
            let holder: Option<&str> = get(&self.server, row, 3)?;
            match (lease, get(&self.server, row, 4)?) {
                (Some(left), _) => {
                    self.waiters.set_busy_for(key, micros(left));
                    // It may be a waiter of this process, whose message was lost.
                    let waiter = holder.map(|holder| holder.strip_suffix(RESERVED).unwrap_or(holder));
                    if let Some(waiter) = waiter.and_then(|waiter| OwnerToken::parse(waiter).ok()) {
                        self.waiters.known.notify(&waiter);
                    }
                }
                (None, true) => {
                    self.waiters.set_busy_for(key, RESERVATION);
                    free.push(name);
                }
                // The positions of this process have expired: its waiters enter the queue again.
                (None, false) => self.waiters.known.wake(key),
            }
        }
        match free.is_empty() {
            true => Ok(()),
            false => {
                let _ = self.names.send(Names::Free(free));
                Ok(())
            }
        }
    }

    /// Removes some rows of names that have been free for long, and positions of waiters that ended long ago.
    pub(super) async fn sweep(&self, mut slot: Slot) -> Slot {
        let is_complete = self.sweep_some(&mut slot).await.unwrap_or_else(|failure| {
            tracing::debug!(%failure, "a sweep failed");
            true
        });
        // The next call starts the time to the next sweep.
        *self.timers.sweep_at.lock() = (!is_complete).then(|| Instant::now() + SWEEP_GAP);
        slot
    }

    /// `true`: there are no more.
    async fn sweep_some(&self, slot: &mut Slot) -> Outcome<bool> {
        let session = slot.session().await?;
        let statements = async {
            let swept = session.query(Sql::Sweep, &[&FREE_ROW_KEPT_S, &SWEEP_LIMIT]).await?;
            let abandoned = session.query(Sql::Abandoned, &[&EXPIRED_POSITION_KEPT_MS, &SWEEP_NAMES]);
            Ok((swept.len() as i64, abandoned.await?))
        };
        let outcome = session.within_limit(statements).await;
        let (swept, abandoned) = slot.settle(outcome)?;
        let names: Outcome<Vec<StoredName>> = abandoned.iter().map(|row| get(&self.server, row, 0)).collect();
        let names = names?;
        if !names.is_empty() {
            let _ = self.names.send(Names::Abandoned(names));
        }
        Ok(swept < SWEEP_LIMIT)
    }
}
