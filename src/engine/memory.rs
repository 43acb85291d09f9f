//! `memory:` a store inside this process, for unit tests. One per name, shared by every service (and every worker
//! thread) of the process.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
use tokio::sync::Notify;

use super::{
    Acquired, Engine, LAPSED_PLACE_KEPT, Released, Renewed, Result, SharedEngine, Subscription, waiter_liveness,
    waiter_retry,
};
use crate::clock::Moment;
use crate::model::{Claim, Fence, Holder, Key, LockInfo, OwnerToken, Process, Ttl};

static STORES: LazyLock<Mutex<HashMap<String, Weak<MemoryEngine>>>> = LazyLock::new(Mutex::default);

/// The engine behind `memory:` URLs.
#[derive(Default)]
pub struct MemoryEngine {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared(Mutex<State>);

impl Shared {
    /// The state. A panic elsewhere leaves it whole: every verb changes it in one go.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for MemoryEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MemoryEngine")
    }
}

#[derive(Default)]
struct State {
    held: BTreeMap<Key, Held>,
    /// The waiters of each name, by ticket, that is in the order of arrival.
    queues: HashMap<Key, BTreeMap<u64, Place>>,
    /// Where each waiter stands: one name at a time.
    places: HashMap<OwnerToken, (Key, u64)>,
    subscribers: HashMap<OwnerToken, Arc<Notify>>,
    last_ticket: u64,
    last_fence: u64,
    next_sweep: usize,
}

struct Held {
    /// `None` once the owner has let go of a name that stays busy for its minimum hold.
    owner: Option<OwnerToken>,
    until: Moment,
    fence: Fence,
    holder: Holder,
    metadata: Option<Arc<str>>,
}

struct Place {
    owner: OwnerToken,
    alive_until: Moment,
}

impl MemoryEngine {
    /// The store of this name, made when nobody has it.
    pub fn named(name: &str) -> SharedEngine {
        let mut stores = STORES.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(engine) = stores.get(name).and_then(Weak::upgrade) {
            return engine;
        }
        stores.retain(|_, engine| engine.strong_count() > 0);
        let engine = Arc::new(MemoryEngine::default());
        stores.insert(name.to_owned(), Arc::downgrade(&engine));
        engine
    }
}

/// Microseconds since 1970: fences grow across restarts of the process, too.
fn wall_clock() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

impl State {
    fn holder(&self, key: &Key) -> Option<&Held> {
        self.held.get(key).filter(|held| !held.until.is_past())
    }

    /// The first live waiter of a name.
    fn first_live(&self, key: &Key) -> Option<(u64, &Place)> {
        self.queues
            .get(key)?
            .iter()
            .find(|(_, place)| !place.alive_until.is_past())
            .map(|(ticket, place)| (*ticket, place))
    }

    /// Why `key` cannot be had by `owner`, and for how long at most; `None` when it can.
    fn obstacle(&self, key: &Key, owner: &OwnerToken, ticket: Option<u64>) -> Option<Duration> {
        if let Some(held) = self.holder(key) {
            return if held.owner.as_ref() == Some(owner) {
                None
            } else {
                Some(held.until.remaining())
            };
        }
        match self.first_live(key) {
            Some((first, place)) if place.owner != *owner && ticket.is_none_or(|mine| first < mine) => {
                Some(place.alive_until.remaining())
            }
            _ => None,
        }
    }

    /// Wakes the first live waiter of a name, if the name is free.
    fn tell_next(&self, key: &Key) {
        if self.holder(key).is_none()
            && let Some((_, place)) = self.first_live(key)
            && let Some(notify) = self.subscribers.get(&place.owner)
        {
            notify.notify_one();
        }
    }

