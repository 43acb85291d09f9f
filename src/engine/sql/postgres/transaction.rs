//! The transactions: what they read, what the calls in them change, and what they write.
//!
//! A transaction is two packets. The first one locks the rows of all names in their order, and reads them and their queues. The calls
//! are then made in `sql/ledger/`, and the second packet writes the result.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use tokio_postgres::Row;
use tokio_postgres::types::FromSql;

use super::error::{Failure, Kind};
use super::session::{Server, Session};
use super::statements::Sql;
use super::waiters::{Waiters, text_of};
use crate::clock::Moment;
use crate::engine::sql::Page;
use crate::engine::sql::jobs::Job;
use crate::engine::sql::ledger::{self, Changes, Ledger, Notice, Position, StoredName, Waiter};
use crate::engine::{Acquired, EXPIRED_POSITION_KEPT};
use crate::model::{Claim, Fence, Holder, Key, LockInfo, OwnerToken, Process};

/// Begins a transaction. A process that is stopped during one holds the locks of its rows: the server ends its session then.
pub(super) const BEGIN: &str =
    "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL idle_in_transaction_session_timeout = 2000";

/// [`EXPIRED_POSITION_KEPT`] in milliseconds.
pub(super) const EXPIRED_POSITION_KEPT_MS: i64 = EXPIRED_POSITION_KEPT.as_millis() as i64;

/// The names and owners of the calls of a transaction.
#[derive(Default)]
pub(super) struct Plan {
    /// Each name, and whether its row is created.
    names: BTreeMap<StoredName, bool>,
    owners: Vec<String>,
    /// Whether each job is a part of it.
    takes: Vec<bool>,
    /// The names whose positions are counted again.
    recounted: Vec<StoredName>,
}

