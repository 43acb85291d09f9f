//! The rows and positions of a ledger.

use std::sync::Arc;

use super::{Content, Notification, StoredName};
use crate::model::{OwnerToken, Process, Share};

/// Suffix of the owner of a reserved name. No owner token ends with it.
pub(in crate::engine) const RESERVED: &str = "-next";

/// The row of a name.
#[derive(Debug, Clone, Default)]
pub(in crate::engine) struct Row {
    /// `None`: the name is free.
    pub owner: Option<String>,
    pub expires_us: i64,
    pub fence: i64,
    /// The process of a new holder.
    pub holder: Option<Arc<Process>>,
    /// The time of a new grant, which changes the metadata, too.
    pub granted_us: Option<i64>,
    pub metadata: Option<Arc<str>>,
    /// The share of the owner, in the row of a share.
    pub share: Option<Share>,
    /// Whether the row is written.
    pub(super) is_changed: bool,
}

impl Row {
    /// Creates the row as it was read.
    pub(in crate::engine) fn read(owner: Option<String>, expires_us: i64, fence: i64, share: Option<Share>) -> Self {
        Row {
            owner,
            expires_us,
            fence,
            share,
            ..Row::default()
        }
    }

    pub(in crate::engine) fn is_live(&self, now_us: i64) -> bool {
        self.owner.is_some() && self.expires_us > now_us
    }

    pub(super) fn is_held_by(&self, owner: &OwnerToken, now_us: i64) -> bool {
        self.is_live(now_us) && self.owner.as_deref() == Some(owner.as_str())
    }

    /// Whether the name is reserved for any waiter.
    pub(in crate::engine) fn is_reserved(&self) -> bool {
        self.owner.as_deref().is_some_and(|owner| owner.ends_with(RESERVED))
    }

    /// Whether the name is reserved for a waiter.
    pub(super) fn is_reserved_for(&self, owner: &OwnerToken) -> bool {
        let waiter = self.owner.as_deref().and_then(|own| own.strip_suffix(RESERVED));
        waiter == Some(owner.as_str())
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
pub(in crate::engine) struct Position {
    /// The order in the queue. Positions without a ticket come after all others.
    pub order: u64,
    pub name: StoredName,
    pub owner: String,
    pub alive_until_us: i64,
    pub waiter: Waiter,
    /// Whether it is written with its order as the ticket.
    pub(super) keeps_ticket: bool,
}

/// What a hand-off has to know of a waiter.
#[derive(Debug, Clone)]
pub(in crate::engine) struct Waiter {
    /// The engine in the queues. `None`: this one.
    pub engine: Option<String>,
    /// The holder after a hand-off. `None`: a hand-off reserves the name, and the waiter makes an attempt.
    pub holder: Option<Arc<Process>>,
    /// How long a hand-off lasts, in milliseconds.
    pub hold_ms: i32,
    /// The share of the waiter, if the name is a shared one.
    pub share: Option<Share>,
}

impl Position {
    /// Creates the position as it was read.
    pub(in crate::engine) fn read(
        ticket: i64,
        name: StoredName,
        owner: String,
        alive_until_us: i64,
        waiter: Waiter,
    ) -> Self {
        Position {
            order: ticket.unsigned_abs(),
            name,
            owner,
            alive_until_us,
            waiter,
            keeps_ticket: false,
        }
    }

    /// Returns the ticket from before a missed hand-off. `None`: the position is still in the table, or gets a new ticket.
    pub(in crate::engine) fn kept_ticket(&self) -> Option<i64> {
        self.keeps_ticket.then_some(self.order as i64)
    }

    pub(super) fn notification(&self, content: Content) -> Notification {
        Notification {
            engine: self.waiter.engine.clone(),
            owner: self.owner.clone(),
            content,
        }
    }

    pub(super) fn is_alive(&self, now_us: i64) -> bool {
        self.alive_until_us > now_us
    }
}
