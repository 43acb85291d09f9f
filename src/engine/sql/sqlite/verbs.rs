//! What each verb reads and writes within a transaction.

use std::collections::HashMap;
use std::fmt::Write;
use std::sync::Arc;
use std::time::Duration;

use sqlx::Row;
use sqlx::sqlite::{SqliteConnection, SqliteRow};

use super::rows::{apply_share, lease, read_addresses, rows, snapshot};
use super::statements::{Answers, Statements, Transaction};
use crate::engine::core::ledger::decide::{Decision, decide, waiter_liveness};
use crate::engine::core::ledger::{StoredName, bounds, held_names, share_name, stored_name};
use crate::engine::sql::jobs::PageOfLocks;
use crate::engine::sql::udp_wakeup::{Address, UdpWakeup};
use crate::engine::sql::{Lease, Page};
use crate::engine::{Acquired, EXPIRED_POSITION_KEPT, Released, Renewed};
use crate::model::{Claim, Key, OwnerToken, Ttl};

/// What the verbs need beside the transaction.
pub(super) struct Verbs {
    pub statements: Arc<Statements>,
    pub wakeup: Arc<UdpWakeup>,
    /// The prefix of every name.
    pub prefix: String,
}

/// One verb within a transaction.
pub(super) struct Call<'a, 'c> {
    pub transaction: &'a mut Transaction<'c>,
    /// Whether the transaction ends with this verb, which then commits with its last script and saves an exchange.
    pub last: bool,
    /// The waiters to wake after the commit.
    pub to_wake: &'a mut Vec<Address>,
}

impl<'c> Call<'_, 'c> {
    /// Returns the call for a part of a verb. `last`: the verb ends with it.
    pub(super) fn part(&mut self, last: bool) -> Call<'_, 'c> {
        Call {
            transaction: &mut *self.transaction,
            last: self.last && last,
            to_wake: &mut *self.to_wake,
        }
    }
}

impl Verbs {
    pub(super) async fn try_acquire(&self, mut call: Call<'_, '_>, claim: &Claim) -> sqlx::Result<Acquired> {
        let (names, owner) = (self.held(claim), claim.owner.as_str());
        let answers = match claim.share {
            Some(_) => self.read_share(&mut call, claim).await?,
            None => {
                call.transaction
                    .run(&self.statements.snapshot, false, |q| {
                        q.bind(names.clone()).bind(owner.to_owned())
                    })
                    .await?
            }
        };
        let (now, mut snapshot) = snapshot(rows(&answers, 0))?;
        let next = match (claim.share, rows(&answers, 0).first()) {
            (Some(share), Some(row)) => apply_share(share, row, now, &mut snapshot.names[0])?,
            _ => None,
        };
        let liveness = claim.waiting.then(|| waiter_liveness(claim.ttl));
        match decide(&snapshot, liveness) {
            Decision::Grant { fence } => {
                let ttl = claim.ttl.as_millis() as i64;
                let process = &claim.process;
                call.transaction
                    .run(&self.statements.grant, call.last, |q| {
                        q.bind(names)
                            .bind(owner.to_owned())
                            .bind(fence.0 as i64)
                            .bind(now)
                            .bind(ttl)
                            .bind(process.host.clone())
                            .bind(i64::from(process.pid))
                            .bind(claim.metadata.as_deref().map(str::to_owned))
                            .bind(now - EXPIRED_POSITION_KEPT_MS)
                            .bind(claim.share.map(|share| i64::from(share.permits())))
                            .bind(claim.share.map(|share| i64::from(share.limit())))
                    })
                    .await?;
                call.to_wake.extend(next);
                Ok(Acquired::Granted { fence })
            }
            Decision::AlreadyHeld { fence } => {
                let expires_at = now + claim.ttl.as_millis() as i64;
                call.transaction
                    .run(&self.statements.grant_again, call.last, |q| {
                        q.bind(names).bind(owner.to_owned()).bind(expires_at)
                    })
                    .await?;
                Ok(Acquired::Granted { fence })
            }
            Decision::Busy {
                index,
                retry_after,
                holds_some,
            } => {
                if holds_some {
                    let call = call.part(liveness.is_none());
                    self.release(call, std::slice::from_ref(claim), Duration::ZERO).await?;
                }
                if let Some(liveness) = liveness {
                    self.enqueue(call, claim, index, now, liveness).await?;
                }
                Ok(Acquired::Held {
                    key: claim.keys()[index].clone(),
                    retry_after: Some(retry_after),
                })
            }
        }
    }

