//! Keeps local waiters in the order of their calls.
//!
//! The rule depends on the store:
//!
//! - The store keeps a queue: at most one attempt per name and service is in progress (one more for each half second without an
//!   answer). Later attempts wait here. When it ends, they are made together, in the order of the calls ([`attempt_in_order`]).
//!   After a failure, the attempts of a name are repeated together as well: the queue may be lost, or this process's positions
//!   in it.
//! - The store keeps no queue: the waiters of a name form a FIFO, and only the first one calls the store ([`Position`]).
//!
//! Each call has an arrival number, which the service counts. The order is that of these numbers.

use std::collections::{BTreeMap, HashMap};
use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;

use super::Shared;
use crate::engine::{Acquired, Result as EngineResult};
use crate::model::{Claim, Key};

/// Maximum number of attempts in one call of the engine.
const MOST_TOGETHER: usize = 64;
/// How long an attempt without an answer delays the others of its name. Less than the time that a waiter has to confirm a
/// hand-off (2 s).
const OVERDUE: Duration = Duration::from_millis(500);

type Reply = oneshot::Sender<EngineResult<Acquired>>;

/// An attempt that waits for the end of the one in progress.
#[derive(Debug)]
struct Pending {
    claim: Arc<Claim>,
    reply: Reply,
}

/// The names with an attempt that is in progress or delayed.
#[derive(Debug, Default)]
pub(super) struct Attempts(Mutex<HashMap<Key, Name>>);

#[cfg(test)]
impl Attempts {
    pub(super) fn is_empty(&self) -> bool {
        self.0.lock().is_empty()
    }
}

#[derive(Debug, Default)]
struct Name {
    /// The arrival number of the attempt in progress, and its start.
    current: Option<(u64, Instant)>,
    /// The attempts that wait for its end, by arrival number.
    pending: BTreeMap<u64, Pending>,
    /// The attempts that are repeated together after a delay, by arrival number.
    delayed: BTreeMap<u64, Pending>,
}

/// Makes an attempt of a waiting claim after the one in progress for its first name, in the order of arrival.
///
/// # Behavior
/// `delay`: the attempt is repeated after a failure. It is made after this time, or earlier together with another repeated
/// attempt for the name. An attempt without an answer after [`OVERDUE`] does not delay the others any longer: one of them may be
/// the first waiter in the queue. Dropping the future cancels the attempt.
///
/// # Errors
/// Those of the engine.
pub(super) async fn attempt_in_order(
    shared: &Arc<Shared>,
    claim: &Arc<Claim>,
    arrival: u64,
    delay: Option<Duration>,
) -> EngineResult<Acquired> {
    let key = &claim.keys()[0];
    let mut answer = {
        let mut names = shared.attempts.0.lock();
        let name = names.entry(key.clone()).or_default();
        if delay.is_none() && name.current.is_none() {
            name.current = Some((arrival, Instant::now()));
            None
        } else {
            let (reply, answer) = oneshot::channel();
            let claim = claim.clone();
            if let Some(delay) = delay {
                if name.delayed.is_empty() {
                    begin_delayed(shared, key, delay);
                }
                name.delayed.insert(arrival, Pending { claim, reply });
            } else {
                name.pending.insert(arrival, Pending { claim, reply });
            }
            Some(answer)
        }
    };
    let Some(answer) = &mut answer else {
        let _in_progress = InProgress::new(shared, key, arrival);
        return shared.engine.try_acquire(claim).await;
    };
    let _waiting = Waiting { shared, key, arrival };
    loop {
        tokio::select! {
            biased;
            answer = &mut *answer => return match answer {
                Ok(answer) => answer,
                // The attempts ended in a panic, or the runtime is shutting down.
                Err(_) => std::future::pending().await,
            },
            () = tokio::time::sleep(OVERDUE) => {
                begin_pending(shared, key, |current| current.is_some_and(|(_, began)| began.elapsed() >= OVERDUE));
            }
        }
    }
}

/// Makes the delayed attempts of a name pending after `delay`, in a task.
fn begin_delayed(shared: &Arc<Shared>, key: &Key, delay: Duration) {
    let (task, key) = (shared.clone(), key.clone());
    shared.background.spawn(async move {
        tokio::select! {
            () = tokio::time::sleep(delay) => {}
            () = task.closing.cancelled() => {}
        }
        if let Some(name) = task.attempts.0.lock().get_mut(&key) {
            name.pending.append(&mut name.delayed);
        }
        begin_pending(&task, &key, |current| current.is_none());
    });
}

/// Makes the pending attempts of a name together, in a task, if `may_begin`: it gets the attempt in progress. Removes a name
/// without attempts.
fn begin_pending(shared: &Arc<Shared>, key: &Key, may_begin: impl FnOnce(Option<(u64, Instant)>) -> bool) {
    // Without a runtime the process or the worker is about to end.
    if tokio::runtime::Handle::try_current().is_err() {
        return;
    }
    let mut names = shared.attempts.0.lock();
    let Some(name) = names.get_mut(key).filter(|name| may_begin(name.current)) else {
        return;
    };
    let Some((&first, _)) = name.pending.first_key_value() else {
        name.current = None;
        if name.delayed.is_empty() {
            names.remove(key);
        }
        return;
    };
    let mut pending = Vec::new();
    while pending.len() < MOST_TOGETHER
        && let Some((_, entry)) = name.pending.pop_first()
    {
        pending.push(entry);
    }
    name.current = Some((first, Instant::now()));
    drop(names);
    let in_progress = InProgress::new(shared, key, first);
    shared.background.spawn(async move {
        make_together(&in_progress.shared, pending).await;
        drop(in_progress);
    });
}

/// Guard of an attempt in progress. Dropping it starts the pending attempts, unless others were started before.
struct InProgress {
    shared: Arc<Shared>,
    key: Key,
    number: u64,
}

