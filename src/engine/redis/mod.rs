//! Redis and Valkey: one node, from version 6.2 on.
//!
//! # Behavior
//! Every verb is one script and one round trip, for any number of names, and goes by the server's clock. The lock's key
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
//!     +eval +evalsha +get +set +del +exists +mget +pttl +pexpire +time +zadd +zrem +zscore +zrangebyscore +zrevrange
//!     +publish +subscribe +unsubscribe +scan +select
//! ```
//!
//! `+scan` is for `list` only, and `+select` for a database other than 0. (`HELLO` and `AUTH` are open to everybody.)

mod calls;
mod config;
mod connection;
mod failure;
mod health;
mod keys;
mod listing;
mod quorum;
mod renewal;
mod scripts;
mod slots;
mod subscription;
#[cfg(test)]
mod tests;
mod tls;
mod waiting;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use redis::Value;

pub use config::RedisConfig;
pub use quorum::{QuorumConfig, QuorumEngine};

use self::connection::Link;
use self::failure::{ENGINE, Failure};
use self::keys::{Layout, Part};
use self::scripts::{ACQUIRE, FORCE_RELEASE, RELEASE, Script, TRANSFER};
use self::waiting::Waiters;
use super::{Acquired, Answers, Engine, Released, Renewal, Renewed, Result, Subscription, WAITER_LIVENESS};
use crate::model::{Claim, Fence, Key, LockInfo, OwnerToken, Ttl};

/// How long the last fence of a name outlives its last lease: a day, less the hour for which renewals may leave it alone.
/// After that, the server's clock alone keeps fences growing.
const FENCE_KEPT_MS: u64 = 24 * 60 * 60 * 1000;
/// How the scripts tell a waiter.
const PUBLISH: &str = "PUBLISH";

/// The engine behind `redis://` and `rediss://`.
pub struct RedisEngine {
    link: Arc<Link>,
    layout: Layout,
    waiters: Arc<Waiters>,
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
        let layout = config.layout.clone();
        let link = Link::new(config);
        check_version(&link)
            .await
            .map_err(|failure| failure.during("connect"))?;
        let waiters = Waiters::new(link.clone(), layout.clone());
        Ok(Arc::new(RedisEngine { link, layout, waiters }))
    }

    /// The call of a script with the keys of every name of a claim, and its first argument.
    fn call(&self, script: &Script, parts: &[Part], claim: &Claim) -> redis::Cmd {
        let mut call = script.call(&self.layout, parts, claim.keys().iter().map(Key::as_str));
        call.arg(claim.owner.as_str());
        call
    }

    /// One try, with a place in the queue for a waiter who finds the name busy.
    async fn acquire(&self, claim: &Claim) -> std::result::Result<Acquired, Failure> {
        if !claim.waiting {
            return self.attempt(claim, false).await;
        }
        if !self.waiters.listens() {
            // Who has no ear yet takes no place: the name would be handed to somebody who does not hear of it. Free names
            // cost one round trip all the same.
            let first = self.attempt(claim, false).await?;
            if matches!(first, Acquired::Granted { .. }) {
                return Ok(first);
            }
            self.waiters.listen().await?;
        }
        self.attempt(claim, true).await
    }

    async fn attempt(&self, claim: &Claim, queueing: bool) -> std::result::Result<Acquired, Failure> {
        const PARTS: [Part; 4] = [Part::Lock, Part::Fence, Part::Queue, Part::Metadata];
        let parts = if claim.metadata.is_some() {
            &PARTS[..]
        } else {
            &PARTS[..3]
        };
        let ttl = claim.ttl.as_millis();
        let (member, number) = if queueing {
            (self.waiters.member(claim), self.waiters.number(&claim.owner))
        } else {
            (String::new(), 0)
        };
        let mut call = self.call(&ACQUIRE, parts, claim);
        call.arg(ttl)
            .arg(ttl + FENCE_KEPT_MS)
            .arg(claim.process.pid)
            .arg(&claim.process.host)
            .arg(PUBLISH)
            .arg(member)
            .arg(number)
            .arg(WAITER_LIVENESS.as_millis() as u64);
        if let Some(metadata) = &claim.metadata {
            call.arg(&**metadata);
        }
        match self.link.run(&ACQUIRE, &call).await? {
            Value::Int(fence) if fence > 0 => {
                if queueing {
                    self.waiters.leaves(&claim.owner);
                }
                Ok(Acquired::Granted {
                    fence: Fence(fence as u64),
                })
            }
            Value::Array(held) => match held[..] {
                [Value::Int(index @ 1..), Value::Int(left), Value::Int(number @ 0..)]
                    if index as usize <= claim.keys().len() =>
                {
                    let key = &claim.keys()[index as usize - 1];
                    let retry_after = retry_after(left);
                    if queueing {
                        self.waiters.waits(&claim.owner, key, number as u64, retry_after);
                    }
                    Ok(Acquired::Held {
                        key: key.clone(),
                        retry_after,
                    })
                }
                _ => Err(Failure::Unexpected("of acquire.lua")),
            },
            _ => Err(Failure::Unexpected("of acquire.lua")),
        }
    }

    async fn hand_over(&self, claim: &Claim, to: &OwnerToken) -> std::result::Result<Renewed, Failure> {
        let ttl = claim.ttl.as_millis();
        let mut call = self.call(&TRANSFER, &[Part::Lock, Part::Fence, Part::Metadata], claim);
        call.arg(to.as_str())
            .arg(ttl)
            .arg(ttl + FENCE_KEPT_MS)
            .arg(claim.process.pid)
            .arg(&claim.process.host);
        match self.link.run(&TRANSFER, &call).await? {
            Value::Int(1) => Ok(Renewed::Extended),
            Value::Int(0) => Ok(Renewed::Lost),
            _ => Err(Failure::Unexpected("of transfer.lua")),
        }
    }

    async fn let_go(&self, claim: &Claim, keep: Duration) -> std::result::Result<Released, Failure> {
        const PARTS: [Part; 4] = [Part::Lock, Part::Metadata, Part::Queue, Part::Fence];
        let mut member = String::new();
        if claim.waiting {
            self.waiters.leaves(&claim.owner);
            member = self.waiters.member(claim);
        }
        let parts = if keep.is_zero() { &PARTS[..3] } else { &PARTS[..] };
        let mut call = self.call(&RELEASE, parts, claim);
        call.arg(PUBLISH).arg(member);
        if !keep.is_zero() {
            let keep = Ttl::clamped(keep).as_millis();
            call.arg(keep).arg(keep + FENCE_KEPT_MS);
        }
        match self.link.run(&RELEASE, &call).await? {
            Value::Int(1) => Ok(Released::Freed),
            Value::Int(0) => Ok(Released::NotHeld),
            _ => Err(Failure::Unexpected("of release.lua")),
        }
    }

    async fn free(&self, key: &Key) -> std::result::Result<bool, Failure> {
        let mut call = FORCE_RELEASE.call(
            &self.layout,
            &[Part::Lock, Part::Metadata, Part::Queue],
            std::iter::once(key.as_str()),
        );
        call.arg(PUBLISH);
        match self.link.run(&FORCE_RELEASE, &call).await? {
            Value::Int(freed) => Ok(freed == 1),
            _ => Err(Failure::Unexpected("of force_release.lua")),
        }
    }
}

