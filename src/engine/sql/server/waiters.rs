//! The waiters of this process in the queues of a server.
//!
//! # Behavior
//! Where the server delivers notifications, one more connection receives them while there are waiters: the transaction that releases
//! a name publishes the owner token of its first waiter. A check of the waiters' names follows each new connection, every heartbeat,
//! and each end of a lease before a waiter, so that a lost notification delays no waiter for longer. Where there are no
//! notifications, the checks are frequent: more so for names whose first waiter is in this process, and shortly after a hand-off.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::task::AbortHandle;

use super::Server;
use super::transaction::Effects;
use crate::backoff::Backoff;
use crate::engine::local_waiters::{LocalWaiters, WaiterSubscription};
use crate::model::{Key, OwnerToken};

/// The longest time between two checks without notifications.
const LONGEST_POLL: Duration = Duration::from_millis(200);

/// A notification of a waiter: `<owner>`, or `<owner> <ms>`.
pub(in crate::engine::sql) struct Notification {
    owner: OwnerToken,
    /// The time after which its name may be free. `None`: now.
    after: Option<Duration>,
}

impl Notification {
    /// Returns what is added to the owner.
    pub(in crate::engine::sql) fn addition(after: Duration) -> String {
        format!(" {}", after.as_millis())
    }

    fn parse(text: &str) -> Option<Self> {
        let (owner, after) = match text.split_once(' ') {
            Some((owner, after)) => (owner, Some(Duration::from_millis(after.parse().ok()?))),
            None => (text, None),
        };
        let owner = OwnerToken::parse(owner).ok()?;
        Some(Notification { owner, after })
    }
}

/// The waiters of one engine.
pub(in crate::engine::sql) struct Waiters<S> {
    server: Arc<S>,
    /// The name of this engine in the queues: random, hexadecimal.
    pub process: String,
    pub known: Arc<LocalWaiters<()>>,
    checks: mpsc::UnboundedSender<Vec<Key>>,
    /// The time between two checks without notifications, in microseconds.
    pace_us: AtomicU64,
    runtime: Handle,
    tasks: Mutex<Tasks>,
}

#[derive(Default)]
struct Tasks {
    listener: Option<AbortHandle>,
    heartbeats: Option<AbortHandle>,
    is_closed: bool,
}

impl<S: Server> Waiters<S> {
    /// Creates the waiters. Their names are sent to `checks` when they need a check.
    pub(super) fn new(server: Arc<S>, checks: mpsc::UnboundedSender<Vec<Key>>) -> Arc<Self> {
        Arc::new(Waiters {
            server,
            process: format!("{:016x}", fastrand::u64(..)),
            known: Arc::new(LocalWaiters::new()),
            checks,
            pace_us: AtomicU64::new(0),
            runtime: Handle::current(),
            tasks: Mutex::default(),
        })
    }

    pub(super) fn subscribe(&self, owner: &OwnerToken) -> WaiterSubscription<()> {
        self.known.subscribe(owner)
    }

    /// Records what a transaction changed for the waiters of this process.
    pub(super) fn apply(self: &Arc<Self>, effects: Effects) {
        for owner in &effects.left {
            self.known.leave(owner);
        }
        let has_entered = !effects.entered.is_empty();
        if has_entered {
            self.quicken();
        }
        for (owner, key, ticket, left) in effects.entered {
            if self
                .known
                .enter(&owner, &key, ticket, self.check_after(left, true), || ())
            {
                self.run_heartbeats();
            }
        }
        if has_entered && self.server.shortest_poll().is_none() {
            self.listen();
        }
        for notification in effects.notifications {
            self.notify(&notification);
        }
    }

    /// Records that a name may be free after `left`. `is_first`: a waiter of this process may be the next one.
    pub(super) fn set_busy_for(&self, key: &Key, left: Duration, is_first: bool) {
        self.known.set_lease_end(key, self.check_after(Some(left), is_first));
    }

