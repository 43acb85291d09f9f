//! One attempt for a claim: by plain commands or by the script, in one slot or in several.

use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, Value};

use crate::engine::redis::RedisEngine;
use crate::engine::redis::error::Failure;
use crate::engine::redis::keys::Part;
use crate::engine::redis::scripts::ACQUIRE;
use crate::engine::redis::topology::ChannelSubscription;
use crate::engine::{Acquired, WAITER_LIVENESS};
use crate::error::EngineError;
use crate::model::{Claim, Fence, Key};

impl RedisEngine {
    /// Makes one attempt, by plain commands where they suffice.
    pub(in super::super) async fn try_once(&self, claim: &Claim) -> Result<Acquired, EngineError> {
        // A future is moved as a whole when it is boxed. So rare parts have a box of their own, which is created on demand.
        let busy = match self.for_plain_commands(claim) {
            None => false,
            Some((link, connection)) => match self.try_plainly(link, &connection, claim).await {
                // It may enter the queue.
                Ok(Some(Acquired::Held { .. })) if claim.waiting => true,
                Ok(Some(acquired)) => {
                    if claim.waiting {
                        self.waiters.known.leave(&claim.owner);
                    }
                    return Ok(acquired);
                }
                Ok(None) => false,
                Err(failure) => return Err(failure.during("acquire")),
            },
        };
        let acquired = Box::pin(self.try_by_script(claim, busy)).await;
        acquired.map_err(|failure| failure.during("acquire"))
    }

    /// Makes one attempt for all names of a claim by the script. `busy`: an earlier attempt has found one busy.
    async fn try_by_script(&self, claim: &Claim, busy: bool) -> Result<Acquired, Failure> {
        let acquired = match self.parts(claim) {
            None => self.acquire(claim, claim, 0, busy).await?,
            Some(parts) => Box::pin(self.acquire_parts(&parts, claim)).await?,
        };
        if claim.waiting && matches!(acquired, Acquired::Granted { .. }) {
            // Not earlier: until all names are granted, a waiter keeps its number.
            self.waiters.known.leave(&claim.owner);
        }
        Ok(acquired)
    }

    /// Makes one attempt for names of one slot. A waiter enters the queue of a busy name. The fencing token is at least
    /// `least`. `busy`: an earlier attempt has found a name busy. `whole` is the claim that this one is a part of, or this
    /// one.
    pub(in super::super) async fn acquire(
        &self,
        claim: &Claim,
        whole: &Claim,
        least: u64,
        busy: bool,
    ) -> Result<Acquired, Failure> {
        if !claim.waiting {
            return self.attempt(claim, whole, None, least).await;
        }
        let slot = self.slot(&claim.keys()[0]);
        let channel = match self.waiters.channel(slot) {
            Some(channel) => channel,
            None => {
                // Do not enqueue before the subscription is active; a hand-off would be lost. A free name still costs one
                // round trip.
                if !busy {
                    let first = self.attempt(claim, whole, None, least).await?;
                    if matches!(first, Acquired::Granted { .. }) {
                        return Ok(first);
                    }
                }
                Box::pin(self.waiters.listen(slot)).await?
            }
        };
        self.attempt(claim, whole, Some(&channel), least).await
    }

    /// Makes one attempt. With `channel`, the subscription of this process, it enters the queue of a busy name.
    pub(in super::super) async fn attempt(
        &self,
        claim: &Claim,
        whole: &Claim,
        channel: Option<&Arc<ChannelSubscription>>,
        least: u64,
    ) -> Result<Acquired, Failure> {
        let slot = self.slot(&claim.keys()[0]);
        let call = self.acquire_call(claim, channel.is_some(), least);
        let mark_sent = || whole.mark_sent();
        loop {
            let answer = self.run_safely(&ACQUIRE, &call, slot, Some(&mark_sent)).await;
            // The loop ends: each undecided call has removed dead waiters from the queue.
            if let Some(acquired) = self.acquired(claim, channel, answer).await? {
                return Ok(acquired);
            }
        }
    }

