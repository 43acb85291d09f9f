//! The options of an acquisition, and all defaults of the service. (`engine/config.rs` has the settings of the stores.)

use std::sync::Arc;
use std::time::Duration;

use crate::model::{Share, Ttl};

/// The default ttl: 30 s, for `ttlMs` and for `ttlSeconds`.
const DEFAULT_TTL: Duration = Duration::from_secs(30);
/// The default wait of `acquire` and `using`.
const DEFAULT_WAIT: Duration = Duration::from_secs(10);
/// The default of `stallLimitMs`.
const DEFAULT_STALL_LIMIT: Duration = Duration::from_secs(300);

/// The minimum timeout for an answer of the store in a call that waits, however short its wait is.
pub(super) const MIN_STORE_TIMEOUT: Duration = Duration::from_secs(1);
/// The timeout for reading the holder of a busy name.
pub(super) const HOLDER_TIMEOUT: Duration = Duration::from_millis(250);
/// How many calls of a service read a holder at a time: many waiters may time out at once.
pub(super) const MOST_HOLDER_READS: usize = 16;
/// The interval at which a close with a drain checks whether all leases have ended.
pub(super) const DRAIN_CHECK_INTERVAL: Duration = Duration::from_millis(10);
/// The interval at which a service without an owner checks whether it is unused.
pub(super) const UNUSED_CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// The minimum time for each step of a close, however long the steps before it took.
pub(super) const MIN_CLOSE_STEP: Duration = Duration::from_millis(250);
/// The interval of the poll that finds lost notifications.
pub(super) const SAFETY_POLL_INTERVAL: Duration = Duration::from_secs(5);
/// The interval at which deadlines are compared with the clock: timers stop while the machine is suspended, the clock does not.
pub(super) const CLOCK_CHECK_INTERVAL: Duration = Duration::from_millis(250);

/// The options of one acquisition.
#[derive(Debug, Clone)]
pub struct AcquireOptions {
    /// The length of the lease, from each grant or renewal.
    pub ttl: Ttl,
    /// How long the call waits for a busy name.
    pub wait: Wait,
    /// Whether the lease is renewed at a third of its ttl.
    pub renew: bool,
    /// The maximum time from the grant to the end of the lease, with all renewals.
    pub max_hold: Option<Duration>,
    /// Renewal pauses when the event loop has not responded for this long.
    pub stall_limit: Duration,
    /// After an earlier release, the name stays busy until this time has passed since the grant.
    pub min_hold: Duration,
    /// Whether the wait goes on while the store fails or does not answer.
    pub waits_for_store: bool,
    /// The user's JSON text, for `inspect`.
    pub metadata: Option<Arc<str>>,
    /// The share of the lease, if the name is a shared one.
    pub share: Option<Share>,
    /// Whether a busy outcome names the holder, which costs one more read.
    pub report_holder: bool,
    /// Whether the caller reads the fencing token of the lease, also in an event. Without it a store may save a write.
    pub needs_token: bool,
    /// The ttl that the caller asked for, if it is longer than the longest lease of the store. With `renew` off the lease is renewed until
    /// that time has passed.
    pub asked: Option<Ttl>,
    /// The arrival number of a call whose lease ended before the caller received it. The new call keeps its place in the order
    /// of the service's calls. `None`: a new number.
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
            waits_for_store: false,
            metadata: None,
            share: None,
            report_holder: false,
            needs_token: true,
            asked: None,
            resumed: None,
        }
    }
}

impl AcquireOptions {
    /// Returns the options of a call with the rest of the wait, in the place of a call that has waited for `waited`. `None`: the wait has
    /// ended.
    pub fn resumed(&self, arrival: u64, waited: Duration) -> Option<Self> {
        let wait = match self.wait {
            Wait::No => return None,
            Wait::Forever => Wait::Forever,
            Wait::For(wait) => Wait::For(wait.checked_sub(waited).filter(|left| !left.is_zero())?),
        };
        Some(AcquireOptions {
            wait,
            resumed: Some(arrival),
            ..self.clone()
        })
    }

    /// Shortens the ttl to the longest lease of the store without a renewal.
    pub(super) fn within(mut self: Arc<Self>, longest: Option<Duration>) -> Arc<Self> {
        if let Some(longest) = longest.filter(|longest| *longest < self.ttl.duration()) {
            let options = Arc::make_mut(&mut self);
            options.asked = Some(options.ttl);
            options.ttl = Ttl::clamped(longest);
        }
        self
    }
}

/// How long a call waits for a busy name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// One attempt, without a position in a queue.
    No,
    /// At most this long.
    For(Duration),
    /// Without a limit.
    Forever,
}
