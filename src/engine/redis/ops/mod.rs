//! The verbs: one file for each, and the variants of an acquisition.

mod acquire;
mod acquire_plain;
pub(super) mod contended;
mod in_order;
pub(super) mod inspect;
mod multi_slot;
mod release;
mod renew;
mod transfer;
