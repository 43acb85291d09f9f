//! Redis: one node or a master under Sentinel, from version 6.2 on, or a cluster, from 7.0 on.
//!
//! # Behavior
//! Every verb is one round trip for any number of names, and goes by the server's clock: one script, but for the commonest
//! acquisition (`plain.rs`). The lock's key
//! holds the owner's token and nothing else, so that it excludes, and is excluded by, every other tool that does
//! `SET key token NX PX`. What lies where is told in `keys.rs`.
//!
//! # Deployment
//! The server needs `maxmemory-policy noeviction` (or room enough): an evicted key is a lock that was given away. A user
//! with no more rights than needed, for the prefix `lock:`:
//!
//! ```text
//! ACL SETUSER holdfast on >PASSWORD resetkeys resetchannels -@all
//!     ~lock:* ~holdfast:* &holdfast:*
//!     +eval +evalsha +get +set +del +incrby +exists +mget +pttl +pexpire +time +zadd +zrem +zscore +zrangebyscore +zrevrange
//!     +publish +subscribe +unsubscribe +scan +select
//! ```
//!
//! `+scan` is for `list` only, and `+select` for a database other than 0. (`HELLO` and `AUTH` are open to everybody.)
//! Besides, a user needs
//!
//! - under Sentinel: `+role`
//! - with `minReplicas`: `+wait`
//! - in a cluster: `+cluster|slots +asking +spublish +ssubscribe +sunsubscribe`, on every node
//!
//! and, where the sentinels have users, there
//!
//! ```text
//! user holdfast on >PASSWORD -@all resetchannels &+switch-master +sentinel|get-master-addr-by-name +subscribe
//! ```

mod config;
mod connection;
mod error;
#[cfg(unix)]
mod fast_path;
mod keys;
mod ops;
mod queue;
mod quorum;
mod scripts;
#[cfg(test)]
mod tests;
mod topology;

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use redis::Value;

pub use config::RedisConfig;
pub use quorum::{QuorumConfig, QuorumEngine};

use self::connection::Link;
use self::connection::request::Attempt;
use self::error::{ENGINE, Failure};
use self::keys::{LAST, Layout, Part};
#[cfg(unix)]
use self::ops::acquire_plain::Undecided;
use self::ops::release::Dropped;
use self::queue::Waiters;
use self::scripts::{Script, TRANSFER};
use self::topology::Route;
use self::topology::failover::Listening;
use self::topology::replicas::Replicated;
use super::{Acquired, Answers, Attempts, Engine, Released, Releases, Renewal, Renewed, Result, Subscription};
use crate::model::{Claim, Key, LockInfo, OwnerToken, Ttl};

/// How long the last fence of a name outlives its last lease in a cluster: a day, less the hour for which renewals may
/// leave it alone. After that, the server's clock alone keeps fences growing.
const FENCE_KEPT_MS: u64 = 24 * 60 * 60 * 1000;
/// The same on a server of its own, where the fences grow from a key for all names, and at a quorum's nodes, where they
/// grow from counters that names share: there the name's own is for inspection only, and has to outlast the hour for which
/// renewals may leave it alone.
const RECORD_KEPT_MS: u64 = 61 * 60 * 1000;

/// The engine behind `redis://` and `rediss://`.
pub struct RedisEngine {
    route: Route,
    /// Whether fences come from one key for all names. Not in a cluster, be it that a URL names but one of its servers.
    counts: bool,
    /// Where replicas have to acknowledge what is granted.
    replicated: Option<Replicated>,
    layout: Layout,
    waiters: Arc<Waiters>,
    dropped: Dropped,
    #[cfg(unix)]
    contended: ops::acquire_plain::Contended,
    /// Under sentinels, until the engine is closed.
    listening: Mutex<Option<Listening>>,
}

impl fmt::Debug for RedisEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisEngine")
            .field("layout", &self.layout)
            .finish_non_exhaustive()
    }
}

impl RedisEngine {
    /// Connects, and makes sure that the server is new enough.
    ///
    /// # Errors
    /// When the server cannot be reached or refuses the login, or is older than Redis 6.2.
    pub async fn connect(config: RedisConfig) -> Result<Arc<Self>> {
        let route = Route::new(config.clone());
        let replicated =
            (config.min_replicas > 0).then(|| Replicated::new(Link::new(config.clone()), config.min_replicas));
        let clustered = greet(&route).await.map_err(|failure| failure.during("connect"))?;
        #[cfg(unix)]
        if let Route::One(link) = &route {
            link.open_lane().await;
        }
        let listening = match (&route, config.sentinels()) {
            (Route::One(link), Some(sentinels)) => {
                let links: Vec<&Arc<Link>> = [link]
                    .into_iter()
                    .chain(replicated.as_ref().map(|replicated| &replicated.link))
                    .collect();
                Some(Listening::start(sentinels, &links, config.limit))
            }
            _ => None,
        };
        let layout = config.layout;
        let waiters = Waiters::new(route.clone(), layout.clone());
        Ok(Arc::new(RedisEngine {
            route,
            counts: !clustered,
            replicated,
            layout,
            waiters,
            dropped: Dropped::default(),
            #[cfg(unix)]
            contended: ops::acquire_plain::Contended::default(),
            listening: Mutex::new(listening),
        }))
    }