    /// Returns when to check a name that may be free after `left`.
    fn check_after(&self, left: Option<Duration>, is_first: bool) -> Option<Duration> {
        let Some(shortest) = self.server.shortest_poll() else {
            return left;
        };
        let pace = Duration::from_micros(self.pace_us.load(Ordering::Relaxed)).max(shortest);
        let poll = if is_first { pace } else { LONGEST_POLL };
        let poll = poll.mul_f64(0.5 + fastrand::f64() / 2.0);
        Some(left.map_or(poll, |left| left.min(poll)))
    }

    /// Returns the names to poll: without notifications all that are waited for.
    pub(super) fn polled(&self) -> Vec<Key> {
        match self.server.shortest_poll() {
            Some(_) => self.known.names(),
            None => Vec::new(),
        }
    }

    /// Makes the checks without notifications frequent.
    fn quicken(&self) {
        self.pace_us.store(0, Ordering::Relaxed);
    }

    /// Makes the checks without notifications less frequent.
    pub(super) fn slacken(&self) {
        let shortest = self.server.shortest_poll().unwrap_or(LONGEST_POLL);
        let pace = Duration::from_micros(self.pace_us.load(Ordering::Relaxed)).max(shortest);
        let next = (pace * 5 / 4).min(LONGEST_POLL);
        self.pace_us.store(next.as_micros() as u64, Ordering::Relaxed);
    }

    /// Wakes a waiter. An unknown one is ignored: it has ended, and its position expires.
    pub(in crate::engine::sql) fn notify(&self, notification: &str) {
        self.quicken();
        match Notification::parse(notification) {
            Some(Notification { owner, after: None }) => _ = self.known.notify(&owner),
            Some(Notification {
                owner,
                after: Some(after),
            }) => {
                if let Some((key, _)) = self.known.position(&owner) {
                    self.set_busy_for(&key, after, true);
                }
            }
            // Of another version.
            None => {}
        }
    }

    /// Requests a check of names.
    pub(in crate::engine::sql) fn check(&self, names: Vec<Key>) {
        let _ = self.checks.send(names);
    }

    /// Ends the tasks.
    pub(in crate::engine::sql) fn close(&self) {
        let mut tasks = self.tasks.lock();
        tasks.is_closed = true;
        for task in [tasks.listener.take(), tasks.heartbeats.take()].into_iter().flatten() {
            task.abort();
        }
    }

    fn run_heartbeats(self: &Arc<Self>) {
        let (known, checks) = (self.known.clone(), self.checks.clone());
        let heartbeats = self.runtime.spawn(async move {
            known.run_heartbeats(|names| _ = checks.send(names)).await;
        });
        let mut tasks = self.tasks.lock();
        tasks.heartbeats = Some(heartbeats.abort_handle());
        if tasks.is_closed {
            heartbeats.abort();
        }
    }

    /// Starts the task that listens, unless it runs.
    fn listen(self: &Arc<Self>) {
        let mut tasks = self.tasks.lock();
        if tasks.is_closed || tasks.listener.as_ref().is_some_and(|task| !task.is_finished()) {
            return;
        }
        let waiters = Arc::downgrade(self);
        let listener = self.runtime.spawn(async move {
            let mut backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(2));
            while let Some(waiters) = waiters.upgrade() {
                match waiters.server.receive(&waiters).await {
                    Ok(true) => return,
                    Ok(false) => backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(2)),
                    Err(failure) => tracing::debug!(%failure, "waiters receive no notifications"),
                }
                drop(waiters);
                tokio::time::sleep(backoff.delay()).await;
            }
        });
        tasks.listener = Some(listener.abort_handle());
    }

    /// Whether there are no waiters. Then the next waiter starts another task.
    #[cfg(feature = "postgres")]
    pub(in crate::engine::sql) fn is_unused(&self) -> bool {
        let mut tasks = self.tasks.lock();
        let is_unused = self.known.names().is_empty();
        if is_unused {
            tasks.listener = None;
        }
        is_unused
    }
}