/// Names that a transaction concerns without a call.
#[derive(Clone, Copy)]
pub(super) enum Checked<'a> {
    None,
    /// Free names, which are handed off.
    Free(&'a [StoredName]),
    /// Names with positions that are removed.
    Pruned(&'a [StoredName]),
}

/// What follows for the waiters of this process after the commit.
#[derive(Debug, Default)]
pub(super) struct Effects {
    /// Waiters in a queue: the owner, the name, the ticket, and the time until the name may be free.
    pub entered: Vec<(OwnerToken, Key, u64, Option<Duration>)>,
    pub left: Vec<OwnerToken>,
    /// The notices for waiters of this process.
    pub notices: Vec<Notice>,
}

/// The names of a store.
#[derive(Debug, Clone)]
pub(super) struct Prefix(pub String);

impl Prefix {
    /// Returns a name as it is stored.
    pub(super) fn stored(&self, key: &Key) -> StoredName {
        [self.0.as_bytes(), key.as_str().as_bytes()].concat()
    }

    fn all(&self, claim: &Claim) -> Vec<StoredName> {
        claim.keys().iter().map(|key| self.stored(key)).collect()
    }
}

impl Plan {
    /// Starts the attempts of a batch. Leaves out cancelled jobs.
    pub(super) fn new(batch: &[Job], checked: Checked<'_>, prefix: &Prefix) -> Self {
        let mut plan = Plan::default();
        for job in batch {
            let takes = !job.is_cancelled() && plan.add(job, prefix);
            plan.takes.push(takes);
        }
        match checked {
            Checked::None => {}
            Checked::Free(names) => plan.names.extend(names.iter().map(|name| (name.clone(), false))),
            Checked::Pruned(names) => {
                plan.names.extend(names.iter().map(|name| (name.clone(), true)));
                plan.recounted.extend_from_slice(names);
            }
        }
        plan
    }

    pub(super) fn is_empty(&self) -> bool {
        self.names.is_empty()
    }

    /// Adds a job. `false`: it was cancelled, or only reads.
    fn add(&mut self, job: &Job, prefix: &Prefix) -> bool {
        match job {
            Job::Acquire(claims, ticket, _) => {
                // Mark before the start: a caller that can no longer cancel reads the marks.
                claims.iter().for_each(|claim| claim.mark_sent());
                if !ticket.start() {
                    return false;
                }
                claims.iter().for_each(|claim| self.add_claim(claim, prefix, true));
            }
            Job::Renew(claim, ..) | Job::Transfer(claim, ..) => self.add_claim(claim, prefix, false),
            Job::Release(claims, ..) => claims.iter().for_each(|claim| self.add_claim(claim, prefix, false)),
            Job::ForceRelease(key, _) => _ = self.names.entry(prefix.stored(key)).or_default(),
            Job::Inspect(..) | Job::List(..) => return false,
        }
        true
    }

    fn add_claim(&mut self, claim: &Claim, prefix: &Prefix, is_created: bool) {
        self.owners.push(claim.owner.as_str().to_owned());
        for key in claim.keys() {
            *self.names.entry(prefix.stored(key)).or_default() |= is_created;
        }
    }
}

/// Executes the jobs of a plan as one transaction, and stores their answers.
pub(super) async fn transact(
    session: &Session,
    server: &Server,
    prefix: &Prefix,
    waiters: &Waiters,
    plan: &Plan,
    batch: &mut [Job],
) -> Result<Effects, Failure> {
    let outcome = in_transaction(session, server, prefix, waiters, plan, batch).await;
    if outcome.as_ref().is_err_and(|failure| failure.kind() != Kind::Broken) {
        session.execute("ROLLBACK").await?;
    }
    outcome
}

async fn in_transaction(
    session: &Session,
    server: &Server,
    prefix: &Prefix,
    waiters: &Waiters,
    plan: &Plan,
    batch: &mut [Job],
) -> Result<Effects, Failure> {
    let mut ledger = read(session, server, waiters, plan).await?;
    ledger.recount(&plan.recounted);
    let mut effects = Effects::default();
    let mut waiting: Vec<(OwnerToken, Key)> = Vec::new();
    for (job, _) in batch.iter_mut().zip(&plan.takes).filter(|(_, takes)| **takes) {
        match job {
            Job::Acquire(claims, _, reply) => {
                let mut answers = Vec::with_capacity(claims.len());
                for claim in claims.iter() {
                    let ticket = waiters.known.number(&claim.owner);
                    if ticket > 0 {
                        ledger.remember(&claim.owner, ticket);
                    }
                    let acquired = ledger.attempt(claim, &prefix.all(claim));
                    match &acquired {
                        Acquired::Held { key, .. } if claim.waiting => waiting.push((claim.owner.clone(), key.clone())),
                        _ => effects.left.push(claim.owner.clone()),
                    }
                    answers.push(acquired);
                }
                reply.set(answers);
            }
            Job::Renew(claim, ttl, reply) => reply.set(ledger.renew(claim, &prefix.all(claim), *ttl)),
            Job::Transfer(claim, to, reply) => reply.set(ledger.transfer(claim, &prefix.all(claim), to)),
            Job::Release(claims, keep, reply) => {
                let release = |claim: &Claim| ledger.release(claim, &prefix.all(claim), *keep);
                reply.set(claims.iter().map(release).collect());
                effects.left.extend(claims.iter().map(|claim| claim.owner.clone()));
            }
            Job::ForceRelease(key, reply) => reply.set(ledger.force_release(&prefix.stored(key))),
            Job::Inspect(..) | Job::List(..) => {}
        }
    }
    let mut changes = ledger.finish();
    let mut tickets = write(session, server, &waiters.process, &changes).await?;
    effects.notices = std::mem::take(&mut changes.notices);
    effects.notices.retain(|notice| notice.engine.is_none());
    for (owner, key) in waiting {
        let left = ledger.busy_for(&prefix.stored(&key));
        match tickets.remove(owner.as_str()) {
            Some(ticket) => effects.entered.push((owner, key, ticket, left)),
            // Handed off in this transaction. Or another waiter has its ticket: the tables are new.
            None => {
                effects.notices.push(Notice::may_be_free(&owner));
                effects.left.push(owner);
            }
        }
    }
    Ok(effects)
}

/// Begins a transaction, locks the rows of the plan, and reads them and their queues.
async fn read(session: &Session, server: &Server, waiters: &Waiters, plan: &Plan) -> Result<Ledger, Failure> {
    let names: Vec<&[u8]> = plan.names.keys().map(Vec::as_slice).collect();
    let created: Vec<bool> = plan.names.values().copied().collect();
    // Each call removes one position at most, so that the first two are still known after all of them.
    let front = plan.owners.len() as i64 + 2;
    let sent = Moment::now();
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
        .ok_or_else(|| Failure::unexpected(&server.address, "no clock"))?;
    let now_us: i64 = get(server, first, 0)?;
    waiters.read_clock(sent, now_us);
    let mut found = BTreeMap::new();
    for row in &rows {
        if let Some(name) = get::<Option<StoredName>>(server, row, 1)? {
            let row = ledger::Row::read(get(server, row, 2)?, get(server, row, 3)?, get(server, row, 4)?);
            found.insert(name, row);
        }
    }
    let positions: Result<Vec<Position>, Failure> = queue
        .iter()
        .map(|row| position(server, row, &waiters.process))
        .collect();
    Ok(Ledger::new(now_us, found, positions?))
}

/// Reads a position in a queue.
fn position(server: &Server, row: &Row, process: &str) -> Result<Position, Failure> {
    let engine: String = get(server, row, 4)?;
    let host: Option<String> = get(server, row, 6)?;
    let pid: Option<i64> = get(server, row, 7)?;
    let waiter = Waiter {
        engine: (engine != process).then_some(engine),
        hold_ms: get(server, row, 5)?,
        holder: host
            .zip(pid)
            .map(|(host, pid)| Arc::new(Process { host, pid: pid as u32 })),
    };
    let (ticket, name, owner) = (get(server, row, 0)?, get(server, row, 1)?, get(server, row, 2)?);
    Ok(Position::read(ticket, name, owner, get(server, row, 3)?, waiter))
}

/// Writes the changes of a transaction, and commits it. Returns the tickets of the positions.
async fn write(
    session: &Session,
    server: &Server,
    process: &str,
    changes: &Changes,
) -> Result<HashMap<String, u64>, Failure> {
    let names: Vec<&[u8]> = changes.rows.iter().map(|(name, _)| name.as_slice()).collect();
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
        // This process has no need of a message.
        let of_others = |notice: &Notice| Some((notice.engine.clone()?, text_of(notice)));
        let (channels, texts): (Vec<String>, Vec<String>) = changes.notices.iter().filter_map(of_others).unzip();
        match channels.is_empty() {
            true => Ok(Vec::new()),
            false => session.query(Sql::Notify, &[&channels, &texts]).await,
        }
    };
    let update = async {
        match names.is_empty() {
            true => Ok(Vec::new()),
            false => update(session, &names, changes).await,
        }
    };
    let (leave, entered, notified, update, commit) = tokio::join!(
        biased;
        leave,
        enter(session, process, changes),
        notify,
        update,
        session.execute("COMMIT")
    );
    let entered = entered?;
    for outcome in [leave, notified, update] {
        outcome?;
    }
    commit?;
    let ticket = |row: &Row| Ok((get(server, row, 0)?, get::<i64>(server, row, 1)?.unsigned_abs()));
    entered.iter().map(ticket).collect()
}

