//! Servers that are down, slow or silent, and waiters that died.

use super::*;

mod dead_waiters;
pub(super) mod stall;
mod unavailable;
#[cfg(unix)]
mod waiters;
