//! The types that every layer shares. Each type validates its value on construction, so that no layer checks it again.

#[cfg(test)]
mod tests;

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use crate::clock::Moment;
use crate::error::LockError;
pub use crate::process::Process;
pub use crate::share::{MAX_PERMITS, Share, Sums};

/// The maximum length of a name, in bytes of UTF-8.
pub const MAX_KEY_BYTES: usize = 512;
/// The maximum ttl: 2^31 milliseconds, about 24.8 days.
pub const MAX_TTL: Duration = Duration::from_millis(1 << 31);

/// A lock's name: 1 to 512 bytes of UTF-8, compared byte by byte. The shared name with the same text is another name.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    name: Arc<str>,
    is_shared: bool,
}

impl Key {
    /// Validates a name.
    ///
    /// # Errors
    /// `LOCK_INVALID_ARGUMENT` for an empty name and for one over 512 bytes.
    pub fn new(name: &str) -> Result<Self, LockError> {
        match name.len() {
            0 => Err(LockError::invalid("name", "must not be empty", "\"\"")),
            1..=MAX_KEY_BYTES => Ok(Key {
                name: name.into(),
                is_shared: false,
            }),
            n => Err(LockError::invalid(
                "name",
                "must be at most 512 bytes of UTF-8",
                format_args!("{n} bytes"),
            )),
        }
    }

    /// Returns the shared name with the same text: that of a semaphore or of a read/write lock.
    #[must_use]
    pub fn shared(&self) -> Self {
        Key {
            name: self.name.clone(),
            is_shared: true,
        }
    }

    /// Returns the text of the name.
    pub fn as_str(&self) -> &str {
        &self.name
    }

    /// Whether several claims can hold the name, each a [`Share`] of it.
    pub fn is_shared(&self) -> bool {
        self.is_shared
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// The names of one lock: at least one, without duplicates. Clones share them.
#[derive(Debug, Clone)]
pub struct Names(NameList);

/// Most locks have one name, which needs no slice.
#[derive(Debug, Clone)]
enum NameList {
    One(Key),
    Several(Arc<[Key]>),
}

impl Names {
    /// Removes duplicates and keeps the order.
    pub fn unique(keys: &[Key]) -> Self {
        if let [only] = keys {
            return only.clone().into();
        }
        let mut unique: Vec<Key> = Vec::with_capacity(keys.len());
        for key in keys {
            if !unique.contains(key) {
                unique.push(key.clone());
            }
        }
        Names(NameList::Several(unique.into()))
    }

    /// Returns the same names in their order. Shares the list if it has that order.
    pub fn sorted(&self) -> Self {
        if self.is_sorted() {
            return self.clone();
        }
        let mut keys = self.to_vec();
        keys.sort();
        Names(NameList::Several(keys.into()))
    }
}

impl From<Key> for Names {
    fn from(key: Key) -> Self {
        Names(NameList::One(key))
    }
}

impl Deref for Names {
    type Target = [Key];
    fn deref(&self) -> &[Key] {
        match &self.0 {
            NameList::One(key) => std::slice::from_ref(key),
            NameList::Several(keys) => keys,
        }
    }
}

/// A random value that identifies one acquisition: 32 hexadecimal digits (a version 4 UUID, RFC 9562).
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OwnerToken([u8; OWNER_DIGITS]);

const OWNER_DIGITS: usize = 32;

impl OwnerToken {
    /// Creates a new token.
    pub fn fresh() -> Self {
        let mut digits = [0; OWNER_DIGITS];
        uuid::Uuid::new_v4().simple().encode_lower(&mut digits);
        OwnerToken(digits)
    }

    /// Parses a token from `Lock.toJSON()`.
    ///
    /// # Errors
    /// `LOCK_INVALID_ARGUMENT` unless it is 32 lower-case hexadecimal digits.
    pub fn parse(token: &str) -> Result<Self, LockError> {
        match <[u8; OWNER_DIGITS]>::try_from(token.as_bytes()) {
            Ok(digits) if digits.iter().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')) => Ok(OwnerToken(digits)),
            // The message does not contain the value: it may be a token with a typing error.
            _ => Err(LockError::invalid(
                "token",
                "must be 32 hexadecimal digits in lower case",
                format_args!("{} characters", token.chars().count()),
            )),
        }
    }

    /// Returns the 32 digits.
    pub fn as_str(&self) -> &str {
        // Always ASCII digits.
        std::str::from_utf8(&self.0).unwrap_or_default()
    }
}

impl fmt::Debug for OwnerToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("OwnerToken").field(&self.as_str()).finish()
    }
}

