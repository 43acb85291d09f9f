//! The task that uses the connection of single statements, and receives all calls.
//!
//! A statement is a transaction of its own, of up to 64 calls of a kind for names without a queue. Calls that it does not answer
//! go to the transactions (`worker.rs`): of several names, for a name with a queue, of waiters that found the name busy, and where
//! another transaction has locked the row.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_postgres::Row;

use super::error::Kind;
use super::session::{Server, Session, Slot, Values};
use super::statements::Sql;
use super::transaction::{self, EXPIRED_POSITION_KEPT_MS, Prefix, get, micros};
use super::waiters::Waiters;
use super::worker::{Names, Outcome, cause};
use crate::engine::local_waiters::{HEARTBEAT_INTERVAL, RESERVATION};
use crate::engine::sql::Page;
use crate::engine::sql::jobs::{Job, Receiver, Sender};
use crate::engine::sql::ledger::StoredName;
use crate::engine::{Acquired, Released, Renewed, WAITER_LIVENESS};
use crate::model::{Claim, Fence, Key, OwnerToken};

/// The time between two sweeps of a process that makes calls; a random part is added.
const SWEEP_PAUSE: Duration = Duration::from_secs(300);
/// How long a free name keeps its row, and its last fencing token, in seconds.
const FREE_ROW_KEPT_S: i64 = 3600;
/// Maximum number of rows that one statement of a sweep removes.
const SWEEP_LIMIT: i64 = 500;
/// Maximum number of names of one transaction of a sweep.
const SWEEP_NAMES: i64 = 64;

/// The owners of attempts in the queue of the transactions, or in one. Their releases have to follow them.
#[derive(Default)]
struct Forwarded(Mutex<HashMap<OwnerToken, usize>>);

/// Attempts of the transactions. Dropping it forgets their owners.
struct ForwardedAttempts {
    forwarded: Arc<Forwarded>,
    owners: Vec<OwnerToken>,
}

impl Drop for ForwardedAttempts {
    fn drop(&mut self) {
        let mut attempts = self.forwarded.0.lock();
        for owner in &self.owners {
            if let Some(count) = attempts.get_mut(owner) {
                *count -= 1;
                if *count == 0 {
                    attempts.remove(owner);
                }
            }
        }
    }
}

impl Forwarded {
    fn add(self: &Arc<Self>, claims: &[Arc<Claim>]) -> ForwardedAttempts {
        let owners: Vec<OwnerToken> = claims.iter().map(|claim| claim.owner.clone()).collect();
        let mut attempts = self.0.lock();
        for owner in &owners {
            *attempts.entry(owner.clone()).or_default() += 1;
        }
        drop(attempts);
        ForwardedAttempts {
            forwarded: self.clone(),
            owners,
        }
    }

    fn has(&self, owner: &OwnerToken) -> bool {
        self.0.lock().contains_key(owner)
    }
}

/// The connection and what the calls need.
pub(super) struct SingleWorker {
    pub server: Arc<Server>,
    pub slot: Slot,
    pub prefix: Prefix,
    pub waiters: Arc<Waiters>,
    /// The names whose waiters need a check.
    pub checks: mpsc::UnboundedReceiver<Vec<Key>>,
    /// The queue of the transactions.
    pub transactions: Sender,
    pub names: mpsc::UnboundedSender<Names>,
    /// The task of the transactions.
    pub worker: JoinHandle<()>,
    pub forwarded: ForwardedOwners,
    pub heartbeat_at: Option<Instant>,
}

/// The attempts that a [`SingleWorker`] has forwarded.
#[derive(Default)]
pub(super) struct ForwardedOwners(Arc<Forwarded>);

/// The jobs of a batch by what executes them.
#[derive(Default)]
struct Batch {
    reads: Vec<Job>,
    releases: Vec<Job>,
    renewals: Vec<Job>,
    /// Attempts for different names.
    attempts: Vec<Job>,
    /// Attempts for names of `attempts`.
    repeated: Vec<Job>,
    transactions: Vec<Job>,
}