    /// Enters the claim into the queue of `key`, or keeps its place alive. Returns its ticket.
    fn enqueue(&mut self, claim: &Claim, key: &Key) -> u64 {
        let alive_until = Moment::now() + waiter_liveness(claim.ttl);
        let moved = self.places.get(&claim.owner).filter(|(at, _)| at != key).cloned();
        let ticket = match self.places.get(&claim.owner) {
            Some((_, ticket)) => *ticket,
            None => {
                self.last_ticket += 1;
                self.last_ticket
            }
        };
        if moved.is_some() {
            self.leave(&claim.owner);
        }
        self.places.insert(claim.owner.clone(), (key.clone(), ticket));
        let queue = self.queues.entry(key.clone()).or_default();
        queue.retain(|_, place| place.alive_until.elapsed() < LAPSED_PLACE_KEPT);
        queue.insert(
            ticket,
            Place {
                owner: claim.owner.clone(),
                alive_until,
            },
        );
        ticket
    }

    /// Returns how long the last live waiter ahead of a ticket keeps its place.
    fn directly_ahead(&self, key: &Key, ticket: u64) -> Option<Duration> {
        let mut ahead = self.queues.get(key)?.range(..ticket).rev();
        let live = ahead.find(|(_, place)| !place.alive_until.is_past());
        live.map(|(_, place)| place.alive_until.remaining())
    }

    /// Gives up the owner's place, and tells whoever is next there.
    fn leave(&mut self, owner: &OwnerToken) {
        let Some((key, ticket)) = self.places.remove(owner) else {
            return;
        };
        if let Some(queue) = self.queues.get_mut(&key) {
            queue.remove(&ticket);
            if queue.is_empty() {
                self.queues.remove(&key);
            }
        }
        self.tell_next(&key);
    }

    /// Forgets names past their end once in a while, so that one-time names leave nothing behind.
    fn sweep(&mut self) {
        if self.held.len() >= self.next_sweep {
            self.held.retain(|_, held| !held.until.is_past());
            let places = &mut self.places;
            self.queues.retain(|_, queue| {
                queue.retain(|_, place| {
                    let keep = place.alive_until.elapsed() < LAPSED_PLACE_KEPT;
                    if !keep {
                        places.remove(&place.owner);
                    }
                    keep
                });
                !queue.is_empty()
            });
            self.next_sweep = (self.held.len() * 2).max(1024);
        }
    }

    fn info(&self, key: &Key) -> Option<LockInfo> {
        let held = self.holder(key)?;
        Some(LockInfo {
            name: key.as_str().to_owned(),
            remaining: Some(held.until.remaining()),
            fence: Some(held.fence),
            holder: Some(held.holder.clone()),
            metadata: held.metadata.as_deref().map(str::to_owned),
        })
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
        let mut state = self.shared.lock();
        state.sweep();
        let ticket = state.places.get(&claim.owner).map(|(_, ticket)| *ticket);
        for key in claim.keys() {
            if let Some(wait) = state.obstacle(key, &claim.owner, ticket) {
                let mut retry_after = wait;
                if claim.waiting {
                    let ticket = state.enqueue(claim, key);
                    retry_after = waiter_retry(wait, waiter_liveness(claim.ttl), state.directly_ahead(key, ticket));
                }
                return Ok(Acquired::Held {
                    key: key.clone(),
                    retry_after: Some(retry_after),
                });
            }
        }
        // A name that is held here is held by this owner: a retry after a lost reply, which keeps its fence.
        let mine: Option<Vec<Fence>> = claim
            .keys()
            .iter()
            .map(|key| state.holder(key).map(|held| held.fence))
            .collect();
        let fence = mine.and_then(|fences| fences.into_iter().max()).unwrap_or_else(|| {
            state.last_fence = (state.last_fence + 1).max(wall_clock().as_micros() as u64);
            Fence(state.last_fence)
        });
        for key in claim.keys() {
            let until = Moment::now() + claim.ttl.duration();
            let since_ms = match state.holder(key) {
                Some(held) => held.holder.since_ms,
                None => wall_clock().as_millis() as u64,
            };
            let held = Held {
                owner: Some(claim.owner.clone()),
                // A retry may come late, after the lease was extended.
                until: state.holder(key).map_or(until, |held| held.until.max(until)),
                fence,
                holder: Holder {
                    process: Process::clone(&claim.process),
                    since_ms,
                },
                metadata: claim.metadata.clone(),
            };
            state.held.insert(key.clone(), held);
        }
        state.leave(&claim.owner);
        Ok(Acquired::Granted { fence })
    }

