//! One attempt: acquire every name (`acquire_names.rs`), then stamp the names (`stamp.rs`) unless their insert proves the token.
//! `fence.rs` says when these are two writes.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use crate::engine::Acquired;
use crate::engine::mongodb::connection::pool::Class;
use crate::engine::mongodb::documents;
use crate::engine::mongodb::error::Failure;
use crate::engine::mongodb::ops::acquire_names::NameOutcome;
use crate::engine::mongodb::ops::attempts::Caller;
use crate::engine::mongodb::ops::fence::StampOrder;
use crate::engine::mongodb::ops::stamp::{Unstamped, not_newer};
use crate::engine::mongodb::queue::Queue;
use crate::engine::mongodb::{Core, Outcome};
use crate::model::{Claim, Key};

/// Maximum number of rounds of an attempt. Another round follows where a name was gone before its stamp, or was changed by an
/// earlier attempt of the same claim. This happens with leases shorter than a round trip, and after a dropped call.
pub(super) const ROUNDS: usize = 3;
/// The time to the next attempt where the rest of the current lease is not known.
pub(super) const SOON: Duration = Duration::from_millis(1);

impl Core {
    /// Makes one attempt.
    pub(crate) async fn attempt(self: &Arc<Self>, claim: &Claim) -> Outcome<Acquired> {
        let copy = Arc::new(claim.clone());
        let claims = vec![copy.clone()];
        let steps = |core: Arc<Core>, caller| async move { core.acquire(&copy, &caller, None).await };
        self.in_attempt(claims, steps).await
    }

    /// Makes the steps of an attempt for these claims, one at least, with one permit, in a task of its own.
    ///
    /// # Behavior
    /// An attempt that is dropped before it has a permit sends nothing. When it is dropped later, its task rolls back what it
    /// wrote, with the same permit.
    pub(crate) async fn in_attempt<T, F>(
        self: &Arc<Self>,
        claims: Vec<Arc<Claim>>,
        steps: impl FnOnce(Arc<Self>, Caller) -> F,
    ) -> Outcome<T>
    where
        T: Send + 'static,
        F: Future<Output = Outcome<T>> + Send + 'static,
    {
        for claim in &claims {
            self.attempts.ended(&claim.owner).await;
        }
        let permit = self.pool.permit(self.class(&claims)).await;
        claims.iter().for_each(|claim| claim.mark_sent());
        let owners = claims.iter().map(|claim| claim.owner.clone()).collect();
        let (waiting, mut working, caller) = self.attempts.begin(owners);
        let (core, steps) = (self.clone(), steps(self.clone(), caller.clone()));
        let attempt = async move {
            let outcome = steps.await;
            core.roll_back_if_dropped(&claims, &caller, outcome.as_ref().err())
                .await;
            working.note(&outcome);
            drop(working);
            outcome
        };
        let outcome = self.pool.run(permit, attempt).await;
        drop(waiting);
        outcome
    }

