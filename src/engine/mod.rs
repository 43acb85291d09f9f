//! The narrow trait that every store implements, its answer types, and the one place that knows which stores there are.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;

use crate::error::EngineError;
use crate::model::{Claim, Fence, Key, LockInfo, OwnerToken, Ttl};

#[cfg(any(feature = "mongodb", feature = "redis"))]
mod attempt_queue;
mod config;
#[cfg(test)]
pub(crate) mod contract;
#[cfg(feature = "memory")]
pub mod memory;
#[cfg(feature = "mongodb")]
pub mod mongodb;
#[cfg(feature = "redis")]
pub mod redis;
#[cfg(feature = "sqlite")]
pub mod sql;
#[cfg(any(feature = "mongodb", feature = "redis"))]
mod waiters;

pub use config::{EngineConfig, Settings, TlsFiles, connect};

/// What an engine answers: its answer, or how the store failed.
pub type Result<T> = std::result::Result<T, EngineError>;

/// The answer to one try. Busy is an answer, not an error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Acquired {
    /// Every name of the claim is held by it now.
    Granted {
        /// Larger than every fence that any of the names was granted with before.
        fence: Fence,
    },
    /// At least one name is busy, and the claim holds nothing.
    Held {
        /// The (first) busy name: the one to watch.
        key: Key,
        /// When a new try is worthwhile even if nothing is heard until then: what the holder's lease still lasts, or
        /// what a silent waiter ahead may still take. `None`: the store does not know (a lock
        /// that never expires), or the claim does not wait and was not told.
        retry_after: Option<Duration>,
    },
}

/// The answer to a renewal, and to a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Renewed {
    /// Every name now lasts at least the ttl asked for.
    Extended,
    /// At least one name is not held by this owner any more (expired, deleted, taken over).
    Lost,
}

/// One lease of many that are renewed together.
#[derive(Debug, Clone, Copy)]
pub struct Renewal<'a> {
    /// The lease.
    pub claim: &'a Claim,
    /// How long every name of it is to last from now on, at least.
    pub ttl: Ttl,
}

/// Where the answers to many renewals go: which one, by its place in the list, and its answer.
pub type Answers<'a> = dyn FnMut(usize, Result<Renewed>) + Send + 'a;

/// Receives the answers to several attempts: the index in the list, and the answer.
pub type Attempts<'a> = dyn FnMut(usize, Result<Acquired>) + Send + 'a;

/// Receives the answers to several releases: the index in the list, and the answer.
pub type Releases<'a> = dyn FnMut(usize, Result<Released>) + Send + 'a;

/// The answer to a release.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Released {
    /// The claim held its names, and holds them no more.
    Freed,
    /// The claim did not hold (all of) its names. What it still held of them is freed, too.
    NotHeld,
}

/// A subscription to changes of one name. Dropping it ends it.
#[async_trait]
pub trait Subscription: Send {
    /// Waits until a new try may be worthwhile. A hint, no more: it may come without need, and a lost one is made good
    /// by the service's own safety poll. A change that happened between the subscription and this call is not missed.
    async fn changed(&mut self);

    /// Whether it sees to it by itself that no change is missed for long (the end of the lease in the way, a lost
    /// message, a store that fails). Its holder then makes no safety polls: a crowd of waiters would make many.
    fn keeps_watch(&self) -> bool {
        false
    }
}

