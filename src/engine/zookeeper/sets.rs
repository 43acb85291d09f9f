//! Attempts of claims with several names.
//!
//! # Behavior
//! A claim of several names waits for one name at a time. It keeps the entries of the names before that one, in which it is the
//! first, so that other callers cannot keep it from them in turn. All claims take names in the same order, so that none waits for
//! another in a circle.

use super::Store;
use super::acquire::ROUNDS;
use super::client::{Answer, Failure, Kind, Part, Request, Stat, code};
use super::layout::Child;
use super::own::{Node, Own, Phase};
use super::record::{Record, Use};
use crate::clock::Moment;
use crate::engine::Acquired;
use crate::model::{Claim, Fence, Key};

/// One name of a claim, as it was read.
pub(super) struct NameState {
    /// The entries, the oldest first.
    pub children: Vec<Child>,
    /// `None`: the folder does not exist.
    pub folder: Option<Stat>,
}

impl Store {
    /// Reads the entries of a folder, the oldest first.
    ///
    /// # Behavior
    /// An entry that this engine deletes has no owner here: a new attempt of the same claim must not count on it.
    pub(super) fn children(&self, key: &Key, names: &[String]) -> Vec<Child> {
        let mut children = Child::all(names);
        let ending = self.ending.lock();
        for child in children.iter_mut().filter(|_| !ending.is_empty()) {
            if ending.contains(&self.layout.entry(key, &child.name)) {
                child.owner = None;
            }
        }
        children
    }

    /// Reads the parts of [`Store::name_reads`].
    pub(super) fn name_states(&self, keys: &[Key], parts: &[Part]) -> Answer<Vec<NameState>> {
        if parts.len() != 2 * keys.len() {
            return Err(Failure::Malformed);
        }
        let state = |(key, parts): (&Key, &[Part])| match parts {
            [Part::Children(names), Part::Data(_, stat)] => Ok(NameState {
                children: self.children(key, names),
                folder: Some(*stat),
            }),
            [Part::Failed(code::NO_NODE), _] | [_, Part::Failed(code::NO_NODE)] => Ok(NameState {
                children: Vec::new(),
                folder: None,
            }),
            [Part::Failed(code), _] | [_, Part::Failed(code)] => Err(Failure::Refused(*code)),
            _ => Err(Failure::Malformed),
        };
        keys.iter().zip(parts.chunks(2)).map(state).collect()
    }

    /// Returns a read of the entries of several names at one point in time.
    pub(super) fn name_reads(&self, keys: &[Key]) -> Request {
        let reads = keys.iter().map(|key| self.layout.folder(key));
        let reads = reads.flat_map(|folder| [Request::children_only(&folder), Request::data(&folder)]);
        Request::multi_read(&reads.collect::<Vec<_>>())
    }

    /// Makes one attempt to acquire all names of a claim.
    pub(super) async fn attempt_set(&self, claim: &Claim) -> Answer<Acquired> {
        claim.mark_sent();
        let attempted = self.try_set(claim, Moment::now()).await;
        if attempted.is_err() {
            // The server may have executed a request: the next attempt and the release read what exists.
            self.forget(&claim.owner);
        }
        attempted
    }

    async fn try_set(&self, claim: &Claim, sent: Moment) -> Answer<Acquired> {
        let keys = claim.keys();
        let mut nodes = self.own.get(&claim.owner).map(|own| own.nodes).unwrap_or_default();
        // The first attempt expects that all names are free.
        let mut missing: Vec<&Key> = if nodes.is_empty() {
            keys.iter().collect()
        } else {
            Vec::new()
        };
        let mut extra: Vec<Node> = Vec::new();
        let mut marks = !nodes.is_empty();
        for _ in 0..ROUNDS {
            let changes = self.begin_changes(claim, &missing, &extra, marks);
            let read = self.client.call(self.name_reads(keys));
            let changed = match changes {
                Some(changes) => Some(changes.await),
                None => None,
            };
            match changed {
                Some(Err(Failure::Refused(code::NO_NODE))) => {
                    for key in &missing {
                        self.create_folder(key).await?;
                    }
                    continue;
                }
                Some(Err(failure)) => return Err(failure),
                Some(Ok(reply)) => {
                    let parts = reply.parts()?;
                    if parts.iter().any(|part| matches!(part, Part::Failed(_))) {
                        // A folder or an entry was deleted: nothing was changed.
                        for key in &missing {
                            self.create_folder(key).await?;
                        }
                        extra.clear();
                        continue;
                    }
                }
                None => {}
            }
            let reply = read.await?;
            let names = self.name_states(keys, &reply.parts()?)?;
            if self.delete_repeats(claim, &names).await?
                && let Some(fence) = self.adopt(claim, claim.ttl).await?
            {
                return Ok(Acquired::Granted { fence });
            }
            nodes = found_nodes(claim, &names, &nodes);
            let was_held = self
                .own
                .get(&claim.owner)
                .is_some_and(|own| own.phase != Phase::Waiting);
            if was_held && nodes.len() < keys.len() {
                // It has lost the lease of an earlier attempt.
                self.forget_entry(claim);
            }
            let is_mine = |child: Option<&Child>| child.is_none_or(|child| child.is_of(&claim.owner));
            let busy = names.iter().position(|name| !is_mine(name.children.first()));
            let wanted = match busy {
                Some(busy) if claim.waiting => &keys[..=busy],
                Some(_) => &[],
                None => keys,
            };
            missing = wanted
                .iter()
                .filter(|key| !nodes.iter().any(|node| node.key == **key))
                .collect();
            extra = nodes
                .iter()
                .filter(|node| !wanted.contains(&node.key))
                .cloned()
                .collect();
            match busy {
                None if missing.is_empty() => {
                    return self.grant_set(claim, sent, nodes, &names, (reply.session, marks)).await;
                }
                Some(busy) if missing.is_empty() => {
                    return self
                        .wait_set(claim, nodes, &extra, &names[busy], &keys[busy], reply.session)
                        .await;
                }
                _ => marks = true,
            }
        }
        Err(Failure::Refused(code::NO_NODE))
    }