/// A fencing token: a number that grows with each grant of a name.
///
/// Every store derives it from its clock in microseconds. It stays below 2^53 until the year 2255, and fits a signed 64-bit
/// column.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fence(pub u64);

impl Fence {
    /// The grant of a claim that needs no token.
    pub const NONE: Fence = Fence(0);
}

/// The length of a lease: more than zero, at most 2^31 ms, in whole milliseconds (rounded up).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ttl(u32);

impl Ttl {
    /// Validates the range, and rounds up to whole milliseconds, the unit of every store.
    ///
    /// # Errors
    /// `LOCK_INVALID_ARGUMENT` for zero or more than 2^31 ms.
    pub fn new(ttl: Duration) -> Result<Self, LockError> {
        if ttl.is_zero() || ttl > MAX_TTL {
            return Err(LockError::invalid(
                "ttl",
                "must be more than 0 and at most 2147483648 ms",
                format_args!("{} ms", ttl.as_secs_f64() * 1000.0),
            ));
        }
        Ok(Self::clamped(ttl))
    }

    /// Returns the nearest valid ttl.
    pub fn clamped(ttl: Duration) -> Self {
        let ms = ttl.as_nanos().div_ceil(1_000_000).clamp(1, MAX_TTL.as_millis());
        Ttl(ms as u32)
    }

    /// Returns the length.
    pub fn duration(self) -> Duration {
        Duration::from_millis(self.as_millis())
    }

    /// Returns the length in milliseconds.
    pub fn as_millis(self) -> u64 {
        self.0.into()
    }

    /// Returns how long a grant may wait for the caller's event loop: almost a third, so that the first renewal comes later.
    pub fn event_loop_timeout(self) -> Duration {
        self.duration() * 3 / 10
    }

    /// Returns the local validity of the ttl: 1 % and 2 ms less, for clocks that run at different speeds and for the store's
    /// resolution of a millisecond (the drift allowance of the Redlock description in Redis's manual).
    pub fn validity(self) -> Duration {
        let whole = self.duration();
        whole.saturating_sub(whole / 100 + Duration::from_millis(2))
    }
}

/// The request of one acquisition: one or several names, all or nothing. Every operation of an engine takes one.
#[derive(Debug, Clone)]
pub struct Claim {
    /// The names, sorted and without duplicates. The common order prevents deadlocks between overlapping claims.
    keys: Names,
    /// The owner token: new for each acquisition, the same for every retry of it.
    pub owner: OwnerToken,
    /// The length of the lease, from the moment at which the store grants or renews it.
    pub ttl: Ttl,
    /// Whether the caller waits. If the store keeps a queue, a busy attempt enters it.
    pub waiting: bool,
    /// The process that `inspect` shows.
    pub process: Arc<Process>,
    /// The user's JSON text, stored with the lock while it is held.
    pub metadata: Option<Arc<str>>,
    /// The share of the claim, if the name is a shared one, which is the only one then.
    pub share: Option<Share>,
    /// Whether it has some of the names of a larger claim, which is granted as a whole.
    pub is_part: bool,
    /// Whether the caller reads the fencing token of the grant. If not, an engine may save the work for it, and grant [`Fence::NONE`].
    pub needs_token: bool,
    /// The fencing token that the store granted to this process, for an engine that writes it after the grant, or that computes the
    /// next one from it. `None` for a lease of another process, whose text may contain a wrong token.
    pub fence: Option<Fence>,
    sent: Arc<Sent>,
}

/// Records which attempts of a claim may have left this process. The clones of a claim share it.
#[derive(Debug, Default)]
struct Sent {
    /// Whether any attempt was sent.
    ever: AtomicBool,
    /// When the current attempt was sent, in nanoseconds of the local clock. Zero: not yet.
    at: AtomicU64,
}

