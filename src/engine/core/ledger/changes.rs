//! What a transaction writes, and what it notifies waiters of.

use std::time::Duration;

use super::{Position, Row, StoredName};
use crate::engine::hand_off::GrantTimes;
use crate::model::{Fence, OwnerToken};

/// What a transaction writes.
#[derive(Debug, Default)]
pub(in crate::engine) struct Changes {
    /// The names whose rows are written.
    pub rows: Vec<(StoredName, Row)>,
    /// The owners whose positions are removed.
    pub left: Vec<String>,
    /// The positions that are written, in their order.
    pub entered: Vec<Position>,
    pub notifications: Vec<Notification>,
    /// The shared names that may have more waiters that fit.
    pub unfinished: Vec<StoredName>,
}

/// What the process of a waiter is notified of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::engine) struct Notification {
    /// The waiter's engine in the queues. `None`: this one.
    pub engine: Option<String>,
    pub owner: String,
    pub content: Content,
}

impl Notification {
    /// Creates a notification for a waiter of this engine.
    pub(in crate::engine) fn may_be_free(owner: &OwnerToken) -> Self {
        Notification {
            engine: None,
            owner: owner.as_str().to_owned(),
            content: Content::MayBeFree,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::engine) enum Content {
    /// An attempt may succeed.
    MayBeFree,
    /// The name may be free after this time.
    FreeAfter(Duration),
    /// The waiter is the holder.
    Granted(Fence, GrantTimes),
}
