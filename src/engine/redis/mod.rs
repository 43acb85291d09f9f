//! Redis: one node or a master under Sentinel, from version 6.2 on, or a cluster, from 7.0 on.
//!
//! # Behavior
//! Every verb is one round trip for any number of names, and uses the server's clock: one script, except for the most frequent
//! acquisition (`ops/acquire_plain.rs`). The key of a lock contains the owner's token and nothing else. So it excludes, and is
//! excluded by, every other tool that runs `SET key token NX PX`. `keys/mod.rs` describes the keys.
//!
//! # Deployment
//! The server needs `maxmemory-policy noeviction` (or enough memory): the name of an evicted key can be granted again. A user
//! with no more rights than necessary, for the prefix `lock:`:
//!
//! ```text
//! ACL SETUSER holdfast on >PASSWORD resetkeys resetchannels -@all
//!     ~lock:* ~holdfast:* &holdfast:*
//!     +eval +evalsha +get +set +del +incrby +exists +mget +pttl +pexpire +time +zadd +zrem +zscore +zcount +zrangebyscore +zrevrange
//!     +publish +subscribe +unsubscribe +scan +select +info
//! ```
//!
//! `+scan` is for `list` only, `+select` for a database other than 0, and `+info` for the warning of a server that evicts locks.
//! (`HELLO` and `AUTH` need no right.)
//! Besides, a user needs
//!
//! - under Sentinel: `+role`
//! - with `minReplicas`: `+wait`
//! - in a cluster: `+cluster|slots +asking +spublish +ssubscribe +sunsubscribe`, on every node
//!
//! and, if the sentinels have users, there
//!
//! ```text
//! user holdfast on >PASSWORD -@all resetchannels &+switch-master +sentinel|get-master-addr-by-name +subscribe
//! ```

mod advice;
mod config;
mod connection;
mod error;
mod keys;
mod ops;
mod queue;
mod quorum;
mod scripts;
#[cfg(test)]
mod tests;
mod topology;
mod wire;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use redis::Value;

pub use config::RedisConfig;
pub use quorum::{QuorumConfig, QuorumEngine};

use self::connection::Link;
use self::connection::probe::explained;
use self::connection::request::Attempt;
use self::error::{ENGINE, Failure};
use self::keys::{FENCE_KEPT_MS, Layout, Part, RECORD_KEPT_MS};
use self::ops::contended::Contended;
use self::queue::Waiters;
use self::scripts::Script;
use self::topology::Route;
use self::topology::failover::FailoverMonitor;
use self::topology::replicas::Replicated;
use super::{Acquired, Answers, Description, Engine, Read, Released, Renewal, Renewed, Result, Subscription};
use crate::model::{Claim, Key, LockInfo, OwnerToken};

/// The engine behind `redis://` and `rediss://`.
pub struct RedisEngine {
    route: Route,
    /// Whether the fencing tokens come from one key for all names. Not where several servers have the slots.
    counts: bool,
    /// The connection for writes that replicas have to acknowledge.
    replicated: Option<Replicated>,
    layout: Layout,
    waiters: Arc<Waiters>,
    contended: Contended,
    /// Only with sentinels, until the engine is closed.
    listening: Mutex<Option<FailoverMonitor>>,
}

impl fmt::Debug for RedisEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisEngine")
            .field("layout", &self.layout)
            .finish_non_exhaustive()
    }
}

impl RedisEngine {
    /// Connects, and checks the mode and the version of the server.
    ///
    /// # Errors
    /// If the server cannot be reached, refuses the login, is not what the URL says, or is older than Redis 6.2.
    pub async fn connect(config: RedisConfig) -> Result<Arc<Self>> {
        let route = Route::new(config.clone());
        let replicated =
            (config.min_replicas > 0).then(|| Replicated::new(Link::new(config.clone()), config.min_replicas));
        let server = explained(&config, route.greet())
            .await
            .map_err(|failure| failure.during("connect"))?;
        let checked = route.check_all(&server, &config.layout).await;
        checked.map_err(|failure| failure.during("connect"))?;
        let listening = match (&route, config.sentinels()) {
            (Route::One(link), Some(sentinels)) => {
                let links: Vec<&Arc<Link>> = [link]
                    .into_iter()
                    .chain(replicated.as_ref().map(|replicated| &replicated.link))
                    .collect();
                Some(FailoverMonitor::start(
                    sentinels,
                    &links,
                    config.limit,
                    config.warnings.clone(),
                ))
            }
            _ => None,
        };
        let takes_grants = replicated.is_none() && !config.is_sharded();
        let layout = config.layout;
        let waiters = Waiters::new(route.clone(), layout.clone(), takes_grants);
        Ok(Arc::new(RedisEngine {
            counts: layout.last().is_some(),
            route,
            replicated,
            layout,
            waiters,
            contended: Contended::default(),
            listening: Mutex::new(listening),
        }))
    }

