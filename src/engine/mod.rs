//! The stores: the trait [`Engine`], which each of them implements, and its answer types.
//!
//! - `config.rs`: from a URL to an engine, the only match over stores. `settings.rs`: what a caller sets besides the URL. `target.rs`: the
//!   grammar of URLs. `credentials.rs`: logins for new connections. `tls/`: certificates. `probe.rs`: what kind of server answers.
//! - `errors/`: the tables of errors. `warnings.rs`: warnings for the user.
//! - `core/ledger/`: the rules of the lock as pure code, for memory and the SQL stores. `entries/`: the engine of the stores where the order of
//!   entries is the lock.
//! - `engine_ext.rs`: single calls.
//! - `local_waiters/`: the waiters of this process. `hand_off/`: until when a hand-off lasts. `ends.rs`: the ends of leases.
//! - `attempt_queue.rs`, `overload_queue.rs`: the attempts that wait, and their order.
//! - `memory.rs`, `redis/`, `mongodb/`, `sql/`, `etcd/`, `zookeeper/`: the stores.
//! - `contract/`: the cases that every engine passes.
//!
//! An engine makes single attempts. It never waits for a busy name and never retries: the service does (`service/acquire/`).

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;

use crate::clock::Moment;
use crate::error::EngineError;
use crate::model::{Claim, Fence, Key, LockInfo, OwnerToken, Ttl};
use crate::stall_detector::StallDetector;

mod attempt_queue;
pub mod config;
#[cfg(test)]
pub(crate) mod contract;
mod core;
mod credentials;
mod ends;
mod engine_ext;
#[cfg(any(feature = "etcd", feature = "zookeeper"))]
mod entries;
mod errors;
#[cfg(feature = "etcd")]
pub mod etcd;
mod hand_off;
mod local_waiters;
#[cfg(feature = "memory")]
pub mod memory;
#[cfg(feature = "mongodb")]
pub mod mongodb;
mod overload_queue;
mod probe;
#[cfg(feature = "redis")]
pub mod redis;
mod settings;
#[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
pub mod sql;
mod target;
#[cfg(any(
    feature = "etcd",
    feature = "mongodb",
    feature = "mysql",
    feature = "postgres",
    feature = "redis",
    feature = "zookeeper"
))]
mod tls;
mod warnings;
#[cfg(feature = "zookeeper")]
pub mod zookeeper;

pub use credentials::{Credentials, Login};
pub use engine_ext::EngineExt;
pub use settings::{Records, Resolver, Settings, TlsFiles};
pub use warnings::Warnings;

/// The result of an engine's operation. The error says how the store failed.
pub type Result<T> = std::result::Result<T, EngineError>;

/// The answer to one attempt. Busy is an answer, not an error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Acquired {
    /// The claim holds all of its names.
    Granted {
        /// Larger than every fencing token that any of the names was granted with before; may be [`Fence::NONE`] if the claim needs
        /// no token.
        fence: Fence,
    },
    /// At least one name is busy. The claim holds nothing.
    Held {
        /// The first busy name: the one to subscribe to.
        key: Key,
        /// The time after which a new attempt may succeed without a notification: the rest of the current lease, or the time
        /// until the position of a waiter ahead expires. `None`: the lock never expires, or the claim does not wait and the
        /// engine did not ask.
        retry_after: Option<Duration>,
    },
}

/// The least time for which a name is reserved for, or granted to, the waiter that it was handed to, unless the waiter's ttl is
/// shorter.
pub const RESERVATION: Duration = Duration::from_secs(2);

/// A grant that the store made for a waiter, without an attempt of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HandOff {
    /// As in [`Acquired::Granted`].
    pub fence: Fence,
    /// The lease lasts until this moment at least, which may be long before its ttl: the service renews it.
    pub until: Moment,
}

/// The answer to a renewal, and to a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Renewed {
    /// The lease on every name lasts at least the requested ttl from now on.
    Extended,
    /// The owner no longer holds at least one name: it expired, or was deleted or taken over.
    Lost,
}

/// One lease of many that are renewed together.
#[derive(Debug, Clone, Copy)]
pub struct Renewal<'a> {
    /// The lease.
    pub claim: &'a Claim,
    /// The lease on every name lasts at least this long from now on.
    pub ttl: Ttl,
}

/// Which locks are read.
#[derive(Debug, Clone, Copy)]
pub enum Read<'a> {
    /// The lock of one name, or all shares of a shared one.
    Name {
        /// The name.
        key: &'a Key,
        /// Whether to wait for a fencing token that the store shows later than the lock.
        waits_for_token: bool,
    },
    /// The locks whose name starts with a text.
    Prefix {
        /// The literal text.
        prefix: &'a str,
        /// The time limit for each page of a store that answers in pages, whose number is not limited.
        page_timeout: Duration,
    },
}

