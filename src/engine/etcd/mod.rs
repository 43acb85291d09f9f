//! etcd 3.4 and later: the order of entries is the lock.
//!
//! Each claim has a key below its name, with an etcd lease of its process. The oldest one holds the name. Its deletion is the grant
//! of the next one, whose process learns that from a watch. `entries/` decides, `leases.rs` keeps the etcd leases alive, and
//! `engine/ends.rs` ends a lock at its ttl.

mod client;
mod config;
mod core;
mod entry;
mod leases;
mod ops;
#[cfg(test)]
mod tests;
mod unanswered;
mod watches;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::FutureExt;

use self::client::Client;
pub use self::config::EtcdConfig;
use self::core::Core;
use self::entry::Layout;
use super::entries::LocalEntries;
use super::{Acquired, Answers, Attempts, Engine, Released, Renewal, Renewed, Result, Subscription};
use crate::model::{Claim, Key, LockInfo, OwnerToken, Ttl};
use crate::stall_detector::StallDetector;

/// The maximum number of names of a claim: a transaction has at most 128 operations (`--max-txn-ops`), two for each name.
const MOST_NAMES: usize = 60;

/// How often `inspect` reads a lock that was handed off, until its token is written, and the delay.
const HAND_OFF_READS: u32 = 5;
const HAND_OFF_DELAY: Duration = Duration::from_millis(15);

/// The time for the last requests at the end.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// The engine behind `etcd://` URLs.
pub struct EtcdEngine {
    core: Arc<Core>,
    config: Arc<EtcdConfig>,
}

impl fmt::Debug for EtcdEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdEngine").field("config", &self.config).finish()
    }
}

impl EtcdEngine {
    /// Connects to a member, logs in, and reads a name.
    ///
    /// # Errors
    /// Those of the connection, of the login, and a missing permission.
    pub async fn connect(config: EtcdConfig) -> Result<Arc<Self>> {
        let config = Arc::new(config);
        let client = Arc::new(Client::new(config.clone()));
        let (entries, requests) = LocalEntries::new();
        let core = Arc::new(Core::new(client, Layout(config.prefix.clone()), entries));
        let engine = EtcdEngine {
            core: core.clone(),
            config,
        };
        let name =
            Key::new("connect").map_err(|error| crate::error::EngineError::new("etcd", "connect", false, error))?;
        core.inspect(&name).await.map_err(|failure| failure.of("connect"))?;
        tokio::spawn(watches::run(core.clone(), requests).boxed());
        tokio::spawn(core.delete_ended().boxed());
        Ok(Arc::new(engine))
    }
}

impl Drop for EtcdEngine {
    fn drop(&mut self) {
        self.core.closed.cancel();
        self.core.client.close();
    }
}

#[async_trait]
impl Engine for EtcdEngine {
    fn name(&self) -> &'static str {
        "etcd"
    }

    fn address(&self) -> String {
        self.config.address()
    }

    fn ordered(&self) -> bool {
        true
    }

    fn most_names(&self) -> usize {
        MOST_NAMES
    }

    fn watch_event_loop(&self, detector: &Arc<StallDetector>) {
        let _ = self.core.detector.set(detector.clone());
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Acquired> {
        let acquired = match claim.keys() {
            [_] => self.core.acquire(&[claim]).await.map(|mut answers| answers.pop()),
            _ => self.core.acquire_set(claim).await.map(Some),
        };
        let acquired = acquired.map_err(|failure| failure.of("acquire"))?;
        // There is an answer for each claim.
        Ok(acquired.unwrap_or(Acquired::Held {
            key: claim.keys()[0].clone(),
            retry_after: None,
        }))
    }

    async fn try_acquire_in_order(&self, claims: &[Arc<Claim>], answer: &mut Attempts<'_>) {
        let mut next = 0;
        while let Some(claim) = claims.get(next) {
            let singles = claims[next..]
                .iter()
                .take(MOST_NAMES)
                .take_while(|claim| claim.keys().len() == 1);
            let singles: Vec<&Claim> = singles.map(|claim| &**claim).collect();
            if singles.is_empty() {
                answer(next, self.try_acquire(claim).await);
                next += 1;
                continue;
            }
            match self.core.acquire(&singles).await {
                Ok(answers) => (next..)
                    .zip(answers)
                    .for_each(|(index, acquired)| answer(index, Ok(acquired))),
                Err(failure) => {
                    for index in next..next + singles.len() {
                        answer(index, Err(failure.clone().of("acquire")));
                    }
                }
            }
            next += singles.len();
        }
    }

    async fn renew(&self, claim: &Claim, ttl: Ttl) -> Result<Renewed> {
        let mut renewed = None;
        let renewal = Renewal { claim, ttl };
        let mut answer = |_: usize, answer| renewed = Some(answer);
        self.core.renew_all(&[renewal], &mut answer).await;
        // There is one answer.
        renewed.unwrap_or(Ok(Renewed::Lost))
    }

    async fn renew_all(&self, renewals: &[Renewal<'_>], answer: &mut Answers<'_>) {
        self.core.renew_all(renewals, answer).await;
    }

    async fn transfer(&self, claim: &Claim, to: &OwnerToken) -> Result<Renewed> {
        self.core.transfer(claim, to).await
    }

    async fn release(&self, claim: &Claim, keep: Duration) -> Result<Released> {
        let released = self.core.release(claim, keep).await;
        released.map_err(|failure| failure.of("release"))
    }

    async fn subscribe(&self, claim: &Claim, _key: &Key) -> Result<Box<dyn Subscription>> {
        Ok(Box::new(self.core.entries.subscribe(claim)))
    }

    /// Waits a little for the token of a hand-off, which the first renewal writes.
    async fn inspect(&self, key: &Key) -> Result<Option<LockInfo>> {
        for _ in 0..HAND_OFF_READS {
            match self.inspect_now(key).await? {
                Some(info) if info.holder.is_some() && info.fence.is_none() => tokio::time::sleep(HAND_OFF_DELAY).await,
                info => return Ok(info),
            }
        }
        self.inspect_now(key).await
    }

    async fn inspect_now(&self, key: &Key) -> Result<Option<LockInfo>> {
        let info = self.core.inspect(key).await;
        info.map_err(|failure| failure.of("inspect"))
    }

    async fn list(&self, prefix: &str, page_timeout: Duration) -> Result<Vec<LockInfo>> {
        self.core.list(prefix, page_timeout).await
    }

    async fn force_release(&self, key: &Key) -> Result<bool> {
        let released = self.core.force_release(key).await;
        released.map_err(|failure| failure.of("forceRelease"))
    }

    async fn close(&self) {
        self.core.closed.cancel();
        let held = &self.core.held;
        let revoking = self.core.leases.close(|id| held.any(|held| held.lease == id));
        // Without an answer they expire.
        let _ = tokio::time::timeout(CLOSE_TIMEOUT, revoking).await;
        self.core.client.close();
    }
}
