//! Releases: by the owner, and by force.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use redis::{Cmd, Value};
use tokio_util::task::task_tracker::TaskTrackerToken;

use super::cleanup::Remains;
use super::node::number;
use super::scripts::RELEASE_MANY;
use super::scripts::{FORCE_RELEASE, RELEASE};
use super::votes::{Answer, Count, Votes};
use super::{PARTS, Quorum};
use crate::clock::Moment;
use crate::engine::redis::connection::Connection;
use crate::engine::redis::error::Failure;
use crate::engine::redis::keys::{FREE_CHANNEL, Part};
use crate::engine::redis::wire::{ALONE, BatchRelease, ReplySink, Request};
use crate::engine::{Answers, Released, Result};
use crate::model::{Claim, Key, Ttl};

impl Quorum {
    /// Releases the names of the owner on every node, for all of its attempts.
    ///
    /// # Behavior
    /// Returns when a majority has given the same answer. The other nodes get the release, too; it is repeated until they confirm
    /// it. Votes of the owner that are still in flight are rolled back when they arrive.
    pub(super) async fn release(self: &Arc<Self>, claim: &Claim, keep: Duration) -> Result<Released> {
        let round = ReleaseRound::begin(self, claim, Moment::now() + keep);
        self.outcome(&round, self.node_timeout).await
    }

    /// Releases many claims.
    pub(super) async fn release_all(
        self: &Arc<Self>,
        claims: &[&Claim],
        keep: Duration,
        answer: &mut Answers<'_, Released>,
    ) {
        let rounds = claims
            .iter()
            .map(|claim| ReleaseRound::begin(self, claim, Moment::now() + keep));
        let rounds: Vec<_> = rounds.collect();
        let end = Moment::now() + self.node_timeout;
        for (index, round) in rounds.iter().enumerate() {
            answer(index, self.outcome(round, end.remaining()).await);
        }
    }

    async fn outcome(&self, round: &ReleaseRound, limit: Duration) -> Result<Released> {
        let decided = |answers: &[Answer<bool>]| Count::of(answers, |released| *released).verdict();
        match round.votes.decide(limit, decided).await {
            (Some(true), _) => Ok(Released::Freed),
            (Some(false), _) => Ok(Released::NotHeld),
            (None, answers) => Err(self.no_majority("release", &answers, self.node_timeout)),
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
        let votes = self.request(self.node_timeout, |node| {
            let call = call.clone();
            async move { Ok(node.number(&FORCE_RELEASE, &call).await? == 1) }
        });
        let decided = |answers: &[Answer<bool>]| Count::of(answers, |released| *released).verdict();
        let (_, answers) = votes.decide(self.node_timeout, decided).await;
        let count = Count::of(&answers, |released| *released);
        if count.yes + count.no < count.majority() {
            return Err(self.no_majority("force_release", &answers, self.node_timeout));
        }
        // The nodes that held it may have been a majority together with the silent ones.
        Ok(count.yes > 0 && count.nodes - count.no >= count.majority())
    }
}

/// Bit in the answer of a release script: the owner held every name. The rest is the number of receivers of its messages.
const HELD: i64 = 1;

/// The script for several releases that share one call.
static RELEASE_BATCH: BatchRelease = BatchRelease {
    script: || &RELEASE_MANY,
    parts: [Part::Fence, Part::Metadata],
    last: None,
    to: FREE_CHANNEL,
};

/// The release of one claim on all nodes. A close waits until it ends.
struct ReleaseRound {
    quorum: Arc<Quorum>,
    claim: Claim,
    until: Moment,
    /// The call of the script, made when it is needed.
    call: OnceLock<Cmd>,
    votes: Votes<bool>,
    sent: Moment,
    _urgent: TaskTrackerToken,
}

impl ReleaseRound {
    /// Sends the release to every node.
    fn begin(quorum: &Arc<Quorum>, claim: &Claim, until: Moment) -> Arc<Self> {
        let round = Arc::new(ReleaseRound {
            quorum: quorum.clone(),
            call: OnceLock::new(),
            claim: claim.clone(),
            until,
            votes: Votes::new(quorum.nodes.len()),
            sent: Moment::now(),
            _urgent: quorum.urgent.token(),
        });
        round.send();
        round
    }

    fn send(self: &Arc<Self>) {
        let sink: Arc<dyn ReplySink> = self.clone();
        let connections: Vec<_> = self.quorum.nodes.iter().map(|node| node.link.current()).collect();
        let number = |connection: &Option<Arc<Connection>>| connection.as_ref().map_or(0, |one| one.generation);
        self.quorum
            .lifetimes
            .end_on(&self.claim.owner, connections.iter().map(number));
        for (index, connection) in connections.into_iter().enumerate() {
            let link = &self.quorum.nodes[index].link;
            if self.until.is_past() {
                link.forget_record(&self.claim.owner);
            } else {
                link.write_records();
            }
            let Some(connection) = connection else {
                self.send_in_task(index);
                continue;
            };
            if self.is_batchable() {
                let (release, more) = (&RELEASE_BATCH, None);
                let request = Request::Release { release, more };
                connection.wire.request_to_sink(&sink, index, &self.claim, &request);
            } else {
                connection.wire.call_to_sink(&sink, index, self.call());
            }
        }
    }

    fn call(&self) -> &Cmd {
        self.call
            .get_or_init(|| self.quorum.release_call(&self.claim, self.until))
    }

    /// Returns whether it may share a call with other releases.
    fn is_batchable(&self) -> bool {
        self.until.is_past() && self.claim.keys().len() == 1
    }

    fn send_in_task(self: &Arc<Self>, index: usize) {
        let round = self.clone();
        self.quorum.spawn(async move {
            let quorum = &round.quorum;
            let answer = quorum.nodes[index].run(&RELEASE, round.call());
            match tokio::time::timeout(quorum.node_timeout, answer).await {
                Ok(answer) => round.answered(index, answer),
                Err(_) => round.clean_up(index),
            }
        });
    }

    /// Adds the release to the node's clean-up list, which sends it until the node answers. No close waits for that.
    fn clean_up(&self, index: usize) {
        let until = self.until;
        self.quorum
            .clean_up(index, &self.claim, Remains::Lease { until }, false);
    }

    /// Delays this service's next attempts for the names, if the messages of a node had receivers other than this service.
    fn leave_turns(&self, index: usize, receivers: i64) {
        for key in self.claim.keys() {
            let own = self.quorum.nodes[index]
                .link
                .is_subscribed_to(&self.quorum.channel(key));
            if receivers > i64::from(own) {
                self.quorum.turns.released(key, self.sent.elapsed());
            }
        }
    }

    fn answered(&self, index: usize, answer: std::result::Result<Value, Failure>) {
        self.quorum.nodes[index].script_answered(&answer);
        let answer = answer.and_then(|answer| number(&answer));
        if answer.is_err() {
            self.clean_up(index);
        }
        // Not after the decision: a slow node must not delay the next attempt by its round trip.
        if let Ok(answer) = answer
            && self.until.is_past()
            && self.votes.is_open()
        {
            self.leave_turns(index, answer / 2);
        }
        self.votes.cast(index, answer.map(|answer| answer & HELD != 0));
    }
}

impl ReplySink for ReleaseRound {
    fn on_reply(self: Arc<Self>, index: usize, reply: redis::RedisResult<Value>) {
        let answer = reply.map_err(Failure::from);
        let is_alone = matches!(&answer, Ok(Value::Int(ALONE)));
        if is_alone || matches!(&answer, Err(failure) if failure.is_unknown_script()) {
            return self.send_in_task(index);
        }
        self.answered(index, answer);
    }
}
