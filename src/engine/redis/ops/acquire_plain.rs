//! The common case of an acquisition: plain commands in the place of `acquire.lua`, which use less than
//! half of the server's time.
//!
//! ```text
//! EXISTS <queues>                        whether one of the names has waiters
//! SET <lock> <owner> PX <ttl> NX GET     for each name: acquires it if it is free, else returns its holder
//! INCRBY holdfast:last <n>               draws the tokens
//! MGET <locks>                           whether each owner still holds its name
//! ```
//!
//! The names are those of all acquisitions in one tick of the event loop (`wire/pipeline.rs`), often one. The four commands
//! are not atomic, and every promise holds nevertheless:
//!
//! - **Tokens grow.** The owner token is fresh. So a name that has this owner after `SET` and at the last command had it all
//!   the time in between, in which its token was drawn. A later holder acquires the name later, draws its token later, and so
//!   gets a larger one.
//! - **The last token may be lost** with the server's memory, or be older after a failure that lost the last writes. So plain
//!   commands are used only for a second after a grant by `acquire.lua` on the same connection, which raises the counter to the
//!   server's clock. The tokens stay behind the clock while a server grants fewer than a million of them per second. If the key
//!   was deleted meanwhile, the token is [too small](SMALLEST), and the script decides.
//! - **A user may have no right to scripts** (it was revoked). By the same rule plain commands acquire no lock that no script
//!   could release.
//! - **No waiter is overtaken.** A waiter that was in the queue before the first command keeps its position: if any of the
//!   names has waiters, each acquired name is checked alone. If it has a waiter (its holder died, or the waiter came after the
//!   `SET`, which cannot be distinguished), the name is released, which hands it off, and the script decides.
//! - **Refused commands.** If the server refuses the second command or a later one, nothing is acquired, or it is released, and
//!   the script decides.
//! - **A retry of the holder** finds its own token, and a reservation for a waiter is visible in the value: the script decides.
//!
//! If the last attempt, a moment ago, has found a name busy, its holder is read first: so this one writes nothing if it still is.
//! An attempt that may enter the queue uses the script at once then.
//!
//! The record for `inspect` (`record.lua`) is stored 25 to 50 ms later, unless the lock was released before.

use std::sync::Arc;
use std::time::Duration;

use redis::Value;

use crate::engine::redis::RedisEngine;
use crate::engine::redis::connection::records::Record;
use crate::engine::redis::connection::{Connection, Link};
use crate::engine::redis::error::{Failure, is_forbidden, is_not_understood};
use crate::engine::redis::keys::{CHANNEL_PREFIX, KeyBuffer, LAST, Part};
use crate::engine::redis::scripts;
use crate::engine::redis::topology::Route;
use crate::engine::redis::wire::{ALONE, BatchRelease, Request};
use crate::engine::{Acquired, Released};
use crate::model::{Claim, Fence, Key};

/// The server's clock in September 2001. A smaller token was drawn from a counter that was not raised to the clock.
const SMALLEST: i64 = 1_000_000_000_000_000;

/// The script that releases the names of several calls.
pub(in super::super) static RELEASE: BatchRelease = BatchRelease {
    script: || &scripts::RELEASE,
    parts: [Part::Queue, Part::Fence],
    last: Some(LAST),
    to: CHANNEL_PREFIX,
};

/// The name of the commands in an error.
const COMMANDS: &str = "EXISTS, SET, INCRBY and MGET";

impl RedisEngine {
    /// Returns the connection to the only server, if it is open.
    pub(in super::super) fn current(&self) -> Option<(&Arc<Link>, Arc<Connection>)> {
        let Route::One(link) = &self.route else { return None };
        Some((link, link.current()?))
    }

    /// Returns the connection, if plain commands may be used for a claim.
    pub(in super::super) fn for_plain_commands(&self, claim: &Claim) -> Option<(&Arc<Link>, Arc<Connection>)> {
        if !self.counts || self.replicated.is_some() || claim.keys().len() != 1 || claim.metadata.is_some() {
            return None;
        }
        // A process with a channel can enter the queue with its attempt, and does so if the name is likely to be busy. A
        // waiter in the queue may have been handed the name.
        let key = &claim.keys()[0];
        if claim.waiting
            && self.waiters.channel(0).is_some()
            && (self.waiters.known.number(&claim.owner) > 0 || self.contended.is(key))
        {
            return None;
        }
        self.current()
            .filter(|(_, connection)| connection.wire.is_plain() && connection.wire.is_seeded())
    }

