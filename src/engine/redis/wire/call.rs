//! What callers of the connection pass to it and receive from it.

use redis::Value;

use crate::engine::redis::keys::Part;
use crate::engine::redis::scripts::Script;

/// A script that releases one name each for several owners. The owners differ.
///
/// - KEYS: the lock keys, then the first of `parts` for each of them, then the second, then `last`
/// - ARGV: `to`, then the owners' tokens, some with a suffix
/// - Answer: the number of names if every owner held its name; else for each name 1 if its owner held it, 0 if not, or -1 if
///   its release failed
pub(in super::super) struct BatchRelease {
    pub(in super::super) script: fn() -> &'static Script,
    pub(in super::super) parts: [Part; 2],
    /// One more key.
    pub(in super::super) last: Option<&'static str>,
    /// The channel, or its prefix, on which waiters are notified.
    pub(in super::super) to: &'static str,
}

/// The answer for a name that has to be released alone.
pub(in super::super) const ALONE: i64 = -1;

/// The outcome of a call for one name.
#[derive(Debug)]
pub(in super::super) enum Outcome {
    /// Another owner holds it, or it is reserved for another waiter.
    Held,
    /// No other owner holds it.
    NotHeld,
    /// It was free, and this owner held it after the token was drawn. `queued`: there may have been waiters.
    Acquired { fence: i64, queued: bool },
    /// Other replies to the four commands. `SET` did not fail.
    Replies(Box<[Value; 4]>),
    /// The answer of the release script for this name.
    Released(i64),
    /// The reply to a command of the caller.
    Answer(Value),
}
