//! Letting go: by the owner, or by force.

use std::sync::Arc;
use std::time::Duration;

use super::super::FENCE_KEPT_MS;
use super::super::keys::Part;
use super::scripts::{FORCE_RELEASE, RELEASE};
use super::tally::{Count, Tally};
use super::{AGAIN, Quorum};
use crate::clock::Moment;
use crate::engine::{Released, Result};
use crate::model::{Claim, Key, Ttl};

const PARTS: [Part; 3] = [Part::Lock, Part::Fence, Part::Metadata];

impl Quorum {
    /// Frees what the owner holds on every node, by whichever attempt.
    ///
    /// # Behavior
    /// Returns as soon as a majority has answered in the same way. The other nodes are told all the same, again and again
    /// if need be, and whatever is still on its way to them is taken back when it arrives.
    pub(super) async fn release(self: &Arc<Self>, claim: &Claim, keep: Duration) -> Result<Released> {
        self.tenures.end(&claim.owner);
        let until = Moment::now() + keep;
        let limit = self.patience;
        let tally = Arc::new(Tally::new(self.nodes.len()));
        for index in 0..self.nodes.len() {
            self.spawn(let_go(self.clone(), index, claim.clone(), until, tally.clone()));
        }
        let (verdict, answers) = tally
            .decide(limit, |answers| Count::of(answers, |freed| *freed).verdict())
            .await;
        match verdict {
            Some(true) => Ok(Released::Freed),
            Some(false) => Ok(Released::NotHeld),
            None => Err(self.no_majority("release", &answers, limit)),
        }
    }

    fn release_call(&self, claim: &Claim, until: Moment) -> redis::Cmd {
        let keep = until.remaining();
        let keep = if keep.is_zero() {
            0
        } else {
            Ttl::clamped(keep).as_millis()
        };
        let mut call = self.call(&RELEASE, &PARTS, claim, claim.owner.as_str());
        call.arg(keep).arg(keep + FENCE_KEPT_MS);
        call
    }

    /// Frees a name on every node, whoever holds it. `true` when, as far as can be told, somebody did.
    pub(super) async fn free(self: &Arc<Self>, key: &Key) -> Result<bool> {
        let call = FORCE_RELEASE.call(&self.layout, &PARTS, std::iter::once(key.as_str()));
        let tally = self.ask_number(self.patience, &FORCE_RELEASE, call, |freed| freed == 1);
        let (_, answers) = tally
            .decide(self.patience, |answers| Count::of(answers, |freed| *freed).verdict())
            .await;
        let count = Count::of(&answers, |freed| *freed);
        if count.yes + count.no < count.majority() {
            return Err(self.no_majority("force_release", &answers, self.patience));
        }
        // With a node that says nothing, the others that were held may have been a majority with it.
        Ok(count.yes > 0 && count.nodes - count.no >= count.majority())
    }
}

/// Tells one node, until it has heard.
async fn let_go(quorum: Arc<Quorum>, index: usize, claim: Claim, until: Moment, tally: Arc<Tally<bool>>) {
    let node = &quorum.nodes[index];
    let urgent = quorum.urgent.token();
    let call = quorum.release_call(&claim, until);
    if let Ok(answer) = tokio::time::timeout(quorum.patience, node.number(&RELEASE, &call)).await {
        let heard = answer.is_ok();
        tally.cast(index, answer.map(|freed| freed == 1));
        if heard {
            return;
        }
    }
    drop(urgent);
    for pause in AGAIN {
        tokio::time::sleep(pause.min(claim.ttl.duration())).await;
        let call = quorum.release_call(&claim, until);
        if let Ok(Ok(_)) = tokio::time::timeout(quorum.patience, node.number(&RELEASE, &call)).await {
            return;
        }
    }
}