    /// Returns the call of the script. `queued`: the claim enters the queue of a busy name.
    pub(in super::super) fn acquire_call(&self, claim: &Claim, queued: bool, least: u64) -> Cmd {
        const PARTS: [Part; 4] = [Part::Lock, Part::Fence, Part::Queue, Part::Metadata];
        let parts = if claim.metadata.is_some() {
            &PARTS[..]
        } else {
            &PARTS[..3]
        };
        let ttl = claim.ttl.as_millis();
        let (member, number) = if queued {
            (self.waiters.member(claim), self.waiters.known.number(&claim.owner))
        } else {
            (String::new(), 0)
        };
        let slot = self.slot(&claim.keys()[0]);
        let names = claim.keys().iter().map(Key::as_str);
        let mut call = ACQUIRE.call(&self.layout, parts, names);
        call.arg(claim.owner.as_str())
            .arg(ttl)
            .arg(ttl + self.fence_lasts())
            .arg(format!("{} {}", claim.process.pid, claim.process.host))
            .arg(self.route.channel_prefix(slot));
        if queued || least > 0 || claim.metadata.is_some() {
            call.arg(member).arg(number).arg(least);
        }
        if let Some(metadata) = &claim.metadata {
            call.arg(&**metadata);
        }
        call
    }

    /// Reads the script's answer. `None`: undecided, call the script again at once.
    pub(in super::super) async fn acquired(
        &self,
        claim: &Claim,
        channel: Option<&Arc<ChannelSubscription>>,
        answer: Result<Value, Failure>,
    ) -> Result<Option<Acquired>, Failure> {
        if let Err(Failure::Replicas { .. }) = answer {
            // The failure is returned in any case: the service releases the claim once more.
            let _ = Box::pin(self.release_part(claim, Duration::ZERO)).await;
        }
        match answer? {
            Value::Int(fence) if fence > 0 => {
                if claim.waiting && self.waiters.known.number(&claim.owner) == 0 {
                    // It did not wait, so the next one is likely to find the name free, too.
                    claim.keys().iter().for_each(|key| self.contended.forget(key));
                }
                Ok(Some(Acquired::Granted {
                    fence: Fence(fence as u64),
                }))
            }
            Value::Array(held) => match held[..] {
                [] => Ok(None),
                [
                    Value::Int(index @ 1..),
                    Value::Int(left),
                    Value::Int(number @ 0..),
                    Value::Int(more),
                    Value::Int(server_us),
                ] if index as usize <= claim.keys().len() => {
                    let key = &claim.keys()[index as usize - 1];
                    let retry_after = retry_after(left);
                    if more > 0 {
                        claim.keys().iter().for_each(|key| self.waiters.hand_off(key));
                    }
                    if let Some(channel) = channel {
                        self.contended.note(key);
                        if let Some(sent) = claim.sent_at() {
                            self.waiters.read_clock(self.slot(key), sent, server_us);
                        }
                        self.waiters
                            .entered(&claim.owner, key, number as u64, retry_after, channel);
                    }
                    Ok(Some(Acquired::Held {
                        key: key.clone(),
                        retry_after: retry_with_reservations(claim, retry_after),
                    }))
                }
                _ => Err(Failure::Unexpected("acquire.lua")),
            },
            _ => Err(Failure::Unexpected("acquire.lua")),
        }
    }
}

/// Returns the time of the next attempt: that of a waiter of several names extends its reservations.
fn retry_with_reservations(claim: &Claim, retry_after: Option<Duration>) -> Option<Duration> {
    if !claim.waiting || claim.keys().len() == 1 && !claim.is_part {
        return retry_after;
    }
    let in_time = WAITER_LIVENESS.min(claim.ttl.duration()) / 3;
    Some(retry_after.map_or(in_time, |after| after.min(in_time)))
}

/// Reads the PTTL of a busy name: when another attempt is useful. Negative if it never expires. A key in its last
/// millisecond has a PTTL of 0, and is still busy.
fn retry_after(left: i64) -> Option<Duration> {
    u64::try_from(left).ok().map(|left| Duration::from_millis(left.max(1)))
}
