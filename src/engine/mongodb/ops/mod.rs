//! The operations on locks, one file per verb.
//!
//! - `acquire.rs`: one attempt. `acquire_names.rs`: its first step, the names. `stamp.rs`: its last step, the fencing token.
//! - `clock_offset.rs`: the estimate of the server's clock. `fence.rs`: the source of the fencing token.
//! - `attempts.rs`: attempts that were dropped or not answered. `batch.rs`: the attempts of several waiters, and the releases of
//!   several claims.
//! - `renew.rs`, `release.rs`, `transfer.rs`, `inspect.rs`: the other verbs.

pub(super) mod acquire;
mod acquire_names;
pub(super) mod attempts;
mod batch;
pub(super) mod clock_offset;
pub(super) mod fence;
mod inspect;
mod release;
mod renew;
pub(super) mod stamp;
mod transfer;
