//! `zookeeper://`: ZooKeeper 3.6 and later.
//!
//! A lock is the oldest of the sequential nodes in the folder of its name, as in Curator's recipe. The nodes are ephemeral: they
//! end with the session of the process. So no lease lasts longer than half of the session timeout without a renewal, which reads
//! the node and has evidence that the session lasts (`client/evidence.rs`).

mod acquire;
mod client;
mod config;
mod error;
mod inspect;
mod layout;
mod own;
mod record;
mod release;
mod renew;
mod sets;
#[cfg(test)]
mod tests;
mod watches;

use std::collections::HashSet;
use std::fmt;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use tokio_util::sync::{CancellationToken, DropGuard};

use self::client::{Access, Client, Failure, Kind, Request, code};
pub use self::config::ZookeeperConfig;
use self::error::NAME;
use self::layout::Layout;
use self::own::OwnClaims;
use super::ends::Ends;
use super::entries::LocalEntries;
use super::{Acquired, Answers, Attempts, Engine, Released, Renewal, Renewed, Result, Subscription};
use crate::clock::Moment;
use crate::error::EngineError;
use crate::model::{Claim, Key, LockInfo, OwnerToken, Ttl};
use crate::stall_detector::StallDetector;

/// The engine behind `zookeeper://` URLs.
pub struct ZookeeperEngine {
    store: Arc<Store>,
    /// Ends the tasks.
    _running: DropGuard,
}

impl fmt::Debug for ZookeeperEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ZookeeperEngine")
            .field("client", &self.store.client)
            .finish_non_exhaustive()
    }
}

/// What the engine and its tasks share.
struct Store {
    client: Client,
    layout: Layout,
    entries: Arc<LocalEntries>,
    own: OwnClaims,
    /// When each own claim ends: a lease, or the position of a waiter that makes no more attempts.
    ends: Ends<OwnerToken, ()>,
    /// When the fencing token of each grant is written to its entries.
    records: Ends<OwnerToken, ()>,
    /// Held while data of own entries is written, so that their versions are known.
    writes: tokio::sync::Mutex<()>,
    /// The paths of the entries that are deleted in the background.
    ending: Mutex<HashSet<String>>,
    /// The number of the last message that a mirror depends on.
    revision: AtomicU64,
    stall_detector: OnceLock<Arc<StallDetector>>,
}

impl ZookeeperEngine {
    /// Opens a session, and creates the path of the URL if it is missing.
    ///
    /// # Errors
    /// When no server can be reached, or the login is refused.
    pub async fn connect(config: ZookeeperConfig) -> Result<Arc<Self>> {
        let ZookeeperConfig { servers, login, layout } = config;
        let client = Client::connect(servers, login).await;
        let client = client.map_err(|failure| error::unreachable("connect", &failure))?;
        let (entries, watches) = LocalEntries::new();
        let store = Arc::new(Store {
            client,
            layout,
            entries,
            own: OwnClaims::default(),
            ends: Ends::new(),
            records: Ends::new(),
            writes: tokio::sync::Mutex::default(),
            ending: Mutex::default(),
            revision: AtomicU64::new(0),
            stall_detector: OnceLock::new(),
        });
        let weak = Arc::downgrade(&store);
        store.client.set_events(Box::new(move |event| {
            if let Some(store) = weak.upgrade() {
                store.handle(event);
            }
        }));
        store
            .create_chroot()
            .await
            .map_err(|failure| store.error("connect", &failure))?;
        let running = CancellationToken::new();
        let tasks: [futures_util::future::BoxFuture<'static, ()>; 3] = [
            Box::pin(store.clone().run_watches(watches)),
            Box::pin(store.clone().run_ends()),
            Box::pin(store.clone().run_records()),
        ];
        for task in tasks {
            tokio::spawn(Box::pin(running.clone().run_until_cancelled_owned(task)));
        }
        Ok(Arc::new(ZookeeperEngine {
            store,
            _running: running.drop_guard(),
        }))
    }
}

impl Store {
    fn error(&self, op: &'static str, failure: &Failure) -> EngineError {
        error::engine_error(op, &self.client.address(), failure)
    }

    /// Creates the path of the URL, if it is missing.
    async fn create_chroot(&self) -> client::Answer<()> {
        let chroot = self.layout.chroot.as_str();
        match self
            .client
            .call(Request::exists(if chroot.is_empty() { "/" } else { chroot }))
            .await
        {
            Err(Failure::Refused(code::NO_NODE)) => {}
            other => return other.map(|_| ()),
        }
        let ends = chroot
            .match_indices('/')
            .skip(1)
            .map(|(at, _)| at)
            .chain([chroot.len()]);
        for end in ends {
            // The parents of the path belong to everyone: other programs may use them, too.
            let access = if end == chroot.len() {
                self.layout.access
            } else {
                Access::Everyone
            };
            let create = Request::create(&chroot[..end], &[], access, Kind::Persistent);
            match self.client.call(create).await {
                Ok(_) | Err(Failure::Refused(code::NODE_EXISTS)) => {}
                Err(failure) => return Err(failure),
            }
        }
        Ok(())
    }

