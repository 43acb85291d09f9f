//! The events of a service, for `onEvent`, and its counters, for `stats()`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use crate::model::{Fence, Names};

/// The kinds of event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventKind {
    /// A lease was granted.
    Acquired,
    /// The holder released a lease.
    Released,
    /// A lease was renewed.
    Renewed,
    /// A lease ended before a release.
    Lost,
    /// A call waits for a busy name.
    Waiting,
}

impl EventKind {
    /// Returns the event's `type` in JavaScript.
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
    /// The kind.
    pub kind: EventKind,
    /// The names of the lock, as the caller gave them; at least one.
    pub names: Names,
    /// The lease's fencing token. `None` for `Waiting`.
    pub fence: Option<Fence>,
    /// `Acquired`: the duration of the call. `Released` and `Lost`: how long the lease was held.
    pub duration: Option<Duration>,
    /// `Lost`: the reason.
    pub reason: Option<Arc<str>>,
}

/// Receives the events, on the I/O thread. It must not block.
pub type EventSink = Arc<dyn Fn(Event) + Send + Sync>;

/// The counters of a service, since its start.
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

/// The values of the counters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// The leases that are held now.
    pub held: u64,
    /// The calls that wait for a busy name now.
    pub waiting: u64,
    /// The leases that were granted.
    pub acquired: u64,
    /// The calls that ended because the name was busy, at once or after a wait.
    pub busy: u64,
    /// The leases that their holders released.
    pub released: u64,
    /// The renewals that succeeded.
    pub renewed: u64,
    /// The leases that ended before a release.
    pub lost: u64,
    /// The operations that failed in the store or timed out, including those that were retried.
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
