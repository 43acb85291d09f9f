//! What callers of the fast path pass to it and receive from it.

use redis::Value;

use crate::engine::redis::keys::Part;
use crate::engine::redis::scripts::Script;

/// A script that lets go of one name each for several owners. No two of the owners are the same.
///
/// - KEYS: the lock keys, then for all of them the first of `parts`, then the second
/// - ARGV: `to`, then the owners' tokens, each perhaps with more behind it
/// - Answer: the number of names when every owner held its name; else for each 1 if its owner held it, 0 if not, or -1 if that
///   failed
pub(in super::super) struct BatchRelease {
    pub(in super::super) script: fn() -> &'static Script,
    pub(in super::super) parts: [Part; 2],
    /// Where waiters are told.
    pub(in super::super) to: &'static str,
}

/// The answer for a name that has to be let go of by itself.
pub(in super::super) const ALONE: i64 = -1;

/// What came of it, for one name.
#[derive(Debug)]
pub(in super::super) enum Outcome {
    /// Somebody else holds it, or has it reserved.
    Held,
    /// Nobody else does.
    NotHeld,
    /// It was free, and was this owner's still after the token was drawn. `queued`: somebody may have waited for it.
    Acquired { fence: i64, queued: bool },
    /// What the four commands said, where it is something else. `SET` was no error.
    Replies(Box<[Value; 4]>),
    /// What the script answers for this name.
    Released(i64),
    /// The reply to a command of the caller.
    Answer(Value),
}
