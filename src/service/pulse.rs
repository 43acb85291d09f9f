//! Whether the user's event loop still answers.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use crate::clock::Moment;

/// Asks the event loop for a sign of life, and knows since when an answer is due.
///
/// Renewal on a native thread goes on while the event loop is busy; that is its point. A loop that never answers again
/// is another matter: its locks must not be held for ever.
pub struct Pulse {
    /// Since when an answer is due, in nanoseconds of the local clock; zero when none is.
    asked: AtomicU64,
    ask: Box<dyn Fn() + Send + Sync>,
}

impl fmt::Debug for Pulse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Pulse")
    }
}

impl Pulse {
    /// `ask` makes the event loop call [`Pulse::answered`] as soon as it comes round. It must not block.
    pub fn new(ask: impl Fn() + Send + Sync + 'static) -> Self {
        Pulse {
            asked: AtomicU64::new(0),
            ask: Box::new(ask),
        }
    }

    /// The event loop came round.
    pub fn answered(&self) {
        self.asked.store(0, Relaxed);
    }

    /// Asks, unless an answer is due already.
    pub(super) fn check(&self) {
        if self
            .asked
            .compare_exchange(0, Moment::now().to_nanos(), Relaxed, Relaxed)
            .is_ok()
        {
            (self.ask)();
        }
    }

    /// For how long an answer has been due.
    pub(super) fn silence(&self) -> Duration {
        match self.asked.load(Relaxed) {
            0 => Duration::ZERO,
            asked => Moment::from_nanos(asked).elapsed(),
        }
    }
}