impl SingleWorker {
    /// Executes jobs until the last sender is gone, then closes the connections.
    pub(super) async fn run(mut self, mut jobs: Receiver) {
        let mut batch = Vec::new();
        // A process without calls sends nothing.
        let mut sweep_at: Option<Instant> = None;
        loop {
            let sweep = async {
                match sweep_at {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                Some(names) = self.checks.recv() => self.check(names).await,
                next = jobs.next(&mut batch) => {
                    if !next {
                        break;
                    }
                    let batch = self.sorted(batch.drain(..));
                    self.execute(batch).await;
                    sweep_at = sweep_at.or_else(|| Some(Instant::now() + SWEEP_PAUSE.mul_f64(1.0 + fastrand::f64())));
                }
                () = sweep => {
                    sweep_at = None;
                    if let Err(failure) = self.sweep().await {
                        tracing::debug!(%failure, "a sweep failed");
                    }
                }
            }
        }
        drop((self.transactions, self.names));
        let _ = self.worker.await;
    }

    /// Sorts the jobs of a batch by what executes them. Starts the attempts of single statements.
    fn sorted(&self, jobs: impl Iterator<Item = Job>) -> Batch {
        let mut batch = Batch::default();
        let mut names: Vec<Key> = Vec::new();
        for job in jobs {
            let part = match &job {
                Job::Inspect(..) | Job::List(..) => &mut batch.reads,
                Job::Renew(claim, ..) if claim.keys().len() == 1 => &mut batch.renewals,
                Job::Release(claims, keep, _)
                    if keep.is_zero()
                        && matches!(&claims[..], [claim] if claim.keys().len() == 1)
                        && !self.forwarded.0.has(&claims[0].owner) =>
                {
                    &mut batch.releases
                }
                Job::Acquire(claims, ticket, _) if matches!(&claims[..], [claim] if claim.keys().len() == 1) => {
                    // Mark before the start: a caller that can no longer cancel reads the marks.
                    claims[0].mark_sent();
                    if !ticket.start() {
                        continue;
                    }
                    let name = &claims[0].keys()[0];
                    if names.contains(name) {
                        &mut batch.repeated
                    } else {
                        names.push(name.clone());
                        &mut batch.attempts
                    }
                }
                _ => &mut batch.transactions,
            };
            part.push(job);
        }
        batch
    }

    /// Sends a job to the transactions.
    fn forward(&self, job: Job) {
        if let Job::Acquire(claims, ticket, _) = &job {
            ticket.attach(self.forwarded.0.add(claims));
        }
        self.transactions.send(job);
    }

    async fn execute(&mut self, mut batch: Batch) {
        batch.transactions.drain(..).for_each(|job| self.forward(job));
        let session = match self.slot.session().await {
            Ok(session) => session,
            Err(failure) => {
                let Batch {
                    reads,
                    releases,
                    renewals,
                    attempts,
                    repeated,
                    ..
                } = batch;
                let all = [reads, releases, renewals, attempts, repeated].into_iter().flatten();
                return all.for_each(|job| job.answer(Some(&failure)));
            }
        };
        let (prefix, server) = (&self.prefix, &*self.server);
        let (released, renewed, acquired, read) = tokio::join!(
            biased;
            session.within_limit(release(session, server, prefix, &mut batch.releases)),
            session.within_limit(renew(session, server, prefix, &mut batch.renewals)),
            session.within_limit(acquire(session, server, prefix, &mut batch.attempts, &mut batch.repeated)),
            session.within_limit(read(session, server, prefix, &mut batch.reads)),
        );
        let parts = [
            (batch.releases, self.slot.settle(released)),
            (batch.renewals, self.slot.settle(renewed)),
            (batch.attempts, self.slot.settle(acquired.clone())),
            (batch.repeated, acquired),
        ];
        for (jobs, outcome) in parts {
            // A transaction reads committed rows, and executes each job on its own if one is the cause.
            let is_final = outcome
                .as_ref()
                .is_err_and(|failure| !matches!(failure.kind(), Kind::Conflict | Kind::Permanent));
            for job in jobs {
                if job.is_answered() || is_final {
                    job.answer(cause(&outcome));
                } else {
                    self.forward(job);
                }
            }
        }
        let read = self.slot.settle(read);
        batch.reads.into_iter().for_each(|job| job.answer(cause(&read)));
    }

    /// Sends the heartbeat of this process if it is due, and checks what its waiters wait for.
    async fn check(&mut self, mut names: Vec<Key>) {
        while let Ok(more) = self.checks.try_recv() {
            names.extend(more);
        }
        names.sort_unstable();
        names.dedup();
        if let Err(failure) = self.check_names(&names).await {
            // Each waiter makes an attempt, gets the error itself, and knows its own deadline.
            tracing::debug!(%failure, "a heartbeat failed");
            names.iter().for_each(|key| self.waiters.known.wake(key));
        }
    }

    async fn check_names(&mut self, names: &[Key]) -> Outcome<()> {
        let now = Instant::now();
        let is_due = self
            .heartbeat_at
            .is_none_or(|at| now - at >= HEARTBEAT_INTERVAL * 3 / 4);
        let stored: Vec<StoredName> = names.iter().map(|key| self.prefix.stored(key)).collect();
        let process = &self.waiters.process;
        let session = self.slot.session().await?;
        let statements = async {
            let liveness = WAITER_LIVENESS.as_millis() as i64;
            let heartbeat = async {
                match is_due {
                    true => session.query(Sql::Heartbeat, &[process, &liveness]).await,
                    false => Ok(Vec::new()),
                }
            };
            let (heartbeat, called, checked) = tokio::join!(
                biased;
                heartbeat,
                async { session.query(Sql::Called, &[process]).await },
                async { session.query(Sql::Check, &[&stored]).await },
            );
            heartbeat?;
            Ok((called?, checked?))
        };
        let outcome = session.within_limit(statements).await;
        let (called, checked) = self.slot.settle(outcome)?;
        if is_due {
            self.heartbeat_at = Some(now);
        }
        for row in &called {
            self.waiters.notify(get(&self.server, row, 0)?);
        }
        let mut free = Vec::new();
        for row in &checked {
            let name: StoredName = get(&self.server, row, 0)?;
            let Some(key) = stored.iter().position(|one| *one == name).map(|index| &names[index]) else {
                continue;
            };
            let lease: Option<i64> = get(&self.server, row, 1)?;
            let first: Option<i64> = get(&self.server, row, 2)?;
            let is_called: Option<bool> = get(&self.server, row, 3)?;
            match (lease, first, is_called) {
                (Some(left), ..) | (None, Some(left), Some(true)) => {
                    self.waiters.set_busy_for(key, micros(left));
                }
                (None, Some(_), _) => {
                    self.waiters.set_busy_for(key, RESERVATION);
                    free.push(name);
                }
                // The positions of this process have expired: its waiters enter the queue again.
                (None, None, _) => self.waiters.known.wake(key),
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

    /// Removes rows of names that have been free for long, and positions of waiters that ended long ago.
    async fn sweep(&mut self) -> Outcome<()> {
        loop {
            let session = self.slot.session().await?;
            let statements = async {
                let swept = session.query(Sql::Sweep, &[&FREE_ROW_KEPT_S, &SWEEP_LIMIT]).await?;
                let abandoned = session.query(Sql::Abandoned, &[&EXPIRED_POSITION_KEPT_MS, &SWEEP_NAMES]);
                Ok((swept.len() as i64, abandoned.await?))
            };
            let outcome = session.within_limit(statements).await;
            let (swept, abandoned) = self.slot.settle(outcome)?;
            let names: Outcome<Vec<StoredName>> = abandoned.iter().map(|row| get(&self.server, row, 0)).collect();
            let names = names?;
            if !names.is_empty() {
                let _ = self.names.send(Names::Abandoned(names));
            }
            if swept < SWEEP_LIMIT {
                return Ok(());
            }
        }
    }
}

/// Releases claims of one name each. Jobs without an answer need a transaction.
async fn release(session: &Session, server: &Server, prefix: &Prefix, jobs: &mut [Job]) -> Outcome<()> {
    if jobs.is_empty() {
        return Ok(());
    }
    let claims = || {
        jobs.iter().filter_map(|job| match job {
            Job::Release(claims, ..) => claims.first(),
            _ => None,
        })
    };
    let names: Vec<StoredName> = claims().map(|claim| prefix.stored(&claim.keys()[0])).collect();
    let owners: Vec<&str> = claims().map(|claim| claim.owner.as_str()).collect();
    let rows = session.query(Sql::Release, &[&names, &owners]).await?;
    let mut released: HashMap<StoredName, bool> = HashMap::new();
    for row in &rows {
        released.insert(get(server, row, 0)?, get(server, row, 1)?);
    }
    for (job, name) in jobs.iter_mut().zip(&names) {
        if let (Job::Release(_, _, reply), Some(is_live)) = (job, released.remove(name)) {
            reply.set(vec![if is_live { Released::Freed } else { Released::NotHeld }]);
        }
    }
    Ok(())
}

/// Renews claims of one name each. Jobs without an answer need a transaction.
async fn renew(session: &Session, server: &Server, prefix: &Prefix, jobs: &mut [Job]) -> Outcome<()> {
    if jobs.is_empty() {
        return Ok(());
    }
    let renewals = || {
        jobs.iter().filter_map(|job| match job {
            Job::Renew(claim, ttl, _) => Some((claim, ttl)),
            _ => None,
        })
    };
    let names: Vec<StoredName> = renewals().map(|(claim, _)| prefix.stored(&claim.keys()[0])).collect();
    let owners: Vec<&str> = renewals().map(|(claim, _)| claim.owner.as_str()).collect();
    let ttls: Vec<i64> = renewals().map(|(_, ttl)| ttl.as_millis() as i64).collect();
    let rows = session.query(Sql::Renew, &[&names, &owners, &ttls]).await?;
    let extended: Outcome<Vec<&str>> = rows.iter().map(|row| get(server, row, 0)).collect();
    let extended = extended?;
    for job in jobs {
        if let Job::Renew(claim, _, reply) = job
            && extended.contains(&claim.owner.as_str())
        {
            reply.set(Renewed::Extended);
        }
    }
    Ok(())
}

/// Makes attempts for one name each. `repeated`: attempts for the same names. Jobs without an answer need a transaction.
async fn acquire(
    session: &Session,
    server: &Server,
    prefix: &Prefix,
    jobs: &mut [Job],
    repeated: &mut [Job],
) -> Outcome<()> {
    if jobs.is_empty() {
        return Ok(());
    }
    let claims: Vec<Arc<Claim>> = jobs.iter().filter_map(first_claim).cloned().collect();
    let names: Vec<StoredName> = claims.iter().map(|claim| prefix.stored(&claim.keys()[0])).collect();
    let (granted, holders) = tokio::join!(
        biased;
        grant(session, &claims, &names),
        async { session.query(Sql::Holders, &[&names]).await },
    );
    let mut fences: HashMap<StoredName, i64> = HashMap::new();
    for row in &granted? {
        fences.insert(get(server, row, 0)?, get(server, row, 1)?);
    }
    let mut held: HashMap<StoredName, (String, Duration)> = HashMap::new();
    for row in &holders? {
        held.insert(
            get(server, row, 0)?,
            (get(server, row, 1)?, micros(get(server, row, 2)?)),
        );
    }
    for job in jobs.iter_mut().chain(repeated) {
        let Job::Acquire(claims, _, reply) = job else { continue };
        let claim = &claims[0];
        let key = &claim.keys()[0];
        let name = prefix.stored(key);
        if let Some(fence) = fences.remove(&name) {
            // The first job of each name.
            reply.set(vec![Acquired::Granted {
                fence: Fence(fence.unsigned_abs()),
            }]);
        } else if let Some((owner, left)) = held.get(&name)
            && !claim.waiting
            && owner != claim.owner.as_str()
        {
            let (key, retry_after) = (key.clone(), Some(*left));
            reply.set(vec![Acquired::Held { key, retry_after }]);
        }
    }
    Ok(())
}

fn first_claim(job: &Job) -> Option<&Arc<Claim>> {
    match job {
        Job::Acquire(claims, ..) => claims.first(),
        _ => None,
    }
}

async fn grant(session: &Session, claims: &[Arc<Claim>], names: &[StoredName]) -> Outcome<Vec<Row>> {
    let owners: Vec<&str> = claims.iter().map(|claim| claim.owner.as_str()).collect();
    let ttls: Vec<i64> = claims.iter().map(|claim| claim.ttl.as_millis() as i64).collect();
    let hosts: Vec<&str> = claims.iter().map(|claim| claim.process.host.as_str()).collect();
    let pids: Vec<i64> = claims.iter().map(|claim| i64::from(claim.process.pid)).collect();
    let metadata: Vec<Option<&str>> = claims.iter().map(|claim| claim.metadata.as_deref()).collect();
    let values: &Values<'_> = &[&names, &owners, &ttls, &hosts, &pids, &metadata];
    session.query(Sql::Acquire, values).await
}

/// Executes jobs that only read.
async fn read(session: &Session, server: &Server, prefix: &Prefix, jobs: &mut [Job]) -> Outcome<()> {
    for job in jobs {
        match job {
            Job::Inspect(key, reply) => {
                let page = Page::of_name(prefix.stored(key));
                let (mut found, _) = transaction::list(session, server, prefix, &page).await?;
                reply.set(found.pop());
            }
            Job::List(page, reply) => reply.set(transaction::list(session, server, prefix, page).await?),
            _ => {}
        }
    }
    Ok(())
}
