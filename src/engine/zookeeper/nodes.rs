//! The requests for entries.

use super::client::{Access, Answer, Failure as Refusal, Kind, Part, Request, Stat, code};
use super::layout::Child;
use super::store::Zookeeper;
use crate::engine::entries::{Record, Seen, Stored, granted, now_ms};
use crate::model::{Claim, Key, OwnerToken, Sums};

/// How often a request is repeated because a folder or an entry was deleted in the meantime.
pub(super) const ROUNDS: usize = 5;

/// The errors of a part of a multi after which it is repeated, and those of the parts around it.
const PASSING: [i32; 4] = [code::OK, code::ROLLED_BACK, code::NO_NODE, code::NODE_EXISTS];
/// The number of entries in one read of their data.
const READ_SIZE: usize = 500;
/// The last number of an entry that is used. The server repeats the number 2^31 - 1 for ever.
const LAST_NUMBER: u64 = 2_000_000_000;

/// The entries of a name, the oldest first, and the last change of their folder.
type Children = (Vec<Child>, u64);

impl Zookeeper {
    /// Creates the path of the URL, if it is missing.
    pub(super) async fn chroot(&self) -> Answer<()> {
        let chroot = self.layout.chroot.as_str();
        match self.client.call(Request::exists(self.layout.root())).await {
            Err(Refusal::Refused(code::NO_NODE)) => {}
            other => return other.map(|_| ()),
        }
        let ends = chroot.match_indices('/').skip(1).map(|(at, _)| at);
        for end in ends.chain([chroot.len()]) {
            // The parents of the path belong to everyone: other programs may use them, too.
            let is_last = end == chroot.len();
            let access = if is_last { self.layout.access } else { Access::Everyone };
            let create = Request::create(&chroot[..end], &[], access, Kind::Persistent);
            match self.client.call(create).await {
                Ok(_) | Err(Refusal::Refused(code::NODE_EXISTS)) => {}
                Err(refusal) => return Err(refusal),
            }
        }
        Ok(())
    }

    pub(super) fn path(&self, entry: &Stored) -> String {
        self.layout.entry(&entry.name, &entry.id)
    }