    /// Makes one attempt by plain commands. `None`: the script has to decide.
    pub(in super::super) async fn try_plainly(
        &self,
        link: &Arc<Link>,
        connection: &Arc<Connection>,
        claim: &Claim,
    ) -> Result<Option<Acquired>, Failure> {
        let (key, wire) = (&claim.keys()[0], &connection.wire);
        if self.contended.is(key) {
            let is_held = link.exchange(connection, wire.request(claim, Request::Check)).await?;
            if is_held == Value::Boolean(true) {
                return Ok(Some(self.held(key)));
            }
            self.contended.forget(key);
        }
        match link.exchange(connection, wire.request(claim, Request::Acquire)).await {
            Ok(Value::Int(fence)) => Ok(granted(link, claim, fence)),
            Ok(Value::Array(replies)) => Box::pin(self.undecided(link, connection, claim, &replies)).await,
            Ok(_) => Err(Failure::Unexpected(COMMANDS)),
            Err(Failure::Call(error)) if is_not_understood(&error) => {
                // Nothing was acquired.
                wire.use_scripts_only();
                Ok(None)
            }
            Err(failure) => Err(failure),
        }
    }

    fn held(&self, key: &Key) -> Acquired {
        self.contended.note(key);
        let (key, retry_after) = (key.clone(), None);
        Acquired::Held { key, retry_after }
    }

    /// Reads the replies for a name that was not acquired, or that may have waiters.
    async fn undecided(
        &self,
        link: &Arc<Link>,
        connection: &Arc<Connection>,
        claim: &Claim,
        replies: &[Value],
    ) -> Result<Option<Acquired>, Failure> {
        let [queued, held, fence, still] = replies else {
            return Err(Failure::Unexpected(COMMANDS));
        };
        let (key, owner) = (&claim.keys()[0], claim.owner.as_str().as_bytes());
        match held {
            Value::Nil => {
                let is_still_held = matches!(still, Value::BulkString(holder) if holder == owner);
                if let (Value::Int(_), Value::Int(fence), true) = (queued, fence, is_still_held)
                    && !self.is_queued(link, connection, key).await?
                {
                    return Ok(granted(link, claim, *fence));
                }
                let is_refused =
                    |reply: &Value| matches!(reply, Value::ServerError(error) if is_forbidden(&error.clone().into()));
                if [queued, fence, still].into_iter().any(is_refused) {
                    connection.wire.use_scripts_only();
                }
                if *queued != Value::Int(0) {
                    self.release_part(claim, Duration::ZERO).await?;
                }
                Ok(None)
            }
            Value::BulkString(holder) if holder.starts_with(owner) => Ok(None),
            Value::BulkString(_) => Ok(Some(self.held(key))),
            _ => Err(Failure::Unexpected(COMMANDS)),
        }
    }

    /// Whether a name has waiters. A waiter that was there before the acquisition still is.
    async fn is_queued(&self, link: &Arc<Link>, connection: &Arc<Connection>, key: &Key) -> Result<bool, Failure> {
        let mut room = KeyBuffer::default();
        let (_, [queue]) = room.keys(&self.layout, key.as_str(), [Part::Queue]);
        let mut exists = redis::cmd("EXISTS");
        exists.arg(queue);
        Ok(link.call_on(connection, &exists, false, None).await? != Value::Int(0))
    }

    /// Releases the one name of a claim without metadata, by a script that the releases of one tick share. `None`: the release has to be made alone.
    pub(in super::super) async fn release_in_batch(
        &self,
        link: &Arc<Link>,
        connection: &Arc<Connection>,
        claim: &Claim,
    ) -> Result<Option<Released>, Failure> {
        link.forget_record(&claim.owner);
        let place = claim.waiting.then(|| {
            self.waiters.known.leave(&claim.owner);
            self.waiters.member_suffix(claim)
        });
        let (release, more) = (&RELEASE, place.as_deref());
        let freed = connection.wire.request(claim, Request::Release { release, more });
        match link.exchange(connection, freed).await? {
            Value::Int(answer @ 0..4) => Ok(Some(self.released(answer, claim.keys()))),
            Value::Int(ALONE) => Ok(None),
            _ => Err(Failure::Unexpected("release.lua")),
        }
    }
}

/// Records a grant by plain commands. `None`: its token is too small.
fn granted(link: &Arc<Link>, claim: &Claim, fence: i64) -> Option<Acquired> {
    if fence < SMALLEST {
        return None;
    }
    let fence = Fence(fence as u64);
    link.record_later(Record {
        claim: claim.clone(),
        fence,
        attempt: None,
    });
    Some(Acquired::Granted { fence })
}
