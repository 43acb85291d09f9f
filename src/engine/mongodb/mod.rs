//! MongoDB: standalone, replica set or sharded cluster, 4.4 or newer. One document per held lock, the gist's own, and the
//! server's clock.
//!
//! - `config.rs`: where a store is, from its URL (`url.rs`: that text; `tls.rs`: its certificates); `connect.rs`: from
//!   there to an engine; `index.rs`: the TTL index.
//! - `acquire.rs`: one try. `estimate.rs`: the server's clock as it is thought to be. `fence.rs`: where the fencing token
//!   comes from, and why it is right. `release.rs`: letting go.
//! - `transfer.rs`: a lease goes into other hands.
//! - `documents.rs`: filters, pipelines, and the fields of a document.
//! - `queue.rs`: the queue of a name; `waiting.rs`: the part of a process in it; `watch.rs`: its wake-up by a change
//!   stream; `poll.rs`: by a look now and then, where there is none.
//! - `failure.rs`: which failures pass by themselves; `trouble.rs`: what the driver's texts mean; `sight.rs`: what is seen of
//!   the servers while connecting, and of elections.
//!
//! # Whose clock
//! Every verb compares with `$$NOW`, and every end counts from it or is put to the test against it (`estimate.rs`): the
//! wall clock of the primary at the moment when the command starts. A command that is held up afterwards has an older
//! present, which errs on the safe side: it sees a lease as live that just ended, and a lease that it grants ends earlier,
//! though not before the request's sending plus the ttl (an estimated end: less a two-hundredth of the ttl, half of what a
//! lease is cut short by here for the drift of clocks). On a sharded cluster it is the router that says what `$$NOW` is,
//! and after a fail-over it is another member: keep the clocks of routers and members in step, because a lease that began by
//! one of them may end by another. Fencing tokens do not depend on that.
//!
//! # Beside the gist
//! The gist inserts `{ _id: name, expiresAt }` and takes a duplicate key for busy; it frees by `deleteOne({ _id })`, and
//! relies on the TTL index for what expired. Every lock here is such a document, a release deletes it, and an expired one
//! of the gist's counts as free at once: the two exclude each other for as long as both are in use.

mod acquire;
mod config;
mod connect;
mod documents;
mod estimate;
mod failure;
mod fence;
mod index;
mod poll;
mod queue;
mod release;
mod sight;
#[cfg(test)]
mod tests;
mod tls;
mod transfer;
mod trouble;
mod url;
mod waiting;
mod watch;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::TryStreamExt;
use mongodb::bson::{Document, doc};
use mongodb::options::WriteConcern;
use mongodb::{Client, Collection};

pub use self::config::MongodbConfig;
use self::estimate::Estimate;
use self::failure::{ENGINE, Failure};
use self::fence::Clock;
use self::poll::Poll;
use self::waiting::Line;
use super::{Acquired, Engine, Released, Renewed, Result, Subscription};
use crate::model::{Claim, Key, LockInfo, OwnerToken, Ttl};

/// What the driver says.
type Outcome<T> = std::result::Result<T, Failure>;

/// The engine behind `mongodb:` URLs.
pub struct MongodbEngine {
    client: Client,
    /// Write concern of the URL (default: majority), reads from the primary.
    locks: Collection<Document>,
    prefix: String,
    clock: Clock,
    estimate: Estimate,
    /// How a release is acknowledged, if not like everything else.
    release_concern: Option<WriteConcern>,
    /// The queues. `None`: a standalone server, which has no change streams.
    line: Option<Arc<Line>>,
}

impl fmt::Debug for MongodbEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MongodbEngine({})", self.locks.namespace())
    }
}

impl MongodbEngine {
    fn id(&self, key: &Key) -> String {
        format!("{}{key}", self.prefix)
    }

    fn ids(&self, claim: &Claim) -> Vec<String> {
        claim.keys().iter().map(|key| self.id(key)).collect()
    }

    /// A renewal. One name: `update_one`, which the driver sends again by itself after a fail-over.
    async fn extend(&self, claim: &Claim, ttl: Ttl) -> Outcome<Renewed> {
        let ids = self.ids(claim);
        let (held, extend) = (documents::held_by(&ids, &claim.owner), documents::extend(ttl));
        let updated = match ids.len() {
            1 => self.locks.update_one(held, extend).await?,
            _ => self.locks.update_many(held, extend).await?,
        };
        Ok(if updated.matched_count == ids.len() as u64 {
            Renewed::Extended
        } else {
            Renewed::Lost
        })
    }

    async fn look_up(&self, key: &Key) -> Outcome<Option<LockInfo>> {
        let filter = documents::busy(doc! { "_id": self.id(key) });
        let document = self.locks.find_one(filter).projection(documents::shown()).await?;
        Ok(document.map(|document| documents::info(key.as_str(), &document, self.clock)))
    }

    async fn look_up_all(&self, prefix: &str) -> Outcome<Vec<LockInfo>> {
        let filter = documents::busy(documents::starting_with(&format!("{}{prefix}", self.prefix)));
        let mut found = self
            .locks
            .find(filter)
            .projection(documents::shown())
            .sort(doc! { "_id": 1 })
            .await?;
        let mut locks = Vec::new();
        while let Some(document) = found.try_next().await? {
            // A longer prefix than the engine's own is part of the name.
            if let Some(name) = documents::id(&document).and_then(|id| id.strip_prefix(&self.prefix)) {
                locks.push(documents::info(name, &document, self.clock));
            }
        }
        Ok(locks)
    }
}

#[async_trait]
impl Engine for MongodbEngine {
    fn name(&self) -> &'static str {
        ENGINE
    }

    fn ordered(&self) -> bool {
        self.line.is_some()
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Acquired> {
        self.acquire(claim).await.map_err(|failure| failure.during("acquire"))
    }

    async fn renew(&self, claim: &Claim, ttl: Ttl) -> Result<Renewed> {
        self.extend(claim, ttl).await.map_err(|failure| failure.during("renew"))
    }

    async fn transfer(&self, claim: &Claim, to: &OwnerToken) -> Result<Renewed> {
        self.hand_over(claim, to)
            .await
            .map_err(|failure| failure.during("transfer"))
    }

    async fn release(&self, claim: &Claim, keep: Duration) -> Result<Released> {
        self.free(claim, keep)
            .await
            .map_err(|failure| failure.during("release"))
    }

    async fn subscribe(&self, claim: &Claim, _key: &Key) -> Result<Box<dyn Subscription>> {
        Ok(match &self.line {
            Some(line) => Box::new(line.subscribe(&claim.owner)),
            None => Box::new(Poll::default()),
        })
    }

    async fn inspect(&self, key: &Key) -> Result<Option<LockInfo>> {
        self.look_up(key).await.map_err(|failure| failure.during("inspect"))
    }

    async fn list(&self, prefix: &str, _page_timeout: Duration) -> Result<Vec<LockInfo>> {
        self.look_up_all(prefix).await.map_err(|failure| failure.during("list"))
    }

    async fn force_release(&self, key: &Key) -> Result<bool> {
        self.force(key).await.map_err(|failure| failure.during("force_release"))
    }

    async fn close(&self) {
        /// A server that does not answer is left without a good-bye.
        const PATIENCE: Duration = Duration::from_secs(1);
        if let Some(line) = &self.line {
            line.close();
        }
        let _ = tokio::time::timeout(PATIENCE, self.client.clone().shutdown().immediate(true)).await;
    }
}
