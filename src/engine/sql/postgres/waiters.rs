//! The waiters of this process in the queues of PostgreSQL.
//!
//! # Behavior
//! While there are waiters, one more connection listens on the channel of this process, where the transaction that hands a name off
//! publishes the owner token of the waiter, its fencing token and its lease (`engine/hand_off/`). A check of the waiters' names follows each new connection, every heartbeat, and
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
use crate::clock::Moment;
use crate::engine::HandOff;
use crate::engine::hand_off::{ClockReading, GrantTimes};
use crate::engine::local_waiters::{LocalWaiters, WaiterSubscription};
use crate::engine::sql::ledger::{News, Notice};
use crate::model::{Fence, Key, OwnerToken};

/// How long the connection stays open without waiters.
const LISTENER_KEPT: Duration = Duration::from_secs(30);

/// The time between the end of a connection that has worked and the next one. Messages are lost meanwhile.
const RECONNECT_PAUSE: Duration = Duration::from_millis(5);

/// The longest time between two checks behind a pooler.
const POLL: Duration = Duration::from_millis(200);

/// Returns a notice as the text of a message: `<owner>`, `<owner> <ms until the name may be free>`, or
/// `<owner> <fencing token> <µs of the hand-off> <µs of its end>`.
pub(super) fn text_of(notice: &Notice) -> String {
    let owner = &notice.owner;
    match notice.news {
        News::MayBeFree => owner.clone(),
        News::FreeAfter(after) => format!("{owner} {}", after.as_millis()),
        News::Granted(fence, times) => format!("{owner} {} {} {}", fence.0, times.granted_us, times.until_us),
    }
}

/// Reads a message. `None`: it is of another version.
fn notice_of(text: &str) -> Option<Notice> {
    let mut parts = text.split(' ');
    let owner = parts.next()?.to_owned();
    let numbers: Result<Vec<u64>, _> = parts.map(str::parse).collect();
    let news = match numbers.ok()?[..] {
        [] => News::MayBeFree,
        [ms] => News::FreeAfter(Duration::from_millis(ms)),
        [fence, granted_us, until_us] => News::Granted(Fence(fence), GrantTimes { granted_us, until_us }),
        _ => return None,
    };
    let engine = None;
    Some(Notice { engine, owner, news })
}

/// The waiters of one engine.
pub(super) struct Waiters {
    server: Arc<Server>,
    /// The name of this engine in the queues: random, hexadecimal.
    pub process: String,
    pub known: Arc<LocalWaiters<()>>,
    checks: mpsc::UnboundedSender<Vec<Key>>,
    /// The last reading of the server's clock.
    clock: Mutex<Option<ClockReading>>,
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
            clock: Mutex::default(),
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
        effects.notices.iter().for_each(|notice| self.notify(notice));
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

    /// Records that the server's clock showed `server_us` after `sent`.
    pub(super) fn read_clock(&self, sent: Moment, server_us: i64) {
        let server_us = server_us.unsigned_abs();
        let mut clock = self.clock.lock();
        if clock.is_none_or(|last| last.sent < sent) {
            *clock = Some(ClockReading { sent, server_us });
        }
    }

    #[cfg(test)]
    pub(super) fn has_clock(&self) -> bool {
        self.clock.lock().is_some()
    }

    /// Notifies a waiter. An unknown one is ignored: it has ended, and a hand-off to it ends after 2 s or its ttl.
    pub(super) fn notify(&self, notice: &Notice) {
        let Ok(owner) = OwnerToken::parse(&notice.owner) else {
            return;
        };
        match notice.news {
            News::MayBeFree => _ = self.known.notify(&owner),
            News::FreeAfter(after) => {
                if let Some((key, _)) = self.known.position(&owner) {
                    self.set_busy_for(&key, after);
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
                let pause = match waiters.receive().await {
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

    /// Listens until the connection breaks. `true`: there have been no waiters for some time.
    async fn receive(&self) -> Result<bool, Failure> {
        let (sender, mut notifications) = mpsc::unbounded_channel();
        let session: Session = self.server.open(Some(sender)).await?;
        // It may lead to another server.
        *self.clock.lock() = None;
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
                Ok(Some(text)) => {
                    if let Some(notice) = notice_of(&text) {
                        self.notify(&notice);
                    }
                }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_notice_is_read_as_it_was_written() {
        let times = GrantTimes {
            granted_us: 1_700_000_000_000_000,
            until_us: 1_700_000_002_000_000,
        };
        let after = Duration::from_millis(400);
        for news in [News::MayBeFree, News::FreeAfter(after), News::Granted(Fence(7), times)] {
            let engine = None;
            let owner = OwnerToken::fresh().as_str().to_owned();
            let notice = Notice { engine, owner, news };
            assert_eq!(notice_of(&text_of(&notice)), Some(notice));
        }
        for of_another_version in ["a b", "a 1 2", "a 1 2 3 4", "a 1 2 x"] {
            assert_eq!(notice_of(of_another_version), None);
        }
    }
}
