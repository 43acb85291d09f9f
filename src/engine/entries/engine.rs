//! The engine of stores where the order of entries is the lock.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::{StreamExt, stream};
use parking_lot::Mutex;
use tokio::sync::{Semaphore, watch};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use super::local::LocalEntries;
use super::record::{Seen, Stored};
use super::store::{Failure, Outcome, Store};
use crate::backoff::Backoff;
use crate::engine::ends::Ends;
use crate::engine::{
    Acquired, Answers, Description, DetectorSlot, Engine, Read, Released, Renewal, Renewed, Result, Subscription,
    answer_each,
};
use crate::model::{Claim, Fence, Key, LockInfo, OwnerToken};

/// The maximum number of names of a claim: two operations for each of them in a step of at most 128 (etcd's `--max-txn-ops`).
const MOST_NAMES: usize = 60;
/// The number of names in one read of many names.
pub(in crate::engine) const PAGE_SIZE: usize = 50;
/// The time between two reads of a fencing token that is not written yet, and the number of these reads.
pub(super) const TOKEN_POLL: Duration = Duration::from_millis(20);
pub(super) const TOKEN_POLLS: u32 = 25;
/// The number of these reads for a page of a list.
const PAGE_POLLS: u32 = 5;
/// The maximum number of deletions that are repeated at the same time: a store may refuse them all.
const MOST_REPEATS: usize = 16;
/// The maximum number of tries of a verb: it begins again when an entry has changed since it was read.
pub(super) const ROUNDS: usize = 16;

/// The entries of one claim of this process: a lease, or the positions of a waiter.
#[derive(Debug, Clone)]
pub(super) struct OwnClaim {
    /// In the order of the names.
    pub entries: Vec<Stored>,
    /// The fencing token of its lease. `None`: it waits.
    pub fence: Option<Fence>,
    pub needs_token: bool,
}

/// What the verbs and the tasks of an engine share.
pub(super) struct Core {
    pub store: Arc<dyn Store>,
    pub local: Arc<LocalEntries>,
    /// The claims of this process, with the ends of their leases, or of the positions of waiters that make no more attempts.
    pub claims: Ends<OwnerToken, OwnClaim>,
    /// When the fencing token of a grant is written to its entries.
    pub records: Ends<OwnerToken, ()>,
    /// The owners whose entries are deleted in the background.
    pub ending: watch::Sender<HashSet<OwnerToken>>,
    /// For deletions that have failed, and the delays after them.
    pub repeats: (Semaphore, Mutex<Backoff>),
    pub detector: DetectorSlot,
    /// A server at which a watch is not open after this time may be silent.
    pub opening: Duration,
}

/// The engine behind `etcd://` and `zookeeper://` URLs.
pub(in crate::engine) struct EntryEngine {
    pub(super) core: Arc<Core>,
    /// Ends the tasks.
    running: CancellationToken,
}

impl fmt::Debug for EntryEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple(self.core.store.name())
            .field(&self.core.store.address())
            .finish()
    }
}

impl Drop for EntryEngine {
    fn drop(&mut self) {
        self.running.cancel();
    }
}

impl EntryEngine {
    /// Creates an engine. Closing or dropping it cancels `running`. `store_timeout`: as in [`Servers`](super::servers::Servers).
    pub(in crate::engine) fn new<S: Store>(
        store: impl FnOnce(Arc<LocalEntries>) -> S,
        running: CancellationToken,
        store_timeout: Duration,
    ) -> (Arc<S>, Self) {
        let (local, watches, grants) = LocalEntries::new();
        let store = Arc::new(store(local.clone()));
        let core = Arc::new(Core {
            store: store.clone(),
            local,
            claims: Ends::new(),
            records: Ends::new(),
            ending: watch::Sender::default(),
            repeats: (Semaphore::new(MOST_REPEATS), Mutex::new(Backoff::for_store())),
            detector: Arc::default(),
            opening: 2 * store_timeout / 5,
        });
        let tasks: [futures_util::future::BoxFuture<'static, ()>; 4] = [
            Box::pin(core.clone().watch_names(watches)),
            Box::pin(core.clone().hand_off(grants)),
            Box::pin(core.clone().end_claims()),
            Box::pin(core.clone().write_tokens()),
        ];
        for task in tasks {
            tokio::spawn(Box::pin(running.clone().run_until_cancelled_owned(task)));
        }
        (store, EntryEngine { core, running })
    }

    fn error<T>(&self, op: &'static str, outcome: Outcome<T>) -> Result<T> {
        outcome.map_err(|failure| failure.of(self.core.store.name(), op))
    }
}