    /// Returns the class of an attempt for these claims: one at least, with the same first name. A waiter that was notified of a
    /// hand-off has little time to confirm, so it does not wait behind other attempts.
    pub(crate) fn class<'a>(&self, claims: &'a [impl Deref<Target = Claim>]) -> Class<'a> {
        let has_reservation = |queue: &Arc<Queue>| {
            let mut claims = claims.iter();
            claims.any(|claim| queue.known.has_reservation(&claim.owner))
        };
        match self.queue.as_ref().is_some_and(has_reservation) {
            true => Class::Confirm,
            false => Class::Acquire(&claims[0].keys()[0]),
        }
    }

    /// Releases what the claims of a dropped attempt hold, and removes their positions. After a server failure it does nothing:
    /// the service repeats the release.
    async fn roll_back_if_dropped(&self, claims: &[Arc<Claim>], caller: &Caller, failure: Option<&Failure>) {
        if caller.is_gone() && failure.is_none_or(Failure::is_cancelled) {
            let rolled_back = self.release_claims(claims).await;
            if let Err(failure) = rolled_back {
                caller.note_unsettled();
                tracing::debug!(%failure, "a dropped attempt could not be rolled back");
            }
        }
    }

    /// Makes the steps of an attempt. `first`: the outcome of the first name, if that step is done.
    pub(crate) async fn acquire(
        &self,
        claim: &Claim,
        caller: &Caller,
        mut first: Option<NameOutcome>,
    ) -> Outcome<Acquired> {
        let mut newest = None;
        for _ in 0..ROUNDS {
            let names = match self.acquire_names(claim, caller, first.take()).await? {
                Ok(names) => names,
                Err(held) => return Ok(held),
            };
            newest = newest.max(newest_of(&names));
            if let Some(fence) = self.stamp_all(claim, caller, &names, &mut newest).await? {
                self.leave_queue(claim);
                self.index.check_if_due();
                return Ok(Acquired::Granted { fence });
            }
        }
        self.roll_back(claim, caller, claim.keys().len(), newest).await?;
        Ok(held(&claim.keys()[0], Some(SOON)))
    }

    /// Acquires the names in their order, so that overlapping claims compete for the first name that they share. When one is
    /// busy, rolls back those before it and records the waiter's position.
    pub(crate) async fn acquire_names(
        &self,
        claim: &Claim,
        caller: &Caller,
        first: Option<NameOutcome>,
    ) -> Outcome<Result<Vec<Unstamped>, Acquired>> {
        let keys = claim.keys();
        let mut all = Vec::with_capacity(keys.len());
        let (key, busy) = match self.acquire_until_busy(claim, caller, first, &mut all).await {
            Ok(None) => return Ok(Ok(all)),
            Ok(Some(busy)) => (&keys[all.len()], busy),
            // The task of the attempt rolls everything back.
            Err(failure) if failure.is_cancelled() => return Err(failure),
            Err(failure) => {
                // What cannot be rolled back expires. What an earlier attempt was granted stays, for a retry.
                let _ = self.roll_back(claim, caller, all.len(), None).await;
                return Err(failure);
            }
        };
        self.roll_back(claim, caller, all.len(), newest_of(&all)).await?;
        if let (Some(queue), Some((number, open))) = (&self.queue, busy.position) {
            let before = queue.known.position(&claim.owner).map(|(key, _)| key);
            queue.enter(claim, key, number, busy.left, open, busy.is_foreign);
            queue.known.set_ahead(key, busy.ahead.min(queue.known.ahead(key)));
            if let Some(before) = before.filter(|before| before != key) {
                // A claim waits for one name at a time.
                queue.leave(&before, &claim.owner).await?;
            }
        }
        Ok(Err(held(key, busy.left)))
    }

    /// Rolls back the first `count` names of the claim, where they have no stamp, or one that is not newer than `newest`.
    ///
    /// The server may execute a rollback without an answer during a later attempt of the same claim. It must not release what that
    /// one was granted, so it matches only the stamps that this attempt read. A grant without a stamp would match, too: after a
    /// failed rollback there is none for this claim (`insert_free`).
    pub(crate) async fn roll_back(
        &self,
        claim: &Claim,
        caller: &Caller,
        count: usize,
        newest: Option<StampOrder>,
    ) -> Outcome<()> {
        if count == 0 {
            return Ok(());
        }
        if let Some(queue) = &self.queue {
            // The event of a grant that this releases may come later.
            queue.known.confirm_hand_offs(&claim.owner);
        }
        let ids = &self.ids(claim)[..count];
        let owned = not_newer(documents::owned(ids, &claim.owner), newest);
        let rolled_back = self.release_matching(ids, &claim.owner, owned, None).await;
        if rolled_back.is_err() {
            caller.note_unsettled();
        }
        rolled_back.map(drop)
    }
}

/// Returns the newest stamp of these names.
fn newest_of(names: &[Unstamped]) -> Option<StampOrder> {
    let stamps = names.iter().filter_map(|name| name.stamp);
    stamps.map(|stamp| stamp.order()).max()
}

/// Returns the answer for a busy name.
pub(crate) fn held(key: &Key, retry_after: Option<Duration>) -> Acquired {
    Acquired::Held {
        key: key.clone(),
        retry_after,
    }
}
