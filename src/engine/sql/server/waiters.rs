//! The waiters of this process in the queues of a server.
//!
//! # Behavior
//! Where the server delivers notifications, one more connection receives them while there are waiters: the transaction that hands a name
//! off publishes the owner token of the waiter, its fencing token and its lease (`engine/hand_off/`). A check of the waiters' names
//! follows each new connection, every heartbeat, and each end of a lease before a waiter, so that a lost notification delays no waiter
//! for longer. Where there are no notifications, the checks are frequent: more so for names whose first waiter is in this process, and
//! shortly after a hand-off. They read the grant of a waiter.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::task::AbortHandle;

use super::Server;
use crate::backoff::Backoff;
use crate::clock::Moment;
use crate::engine::HandOff;
use crate::engine::hand_off::ClockReading;
use crate::engine::local_waiters::{LocalWaiters, WaiterSubscription};
use crate::engine::sql::ledger::{News, Notice, RESERVED};
use crate::model::{Key, OwnerToken};

/// The longest time between two checks without notifications.
const LONGEST_POLL: Duration = Duration::from_millis(200);

/// The time between the end of a connection that has worked and the next one. Messages are lost meanwhile.
const RECONNECT_PAUSE: Duration = Duration::from_millis(5);

/// What follows for the waiters of this process after the commit.
#[derive(Debug, Default)]
pub(super) struct Effects {
    pub entered: Vec<InQueue>,
    pub left: Vec<OwnerToken>,
    /// The notices for waiters of this process.
    pub notices: Vec<Notice>,
}

/// A waiter in a queue.
#[derive(Debug)]
pub(super) struct InQueue {
    pub owner: OwnerToken,
    pub name: Key,
    pub ticket: u64,
    /// The time until the name may be free.
    pub left: Option<Duration>,
}

/// A lease before waiters.
pub(in crate::engine::sql) struct CheckedLease {
    pub rest: Duration,
    /// The owner.
    pub holder: String,
}

/// The waiters of one engine.
pub(in crate::engine::sql) struct Waiters<S> {
    server: Arc<S>,
    /// The name of this engine in the queues: random, hexadecimal.
    pub process: String,
    pub known: Arc<LocalWaiters<()>>,
    checks: mpsc::UnboundedSender<Vec<Key>>,
    /// The last reading of the server's clock.
    clock: Mutex<Option<ClockReading>>,
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
            clock: Mutex::default(),
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
        for waiter in effects.entered {
            let check_after = self.check_after(waiter.left, true);
            if self
                .known
                .enter(&waiter.owner, &waiter.name, waiter.ticket, check_after, || ())
            {
                self.run_heartbeats();
            }
        }
        if has_entered && self.server.shortest_poll().is_none() {
            self.listen();
        }
        effects.notices.iter().for_each(|notice| self.notify(notice));
    }

    /// Records what a statement that was sent at `sent` changed for the waiters of this process.
    pub(super) fn apply_hand_offs(self: &Arc<Self>, sent: Moment, effects: Effects) {
        for notice in &effects.notices {
            if let News::Granted(_, times) = notice.news {
                self.read_clock(sent, times.granted_us as i64);
            }
        }
        self.apply(effects);
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

    /// Records that the server's clock showed `server_us` after `sent`.
    pub(in crate::engine::sql) fn read_clock(&self, sent: Moment, server_us: i64) {
        let server_us = server_us.unsigned_abs();
        let mut clock = self.clock.lock();
        if clock.is_none_or(|last| last.sent < sent) {
            *clock = Some(ClockReading { sent, server_us });
        }
    }

    /// Forgets the server's clock.
    #[cfg(feature = "postgres")]
    pub(in crate::engine::sql) fn forget_clock(&self) {
        *self.clock.lock() = None;
    }

    #[cfg(all(test, feature = "postgres"))]
    pub(in crate::engine::sql) fn has_clock(&self) -> bool {
        self.clock.lock().is_some()
    }

    /// Notifies a waiter. An unknown one is ignored: it has ended, and a hand-off to it ends after 2 s or its ttl.
    pub(in crate::engine::sql) fn notify(&self, notice: &Notice) {
        let Ok(owner) = OwnerToken::parse(&notice.owner) else {
            return;
        };
        self.quicken();
        match notice.news {
            News::MayBeFree => _ = self.known.notify(&owner),
            News::FreeAfter(after) => {
                if let Some((key, _)) = self.known.position(&owner) {
                    self.set_busy_for(&key, after, true);
                }
            }
            News::Granted(fence, times) => {
                let reading = *self.clock.lock();
                let until = reading.and_then(|reading| reading.local_end(times, Moment::now()));
                match until {
                    Some(until) => self.known.grant(&owner, HandOff { fence, until }),
                    // It makes an attempt, which finds that it is the holder.
                    None => self.known.notify(&owner),
                };
            }
        }
    }

    /// Notifies the holder of a checked lease, if it is a waiter of this process. It makes an attempt: what a check reads from InnoDB may
    /// not be on the disk yet, and what the attempt writes is.
    pub(super) fn notify_holder(&self, lease: &CheckedLease) {
        let waiter = lease.holder.strip_suffix(RESERVED).unwrap_or(&lease.holder);
        if OwnerToken::parse(waiter).is_ok_and(|owner| self.known.notify(&owner)) {
            self.quicken();
        }
    }

    /// Requests a check of names.
    #[cfg(any(feature = "postgres", test))]
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
                let pause = match waiters.server.receive(&waiters).await {
                    Ok(true) => return,
                    Ok(false) => {
                        backoff.reset();
                        RECONNECT_PAUSE
                    }
                    Err(failure) => {
                        tracing::debug!(%failure, "waiters receive no notifications");
                        backoff.delay()
                    }
                };
                drop(waiters);
                tokio::time::sleep(pause).await;
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
