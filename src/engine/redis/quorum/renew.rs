//! The renewal, the healing and the transfer of a lease.

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::inspect::HeldName;
use super::node::Node;
use super::scripts::{RELEASE, RENEW};
use super::votes::{Answer, Count};
use super::{PARTS, Quorum};
use crate::clock::Moment;
use crate::engine::redis::keys::{Part, RECORD_KEPT_MS};
use crate::engine::redis::ops::inspect::RECORD_UNDER_WAY;
use crate::engine::redis::scripts::TRANSFER;
use crate::engine::{Renewed, Result};
use crate::model::{Claim, OwnerToken, Ttl};

/// A command that heals is dropped if it was not sent within this time. So none arrives after the mark of a release, which
/// lasts an hour.
const LONGEST_HEAL: Duration = Duration::from_secs(60);

/// The shortest time that a renewal has for its answer. Otherwise it has an eighth of the ttl, so that it can be retried
/// several times while the lease lasts.
const MIN_RENEWAL_TIMEOUT: Duration = Duration::from_millis(80);

/// The answers of `renew.lua`: that the lease is extended, and that the node does not have it, although no client released it.
const EXTENDED: i64 = 1;
const IS_MISSING: i64 = 2;
/// The keys of a lease that is healed, for each name.
const HEALED: [Part; 4] = [Part::Lock, Part::Fence, Part::Metadata, Part::Counter];

/// The answer of `transfer.lua` of a node that has no record of the grant.
const RECORD_IS_MISSING: i64 = 2;

impl Quorum {
    /// Extends the lease on every node; a majority must still have it.
    ///
    /// # Behavior
    /// Nodes that lost the lease without a release are healed in the background. That is safe: a majority holds the lease until
    /// `sent + ttl` by its own clocks, and every other majority includes one of these nodes, which refuses any other owner. The
    /// lease on the healed node ends with theirs, so it creates no second holder. It only lets the lease survive the loss of the
    /// next node. Without a majority nothing is healed: a lease that vanished is not created again.
    pub(super) async fn renew(self: &Arc<Self>, claim: &Claim, ttl: Ttl) -> Result<Renewed> {
        let limit = self.node_timeout.min((ttl.duration() / 8).max(MIN_RENEWAL_TIMEOUT));
        let sent = Moment::now();
        let mut call = self.call(&RENEW, &PARTS, claim, claim.owner.as_str());
        call.arg(ttl.as_millis()).arg(ttl.as_millis() + RECORD_KEPT_MS);
        let call = Arc::new(call);
        let extended = CancellationToken::new();
        let mut votes = self.request(limit, |node| {
            let (quorum, claim, call, extended) = (self.clone(), claim.clone(), call.clone(), extended.clone());
            async move {
                let answer = node.number(&RENEW, &call).await;
                if matches!(answer, Ok(IS_MISSING)) {
                    quorum.clone().spawn(async move {
                        // The majority may answer later, or has answered already.
                        if tokio::time::timeout(limit, extended.cancelled()).await.is_ok() {
                            heal(quorum, node, claim, sent, ttl).await;
                        }
                    });
                }
                answer
            }
        });
        let decided = |answers: &[Answer<i64>]| Count::of(answers, |answer| *answer == EXTENDED).verdict();
        match votes.decide(limit, decided).await {
            Some(true) => {
                extended.cancel();
                Ok(Renewed::Extended)
            }
            Some(false) => Ok(Renewed::Lost),
            None => Err(self.no_majority("renew", &votes.answers, limit)),
        }
    }

    /// Makes `to` the owner on every node; a majority must still have the lease.
    ///
    /// # Behavior
    /// If the lease is lost, it is released on the nodes that have transferred it.
    pub(super) async fn transfer(self: &Arc<Self>, claim: &Claim, to: &OwnerToken) -> Result<Renewed> {
        let limit = self.vote_timeout(claim.ttl);
        self.write_records();
        let ttl = claim.ttl.as_millis();
        let mut call = self.call(&TRANSFER, &PARTS, claim, claim.owner.as_str());
        call.arg(to.as_str())
            .arg(ttl)
            .arg(ttl + RECORD_KEPT_MS)
            .arg(claim.process.pid)
            .arg(&claim.process.host);
        let mut demanding = call.clone();
        demanding.arg("with-records");
        let calls = Arc::new((demanding, call));
        let mut votes = self.request(limit, move |node| {
            let calls = calls.clone();
            async move {
                // The process of the grant may write the record a moment later.
                for _ in 0..2 {
                    match node.number(&TRANSFER, &calls.0).await? {
                        RECORD_IS_MISSING => tokio::time::sleep(RECORD_UNDER_WAY[0]).await,
                        done => return Ok(done == 1),
                    }
                }
                Ok(node.number(&TRANSFER, &calls.1).await? == 1)
            }
        });
        let decided = |answers: &[Answer<bool>]| Count::of(answers, |done| *done).verdict();
        match votes.decide(limit, decided).await {
            Some(true) => {
                // Requests of the old owner that are in flight must have no effect.
                self.lifetimes.end(&claim.owner, false);
                Ok(Renewed::Extended)
            }
            Some(false) => {
                if votes.answers.iter().any(|answer| !matches!(answer, Some(Ok(false)))) {
                    let mut transferred = claim.clone();
                    transferred.owner = to.clone();
                    // After a failure the rest expires. It does not change the answer.
                    let _ = self.release(&transferred, Duration::ZERO).await;
                }
                Ok(Renewed::Lost)
            }
            None => Err(self.no_majority("transfer", &votes.answers, limit)),
        }
    }
}

/// Writes a lease back to a node, as the majority has it.
async fn heal(quorum: Arc<Quorum>, node: Arc<Node>, claim: Claim, sent: Moment, ttl: Ttl) {
    let lifetime = quorum.lifetimes.join(&claim.owner);
    let held = quorum.held_name(claim.keys()[0].as_str()).await;
    let Some(HeldName {
        attempt: Some((owner, attempt)),
        info,
        is_certain: true,
        largest_fence: Some(fence),
    }) = held.ok().and_then(|mut held| held.pop())
    else {
        return;
    };
    let Some(holder) = info.holder else { return };
    let left = ttl.duration().saturating_sub(sent.elapsed()).as_millis();
    if owner != claim.owner.as_str() || lifetime.has_ended() || left == 0 {
        return;
    }
    let mut call = quorum.call(&RENEW, &HEALED, &claim, &owner);
    call.arg(left as u64)
        .arg(left as u64 + RECORD_KEPT_MS)
        .arg(attempt)
        .arg(fence.0)
        .arg(holder.since_ms)
        .arg(holder.process.pid)
        .arg(&holder.process.host);
    if let Some(metadata) = &info.metadata {
        call.arg(metadata);
    }
    let healed: Answer<i64> = tokio::time::timeout(LONGEST_HEAL, node.number(&RENEW, &call))
        .await
        .ok();
    if let Some(Err(failure)) = &healed {
        tracing::debug!(%failure, address = &*node.address, "a node could not be healed");
    }
    // The release may have reached the node before the healing, and found nothing.
    if lifetime.has_ended() {
        let mut release = quorum.call(&RELEASE, &PARTS, &claim, &owner);
        release.arg(0);
        let _ = tokio::time::timeout(quorum.node_timeout, node.number(&RELEASE, &release)).await;
    }
}
