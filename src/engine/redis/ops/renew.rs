//! Renews leases, many of them with one script.
//!
//! A single renewal is a round trip, and the server spends more time on receiving the command than on its execution. Leases
//! that are due together share scripts, which are sent one after the other without waiting for answers.
//!
//! The event loop reads the reply, and wakes the I/O thread, on which a renewal runs. That takes some 60 µs of CPU for each read: with
//! 10 000 leases and a ttl of 3 s there are 95 reads per second, 0.6 % of a core.

use std::collections::HashMap;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use redis::{Cmd, Value};

use super::multi_slot::part;
use crate::engine::redis::RedisEngine;
use crate::engine::redis::error::Failure;
use crate::engine::redis::keys::Part;
use crate::engine::redis::scripts::{RENEW, Script};
use crate::engine::redis::topology::Route;
use crate::engine::{Answers, Renewal, Renewed};
use crate::model::{Claim, Key};

/// The largest number of names in one script (more for a lease that has more of them). They block the server for some 0.2
/// ms.
const TOGETHER: usize = 64;

impl RedisEngine {
    /// Renews one lease, in one slot or in several.
    pub(in super::super) async fn renew_whole(&self, renewal: Renewal<'_>) -> Result<Renewed, Failure> {
        match self.parts(renewal.claim) {
            None => self.renew_part(renewal).await,
            Some(parts) => self.renew_parts(&parts, renewal.ttl).await,
        }
    }

    /// Renews one lease whose names are in one slot.
    pub(in super::super) async fn renew_part(&self, renewal: Renewal<'_>) -> Result<Renewed, Failure> {
        match self.run_renewals(std::slice::from_ref(&renewal), &[0]).await {
            // The slot moves, and no node has all of the names.
            Err(failure) if failure.is_split() && renewal.claim.keys().len() > 1 => {
                let parts: Vec<Claim> = renewal
                    .claim
                    .keys()
                    .iter()
                    .map(|key| part(renewal.claim, std::slice::from_ref(key)))
                    .collect();
                Box::pin(self.renew_parts(&parts, renewal.ttl)).await
            }
            answers => answers?.first().copied().ok_or(UNEXPECTED),
        }
    }

