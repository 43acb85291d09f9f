//! The names of fields in the documents of the locks and in the server's answers.

pub(crate) const EXPIRES_AT: &str = "expiresAt";
pub(crate) const FENCE: &str = "fence";
pub(crate) const HOLDER: &str = "holder";
pub(crate) const OWNER: &str = "owner";
pub(crate) const SINCE: &str = "holder.since";
pub(crate) const QUEUE: &str = "queue";
/// `<process>:<owner>` of the waiter that a name is reserved for.
pub(crate) const RESERVED: &str = "reserved";
/// The end of the reservation.
pub(crate) const RESERVED_UNTIL: &str = "reservedUntil";
/// The hand-off that made the owner the holder, until the owner has found it (see `queue/hand_off.rs`).
pub(crate) const GRANTED: &str = "granted";
/// `<process>:<ms>:<ms since 1970>`: the process that checks the name this long after a minimum hold or a short hand-off began.
pub(crate) const CHECK: &str = "check";
/// Number of hand-offs of a name since its stamp (see `ops/fence.rs`).
pub(crate) const HANDED: &str = "handed";
/// The field of an answer with the server's clock.
pub(crate) const NOW: &str = "now";
/// The field of an answer with the end of the lease.
pub(crate) const END: &str = "end";
/// The field of an answer with the number of live waiters ahead.
pub(crate) const AHEAD: &str = "ahead";
/// The field of an answer with the number of live waiters.
pub(crate) const WAITING: &str = "waiting";
/// The holders of a shared name, and of each one its permits and their limit.
pub(crate) const HOLDERS: &str = "holders";
pub(crate) const PERMITS: &str = "permits";
pub(crate) const LIMIT: &str = "limit";