/// When a busy name is worth another try, from its PTTL: negative when it never expires. A key in its last millisecond
/// has a PTTL of 0, and is still busy.
fn retry_after(left: i64) -> Option<Duration> {
    u64::try_from(left).ok().map(|left| Duration::from_millis(left.max(1)))
}

/// Asks for the version. The login has said `HELLO` already, but the driver keeps the answer to itself.
async fn check_version(link: &Arc<Link>) -> std::result::Result<(), Failure> {
    let mut hello = redis::cmd("HELLO");
    hello.arg(3);
    let Value::Map(fields) = link.call(&hello).await? else {
        return Err(Failure::Unexpected("of HELLO"));
    };
    let version = fields.iter().find_map(|field| match field {
        (Value::BulkString(name), Value::BulkString(version)) if name == b"version" => {
            std::str::from_utf8(version).ok()
        }
        _ => None,
    });
    match version {
        Some(version) if is_too_old(version) => Err(Failure::TooOld(version.to_owned())),
        // What calls itself otherwise is taken at its word that it speaks RESP3.
        _ => Ok(()),
    }
}

fn is_too_old(version: &str) -> bool {
    let mut numbers = version.split('.').map(str::parse::<u32>);
    matches!((numbers.next(), numbers.next()), (Some(Ok(major)), Some(Ok(minor))) if (major, minor) < (6, 2))
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
        self.acquire(claim).await.map_err(|failure| failure.during("acquire"))
    }

    async fn renew(&self, claim: &Claim, ttl: Ttl) -> Result<Renewed> {
        self.prolong(Renewal { claim, ttl })
            .await
            .map_err(|failure| failure.during("renew"))
    }

    async fn renew_all(&self, renewals: &[Renewal<'_>], answer: &mut Answers<'_>) {
        self.prolong_all(renewals, answer).await;
    }

    async fn transfer(&self, claim: &Claim, to: &OwnerToken) -> Result<Renewed> {
        self.hand_over(claim, to)
            .await
            .map_err(|failure| failure.during("transfer"))
    }

    async fn release(&self, claim: &Claim, keep: Duration) -> Result<Released> {
        self.let_go(claim, keep)
            .await
            .map_err(|failure| failure.during("release"))
    }

    async fn subscribe(&self, claim: &Claim, _key: &Key) -> Result<Box<dyn Subscription>> {
        Ok(Box::new(self.waiters.subscribe(&claim.owner)))
    }

    async fn inspect(&self, key: &Key) -> Result<Option<LockInfo>> {
        self.look_at(key.as_str())
            .await
            .map_err(|failure| failure.during("inspect"))
    }

    async fn list(&self, prefix: &str) -> Result<Vec<LockInfo>> {
        self.look_for(prefix).await.map_err(|failure| failure.during("list"))
    }

    async fn force_release(&self, key: &Key) -> Result<bool> {
        self.free(key).await.map_err(|failure| failure.during("force_release"))
    }

    async fn close(&self) {
        self.link.close();
    }
}
