//! The common case of an acquisition, on the fast lane: plain commands in the place of `acquire.lua`, which take less than
//! half of the server's time.
//!
//! ```text
//! SET <lock> <owner> PX <ttl> NX GET     takes a free name, or tells who holds it
//! INCR holdfast:last                     draws the token
//! EXISTS <queue>                         tells whether somebody waits for it
//! ```
//!
//! Three commands are no longer one step, and the promises have to hold all the same:
//!
//! - **Tokens grow.** The token is drawn after the name was taken. Who holds the name later has taken it later, has drawn
//!   later, and so has a larger one. Only a lease that ended between the two commands could have it otherwise: but then its
//!   answer comes after its end, and the service, which counts from before the request was sent, refuses it.
//! - **The last token may be lost**, with the server's memory, or be older than it was, after a failure that took the last
//!   writes with it. Either breaks the connection, and a new lane begins with `seed.lua`: the last token is no smaller than
//!   the server's clock then, which tokens stay behind of for as long as a server gives out fewer than a million in a second. A key
//!   that somebody deleted meanwhile shows in a token that is [too small](SMALLEST), and the script decides.
//! - **Nobody is passed.** Where somebody waits for a name that is free (its holder died), it is given back, which hands it
//!   on, and the script decides.
//! - **A retry of the holder** finds its own token, and what is reserved for a waiter is told by its value: the script
//!   decides.
//!
//! What inspection tells (`record.lua`) is written down when the turn of the event loop ends, unless the lock was released
//! before.

use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, Value};

use super::connection::Link;
use super::failure::Failure;
use super::keys::{LAST, Layout, Part, companion};
use super::lane::Lane;
use super::resp;
use super::route::{MAILBOXES, Route};
use super::scripts::{RECORD, RELEASE};
use super::{RECORD_KEPT_MS, RedisEngine};
use crate::engine::{Acquired, Released};
use crate::model::{Claim, Fence, Key};

/// The server's clock in September 2001. A smaller token was not drawn from a last token that was seeded.
const SMALLEST: i64 = 1_000_000_000_000_000;

/// What plain commands could not decide.
pub(super) enum Undecided {
    /// Nothing, but that somebody holds the name.
    Held,
    /// It is for the script.
    Unclear,
}

impl RedisEngine {
    /// The lane, if there is one on this thread.
    pub(super) fn lane(&self) -> Option<(&Arc<Link>, Arc<Lane>)> {
        let Route::One(link) = &self.route else { return None };
        Some((link, link.lane()?))
    }

    /// The same, if a claim may be tried for by plain commands.
    pub(super) fn plain_lane(&self, claim: &Claim) -> Option<(&Arc<Link>, Arc<Lane>)> {
        if self.replicated.is_some() || claim.keys().len() != 1 || claim.metadata.is_some() {
            return None;
        }
        // Whoever hears of hand-offs already takes its place in the queue with the first try.
        if claim.waiting && self.waiters.ear(0).is_some() {
            return None;
        }
        self.lane().filter(|(_, lane)| lane.is_plain())
    }

    /// One try by plain commands. It is granted, or the script has to decide.
    pub(super) async fn try_plainly(
        &self,
        link: &Link,
        lane: &Lane,
        claim: &Claim,
    ) -> Result<Result<Acquired, Undecided>, Failure> {
        let replies = lane.three(|out| {
            let [lock, queue] = keys(&self.layout, claim, [Part::Lock, Part::Queue]);
            let mut digits = itoa::Buffer::new();
            let ttl = digits.format(claim.ttl.as_millis());
            resp::write(out, &["SET", &lock, claim.owner.as_str(), "PX", ttl, "NX", "GET"]);
            resp::write(out, &["INCR", LAST]);
            resp::write(out, &["EXISTS", &queue]);
        });
        let whole = async {
            let [first, second, third] = replies.await?;
            Ok([first.extract_error()?, second.extract_error()?, third.extract_error()?])
        };
        match link.exchange_on(lane, whole).await? {
            [Value::Nil, Value::Int(fence), Value::Int(0)] if fence >= SMALLEST => {
                let fence = Fence(fence as u64);
                lane.record_later(claim, fence);
                Ok(Ok(Acquired::Granted { fence }))
            }
            [Value::Nil, Value::Int(_), Value::Int(queued)] => {
                if queued > 0 {
                    Box::pin(self.free_part(claim, Duration::ZERO)).await?;
                }
                Ok(Err(Undecided::Unclear))
            }
            [Value::BulkString(holder), ..] if holder.starts_with(claim.owner.as_str().as_bytes()) => {
                Ok(Err(Undecided::Unclear))
            }
            [Value::BulkString(_), ..] => Ok(Err(Undecided::Held)),
            _ => Err(Failure::Unexpected("of SET, INCR and EXISTS")),
        }
    }

    /// Frees the one name of a claim without metadata, by the script of which the server may know nothing.
    pub(super) async fn free_on(&self, link: &Link, lane: &Lane, claim: &Claim) -> Result<Option<Released>, Failure> {
        lane.forget(&claim.owner);
        let member = if claim.waiting {
            self.waiters.known.leaves(&claim.owner);
            self.waiters.member(claim)
        } else {
            String::new()
        };
        let reply = lane.one(|out| {
            let [lock, queue, fence] = keys(&self.layout, claim, [Part::Lock, Part::Queue, Part::Fence]);
            let owner = claim.owner.as_str();
            resp::write(
                out,
                &[
                    "EVALSHA",
                    RELEASE.sha(),
                    "3",
                    &lock,
                    &queue,
                    &fence,
                    owner,
                    "1",
                    MAILBOXES,
                    &member,
                    "0",
                ],
            );
        });
        match link.exchange_on(lane, reply).await {
            Ok(Value::Int(1)) => Ok(Some(Released::Freed)),
            Ok(Value::Int(0)) => Ok(Some(Released::NotHeld)),
            Ok(_) => Err(Failure::Unexpected("of release.lua")),
            Err(failure) if failure.is_unknown_script() => Ok(None),
            Err(failure) => Err(failure),
        }
    }
}

/// Keys of a claim's only name.
fn keys<const N: usize>(layout: &Layout, claim: &Claim, parts: [Part; N]) -> [String; N] {
    let mut lock = String::with_capacity(80);
    layout.lock(claim.keys()[0].as_str(), &mut lock);
    parts.map(|part| {
        let mut key = String::with_capacity(lock.len() + 24);
        companion(part, &lock, &mut key);
        key
    })
}

/// The call that writes a grant down.
pub(super) fn record(layout: &Layout, claim: &Claim, fence: Fence) -> Cmd {
    let names = claim.keys().iter().map(Key::as_str);
    let mut call = RECORD.call(layout, &[Part::Lock, Part::Fence], names);
    call.arg(claim.owner.as_str())
        .arg(fence.0)
        .arg(format!("{} {}", claim.process.pid, claim.process.host))
        .arg(RECORD_KEPT_MS);
    call
}
