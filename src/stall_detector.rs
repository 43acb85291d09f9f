//! Detects an event loop that does not respond. Its leases are not renewed for ever, and its waiters are skipped.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use crate::clock::Moment;
use crate::model::Ttl;

/// The least time between two pings.
const PING_INTERVAL: Duration = Duration::from_millis(100);

/// Pings the event loop, and measures how long a response is overdue.
///
/// Leases are renewed while the event loop is busy: that is the purpose of a native thread. The locks of an event loop that
/// never responds again must expire.
#[derive(Default)]
pub struct StallDetector {
    /// When the unanswered ping was sent, in nanoseconds of the local clock. Zero: there is none.
    pinged_at: AtomicU64,
    /// When the last ping was sent.
    last_ping: AtomicU64,
    /// `None`: the caller has no event loop, and nothing is detected.
    send_ping: Option<Box<dyn Fn() + Send + Sync>>,
}

impl fmt::Debug for StallDetector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StallDetector")
    }
}

impl StallDetector {
    /// Creates a detector. `send_ping` makes the event loop call [`StallDetector::responded`] in its next tick. It must not
    /// block.
    pub fn new(send_ping: impl Fn() + Send + Sync + 'static) -> Self {
        StallDetector {
            pinged_at: AtomicU64::new(0),
            last_ping: AtomicU64::new(0),
            send_ping: Some(Box::new(send_ping)),
        }
    }

    /// Records a response of the event loop.
    pub fn responded(&self) {
        self.pinged_at.store(0, Relaxed);
    }

    /// Sends a ping, unless one is unanswered, or the last one was sent a moment ago: each hand-off asks for one.
    pub fn ping(&self) {
        let Some(send_ping) = &self.send_ping else { return };
        let now = Moment::now().to_nanos();
        let is_recent = now - self.last_ping.load(Relaxed).min(now) < PING_INTERVAL.as_nanos() as u64;
        if !is_recent && self.pinged_at.compare_exchange(0, now, Relaxed, Relaxed).is_ok() {
            self.last_ping.store(now, Relaxed);
            send_ping();
        }
    }

    /// Returns the time since the unanswered ping; zero if there is none.
    pub fn stalled_for(&self) -> Duration {
        match self.pinged_at.load(Relaxed) {
            0 => Duration::ZERO,
            pinged_at => Moment::from_nanos(pinged_at).elapsed(),
        }
    }

    /// Whether the event loop has not responded for so long that it must get no lease with this ttl: for a third of it.
    pub fn is_stalled(&self, ttl: Ttl) -> bool {
        self.stalled_for() > ttl.event_loop_timeout()
    }
}