impl InProgress {
    fn new(shared: &Arc<Shared>, key: &Key, number: u64) -> Self {
        let (shared, key) = (shared.clone(), key.clone());
        InProgress { shared, key, number }
    }
}

impl Drop for InProgress {
    fn drop(&mut self) {
        let is_current = |current: Option<(u64, _)>| current.is_some_and(|(number, _)| number == self.number);
        begin_pending(&self.shared, &self.key, is_current);
    }
}

/// A call that waits for the answer to its pending attempt.
struct Waiting<'a> {
    shared: &'a Arc<Shared>,
    key: &'a Key,
    arrival: u64,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if let Some(name) = self.shared.attempts.0.lock().get_mut(self.key) {
            name.pending.remove(&self.arrival);
            name.delayed.remove(&self.arrival);
        }
    }
}

async fn make_together(shared: &Arc<Shared>, mut pending: Vec<Pending>) {
    while !pending.is_empty() {
        let (claims, replies): (Vec<_>, Vec<_>) = pending
            .into_iter()
            .map(|Pending { claim, reply }| (claim, Mutex::new(Some(reply))))
            .unzip();
        claims.iter().for_each(|claim| claim.begin_attempt());
        let mut answer = |index: usize, answer| {
            if let Some(reply) = replies.get(index).and_then(|reply| reply.lock().take())
                && reply.send(answer).is_err()
            {
                // The caller was dropped: release what its attempt left in the store.
                shared.abandon(&claims[index]);
            }
        };
        let is_cancelled = tokio::select! {
            biased;
            () = shared.engine.try_acquire_in_order(&claims, &mut answer) => false,
            () = cancelled(&claims, &replies) => true,
        };
        pending = Vec::new();
        for (claim, reply) in claims.into_iter().zip(replies) {
            let Some(reply) = reply.into_inner() else {
                continue;
            };
            if is_cancelled && claim.sent_at().is_none() && !reply.is_closed() {
                pending.push(Pending { claim, reply });
            } else {
                shared.abandon(&claim);
            }
        }
    }
}

/// Completes when the attempts should be dropped: when every remaining caller was dropped, or when one was dropped before
/// anything was sent. Then the attempts of the others start again without it.
async fn cancelled(claims: &[Arc<Claim>], replies: &[Mutex<Option<Reply>>]) {
    poll_fn(|context| {
        let (mut is_dropped, mut is_awaited) = (false, false);
        for reply in replies {
            if let Some(reply) = &mut *reply.lock() {
                match reply.poll_closed(context) {
                    Poll::Ready(()) => is_dropped = true,
                    Poll::Pending => is_awaited = true,
                }
            }
        }
        if is_dropped && (!is_awaited || claims.iter().all(|claim| claim.sent_at().is_none())) {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    })
    .await;
}

/// The FIFOs of one service, by name.
#[derive(Debug, Default)]
pub(super) struct LocalFifos(Mutex<HashMap<Key, BTreeMap<u64, Arc<Notify>>>>);

/// A position in the FIFO of one name. Dropping it leaves the FIFO.
#[derive(Debug)]
pub(super) struct Position {
    fifos: Arc<LocalFifos>,
    key: Key,
    arrival: u64,
    wake: Arc<Notify>,
}

impl LocalFifos {
    /// Enters the FIFO of `key`.
    pub(super) fn enter(self: &Arc<Self>, key: &Key, arrival: u64) -> Position {
        let wake = Arc::new(Notify::new());
        self.0
            .lock()
            .entry(key.clone())
            .or_default()
            .insert(arrival, wake.clone());
        Position {
            fifos: self.clone(),
            key: key.clone(),
            arrival,
            wake,
        }
    }

    /// Wakes the first waiter of a name that this process released. The store's own notification may come later.
    pub(super) fn wake_first(&self, key: &Key) {
        if let Some((_, first)) = self.0.lock().get(key).and_then(|fifo| fifo.first_key_value()) {
            first.notify_one();
        }
    }
}

impl Position {
    /// Returns the name.
    pub(super) fn key(&self) -> &Key {
        &self.key
    }

    /// Whether all earlier waiters have left.
    pub(super) fn is_first(&self) -> bool {
        let fifos = self.fifos.0.lock();
        let first = fifos.get(&self.key).and_then(|fifo| fifo.first_key_value());
        first.is_some_and(|(first, _)| *first == self.arrival)
    }

    /// Waits until this position is the first, or this process released the name. May return spuriously.
    pub(super) async fn woken(&self) {
        self.wake.notified().await;
    }
}

impl Drop for Position {
    fn drop(&mut self) {
        let mut fifos = self.fifos.0.lock();
        let Some(fifo) = fifos.get_mut(&self.key) else { return };
        fifo.remove(&self.arrival);
        match fifo.first_key_value() {
            None => {
                fifos.remove(&self.key);
            }
            Some((first, next)) if *first > self.arrival => next.notify_one(),
            Some(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_fifo_advances_in_order_and_is_removed_when_empty() {
        let fifos = Arc::new(LocalFifos::default());
        let key = Key::new("n").unwrap();
        let enter = |arrival| fifos.enter(&key, arrival);
        let (first, second, third) = (enter(1), enter(3), enter(4));
        assert!(first.is_first() && !second.is_first() && !third.is_first());
        drop(second);
        assert!(first.is_first() && !third.is_first());
        drop(first);
        third.woken().await;
        assert!(third.is_first());
        fifos.wake_first(&key);
        third.woken().await;
        let returned = enter(2);
        assert!(returned.is_first() && !third.is_first());
        drop(returned);
        third.woken().await;
        drop(third);
        assert!(fifos.0.lock().is_empty());
    }
}
