//! The entries of claims as nodes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::mpsc::unbounded_channel;
use tokio::sync::watch;

use super::client::{self, Client, Failure as Refusal, Part, Request, code};
use super::error::failure;
use super::layout::{Child, Layout};
use super::nodes::is_done;
use crate::clock::Moment;
use crate::engine::ends::Ends;
use crate::engine::entries::{Change, Failure, LocalEntries, Outcome, Record, Seen, Store, Stored, UNKNOWN};
use crate::model::{Claim, Fence, Key, MAX_TTL, OwnerToken, Ttl};

pub(super) const NAME: &str = "zookeeper";

/// A client with a session, and the paths of its entries.
pub(super) struct Zookeeper {
    pub client: Client,
    pub layout: Layout,
    pub local: Arc<LocalEntries>,
    pub revisions: Arc<Revisions>,
    /// When the kept entries of names with waiters end.
    pub kept: Arc<Ends<Key, ()>>,
}

/// Numbers the messages that mirrors depend on.
pub(super) struct Revisions {
    connections: watch::Receiver<u64>,
    last: AtomicU64,
}

impl Revisions {
    /// The number of the connection is above these bits. It is at least 1, so that each revision is above the positions of entries.
    const BITS: u32 = 40;

    fn connection(&self) -> u64 {
        *self.connections.borrow() + 1
    }

    /// Returns the number of a message of the current connection. Called on its task.
    pub(super) fn next(&self) -> u64 {
        (self.connection() << Self::BITS) + self.last.fetch_add(1, Relaxed) + 1
    }

    /// Whether a message is one of the current connection, if there is one.
    fn is_current(&self, revision: u64) -> bool {
        self.connection() == revision >> Self::BITS
    }
}

impl Zookeeper {
    pub(super) fn new(client: Client, layout: Layout, local: Arc<LocalEntries>) -> Self {
        let revisions = Arc::new(Revisions {
            connections: client.connection(),
            last: AtomicU64::new(0),
        });
        let kept = Arc::new(Ends::new());
        let (of_events, revisions_, layout_, kept_) = (local.clone(), revisions.clone(), layout.clone(), kept.clone());
        // On the task of the connection.
        client.set_events(Box::new(move |path, change| {
            let Some((name, child)) = layout_.split(path) else {
                return;
            };
            let Some(child) = Child::parse(child) else { return };
            let change = match change {
                client::Change::Created => {
                    schedule(&kept_, &name, [&child]);
                    Change::Created(child.mirrored())
                }
                client::Change::Deleted => Change::Deleted(child.name.into()),
                client::Change::Other => return,
            };
            of_events.changed(&name, revisions_.next(), vec![change]);
        }));
        Zookeeper {
            client,
            layout,
            local,
            revisions,
            kept,
        }
    }

    pub(super) fn failure(&self, refusal: impl Into<Refusal>) -> Failure {
        failure(refusal.into(), &self.client.address())
    }

    /// Watches a name until a request fails, or the connection ends.
    async fn watched(&self, name: &Key) -> Refusal {
        let folder = self.layout.folder(name);
        let mut connection = self.client.connection();
        let (failed, mut failures) = unbounded_channel();
        let _watch = Watched(self, &folder);
        let (watched, local, failed_too) = (name.clone(), self.local.clone(), failed.clone());
        self.client.call_in_order(Request::add_watch(&folder), move |answer| {
            let _ = match answer {
                Ok(_) => Ok(local.begin_read(&watched)),
                Err(refusal) => failed.send(refusal).map(|()| false),
            };
        });
        let (watched, local, revisions) = (name.clone(), self.local.clone(), self.revisions.clone());
        let kept = self.kept.clone();
        self.client.call_in_order(Request::children(&folder), move |answer| {
            let names = match answer.and_then(|reply| Ok(reply.children()?)) {
                Ok(names) => names,
                // The server has removed the empty folder.
                Err(Refusal::Refused(code::NO_NODE)) => Vec::new(),
                Err(refusal) => {
                    let _ = failed_too.send(refusal);
                    return;
                }
            };
            let entries = Child::all(&names);
            schedule(&kept, &watched, &entries);
            let entries = entries.iter().map(Child::mirrored);
            local.opened(&watched, revisions.next(), entries);
        });
        tokio::select! {
            Some(refusal) = failures.recv() => refusal,
            _ = connection.changed() => Refusal::Broken("the watch ended with it".into()),
        }
    }
}

/// Makes [`Zookeeper::end_kept`] read a name soon, if one of its entries is a kept one.
fn schedule<'c>(kept: &Ends<Key, ()>, name: &Key, entries: impl IntoIterator<Item = &'c Child>) {
    if entries.into_iter().any(|child| Child::is_kept(&child.name)) {
        kept.insert(name.clone(), (), Moment::now());
    }
}

/// A watch of a folder. Dropping it removes the watch.
struct Watched<'a>(&'a Zookeeper, &'a str);

impl Drop for Watched<'_> {
    fn drop(&mut self) {
        self.0.client.call_in_order(Request::remove_watches(self.1), |_| {});
    }
}