    /// Creates the folder of a name, and the path of the URL if it is missing.
    async fn create_folder(&self, key: &Key) -> client::Answer<()> {
        for _ in 0..2 {
            let create = Request::create(&self.layout.folder(key), &[], self.layout.access, Kind::Container);
            match self.client.call(create).await {
                Ok(_) | Err(Failure::Refused(code::NODE_EXISTS)) => break,
                Err(Failure::Refused(code::NO_NODE)) => self.create_chroot().await?,
                Err(failure) => return Err(failure),
            }
        }
        Ok(())
    }

    /// Waits until it is certain that a lease of this session lasts. (The service asks for none that is longer than
    /// [`Engine::longest_lease`], so there is no evidence for more.)
    async fn confirm(&self, session: i64, sent: Moment, ttl: Ttl) -> client::Answer<()> {
        let certain = ttl.validity().min(self.client.state().longest);
        match self.client.lasts(session, sent + certain).await {
            true => Ok(()),
            false => Err(Failure::SessionEnded),
        }
    }
}

#[async_trait]
impl Engine for ZookeeperEngine {
    fn name(&self) -> &'static str {
        NAME
    }

    fn address(&self) -> String {
        self.store.client.address()
    }

    fn ordered(&self) -> bool {
        true
    }

    fn longest_lease(&self) -> Option<Duration> {
        Some(self.store.client.state().timeout / 2)
    }

    fn most_names(&self) -> usize {
        60
    }

    fn watch_event_loop(&self, detector: &Arc<StallDetector>) {
        let _ = self.store.stall_detector.set(detector.clone());
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Acquired> {
        let answer = match claim.keys() {
            [key] => self
                .store
                .attempt(key, &[claim])
                .await
                .map(|mut answers| answers.remove(0)),
            _ => self.store.attempt_set(claim).await,
        };
        answer.map_err(|failure| self.store.error("acquire", &failure))
    }

    async fn try_acquire_in_order(&self, claims: &[Arc<Claim>], answer: &mut Attempts<'_>) {
        let mut rest = claims;
        // Claims of one name beside each other are one batch.
        while let [first, ..] = rest {
            let is_single = |claim: &&Arc<Claim>| claim.keys().len() == 1;
            let count = rest.iter().take_while(is_single).count();
            let begin = claims.len() - rest.len();
            if count < 2 {
                answer(begin, self.try_acquire(first).await);
                rest = &rest[1..];
                continue;
            }
            let batch: Vec<&Claim> = rest[..count].iter().map(|claim| &**claim).collect();
            match self.store.attempt(&first.keys()[0], &batch).await {
                Ok(answers) => {
                    let answers = answers.into_iter().enumerate();
                    answers.for_each(|(index, acquired)| answer(begin + index, Ok(acquired)));
                }
                Err(failure) => {
                    let error = self.store.error("acquire", &failure);
                    (0..count).for_each(|index| {
                        answer(begin + index, Err(error.copy()));
                    });
                }
            }
            rest = &rest[count..];
        }
    }

    async fn renew(&self, claim: &Claim, ttl: Ttl) -> Result<Renewed> {
        let mut answers = self.store.renew(&[Renewal { claim, ttl }]).await;
        answers.remove(0).map_err(|failure| self.store.error("renew", &failure))
    }

    async fn renew_all(&self, renewals: &[Renewal<'_>], answer: &mut Answers<'_>) {
        for (index, renewed) in self.store.renew(renewals).await.into_iter().enumerate() {
            answer(index, renewed.map_err(|failure| self.store.error("renew", &failure)));
        }
    }

    async fn transfer(&self, claim: &Claim, to: &OwnerToken) -> Result<Renewed> {
        let transferred = self.store.transfer(claim, to).await;
        transferred.map_err(|failure| self.store.error("transfer", &failure))
    }

    async fn release(&self, claim: &Claim, keep: Duration) -> Result<Released> {
        let released = self.store.release(claim, keep).await;
        released.map_err(|failure| self.store.error("release", &failure))
    }

    async fn subscribe(&self, claim: &Claim, _key: &Key) -> Result<Box<dyn Subscription>> {
        Ok(Box::new(self.store.entries.subscribe(claim)))
    }

    async fn inspect(&self, key: &Key) -> Result<Option<LockInfo>> {
        let info = self.store.inspect(key, true).await;
        info.map_err(|failure| self.store.error("inspect", &failure))
    }

    async fn inspect_now(&self, key: &Key) -> Result<Option<LockInfo>> {
        let info = self.store.inspect(key, false).await;
        info.map_err(|failure| self.store.error("inspect", &failure))
    }

    async fn list(&self, prefix: &str, page_timeout: Duration) -> Result<Vec<LockInfo>> {
        let listed = self.store.list(prefix, page_timeout).await;
        listed
            .ok_or_else(|| self.no_answer("list", page_timeout))?
            .map_err(|failure| self.store.error("list", &failure))
    }

    async fn force_release(&self, key: &Key) -> Result<bool> {
        let freed = self.store.force_release(key).await;
        freed.map_err(|failure| self.store.error("forceRelease", &failure))
    }

    async fn close(&self) {
        self.store.client.close().await;
    }
}
