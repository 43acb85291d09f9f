//! Renewals.

use crate::engine::Renewed;
use crate::engine::mongodb::{Core, Outcome, documents};
use crate::model::{Claim, Ttl};

impl Core {
    /// Extends the lease on every name of the claim. For one name this is `update_one`, which the driver retries after a failover.
    pub(crate) async fn extend(&self, claim: &Claim, ttl: Ttl) -> Outcome<Renewed> {
        let ids = self.ids(claim);
        let (held, extend) = (documents::held_by(&ids, &claim.owner), documents::extend(ttl));
        let updated = match ids.len() {
            1 => self.locks().update_one(held, extend).await?,
            _ => self.locks().update_many(held, extend).await?,
        };
        Ok(if updated.matched_count == ids.len() as u64 {
            Renewed::Extended
        } else {
            Renewed::Lost
        })
    }
}
