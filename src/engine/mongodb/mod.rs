//! MongoDB: standalone, replica set or sharded cluster, 5.0 or newer. A held lock is one document, as in the gist, and the
//! server's clock decides.
//!
//! - `config/`: from a URL and settings to a store. `connection/`: the connections, and which calls may use them.
//! - `ops/`: the operations, one file per verb. `documents.rs`: filters, pipelines, and the fields of a document.
//! - `queue/`: the queue of a name, the waiters of this process, and the change stream that wakes them.
//! - `shares.rs`: the operations on shared names, with the pipelines of `queue/shares.rs`.
//! - `error.rs`: failures. `ttl_index.rs`: the TTL index. `unwritten_tokens.rs`: fencing tokens that are not in their documents
//!   yet.
//!
//! # The clock
//! Every verb compares with `$$NOW`: the wall clock of the primary at the start of the command. Every end of a lease counts from
//! it or is verified against it (`ops/clock_offset.rs`). A command that is delayed after its start has an older `$$NOW`, which
//! is safe: it counts a lease as live that has just ended, and a lease that it grants ends earlier, but not before the sending of
//! the request plus the ttl. (An estimated end may be earlier by 1/200 of the ttl, which is half of the margin that every lease
//! has for the drift of clocks.) On a sharded cluster the router sets `$$NOW`, and after a failover another member does. Keep
//! the clocks of routers and members synchronized, because a lease that began by one of them may end by another. Fencing tokens
//! do not depend on that.
//!
//! # Together with the gist
//! The gist inserts `{ _id: name, expiresAt }`; a duplicate key means busy. It releases by `deleteOne({ _id })`, and relies on the
//! TTL index for expired documents. Every lock here is such a document, a release deletes it, and an expired document of the gist
//! is free at once. So gist processes and holdfast exclude each other.

mod config;
mod connection;
mod documents;
mod error;
mod fields;
mod ops;
mod queue;
mod shares;
#[cfg(test)]
mod tests;
mod ttl_index;
mod unwritten_tokens;

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use mongodb::Collection;
use mongodb::bson::Document;

pub use self::config::MongodbConfig;
use self::connection::clock::SharedReading;
use self::connection::pool::{Class, Pool};
use self::error::{ENGINE, Failure};
use self::ops::attempts::UnsettledAttempts;
use self::ops::clock_offset::ClockOffset;
use self::ops::fence::ServerClock;
use self::queue::Queue;
use self::queue::poll::Poll;
use self::ttl_index::TtlIndex;
use self::unwritten_tokens::UnwrittenTokens;
use super::{Acquired, Answers, Description, Engine, Read, Released, Renewal, Renewed, Result, Subscription};
use crate::model::{Claim, Key, LockInfo, OwnerToken};

/// The result of a call of the driver.
type Outcome<T> = std::result::Result<T, Failure>;

/// The engine behind `mongodb:` URLs. Calls run in tasks of their own (`pool.rs`), which share its core.
pub struct MongodbEngine(Arc<Core>);

/// What all calls of an engine share.
pub struct Core {
    pool: Arc<Pool>,
    /// The servers in the URL, for messages.
    address: String,
    attempts: Arc<UnsettledAttempts>,
    index: Arc<TtlIndex>,
    prefix: String,
    clock: ServerClock,
    clock_offset: ClockOffset,
    reading: SharedReading,
    /// The tokens of grants that were one write. `None`: every grant has a stamp, because the reply to a write does not prove the
    /// token (a standalone server, a sharded cluster).
    unwritten: Option<Arc<UnwrittenTokens>>,
    /// The queues. `None`: a standalone server, which has no change streams.
    queue: Option<Arc<Queue>>,
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
    /// Returns the collection, with the write concern of the URL (default: majority) and reads from the primary.
    fn locks(&self) -> Collection<Document> {
        self.pool.locks()
    }

    /// Returns the same collection with the write concern of releases.
    fn releases(&self) -> Collection<Document> {
        self.pool.releases()
    }