    /// How long a fence companion outlives its lease, in ms.
    fn fence_lasts(&self) -> u64 {
        if self.counts { RECORD_KEPT_MS } else { FENCE_KEPT_MS }
    }

    /// The key of the last fence of all, where there is one.
    fn last(&self) -> Option<&'static str> {
        self.counts.then_some(LAST)
    }

    /// Has what is told of locks written down, before somebody looks.
    fn write_records(&self) {
        #[cfg(unix)]
        if let Some((_, lane)) = self.lane() {
            lane.write_records();
        }
    }

    /// The slot of a name.
    fn slot(&self, key: &Key) -> u16 {
        self.route.slot(&self.layout, key.as_str())
    }

    /// Runs a script whose positive answer says that somebody holds a name (longer) now.
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
            None => self.route.run_as(script, call, slot, attempt).await,
        }
    }

    /// The call of a script with the keys of every name of a claim, and its first argument.
    fn call(&self, script: &Script, parts: &[Part], claim: &Claim) -> redis::Cmd {
        let mut call = script.call(&self.layout, parts, claim.keys().iter().map(Key::as_str));
        call.arg(claim.owner.as_str());
        call
    }

    async fn hand_over(&self, claim: &Claim, to: &OwnerToken) -> std::result::Result<Renewed, Failure> {
        self.write_records();
        let ttl = claim.ttl.as_millis();
        let mut call = self.call(&TRANSFER, &[Part::Lock, Part::Fence, Part::Metadata], claim);
        call.arg(to.as_str())
            .arg(ttl)
            .arg(ttl + self.fence_lasts())
            .arg(claim.process.pid)
            .arg(&claim.process.host);
        match self
            .run_safely(&TRANSFER, &call, self.slot(&claim.keys()[0]), None)
            .await?
        {
            Value::Int(1) => Ok(Renewed::Extended),
            Value::Int(0) => Ok(Renewed::Lost),
            _ => Err(Failure::Unexpected("of transfer.lua")),
        }
    }

    /// Makes one attempt, by plain commands where they suffice.
    async fn try_once(&self, claim: &Claim) -> Result<Acquired> {
        // A future is moved as a whole when it is boxed. So rare parts have a box of their own, which is created on demand.
        #[cfg(unix)]
        let busy = match self.plain_lane(claim) {
            None => false,
            Some((link, lane)) => match self.try_plainly(link, &lane, claim).await {
                Ok(Ok(acquired)) => {
                    if claim.waiting {
                        self.waiters.known.leave(&claim.owner);
                    }
                    return Ok(acquired);
                }
                Ok(Err(Undecided::Held)) if !claim.waiting => {
                    let (key, retry_after) = (claim.keys()[0].clone(), None);
                    return Ok(Acquired::Held { key, retry_after });
                }
                Ok(Err(undecided)) => matches!(undecided, Undecided::Held),
                Err(failure) => return Err(failure.during("acquire")),
            },
        };
        #[cfg(not(unix))]
        let busy = false;
        let acquired = Box::pin(self.try_by_script(claim, busy)).await;
        acquired.map_err(|failure| failure.during("acquire"))
    }

    /// One try for all names of a claim. `busy`: a first try has found them so.
    async fn try_by_script(&self, claim: &Claim, busy: bool) -> std::result::Result<Acquired, Failure> {
        let acquired = match self.parts(claim) {
            None => self.acquire(claim, claim, 0, busy).await?,
            Some(parts) => Box::pin(self.acquire_parts(&parts, claim)).await?,
        };
        if claim.waiting && matches!(acquired, Acquired::Granted { .. }) {
            // Only now: until all names are granted, a waiter keeps its number in the order of arrival.
            self.waiters.known.leave(&claim.owner);
        }
        Ok(acquired)
    }
}

/// The oldest Redis that will do.
const OLDEST: (u32, u32) = (6, 2);
/// The same for a cluster: before, channels had no slots.
const OLDEST_IN_CLUSTER: (u32, u32) = (7, 0);

