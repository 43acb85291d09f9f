//! The common case of an acquisition, on the fast lane: plain commands in the place of `acquire.lua`, which take less than
//! half of the server's time.
//!
//! ```text
//! EXISTS <queues>                        tells whether somebody waits for one of them
//! SET <lock> <owner> PX <ttl> NX GET     takes a free name, or tells who holds it; for each
//! INCRBY holdfast:last <n>               draws the tokens
//! MGET <locks>                           tells whether each is held still
//! ```
//!
//! The names are those that several calls ask for in one turn of the event loop (`fast_path/batch.rs`), often but one. Four commands
//! are no longer one step, and the promises have to hold all the same:
//!
//! - **Tokens grow.** The owner is a fresh one, so that a name that is its own after `SET` and at the last command was so all
//!   the while, and its token was drawn then. Who holds the name later has taken it later, has drawn later, and so has a
//!   larger one.
//! - **The last token may be lost**, with the server's memory, or be older than it was, after a failure that took the last
//!   writes with it. So a lane that draws tokens runs `seed.lua` in front of the first, and once a second: the last token is
//!   no smaller than the server's clock then, which tokens stay behind of for as long as a server gives out fewer than a million
//!   in a second. A key that somebody deleted meanwhile shows in a token that is [too small](SMALLEST), and the script
//!   decides.
//! - **Nobody is passed.** A waiter who was there before the first command stays in front: where there is one for any of the
//!   names, each that was taken is looked at by itself. If somebody waits for it (its holder died; or who waits came after the
//!   take, which cannot be told), it is given back, which hands it on, and the script decides.
//! - **What the server refuses**, the second command or those behind it, takes nothing, or is given back, and the script
//!   decides.
//! - **A retry of the holder** finds its own token, and what is reserved for a waiter is told by its value: the script
//!   decides.
//!
//! A name that was busy a moment ago is looked at before it is tried for: a try that finds it busy writes nothing then.
//!
//! What inspection tells (`record.lua`) is written down when the turn of the event loop ends, unless the lock was released
//! before.

use std::sync::Arc;
use std::time::Duration;

use redis::Value;

use crate::engine::redis::RedisEngine;
use crate::engine::redis::connection::Link;
use crate::engine::redis::error::{Failure, is_forbidden, is_not_understood};
use crate::engine::redis::fast_path::{ALONE, BatchRelease, FastPath, Outcome, Record, resp};
use crate::engine::redis::keys::{CHANNEL_PREFIX, KeyBuffer, Part};
use crate::engine::redis::scripts::RELEASE_MANY;
use crate::engine::redis::topology::Route;
use crate::engine::{Acquired, Released};
use crate::model::{Claim, Fence, Key};

/// The server's clock in September 2001. A smaller token was not drawn from a last token that was seeded.
const SMALLEST: i64 = 1_000_000_000_000_000;

/// How the names of several calls are let go of.
pub(in super::super) static RELEASE: BatchRelease = BatchRelease {
    script: || &RELEASE_MANY,
    parts: [Part::Queue, Part::Fence],
    to: CHANNEL_PREFIX,
};

/// What a failure calls the commands.
const COMMANDS: &str = "of EXISTS, SET, INCRBY and MGET";

/// What plain commands could not decide.
pub(in super::super) enum Undecided {
    /// Nothing, but that somebody holds the name.
    Held,
    /// It is for the script.
    Unclear,
}

impl RedisEngine {
    /// The lane, if there is one on this thread.
    pub(in super::super) fn fast_path(&self) -> Option<(&Arc<Link>, Arc<FastPath>)> {
        let Route::One(link) = &self.route else { return None };
        Some((link, link.fast_path()?))
    }

    /// The same, if a claim may be tried for by plain commands.
    pub(in super::super) fn plain_fast_path(&self, claim: &Claim) -> Option<(&Arc<Link>, Arc<FastPath>)> {
        if !self.counts || self.replicated.is_some() || claim.keys().len() != 1 || claim.metadata.is_some() {
            return None;
        }
        // Whoever hears of hand-offs can take a place in the queue with its try, and does so where it will be needed; whoever
        // has one comes for what was handed to it.
        let key = &claim.keys()[0];
        if claim.waiting
            && self.waiters.ear(0).is_some()
            && (self.waiters.known.number(&claim.owner) > 0 || self.contended.is(key))
        {
            return None;
        }
        self.fast_path().filter(|(_, fast_path)| fast_path.is_plain())
    }