/// Receives the answers to several requests: the index in the list, and the answer.
pub type Answers<'a, T> = dyn FnMut(usize, Result<T>) + Send + 'a;

/// The answer to a release.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Released {
    /// The claim held all of its names. They are released.
    Freed,
    /// The claim did not hold all of its names. Those that it held are released.
    NotHeld,
}

/// A subscription to changes of one name. Dropping it unsubscribes.
#[async_trait]
pub trait Subscription: Send {
    /// Waits until a new attempt may succeed.
    ///
    /// # Behavior
    /// May return without a change. A lost notification is found by the service's safety poll. A change between the
    /// subscription and this call is not missed.
    async fn changed(&mut self);

    /// Returns the grant that the last change was, once. `None`: the waiter makes an attempt.
    ///
    /// # Behavior
    /// The claim has left the queue. A grant that is dropped is released as any other one.
    fn take_hand_off(&mut self) -> Option<HandOff> {
        None
    }

    /// Whether the subscription itself bounds the delay of a missed change (the expiry of the current lease, a lost message, a
    /// failed store). The service then makes no safety polls: many waiters would make many of them.
    fn is_reliable(&self) -> bool {
        false
    }
}

/// Where the detector of an event loop that does not respond is left once.
pub type DetectorSlot = Arc<OnceLock<Arc<StallDetector>>>;

/// What a store is.
#[derive(Clone)]
pub struct Description {
    /// Its name: its module, feature and URL scheme.
    pub name: &'static str,
    /// Its address for error messages. Empty if it has none, or consists of independent servers.
    pub address: String,
    /// Whether it keeps a queue, and serves waiters (`claim.waiting`) in the order of their first attempts. Otherwise the
    /// service lets one waiter per name and process make attempts.
    pub ordered: bool,
    /// The longest lease without a renewal, where a lease ends with a session of the server. `None`: any ttl.
    pub longest_lease: Option<Duration>,
    /// The maximum number of names of one claim.
    pub most_names: usize,
    /// Whether claims may have a share of a name, for semaphores and read/write locks.
    pub has_shares: bool,
    /// Its clock, if tests can move it: that of `memory:`.
    pub clock: Option<Arc<dyn MovableClock>>,
    /// Where the service leaves the detector of an event loop that does not respond. An engine that keeps the positions of waiters alive has
    /// it, and stops doing so while the loop does not respond, so that its waiters are skipped.
    pub detector: Option<DetectorSlot>,
}

impl Description {
    /// Describes a store without an address whose leases may have any ttl.
    pub fn new(name: &'static str, ordered: bool) -> Self {
        Description {
            name,
            address: String::new(),
            ordered,
            longest_lease: None,
            most_names: 1000,
            has_shares: false,
            clock: None,
            detector: None,
        }
    }

    /// Leaves the detector of an event loop that does not respond to the engine. Called once.
    pub fn watch_event_loop(&self, detector: &Arc<StallDetector>) {
        if let Some(slot) = &self.detector {
            let _ = slot.set(detector.clone());
        }
    }
}

/// One store.
///
/// # Contract
/// The test cases in `contract/` are the contract; every engine passes all of them. In words:
///
/// - An engine does not wait for a busy name and does not retry: the service does. An engine keeps and re-opens its connection,
///   and returns an error when the store cannot be reached. The service limits the time for an answer.
/// - Every answer is by the store's clock. A name is free when its lease has expired, whatever the store still contains.
/// - Each operation may be repeated with the same claim after an error, because the reply may be lost after the store did the
///   work. An attempt by the owner that already holds the names is `Granted`, with the same fencing token and the full ttl.
/// - A future may be dropped at any point without harm to other calls. The store may or may not execute the operation then.
/// - Dropping an attempt cancels it: a command that has not left the process is never sent afterwards. An attempt calls
///   [`Claim::mark_sent`] before its first command can leave the process.
/// - A release after a dropped attempt of the same claim takes effect after what that attempt sent, also in an engine with
///   several connections. The only exception is a broken connection: its bytes may arrive later. The service therefore
///   repeats releases of claims whose attempts failed.
/// - Where an engine has a queue of calls, `renew` and `release` go before queued attempts.
/// - A claim of several names is held as a whole or not at all.
/// - A claim with a share has one name, and that is a shared one. It is granted while the permits in use and its own are at most the
///   smallest limit of all. It never overtakes an earlier waiter. Only where [`Description::has_shares`] is true.
///
/// Each method takes what one command of the store can serve together; [`EngineExt`] has the single calls. Each element of a list gets one
/// answer, as soon as it arrives and before the method returns. No element fails or waits because of another one. An answer that was received
/// counts even when the future is dropped before the others arrive.
#[async_trait]
pub trait Engine: Send + Sync + fmt::Debug {
    /// Describes the store: the same for the life of the engine, except for its address.
    fn describe(&self) -> Description;

