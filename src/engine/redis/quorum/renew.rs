//! Keeping a lease: renewal, healing, and handing it over.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::super::keys::RECORD_KEPT_MS;
use super::Quorum;
use super::look::Standing;
use super::node::Renewal;
use super::scripts::{HEAL, RELEASE, RENEW, TRANSFER};
use super::tally::{Answer, Count};
use super::withdraw::{PARTS, VOTED};
use crate::clock::Moment;
use crate::engine::{Renewed, Result};
use crate::model::{Claim, OwnerToken, Ttl};

/// How long a command that heals may wait until it is sent; then it is dropped. So none arrives after the mark of a release,
/// which lasts an hour.
const LONGEST_HEAL: Duration = Duration::from_secs(60);

/// A renewal has an eighth of the ttl for its answer, so that it is tried several times while the lease lasts; but never
/// less than this.
const LEAST_RENEWAL_PATIENCE: Duration = Duration::from_millis(80);

impl Quorum {
    /// Extends the lease on every node; a majority must still have it.
    ///
    /// # Behavior
    /// Nodes that lost it by no doing of anybody's are healed in the background. That is safe, because a majority holds the
    /// lease until `sent + ttl` by its own clocks: whoever else wants a majority before that meets one of those nodes, and is
    /// refused there. The healed node's vote ends with theirs, and can make nobody the holder who is not. It only makes the
    /// lease survive the loss of the next node. Without a majority nothing is healed: what vanished stays away.
    pub(super) async fn renew(self: &Arc<Self>, claim: &Claim, ttl: Ttl) -> Result<Renewed> {
        let limit = self.patience.min((ttl.duration() / 8).max(LEAST_RENEWAL_PATIENCE));
        let sent = Moment::now();
        let mut call = self.call(&RENEW, &PARTS, claim, claim.owner.as_str());
        call.arg(ttl.as_millis()).arg(ttl.as_millis() + RECORD_KEPT_MS);
        let call = Arc::new(call);
        let extended = Arc::new(AtomicBool::new(false));
        let tally = Arc::new(super::Tally::new(self.nodes.len()));
        for index in 0..self.nodes.len() {
            let (quorum, claim, call) = (self.clone(), claim.clone(), call.clone());
            let (tally, extended) = (tally.clone(), extended.clone());
            self.spawn(async move {
                let answer = quorum.nodes[index].renewal(&call);
                let Ok(answer) = tokio::time::timeout(limit, answer).await else {
                    return;
                };
                let late = tally.cast(index, answer);
                if matches!(late, Some(Ok(Renewal::Missing))) && extended.load(Ordering::Acquire) {
                    heal(quorum, index, claim, sent, ttl).await;
                }
            });
        }
        let (verdict, answers) = tally
            .decide(limit, |answers| {
                let verdict = Count::of(answers, |answer| *answer == Renewal::Extended).verdict();
                // Before the tally closes: a later answer looks at it.
                extended.store(verdict == Some(true), Ordering::Release);
                verdict
            })
            .await;
        match verdict {
            Some(true) => {
                for (index, answer) in answers.iter().enumerate() {
                    if matches!(answer, Some(Ok(Renewal::Missing))) {
                        self.spawn(heal(self.clone(), index, claim.clone(), sent, ttl));
                    }
                }
                Ok(Renewed::Extended)
            }
            Some(false) => Ok(Renewed::Lost),
            None => Err(self.no_majority("renew", &answers, limit)),
        }
    }

    /// Makes `to` the owner on every node; a majority must still have the lease.
    ///
    /// # Behavior
    /// Where it turns out to be lost, the nodes that handed it over are freed: a part of a lease is nobody's.
    pub(super) async fn transfer(self: &Arc<Self>, claim: &Claim, to: &OwnerToken) -> Result<Renewed> {
        let limit = self.limit(claim.ttl);
        #[cfg(unix)]
        self.settle_records(limit).await;
        let ttl = claim.ttl.as_millis();
        let mut call = self.call(&TRANSFER, &PARTS, claim, claim.owner.as_str());
        call.arg(to.as_str())
            .arg(ttl)
            .arg(ttl + RECORD_KEPT_MS)
            .arg(claim.process.pid)
            .arg(&claim.process.host);
        let tally = self.ask_number(limit, &TRANSFER, call, |done| done == 1);
        let (verdict, answers) = tally
            .decide(limit, |answers| Count::of(answers, |done| *done).verdict())
            .await;
        match verdict {
            Some(true) => {
                // What the old owner asked for and is still on its way belongs to nobody.
                self.tenures.end(&claim.owner);
                Ok(Renewed::Extended)
            }
            Some(false) => {
                if answers.iter().any(|answer| !matches!(answer, Some(Ok(false)))) {
                    let mut parted = claim.clone();
                    parted.owner = to.clone();
                    // A failure leaves what ends by itself; the answer is certain without it.
                    let _ = self.release(&parted, Duration::ZERO).await;
                }
                Ok(Renewed::Lost)
            }
            None => Err(self.no_majority("transfer", &answers, limit)),
        }
    }
}

/// Puts a lease back on a node, as the majority has it.
async fn heal(quorum: Arc<Quorum>, index: usize, claim: Claim, sent: Moment, ttl: Ttl) {
    let tenure = quorum.tenures.join(&claim.owner);
    let Ok(Some(standing)) = quorum.standing(claim.keys()[0].as_str()).await else {
        return;
    };
    let Standing {
        attempt: Some((owner, attempt)),
        info,
        certain: true,
        highest: Some(fence),
    } = standing
    else {
        return;
    };
    let Some(holder) = info.holder else { return };
    let left = ttl.duration().saturating_sub(sent.elapsed()).as_millis();
    if owner != claim.owner.as_str() || tenure.is_over() || left == 0 {
        return;
    }
    let mut call = quorum.call(&HEAL, &VOTED, &claim, &owner);
    call.arg(attempt)
        .arg(left as u64)
        .arg(left as u64 + RECORD_KEPT_MS)
        .arg(fence.0)
        .arg(holder.since_ms)
        .arg(holder.process.pid)
        .arg(&holder.process.host);
    if let Some(metadata) = &info.metadata {
        call.arg(metadata);
    }
    let node = &quorum.nodes[index];
    let healed: Answer<i64> = tokio::time::timeout(LONGEST_HEAL, node.number(&HEAL, &call)).await.ok();
    if let Some(Err(failure)) = &healed {
        tracing::debug!(%failure, address = &*node.address, "a node could not be healed");
    }
    // The release may have come to the node first, and found nothing there.
    if tenure.is_over() {
        let mut release = quorum.call(&RELEASE, &PARTS, &claim, &owner);
        release.arg(0);
        let _ = tokio::time::timeout(quorum.patience, node.number(&RELEASE, &release)).await;
    }
}