    /// Sends the creations and deletions of a round as one step.
    fn begin_changes(
        &self,
        claim: &Claim,
        missing: &[&Key],
        extra: &[Node],
        marks: bool,
    ) -> Option<impl Future<Output = Answer> + Send + use<>> {
        let mut record = Record::new(claim);
        record.r#use = if marks { Use::Set } else { Use::Claim };
        let data = record.to_json();
        let create = |key: &&Key| {
            let path = self.layout.entry(key, &Child::prefix_of(&claim.owner));
            Request::create(&path, &data, self.layout.access, Kind::EphemeralSequential)
        };
        let mut requests: Vec<Request> = missing.iter().map(create).collect();
        requests.extend(extra.iter().map(|node| self.deletion(node)));
        (!requests.is_empty()).then(|| self.client.call(Request::multi(&requests)))
    }

    fn deletion(&self, node: &Node) -> Request {
        Request::delete(&self.layout.entry(&node.key, &node.child.name), -1)
    }

    /// Grants all names, in each of which the claim's entry is the oldest. `marked`: some of the entries are those of a waiter.
    async fn grant_set(
        &self,
        claim: &Claim,
        sent: Moment,
        nodes: Vec<Node>,
        names: &[NameState],
        (session, marked): (i64, bool),
    ) -> Answer<Acquired> {
        let known = self.own.get(&claim.owner);
        let fence = match known.as_ref().map(|own| own.phase) {
            Some(Phase::Held(fence)) => fence,
            _ => {
                let changes = names
                    .iter()
                    .filter_map(|name| name.folder.map(|stat| stat.last_child_change));
                Fence(changes.max().unwrap_or_default() as u64)
            }
        };
        let (record, is_held) = match known {
            Some(own) => (own.record, own.phase != Phase::Waiting),
            None => (Record::new(claim), false),
        };
        let own = Own {
            nodes,
            phase: Phase::Waiting,
            record,
            session,
            is_set: true,
            needs_token: claim.needs_token,
        };
        self.own.insert(&claim.owner, own);
        self.own.update(&claim.owner, |own| match is_held || !marked {
            true => own.phase = Phase::Held(fence),
            false => own.set_phase(Phase::Held(fence)),
        });
        if marked && !is_held {
            let _guard = self.writes.lock().await;
            if let Some(own) = self.own.get(&claim.owner) {
                let mut record = own.record.clone();
                (record.r#use, record.fence) = (Use::Claim, Some(fence.0));
                let answers = self.begin_write(&own, &record);
                self.finish_write(&claim.owner, answers, record).await?;
            }
        }
        self.begin_lease(claim, sent);
        self.confirm(session, sent, claim.ttl).await?;
        Ok(Acquired::Granted { fence })
    }

    /// Makes a claim wait for the name that is busy, or deletes its entries if it does not wait.
    async fn wait_set(
        &self,
        claim: &Claim,
        mut nodes: Vec<Node>,
        extra: &[Node],
        busy: &NameState,
        key: &Key,
        session: i64,
    ) -> Answer<Acquired> {
        nodes.retain(|node| !extra.iter().any(|other| other.key == node.key));
        let mut record = Record::new(claim);
        record.r#use = Use::Set;
        let is_marked = self
            .own
            .get(&claim.owner)
            .is_some_and(|own| own.nodes.len() == nodes.len());
        let mut requests: Vec<Request> = extra.iter().map(|node| self.deletion(node)).collect();
        if !is_marked {
            let data = record.to_json();
            let mark = |node: &Node| Request::set_data(&self.layout.entry(&node.key, &node.child.name), &data, -1);
            requests.extend(nodes.iter().map(mark));
        }
        let changes = (!requests.is_empty()).then(|| self.client.call(Request::multi(&requests)));
        if claim.waiting {
            let own = Own {
                nodes,
                phase: Phase::Waiting,
                record,
                session,
                is_set: true,
                needs_token: claim.needs_token,
            };
            self.own.insert(&claim.owner, own);
            self.wait(claim, key);
        } else {
            self.forget(&claim.owner);
        }
        let retry_after = match busy.children.first() {
            Some(oldest) => self.lease_of(key, oldest).await?,
            None => None,
        };
        if let Some(changes) = changes
            && changes
                .await?
                .parts()?
                .iter()
                .any(|part| matches!(part, Part::Failed(_)))
        {
            // An entry was deleted in the meantime: the next attempt reads what exists.
            self.forget(&claim.owner);
            return Err(Failure::Refused(code::NO_NODE));
        }
        Ok(Acquired::Held {
            key: key.clone(),
            retry_after,
        })
    }
}

/// Returns the entries of a claim that exist, with the versions that are known.
fn found_nodes(claim: &Claim, names: &[NameState], known: &[Node]) -> Vec<Node> {
    let found = |(key, name): (&Key, &NameState)| {
        let child = name.children.iter().find(|child| child.is_of(&claim.owner))?.clone();
        let before = known.iter().find(|node| node.key == *key && node.child == child);
        let version = before.map_or(-1, |node| node.version);
        Some(Node {
            key: key.clone(),
            child,
            version,
        })
    };
    claim.keys().iter().zip(names).filter_map(found).collect()
}
