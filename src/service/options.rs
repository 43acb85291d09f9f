//! What a caller may ask for, and every default of it in one place. (What a store is told stands with its settings, in
//! `engine/config.rs`.)

use std::sync::Arc;
use std::time::Duration;

use crate::model::Ttl;

/// How long a lease lasts when the caller does not say: 30 s (both for `ttlMs` and for the gist's `ttlSeconds`).
const DEFAULT_TTL: Duration = Duration::from_secs(30);
/// How long `acquire` and `using` wait when the caller does not say.
const DEFAULT_WAIT: Duration = Duration::from_secs(10);
/// How long the event loop may be silent before its leases are renewed no more.
const DEFAULT_STALL_LIMIT: Duration = Duration::from_secs(300);

/// A call that waits for a busy name gives the store at least this long for an answer, however short its own wait is.
pub(super) const LEAST_STORE_PATIENCE: Duration = Duration::from_secs(1);
/// What each step of a close is given, however late it comes to its turn.
pub(super) const LEAST_CLOSE_STEP: Duration = Duration::from_millis(250);
/// The rare poll that makes good a lost wake-up.
pub(super) const SAFETY_POLL: Duration = Duration::from_secs(5);
/// Leases are looked at this often, so that a machine that slept is noticed although timers stood still meanwhile.
pub(super) const WATCH_INTERVAL: Duration = Duration::from_millis(250);

/// How one acquisition is to be done.
#[derive(Debug, Clone)]
pub struct AcquireOptions {
    /// How long the lease lasts from each grant or renewal.
    pub ttl: Ttl,
    /// How long to wait for a busy name. Zero: one try.
    pub wait: Wait,
    /// Whether the lease is renewed at a third of its ttl.
    pub renew: bool,
    /// The lease ends at the latest so long after it was acquired, renewed or not.
    pub max_hold: Option<Duration>,
    /// Renewal pauses while the event loop has not answered for longer than this.
    pub stall_limit: Duration,
    /// A release before this keeps the name busy until then.
    pub min_hold: Duration,
    /// The user's own JSON text, for `inspect`.
    pub metadata: Option<Arc<str>>,
    /// The arrival number of a call whose lease ended before the caller received it. The call keeps its place in the order of
    /// this service. `None`: a new call.
    pub resumed: Option<u64>,
}

impl Default for AcquireOptions {
    fn default() -> Self {
        AcquireOptions {
            ttl: Ttl::clamped(DEFAULT_TTL),
            wait: Wait::For(DEFAULT_WAIT),
            renew: true,
            max_hold: None,
            stall_limit: DEFAULT_STALL_LIMIT,
            min_hold: Duration::ZERO,
            metadata: None,
            resumed: None,
        }
    }
}

/// How long to wait for a busy name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// One try, no place in any queue.
    No,
    /// At most so long.
    For(Duration),
    /// Until it is free.
    Forever,
}
