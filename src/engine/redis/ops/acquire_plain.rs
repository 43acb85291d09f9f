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
//! The names are those that several calls ask for in one turn of the event loop (`lane/batch.rs`), often but one. Four commands
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

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redis::{Cmd, Value};

use crate::clock::Moment;
use crate::engine::redis::connection::Link;
use crate::engine::redis::error::{Failure, is_forbidden, is_not_understood};
use crate::engine::redis::fast_path::resp;
use crate::engine::redis::fast_path::{ALONE, Freeing, Lane, Outcome};
use crate::engine::redis::keys::{Layout, Part, Room};
use crate::engine::redis::scripts::{RECORD, RELEASE_MANY};
use crate::engine::redis::topology::{MAILBOXES, Route};
use crate::engine::redis::{RECORD_KEPT_MS, RedisEngine};
use crate::engine::{Acquired, Released};
use crate::model::{Claim, Fence, Key};

/// The server's clock in September 2001. A smaller token was not drawn from a last token that was seeded.
const SMALLEST: i64 = 1_000_000_000_000_000;

/// A name that was busy so recently will be busy again.
const RECENT: Duration = Duration::from_secs(2);
/// Of so many names at most is it remembered.
const MOST_RECENT: usize = 1000;

/// The names that were busy of late.
#[derive(Default)]
pub(in super::super) struct Contended(Mutex<HashMap<Key, Moment>>);

impl Contended {
    fn names(&self) -> MutexGuard<'_, HashMap<Key, Moment>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// It was found busy.
    pub(in super::super) fn note(&self, key: &Key) {
        let mut names = self.names();
        if names.len() >= MOST_RECENT {
            names.retain(|_, last| last.elapsed() < RECENT);
            if names.len() >= MOST_RECENT {
                return;
            }
        }
        names.insert(key.clone(), Moment::now());
    }

    pub(in super::super) fn is(&self, key: &Key) -> bool {
        self.names().get(key).is_some_and(|last| last.elapsed() < RECENT)
    }
}