    /// Makes one attempt for each claim to acquire all of its names, in the order of the list.
    ///
    /// # Behavior
    /// In an ordered store, an attempt never succeeds before a live waiter that came earlier. With `claim.waiting`, a busy attempt
    /// enters the queue of the name that it returns, or keeps its position there alive. A position expires when its owner makes
    /// no attempt for a time that is at most the claim's ttl, unless its engine keeps it alive ([`Subscription::is_reliable`]).
    ///
    /// The service passes several claims where [`Description::ordered`] is true: waiters of this process with the same first name. At most one
    /// such call per name is in progress.
    async fn try_acquire_all(&self, claims: &[&Claim], answer: &mut Answers<'_, Acquired>);

    /// Extends the lease on every name of each claim to at least its `ttl` from now on.
    ///
    /// # Behavior
    /// Never shortens a lease: a renewal that the store executes late cannot revert a longer one. Never re-creates a lock that
    /// is gone.
    async fn renew_all(&self, renewals: &[Renewal<'_>], answer: &mut Answers<'_, Renewed>);

    /// Transfers every name of the claim from `claim.owner` to `to`.
    ///
    /// # Behavior
    /// Returns `Lost` and changes nothing unless every name is held by `claim.owner`, or already by `to` (a retry after a lost
    /// reply). The lease then lasts at least `claim.ttl` from now on and is never shortened; its holder is `claim.process`.
    /// Fencing token, metadata and time of the grant stay the same. The old owner can neither renew nor release the lease any
    /// more.
    async fn transfer(&self, claim: &Claim, to: &OwnerToken) -> Result<Renewed>;

    /// Releases the names that each claim holds, removes its position in the queue, and notifies the next waiter.
    ///
    /// # Behavior
    /// With `keep` over zero, held names stay busy for that time. The owner can neither renew nor release them any more;
    /// they still have it as the holder. Several claims (the service passes at most 256) have a `keep` of zero.
    async fn release_all(&self, claims: &[&Claim], keep: Duration, answer: &mut Answers<'_, Released>);

    /// Subscribes to changes of `key` for `claim`. A change after this returns is not missed.
    async fn subscribe(&self, claim: &Claim, key: &Key) -> Result<Box<dyn Subscription>>;

    /// Reads held locks, sorted by name.
    ///
    /// # Errors
    /// Those of the store, and no answer to one page within its time limit.
    async fn read(&self, what: Read<'_>) -> Result<Vec<LockInfo>>;

    /// Releases a name of any owner, a shared one of all owners, and notifies the next waiters. `false`: it was free.
    async fn force_release(&self, key: &Key) -> Result<bool>;

    /// Closes connections and ends threads. Later calls may fail.
    async fn close(&self);
}

/// The clock of a store that tests can move (`service/testing.rs`).
pub trait MovableClock: Send + Sync {
    /// Returns when the next lease in the store expires.
    fn next_expiry(&self) -> Option<Moment>;

    /// Moves the clock forward, and notifies the waiters of names that became free.
    fn advance(&self, by: Duration);

    /// Whether every notified waiter has made its attempt, and its call has received the grant.
    fn is_settled(&self) -> bool;
}

/// How long a position in a queue lives after its owner's last attempt or heartbeat, unless the claim's ttl is shorter.
const WAITER_LIVENESS: Duration = Duration::from_millis(4500);
/// How long an expired position is kept: a waiter that was only slow finds it again.
const EXPIRED_POSITION_KEPT: Duration = Duration::from_secs(60);

/// Makes calls concurrently, and answers for each of them.
pub(crate) async fn answer_each<T>(
    calls: impl Iterator<Item = impl Future<Output = Result<T>>>,
    answer: &mut Answers<'_, T>,
) {
    let numbered = calls.enumerate();
    let mut calls: FuturesUnordered<_> = numbered
        .map(|(index, call)| async move { (index, call.await) })
        .collect();
    while let Some((index, outcome)) = calls.next().await {
        answer(index, outcome);
    }
}

/// An engine that the tasks of a service share.
pub type SharedEngine = Arc<dyn Engine>;
