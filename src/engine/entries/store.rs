//! What a store provides for [`EntryEngine`](super::EntryEngine).

use std::time::Duration;

use async_trait::async_trait;

#[cfg(doc)]
use super::local::LocalEntries;
use super::record::{Seen, Stored};
use crate::clock::Moment;
use crate::error::EngineError;
use crate::model::{Claim, Fence, Key, OwnerToken, Ttl};

/// Why a request failed.
#[derive(Debug, Clone)]
pub(in crate::engine) struct Failure {
    pub text: String,
    /// Whether the same request may succeed later.
    pub passes: bool,
    /// Whether the store may have executed it.
    pub is_sent: bool,
}

pub(in crate::engine) type Outcome<T> = Result<T, Failure>;

impl Failure {
    /// Creates the failure of a request that was not sent.
    pub(in crate::engine) fn not_sent(text: impl Into<String>, passes: bool) -> Self {
        Failure {
            text: text.into(),
            passes,
            is_sent: false,
        }
    }

    /// Creates the failure of a request that the store may have executed, and that may succeed later.
    fn sent(text: impl Into<String>) -> Self {
        Failure {
            is_sent: true,
            ..Failure::not_sent(text, true)
        }
    }

    /// Waits for an answer of the store at `address` for at most `limit`.
    pub(in crate::engine) async fn after<T>(
        limit: Duration,
        address: String,
        answer: impl Future<Output = Outcome<T>>,
    ) -> Outcome<T> {
        let late = |_| {
            Err(Failure::sent(format!(
                "no answer within {} ms ({address})",
                limit.as_millis()
            )))
        };
        tokio::time::timeout(limit, answer).await.unwrap_or_else(late)
    }

    /// Returns the failure of an operation whose entries other calls change all the time.
    pub(super) fn contended() -> Self {
        Failure::sent("too many other calls change this lock at the same time")
    }

    pub(in crate::engine) fn of(self, store: &'static str, op: &'static str) -> EngineError {
        let error = EngineError::new(store, op, self.passes, self.text);
        if self.is_sent { error } else { error.not_sent() }
    }
}

/// A store that numbers the entries below a name in the order of their creation, and removes them with a session of their process.
///
/// # Behavior
/// A method makes one attempt. Its future may be dropped.
#[async_trait]
pub(in crate::engine) trait Store: Send + Sync + 'static {
    fn name(&self) -> &'static str;

    /// Returns the address for messages.
    fn address(&self) -> String;

    /// As [`Description::longest_lease`](crate::engine::Description::longest_lease).
    fn longest_lease(&self) -> Option<Duration> {
        None
    }

    /// Whether it executes requests in the order in which the methods were called.
    fn keeps_order(&self) -> bool {
        false
    }

    /// The step of an attempt that changes entries. Creates entries of the claim at the names `create`, deletes the entries `remove`, and
    /// then reads all names of the claim. Calls [`Claim::mark_sent`].
    ///
    /// # Behavior
    /// The caller decides from the names that are returned, and calls again if the entries are not as it wants them. So the changes may be
    /// omitted if another process has changed an entry, and an entry that the claim has already stays.
    ///
    /// `is_first`: the first call for this owner, which is most often the whole attempt. If all names have no entries, it creates some.
    /// Otherwise it creates one only for a waiting claim of one name, which enters the queue. (ZooKeeper: also for one of a lock that does
    /// not wait.)
    async fn change(&self, claim: &Claim, create: &[Key], remove: &[Stored], is_first: bool) -> Outcome<Vec<Seen>>;

    /// Reads names, after everything that was committed before: the granted entries of each one, and the entry of `owner`. (The oldest
    /// entry is that of `owner` also after a transfer. Another entry is found only by its first owner, because a waiter is not transferred.)
    async fn read(&self, names: &[Key], owner: Option<&OwnerToken>) -> Outcome<Vec<Seen>>;

    /// Writes the records of entries, all or none, unless one has changed. The entries then belong to `owner`, and last for `ttl`; those
    /// without an owner also after the end of this process. Returns them as they are now. `None`: one has changed.
    async fn write(&self, entries: Vec<Stored>, owner: Option<&OwnerToken>, ttl: Ttl) -> Outcome<Option<Vec<Stored>>>;

    /// Deletes entries, all or none. `false`: one has changed.
    async fn delete(&self, entries: &[Stored]) -> Outcome<bool>;

    /// Reads which entries have not changed, after everything that was committed before.
    async fn check(&self, entries: &[&Stored]) -> Outcome<Vec<bool>>;

    /// Makes the sessions of entries last for `ttl` after `sent`, and waits until that is certain. `false`: one has ended, or its entries
    /// need a new one ([`Store::write`]).
    async fn keep(&self, entries: &[Stored], sent: Moment, ttl: Ttl) -> Outcome<bool>;

    /// Whether an entry has the data and the session of a lease of this process for `ttl`. `false`: a grant or a renewal has to write it.
    fn is_lease(&self, entry: &Stored, ttl: Ttl) -> bool;

    /// Returns until when a session of this process certainly lasts. `None`: it has ended, or is that of another process.
    fn lasts_until(&self, session: i64) -> Option<Moment>;

    /// Returns the fencing token of an entry that was granted at `revision` of the mirror. That of a share is the number of the creation
    /// of its entry, which is also the one in its record after a read. `None`: it is gone.
    async fn token(&self, entry: &Stored, revision: u64) -> Outcome<Option<Fence>>;

    /// Lists the names that may have entries and begin with `prefix`, sorted. Each page of the store's answers takes at most `page_timeout`.
    async fn names(&self, prefix: &str, page_timeout: Duration) -> Outcome<Vec<Key>>;

    /// Watches a name until the watch is lost, and returns why: calls [`LocalEntries::begin_read`] when the server has confirmed it,
    /// [`LocalEntries::opened`] with the entries, and [`LocalEntries::changed`]. Dropping the future ends the watch.
    async fn watch(&self, name: &Key) -> Failure;

    /// Waits for the answers to dropped attempts of an owner, where the store may execute a later request first.
    async fn wait_for_answers(&self, _owner: &OwnerToken) {}

    /// Ends the sessions for which `has_entries` is false. (ZooKeeper: ends its only session, and with it all entries.)
    async fn close(&self, has_entries: &(dyn for<'a> Fn(i64) -> bool + Sync));
}