/// How the names of several calls are let go of.
pub(in super::super) static FREEING: Freeing = Freeing {
    script: || &RELEASE_MANY,
    parts: [Part::Queue, Part::Fence],
    to: MAILBOXES,
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
    pub(in super::super) fn lane(&self) -> Option<(&Arc<Link>, Arc<Lane>)> {
        let Route::One(link) = &self.route else { return None };
        Some((link, link.lane()?))
    }

    /// The same, if a claim may be tried for by plain commands.
    pub(in super::super) fn plain_lane(&self, claim: &Claim) -> Option<(&Arc<Link>, Arc<Lane>)> {
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
        self.lane().filter(|(_, lane)| lane.is_plain())
    }

    /// One try by plain commands. It is granted, or the script has to decide.
    pub(in super::super) async fn try_plainly(
        &self,
        link: &Link,
        lane: &Lane,
        claim: &Claim,
    ) -> Result<Result<Acquired, Undecided>, Failure> {
        let key = &claim.keys()[0];
        if self.contended.is(key) {
            let look = lane.look(claim);
            if let Outcome::Held = link.exchange_on(lane, look).await? {
                self.contended.note(key);
                return Ok(Err(Undecided::Held));
            }
        }
        let (fence, queued) = match link.exchange_on(lane, lane.take(claim)).await {
            Ok(Outcome::Taken { fence, queued }) => (fence, queued),
            Ok(Outcome::Replies(replies)) => return Box::pin(self.undecided(lane, claim, *replies)).await,
            Ok(_) => return Err(Failure::Unexpected(COMMANDS)),
            Err(Failure::Call(error)) if is_not_understood(&error) => {
                // Nothing was taken.
                lane.leave_to_scripts();
                return Ok(Err(Undecided::Unclear));
            }
            Err(failure) => return Err(failure),
        };
        if queued && Box::pin(self.is_queued(link, lane, key)).await? {
            Box::pin(self.release_part(claim, Duration::ZERO, false)).await?;
            return Ok(Err(Undecided::Unclear));
        }
        if fence < SMALLEST || !lane.is_seeded() {
            return Ok(Err(Undecided::Unclear));
        }
        let fence = Fence(fence as u64);
        lane.record_later(Record {
            claim: claim.clone(),
            fence,
            attempt: None,
        });
        Ok(Ok(Acquired::Granted { fence }))
    }

    /// Whether somebody waits for a name. One who waited before it was taken still does.
    async fn is_queued(&self, link: &Link, lane: &Lane, key: &Key) -> Result<bool, Failure> {
        let mut room = Room::default();
        let (_, [queue]) = room.keys(&self.layout, key.as_str(), [Part::Queue]);
        let look = lane.one(|out| resp::write(out, &["EXISTS", queue]));
        Ok(link.exchange_on(lane, look).await? != Value::Int(0))
    }

    /// What the replies mean that are not those of a name that was taken.
    async fn undecided(
        &self,
        lane: &Lane,
        claim: &Claim,
        [queued, held, fence, still]: [Value; 4],
    ) -> Result<Result<Acquired, Undecided>, Failure> {
        match held {
            Value::Nil => {
                let is_refused =
                    |reply: &&Value| matches!(reply, Value::ServerError(error) if is_forbidden(&error.clone().into()));
                if [&queued, &fence, &still].iter().any(is_refused) {
                    lane.leave_to_scripts();
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
        lane: &Lane,
        claim: &Claim,
    ) -> Result<Option<Released>, Failure> {
        lane.forget(&claim.owner);
        let place = claim.waiting.then(|| {
            self.waiters.known.leave(&claim.owner);
            self.waiters.place(claim)
        });
        let freed = lane.free(&FREEING, claim, place.as_deref());
        match link.exchange_on(lane, freed).await? {
            Outcome::Freed(answer @ 0..4) => Ok(Some(self.released(answer, claim.keys()))),
            Outcome::Freed(ALONE) => Ok(None),
            _ => Err(Failure::Unexpected("of release_many.lua")),
        }
    }
}

/// A grant that is to be written down.
pub(in super::super) struct Record {
    pub(in super::super) claim: Claim,
    pub(in super::super) fence: Fence,
    /// On a node of a quorum: the number of the attempt, and since when the lock is held, in ms since 1970.
    pub(in super::super) attempt: Option<(u64, u64)>,
}

impl Record {
    /// The call that does it.
    pub(in super::super) fn call(&self, layout: &Layout) -> Cmd {
        let Record { claim, fence, attempt } = self;
        let names = claim.keys().iter().map(Key::as_str);
        let mut call = RECORD.call(layout, &[Part::Lock, Part::Fence], names);
        let (owner, process) = (claim.owner.as_str(), &claim.process);
        let (value, by, since_ms) = match attempt {
            None => (owner.to_owned(), format!("{} {}", process.pid, process.host), None),
            Some((number, since_ms)) => {
                let by = format!("{}:{number} {}", process.pid, process.host);
                (format!("{owner}.{number}"), by, Some(since_ms))
            }
        };
        call.arg(value)
            .arg(fence.0)
            .arg(by)
            .arg(RECORD_KEPT_MS)
            .arg(claim.ttl.as_millis());
        if let Some(since_ms) = since_ms {
            call.arg(since_ms);
        }
        call
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn names_are_remembered_for_a_while_and_not_without_end() {
        let contended = Contended::default();
        let key = |name: &str| Key::new(name).unwrap();
        contended.note(&key("n"));
        assert!(contended.is(&key("n")));
        assert!(!contended.is(&key("m")));
        tokio::time::advance(RECENT).await;
        assert!(!contended.is(&key("n")));
        for i in 0..2 * MOST_RECENT {
            contended.note(&key(&i.to_string()));
        }
        assert_eq!(contended.names().len(), MOST_RECENT);
        tokio::time::advance(RECENT).await;
        contended.note(&key("n"));
        assert!(contended.is(&key("n")));
        assert_eq!(contended.names().len(), 1);
    }
}
