//! One try for a name, or for several of one slot.

use std::sync::Arc;
use std::time::Duration;

use redis::Value;

use super::RedisEngine;
use super::failure::Failure;
use super::keys::Part;
use super::route::Ear;
use super::scripts::ACQUIRE;
use crate::engine::{Acquired, WAITER_LIVENESS};
use crate::model::{Claim, Fence, Key};

impl RedisEngine {
    /// One try for names of one slot, with a place in the queue for a waiter who finds one busy. The fence is not smaller
    /// than `least`. `busy`: a first try has found it so.
    pub(super) async fn acquire(&self, claim: &Claim, least: u64, busy: bool) -> Result<Acquired, Failure> {
        if !claim.waiting {
            return self.attempt(claim, None, least).await;
        }
        let slot = self.slot(&claim.keys()[0]);
        let ear = match self.waiters.ear(slot) {
            Some(ear) => ear,
            None => {
                // Who has no ear yet takes no place: the name would be handed to somebody who does not hear of it. Free
                // names cost one round trip all the same.
                if !busy {
                    let first = self.attempt(claim, None, least).await?;
                    if matches!(first, Acquired::Granted { .. }) {
                        return Ok(first);
                    }
                }
                self.waiters.listen(slot).await?
            }
        };
        self.attempt(claim, Some(&ear), least).await
    }

    /// The same, with a place in the queue for who has an ear there.
    pub(super) async fn attempt(&self, claim: &Claim, ear: Option<&Arc<Ear>>, least: u64) -> Result<Acquired, Failure> {
        const PARTS: [Part; 4] = [Part::Lock, Part::Fence, Part::Queue, Part::Metadata];
        let parts = if claim.metadata.is_some() {
            &PARTS[..]
        } else {
            &PARTS[..3]
        };
        let ttl = claim.ttl.as_millis();
        let (member, number) = match ear {
            Some(_) => (self.waiters.member(claim), self.waiters.known.number(&claim.owner)),
            None => (String::new(), 0),
        };
        let slot = self.slot(&claim.keys()[0]);
        let names = claim.keys().iter().map(Key::as_str);
        let mut call = ACQUIRE.call_with(&self.layout, parts, names, self.last());
        call.arg(claim.owner.as_str())
            .arg(ttl)
            .arg(ttl + self.fence_lasts())
            .arg(format!("{} {}", claim.process.pid, claim.process.host))
            .arg(self.route.mailboxes(slot));
        if ear.is_some() || least > 0 || claim.metadata.is_some() {
            call.arg(member)
                .arg(number)
                .arg(WAITER_LIVENESS.as_millis() as u64)
                .arg(least);
        }
        if let Some(metadata) = &claim.metadata {
            call.arg(&**metadata);
        }
        let answer = self.run_safely(&ACQUIRE, &call, slot).await;
        if let Err(Failure::Replicas { .. }) = answer {
            // The failure is the answer, whatever becomes of this: the service frees what it was not granted once more.
            let _ = self.let_go(claim, Duration::ZERO).await;
        }
        match answer? {
            Value::Int(fence) if fence > 0 => Ok(Acquired::Granted {
                fence: Fence(fence as u64),
            }),
            Value::Array(held) => match held[..] {
                [Value::Int(index @ 1..), Value::Int(left), Value::Int(number @ 0..)]
                    if index as usize <= claim.keys().len() =>
                {
                    let key = &claim.keys()[index as usize - 1];
                    let retry_after = retry_after(left);
                    if let Some(ear) = ear {
                        #[cfg(unix)]
                        self.contended.note(key);
                        self.waiters.waits(&claim.owner, key, number as u64, retry_after, ear);
                    }
                    Ok(Acquired::Held {
                        key: key.clone(),
                        retry_after,
                    })
                }
                _ => Err(Failure::Unexpected("of acquire.lua")),
            },
            _ => Err(Failure::Unexpected("of acquire.lua")),
        }
    }
}

/// When a busy name is worth another try, from its PTTL: negative when it never expires. A key in its last millisecond
/// has a PTTL of 0, and is still busy.
fn retry_after(left: i64) -> Option<Duration> {
    u64::try_from(left).ok().map(|left| Duration::from_millis(left.max(1)))
}
