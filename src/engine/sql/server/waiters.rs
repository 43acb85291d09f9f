//! The waiters of this process in the queues of a server.
//!
//! # Behavior
//! Where the server delivers notifications, one more connection receives them while there are waiters: the transaction that hands a name
//! off publishes the owner token of the waiter, its fencing token and its lease (`engine/hand_off/`). A check of the waiters' names
//! follows each new connection, every heartbeat, and each end of the lease that a waiter waits for, so that a lost notification delays no
//! waiter for longer. Where there are no notifications, the checks are frequent, and read the grant of a waiter. A name is checked the more
//! rarely, the longer its lease has lasted and the more waiters of other processes are ahead of those of this one.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::FutureExt;
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::task::AbortHandle;

use super::Server;
use crate::backoff::Backoff;
use crate::clock::Moment;
use crate::engine::core::ledger::{Content, Notification, RESERVED};
use crate::engine::hand_off::ClockReading;
use crate::engine::local_waiters::LocalWaiters;
use crate::engine::sql::calls::Wakeup;
use crate::engine::sql::failure::Failure;
use crate::engine::{DetectorSlot, HandOff, RESERVATION, Subscription};
use crate::event_loop::Task;
use crate::model::{Claim, Key, OwnerToken};

/// The shortest and the longest time between two checks without notifications.
const SHORTEST_POLL: Duration = Duration::from_millis(2);
const LONGEST_POLL: Duration = Duration::from_millis(200);
/// Added to the shortest interval for each waiter of another process ahead: about the duration of a short job and a hand-off.
const POLL_PER_WAITER: Duration = Duration::from_millis(8);
/// Maximum number of waiters ahead that counts: more make no difference.
pub(in crate::engine::sql) const AHEAD: u64 = (LONGEST_POLL.as_millis() / POLL_PER_WAITER.as_millis()) as u64;

/// After this many failures in a row, a listener that was never open emits a warning.
const FAILURES: u32 = 3;
/// The time between the end of a connection that has worked and the next one. Messages are lost meanwhile.
const RECONNECT_PAUSE: Duration = Duration::from_millis(5);

/// Returns the longest time to the next check without notifications. Each waiter of another process ahead adds [`LONGEST_POLL`],
/// but a check finds a hand-off, which lasts for `hand_off`, before it ends.
fn poll_after(age: Duration, ahead: u64, hand_off: Duration) -> Duration {
    let ahead = ahead.min(AHEAD) as u32;
    let shortest = SHORTEST_POLL + POLL_PER_WAITER * ahead;
    let longest = (LONGEST_POLL * (ahead + 1)).min(hand_off * 3 / 4);
    (age / 4).max(shortest).min(longest)
}

/// What follows for the waiters of this process after the commit.
#[derive(Debug, Default)]
pub(super) struct Effects {
    pub entered: Vec<InQueue>,
    pub left: Vec<OwnerToken>,
    /// The notifications for waiters of this process.
    pub notifications: Vec<Notification>,
    /// The names that a check found free and that were handed off, each with the time after which it may be free again.
    pub handed: Vec<(Key, Duration)>,
    /// The shared names that may have more waiters that fit.
    pub unfinished: Vec<Key>,
}

/// A waiter in a queue.
#[derive(Debug)]
pub(super) struct InQueue {
    pub owner: OwnerToken,
    pub name: Key,
    pub ticket: u64,
    /// The time until the name may be free.
    pub busy_for: Option<Duration>,
    /// The ttl of its claim.
    pub ttl: Duration,
}

/// The lease that a waiter waits for.
pub(in crate::engine::sql) struct CheckedLease {
    pub remaining: Duration,
    /// How long it has lasted.
    pub age: Duration,
    /// The owner.
    pub holder: String,
}

/// The waiters of one engine.
pub(in crate::engine) struct Waiters {
    pub(in crate::engine::sql) server: Arc<dyn Server>,
    /// The name of this engine in the queues: random, hexadecimal.
    pub process: String,
    pub known: Arc<LocalWaiters<()>>,
    checks: mpsc::UnboundedSender<Vec<Key>>,
    /// How long the shortest hand-off to a waiter of this process lasts.
    shortest_hand_off: Mutex<Duration>,
    /// The last reading of the server's clock.
    clock: Mutex<Option<ClockReading>>,
    runtime: Handle,
    tasks: Mutex<Tasks>,
    /// Whether the connection that listens was ever open.
    has_listened: AtomicBool,
}