    async fn renew(&self, claim: &Claim, ttl: Ttl) -> Result<Renewed> {
        let mut state = self.shared.lock();
        let held = |state: &State, key| {
            state
                .holder(key)
                .is_some_and(|h| h.owner.as_ref() == Some(&claim.owner))
        };
        if !claim.keys().iter().all(|key| held(&state, key)) {
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
        let mut state = self.shared.lock();
        let held = |key| {
            let owner = state.holder(key).and_then(|held| held.owner.as_ref());
            owner.is_some_and(|owner| *owner == claim.owner || owner == to)
        };
        if !claim.keys().iter().all(held) {
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
        let mut state = self.shared.lock();
        let mut answer = Released::Freed;
        for key in claim.keys() {
            let ours = state
                .held
                .get(key)
                .is_some_and(|held| held.owner.as_ref() == Some(&claim.owner));
            let live = ours && state.holder(key).is_some();
            if !live {
                answer = Released::NotHeld;
            }
            if live && !keep.is_zero() {
                if let Some(held) = state.held.get_mut(key) {
                    held.owner = None;
                    held.until = Moment::now() + keep;
                }
                // The lease may be shorter now than the waiters were told.
                if let Some((_, place)) = state.first_live(key)
                    && let Some(notify) = state.subscribers.get(&place.owner)
                {
                    notify.notify_one();
                }
            } else if ours {
                state.held.remove(key);
                state.tell_next(key);
            }
        }
        state.leave(&claim.owner);
        Ok(answer)
    }

    async fn subscribe(&self, claim: &Claim, _key: &Key) -> Result<Box<dyn Subscription>> {
        let notify = self
            .shared
            .lock()
            .subscribers
            .entry(claim.owner.clone())
            .or_default()
            .clone();
        Ok(Box::new(MemorySubscription {
            owner: claim.owner.clone(),
            notify,
            shared: self.shared.clone(),
        }))
    }

    async fn inspect(&self, key: &Key) -> Result<Option<LockInfo>> {
        Ok(self.shared.lock().info(key))
    }

    async fn list(&self, prefix: &str, _page_timeout: Duration) -> Result<Vec<LockInfo>> {
        let state = self.shared.lock();
        Ok(state
            .held
            .keys()
            .filter(|key| key.as_str().starts_with(prefix))
            .filter_map(|key| state.info(key))
            .collect())
    }

    async fn force_release(&self, key: &Key) -> Result<bool> {
        let mut state = self.shared.lock();
        let live = state.holder(key).is_some();
        state.held.remove(key);
        state.tell_next(key);
        Ok(live)
    }

    async fn close(&self) {}
}

struct MemorySubscription {
    owner: OwnerToken,
    notify: Arc<Notify>,
    shared: Arc<Shared>,
}

impl Drop for MemorySubscription {
    fn drop(&mut self) {
        self.shared.lock().subscribers.remove(&self.owner);
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

    /// The release wakes a dead waiter. The next one tries again when the place ahead of it expires.
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
            // Somebody who waits for it, and is never heard of again.
            claim.owner = OwnerToken::fresh();
            claim.waiting = true;
            engine.try_acquire(&claim).await.unwrap();
            tokio::time::advance(Duration::from_millis(100)).await;
        }
        let state = engine.shared.lock();
        assert!(state.held.len() <= 2048, "{}", state.held.len());
        assert!(
            state.queues.len() <= 4096 && state.places.len() <= 4096,
            "{}",
            state.places.len()
        );
    }
}
