//! Transfers a claim to another owner.

use futures_util::future::join_all;
use redis::Value;

use super::inspect::RECORD_UNDER_WAY;
use super::multi_slot::least_ttl;
use crate::engine::redis::RedisEngine;
use crate::engine::redis::error::Failure;
use crate::engine::redis::keys::Part;
use crate::engine::redis::scripts::TRANSFER;
use crate::engine::{Renewal, Renewed};
use crate::model::{Claim, OwnerToken};

impl RedisEngine {
    /// Transfers a claim, in one slot or in several.
    pub(in super::super) async fn transfer_whole(&self, claim: &Claim, to: &OwnerToken) -> Result<Renewed, Failure> {
        match self.parts(claim) {
            None => self.transfer_part(claim, to).await,
            Some(parts) => self.transfer_parts(&parts, to).await,
        }
    }

    /// Transfers names of one slot, with their records, which the process of the grant may write a moment later.
    async fn transfer_part(&self, claim: &Claim, to: &OwnerToken) -> Result<Renewed, Failure> {
        self.write_records();
        for pause in RECORD_UNDER_WAY {
            if let Some(answer) = self.transfer_once(claim, to, true).await? {
                return Ok(answer);
            }
            tokio::time::sleep(pause).await;
        }
        let answer = self.transfer_once(claim, to, false).await?;
        answer.ok_or(Failure::Unexpected("transfer.lua"))
    }

    /// Makes one attempt. `None`: a record is missing, and `with_records` was demanded.
    async fn transfer_once(
        &self,
        claim: &Claim,
        to: &OwnerToken,
        with_records: bool,
    ) -> Result<Option<Renewed>, Failure> {
        let ttl = claim.ttl.as_millis();
        let mut call = self.call(&TRANSFER, &[Part::Lock, Part::Fence, Part::Metadata], claim);
        call.arg(to.as_str())
            .arg(ttl)
            .arg(ttl + self.fence_lasts())
            .arg(claim.process.pid)
            .arg(&claim.process.host);
        if with_records {
            call.arg("with-records");
        }
        match self
            .run_safely(&TRANSFER, &call, self.slot(&claim.keys()[0]), None)
            .await?
        {
            Value::Int(0) => Ok(Some(Renewed::Lost)),
            Value::Int(1) => Ok(Some(Renewed::Extended)),
            Value::Int(2) => Ok(None),
            _ => Err(Failure::Unexpected("transfer.lua")),
        }
    }

    /// Transfers all parts, or none.
    async fn transfer_parts(&self, parts: &[Claim], to: &OwnerToken) -> Result<Renewed, Failure> {
        let transferred = |part: &Claim| {
            let mut part = part.clone();
            part.owner = to.clone();
            part
        };
        let ttl = least_ttl();
        let ours = join_all(parts.iter().map(|claim| async move {
            match self.renew_part(Renewal { claim, ttl }).await? {
                Renewed::Extended => Ok(Renewed::Extended),
                Renewed::Lost => {
                    // A retry after a lost reply.
                    let claim = &transferred(claim);
                    self.renew_part(Renewal { claim, ttl }).await
                }
            }
        }));
        for held in ours.await {
            if held? == Renewed::Lost {
                return Ok(Renewed::Lost);
            }
        }
        for (index, part) in parts.iter().enumerate() {
            if self.transfer_part(part, to).await? == Renewed::Lost {
                // Lost since the check.
                for part in &parts[..index] {
                    self.transfer_part(&transferred(part), &part.owner).await?;
                }
                return Ok(Renewed::Lost);
            }
        }
        Ok(Renewed::Extended)
    }
}