    /// Reads the state of a shared name for an attempt.
    async fn read_share(&self, call: &mut Call<'_, '_>, claim: &Claim) -> sqlx::Result<Answers> {
        let (name, owner) = (self.name(&claim.keys()[0]), claim.owner.as_str());
        let ((first, end), own) = (bounds(&name), share_name(&name, owner));
        call.transaction
            .run(&self.statements.snapshot_share, false, |q| {
                q.bind(name).bind(owner.to_owned()).bind(own).bind(first).bind(end)
            })
            .await
    }

    /// Enters a claim into the queue of the name at `index`. `now`: the store's clock in ms.
    async fn enqueue(
        &self,
        call: Call<'_, '_>,
        claim: &Claim,
        index: usize,
        now: i64,
        liveness: Duration,
    ) -> sqlx::Result<()> {
        let keys = claim.keys();
        // A claim of one name has no reservations.
        let (before, all) = match keys {
            [_] => (self.names(&[]), self.names(&[])),
            keys => (self.names(&keys[..index]), self.names(keys)),
        };
        let address = self.wakeup.address(&claim.owner);
        let answers = call
            .transaction
            .run(&self.statements.enqueue, call.last, |q| {
                q.bind(claim.owner.as_str().to_owned())
                    .bind(self.name(&keys[index]))
                    .bind(now)
                    .bind(now + liveness.as_millis() as i64)
                    .bind(address.and_then(|address| address.port).map(i64::from))
                    .bind(address.map(|address| address.id as i64))
                    .bind(now - EXPIRED_POSITION_KEPT_MS)
                    .bind(before)
                    .bind(all)
                    .bind(claim.share.map(|share| i64::from(share.permits())))
                    .bind(claim.share.map(|share| i64::from(share.limit())))
            })
            .await?;
        read_addresses(&answers, call.to_wake)
    }

    /// Extends the leases of a claim, and makes `to` their owner, which may be the same one.
    pub(super) async fn renew(
        &self,
        call: Call<'_, '_>,
        claim: &Claim,
        ttl: Ttl,
        to: &OwnerToken,
    ) -> sqlx::Result<Renewed> {
        let answers = call
            .transaction
            .run(&self.statements.renew, call.last, |q| {
                q.bind(self.held(claim))
                    .bind(claim.owner.as_str().to_owned())
                    .bind(ttl.as_millis() as i64)
                    .bind(to.as_str().to_owned())
                    .bind(claim.process.host.clone())
                    .bind(i64::from(claim.process.pid))
            })
            .await?;
        let all = claim.keys().len() as u64;
        match answers.first().is_some_and(|answer| answer.changed == all) {
            true => Ok(Renewed::Extended),
            false => Ok(Renewed::Lost),
        }
    }

    /// Releases claims, in one exchange with the driver. Returns one answer for each.
    pub(super) async fn release(
        &self,
        call: Call<'_, '_>,
        claims: &[Claim],
        keep: Duration,
    ) -> sqlx::Result<Vec<Released>> {
        // Whole milliseconds, rounded up: a keep that is not zero stays one.
        let keep_ms = i64::try_from(keep.as_nanos().div_ceil(1_000_000))
            .unwrap_or(i64::MAX)
            .min(MAX_KEEP_MS);
        let pairs = claims.iter().flat_map(|claim| {
            let owner = claim.owner.as_str();
            // A waiter of several names has reservations.
            let reserved: &[&str] = if claim.waiting && claim.keys().len() > 1 {
                &["", "-next"]
            } else {
                &[""]
            };
            let of_name = move |name: &StoredName| {
                let name = hexadecimal(name);
                reserved.iter().map(move |end| format!("[\"{name}\",\"{owner}{end}\"]"))
            };
            let names = self.all(claim.keys());
            held_names(claim, &names).iter().flat_map(of_name).collect::<Vec<_>>()
        });
        let pairs: Vec<String> = pairs.collect();
        let answers = call
            .transaction
            .run(&self.statements.release, call.last, |q| {
                q.bind(format!("[{}]", pairs.join(","))).bind(keep_ms)
            })
            .await?;
        read_addresses(&answers, call.to_wake)?;
        let mut held: HashMap<String, usize> = HashMap::new();
        for row in rows(&answers, 1) {
            *held.entry(row.try_get(0)?).or_default() += 1;
        }
        for row in rows(&answers, 2) {
            *held.entry(row.try_get(0)?).or_default() += usize::from(row.try_get::<bool, _>(1)?);
        }
        let answer = |claim: &Claim| match held.get(claim.owner.as_str()) {
            Some(count) if *count == claim.keys().len() => Released::Freed,
            _ => Released::NotHeld,
        };
        Ok(claims.iter().map(answer).collect())
    }