    /// One try by plain commands. It is granted, or the script has to decide.
    pub(in super::super) async fn try_plainly(
        &self,
        link: &Link,
        fast_path: &FastPath,
        claim: &Claim,
    ) -> Result<Result<Acquired, Undecided>, Failure> {
        let key = &claim.keys()[0];
        if self.contended.is(key) {
            let look = fast_path.check(claim);
            if let Outcome::Held = link.exchange_on(fast_path, look).await? {
                self.contended.note(key);
                return Ok(Err(Undecided::Held));
            }
        }
        let (fence, queued) = match link.exchange_on(fast_path, fast_path.acquire(claim)).await {
            Ok(Outcome::Acquired { fence, queued }) => (fence, queued),
            Ok(Outcome::Replies(replies)) => return Box::pin(self.undecided(fast_path, claim, *replies)).await,
            Ok(_) => return Err(Failure::Unexpected(COMMANDS)),
            Err(Failure::Call(error)) if is_not_understood(&error) => {
                // Nothing was taken.
                fast_path.use_scripts_only();
                return Ok(Err(Undecided::Unclear));
            }
            Err(failure) => return Err(failure),
        };
        if queued && Box::pin(self.is_queued(link, fast_path, key)).await? {
            Box::pin(self.release_part(claim, Duration::ZERO, false)).await?;
            return Ok(Err(Undecided::Unclear));
        }
        if fence < SMALLEST || !fast_path.is_seeded() {
            return Ok(Err(Undecided::Unclear));
        }
        let fence = Fence(fence as u64);
        fast_path.record_later(Record {
            claim: claim.clone(),
            fence,
            attempt: None,
        });
        Ok(Ok(Acquired::Granted { fence }))
    }

    /// Whether somebody waits for a name. One who waited before it was taken still does.
    async fn is_queued(&self, link: &Link, fast_path: &FastPath, key: &Key) -> Result<bool, Failure> {
        let mut room = KeyBuffer::default();
        let (_, [queue]) = room.keys(&self.layout, key.as_str(), [Part::Queue]);
        let look = fast_path.call_written(|out| resp::write(out, &["EXISTS", queue]));
        Ok(link.exchange_on(fast_path, look).await? != Value::Int(0))
    }

    /// What the replies mean that are not those of a name that was taken.
    async fn undecided(
        &self,
        fast_path: &FastPath,
        claim: &Claim,
        [queued, held, fence, still]: [Value; 4],
    ) -> Result<Result<Acquired, Undecided>, Failure> {
        match held {
            Value::Nil => {
                let is_refused =
                    |reply: &&Value| matches!(reply, Value::ServerError(error) if is_forbidden(&error.clone().into()));
                if [&queued, &fence, &still].iter().any(is_refused) {
                    fast_path.use_scripts_only();
                }
                if queued != Value::Int(0) {
                    self.release_part(claim, Duration::ZERO, false).await?;
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

    /// Frees the one name of a claim without metadata. `None`: that has to be done by itself.
    pub(in super::super) async fn free_on(
        &self,
        link: &Link,
        fast_path: &FastPath,
        claim: &Claim,
    ) -> Result<Option<Released>, Failure> {
        fast_path.forget(&claim.owner);
        let place = claim.waiting.then(|| {
            self.waiters.known.leave(&claim.owner);
            self.waiters.place(claim)
        });
        let freed = fast_path.release(&RELEASE, claim, place.as_deref());
        match link.exchange_on(fast_path, freed).await? {
            Outcome::Released(answer @ 0..4) => Ok(Some(self.released(answer, claim.keys()))),
            Outcome::Released(ALONE) => Ok(None),
            _ => Err(Failure::Unexpected("of release_many.lua")),
        }
    }
}
