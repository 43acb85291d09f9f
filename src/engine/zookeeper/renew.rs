//! Renewals and transfers.

use std::time::Duration;

use super::Store;
use super::acquire::ROUNDS;
use super::client::{Answer, Failure, Part, Request, code};
use super::layout::Child;
use super::own::{Node, Own, Phase};
use super::record::Record;
use super::release::Seen;
use crate::clock::Moment;
use crate::engine::{Renewal, Renewed};
use crate::model::{Claim, Fence, OwnerToken, Ttl};

/// The number of entries in one read.
const READ_SIZE: usize = 100;
/// The time between two reads of a fencing token that is not written yet, and the number of these reads.
pub(super) const TOKEN_POLL: Duration = Duration::from_millis(20);
pub(super) const TOKEN_POLLS: u32 = 25;

/// The requests that write the data of a claim's entries.
type Writes = Vec<std::pin::Pin<Box<dyn Future<Output = Answer> + Send>>>;

impl Store {
    /// Renews leases.
    ///
    /// # Behavior
    /// A read of all entries after a sync shows that none of them was deleted. The session certainly lasts for the leases. Nothing
    /// is written, unless a lease gets a longer ttl than before, or is that of another engine.
    pub(super) async fn renew(&self, renewals: &[Renewal<'_>]) -> Vec<Answer<Renewed>> {
        let started = Moment::now();
        // Before the read: a lease that ends meanwhile is not extended.
        let known: Vec<Option<Own>> = renewals
            .iter()
            .map(|renewal| {
                let owner = &renewal.claim.owner;
                let is_known = |own: &Own| matches!(own.phase, Phase::Held(_)) && own.has_all(renewal.claim.keys());
                let own = self.own.get(owner).filter(is_known)?;
                self.ends.extend(owner, started + renewal.ttl.duration()).map(|()| own)
            })
            .collect();
        let nodes: Vec<&Node> = known.iter().flatten().flat_map(|own| &own.nodes).collect();
        let synced = (!nodes.is_empty()).then(|| self.client.call_urgently(Request::sync("/")));
        let read = |nodes: &[&Node]| {
            let reads = nodes
                .iter()
                .map(|node| Request::data(&self.layout.entry(&node.key, &node.child.name)));
            self.client
                .call_urgently(Request::multi_read(&reads.collect::<Vec<_>>()))
        };
        let reads: Vec<_> = nodes.chunks(READ_SIZE).map(read).collect();
        let mut failure = match synced {
            Some(synced) => synced.await.err(),
            None => None,
        };
        let mut parts = Vec::with_capacity(nodes.len());
        for (read, asked) in reads.into_iter().zip(nodes.chunks(READ_SIZE)) {
            match read.await.and_then(|reply| Ok(reply.parts()?)) {
                Ok(answered) if answered.len() == asked.len() => parts.extend(answered),
                Ok(_) => failure = Some(Failure::Malformed),
                Err(error) => failure = Some(error),
            }
        }
        let mut parts = parts.into_iter();
        let mut answers = Vec::with_capacity(renewals.len());
        for (renewal, own) in renewals.iter().zip(&known) {
            answers.push(match (own, &failure) {
                (None, _) => self.adopt(renewal.claim, renewal.ttl).await.map(|fence| match fence {
                    Some(_) => Renewed::Extended,
                    None => Renewed::Lost,
                }),
                (Some(_), Some(failure)) => Err(failure.clone()),
                (Some(own), None) => {
                    let parts: Vec<Part> = parts.by_ref().take(own.nodes.len()).collect();
                    self.renewed(renewal, own, &parts, started).await
                }
            });
        }
        answers
    }

    /// Answers a renewal from the data of its entries.
    async fn renewed(&self, renewal: &Renewal<'_>, own: &Own, parts: &[Part], started: Moment) -> Answer<Renewed> {
        let (claim, ttl) = (renewal.claim, renewal.ttl);
        for part in parts {
            match part {
                Part::Data(..) => {}
                Part::Failed(code::NO_NODE) => {
                    self.forget(&claim.owner);
                    return Ok(Renewed::Lost);
                }
                Part::Failed(code) => return Err(Failure::Refused(*code)),
                _ => return Err(Failure::Malformed),
            }
        }
        {
            let _guard = self.writes.lock().await;
            if let Some(own) = self.own.get(&claim.owner).filter(|own| ttl > own.record.ttl()) {
                let mut record = own.record.clone();
                record.ttl = ttl.as_millis();
                let writes = self.begin_write(&own, &record);
                match self.finish_write(&claim.owner, writes, record).await {
                    Ok(()) => {}
                    Err(Failure::Refused(code::NO_NODE)) => return Ok(Renewed::Lost),
                    Err(failure) => return Err(failure),
                }
            }
        }
        self.confirm(own.session, started, ttl).await?;
        Ok(Renewed::Extended)
    }

    /// Sends the data of a claim's entries. Called with [`Store::writes`] locked.
    pub(super) fn begin_write(&self, own: &Own, record: &Record) -> Writes {
        let data = record.to_json();
        let write = |node: &Node| {
            let path = self.layout.entry(&node.key, &node.child.name);
            let write = self.client.call_urgently(Request::set_data(&path, &data, node.version));
            Box::pin(write) as std::pin::Pin<Box<dyn Future<Output = Answer> + Send>>
        };
        own.nodes.iter().map(write).collect()
    }

    /// Records the versions of data that was written. A claim whose entries another engine has changed is forgotten: that engine
    /// ends its lease.
    pub(super) async fn finish_write(&self, owner: &OwnerToken, writes: Writes, record: Record) -> Answer<()> {
        let mut versions = Vec::with_capacity(writes.len());
        for write in writes {
            match write.await {
                Ok(reply) => versions.push(reply.stat()?.version),
                Err(failure) => {
                    if matches!(failure, Failure::Refused(code::NO_NODE | code::BAD_VERSION)) {
                        self.forget(owner);
                    } else {
                        // The server may have written it.
                        self.own
                            .update(owner, |own| own.nodes.iter_mut().for_each(|node| node.version = -1));
                    }
                    return Err(failure);
                }
            }
        }
        self.own.update(owner, |own| {
            own.record = record;
            own.nodes
                .iter_mut()
                .zip(versions)
                .for_each(|(node, version)| node.version = version);
        });
        Ok(())
    }

    /// Reads the entries of a claim, if it holds all its names: each is of `claim.owner`, or of `other`. `None`: it does not.
    ///
    /// # Behavior
    /// Waits for a fencing token that the engine of the holder has not written yet.
    async fn held_entries(&self, claim: &Claim, other: Option<&OwnerToken>) -> Answer<Option<Vec<Seen>>> {
        let keys = claim.keys();
        for poll in 1.. {
            let names = self.look(keys).await?;
            let is_mine = |child: &Child| child.is_of(&claim.owner) || other.is_some_and(|other| child.is_of(other));
            let seen = self.see(keys, &names, is_mine).await?;
            let holds = |seen: &Seen| seen.is_holder && seen.record.is_some();
            if seen.len() != keys.len() || !seen.iter().all(holds) {
                return Ok(None);
            }
            // A lease of this session that this engine does not know was never granted: no task writes its token.
            let session = self.client.state().id;
            let is_known = self.own.get(&claim.owner).is_some();
            let waits = |seen: &Seen| {
                let has_token = seen.record.as_ref().is_some_and(|record| record.fence.is_some());
                !has_token && (is_known || seen.stat.session != session)
            };
            if poll >= TOKEN_POLLS || !seen.iter().any(waits) {
                return Ok(Some(seen));
            }
            tokio::time::sleep(TOKEN_POLL).await;
        }
        Ok(None)
    }

    /// Makes a lease one of this engine, which another one or an earlier attempt has created, and extends it. Returns its fencing
    /// token. `None`: the owner does not hold all names.
    pub(super) async fn adopt(&self, claim: &Claim, ttl: Ttl) -> Answer<Option<Fence>> {
        for _ in 0..ROUNDS {
            let sent = Moment::now();
            let Some(seen) = self.held_entries(claim, None).await? else {
                return Ok(None);
            };
            let session = seen.first().map_or(0, |seen| seen.stat.session);
            let record = shared_record(claim, ttl, &seen);
            let fence = fence_of(&seen);
            let own = Own {
                nodes: seen.iter().map(|seen| seen.node.clone()).collect(),
                phase: Phase::Held(fence),
                session,
                record: record.clone(),
                is_set: seen.len() > 1,
                needs_token: claim.needs_token,
            };
            let end = Moment::now() + record.ttl().duration();
            let written = {
                let _guard = self.writes.lock().await;
                let writes = self.begin_write(&own, &record);
                self.own.insert(&claim.owner, own);
                self.finish_write(&claim.owner, writes, record).await
            };
            match written {
                Ok(()) => {
                    self.ends.insert(claim.owner.clone(), (), end);
                    self.entries.leave(&claim.owner);
                    // Only another engine knows until when its session lasts.
                    if session == self.client.state().id {
                        self.confirm(session, sent, ttl).await?;
                    }
                    return Ok(Some(fence));
                }
                Err(Failure::Refused(code::NO_NODE | code::BAD_VERSION)) => {}
                Err(failure) => {
                    self.own.remove(&claim.owner);
                    return Err(failure);
                }
            }
        }
        Err(Failure::Refused(code::BAD_VERSION))
    }

    /// Transfers every name of a claim to another owner.
    pub(super) async fn transfer(&self, claim: &Claim, to: &OwnerToken) -> Answer<Renewed> {
        for _ in 0..ROUNDS {
            let sent = Moment::now();
            let Some(seen) = self.held_entries(claim, Some(to)).await? else {
                return Ok(Renewed::Lost);
            };
            let mut record = shared_record(claim, claim.ttl, &seen);
            (record.host, record.pid) = (claim.process.host.clone(), claim.process.pid);
            let fence = fence_of(&seen);
            let (done, old): (Vec<&Seen>, Vec<&Seen>) = seen.iter().partition(|seen| seen.node.child.is_of(to));
            let mut requests: Vec<Node> = old.iter().map(|seen| seen.node.clone()).collect();
            let replaces = !requests.is_empty();
            let session = if replaces {
                let reply = self.client.call(self.replacement(&requests, to, &record)).await?;
                if reply.parts()?.iter().any(|part| matches!(part, Part::Failed(_))) {
                    continue;
                }
                reply.session
            } else {
                self.client.state().id
            };
            for node in &mut requests {
                if let Some(child) = Child::parse(&node.child.replaced(to)) {
                    (node.child, node.version) = (child, 0);
                }
            }
            let mut nodes = requests;
            nodes.extend(done.iter().map(|seen| seen.node.clone()));
            nodes.sort_by(|one, other| one.key.cmp(&other.key));
            let end = Moment::now() + record.ttl().duration();
            let is_set = nodes.len() > 1;
            let own = Own {
                nodes,
                phase: Phase::Held(fence),
                record,
                session,
                is_set,
                needs_token: claim.needs_token,
            };
            self.own.insert(to, own);
            self.ends.insert(to.clone(), (), end);
            self.confirm(session, sent, claim.ttl).await?;
            return Ok(Renewed::Extended);
        }
        Err(Failure::Refused(code::BAD_VERSION))
    }
}

/// Returns the data of a lease with a ttl that is not shorter than the one before.
fn shared_record(claim: &Claim, ttl: Ttl, seen: &[Seen]) -> Record {
    let mut record = seen
        .iter()
        .find_map(|seen| seen.record.clone())
        .unwrap_or_else(|| Record::new(claim));
    let ttls = seen.iter().filter_map(|seen| seen.record.as_ref()).map(Record::ttl);
    record.ttl = ttls.fold(ttl, Ttl::max).as_millis();
    if let Some(stat) = seen.first().map(|seen| seen.stat) {
        record.since = record.since.or(Some(stat.created_ms.max(0) as u64));
    }
    record.fence = Some(fence_of(seen).0);
    record
}

/// Returns the fencing token of a lease.
fn fence_of(seen: &[Seen]) -> Fence {
    let written = seen
        .iter()
        .filter_map(|seen| seen.record.as_ref()?.fence())
        .map(|fence| fence.0)
        .max();
    let changes = seen.iter().map(|seen| seen.folder.last_child_change as u64).max();
    Fence(written.or(changes).unwrap_or_default())
}