    fn id(&self, key: &Key) -> String {
        debug_assert!(!key.is_shared(), "another operation, in `shares.rs`");
        format!("{}{key}", self.prefix)
    }

    /// Leaves the token of a claim that is released unwritten.
    fn forget_token(&self, claim: &Claim) {
        if let Some(unwritten) = &self.unwritten {
            unwritten.forget(&claim.owner);
        }
    }

    fn ids(&self, claim: &Claim) -> Vec<String> {
        claim.keys().iter().map(|key| self.id(key)).collect()
    }
}

#[async_trait]
impl Engine for MongodbEngine {
    fn describe(&self) -> Description {
        Description {
            address: self.address.clone(),
            // On a sharded cluster each router sets `$$NOW` by its own clock.
            has_shares: self.queue.as_ref().is_some_and(|queue| queue.takes_grants),
            detector: self.queue.as_ref().map(|queue| queue.known.stall_detector.clone()),
            ..Description::new(ENGINE, self.queue.is_some())
        }
    }

    async fn try_acquire_all(&self, claims: &[&Claim], answer: &mut Answers<'_, Acquired>) {
        self.attempt_in_order(claims, &mut |index, outcome| {
            answer(index, outcome.map_err(|failure| failure.during("acquire")));
        })
        .await;
    }

    async fn renew_all(&self, renewals: &[Renewal<'_>], answer: &mut Answers<'_, Renewed>) {
        self.renew_each(renewals, answer).await;
    }

    async fn transfer(&self, claim: &Claim, to: &OwnerToken) -> Result<Renewed> {
        self.await_token(claim)
            .await
            .map_err(|failure| failure.during("transfer"))?;
        let (core, claim, to) = (self.0.clone(), claim.clone(), to.clone());
        let transfer = || async move { core.transfer(&claim, &to).await };
        let transferred = self.pool.call(Class::Keep, transfer).await;
        transferred.map_err(|failure| failure.during("transfer"))
    }

    async fn release_all(&self, claims: &[&Claim], keep: Duration, answer: &mut Answers<'_, Released>) {
        debug_assert!(claims.len() == 1 || keep.is_zero(), "one claim is kept");
        let mut answer =
            |index, outcome: Outcome<_>| answer(index, outcome.map_err(|failure| failure.during("release")));
        match claims {
            [claim] => answer(0, self.release_alone(claim, keep).await),
            _ => self.release_abandoned(claims, &mut answer).await,
        }
    }

    async fn subscribe(&self, claim: &Claim, _key: &Key) -> Result<Box<dyn Subscription>> {
        Ok(match &self.queue {
            Some(queue) => Box::new(queue.subscribe(claim)),
            None => Box::new(Poll::default()),
        })
    }

    async fn read(&self, what: Read<'_>) -> Result<Vec<LockInfo>> {
        let info = match what {
            Read::Name { key, .. } if key.is_shared() => return self.read_shares(key).await,
            Read::Prefix { prefix, page_timeout } => return self.list_all(prefix, page_timeout).await,
            Read::Name {
                key,
                waits_for_token: true,
            } => self.inspect_one(key).await,
            Read::Name { key, .. } => self.inspect_once(key).await,
        };
        Ok(info.map_err(|failure| failure.during("inspect"))?.into_iter().collect())
    }

    async fn force_release(&self, key: &Key) -> Result<bool> {
        let (core, key) = (self.0.clone(), key.clone());
        let release = || async move { core.force_release(&key).await };
        let released = self.pool.call(Class::Release, release).await;
        released.map_err(|failure| failure.during("forceRelease"))
    }

    async fn close(&self) {
        /// How long `close` waits for a server. Then it drops the connections.
        const LIMIT: Duration = Duration::from_secs(1);
        if let Some(queue) = &self.queue {
            queue.close();
        }
        if let Some(unwritten) = &self.unwritten {
            unwritten.clear();
        }
        self.pool.shut_down(LIMIT).await;
    }
}
