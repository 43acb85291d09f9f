//! `memory:`, a store inside this process, for unit tests. Every service and every worker thread of the process shares the
//! store of a name.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, LazyLock, Weak};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;

use super::core::ledger::{Ledger, Row, StoredName, is_shared, micros, span, stored_name};
use super::{
    Acquired, Answers, Description, EXPIRED_POSITION_KEPT, Engine, MovableClock, Read, Released, Renewal, Renewed,
    Result, Subscription,
};
use crate::clock::Moment;
use crate::model::{Claim, Fence, Holder, Key, LockInfo, OwnerToken, Process};

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

/// What the store holds.
struct State {
    ledger: Ledger,
    /// The waiters of this process, by owner.
    subscribers: HashMap<String, Arc<Notify>>,
    /// The store's clock is this much ahead of the local clock, in microseconds: it begins with the time since 1970, because fencing tokens
    /// grow across restarts of the process, and a test moves it. It does not follow later steps of the system's clock.
    ahead_us: i64,
    /// The number of rows and positions at which the next sweep runs.
    next_sweep: usize,
}

impl Default for State {
    fn default() -> Self {
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        State {
            ledger: Ledger::default(),
            subscribers: HashMap::new(),
            ahead_us: micros(since_1970) - local_us(),
            next_sweep: 0,
        }
    }
}

impl State {
    fn now_us(&self) -> i64 {
        self.ahead_us + local_us()
    }

    /// Makes a call on some names, and notifies waiters.
    fn call<T>(&mut self, names: &[StoredName], call: impl FnOnce(&mut Ledger) -> T) -> T {
        self.ledger.begin(self.now_us(), names);
        self.sweep(names);
        let answer = call(&mut self.ledger);
        let changes = self.ledger.finish();
        for (name, row) in changes.rows {
            self.ledger.last_fence = self.ledger.last_fence.max(row.fence);
            if row.owner.is_none() {
                self.ledger.rows.remove(&name);
            }
        }
        for notification in changes.notifications {
            if let Some(notify) = self.subscribers.get(&notification.owner) {
                notify.notify_one();
            }
        }
        answer
    }

    /// Removes expired positions of these names; and once in a while expired leases and positions of all, so that one-time names leave
    /// nothing behind.
    fn sweep(&mut self, names: &[StoredName]) {
        let ledger = &mut self.ledger;
        let before_us = ledger.now_us() - micros(EXPIRED_POSITION_KEPT);
        names
            .iter()
            .for_each(|name| ledger.queues.drop_expired(name, before_us));
        if ledger.rows.len() + ledger.queues.len() >= self.next_sweep {
            let now_us = ledger.now_us();
            ledger.rows.retain(|_, row| row.is_live(now_us));
            ledger.queues.sweep(before_us);
            self.next_sweep = (2 * (ledger.rows.len() + ledger.queues.len())).max(1024);
        }
    }

    /// Returns the leases of a name: one, or those of its shares.
    fn infos(&self, key: &Key) -> Vec<LockInfo> {
        let name = stored(key);
        let own = self.ledger.rows.get(&name).filter(|_| !key.is_shared()).into_iter();
        let shares = self.ledger.shares(&name).map(|(_, row)| row);
        own.chain(shares)
            .filter_map(|row| self.info(&name, key.as_str(), row))
            .collect()
    }

    /// Returns a lease of a name. `None`: it has expired, or only a reservation.
    fn info(&self, stored: &StoredName, name: &str, row: &Row) -> Option<LockInfo> {
        let now_us = self.now_us();
        if !row.is_live(now_us) || row.is_reserved() {
            return None;
        }
        Some(LockInfo {
            name: name.to_owned(),
            remaining: Some(span(row.expires_us - now_us)),
            fence: Some(Fence(row.fence.unsigned_abs())),
            holder: row.holder.as_deref().map(|process| Holder {
                process: Process::clone(process),
                since_ms: row.granted_us.unwrap_or_default().unsigned_abs() / 1000,
            }),
            metadata: row.metadata.as_deref().map(str::to_owned),
            share: row.share,
            waiting: Some(self.ledger.queues.live(stored, u64::MAX, now_us).count() as u64),
        })
    }
}

/// Returns the local clock in microseconds.
fn local_us() -> i64 {
    (Moment::now().to_nanos() / 1000) as i64
}

fn stored(key: &Key) -> StoredName {
    stored_name("", key)
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

    /// Makes a call on the names of a claim.
    fn call<T>(&self, claim: &Claim, call: impl FnOnce(&mut Ledger, &[StoredName]) -> T) -> Result<T> {
        let names: Vec<StoredName> = claim.keys().iter().map(stored).collect();
        Ok(self.lock().call(&names, |ledger| call(ledger, &names)))
    }
}

#[async_trait]
impl Engine for MemoryEngine {
    fn describe(&self) -> Description {
        Description {
            clock: Some(Arc::new(Clock(self.state.clone()))),
            has_shares: true,
            ..Description::new("memory", true)
        }
    }

