//! Releases claims, or a name no matter which owner holds it.

use std::collections::HashMap;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use redis::{Cmd, Value};

use crate::engine::redis::RedisEngine;
use crate::engine::redis::error::Failure;
use crate::engine::redis::keys::{FENCE_KEPT_MS, Part};
use crate::engine::redis::scripts::{self, RELEASE_SPLIT, Script, script_of};
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
            && keep.is_zero()
            && let Some((link, connection)) = self.current_for(claim)
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
        let mut slots: HashMap<(u16, bool), Vec<(usize, &Key)>> = HashMap::new();
        for (index, claim) in claims.iter().enumerate() {
            for key in claim.keys() {
                slots.entry(self.script_group(key)).or_default().push((index, key));
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

    /// Releases names of one slot, all locks or all shared, with one script. Each name has the index of its claim.
    async fn release_names(
        &self,
        claims: &[&Claim],
        names: &[(usize, &Key)],
        keep: Duration,
    ) -> Vec<Result<Released, Failure>> {
        let slot = self.slot(names[0].1);
        const PARTS: [Part; 4] = [Part::Lock, Part::Queue, Part::Fence, Part::Metadata];
        let is_shared = names[0].1.is_shared();
        let has_metadata = !is_shared && names.iter().any(|(index, _)| claims[*index].metadata.is_some());
        let parts = if has_metadata { &PARTS[..] } else { &PARTS[..3] };
        let script = script_of(names[0].1, &scripts::RELEASE, &scripts::SHARED_RELEASE);
        let call = self.release_call(claims, names, (script, parts), slot, keep);
        let answer = match (&self.route, names) {
            (Route::Cluster(cluster), [(index, key)]) => {
                let smaller = match is_shared {
                    true => (
                        script,
                        self.release_call(claims, names, (script, &PARTS[..1]), slot, keep),
                    ),
                    false => self.split_release_call(key, claims[*index].owner.as_str(), keep),
                };
                cluster
                    .run_first(&[(script, &call), (smaller.0, &smaller.1)], slot, None)
                    .await
            }
            _ => self.run_release(script, &call, slot).await,
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

    fn release_call(
        &self,
        claims: &[&Claim],
        names: &[(usize, &Key)],
        (script, parts): (&Script, &[Part]),
        slot: u16,
        keep: Duration,
    ) -> Cmd {
        let mut call = script.call(&self.layout, parts, names.iter().map(|(_, key)| *key));
        let prefix = self.route.channel_prefix(slot);
        match (self.fences_outlast(), keep.is_zero()) {
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

    /// Returns the script and the call that release a lock without its other keys.
    fn split_release_call(&self, key: &Key, owner: &str, keep: Duration) -> (&'static Script, Cmd) {
        let mut call = RELEASE_SPLIT.call(&self.layout, &[Part::Lock], std::iter::once(key));
        let keep = match keep.is_zero() {
            true => 0,
            false => Ttl::clamped(keep).as_millis(),
        };
        call.arg(owner).arg(keep);
        (&RELEASE_SPLIT, call)
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

    /// Returns how long a fence companion outlasts a release, in ms.
    fn fences_outlast(&self) -> u64 {
        if self.counts { 0 } else { FENCE_KEPT_MS }
    }

    /// Runs the script on the current connection. The server executes it after the attempts that were sent on the same connection.
    async fn run_release(&self, script: &Script, call: &Cmd, slot: u16) -> Result<Value, Failure> {
        match &self.replicated {
            Some(replicated) => replicated.link.run(script, call).await,
            None => self.route.run(script, call, slot, None).await,
        }
    }

    /// Releases a name, no matter which owner holds it.
    pub(in super::super) async fn force_release_name(&self, key: &Key) -> Result<bool, Failure> {
        const PARTS: [Part; 4] = [Part::Lock, Part::Queue, Part::Fence, Part::Metadata];
        let slot = self.slot(key);
        let script = script_of(key, &scripts::FORCE_RELEASE, &scripts::SHARED_FORCE_RELEASE);
        let call = |parts: &[Part]| {
            let mut call = script.call(&self.layout, parts, std::iter::once(key));
            call.arg(self.route.channel_prefix(slot)).arg(self.fences_outlast());
            call
        };
        let (parts, smaller) = match key.is_shared() {
            true => (&PARTS[..3], (script, call(&PARTS[..1]))),
            false => (&PARTS[..], self.split_release_call(key, "", Duration::ZERO)),
        };
        let scripts = [(script, &call(parts)), (smaller.0, &smaller.1)];
        match self.route.run_first(&scripts, slot).await? {
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