/// Makes sure that a server answers, and is new enough. Answers whether it is a cluster's.
async fn greet(route: &Route) -> std::result::Result<bool, Failure> {
    let oldest = if route.is_cluster() { OLDEST_IN_CLUSTER } else { OLDEST };
    let mut last = Failure::Unserved;
    for server in route.servers().await? {
        match check_version(&server, oldest).await {
            // One of a cluster's masters may be down.
            Err(failure) if failure.retryable() => last = failure,
            outcome => return outcome,
        }
    }
    Err(last)
}

/// Asks for the version, and whether the server is a cluster's. The login has said `HELLO` already, but the driver keeps
/// the answer to itself.
async fn check_version(link: &Arc<Link>, oldest: (u32, u32)) -> std::result::Result<bool, Failure> {
    let mut hello = redis::cmd("HELLO");
    hello.arg(3);
    let Value::Map(fields) = link.call(&hello).await? else {
        return Err(Failure::Unexpected("of HELLO"));
    };
    let told = |what: &str| {
        fields.iter().find_map(|field| match field {
            (Value::BulkString(name), Value::BulkString(told)) if name == what.as_bytes() => {
                std::str::from_utf8(told).ok()
            }
            _ => None,
        })
    };
    match told("version") {
        Some(version) if is_older(version, oldest) => Err(Failure::TooOld(version.to_owned())),
        // What calls itself otherwise is taken at its word that it speaks RESP3.
        _ => Ok(told("mode") == Some("cluster")),
    }
}

fn is_older(version: &str, oldest: (u32, u32)) -> bool {
    let mut numbers = version.split('.').map(str::parse::<u32>);
    matches!((numbers.next(), numbers.next()), (Some(Ok(major)), Some(Ok(minor))) if (major, minor) < oldest)
}

#[async_trait]
impl Engine for RedisEngine {
    fn name(&self) -> &'static str {
        ENGINE
    }

    fn ordered(&self) -> bool {
        true
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Acquired> {
        let attempt = self.dropped.watch(claim);
        let acquired = self.try_once(claim).await;
        attempt.answered();
        acquired
    }

    async fn try_acquire_in_order(&self, claims: &[Arc<Claim>], answer: &mut Attempts<'_>) {
        self.acquire_in_order(claims, answer).await;
    }

    async fn renew(&self, claim: &Claim, ttl: Ttl) -> Result<Renewed> {
        self.prolong_whole(Renewal { claim, ttl })
            .await
            .map_err(|failure| failure.during("renew"))
    }

    async fn renew_all(&self, renewals: &[Renewal<'_>], answer: &mut Answers<'_>) {
        self.prolong_all(renewals, answer).await;
    }

    async fn transfer(&self, claim: &Claim, to: &OwnerToken) -> Result<Renewed> {
        let transferred = match self.parts(claim) {
            None => self.hand_over(claim, to).await,
            Some(parts) => self.hand_over_parts(&parts, to).await,
        };
        transferred.map_err(|failure| failure.during("transfer"))
    }

    async fn release(&self, claim: &Claim, keep: Duration) -> Result<Released> {
        #[cfg(unix)]
        if self.counts
            && keep.is_zero()
            && claim.keys().len() == 1
            && claim.metadata.is_none()
            && let Some((link, lane)) = self.lane()
            && !self.dropped.has(&claim.owner)
        {
            match self.free_on(link, &lane, claim).await {
                Ok(Some(released)) => return Ok(released),
                Ok(None) => {}
                Err(failure) => return Err(failure.during("release")),
            }
        }
        let released = Box::pin(self.release_whole(claim, keep)).await;
        released.map_err(|failure| failure.during("release"))
    }

    async fn release_all(&self, claims: &[Claim], answer: &mut Releases<'_>) {
        self.release_many(claims, answer).await;
    }

    async fn subscribe(&self, claim: &Claim, _key: &Key) -> Result<Box<dyn Subscription>> {
        Ok(Box::new(self.waiters.known.subscribe(&claim.owner)))
    }

    async fn inspect(&self, key: &Key) -> Result<Option<LockInfo>> {
        self.look_at(key.as_str())
            .await
            .map_err(|failure| failure.during("inspect"))
    }

    async fn list(&self, prefix: &str, page_timeout: Duration) -> Result<Vec<LockInfo>> {
        self.look_for(prefix, page_timeout).await
    }

    async fn force_release(&self, key: &Key) -> Result<bool> {
        self.free(key).await.map_err(|failure| failure.during("force_release"))
    }

    async fn close(&self) {
        *self.listening.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.route.close();
        if let Some(replicated) = &self.replicated {
            replicated.link.close();
        }
    }
}
