//! Shares of a name: the permits of a semaphore, the read and the write side of a read/write lock.

/// The largest limit of a semaphore. A writer has all of these permits, and a reader one.
pub const MAX_PERMITS: u32 = 1 << 20;

/// What one claim has of a shared name: a number of permits, within a limit.
///
/// # Behavior
/// A share is granted while the permits in use and its own are together at most the smallest limit of its claim and of all holders. So
/// while a holder holds, no more than its limit is in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    permits: u32,
    limit: u32,
}

impl Share {
    /// An exclusive lock.
    pub const LOCK: Share = Share { permits: 1, limit: 1 };
    /// The read side of a read/write lock.
    pub const READER: Share = Share {
        permits: 1,
        limit: MAX_PERMITS,
    };
    /// The write side of a read/write lock.
    pub const WRITER: Share = Share {
        permits: MAX_PERMITS,
        limit: MAX_PERMITS,
    };

    /// Creates a share. `None` unless `1 <= permits <= limit <= 1048576`.
    pub fn new(permits: u32, limit: u32) -> Option<Self> {
        let is_valid = 1 <= permits && permits <= limit && limit <= MAX_PERMITS;
        is_valid.then_some(Share { permits, limit })
    }

    /// Returns the number of permits.
    pub fn permits(self) -> u32 {
        self.permits
    }

    /// Returns the limit.
    pub fn limit(self) -> u32 {
        self.limit
    }

    /// Returns what messages call a name with shares like this one.
    pub fn noun(self) -> &'static str {
        match self {
            Share::READER => "read lock",
            Share::WRITER => "write lock",
            _ => "semaphore",
        }
    }
}

/// The shares that are held of a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sums {
    /// The permits in use.
    pub used: u64,
    /// The smallest limit of the holders.
    pub least: u32,
}

impl Default for Sums {
    fn default() -> Self {
        Sums {
            used: 0,
            least: MAX_PERMITS,
        }
    }
}

impl Sums {
    /// Returns the sums with one more share.
    #[must_use]
    pub fn with(self, share: Share) -> Self {
        Sums {
            used: self.used + u64::from(share.permits),
            least: self.least.min(share.limit),
        }
    }

    /// Whether all shares can be held at the same time.
    pub fn is_within_limits(self) -> bool {
        self.used <= u64::from(self.least)
    }
}

impl FromIterator<Share> for Sums {
    fn from_iter<I: IntoIterator<Item = Share>>(shares: I) -> Self {
        shares.into_iter().fold(Sums::default(), Sums::with)
    }
}
