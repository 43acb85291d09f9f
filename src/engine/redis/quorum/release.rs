//! Letting go: by the owner, or by force.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures_util::future::join_all;
use redis::{Cmd, Value};
use tokio_util::task::task_tracker::TaskTrackerToken;

use super::super::error::Failure;
#[cfg(unix)]
use super::super::fast_path::ReplySink;
#[cfg(unix)]
use super::super::fast_path::{ALONE, BatchRelease};
#[cfg(unix)]
use super::super::keys::Part;
use super::Quorum;
use super::cleanup::{BATCH, Remains};
use super::node::{number, silence};
#[cfg(unix)]
use super::scripts::RELEASE_MANY;
use super::scripts::{FORCE_RELEASE, RELEASE};
use super::tally::{Answer, Count, Tally};
#[cfg(unix)]
use super::wake::CHANNEL;
use super::withdraw::PARTS;
use crate::clock::Moment;
use crate::engine::{Released, Releases, Result};
use crate::model::{Claim, Key, Ttl};

impl Quorum {
    /// Frees what the owner holds on every node, by whichever attempt.
    ///
    /// # Behavior
    /// Returns as soon as a majority has answered in the same way. The other nodes are told all the same, again and again
    /// if need be, and whatever is still on its way to them is taken back when it arrives.
    pub(super) async fn release(self: &Arc<Self>, claim: &Claim, keep: Duration) -> Result<Released> {
        let until = Moment::now() + keep;
        let parting = Arc::new(Parting {
            quorum: self.clone(),
            call: OnceLock::new(),
            claim: claim.clone(),
            until,
            tally: Tally::new(self.nodes.len()),
            _urgent: self.urgent.token(),
        });
        parting.tell_nodes();
        let limit = self.patience;
        let (verdict, answers) = parting
            .tally
            .decide(limit, |answers| Count::of(answers, |freed| *freed).verdict())
            .await;
        self.released(verdict, &answers, limit)
    }

    /// Releases many claims. Each node gets them in batches.
    pub(super) async fn release_all(self: &Arc<Self>, claims: &[Claim], answer: &mut Releases<'_>) {
        let until = Moment::now();
        let limit = self.patience;
        for claim in claims {
            self.tenures.end(&claim.owner);
        }
        let tallies: Vec<Tally<bool>> = claims.iter().map(|_| Tally::new(self.nodes.len())).collect();
        let batch: Arc<[(Claim, Tally<bool>)]> = claims.iter().cloned().zip(tallies).collect();
        for index in 0..self.nodes.len() {
            self.spawn(release_on(self.clone(), index, batch.clone(), until));
        }
        let end = Moment::now() + limit;
        for (place, (_, tally)) in batch.iter().enumerate() {
            let decided = |answers: &[Answer<bool>]| Count::of(answers, |freed| *freed).verdict();
            let (verdict, answers) = tally.decide(end.remaining(), decided).await;
            answer(place, self.released(verdict, &answers, limit));
        }
    }

