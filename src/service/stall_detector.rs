//! Detects an event loop that does not respond.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use crate::clock::Moment;

/// Pings the event loop, and measures how long a response is overdue.
///
/// Leases are renewed while the event loop is busy: that is the purpose of a native thread. The locks of an event loop that
/// never responds again must expire.
pub struct StallDetector {
    /// When the unanswered ping was sent, in nanoseconds of the local clock. Zero: there is none.
    pinged_at: AtomicU64,
    send_ping: Box<dyn Fn() + Send + Sync>,
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
            send_ping: Box::new(send_ping),
        }
    }

    /// Records a response of the event loop.
    pub fn responded(&self) {
        self.pinged_at.store(0, Relaxed);
    }

    /// Sends a ping, unless one is unanswered.
    pub(super) fn ping(&self) {
        let now = Moment::now().to_nanos();
        if self.pinged_at.compare_exchange(0, now, Relaxed, Relaxed).is_ok() {
            (self.send_ping)();
        }
    }

    /// Returns the time since the unanswered ping; zero if there is none.
    pub(super) fn stalled_for(&self) -> Duration {
        match self.pinged_at.load(Relaxed) {
            0 => Duration::ZERO,
            pinged_at => Moment::from_nanos(pinged_at).elapsed(),
        }
    }
}