    /// Reads the entries of several names at one point in time. The request is queued at once.
    pub(super) fn list<'n>(&self, names: &'n [Key]) -> impl Future<Output = Answer<Vec<Children>>> + Send + use<'n> {
        let folders = names.iter().map(|name| self.layout.folder(name));
        let reads = folders.flat_map(|folder| [Request::children(&folder), Request::data(&folder)]);
        let read = self.client.call(Request::multi_read(&reads.collect::<Vec<_>>()));
        async move {
            let parts = read.await.map_err(|refusal| refusal.of(names))?.parts()?;
            if parts.len() != 2 * names.len() {
                return Err(Refusal::Malformed);
            }
            parts.chunks(2).map(Self::children).collect()
        }
    }

    fn children(parts: &[Part]) -> Answer<Children> {
        match parts {
            [Part::Children(names), Part::Data(_, stat)] => Ok((Child::all(names), stat.last_child_change as u64)),
            [Part::Failed(code::NO_NODE), _] | [_, Part::Failed(code::NO_NODE)] => Ok((Vec::new(), 0)),
            [Part::Failed(code), _] | [_, Part::Failed(code)] => Err(Refusal::Refused(*code)),
            _ => Err(Refusal::Malformed),
        }
    }

    /// Reads names after the answer to `first`, which is sent together with the read.
    pub(super) async fn read_after(
        &self,
        first: Request,
        names: &[Key],
        owner: Option<&OwnerToken>,
    ) -> Answer<Vec<Seen>> {
        let first = self.client.call(first);
        let list = self.list(names);
        first.await?;
        let seen = self.seen(names, owner, list.await?, &[]).await?;
        self.without_ended(names, owner, seen).await
    }

    /// Reads the data of entries, except of those in `known`: of all granted ones, or, for an owner, of the oldest one, its own, and those
    /// that keep a name busy. Entries of a shared name that were deleted since are missing, except that of the owner.
    pub(super) async fn seen(
        &self,
        names: &[Key],
        owner: Option<&OwnerToken>,
        mut found: Vec<Children>,
        known: &[Stored],
    ) -> Answer<Vec<Seen>> {
        for _ in 0..ROUNDS {
            let is_own = |child: &&Child| owner.is_some_and(|owner| child.is_of(owner));
            let mut wanted: Vec<(&Key, &Child)> = Vec::new();
            for (name, (children, _)) in names.iter().zip(&found) {
                let own = children.iter().position(|child| is_own(&child));
                let (held, _) = Child::granted(children);
                let is_wanted = |(index, child): &(usize, &Child)| {
                    let is_needed = *index == 0 || owner.is_none() || Child::is_kept(&child.name);
                    Some(*index) == own || *index < held && is_needed
                };
                let all = children.iter().enumerate().filter(is_wanted);
                wanted.extend(all.map(|(_, child)| (name, child)));
                // A repeated request has created more than one.
                for child in children.iter().filter(is_own).skip(1) {
                    let delete = Request::delete(&self.layout.entry(name, &child.name), -1);
                    is_done(self.client.call(delete).await)?;
                }
            }
            let find = |entries: &[Stored], name: &Key, child: &Child| {
                let is_it = |entry: &&Stored| entry.name == *name && *entry.id == *child.name;
                entries.iter().find(is_it).cloned()
            };
            let is_unknown = |(name, child): &(&Key, &Child)| find(known, name, child).is_none();
            let unknown: Vec<_> = wanted.into_iter().filter(is_unknown).collect();
            let mut entries = known.to_vec();
            let mut is_changed = false;
            for unknown in unknown.chunks(READ_SIZE) {
                let read = |(name, child): &(&Key, &Child)| Request::data(&self.layout.entry(name, &child.name));
                let reads: Vec<_> = unknown.iter().map(read).collect();
                let parts = self.client.call(Request::multi_read(&reads)).await?.parts()?;
                for ((name, child), part) in unknown.iter().zip(parts) {
                    match part {
                        Part::Data(data, stat) => entries.push(child.stored(name, &data, &stat)),
                        // It was deleted since.
                        Part::Failed(code::NO_NODE) => is_changed |= !name.is_shared() || is_own(child),
                        Part::Failed(code) => return Err(Refusal::Refused(code)),
                        _ => return Err(Refusal::Malformed),
                    }
                }
            }
            if !is_changed {
                let seen = names.iter().zip(&found).map(|(name, (children, at))| {
                    let entry = |child: &Child| find(&entries, name, child);
                    let (held, sums) = Child::granted(children);
                    Seen {
                        at: *at,
                        granted: children[..held].iter().filter_map(entry).collect(),
                        own: children.iter().find(is_own).and_then(entry),
                        sums,
                        waiting: children.len() - held,
                    }
                });
                return Ok(seen.collect());
            }
            found = self.list(names).await?;
        }
        Err(Refusal::Refused(code::NO_NODE))
    }

    /// Returns the new entry of a waiting claim and those before it that show that it is not granted, and all that is known of the oldest
    /// one. `None`: it may be granted, or the mirror is not that of the connection.
    fn mirrored(&self, claim: &Claim, created: &[Stored]) -> Option<(Vec<Children>, Stored)> {
        let ([name], [created], true) = (claim.keys(), created, claim.waiting) else {
            return None;
        };
        let prefix = Child::prefix_of(&claim.owner, claim.share);
        let ids = self.local.mirror(name, |mirror| mirror.waits(&prefix))??;
        let children: Vec<Child> = ids.iter().filter_map(|id| Child::parse(id)).collect();
        let oldest = Stored {
            record: None,
            ..children.first()?.entry(name, 0, Record::default())
        };
        (*children.last()?.name == *created.id).then(|| (vec![(children, 0)], oldest))
    }

    pub(super) async fn changed(
        &self,
        claim: &Claim,
        create: &[Key],
        mut remove: &[Stored],
        is_first: bool,
    ) -> Answer<Vec<Seen>> {
        let mut record = Record::new(claim);
        // At first all names may be free.
        record.set &= !is_first;
        let data = record.to_json();
        let mut missing: Vec<&Key> = Vec::new();
        for _ in 0..ROUNDS {
            // Together with their first entries: the server never removes a container that had none.
            let folders = missing
                .iter()
                .map(|name| Request::create(&self.layout.folder(name), &[], self.layout.access, Kind::Container));
            let creations = create.iter().map(|name| {
                let path = self.layout.entry(name, &Child::prefix_of(&claim.owner, claim.share));
                Request::create(&path, &data, self.layout.access, Kind::EphemeralSequential)
            });
            let deletions = remove.iter().map(|entry| Request::delete(&self.path(entry), -1));
            let changes: Vec<_> = folders.chain(creations).chain(deletions).collect();
            let changed = self.client.call(Request::multi(&changes));
            let listing = || self.list(claim.keys());
            // The event of the creation arrives before the answer.
            let is_mirrored =
                matches!(claim.keys(), [name] if claim.waiting && self.local.mirror(name, |_| ()).is_some());
            let mut list = (!is_mirrored).then(listing);
            let reply = changed.await?;
            let parts = reply.parts()?;
            let failed = |part: &Part| match part {
                Part::Failed(code) => Some(*code),
                _ => None,
            };
            if let Some(code) = parts.iter().filter_map(failed).find(|code| !PASSING.contains(code)) {
                return Err(Refusal::Refused(code));
            }
            if parts.iter().any(|part| failed(part).is_some()) {
                // A folder or an entry was deleted: nothing was changed.
                if !missing.is_empty() {
                    self.chroot().await?;
                }
                let found = list.take().unwrap_or_else(listing).await?;
                let is_missing = |(name, (_, at)): &(&Key, Children)| create.contains(name) && *at == 0;
                let names = claim.keys().iter().zip(found).filter(is_missing);
                missing = names.map(|(name, _)| name).collect();
                remove = &[];
                if !create.is_empty() {
                    continue;
                }
            }
            let created = create
                .iter()
                .zip(parts.into_iter().skip(missing.len()))
                .filter_map(|(name, part)| {
                    let Part::Created(path) = part else { return None };
                    let child = Child::parse(path.rsplit_once('/')?.1)?;
                    Some(child.entry(name, reply.session, record.clone()))
                });
            let mut known: Vec<Stored> = created.collect();
            let mirrored = self.mirrored(claim, &known);
            let is_unread = claim.share.is_some() && mirrored.is_none();
            let found = match mirrored {
                _ if known.iter().any(|entry| entry.position > LAST_NUMBER) => Err(Refusal::NoNumbers),
                Some((found, oldest)) => {
                    known.push(oldest);
                    Ok(found)
                }
                None => list.take().unwrap_or_else(listing).await,
            };
            if let Err(Refusal::NoNumbers | Refusal::LongReply(_)) = found
                && !known.is_empty()
            {
                // No later read would find them.
                let deletions = known.iter().map(|entry| Request::delete(&self.path(entry), -1));
                self.client.call(Request::multi(&deletions.collect::<Vec<_>>())).await?;
            }
            if is_unread {
                // Its fencing token is that of its creation.
                known.clear();
            }
            return self.seen(claim.keys(), Some(&claim.owner), found?, &known).await;
        }
        Err(Refusal::Refused(code::NO_NODE))
    }

    pub(super) async fn written(
        &self,
        entries: Vec<Stored>,
        owner: Option<&OwnerToken>,
    ) -> Answer<Option<Vec<Stored>>> {
        let stays = |entry: &Stored| owner.is_some_and(|owner| entry.is_of(owner));
        let kind = if owner.is_some() {
            Kind::Ephemeral
        } else {
            Kind::Persistent
        };
        // The new node is created first: a process that sees one change after the other never sees the name without a holder.
        let requests = entries.iter().flat_map(|entry| {
            let data = entry.record.as_ref().map(Record::to_json).unwrap_or_default();
            let (path, version) = (self.path(entry), entry.version as i32);
            if stays(entry) {
                return vec![Request::set_data(&path, &data, version)];
            }
            let new = self.layout.entry(&entry.name, &Child::replaced(&entry.id, owner));
            let create = Request::create(&new, &data, self.layout.access, kind);
            vec![create, Request::delete(&path, version)]
        });
        let requests: Vec<_> = requests.collect();
        let reply = self.client.call_urgently(Request::multi(&requests)).await?;
        let parts = reply.parts()?;
        if parts.iter().any(|part| matches!(part, Part::Failed(_))) {
            return Ok(None);
        }
        let mut versions = parts.iter().filter_map(|part| match part {
            Part::Changed(stat) => Some(stat.version),
            _ => None,
        });
        let written = entries.into_iter().map(|entry| match stays(&entry) {
            true => Some(Stored {
                version: versions.next()?.into(),
                ..entry
            }),
            false => {
                let child = Child::parse(&Child::replaced(&entry.id, owner))?;
                let session = if owner.is_some() { reply.session } else { 0 };
                Some(child.entry(&entry.name, session, entry.record?))
            }
        });
        let written: Option<Vec<_>> = written.collect();
        written.map(Some).ok_or(Refusal::Malformed)
    }

    pub(super) async fn checked(&self, entries: &[&Stored]) -> Answer<Vec<bool>> {
        let reads: Vec<_> = entries.iter().map(|entry| Request::data(&self.path(entry))).collect();
        let synced = self.client.call_urgently(Request::sync("/"));
        let read = self.client.call_urgently(Request::multi_read(&reads));
        synced.await?;
        let parts = read.await?.parts()?;
        let is_same = |(entry, part): (&&Stored, &Part)| match part {
            Part::Data(_, stat) => Ok(i64::from(stat.version) == entry.version),
            Part::Failed(code::NO_NODE) => Ok(false),
            Part::Failed(code) => Err(Refusal::Refused(*code)),
            _ => Err(Refusal::Malformed),
        };
        entries.iter().zip(&parts).map(is_same).collect()
    }

    pub(super) async fn folders(&self) -> Answer<Vec<String>> {
        let synced = self.client.call(Request::sync("/"));
        let read = self.client.call(Request::children(self.layout.root()));
        synced.await?;
        match read.await {
            Ok(reply) => Ok(reply.children()?),
            Err(Refusal::Refused(code::NO_NODE)) => Ok(Vec::new()),
            Err(Refusal::LongReply(_)) => Err(Refusal::LongReply("the names in the path of the URL".into())),
            Err(refusal) => Err(refusal),
        }
    }
}