#[async_trait]
impl Store for Zookeeper {
    fn name(&self) -> &'static str {
        NAME
    }

    fn address(&self) -> String {
        self.client.address()
    }

    fn keeps_order(&self) -> bool {
        true
    }

    fn longest_lease(&self) -> Option<Duration> {
        Some(self.client.state().timeout / 2)
    }

    async fn change(&self, claim: &Claim, create: &[Key], remove: &[Stored], is_first: bool) -> Outcome<Vec<Seen>> {
        let is_read = claim.share.is_some() && !claim.waiting && !claim.was_sent();
        claim.mark_sent();
        let changing = async {
            if is_read {
                // Its entry would delay those that fit.
                return self
                    .read_after(Request::sync("/"), claim.keys(), Some(&claim.owner))
                    .await;
            }
            let seen = self.changed(claim, create, remove, is_first).await?;
            self.without_ended(claim.keys(), Some(&claim.owner), seen).await
        };
        changing.await.map_err(|refusal| self.failure(refusal))
    }

    async fn read(&self, names: &[Key], owner: Option<&OwnerToken>) -> Outcome<Vec<Seen>> {
        // An own entry may be missing on the servers that follow a leader without a majority.
        let first = match owner {
            Some(_) => Request::commit(self.layout.root()),
            None => Request::sync("/"),
        };
        let reading = self.read_after(first, names, owner).await;
        reading.map_err(|refusal| self.failure(refusal))
    }

    async fn write(&self, entries: Vec<Stored>, owner: Option<&OwnerToken>, _ttl: Ttl) -> Outcome<Option<Vec<Stored>>> {
        let written = self.written(entries, owner).await;
        written.map_err(|refusal| self.failure(refusal))
    }

    async fn delete(&self, entries: &[Stored]) -> Outcome<bool> {
        let deletion = |entry: &Stored| {
            // Any version: a kept entry is written again whenever its end is checked.
            let is_kept = Child::is_kept(&entry.id);
            let version = if is_kept { UNKNOWN } else { entry.version };
            Request::delete(&self.path(entry), version as i32)
        };
        let deleted = match entries {
            [entry] => is_done(self.client.call_urgently(deletion(entry)).await),
            _ => {
                let deletions: Vec<_> = entries.iter().map(deletion).collect();
                let reply = self.client.call_urgently(Request::multi(&deletions)).await;
                let parts = reply.and_then(|reply| Ok(reply.parts()?));
                parts.map(|parts| parts.iter().all(|part| *part == Part::Deleted))
            }
        };
        deleted.map_err(|refusal| self.failure(refusal))
    }

    async fn check(&self, entries: &[&Stored]) -> Outcome<Vec<bool>> {
        self.checked(entries).await.map_err(|refusal| self.failure(refusal))
    }

    async fn keep(&self, entries: &[Stored], sent: Moment, ttl: Ttl) -> Outcome<bool> {
        // The service asks for no lease that is longer, so there is no evidence for more.
        let certain = ttl.validity().min(self.client.state().longest);
        let Some(entry) = entries.first() else { return Ok(true) };
        let lasts = self.client.lasts(entry.session, sent + certain, self.layout.root());
        if lasts.await.map_err(|refusal| self.failure(refusal))? {
            return Ok(true);
        }
        // Only another process knows until when its session lasts. The entries of a session that has ended are gone.
        let same = self.check(&entries.iter().collect::<Vec<_>>()).await?;
        Ok(same.into_iter().all(|is_same| is_same))
    }

    fn is_lease(&self, entry: &Stored, ttl: Ttl) -> bool {
        let is_lease = |record: &Record| !record.set && record.ttl() >= ttl;
        entry.session == self.client.state().id && entry.record.as_ref().is_some_and(is_lease)
    }

    fn lasts_until(&self, session: i64) -> Option<Moment> {
        let state = self.client.state();
        match session {
            // A kept entry lasts longer than all sessions. The client can delete it until it is closed.
            0 => (state.id != 0).then_some(Moment::now() + MAX_TTL),
            _ => (state.id == session).then_some(state.until),
        }
    }

    /// The token of a state that has the entry and is not older than the one of the mirror, so it is the oldest one in it. Another
    /// server may lag behind that.
    async fn token(&self, entry: &Stored, revision: u64) -> Outcome<Option<Fence>> {
        let reads = [self.path(entry), self.layout.folder(&entry.name)].map(|path| Request::data(&path));
        let reply = self.client.call(Request::multi_read(&reads)).await;
        let parts = reply.and_then(|reply| Ok(reply.parts()?));
        match parts.map_err(|refusal| self.failure(refusal))?.as_slice() {
            [Part::Data(_, own), Part::Data(_, folder)] if self.revisions.is_current(revision) => {
                let is_share = entry.name.is_shared();
                Ok(Some(Fence(if is_share {
                    own.created
                } else {
                    folder.last_child_change
                } as u64)))
            }
            _ => Ok(None),
        }
    }

    async fn names(&self, prefix: &str, page_timeout: Duration) -> Outcome<Vec<Key>> {
        let reading = async { self.folders().await.map_err(|refusal| self.failure(refusal)) };
        let folders = Failure::after(page_timeout, self.address(), reading).await?;
        let names = folders.iter().filter_map(|folder| self.layout.name_of(folder));
        let is_listed = |name: &Key| !name.is_shared() && name.as_str().starts_with(prefix);
        let mut names: Vec<Key> = names.filter(is_listed).collect();
        names.sort();
        Ok(names)
    }

    async fn watch(&self, name: &Key) -> Failure {
        self.failure(self.watched(name).await)
    }

    async fn close(&self, _has_entries: &(dyn for<'a> Fn(i64) -> bool + Sync)) {
        self.client.close().await;
    }
}
