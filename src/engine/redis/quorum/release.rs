//! Letting go: by the owner, or by force.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use redis::{Cmd, Value};
use tokio_util::task::task_tracker::TaskTrackerToken;

use super::super::RECORD_KEPT_MS;
#[cfg(unix)]
use super::super::asked::Told;
use super::super::failure::Failure;
#[cfg(unix)]
use super::super::{
    keys::Part,
    lane::{ALONE, Freeing},
};
use super::node::number;
#[cfg(unix)]
use super::scripts::RELEASE_MANY;
use super::scripts::{FORCE_RELEASE, RELEASE};
use super::tally::{Count, Tally};
#[cfg(unix)]
use super::wake::CHANNEL;
use super::withdraw::PARTS;
use super::{AGAIN, Quorum};
use crate::clock::Moment;
use crate::engine::{Released, Result};
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
        match verdict {
            Some(true) => Ok(Released::Freed),
            Some(false) => Ok(Released::NotHeld),
            None => Err(self.no_majority("release", &answers, limit)),
        }
    }

    fn release_call(&self, claim: &Claim, until: Moment) -> Cmd {
        let keep = until.remaining();
        let keep = if keep.is_zero() {
            0
        } else {
            Ttl::clamped(keep).as_millis()
        };
        let mut call = self.call(&RELEASE, &PARTS, claim, claim.owner.as_str());
        call.arg(keep).arg(keep + RECORD_KEPT_MS);
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

/// How the names of several releases are let go of.
#[cfg(unix)]
static FREEING: Freeing = Freeing {
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
            let who: Arc<dyn Told> = self.clone();
            let lanes: Vec<_> = self.quorum.nodes.iter().map(|node| node.link.lane()).collect();
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
                    lane.free_and_tell(&who, index, &FREEING, &self.claim);
                } else {
                    lane.tell(&who, index, |out| self.call().write_packed_command(out));
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
            let answer = quorum.nodes[index].link.run(&RELEASE, parting.call());
            match tokio::time::timeout(quorum.patience, answer).await {
                Ok(answer) => parting.answered(index, answer),
                Err(_) => parting.tell_again(index),
            }
        });
    }

    fn answered(&self, index: usize, answer: std::result::Result<Value, Failure>) {
        let answer = answer.and_then(|answer| number(&answer));
        if answer.is_err() {
            self.tell_again(index);
        }
        self.tally.cast(index, answer.map(|freed| freed == 1));
    }

    /// Tells a node that has not heard, until it has. No close waits for that.
    fn tell_again(&self, index: usize) {
        let (quorum, claim, until) = (self.quorum.clone(), self.claim.clone(), self.until);
        self.quorum.spawn(async move {
            for pause in AGAIN {
                tokio::time::sleep(pause.min(claim.ttl.duration())).await;
                let call = quorum.release_call(&claim, until);
                let answer = quorum.nodes[index].number(&RELEASE, &call);
                if let Ok(Ok(_)) = tokio::time::timeout(quorum.patience, answer).await {
                    return;
                }
            }
        });
    }
}

#[cfg(unix)]
impl Told for Parting {
    fn told(self: Arc<Self>, index: usize, reply: redis::RedisResult<Value>) {
        let answer = reply.map_err(Failure::from);
        let is_alone = matches!(&answer, Ok(Value::Int(ALONE)));
        if is_alone || matches!(&answer, Err(failure) if failure.is_unknown_script()) {
            return self.tell_by_connection(index);
        }
        self.answered(index, answer);
    }
}
