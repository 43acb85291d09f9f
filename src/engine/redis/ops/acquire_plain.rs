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
use crate::engine::redis::wire::{ALONE, BatchRelease, Outcome, resp};
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

/// The result of plain commands that did not acquire the name.
pub(in super::super) enum Undecided {
    /// Another owner holds it.
    Held,
    /// The script has to decide.
    Unclear,
}

impl RedisEngine {
    /// Returns the connection to the only server, if it is open, and if calls for a claim may share commands: not those for a share.
    pub(in super::super) fn current_for(&self, claim: &Claim) -> Option<(&Arc<Link>, Arc<Connection>)> {
        let is_simple = claim.keys().len() == 1 && claim.metadata.is_none() && claim.share.is_none();
        match &self.route {
            Route::One(link) if is_simple && self.counts && self.replicated.is_none() => Some((link, link.current()?)),
            _ => None,
        }
    }

    /// Returns the connection, if plain commands may be used for a claim.
    pub(in super::super) fn for_plain_commands(&self, claim: &Claim) -> Option<(&Arc<Link>, Arc<Connection>)> {
        let current = self.current_for(claim)?;
        // A process with a channel can enter the queue with its attempt, and does so if the name is likely to be busy. A
        // waiter in the queue may have been handed the name.
        let key = &claim.keys()[0];
        if claim.waiting
            && self.waiters.channel(0).is_some()
            && (self.waiters.known.number(&claim.owner) > 0 || self.contended.is(key))
        {
            return None;
        }
        Some(current).filter(|(_, connection)| connection.wire.is_plain() && connection.wire.is_seeded())
    }

    /// Makes one attempt by plain commands. It is granted, or the script has to decide.
    pub(in super::super) async fn try_plainly(
        &self,
        link: &Arc<Link>,
        connection: &Arc<Connection>,
        claim: &Claim,
    ) -> Result<Result<Acquired, Undecided>, Failure> {
        let key = &claim.keys()[0];
        if self.contended.is(key) {
            let look = connection.wire.check(claim);
            if let Outcome::Held = link.exchange(connection, look).await? {
                self.contended.note(key);
                return Ok(Err(Undecided::Held));
            }
            self.contended.forget(key);
        }
        let (fence, queued) = match link.exchange(connection, connection.wire.acquire(claim)).await {
            Ok(Outcome::Acquired { fence, queued }) => (fence, queued),
            Ok(Outcome::Replies(replies)) => return Box::pin(self.undecided(connection, claim, *replies)).await,
            Ok(_) => return Err(Failure::Unexpected(COMMANDS)),
            Err(Failure::Call(error)) if is_not_understood(&error) => {
                // Nothing was acquired.
                connection.wire.use_scripts_only();
                return Ok(Err(Undecided::Unclear));
            }
            Err(failure) => return Err(failure),
        };
        if queued && Box::pin(self.is_queued(link, connection, key)).await? {
            Box::pin(self.release_part(claim, Duration::ZERO)).await?;
            return Ok(Err(Undecided::Unclear));
        }
        if fence < SMALLEST {
            return Ok(Err(Undecided::Unclear));
        }
        let fence = Fence(fence as u64);
        link.record_later(Record {
            claim: claim.clone(),
            fence,
            attempt: None,
        });
        Ok(Ok(Acquired::Granted { fence }))
    }

    /// Whether a name has waiters. A waiter that was there before the acquisition still is.
    async fn is_queued(&self, link: &Arc<Link>, connection: &Arc<Connection>, key: &Key) -> Result<bool, Failure> {
        let mut room = KeyBuffer::default();
        let (_, [queue]) = room.keys(&self.layout, key.as_str(), [Part::Queue]);
        let look = connection.wire.call_written(|out| resp::write(out, &["EXISTS", queue]));
        Ok(link.exchange(connection, look).await? != Value::Int(0))
    }

    /// Reads the replies for a name that was not acquired.
    async fn undecided(
        &self,
        connection: &Arc<Connection>,
        claim: &Claim,
        [queued, held, fence, still]: [Value; 4],
    ) -> Result<Result<Acquired, Undecided>, Failure> {
        match held {
            Value::Nil => {
                let is_refused =
                    |reply: &&Value| matches!(reply, Value::ServerError(error) if is_forbidden(&error.clone().into()));
                if [&queued, &fence, &still].iter().any(is_refused) {
                    connection.wire.use_scripts_only();
                }
                if queued != Value::Int(0) {
                    self.release_part(claim, Duration::ZERO).await?;
                }
                Ok(Err(Undecided::Unclear))
            }
            Value::BulkString(holder) if holder.starts_with(claim.owner.as_str().as_bytes()) => {
                Ok(Err(Undecided::Unclear))
            }
            Value::BulkString(_) => {
                self.contended.note(&claim.keys()[0]);
                Ok(Err(Undecided::Held))
            }
            _ => Err(Failure::Unexpected(COMMANDS)),
        }
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
        let freed = connection.wire.release(&RELEASE, claim, place.as_deref());
        match link.exchange(connection, freed).await? {
            Outcome::Released(answer @ 0..4) => Ok(Some(self.released(answer, claim.keys()))),
            Outcome::Released(ALONE) => Ok(None),
            _ => Err(Failure::Unexpected("release.lua")),
        }
    }
}