    /// Renews many leases, and answers for each of them as soon as its script is answered.
    pub(in super::super) async fn renew_many(&self, renewals: &[Renewal<'_>], answer: &mut Answers<'_, Renewed>) {
        let scripts = self.scripts(renewals).into_iter();
        let mut scripts: FuturesUnordered<_> = scripts
            .map(|group| async move {
                let answers = match group[..] {
                    [alone] => self.renew_whole(renewals[alone]).await.map(|renewed| vec![renewed]),
                    _ => self.run_renewals(renewals, &group).await,
                };
                (group, answers)
            })
            .collect();
        while let Some((group, answers)) = scripts.next().await {
            match answers {
                Ok(answers) => {
                    for (index, renewed) in group.into_iter().zip(answers) {
                        answer(index, Ok(renewed));
                    }
                }
                // One lease may be the cause, or keys on several nodes (a proxy that spreads the keys, a slot that moves): each is
                // renewed alone.
                Err(failure) if group.len() > 1 && (failure.is_split() || !failure.retryable()) => {
                    let mut alone: FuturesUnordered<_> = group
                        .into_iter()
                        .map(|index| async move { (index, self.renew_whole(renewals[index]).await) })
                        .collect();
                    while let Some((index, renewed)) = alone.next().await {
                        answer(index, renewed.map_err(|failure| failure.during("renew")));
                    }
                }
                Err(failure) => {
                    for index in group {
                        answer(index, Err(failure.clone().during("renew")));
                    }
                }
            }
        }
    }

    /// Groups the renewals into scripts. No script uses two slots of a cluster. A lease that needs several is alone.
    fn scripts(&self, renewals: &[Renewal<'_>]) -> Vec<Vec<usize>> {
        if !self.route.has_slots() {
            return grouped(renewals, (0..renewals.len()).collect());
        }
        let mut slots: HashMap<u16, Vec<usize>> = HashMap::new();
        let mut scripts = Vec::new();
        for (index, renewal) in renewals.iter().enumerate() {
            let mut keys = renewal.claim.keys().iter().map(|key| self.slot(key));
            match keys.next() {
                Some(first) if keys.all(|slot| slot == first) => slots.entry(first).or_default().push(index),
                _ => scripts.push(vec![index]),
            }
        }
        scripts.extend(slots.into_values().flat_map(|indices| grouped(renewals, indices)));
        scripts
    }

    /// Runs one script for the renewals with these indices.
    async fn run_renewals(&self, renewals: &[Renewal<'_>], group: &[usize]) -> Result<Vec<Renewed>, Failure> {
        const PARTS: [Part; 3] = [Part::Lock, Part::Fence, Part::Metadata];
        let has_metadata = group.iter().any(|index| renewals[*index].claim.metadata.is_some());
        let call = self.renewal_call(renewals, group, if has_metadata { &PARTS } else { &PARTS[..2] });
        let slot = self.slot(&renewals[group[0]].claim.keys()[0]);
        let answer = match (&self.route, &self.replicated) {
            (Route::Cluster(_), None) => {
                let smaller = self.renewal_call(renewals, group, &PARTS[..1]);
                let scripts: [(&Script, &Cmd); 2] = [(&RENEW, &call), (&RENEW, &smaller)];
                self.route.run_first(&scripts, slot, None).await?
            }
            _ => self.run_safely(&RENEW, &call, slot, None).await?,
        };
        let Value::BulkString(digits) = answer else {
            return Err(UNEXPECTED);
        };
        let answers = digits.iter().map(|digit| match digit {
            b'1' => Ok(Renewed::Extended),
            b'0' => Ok(Renewed::Lost),
            _ => Err(UNEXPECTED),
        });
        let answers: Vec<Renewed> = answers.collect::<Result<_, _>>()?;
        if answers.len() == group.len() {
            Ok(answers)
        } else {
            Err(UNEXPECTED)
        }
    }

    fn renewal_call(&self, renewals: &[Renewal<'_>], group: &[usize], parts: &[Part]) -> Cmd {
        let claims = group.iter().map(|index| renewals[*index].claim);
        let names = claims.flat_map(|claim| claim.keys()).map(Key::as_str);
        let mut call = RENEW.call(&self.layout, parts, names);
        call.arg(self.fence_lasts());
        for index in group {
            let Renewal { claim, ttl } = renewals[*index];
            call.arg(claim.owner.as_str())
                .arg(ttl.as_millis())
                .arg(claim.keys().len());
        }
        call
    }
}

const UNEXPECTED: Failure = Failure::Unexpected("renew.lua");

/// Groups the renewals with these indices into scripts.
fn grouped(renewals: &[Renewal<'_>], indices: Vec<usize>) -> Vec<Vec<usize>> {
    let names_of = |index: usize| renewals[index].claim.keys().len();
    let names: usize = indices.iter().copied().map(names_of).sum();
    // Scripts of equal size: a nearly empty last one costs as much to receive as a full one.
    let most = names.div_ceil(names.div_ceil(TOGETHER).max(1));
    let mut groups: Vec<Vec<usize>> = Vec::with_capacity(names.div_ceil(TOGETHER));
    let mut room = 0;
    for index in indices {
        let names = names_of(index);
        match groups.last_mut() {
            Some(group) if names <= room => {
                group.push(index);
                room -= names;
            }
            _ => {
                groups.push(vec![index]);
                room = most.saturating_sub(names);
            }
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::model::{Claim, OwnerToken, Process, Ttl};

    /// Returns the sizes of the groups for claims with these numbers of names.
    fn sizes(names: &[usize]) -> Vec<usize> {
        let process = Arc::new(Process::current());
        let ttl = Ttl::clamped(std::time::Duration::from_secs(1));
        let claims: Vec<Claim> = names
            .iter()
            .map(|count| {
                let keys: Vec<Key> = (0..*count).map(|i| Key::new(&i.to_string()).unwrap()).collect();
                Claim::new(&keys, OwnerToken::fresh(), ttl, process.clone())
            })
            .collect();
        let renewals: Vec<Renewal<'_>> = claims.iter().map(|claim| Renewal { claim, ttl }).collect();
        let groups = grouped(&renewals, (0..renewals.len()).collect());
        assert_eq!(
            groups.iter().flatten().copied().collect::<Vec<_>>(),
            (0..names.len()).collect::<Vec<_>>(),
            "each of them once"
        );
        groups.iter().map(Vec::len).collect()
    }

    #[test]
    fn renewals_are_spread_evenly_over_as_few_scripts_as_may_be() {
        assert_eq!(sizes(&[]), [0; 0]);
        assert_eq!(sizes(&[1]), [1]);
        assert_eq!(sizes(&[1; TOGETHER]), [TOGETHER]);
        assert_eq!(sizes(&[1; TOGETHER + 1]), [TOGETHER / 2 + 1, TOGETHER / 2]);
        assert_eq!(sizes(&[1; 150]), [50, 50, 50]);
    }

    #[test]
    fn a_claim_of_many_names_counts_as_many() {
        assert_eq!(sizes(&[40, 40, 40]), [1, 1, 1]);
        assert_eq!(sizes(&[1, 5 * TOGETHER, 1]), [1, 1, 1], "never split");
        assert_eq!(sizes(&[2; TOGETHER]), [TOGETHER / 2, TOGETHER / 2]);
    }
}