    async fn try_acquire_all(&self, claims: &[&Claim], answer: &mut Answers<'_, Acquired>) {
        for (index, claim) in claims.iter().enumerate() {
            claim.mark_sent();
            answer(index, self.call(claim, |ledger, names| ledger.attempt(claim, names)));
        }
    }

    async fn renew_all(&self, renewals: &[Renewal<'_>], answer: &mut Answers<'_, Renewed>) {
        for (index, Renewal { claim, ttl }) in renewals.iter().enumerate() {
            answer(
                index,
                self.call(claim, |ledger, names| ledger.renew(claim, names, *ttl)),
            );
        }
    }

    async fn transfer(&self, claim: &Claim, to: &OwnerToken) -> Result<Renewed> {
        self.call(claim, |ledger, names| ledger.transfer(claim, names, to))
    }

    async fn release_all(&self, claims: &[&Claim], keep: Duration, answer: &mut Answers<'_, Released>) {
        for (index, claim) in claims.iter().enumerate() {
            answer(
                index,
                self.call(claim, |ledger, names| ledger.release(claim, names, keep)),
            );
        }
    }

    async fn subscribe(&self, claim: &Claim, _key: &Key) -> Result<Box<dyn Subscription>> {
        let owner = claim.owner.as_str().to_owned();
        let notify = self.lock().subscribers.entry(owner.clone()).or_default().clone();
        Ok(Box::new(MemorySubscription {
            owner,
            notify,
            state: self.state.clone(),
        }))
    }

    async fn read(&self, what: Read<'_>) -> Result<Vec<LockInfo>> {
        let state = self.lock();
        let rows = &state.ledger.rows;
        match what {
            Read::Name { key, .. } => Ok(state.infos(key)),
            Read::Prefix { prefix, .. } => {
                let rows = rows.range(prefix.as_bytes().to_vec()..);
                let rows = rows.take_while(|(name, _)| name.starts_with(prefix.as_bytes()));
                let locks = rows.filter(|(name, _)| !is_shared(name));
                let info = |(name, row)| state.info(name, &String::from_utf8_lossy(name), row);
                Ok(locks.filter_map(info).collect())
            }
        }
    }

    async fn force_release(&self, key: &Key) -> Result<bool> {
        let name = stored(key);
        let names = std::slice::from_ref(&name);
        Ok(self.lock().call(names, |ledger| ledger.force_release(&name)))
    }

    async fn close(&self) {}
}

/// The clock of a store.
struct Clock(Arc<Mutex<State>>);

impl MovableClock for Clock {
    fn next_expiry(&self) -> Option<Moment> {
        let state = self.0.lock();
        let now_us = state.now_us();
        let leases = state.ledger.rows.values().filter(|row| !row.is_reserved());
        let next = leases.filter(|row| row.is_live(now_us)).map(|row| row.expires_us).min();
        next.map(|expires_us| Moment::now() + span(expires_us - now_us))
    }

    /// # Behavior
    /// Positions in the queues and reservations stay alive, because the waiters would have made attempts in that time.
    fn advance(&self, by: Duration) {
        let mut state = self.0.lock();
        // Rounded up: a lease ends with its last step.
        let by_us = micros(by.saturating_add(Duration::from_nanos(999)));
        state.ahead_us = (state.ahead_us + by_us).min(i64::MAX / 2);
        state.ledger.queues.extend(by_us);
        let reserved = state.ledger.rows.values_mut().filter(|row| row.is_reserved());
        reserved.for_each(|row| row.expires_us = row.expires_us.saturating_add(by_us));
        let names: Vec<StoredName> = state.ledger.queues.names().cloned().collect();
        state.call(&names, |_| ());
    }

    /// # Behavior
    /// No waiter is the first one in the queue of a free name, and none that still waits is the holder of a name.
    fn is_settled(&self) -> bool {
        let mut state = self.0.lock();
        let now_us = state.now_us();
        state.ledger.begin(now_us, &[]);
        let ledger = &state.ledger;
        let waits = |owner: &str| state.subscribers.contains_key(owner);
        let mut held = ledger.rows.values().filter(|row| row.is_live(now_us));
        let is_received = held.all(|row| !row.owner.as_deref().is_some_and(waits));
        let is_served = |name| !ledger.served(name).is_some_and(|first| waits(&first.owner));
        is_received && ledger.queues.names().all(is_served)
    }
}

struct MemorySubscription {
    owner: String,
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
    use crate::engine::EngineExt;
    use crate::model::Ttl;

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
        let ledger = &engine.lock().ledger;
        assert!(ledger.rows.len() <= 2048, "{}", ledger.rows.len());
        assert!(ledger.queues.len() <= 4096, "{}", ledger.queues.len());
        assert_eq!(ledger.queues.names().count(), ledger.queues.len());
    }
}
