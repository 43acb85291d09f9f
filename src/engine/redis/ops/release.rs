//! Releases claims, or a name no matter which owner holds it.

use std::collections::HashMap;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use redis::{Cmd, Value};

use crate::engine::redis::RedisEngine;
use crate::engine::redis::error::Failure;
use crate::engine::redis::keys::Part;
use crate::engine::redis::scripts::{FORCE_RELEASE, RELEASE, RELEASE_SPLIT, Script};
use crate::engine::redis::topology::Route;
use crate::engine::redis::wire::ALONE;
use crate::engine::{Answers, Released};
use crate::model::{Claim, Key, Ttl};

/// Maximum number of names in one script, which takes the server about 1 ms.
const TOGETHER: usize = 256;

/// Bit in the answer of a release script: the owner held every name.
const HELD: i64 = 1;
/// Bit in the answer of a release script: another call has to hand names on.
const UNFINISHED: i64 = 2;

const UNEXPECTED: Failure = Failure::Unexpected("release.lua");

impl RedisEngine {
    /// Releases claims, a single one by a command of the batch where that suffices. Each release takes effect after the attempts of
    /// its claim.
    pub(in super::super) async fn release_claims(
        &self,
        claims: &[&Claim],
        keep: Duration,
        answer: &mut Answers<'_, Released>,
    ) {
        if let [claim] = claims
            && self.counts
            && keep.is_zero()
            && claim.keys().len() == 1
            && claim.metadata.is_none()
            && self.replicated.is_none()
            && let Some((link, connection)) = self.current()
        {
            match self.release_in_batch(link, &connection, claim).await {
                Ok(Some(released)) => return answer(0, Ok(released)),
                Ok(None) => {}
                Err(failure) => return answer(0, Err(failure.during("release"))),
            }
        }
        Box::pin(self.release_many(claims, keep, answer)).await;
    }

    /// Releases claims, with one script for each slot.
    async fn release_many(&self, claims: &[&Claim], keep: Duration, answer: &mut Answers<'_, Released>) {
        if let Route::One(link) = &self.route {
            match keep.is_zero() {
                true => claims.iter().for_each(|claim| link.forget_record(&claim.owner)),
                false => link.write_records(),
            }
        }
        for claim in claims.iter().filter(|claim| claim.waiting) {
            self.waiters.known.leave(&claim.owner);
        }
        if let [claim] = claims
            && (claim.keys().len() == 1 || !self.route.has_slots())
        {
            let released = self.release_part(claim, keep).await;
            return answer(0, released.map_err(|failure| failure.during("release")));
        }
        let mut slots: HashMap<u16, Vec<(usize, &Key)>> = HashMap::new();
        for (index, claim) in claims.iter().enumerate() {
            for key in claim.keys() {
                slots.entry(self.slot(key)).or_default().push((index, key));
            }
        }
        let groups = slots.values().flat_map(|names| names.chunks(TOGETHER));
        let mut scripts: FuturesUnordered<_> = groups
            .map(|names| async move { (names, self.release_names(claims, names, keep).await) })
            .collect();
        let mut left: Vec<usize> = claims.iter().map(|claim| claim.keys().len()).collect();
        let mut outcomes = vec![Ok(Released::Freed); claims.len()];
        while let Some((names, released)) = scripts.next().await {
            for ((index, _), released) in names.iter().zip(released) {
                outcomes[*index] = combined(outcomes[*index].clone(), released);
                left[*index] -= 1;
                if left[*index] == 0 {
                    let outcome = outcomes[*index].clone();
                    answer(*index, outcome.map_err(|failure| failure.during("release")));
                }
            }
        }
    }

    /// Releases the names of a part of a claim, which are in one slot, and removes the waiter from their queues.
    pub(in super::super) async fn release_part(&self, claim: &Claim, keep: Duration) -> Result<Released, Failure> {
        let names: Vec<(usize, &Key)> = claim.keys().iter().map(|key| (0, key)).collect();
        let released = self.release_names(&[claim], &names, keep).await;
        released.into_iter().fold(Ok(Released::Freed), combined)
    }