impl Core {
    /// Reads names. Waits for fencing tokens that are not written yet, for `polls` reads at most.
    async fn settled(&self, names: &[Key], polls: u32) -> Outcome<Vec<Seen>> {
        for _ in 0..polls {
            let seen = self.store.read(names, None).await?;
            if !seen.iter().flat_map(Seen::holders).any(Stored::awaits_token) {
                return Ok(seen);
            }
            sleep(TOKEN_POLL).await;
        }
        self.store.read(names, None).await
    }

    async fn inspect(&self, name: &Key, polls: u32) -> Outcome<Vec<LockInfo>> {
        let seen = self.settled(std::slice::from_ref(name), polls).await?;
        Ok(seen.iter().flat_map(Seen::infos).collect())
    }

    async fn list(&self, prefix: &str, page_timeout: Duration) -> Outcome<Vec<LockInfo>> {
        let names = self.store.names(prefix, page_timeout).await?;
        let mut infos = Vec::new();
        for page in names.chunks(PAGE_SIZE) {
            let reading = self.settled(page, PAGE_POLLS);
            let seen = Failure::after(page_timeout, self.store.address(), reading).await?;
            infos.extend(seen.iter().flat_map(Seen::infos));
        }
        Ok(infos)
    }

    /// Releases a name of all owners. `false`: it was free.
    async fn force_release(&self, name: &Key) -> Outcome<bool> {
        let (mut last, mut is_released) = (None, false);
        for _ in 0..ROUNDS {
            let seen = self.store.read(std::slice::from_ref(name), None).await?;
            let mut holders: Vec<Stored> = seen.iter().flat_map(Seen::holders).cloned().collect();
            // Those behind it were granted by this call.
            let end = *last.get_or_insert(holders.last().map(|holder| holder.position));
            holders.retain(|holder| Some(holder.position) <= end);
            let mut is_done = true;
            for page in holders.chunks(PAGE_SIZE) {
                let is_deleted = self.store.delete(page).await?;
                (is_released, is_done) = (is_released || is_deleted, is_done && is_deleted);
            }
            if is_done {
                return Ok(is_released);
            }
            if !is_released {
                // Others have released them meanwhile: the next ones hold the name.
                last = None;
            }
        }
        Err(Failure::contended())
    }
}

#[async_trait]
impl Engine for EntryEngine {
    fn describe(&self) -> Description {
        Description {
            address: self.core.store.address(),
            detector: Some(self.core.detector.clone()),
            longest_lease: self.core.store.longest_lease(),
            most_names: MOST_NAMES,
            has_shares: true,
            ..Description::new(self.core.store.name(), true)
        }
    }

    async fn try_acquire_all(&self, claims: &[&Claim], answer: &mut Answers<'_, Acquired>) {
        let together = if self.core.store.keeps_order() { claims.len() } else { 1 };
        let attempts: Vec<_> = claims.iter().map(|claim| self.core.acquire(claim)).collect();
        let mut attempts = stream::iter(attempts).buffered(together.max(1)).enumerate();
        while let Some((index, acquired)) = attempts.next().await {
            answer(index, self.error("acquire", acquired));
        }
    }

    async fn renew_all(&self, renewals: &[Renewal<'_>], answer: &mut Answers<'_, Renewed>) {
        let mut answer = |index: usize, renewed| answer(index, self.error("renew", renewed));
        self.core.renew_all(renewals, &mut answer).await;
    }

    async fn transfer(&self, claim: &Claim, to: &OwnerToken) -> Result<Renewed> {
        self.error("transfer", self.core.rewrite(claim, to, claim.ttl).await)
    }

    async fn release_all(&self, claims: &[&Claim], keep: Duration, answer: &mut Answers<'_, Released>) {
        let calls = claims
            .iter()
            .map(|claim| async { self.error("release", self.core.release(claim, keep).await) });
        answer_each(calls, answer).await;
    }

    async fn subscribe(&self, claim: &Claim, _key: &Key) -> Result<Box<dyn Subscription>> {
        Ok(Box::new(self.core.local.subscribe(claim)))
    }

    async fn read(&self, what: Read<'_>) -> Result<Vec<LockInfo>> {
        match what {
            Read::Name { key, waits_for_token } => {
                let polls = if waits_for_token { TOKEN_POLLS } else { 0 };
                self.error("inspect", self.core.inspect(key, polls).await)
            }
            Read::Prefix { prefix, page_timeout } => self.error("list", self.core.list(prefix, page_timeout).await),
        }
    }

    async fn force_release(&self, key: &Key) -> Result<bool> {
        self.error("forceRelease", self.core.force_release(key).await)
    }

    async fn close(&self) {
        self.running.cancel();
        let own = &self.core.claims;
        let has_entries = |session| own.any(|own| own.entries.iter().any(|entry| entry.session == session));
        self.core.store.close(&has_entries).await;
    }
}