/// One store.
///
/// # Contract
/// The cases in `contract/` are the contract; every engine passes all of them. In words:
///
/// - Nothing here waits for a busy name, and nothing retries: only the service does. An engine keeps (and re-opens) its
///   connection, and gives an error when the store cannot be reached; how long to wait for an answer is the service's.
/// - Every answer is by the store's clock. A lease past its end is free at once, whatever still lies in the store.
/// - Each verb may be called again with the same claim after an error, because the reply may be lost after the store
///   did the work: `try_acquire` by the owner that holds the names already is `Granted` with the fence it was granted
///   with, and lasts the full ttl from then on.
/// - A future may be dropped at any point without harm to other calls; the work may or may not be done then.
/// - Dropping an attempt cancels it: a command that has not left the process is never sent afterwards. An attempt calls
///   [`Claim::mark_sent`] before its first command can leave the process.
/// - A release after a dropped attempt of the same claim takes effect after what that attempt sent, also in an engine with
///   several connections. The only exception is a connection that broke: its bytes may arrive later. The service therefore
///   repeats releases of claims whose attempts failed.
/// - Where an engine has a queue of calls, `renew` and `release` go before queued attempts.
/// - A claim of several names is held as a whole or not at all.
#[async_trait]
pub trait Engine: Send + Sync + fmt::Debug {
    /// The store's name: module, feature and URL scheme.
    fn name(&self) -> &'static str;

    /// Whether the store serves waiters in the order of their first try (`claim.waiting`). Where it does not, the
    /// service lets one waiter per name and process through.
    fn ordered(&self) -> bool;

    /// One try for all names of the claim.
    ///
    /// # Behavior
    /// In an ordered store a try never passes a live waiter that came before it. With `claim.waiting`, a busy try takes
    /// (or keeps alive) a place in the queue of the name that it answers; a place whose owner does not try again
    /// lapses after a time no longer than the claim's ttl.
    async fn try_acquire(&self, claim: &Claim) -> Result<Acquired>;

    /// Makes attempts for several waiters of this process with the same first name. They take effect in the order of the
    /// list.
    ///
    /// # Behavior
    /// The service calls this where [`Engine::ordered`] is true, with `waiting` claims. At most one call per name is in
    /// progress. Each claim gets one answer. A store that can enter several waiters in one command does so; the default
    /// makes one attempt after the other.
    async fn try_acquire_in_order(&self, claims: &[Arc<Claim>], answer: &mut Attempts<'_>) {
        for (index, claim) in claims.iter().enumerate() {
            answer(index, self.try_acquire(claim).await);
        }
    }

    /// Makes every name of the claim last at least `ttl` from now on. Never shortens a lease, so that a renewal that is
    /// carried out late cannot undo a longer one; never re-creates a lock that vanished.
    async fn renew(&self, claim: &Claim, ttl: Ttl) -> Result<Renewed>;