    /// Releases names of one slot with one script. Each name has the index of its claim.
    async fn release_names(
        &self,
        claims: &[&Claim],
        names: &[(usize, &Key)],
        keep: Duration,
    ) -> Vec<Result<Released, Failure>> {
        let slot = self.slot(names[0].1);
        let call = self.release_call(claims, names, slot, keep);
        let answer = match (&self.replicated, &self.route, names) {
            // On the current connection: behind the attempts that were sent on it.
            (Some(replicated), ..) => replicated.link.run(&RELEASE, &call).await,
            (None, Route::Cluster(_), [(index, key)]) => {
                let smaller = self.split_release_call(key, claims[*index].owner.as_str(), keep);
                let scripts: [(&Script, &Cmd); 2] = [(&RELEASE, &call), (&RELEASE_SPLIT, &smaller)];
                self.route.run_first(&scripts, slot, None).await
            }
            _ => self.route.run(&RELEASE, &call, slot, None).await,
        };
        let answers = match answer {
            Ok(Value::Int(held)) if held == names.len() as i64 => vec![HELD; names.len()],
            // A name whose slot moves.
            Ok(Value::Int(0)) => vec![0; names.len()],
            Ok(Value::Array(answers)) if answers.len() == names.len() => {
                let number = |answer: &Value| {
                    if let Value::Int(number) = answer {
                        *number
                    } else {
                        ALONE
                    }
                };
                answers.iter().map(number).collect()
            }
            // One name may be the cause, for example one that the ACL forbids: release each alone.
            Err(failure) if names.len() > 1 && (!failure.retryable() || failure.is_split()) => vec![ALONE; names.len()],
            Err(failure) => return vec![Err(failure); names.len()],
            Ok(_) => vec![ALONE; names.len()],
        };
        join_all(names.iter().zip(answers).map(|(name, answer)| async move {
            match answer {
                0..4 => Ok(self.released(answer, std::slice::from_ref(name.1))),
                ALONE if names.len() > 1 => {
                    let alone = Box::pin(self.release_names(claims, std::slice::from_ref(name), keep)).await;
                    alone.into_iter().fold(Ok(Released::Freed), combined)
                }
                _ => Err(UNEXPECTED),
            }
        }))
        .await
    }

    fn release_call(&self, claims: &[&Claim], names: &[(usize, &Key)], slot: u16, keep: Duration) -> Cmd {
        const PARTS: [Part; 4] = [Part::Lock, Part::Queue, Part::Fence, Part::Metadata];
        let has_metadata = names.iter().any(|(index, _)| claims[*index].metadata.is_some());
        let parts = if has_metadata { &PARTS[..] } else { &PARTS[..3] };
        let keys = names.iter().map(|(_, key)| key.as_str());
        let mut call = RELEASE.call(&self.layout, parts, keys);
        let prefix = self.route.channel_prefix(slot);
        match (self.layout.fences_outlast(), keep.is_zero()) {
            (0, true) => call.arg(prefix),
            (lasts, true) => call.arg(format!("{prefix} {lasts}")),
            (lasts, false) => call.arg(format!("{prefix} {lasts} {}", Ttl::clamped(keep).as_millis())),
        };
        for (index, _) in names {
            let claim = &claims[*index];
            if claim.waiting {
                call.arg(format!(
                    "{}:{}",
                    claim.owner.as_str(),
                    self.waiters.member_suffix(claim)
                ));
            } else {
                call.arg(claim.owner.as_str());
            }
        }
        call
    }

    /// Returns the call of the release without the other keys of a name.
    fn split_release_call(&self, key: &Key, owner: &str, keep: Duration) -> Cmd {
        let mut call = RELEASE_SPLIT.call(&self.layout, &[Part::Lock], std::iter::once(key.as_str()));
        let keep = match keep.is_zero() {
            true => 0,
            false => Ttl::clamped(keep).as_millis(),
        };
        call.arg(owner).arg(keep);
        call
    }

    /// Reads the answer of a release script. Starts the hand-off of the names that the script could not finish.
    pub(in super::super) fn released(&self, answer: i64, keys: &[Key]) -> Released {
        if answer & UNFINISHED != 0 {
            keys.iter().for_each(|key| self.waiters.hand_off(key));
        }
        if answer & HELD != 0 {
            Released::Freed
        } else {
            Released::NotHeld
        }
    }

    /// Releases a name, no matter which owner holds it.
    pub(in super::super) async fn force_release_name(&self, key: &Key) -> Result<bool, Failure> {
        const PARTS: [Part; 4] = [Part::Lock, Part::Queue, Part::Fence, Part::Metadata];
        let mut call = FORCE_RELEASE.call(&self.layout, &PARTS, std::iter::once(key.as_str()));
        let slot = self.slot(key);
        call.arg(self.route.channel_prefix(slot))
            .arg(self.layout.fences_outlast());
        let smaller = self.split_release_call(key, "", Duration::ZERO);
        let scripts: [(&Script, &Cmd); 2] = [(&FORCE_RELEASE, &call), (&RELEASE_SPLIT, &smaller)];
        match self.route.run_first(&scripts, slot, None).await? {
            Value::Int(answer @ 0..4) => Ok(self.released(answer, std::slice::from_ref(key)) == Released::Freed),
            _ => Err(Failure::Unexpected("force_release.lua")),
        }
    }
}

/// Returns the combined outcome of two releases.
fn combined(a: Result<Released, Failure>, b: Result<Released, Failure>) -> Result<Released, Failure> {
    match (a?, b?) {
        (Released::Freed, Released::Freed) => Ok(Released::Freed),
        _ => Ok(Released::NotHeld),
    }
}
