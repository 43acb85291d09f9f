//! The waiters of this process in the queues of PostgreSQL.
//!
//! # Behavior
//! While there are waiters, one more connection listens on the channel of this process, where the transaction that releases a name
//! publishes the owner token of its first waiter. A check of the waiters' names follows each new connection, every heartbeat, and
//! each end of a lease before a waiter, so that a lost notification delays no waiter for longer. Behind a pooler, which delivers no
//! notifications, the checks are frequent.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::task::AbortHandle;
use tokio::time::timeout;

use super::error::Failure;
use super::session::{Server, Session};
use super::transaction::Effects;
use crate::backoff::Backoff;
use crate::engine::local_waiters::{LocalWaiters, WaiterSubscription};
use crate::model::{Key, OwnerToken};

/// How long the connection stays open without waiters.
const LISTENER_KEPT: Duration = Duration::from_secs(30);

/// The longest time between two checks behind a pooler.
const POLL: Duration = Duration::from_millis(200);

/// A notification of a waiter: `<owner>`, or `<owner> <ms>`.
pub(super) struct Notification {
    owner: OwnerToken,
    /// The time after which its name may be free. `None`: now.
    after: Option<Duration>,
}

impl Notification {
    /// Returns what is added to the owner.
    pub(super) fn addition(after: Duration) -> String {
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
pub(super) struct Waiters {
    server: Arc<Server>,
    /// The name of this engine in the queues: random, hexadecimal.
    pub process: String,
    pub known: Arc<LocalWaiters<()>>,
    checks: mpsc::UnboundedSender<Vec<Key>>,
    runtime: Handle,
    tasks: Mutex<Tasks>,
}

#[derive(Default)]
struct Tasks {
    listener: Option<AbortHandle>,
    heartbeats: Option<AbortHandle>,
    is_closed: bool,
}

impl Waiters {
    /// Creates the waiters. Their names are sent to `checks` when they need a check.
    pub(super) fn new(server: Arc<Server>, checks: mpsc::UnboundedSender<Vec<Key>>) -> Arc<Self> {
        Arc::new(Waiters {
            server,
            process: format!("{:016x}", fastrand::u64(..)),
            known: Arc::new(LocalWaiters::new()),
            checks,
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
        for (owner, key, ticket, left) in effects.entered {
            if self.known.enter(&owner, &key, ticket, self.check_after(left), || ()) {
                self.run_heartbeats();
            }
        }
        // A pooler accepts LISTEN, and delivers nothing.
        if has_entered && self.server.can_listen() {
            self.listen();
        }
        for notification in effects.notifications {
            self.notify(&notification);
        }
    }

    /// Records that a name may be free after `left`.
    pub(super) fn set_busy_for(&self, key: &Key, left: Duration) {
        self.known.set_lease_end(key, self.check_after(Some(left)));
    }

    /// Returns when to check a name that may be free after `left`.
    fn check_after(&self, left: Option<Duration>) -> Option<Duration> {
        if !self.server.can_listen() {
            let poll = POLL.mul_f64(0.5 + fastrand::f64() / 2.0);
            return Some(left.map_or(poll, |left| left.min(poll)));
        }
        left
    }

    /// Wakes a waiter. An unknown one is ignored: it has ended, and its position expires.
    pub(super) fn notify(&self, notification: &str) {
        match Notification::parse(notification) {
            Some(Notification { owner, after: None }) => _ = self.known.notify(&owner),
            Some(Notification {
                owner,
                after: Some(after),
            }) => {
                if let Some((key, _)) = self.known.position(&owner) {
                    self.set_busy_for(&key, after);
                }
            }
            // Of another version.
            None => {}
        }
    }

    /// Requests a check of names.
    pub(super) fn check(&self, names: Vec<Key>) {
        let _ = self.checks.send(names);
    }

    /// Ends the tasks.
    pub(super) fn close(&self) {
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
                match waiters.receive().await {
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

    /// Listens until the connection breaks. `true`: there have been no waiters for some time.
    async fn receive(&self) -> Result<bool, Failure> {
        let (sender, mut notifications) = mpsc::unbounded_channel();
        let session: Session = self.server.open(Some(sender)).await?;
        session
            .execute(&format!("LISTEN \"holdfast_{}\"", self.process))
            .await?;
        // Notifications of earlier transactions were not received.
        let names = self.known.names();
        if !names.is_empty() {
            self.check(names);
        }
        loop {
            let received = tokio::select! {
                received = timeout(LISTENER_KEPT, notifications.recv()) => received,
                () = session.outdated() => Ok(None),
            };
            match received {
                Ok(Some(notification)) => self.notify(&notification),
                Ok(None) => return Ok(false),
                Err(_) if self.is_unused() => return Ok(true),
                Err(_) => {}
            }
        }
    }

    /// Whether there are no waiters. Then the next waiter starts another task.
    fn is_unused(&self) -> bool {
        let mut tasks = self.tasks.lock();
        let is_unused = self.known.names().is_empty();
        if is_unused {
            tasks.listener = None;
        }
        is_unused
    }
}
