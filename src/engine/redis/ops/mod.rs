//! The verbs: one file for each, and the variants of an acquisition.

mod acquire;
#[cfg(unix)]
pub(super) mod acquire_plain;
mod in_order;
pub(super) mod inspect;
pub(super) mod multi_slot;
pub(super) mod release;
mod renew;