    pub(super) async fn force_release(&self, call: Call<'_, '_>, key: &Key) -> sqlx::Result<bool> {
        let statement = &self.statements.force_release;
        let name = self.name(key);
        let Page { start, end } = Page::of_name(name.clone(), key.is_shared());
        let answers = call
            .transaction
            .run(statement, call.last, |q| q.bind(name).bind(start).bind(end))
            .await?;
        read_addresses(&answers, call.to_wake)?;
        let were_live: sqlx::Result<Vec<bool>> = rows(&answers, 1).iter().map(|row| row.try_get(0)).collect();
        Ok(were_live?.contains(&true))
    }

    /// Removes some expired rows. Returns whether there may be more.
    pub(super) async fn sweep(&self, transaction: &mut Transaction<'_>) -> sqlx::Result<bool> {
        let answers = transaction
            .run(&self.statements.sweep, true, |q| q.bind(EXPIRED_POSITION_KEPT_MS))
            .await?;
        Ok(answers.iter().any(|answer| answer.changed >= SWEEP_LIMIT))
    }

    /// Returns the waiters of this engine that are the first in the queue of a free name. Only reads.
    pub(super) async fn next_waiters(&self, connection: &mut SqliteConnection) -> sqlx::Result<Vec<Address>> {
        let owners = self.wakeup.owners();
        let answers = Transaction::new(connection)
            .read(&self.statements.next_waiters, |q| q.bind(owners))
            .await?;
        let waiter = |row: &SqliteRow| {
            let id = row.try_get::<i64, _>(0)? as u64;
            Ok(Address { port: None, id })
        };
        rows(&answers, 0).iter().map(waiter).collect()
    }

    /// Reads a page of leases, sorted by name. Returns the next page, if there may be one.
    pub(super) async fn list(&self, transaction: &mut Transaction<'_>, page: &Page) -> sqlx::Result<PageOfLocks> {
        let Page { start, end } = page.clone();
        let answers = transaction
            .read(&self.statements.list, |q| q.bind(start).bind(end).bind(Page::SIZE))
            .await?;
        let leases: Vec<Lease> = rows(&answers, 0).iter().map(lease).collect::<sqlx::Result<_>>()?;
        let next = page.next(leases.last().map(|last| &last.name[..]), leases.len());
        let found = leases.into_iter().map(|lease| lease.info(&self.prefix)).collect();
        Ok((found, next))
    }

    /// Returns a name as it is stored.
    fn name(&self, key: &Key) -> Vec<u8> {
        stored_name(&self.prefix, key)
    }

    /// Returns the stored names of the rows that a claim holds, as one argument.
    fn held(&self, claim: &Claim) -> String {
        argument(&held_names(claim, &self.all(claim.keys())))
    }

    fn all(&self, keys: &[Key]) -> Vec<StoredName> {
        keys.iter().map(|key| self.name(key)).collect()
    }

    fn names(&self, keys: &[Key]) -> String {
        argument(&self.all(keys))
    }
}

/// Returns several names as one argument, in hexadecimal: JSON has no bytes, and SQLite's JSON text ends at a zero.
fn argument(names: &[StoredName]) -> String {
    let names = names.iter().map(|name| format!("\"{}\"", hexadecimal(name)));
    format!("[{}]", names.collect::<Vec<_>>().join(","))
}

fn hexadecimal(name: &StoredName) -> String {
    let mut text = String::with_capacity(2 * name.len());
    for byte in name {
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}

/// Maximum number of rows that `sweep.sql` removes from each table.
const SWEEP_LIMIT: u64 = 500;

/// [`EXPIRED_POSITION_KEPT`] in milliseconds.
const EXPIRED_POSITION_KEPT_MS: i64 = EXPIRED_POSITION_KEPT.as_millis() as i64;

/// Some 292 years, so that adding the clock does not overflow.
const MAX_KEEP_MS: i64 = i64::MAX / 1_000_000;
