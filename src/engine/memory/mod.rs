//! `memory:`, a store inside this process, for unit tests. Every service and every worker thread of the process shares the
//! store of a name.

mod state;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, LazyLock, Weak};
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;

use self::state::State;
use super::core::ledger::decide::{Decision, decide, waiter_liveness};
use super::{Acquired, Engine, MovableClock, Released, Renewed, Result, Subscription};
use crate::clock::Moment;
use crate::model::{Claim, Key, LockInfo, OwnerToken, Process, Ttl};

static STORES: LazyLock<Mutex<HashMap<String, Weak<MemoryEngine>>>> = LazyLock::new(Mutex::default);

/// The engine behind `memory:` URLs.
#[derive(Default)]
pub struct MemoryEngine {
    state: Arc<Mutex<State>>,
}

impl fmt::Debug for MemoryEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MemoryEngine")
    }
}

impl MemoryEngine {
    /// Returns the store of this name. Creates it if no service uses one.
    pub fn named(name: &str) -> Arc<Self> {
        let mut stores = STORES.lock();
        if let Some(engine) = stores.get(name).and_then(Weak::upgrade) {
            return engine;
        }
        stores.retain(|_, engine| engine.strong_count() > 0);
        let engine = Arc::new(MemoryEngine::default());
        stores.insert(name.to_owned(), Arc::downgrade(&engine));
        engine
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

#[async_trait]
impl Engine for MemoryEngine {
    fn name(&self) -> &'static str {
        "memory"
    }

    fn ordered(&self) -> bool {
        true
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Acquired> {
        claim.mark_sent();
        let mut state = self.lock();
        state.sweep();
        let liveness = claim.waiting.then(|| waiter_liveness(claim.ttl));
        match decide(&state.snapshot(claim), liveness) {
            Decision::Grant { fence } | Decision::AlreadyHeld { fence } => {
                state.grant(claim, fence);
                Ok(Acquired::Granted { fence })
            }
            Decision::Busy {
                index,
                retry_after,
                holds_some,
            } => {
                if holds_some {
                    for key in claim.keys() {
                        state.release(key, &claim.owner, Duration::ZERO);
                    }
                }
                let key = claim.keys()[index].clone();
                if let Some(liveness) = liveness {
                    state.reserve(claim, index, liveness);
                    state.enqueue(claim, &key, liveness);
                }
                Ok(Acquired::Held {
                    key,
                    retry_after: Some(retry_after),
                })
            }
        }
    }

    async fn renew(&self, claim: &Claim, ttl: Ttl) -> Result<Renewed> {
        let mut state = self.lock();
        if !claim.keys().iter().all(|key| state.is_held_by(key, &claim.owner)) {
            return Ok(Renewed::Lost);
        }
        let until = Moment::now() + ttl.duration();
        for key in claim.keys() {
            if let Some(held) = state.held.get_mut(key) {
                held.until = held.until.max(until);
            }
        }
        Ok(Renewed::Extended)
    }

    async fn transfer(&self, claim: &Claim, to: &OwnerToken) -> Result<Renewed> {
        let mut state = self.lock();
        let is_held = |key| state.is_held_by(key, &claim.owner) || state.is_held_by(key, to);
        if !claim.keys().iter().all(is_held) {
            return Ok(Renewed::Lost);
        }
        let until = Moment::now() + claim.ttl.duration();
        for key in claim.keys() {
            if let Some(held) = state.held.get_mut(key) {
                held.owner = Some(to.clone());
                held.until = held.until.max(until);
                held.holder.process = Process::clone(&claim.process);
            }
        }
        Ok(Renewed::Extended)
    }

    async fn release(&self, claim: &Claim, keep: Duration) -> Result<Released> {
        let mut state = self.lock();
        let mut answer = Released::Freed;
        for key in claim.keys() {
            if state.release(key, &claim.owner, keep) == Released::NotHeld {
                answer = Released::NotHeld;
            }
        }
        state.leave_queue(&claim.owner);
        Ok(answer)
    }

    async fn subscribe(&self, claim: &Claim, _key: &Key) -> Result<Box<dyn Subscription>> {
        let notify = self.lock().subscribers.entry(claim.owner.clone()).or_default().clone();
        Ok(Box::new(MemorySubscription {
            owner: claim.owner.clone(),
            notify,
            state: self.state.clone(),
        }))
    }

    async fn inspect(&self, key: &Key) -> Result<Option<LockInfo>> {
        Ok(self.lock().info(key))
    }

    async fn list(&self, prefix: &str, _page_timeout: Duration) -> Result<Vec<LockInfo>> {
        let state = self.lock();
        let keys = state.held.keys().filter(|key| key.as_str().starts_with(prefix));
        Ok(keys.filter_map(|key| state.info(key)).collect())
    }

    async fn force_release(&self, key: &Key) -> Result<bool> {
        let mut state = self.lock();
        let is_held = state.live_lease(key).is_some();
        if is_held {
            state.held.remove(key);
        }
        state.wake_first(key);
        Ok(is_held)
    }

    async fn close(&self) {}

    fn movable_clock(&self) -> Option<&dyn MovableClock> {
        Some(self)
    }
}

impl MovableClock for MemoryEngine {
    fn next_expiry(&self) -> Option<Moment> {
        self.lock().next_expiry()
    }

    fn advance(&self, by: Duration) {
        self.lock().advance(by);
    }

    fn is_settled(&self) -> bool {
        self.lock().is_settled()
    }
}

struct MemorySubscription {
    owner: OwnerToken,
    notify: Arc<Notify>,
    state: Arc<Mutex<State>>,
}

impl Drop for MemorySubscription {
    fn drop(&mut self) {
        self.state.lock().subscribers.remove(&self.owner);
    }
}

#[async_trait]
impl Subscription for MemorySubscription {
    async fn changed(&mut self) {
        self.notify.notified().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    crate::engine::contract::contract_tests!(async |prefix: String| {
        let engine = MemoryEngine::named(&prefix);
        Some((engine.clone(), engine))
    });

    #[test]
    fn a_store_is_shared_by_name() {
        let one = MemoryEngine::named("same");
        assert!(Arc::ptr_eq(&one, &MemoryEngine::named("same")));
        assert!(!Arc::ptr_eq(&one, &MemoryEngine::named("other")));
    }

    /// The release wakes a dead waiter. The next one tries again when the position ahead of it expires.
    #[tokio::test(start_paused = true)]
    async fn a_dead_waiter_blocks_the_next_for_its_ttl() {
        let engine = MemoryEngine::default();
        let (key, process) = (Key::new("n").unwrap(), Arc::new(Process::current()));
        let claim = |ttl| {
            let keys = std::slice::from_ref(&key);
            let mut claim = Claim::new(keys, OwnerToken::fresh(), Ttl::clamped(ttl), process.clone());
            claim.waiting = true;
            claim
        };
        let (holder, dead, next) = (
            claim(Duration::from_secs(60)),
            claim(Duration::from_millis(400)),
            claim(Duration::from_secs(60)),
        );
        engine.try_acquire(&holder).await.unwrap();
        engine.try_acquire(&dead).await.unwrap();
        let answer = engine.try_acquire(&next).await.unwrap();
        engine.release(&holder, Duration::ZERO).await.unwrap();
        let Acquired::Held { retry_after, .. } = answer else {
            panic!("{answer:?}")
        };
        assert!(retry_after.unwrap() <= Duration::from_millis(400), "{answer:?}");
        tokio::time::sleep(Duration::from_millis(401)).await;
        let answer = engine.try_acquire(&next).await.unwrap();
        assert!(matches!(answer, Acquired::Granted { .. }), "{answer:?}");
        assert!(next.was_sent());
    }

    #[tokio::test(start_paused = true)]
    async fn one_time_names_leave_nothing_behind() {
        let engine = MemoryEngine::default();
        let process = Arc::new(Process::current());
        for i in 0..10_000 {
            let key = Key::new(&format!("n{i}")).unwrap();
            let ttl = Ttl::clamped(Duration::from_millis(10));
            let mut claim = Claim::new(&[key], OwnerToken::fresh(), ttl, process.clone());
            engine.try_acquire(&claim).await.unwrap();
            // A waiter that makes no second attempt.
            claim.owner = OwnerToken::fresh();
            claim.waiting = true;
            engine.try_acquire(&claim).await.unwrap();
            tokio::time::advance(Duration::from_millis(100)).await;
        }
        let state = engine.lock();
        assert!(state.held.len() <= 2048, "{}", state.held.len());
        assert!(
            state.queues.len() <= 4096 && state.positions.len() <= 4096,
            "{}",
            state.positions.len()
        );
    }
}