impl Refusal {
    /// Adds the names to the failure of their read.
    fn of(self, names: &[Key]) -> Self {
        const SHOWN: usize = 3;
        let Refusal::LongReply(_) = self else { return self };
        let shown: Vec<&str> = names.iter().take(SHOWN).map(Key::as_str).collect();
        let more = if names.len() > SHOWN { ", …" } else { "" };
        Refusal::LongReply(format!("the entries of {}{more}", shown.join(", ")).into())
    }
}

/// Whether a step has changed something. `false`: an entry was changed or is gone.
pub(super) fn is_done(answer: Answer) -> Answer<bool> {
    match answer {
        Err(Refusal::Refused(code::NO_NODE | code::BAD_VERSION)) => Ok(false),
        answer => answer.map(|_| true),
    }
}

impl Child {
    /// Returns how many entries are granted, and their sums.
    fn granted(children: &[Child]) -> (usize, Sums) {
        granted(children.iter().map(|child| child.share))
    }

    /// Returns an entry that this process has created.
    fn entry(&self, name: &Key, session: i64, record: Record) -> Stored {
        Stored {
            name: name.clone(),
            id: self.name.as_str().into(),
            position: self.number,
            version: 0,
            session,
            owner: self.owner.clone(),
            record: Some(record),
            created_ms: now_ms(),
        }
    }

    fn stored(&self, name: &Key, data: &[u8], stat: &Stat) -> Stored {
        let mut record: Option<Record> = serde_json::from_slice(data).ok();
        if let (Some(record), true, false) = (&mut record, name.is_shared(), Child::is_kept(&self.name)) {
            record.fence = Some(stat.created as u64);
        }
        Stored {
            version: stat.version.into(),
            record,
            created_ms: stat.created_ms.max(0) as u64,
            ..self.entry(name, stat.session, Record::default())
        }
    }
}