    /// Returns how long a fence companion outlives its lease, in ms.
    fn fence_lasts(&self) -> u64 {
        if self.counts { RECORD_KEPT_MS } else { FENCE_KEPT_MS }
    }

    /// Writes the deferred records, so that `inspect` sees them.
    fn write_records(&self) {
        if let Route::One(link) = &self.route {
            link.write_records();
        }
    }

    /// Returns the slot of a name.
    fn slot(&self, key: &Key) -> u16 {
        self.route.slot(&self.layout, key)
    }

    /// Returns what the names of one script have in common: their slot, and whether they are shared.
    fn script_group(&self, key: &Key) -> (u16, bool) {
        (self.slot(key), key.is_shared())
    }

    /// Runs a script whose positive answer grants or extends a lease.
    async fn run_safely(
        &self,
        script: &Script,
        call: &redis::Cmd,
        slot: u16,
        attempt: Attempt<'_>,
    ) -> std::result::Result<Value, Failure> {
        match &self.replicated {
            // Boxed: there may be many waiting calls, which should be small.
            Some(replicated) => Box::pin(replicated.run(script, call, attempt)).await,
            None => self.route.run(script, call, slot, attempt).await,
        }
    }

    /// Returns the call of a script with the keys of all names of a claim, and the owner as its first argument.
    fn call(&self, script: &Script, parts: &[Part], claim: &Claim) -> redis::Cmd {
        let mut call = script.call(&self.layout, parts, claim.keys().iter());
        call.arg(claim.owner.as_str());
        call
    }
}

#[async_trait]
impl Engine for RedisEngine {
    fn describe(&self) -> Description {
        Description {
            address: self.route.address(),
            detector: Some(self.waiters.known.stall_detector.clone()),
            has_shares: true,
            ..Description::new(ENGINE, true)
        }
    }

    async fn try_acquire_all(&self, claims: &[&Claim], answer: &mut Answers<'_, Acquired>) {
        match claims {
            [claim] => answer(0, self.try_once(claim).await),
            _ => Box::pin(self.acquire_in_order(claims, answer)).await,
        }
    }

    async fn renew_all(&self, renewals: &[Renewal<'_>], answer: &mut Answers<'_, Renewed>) {
        self.renew_many(renewals, answer).await;
    }

    async fn transfer(&self, claim: &Claim, to: &OwnerToken) -> Result<Renewed> {
        let transferred = self.transfer_whole(claim, to).await;
        transferred.map_err(|failure| failure.during("transfer"))
    }

    async fn release_all(&self, claims: &[&Claim], keep: Duration, answer: &mut Answers<'_, Released>) {
        debug_assert!(claims.len() == 1 || keep.is_zero(), "one claim is kept");
        self.release_claims(claims, keep, answer).await;
    }

    async fn subscribe(&self, claim: &Claim, _key: &Key) -> Result<Box<dyn Subscription>> {
        Ok(Box::new(self.waiters.known.subscribe(claim)))
    }

    async fn read(&self, what: Read<'_>) -> Result<Vec<LockInfo>> {
        match what {
            Read::Name { key, .. } if key.is_shared() => {
                let holders = self.inspect_shared_name(key).await;
                holders.map_err(|failure| failure.during("inspect"))
            }
            Read::Name { key, .. } => {
                let info = self.inspect_name(key.as_str()).await;
                Ok(info.map_err(|failure| failure.during("inspect"))?.into_iter().collect())
            }
            Read::Prefix { prefix, page_timeout } => self.list_names(prefix, page_timeout).await,
        }
    }

    async fn force_release(&self, key: &Key) -> Result<bool> {
        self.force_release_name(key)
            .await
            .map_err(|failure| failure.during("forceRelease"))
    }

    async fn close(&self) {
        *self.listening.lock() = None;
        self.route.close();
        if let Some(replicated) = &self.replicated {
            replicated.link.close();
        }
    }
}