    /// Renews many leases, each of them as [`Engine::renew`] does.
    ///
    /// # Behavior
    /// Every renewal is answered once, as soon as its answer is there and before this returns. None fails, or waits,
    /// because of another: what is answered counts even when the call is dropped because the rest is silent. A store
    /// that can carry out several in one go does so; the others are called for each at the same time.
    async fn renew_all(&self, renewals: &[Renewal<'_>], answer: &mut Answers<'_>) {
        renew_each(self, renewals, answer).await;
    }

    /// Makes `to` the owner of every name of the claim, in the place of `claim.owner`.
    ///
    /// # Behavior
    /// `Lost`, with nothing changed, unless every name is held by `claim.owner`, or by `to` already (a retry after a lost
    /// reply). Each then lasts at least `claim.ttl` from now on, and never less than it did; its holder is
    /// `claim.process`. Fence, metadata and the time of the grant stay: it is the same lease in other hands. The old owner
    /// is a stranger from then on, who can neither renew nor release it.
    async fn transfer(&self, claim: &Claim, to: &OwnerToken) -> Result<Renewed>;

    /// Frees what the claim holds, gives up its place in the queue, and tells whoever is next.
    ///
    /// # Behavior
    /// With `keep` over zero, names that are held stay busy for so long instead of being freed at once, and nobody can
    /// renew or release them any more than a stranger's (the owner is still named, but it has let go).
    async fn release(&self, claim: &Claim, keep: Duration) -> Result<Released>;

    /// Releases many abandoned claims, oldest first, each as [`Engine::release`] does with a `keep` of zero.
    ///
    /// # Behavior
    /// Each claim gets one answer. A store that can release several in one command does so; the default calls
    /// [`Engine::release`] for all of them concurrently. The service passes at most 256.
    async fn release_all(&self, claims: &[Claim], answer: &mut Releases<'_>) {
        release_each(self, claims, answer).await;
    }

    /// Subscribes to changes of `key`, on behalf of `claim`. When this returns, no change after it is missed.
    async fn subscribe(&self, claim: &Claim, key: &Key) -> Result<Box<dyn Subscription>>;

    /// Who holds a name. `None` when it is free (or past its end).
    async fn inspect(&self, key: &Key) -> Result<Option<LockInfo>>;

    /// Everything held whose name starts with `prefix` (literal text), sorted by name.
    ///
    /// # Behavior
    /// A store that answers in pages gives each page `page_timeout`. The number of pages is not limited.
    ///
    /// # Errors
    /// Also when one page had no answer within `page_timeout`.
    async fn list(&self, prefix: &str, page_timeout: Duration) -> Result<Vec<LockInfo>>;

    /// Frees a name whoever holds it, and tells whoever is next. `false` when nobody held it.
    async fn force_release(&self, key: &Key) -> Result<bool>;

    /// Gives back connections and threads. Later calls may fail.
    async fn close(&self);
}

/// The longest that a silent waiter keeps its place in a queue, where a store has one.
#[cfg(any(feature = "memory", feature = "sqlite", feature = "mongodb"))]
const WAITER_LIVENESS: Duration = Duration::from_millis(4500);
/// A place that lapsed is remembered for so long, so that a waiter that was merely slow comes back to it.
#[cfg(any(feature = "memory", feature = "sqlite"))]
const LAPSED_PLACE_KEPT: Duration = Duration::from_secs(60);

/// Returns how long a place in a queue lives after its owner's last attempt.
#[cfg(any(feature = "memory", feature = "sqlite"))]
fn waiter_liveness(ttl: Ttl) -> Duration {
    ttl.duration().min(WAITER_LIVENESS)
}

/// Returns the time after which a waiter with a place tries again.
///
/// # Behavior
/// `wait`: the rest of the current lease. A waiter tries again twice before its place expires. It also tries again when the
/// place directly ahead of it expires (`ahead`): a release before that moment wakes only the waiter ahead, which may be
/// dead.
#[cfg(any(feature = "memory", feature = "sqlite"))]
fn waiter_retry(wait: Duration, liveness: Duration, ahead: Option<Duration>) -> Duration {
    let ahead = ahead.map_or(Duration::MAX, |ahead| ahead.max(LEAST_WAITER_RETRY));
    wait.min(liveness / 3).min(ahead)
}

/// The shortest retry because of the place ahead.
#[cfg(any(feature = "memory", feature = "sqlite"))]
const LEAST_WAITER_RETRY: Duration = Duration::from_millis(100);

/// Calls an engine for each of many renewals, at the same time.
pub(crate) async fn renew_each<E: Engine + ?Sized>(engine: &E, renewals: &[Renewal<'_>], answer: &mut Answers<'_>) {
    let calls = renewals.iter().enumerate();
    let mut calls: FuturesUnordered<_> = calls
        .map(|(index, renewal)| async move { (index, engine.renew(renewal.claim, renewal.ttl).await) })
        .collect();
    while let Some((index, renewed)) = calls.next().await {
        answer(index, renewed);
    }
}

/// Calls an engine for each of many releases, concurrently.
pub(crate) async fn release_each<E: Engine + ?Sized>(engine: &E, claims: &[Claim], answer: &mut Releases<'_>) {
    let calls = claims.iter().enumerate();
    let mut calls: FuturesUnordered<_> = calls
        .map(|(index, claim)| async move { (index, engine.release(claim, Duration::ZERO).await) })
        .collect();
    while let Some((index, released)) = calls.next().await {
        answer(index, released);
    }
}

/// A store that can be shared by the tasks of a service.
pub type SharedEngine = Arc<dyn Engine>;
