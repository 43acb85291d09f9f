//! Renewals.

use std::sync::Arc;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use mongodb::bson::{Document, Timestamp};

use crate::engine::mongodb::connection::pool::Class;
use crate::engine::mongodb::ops::fence::Stamp;
use crate::engine::mongodb::shares::by_command;
use crate::engine::mongodb::{Core, Outcome, documents};
use crate::engine::{Answers, Renewal, Renewed};
use crate::model::{Claim, Ttl};

impl Core {
    /// The engine's `renew_all`: a command for each lock, and one for the shares of each name.
    pub(crate) async fn renew_each(self: &Arc<Self>, renewals: &[Renewal<'_>], answer: &mut Answers<'_, Renewed>) {
        let groups = by_command(renewals.iter().map(|renewal| renewal.claim), true);
        let calls = groups.iter().map(|group| async move {
            let renewals = group.iter().map(|index| &renewals[*index]);
            let claims: Vec<(Claim, Ttl)> = renewals.map(|renewal| (renewal.claim.clone(), renewal.ttl)).collect();
            let core = self.clone();
            let extend = || async move { core.extend_together(&claims).await };
            (group, self.pool.call(Class::Keep, extend).await)
        });
        let mut calls: FuturesUnordered<_> = calls.collect();
        while let Some((group, outcome)) = calls.next().await {
            for (offset, index) in group.iter().enumerate() {
                let renewed = outcome.as_ref().map(|all| all[offset]);
                answer(*index, renewed.map_err(|failure| failure.clone().during("renew")));
            }
        }
    }

    /// Returns the token of a claim that was granted, for documents without one. `None`: its documents have one.
    pub(crate) fn tick_of(&self, claim: &Claim) -> Option<Timestamp> {
        let unwritten = self.unwritten.as_ref()?;
        let of_claim = claim.fence.map(Stamp::tick_of);
        of_claim.or_else(|| unwritten.of(&claim.owner))
    }

    /// Extends the lease on every name of the claim, and writes its token where a document has none.
    pub(crate) async fn extend(&self, claim: &Claim, ttl: Ttl) -> Outcome<Renewed> {
        self.extend_with(claim, ttl, self.tick_of(claim)).await
    }

    /// Does the same with this token.
    pub(super) async fn extend_with(&self, claim: &Claim, ttl: Ttl, tick: Option<Timestamp>) -> Outcome<Renewed> {
        let ids = self.ids(claim);
        let (held, extend) = (
            documents::held_by(&ids, &claim.owner),
            documents::extend(claim, ttl, tick),
        );
        let updated = self.update(&ids, held, extend).await?;
        Ok(match updated == ids.len() as u64 {
            true => Renewed::Extended,
            false => Renewed::Lost,
        })
    }

    /// Updates the documents of these names that match. Returns their number. The driver retries the command for one name after a
    /// failover.
    pub(super) async fn update(&self, ids: &[String], matching: Document, steps: Vec<Document>) -> Outcome<u64> {
        let updated = match ids.len() {
            1 => self.locks().update_one(matching, steps).await?,
            _ => self.locks().update_many(matching, steps).await?,
        };
        Ok(updated.matched_count)
    }
}
