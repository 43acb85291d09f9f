//! The events of a service, for `onEvent` and telemetry, and its counters, for `stats()`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use serde::Serialize;

use crate::error::Code;
use crate::model::{Fence, Names, Share};

/// The kinds of event. The event's `type` in JavaScript is the name in lower case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
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
    /// A call ended because the name was busy.
    Timeout,
    /// The caller aborted a call.
    Aborted,
    /// A call ended with an error.
    Failed,
    /// The store answers again, after `Disconnected`.
    Connected,
    /// An operation failed or had no answer in time, and none has succeeded since.
    Disconnected,
}

/// One event.
#[derive(Debug, Clone)]
pub struct Event {
    /// The kind.
    pub kind: EventKind,
    /// The names of the lock, as the caller gave them. `None` for `Connected` and `Disconnected`.
    pub names: Option<Names>,
    /// The share of the call or the lease, if the name is a shared one.
    pub share: Option<Share>,
    /// The fencing token of the event's lease.
    pub fence: Option<Fence>,
    /// `Released` and `Lost`: how long the lease was held. Otherwise the duration of the call.
    pub duration: Option<Duration>,
    /// `Lost`, `Failed` and `Disconnected`: the reason.
    pub reason: Option<Arc<str>>,
    /// `Failed`: the code of the error.
    pub code: Option<Code>,
}

impl Event {
    /// Returns an event without details.
    pub(super) fn new(kind: EventKind, names: Option<Names>) -> Self {
        Event {
            kind,
            names,
            share: None,
            fence: None,
            duration: None,
            reason: None,
            code: None,
        }
    }
}

/// Receives the events, on the I/O thread. It must not block.
pub type EventSink = Arc<dyn Fn(Event) + Send + Sync>;

/// Where the events of a service go.
pub(super) struct Events {
    sink: Option<EventSink>,
    /// Whether anything receives them now.
    is_enabled: AtomicBool,
    /// Whether the last operation of the store failed.
    is_disconnected: AtomicBool,
}

impl Events {
    pub(super) fn new(sink: Option<EventSink>) -> Self {
        Events {
            is_enabled: AtomicBool::new(sink.is_some()),
            sink,
            is_disconnected: AtomicBool::new(false),
        }
    }

    pub(super) fn set_enabled(&self, is_enabled: bool) {
        self.is_enabled.store(is_enabled, Relaxed);
    }

    pub(super) fn is_enabled(&self) -> bool {
        self.is_enabled.load(Relaxed)
    }

    /// Returns whether the last operation of the store succeeded, or there was none.
    pub(super) fn is_connected(&self) -> bool {
        !self.is_disconnected.load(Relaxed)
    }

    /// Creates an event and sends it, if anything receives events.
    pub(super) fn emit(&self, event: impl FnOnce() -> Event) {
        if let Some(sink) = &self.sink
            && self.is_enabled()
        {
            sink(event());
        }
    }

    /// Records that an operation of the store succeeded.
    pub(super) fn store_answered(&self) {
        // Almost always false: a read is cheaper than an exchange.
        if self.is_disconnected.load(Relaxed) && self.is_disconnected.swap(false, Relaxed) {
            self.emit(|| Event::new(EventKind::Connected, None));
        }
    }

    /// Records that an operation of the store failed or had no answer.
    pub(super) fn store_failed(&self, reason: impl FnOnce() -> Arc<str>) {
        if !self.is_disconnected.swap(true, Relaxed) {
            self.emit(|| Event {
                reason: Some(reason()),
                ..Event::new(EventKind::Disconnected, None)
            });
        }
    }
}

/// The counters of a service, since its start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
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