    fn released(&self, verdict: Option<bool>, answers: &[Answer<bool>], limit: Duration) -> Result<Released> {
        match verdict {
            Some(true) => Ok(Released::Freed),
            Some(false) => Ok(Released::NotHeld),
            None => Err(self.no_majority("release", answers, limit)),
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

/// Releases many claims on one node.
async fn release_on(quorum: Arc<Quorum>, index: usize, batch: Arc<[(Claim, Tally<bool>)]>, until: Moment) {
    let _urgent = quorum.urgent.token();
    let mut is_silent = false;
    for some in batch.chunks(BATCH) {
        let releases = join_all(some.iter().map(|(claim, _)| {
            let call = quorum.release_call(claim, until);
            let node = &quorum.nodes[index];
            async move { node.number(&RELEASE, &call).await }
        }));
        let answers = match is_silent {
            true => None,
            false => tokio::time::timeout(quorum.patience, releases).await.ok(),
        };
        is_silent |= answers.is_none();
        let answers = answers.unwrap_or_else(|| some.iter().map(|_| Err(silence())).collect());
        for ((claim, tally), answer) in some.iter().zip(answers) {
            if answer.is_err() {
                quorum.clean_up(index, claim, Remains::Lease { until }, false);
            }
            tally.cast(index, answer.map(|freed| freed == 1));
        }
    }
}

/// How the names of several releases are let go of.
#[cfg(unix)]
static FREEING: BatchRelease = BatchRelease {
    script: || &RELEASE_MANY,
    parts: [Part::Fence, Part::Metadata],
    to: CHANNEL,
};

/// A release on its way to the nodes. While it is, a close waits.
struct Parting {
    quorum: Arc<Quorum>,
    claim: Claim,
    until: Moment,
    /// The script's call, where one is needed.
    call: OnceLock<Cmd>,
    tally: Tally<bool>,
    _urgent: TaskTrackerToken,
}

impl Parting {
    fn tell_nodes(self: &Arc<Self>) {
        #[cfg(unix)]
        {
            let who: Arc<dyn ReplySink> = self.clone();
            let lanes: Vec<_> = self.quorum.nodes.iter().map(|node| node.link.fast_path()).collect();
            let numbers = lanes.iter().map(|lane| lane.as_ref().map_or(0, |lane| lane.number()));
            self.quorum.tenures.end_on(&self.claim.owner, numbers);
            for (index, lane) in lanes.into_iter().enumerate() {
                let Some(lane) = lane else {
                    self.tell_by_connection(index);
                    continue;
                };
                if self.until.is_past() {
                    lane.forget(&self.claim.owner);
                } else {
                    lane.write_records();
                }
                if self.is_simple() {
                    lane.release_to_sink(&who, index, &FREEING, &self.claim);
                } else {
                    lane.call_to_sink(&who, index, |out| self.call().write_packed_command(out));
                }
            }
        }
        #[cfg(not(unix))]
        {
            self.quorum.tenures.end(&self.claim.owner);
            for index in 0..self.quorum.nodes.len() {
                self.tell_by_connection(index);
            }
        }
    }

    fn call(&self) -> &Cmd {
        self.call
            .get_or_init(|| self.quorum.release_call(&self.claim, self.until))
    }

    /// Whether it may be told together with others.
    #[cfg(unix)]
    fn is_simple(&self) -> bool {
        self.until.is_past() && self.claim.keys().len() == 1
    }

    fn tell_by_connection(self: &Arc<Self>, index: usize) {
        let parting = self.clone();
        self.quorum.spawn(async move {
            let quorum = &parting.quorum;
            let answer = quorum.nodes[index].run(&RELEASE, parting.call());
            match tokio::time::timeout(quorum.patience, answer).await {
                Ok(answer) => parting.answered(index, answer),
                Err(_) => parting.remains(index),
            }
        });
    }

    /// Puts the release on the node's clean-up list, which sends it until the node answers. No close waits for that.
    fn remains(&self, index: usize) {
        let until = self.until;
        self.quorum
            .clean_up(index, &self.claim, Remains::Lease { until }, false);
    }

    fn answered(&self, index: usize, answer: std::result::Result<Value, Failure>) {
        let answer = answer.and_then(|answer| number(&answer));
        if answer.is_err() {
            self.remains(index);
        }
        self.tally.cast(index, answer.map(|freed| freed == 1));
    }
}

#[cfg(unix)]
impl ReplySink for Parting {
    fn on_reply(self: Arc<Self>, index: usize, reply: redis::RedisResult<Value>) {
        let answer = reply.map_err(Failure::from);
        let is_alone = matches!(&answer, Ok(Value::Int(ALONE)));
        if is_alone || matches!(&answer, Err(failure) if failure.is_unknown_script()) {
            return self.tell_by_connection(index);
        }
        self.answered(index, answer);
    }
}
