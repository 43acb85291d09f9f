//! What a service tells about its leases: events for `onEvent`, numbers for `stats()`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use crate::model::{Fence, Names};

/// The kinds of event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventKind {
    /// A lease was granted.
    Acquired,
    /// A lease was released by its holder.
    Released,
    /// A lease was renewed.
    Renewed,
    /// A lease ended before its holder released it.
    Lost,
    /// A call found its name busy and waits.
    Waiting,
}

impl EventKind {
    /// The type as JavaScript sees it.
    pub const fn as_str(self) -> &'static str {
        match self {
            EventKind::Acquired => "acquired",
            EventKind::Released => "released",
            EventKind::Renewed => "renewed",
            EventKind::Lost => "lost",
            EventKind::Waiting => "waiting",
        }
    }
}

/// One event.
#[derive(Debug, Clone)]
pub struct Event {
    /// What happened.
    pub kind: EventKind,
    /// The names of the lock, as the caller gave them; at least one.
    pub names: Names,
    /// The lease's fencing token; none while waiting.
    pub fence: Option<Fence>,
    /// `Acquired`: how long the call waited. `Released` and `Lost`: how long the lease was held.
    pub duration: Option<Duration>,
    /// `Lost`: why.
    pub reason: Option<Arc<str>>,
}

/// Where events go. Called on the I/O thread; it must not block.
pub type EventSink = Arc<dyn Fn(Event) + Send + Sync>;

/// Counters since the service was made.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) held: AtomicU64,
    pub(super) waiting: AtomicU64,
    pub(super) acquired: AtomicU64,
    pub(super) busy: AtomicU64,
    pub(super) released: AtomicU64,
    pub(super) renewed: AtomicU64,
    pub(super) lost: AtomicU64,
    pub(super) store_errors: AtomicU64,
}

pub(super) fn add(counter: &AtomicU64) {
    counter.fetch_add(1, Relaxed);
}

pub(super) fn sub(counter: &AtomicU64) {
    counter.fetch_sub(1, Relaxed);
}

/// A reading of the counters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Leases held now.
    pub held: u64,
    /// Calls that wait for a busy name now.
    pub waiting: u64,
    /// Leases granted.
    pub acquired: u64,
    /// Calls that ended with the name busy (waited or not).
    pub busy: u64,
    /// Leases released by their holder.
    pub released: u64,
    /// Renewals that succeeded.
    pub renewed: u64,
    /// Leases that ended before they were released.
    pub lost: u64,
    /// Operations that the store failed or did not answer in time (those that were tried again included).
    pub store_errors: u64,
}

impl Counters {
    pub(super) fn read(&self) -> Stats {
        Stats {
            held: self.held.load(Relaxed),
            waiting: self.waiting.load(Relaxed),
            acquired: self.acquired.load(Relaxed),
            busy: self.busy.load(Relaxed),
            released: self.released.load(Relaxed),
            renewed: self.renewed.load(Relaxed),
            lost: self.lost.load(Relaxed),
            store_errors: self.store_errors.load(Relaxed),
        }
    }
}