#[derive(Default)]
struct Tasks {
    listener: Option<Task>,
    heartbeats: Option<AbortHandle>,
    is_closed: bool,
}

#[async_trait]
impl Wakeup for Waiters {
    fn detector(&self) -> Option<DetectorSlot> {
        Some(self.known.stall_detector.clone())
    }

    async fn subscribe(&self, claim: &Claim) -> Box<dyn Subscription> {
        Box::new(self.known.subscribe(claim))
    }

    /// Ends the tasks.
    fn close(&self) {
        let mut tasks = self.tasks.lock();
        tasks.is_closed = true;
        if let Some(listener) = tasks.listener.take() {
            listener.cancel();
        }
        if let Some(heartbeats) = tasks.heartbeats.take() {
            heartbeats.abort();
        }
    }
}

impl Waiters {
    /// Creates the waiters. Their names are sent to `checks` when they need a check.
    pub(super) fn new(server: Arc<dyn Server>, checks: mpsc::UnboundedSender<Vec<Key>>) -> Arc<Self> {
        Arc::new(Waiters {
            server,
            process: format!("{:016x}", fastrand::u64(..)),
            known: Arc::new(LocalWaiters::new()),
            checks,
            shortest_hand_off: Mutex::new(RESERVATION),
            clock: Mutex::default(),
            runtime: Handle::current(),
            tasks: Mutex::default(),
            has_listened: AtomicBool::new(false),
        })
    }

    /// Records what a transaction changed for the waiters of this process.
    pub(super) fn apply(self: &Arc<Self>, effects: Effects) {
        for owner in &effects.left {
            self.known.leave(owner);
        }
        let has_entered = !effects.entered.is_empty();
        for waiter in effects.entered {
            let shortest = waiter.ttl.min(*self.shortest_hand_off.lock());
            *self.shortest_hand_off.lock() = shortest;
            let check_after = self.check_after(waiter.busy_for, Duration::ZERO, 0);
            if self
                .known
                .enter(&waiter.owner, &waiter.name, waiter.ticket, check_after, || ())
            {
                self.run_heartbeats();
            }
        }
        if has_entered && self.server.is_notified() {
            self.listen();
        }
        if !effects.unfinished.is_empty() {
            self.check(effects.unfinished);
        }
        for (name, left) in &effects.handed {
            self.set_busy_for(name, *left, RESERVATION, 0);
        }
        effects
            .notifications
            .iter()
            .for_each(|notification| self.notify(notification));
    }

    /// Forgets the ttls of waiters that have left.
    pub(super) fn forget_short_hand_offs(&self) {
        let shortest = self.known.shortest_ttl().unwrap_or(RESERVATION);
        *self.shortest_hand_off.lock() = shortest.min(RESERVATION);
    }

    /// Records what a statement that was sent at `sent` changed for the waiters of this process.
    pub(super) fn apply_hand_offs(self: &Arc<Self>, sent: Moment, effects: Effects) {
        for notification in &effects.notifications {
            if let Content::Granted(_, times) = notification.content {
                self.read_clock(sent, times.granted_us as i64);
            }
        }
        self.apply(effects);
    }

    /// Records that a name may be free after `left`. `age`: how long its lease has lasted. `ahead`: the number of waiters of other
    /// processes ahead of those of this one.
    pub(super) fn set_busy_for(&self, key: &Key, left: Duration, age: Duration, ahead: u64) {
        self.known.set_lease_end(key, self.check_after(Some(left), age, ahead));
    }

    /// Returns when to check a name that may be free after `left`.
    fn check_after(&self, left: Option<Duration>, age: Duration, ahead: u64) -> Option<Duration> {
        if self.server.is_notified() {
            return left;
        }
        let poll = poll_after(age, ahead, *self.shortest_hand_off.lock()).mul_f64(0.5 + fastrand::f64() / 2.0);
        Some(left.map_or(poll, |left| left.min(poll)))
    }

