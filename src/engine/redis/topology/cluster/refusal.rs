//! The errors of a node that does not serve a slot.

use super::map::{self, Address};
use crate::engine::redis::error::Failure;

/// The error of a node that does not serve the slot.
pub(super) enum Refusal {
    Moved(u16, Address),
    Ask(Address),
    /// The slot is moving, or the cluster has no majority.
    Later,
}

/// Returns the meaning of an error of the node at `redirecting` for the slot. `None`: it does not concern the slot.
pub(super) fn refusal(failure: &Failure, redirecting: &Address) -> Option<Refusal> {
    let (code, redirection) = failure.redirection()?;
    match (code, redirection) {
        ("MOVED", Some((text, slot))) => Some(Refusal::Moved(slot, map::address(text, redirecting)?)),
        ("ASK", Some((text, _))) => Some(Refusal::Ask(map::address(text, redirecting)?)),
        ("TRYAGAIN" | "CLUSTERDOWN", _) => Some(Refusal::Later),
        _ => None,
    }
}
