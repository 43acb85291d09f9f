//! MongoDB: standalone, replica set or sharded cluster, 4.4 or newer. One document per held lock, the gist's own, and the
//! server's clock.
//!
//! - `config.rs`: where a store is, from its URL (`url.rs`: that text; `tls.rs`: its certificates); `connect.rs`: from
//!   there to an engine; `index.rs`: the TTL index.
//! - `pool.rs`: which calls may use a connection, and in which order (`engine/attempt_queue.rs`: the order of attempts).
//!   `attempts.rs`: attempts that were dropped or not answered. `session.rs`: what ends them at the server.
//! - `acquire.rs`: one attempt (`stamp.rs`: its last step). `batch.rs`: the attempts of several waiters, and the releases of
//!   several claims. `estimate.rs`: the estimate of the server's clock. `fence.rs`: the source of the fencing token, with its
//!   proof. `release.rs`: releases.
//! - `transfer.rs`: a lease goes into other hands.
//! - `inspect.rs`: `inspect` and `list`. `documents.rs`: filters, pipelines, and the fields of a document.
//! - `queue.rs`: the queue of a name; `waiting.rs`: the waiters of a process; `watch.rs`: the change stream that wakes them
//!   (`event.rs`: its events); `poll.rs`: polling where there is no change stream.
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
mod attempts;
mod batch;
mod config;
mod connect;
mod documents;
mod estimate;
mod event;
mod failure;
mod fence;
mod index;
mod inspect;
mod poll;
mod pool;
mod queue;
mod release;
mod session;
mod sight;
mod stamp;
#[cfg(test)]
mod tests;
mod tls;
mod transfer;
mod trouble;
mod url;
mod waiting;
mod watch;

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use mongodb::Collection;
use mongodb::bson::Document;
use mongodb::options::WriteConcern;

use self::attempts::UnsettledAttempts;
pub use self::config::MongodbConfig;
use self::estimate::Estimate;
use self::failure::{ENGINE, Failure};
use self::fence::Clock;
use self::index::IndexKeeper;
use self::poll::Poll;
use self::pool::{Class, Pool};
use self::waiting::Line;
use super::{Acquired, Attempts, Engine, Released, Releases, Renewed, Result, Subscription};
use crate::model::{Claim, Key, LockInfo, OwnerToken, Ttl};

/// What the driver says.
type Outcome<T> = std::result::Result<T, Failure>;

/// The engine behind `mongodb:` URLs. Calls run in tasks of their own (`pool.rs`), which share its core.
pub struct MongodbEngine(Arc<Core>);

/// What all calls of an engine share.
pub struct Core {
    pool: Arc<Pool>,
    attempts: Arc<UnsettledAttempts>,
    index: Arc<IndexKeeper>,
    prefix: String,
    clock: Clock,
    estimate: Estimate,
    /// How a release is acknowledged, if not like everything else.
    release_concern: Option<WriteConcern>,
    /// The queues. `None`: a standalone server, which has no change streams.
    line: Option<Arc<Line>>,
}

impl Deref for MongodbEngine {
    type Target = Arc<Core>;

    fn deref(&self) -> &Arc<Core> {
        &self.0
    }
}

impl fmt::Debug for MongodbEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MongodbEngine({})", self.locks().namespace())
    }
}

impl Core {
    /// Write concern of the URL (default: majority), reads from the primary.
    fn locks(&self) -> Collection<Document> {
        self.pool.locks()
    }

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
            1 => self.locks().update_one(held, extend).await?,
            _ => self.locks().update_many(held, extend).await?,
        };
        Ok(if updated.matched_count == ids.len() as u64 {
            Renewed::Extended
        } else {
            Renewed::Lost
        })
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
        self.attempt(claim).await.map_err(|failure| failure.during("acquire"))
    }

    async fn try_acquire_in_order(&self, claims: &[Arc<Claim>], answer: &mut Attempts<'_>) {
        self.attempt_in_order(claims, &mut |index, outcome| {
            answer(index, outcome.map_err(|failure| failure.during("acquire")));
        })
        .await;
    }

    async fn renew(&self, claim: &Claim, ttl: Ttl) -> Result<Renewed> {
        let (core, claim) = (self.0.clone(), claim.clone());
        let renewal = || async move { core.extend(&claim, ttl).await };
        let renewed = self.pool.call(Class::Keep, renewal).await;
        renewed.map_err(|failure| failure.during("renew"))
    }

    async fn transfer(&self, claim: &Claim, to: &OwnerToken) -> Result<Renewed> {
        let (core, claim, to) = (self.0.clone(), claim.clone(), to.clone());
        let transfer = || async move { core.hand_over(&claim, &to).await };
        let transferred = self.pool.call(Class::Keep, transfer).await;
        transferred.map_err(|failure| failure.during("transfer"))
    }

    async fn release(&self, claim: &Claim, keep: Duration) -> Result<Released> {
        self.end_attempts(claim)
            .await
            .map_err(|failure| failure.during("release"))?;
        let (core, claim) = (self.0.clone(), claim.clone());
        let release = || async move { core.free(&claim, keep).await };
        let released = self.pool.call(Class::Release, release).await;
        released.map_err(|failure| failure.during("release"))
    }

    async fn release_all(&self, claims: &[Claim], answer: &mut Releases<'_>) {
        self.release_abandoned(claims, &mut |index, outcome| {
            answer(index, outcome.map_err(|failure| failure.during("release")));
        })
        .await;
    }

    async fn subscribe(&self, claim: &Claim, _key: &Key) -> Result<Box<dyn Subscription>> {
        Ok(match &self.line {
            Some(line) => Box::new(line.subscribe(&claim.owner)),
            None => Box::new(Poll::default()),
        })
    }

    async fn inspect(&self, key: &Key) -> Result<Option<LockInfo>> {
        self.inspect_one(key).await.map_err(|failure| failure.during("inspect"))
    }

    async fn list(&self, prefix: &str, page_timeout: Duration) -> Result<Vec<LockInfo>> {
        self.list_all(prefix, page_timeout).await
    }

    async fn force_release(&self, key: &Key) -> Result<bool> {
        let (core, key) = (self.0.clone(), key.clone());
        let release = || async move { core.force(&key).await };
        let freed = self.pool.call(Class::Release, release).await;
        freed.map_err(|failure| failure.during("force_release"))
    }

    async fn close(&self) {
        /// How long `close` waits for a server. Then it drops the connections.
        const LIMIT: Duration = Duration::from_secs(1);
        if let Some(line) = &self.line {
            line.close();
        }
        let _ = tokio::time::timeout(LIMIT, self.pool.connected().client.clone().shutdown().immediate(true)).await;
    }
}