    /// Returns the names to check with others: without notifications those that are due soon.
    pub(super) fn due_soon(&self) -> Vec<Key> {
        match self.server.is_notified() {
            true => Vec::new(),
            false => self.known.due_soon(),
        }
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
    pub(in crate::engine::sql) fn forget_clock(&self) {
        *self.clock.lock() = None;
    }

    #[cfg(all(test, feature = "postgres"))]
    pub(in crate::engine::sql) fn has_clock(&self) -> bool {
        self.clock.lock().is_some()
    }

    /// Notifies a waiter. An unknown one is ignored: it has ended, and a hand-off to it ends with its short lease.
    pub(in crate::engine::sql) fn notify(&self, notification: &Notification) {
        let Ok(owner) = OwnerToken::parse(&notification.owner) else {
            return;
        };
        match notification.content {
            Content::MayBeFree => _ = self.known.notify(&owner),
            Content::FreeAfter(after) => {
                if let Some((key, _)) = self.known.position(&owner) {
                    self.set_busy_for(&key, after, Duration::ZERO, 0);
                }
            }
            Content::Granted(fence, times) => {
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

    /// Notifies the holder of a checked lease of `key`, if it is a waiter of this process for that name. It makes an attempt:
    /// what a check reads from InnoDB may not be on the disk yet, and what the attempt writes is.
    pub(super) fn notify_holder(&self, key: &Key, lease: &CheckedLease) {
        let waiter = lease.holder.strip_suffix(RESERVED).unwrap_or(&lease.holder);
        if let Ok(owner) = OwnerToken::parse(waiter)
            // It may have the reservation of a name before the one that it waits for.
            && self.known.position(&owner).is_none_or(|(name, _)| name == *key)
        {
            self.known.notify(&owner);
        }
    }

    /// Requests a check of names.
    pub(in crate::engine::sql) fn check(&self, names: Vec<Key>) {
        let _ = self.checks.send(names);
    }

    fn run_heartbeats(self: &Arc<Self>) {
        let (known, checks) = (self.known.clone(), self.checks.clone());
        let heartbeats = self.runtime.spawn(FutureExt::boxed(async move {
            known.run_heartbeats(|names| _ = checks.send(names)).await;
        }));
        let mut tasks = self.tasks.lock();
        tasks.heartbeats = Some(heartbeats.abort_handle());
        if tasks.is_closed {
            heartbeats.abort();
        }
    }

    /// Starts the task that listens, unless it runs.
    fn listen(self: &Arc<Self>) {
        let mut tasks = self.tasks.lock();
        if tasks.is_closed || tasks.listener.as_ref().is_some_and(|task| !task.has_ended()) {
            return;
        }
        let waiters = Arc::downgrade(self);
        let listen = async move {
            let mut backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(2));
            let mut failures = 0;
            while let Some(waiters) = waiters.upgrade() {
                let received = waiters.server.clone().receive(&waiters).await;
                waiters.has_listened.fetch_or(received.is_ok(), Relaxed);
                let pause = match received {
                    Ok(true) => return,
                    Ok(false) => {
                        backoff.reset();
                        RECONNECT_PAUSE
                    }
                    Err(failure) => {
                        tracing::debug!(%failure, "waiters receive no notifications");
                        failures += 1;
                        // If the listener was open before, the server is down now, and each call reports that.
                        if failures == FAILURES && !waiters.has_listened.load(Relaxed) {
                            waiters.warn_of_silence(&failure);
                        }
                        backoff.delay()
                    }
                };
                drop(waiters);
                tokio::time::sleep(pause).await;
            }
        };
        tasks.listener = Some(self.server.connections().spawn(listen));
    }

    fn warn_of_silence(&self, failure: &Failure) {
        self.warn(format!(
            "the connection that receives notifications of released locks cannot be opened, so that waiters are served up to 2 s late: \
             {failure}. Check listenUrl if it is set, the firewall, and the server's limit of connections"
        ));
    }

    /// Emits a warning, once for each text.
    pub(in crate::engine::sql) fn warn(&self, text: String) {
        if let Some(warnings) = self.server.warnings() {
            warnings.warn(text);
        }
    }

    /// Whether there are no waiters. If so, forgets the listener, so that the next waiter starts another one.
    pub(in crate::engine::sql) fn forget_listener_if_unused(&self) -> bool {
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
    fn polls_are_rare_for_an_old_lease_and_behind_other_waiters() {
        let second = Duration::from_secs(1);
        for (age, ahead, poll_ms) in [
            (Duration::ZERO, 0, 2),
            (second / 25, 0, 10),
            (second, 0, 200),
            (Duration::ZERO, 1, 10),
            (Duration::ZERO, 3, 26),
            (second / 5, 3, 50),
            (Duration::ZERO, u64::MAX, 202),
            (second * 60, 0, 200),
            (second * 60, 1, 400),
            (second * 60, 38, 1500),
        ] {
            assert_eq!(
                poll_after(age, ahead, RESERVATION).as_millis(),
                poll_ms,
                "{age:?} {ahead}"
            );
        }
        assert_eq!(
            poll_after(second * 60, 38, second).as_millis(),
            750,
            "the ttl of a waiter"
        );
    }
}