impl Claim {
    /// Creates a claim on `keys` (in any order, with or without duplicates) that does not wait and has no metadata.
    pub fn new(keys: &[Key], owner: OwnerToken, ttl: Ttl, process: Arc<Process>) -> Self {
        Self::with_names(&Names::unique(keys), owner, ttl, process)
    }

    /// Creates a claim like [`Claim::new`]. Shares `names` if they are sorted.
    pub fn with_names(names: &Names, owner: OwnerToken, ttl: Ttl, process: Arc<Process>) -> Self {
        Claim {
            keys: names.sorted(),
            owner,
            ttl,
            waiting: false,
            process,
            metadata: None,
            share: None,
            is_part: false,
            needs_token: true,
            fence: None,
            sent: Arc::default(),
        }
    }

    /// Whether a hand-off can make the owner the holder in one step: it has one name, which is the whole claim, and no metadata.
    pub fn takes_hand_offs(&self) -> bool {
        self.keys.len() == 1 && !self.is_part && self.metadata.is_none()
    }

    /// Begins an attempt, which counts as not sent until [`Claim::mark_sent`].
    pub fn begin_attempt(&self) {
        self.sent.at.store(0, Relaxed);
    }

    /// Records that the first command of the current attempt may leave this process now.
    ///
    /// # Behavior
    /// An engine calls this in each attempt before the first byte can be sent: too early is allowed, too late is not. The lease
    /// starts at this moment. A claim that was never sent is never released. Later calls in the same attempt have no effect.
    pub fn mark_sent(&self) {
        self.sent.ever.store(true, Relaxed);
        let now = Moment::now().to_nanos();
        let _ = self.sent.at.compare_exchange(0, now, Relaxed, Relaxed);
    }

    /// Whether a command of any attempt may have left this process. A claim that was not sent leaves nothing in the store.
    pub fn was_sent(&self) -> bool {
        self.sent.ever.load(Relaxed)
    }

    /// Returns when the current attempt was sent. `None`: it was not sent.
    pub fn sent_at(&self) -> Option<Moment> {
        match self.sent.at.load(Relaxed) {
            0 => None,
            nanos => Some(Moment::from_nanos(nanos)),
        }
    }

    /// Replaces the owner by a new one that the store has not seen.
    pub fn replace_owner(&mut self) {
        self.owner = OwnerToken::fresh();
        self.sent = Arc::default();
    }

    /// Returns the names: sorted, without duplicates, at least one.
    pub fn keys(&self) -> &[Key] {
        &self.keys
    }
}

/// A held lock, as `inspect` and `list` return it.
#[derive(Debug, Clone, PartialEq)]
pub struct LockInfo {
    /// The lock's name.
    pub name: String,
    /// The rest of the lease by the store's clock. `None`: it never expires (another tool wrote it).
    pub remaining: Option<Duration>,
    /// The holder's fencing token. `None` when another tool holds the name, or where it is not written yet.
    pub fence: Option<Fence>,
    /// The holder. `None` when another tool holds the name. May be [unknown](Holder::unknown).
    pub holder: Option<Holder>,
    /// The holder's metadata, as JSON text.
    pub metadata: Option<String>,
    /// The share of the lease, if the name is a shared one.
    pub share: Option<Share>,
    /// The number of positions in the name's queue that have not expired. In Redis expired ones count while one process in the queue
    /// is alive. `None`: the store has no queue.
    pub waiting: Option<u64>,
}

/// The holder of a lock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// The process.
    pub process: Process,
    /// When the lease was granted, by the store's clock: milliseconds since 1970-01-01 UTC.
    pub since_ms: u64,
}

impl Holder {
    /// Returns the holder of a lock of this library whose process has not written its name yet. It may have died before.
    pub fn unknown() -> Self {
        let process = Process {
            host: String::new(),
            ..Process::current()
        };
        Holder { process, since_ms: 0 }
    }

    /// Whether it is not [unknown](Holder::unknown).
    pub fn is_known(&self) -> bool {
        !self.process.host.is_empty()
    }
}
