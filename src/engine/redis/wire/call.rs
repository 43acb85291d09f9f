//! What callers of the connection pass to it.

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

/// A request for the one name of a claim. Requests of one kind share commands.
pub(in super::super) enum Request<'a> {
    /// Reads whether another owner holds it, or a reservation for another waiter: a boolean.
    Check,
    /// Acquires it by plain commands. The reply is the fencing token if it was free and had no waiters, and this owner held it after the
    /// token was drawn. Else it has the replies to the four commands. `SET` did not fail.
    Acquire,
    /// Requests a vote with `value` as the value of the lock key, and `floor` as the fencing token. The sink receives the four replies
    /// under the numbers up to its own, or one error under its own.
    Vote { value: &'a str, floor: u64 },
    /// Releases it. `more` follows the owner's token, after a colon. The reply is the script's answer for this name.
    Release {
        release: &'static BatchRelease,
        more: Option<&'a str>,
    },
}
