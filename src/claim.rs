//! The request of one acquisition.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use crate::clock::Moment;
use crate::model::{Fence, Key, Names, OwnerToken, Process, Ttl};
use crate::share::Share;

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
    /// What it has of its name, if that is shared: it is the only one then.
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
