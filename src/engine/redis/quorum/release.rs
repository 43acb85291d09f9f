//! Releases: by the owner, and by force.

use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, Value};
use tokio_util::task::task_tracker::TaskTrackerToken;

use super::cleanup::Remains;
use super::node::{Node, number};
use super::scripts::{FORCE_RELEASE, RELEASE, RELEASE_MANY};
use super::votes::{Answer, Count, Votes};
use super::{PARTS, Quorum};
use crate::clock::Moment;
use crate::engine::redis::error::Failure;
use crate::engine::redis::keys::{FREE_CHANNEL, Part};
use crate::engine::redis::wire::{ALONE, BatchRelease, Request};
use crate::engine::{Released, Result};
use crate::model::{Claim, Key, Ttl};

/// Bit in the answer of a release script: the owner held every name. The rest is the number of receivers of its messages.
const HELD: i64 = 1;

/// The script for several releases that share one call.
static RELEASE_BATCH: BatchRelease = BatchRelease {
    script: || &RELEASE_MANY,
    parts: [Part::Fence, Part::Metadata],
    last: None,
    to: FREE_CHANNEL,
};

impl Quorum {
    /// Releases the names of the owner on every node, for all of its attempts.
    ///
    /// # Behavior
    /// Returns when a majority has given the same answer. The other nodes get the release, too; it is repeated until they confirm
    /// it. Votes of the owner that are still in flight are rolled back when they arrive.
    pub(super) async fn release(self: &Arc<Self>, claim: &Claim, keep: Duration) -> Result<Released> {
        self.lifetimes.end(&claim.owner, true);
        let release = Arc::new(Release {
            quorum: self.clone(),
            claim: claim.clone(),
            until: Moment::now() + keep,
            _urgent: self.urgent.token(),
        });
        let sent = Moment::now();
        let requests = (0..self.nodes.len()).map(|index| release.clone().send(index));
        let mut votes = Votes::new(self, requests);
        let held = |answers: &[Answer<i64>]| Count::of(answers, |answer| answer & HELD != 0).verdict();
        let verdict = votes.decide(self.node_timeout, held).await;
        if release.until.is_past() {
            for (node, answer) in self.nodes.iter().zip(&votes.answers) {
                if let Some(Ok(answer)) = answer {
                    self.leave_turns(claim, node, answer / 2, sent.elapsed());
                }
            }
        }
        match verdict {
            Some(true) => Ok(Released::Freed),
            Some(false) => Ok(Released::NotHeld),
            None => Err(self.no_majority("release", &votes.answers, self.node_timeout)),
        }
    }

    /// Delays this service's next attempts for the names, if the messages of a node had receivers other than this service.
    fn leave_turns(&self, claim: &Claim, node: &Node, receivers: i64, round_trip: Duration) {
        for key in claim.keys() {
            let own = node.link.is_subscribed_to(&self.channel(key));
            if receivers > i64::from(own) {
                self.turns.released(key, round_trip);
            }
        }
    }

    pub(super) fn release_call(&self, claim: &Claim, until: Moment) -> Cmd {
        let keep = until.remaining();
        let keep = if keep.is_zero() {
            0
        } else {
            Ttl::clamped(keep).as_millis()
        };
        let mut call = self.call(&RELEASE, &PARTS, claim, claim.owner.as_str());
        call.arg(keep);
        call
    }

    /// Releases a name on every node, for any holder. Returns `true` if a majority held it, or may have with the silent nodes.
    pub(super) async fn force_release(self: &Arc<Self>, key: &Key) -> Result<bool> {
        let call = FORCE_RELEASE.call(&self.layout, &PARTS, std::iter::once(key.as_str()));
        let call = Arc::new(call);
        let mut votes = self.request(self.node_timeout, |node| {
            let call = call.clone();
            async move { Ok(node.number(&FORCE_RELEASE, &call).await? == 1) }
        });
        let decided = |answers: &[Answer<bool>]| Count::of(answers, |released| *released).verdict();
        votes.decide(self.node_timeout, decided).await;
        let count = Count::of(&votes.answers, |released| *released);
        if count.yes + count.no < count.majority() {
            return Err(self.no_majority("force_release", &votes.answers, self.node_timeout));
        }
        // The nodes that held it may have been a majority together with the silent ones.
        Ok(count.yes > 0 && count.nodes - count.no >= count.majority())
    }
}

/// The release of one claim on all nodes. A close waits until it ends.
struct Release {
    quorum: Arc<Quorum>,
    claim: Claim,
    until: Moment,
    _urgent: TaskTrackerToken,
}

impl Release {
    /// Releases the names on a node. Without an answer it adds the release to the node's clean-up list, which sends it until the node
    /// answers. A close waits for the first attempt of that.
    async fn send(self: Arc<Self>, index: usize) -> Answer<i64> {
        let node = &self.quorum.nodes[index];
        if self.until.is_past() {
            node.link.forget_record(&self.claim.owner);
        } else {
            node.link.write_records();
        }
        let answer = async {
            if let Some(answer) = self.send_in_batch(node).await? {
                return Ok(answer);
            }
            let call = self.quorum.release_call(&self.claim, self.until);
            number(&Box::pin(node.run(&RELEASE, &call)).await?)
        };
        let answer = tokio::time::timeout(self.quorum.node_timeout, answer).await.ok();
        if let Some(answer) = &answer {
            node.script_answered(answer);
        }
        if !matches!(answer, Some(Ok(_))) {
            let until = self.until;
            self.quorum.clean_up(index, &self.claim, Remains::Lease { until });
        }
        answer
    }

    /// Releases one name by a script that the releases of one tick share. `None`: the release has to be made alone.
    async fn send_in_batch(&self, node: &Node) -> std::result::Result<Option<i64>, Failure> {
        if !self.until.is_past() || self.claim.keys().len() > 1 {
            return Ok(None);
        }
        let Some(connection) = node.link.current() else {
            return Ok(None);
        };
        let (release, more) = (&RELEASE_BATCH, None);
        let released = connection.wire.request(&self.claim, Request::Release { release, more });
        match node.link.exchange(&connection, released).await? {
            Value::Int(ALONE) => Ok(None),
            Value::Int(answer) => Ok(Some(answer)),
            _ => Err(Failure::Unexpected("quorum/release_many.lua")),
        }
    }
}