/// Writes positions.
async fn enter(session: &Session, process: &str, changes: &Changes) -> Result<Vec<Row>, Failure> {
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
    let tickets: Vec<Option<i64>> = entered().map(|one| one.ticket).collect();
    let values: &super::session::Values<'_> = &[&owners, &names, &ends, &holds, &hosts, &pids, &tickets, &process];
    session.query(Sql::Enter, values).await
}

/// Writes the rows of names.
async fn update(session: &Session, names: &[&[u8]], changes: &Changes) -> Result<Vec<Row>, Failure> {
    let rows = || changes.rows.iter().map(|(_, row)| row);
    let holder = || rows().map(|row| row.holder.as_deref());
    let owners: Vec<Option<&str>> = rows().map(|row| row.owner.as_deref()).collect();
    let ends: Vec<i64> = rows().map(|row| row.expires_us).collect();
    let fences: Vec<i64> = rows().map(|row| row.fence).collect();
    let grants: Vec<bool> = rows().map(|row| row.is_granted).collect();
    let hosts: Vec<Option<&str>> = holder().map(|process| process.map(|one| one.host.as_str())).collect();
    let pids: Vec<Option<i64>> = holder().map(|process| process.map(|one| i64::from(one.pid))).collect();
    let metadata: Vec<Option<&str>> = rows().map(|row| row.metadata.as_deref()).collect();
    let values: &super::session::Values<'_> = &[&names, &owners, &ends, &fences, &grants, &hosts, &pids, &metadata];
    session.query(Sql::Write, values).await
}

/// Reads a page of leases, sorted by name. Returns the next page, if there may be one.
pub(super) async fn list(
    session: &Session,
    server: &Server,
    prefix: &Prefix,
    page: &Page,
) -> Result<(Vec<LockInfo>, Option<Page>), Failure> {
    let rows = session.query(Sql::List, &[&page.start, &page.end, &Page::SIZE]).await?;
    let last = rows.last().map(|last| get::<StoredName>(server, last, 0)).transpose()?;
    let next = last.and_then(|last| page.next(&last, rows.len()));
    let found: Result<Vec<LockInfo>, Failure> = rows.iter().map(|row| info(server, prefix, row)).collect();
    Ok((found?, next))
}

fn info(server: &Server, prefix: &Prefix, row: &Row) -> Result<LockInfo, Failure> {
    let name: StoredName = get(server, row, 0)?;
    let process = Process {
        host: get::<Option<String>>(server, row, 3)?.unwrap_or_default(),
        pid: get::<Option<i64>>(server, row, 4)?.unwrap_or_default() as u32,
    };
    let since_ms = get::<Option<i64>>(server, row, 5)?.unwrap_or_default().unsigned_abs();
    Ok(LockInfo {
        name: String::from_utf8_lossy(name.get(prefix.0.len()..).unwrap_or_default()).into_owned(),
        remaining: Some(micros(get(server, row, 1)?)),
        fence: Some(Fence(get::<i64>(server, row, 2)?.unsigned_abs())),
        holder: Some(Holder { process, since_ms }),
        metadata: get(server, row, 6)?,
        waiting: Some(get::<i64>(server, row, 7)?.unsigned_abs()),
    })
}

/// Returns a span of microseconds, zero when it is negative.
pub(super) fn micros(span: i64) -> Duration {
    Duration::from_micros(span.max(0).unsigned_abs())
}

/// Returns a value of a row.
pub(super) fn get<'r, T: FromSql<'r>>(server: &Server, row: &'r Row, column: usize) -> Result<T, Failure> {
    row.try_get(column).map_err(|error| server.failure(error))
}
