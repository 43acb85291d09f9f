//! The rows and positions of a ledger.

use std::sync::Arc;

use super::StoredName;
use crate::model::{OwnerToken, Process};

/// The row of a name.
#[derive(Debug, Clone, Default)]
pub(in crate::engine::sql) struct Row {
    /// `None`: the name is free.
    pub owner: Option<String>,
    pub expires_us: i64,
    pub fence: i64,
    /// The process of a new holder.
    pub holder: Option<Arc<Process>>,
    /// Whether a grant changes the metadata and the time of the grant, too.
    pub is_granted: bool,
    pub metadata: Option<Arc<str>>,
    /// Whether the row is written.
    pub(super) is_changed: bool,
}

impl Row {
    /// Creates the row as it was read.
    pub(in crate::engine::sql) fn read(owner: Option<String>, expires_us: i64, fence: i64) -> Self {
        Row {
            owner,
            expires_us,
            fence,
            ..Row::default()
        }
    }

    pub(super) fn is_live(&self, now_us: i64) -> bool {
        self.owner.is_some() && self.expires_us > now_us
    }

    pub(super) fn is_held_by(&self, owner: &OwnerToken, now_us: i64) -> bool {
        self.is_live(now_us) && self.owner.as_deref() == Some(owner.as_str())
    }

    pub(super) fn release(&mut self) {
        *self = Row {
            fence: self.fence,
            is_changed: true,
            ..Row::default()
        };
    }
}

/// A position in the queue of a name.
#[derive(Debug, Clone)]
pub(in crate::engine::sql) struct Position {
    /// The order in the queue. Positions without a ticket come after all others.
    pub order: u64,
    pub name: StoredName,
    pub owner: String,
    pub alive_until_us: i64,
    /// Whether the waiter was notified that the name is free. Its position then ends, unless it makes an attempt.
    pub is_called: bool,
    /// How long the waiter has to make an attempt after it was called.
    pub reserve_ms: i32,
    pub(super) change: Change,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    None,
    Entered,
    Left,
}

impl Position {
    /// Creates the position as it was read.
    pub(in crate::engine::sql) fn read(
        ticket: i64,
        name: StoredName,
        owner: String,
        alive_until_us: i64,
        is_called: bool,
        reserve_ms: i32,
    ) -> Self {
        Position {
            order: ticket.unsigned_abs(),
            name,
            owner,
            alive_until_us,
            is_called,
            reserve_ms,
            change: Change::None,
        }
    }

    pub(super) fn is_alive(&self, now_us: i64) -> bool {
        self.change != Change::Left && self.alive_until_us > now_us
    }
}
