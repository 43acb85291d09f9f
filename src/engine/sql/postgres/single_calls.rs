//! The single statements, and the answers that they have for the jobs of a batch.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio_postgres::Row;

use super::session::{Server, Session, Values};
use super::statements::Sql;
use super::transaction::{self, Prefix, get, micros};
use super::worker::Outcome;
use crate::engine::sql::Page;
use crate::engine::sql::jobs::Job;
use crate::engine::sql::ledger::StoredName;
use crate::engine::{Acquired, Released, Renewed};
use crate::model::{Claim, Fence};

/// Releases claims of one name each. Jobs without an answer need a transaction.
pub(super) async fn release(session: &Session, server: &Server, prefix: &Prefix, jobs: &mut [Job]) -> Outcome<()> {
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
    let mut released: HashMap<StoredName, bool> = HashMap::new();
    if let ([name], [owner]) = (&names[..], &owners[..]) {
        for row in &session.query(Sql::ReleaseOne, &[name, owner]).await? {
            released.insert(name.clone(), get(server, row, 0)?);
        }
    } else {
        for row in &session.query(Sql::Release, &[&names, &owners]).await? {
            released.insert(get(server, row, 0)?, get(server, row, 1)?);
        }
    }
    for (job, name) in jobs.iter_mut().zip(&names) {
        if let (Job::Release(_, _, reply), Some(is_live)) = (job, released.remove(name)) {
            reply.set(vec![if is_live { Released::Freed } else { Released::NotHeld }]);
        }
    }
    Ok(())
}

/// Renews claims of one name each. Jobs without an answer need a transaction.
pub(super) async fn renew(session: &Session, server: &Server, prefix: &Prefix, jobs: &mut [Job]) -> Outcome<()> {
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
pub(super) async fn acquire(
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
    let mut fences: HashMap<StoredName, i64> = HashMap::new();
    let mut held: HashMap<StoredName, (String, Duration)> = HashMap::new();
    if let ([claim], [name]) = (&claims[..], &names[..]) {
        for row in &grant_one(session, claim, name).await? {
            let fence: Option<i64> = get(server, row, 0)?;
            fences.extend(fence.map(|fence| (name.clone(), fence)));
            if let Some(owner) = get::<Option<String>>(server, row, 1)? {
                held.insert(name.clone(), (owner, micros(get(server, row, 2)?)));
            }
        }
    } else {
        for row in &grant(session, &claims, &names).await? {
            let name: StoredName = get(server, row, 0)?;
            if let Some(owner) = get::<Option<String>>(server, row, 2)? {
                held.insert(name, (owner, micros(get(server, row, 3)?)));
            } else {
                fences.insert(name, get(server, row, 1)?);
            }
        }
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

pub(super) fn first_claim(job: &Job) -> Option<&Arc<Claim>> {
    match job {
        Job::Acquire(claims, ..) => claims.first(),
        _ => None,
    }
}

async fn grant_one(session: &Session, claim: &Claim, name: &StoredName) -> Outcome<Vec<Row>> {
    let (owner, ttl) = (claim.owner.as_str(), claim.ttl.as_millis() as i64);
    let (host, pid) = (claim.process.host.as_str(), i64::from(claim.process.pid));
    let values: &Values<'_> = &[name, &owner, &ttl, &host, &pid, &claim.metadata.as_deref()];
    session.query(Sql::AcquireOne, values).await
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
pub(super) async fn read(session: &Session, server: &Server, prefix: &Prefix, jobs: &mut [Job]) -> Outcome<()> {
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
