//! Makes attempts of several waiters of this process for one name, in the order of a list.

use redis::Cmd;

use crate::engine::redis::RedisEngine;
use crate::engine::redis::error::Failure;
use crate::engine::redis::scripts::ACQUIRE;
use crate::engine::{Acquired, Answers};
use crate::model::Claim;

impl RedisEngine {
    /// Makes one attempt for each claim. Claims whose names are in one slot share a pipeline. A claim over several slots
    /// makes its attempt alone.
    pub(in super::super) async fn acquire_in_order(&self, claims: &[&Claim], answer: &mut Answers<'_, Acquired>) {
        let (mut at, mut tried) = (0, None);
        while at < claims.len() {
            let rest = &claims[at..];
            let count = rest.iter().take_while(|claim| self.parts(claim).is_none()).count();
            let slot = self.slot(&rest[0].keys()[0]);
            // The first attempt goes alone and opens this process's channel if the name is busy.
            if count < 2 || self.waiters.channel(slot).is_none() && tried.replace(slot) != Some(slot) {
                answer(at, self.try_once(rest[0]).await);
                at += 1;
                continue;
            }
            for acquired in self.acquire_together(&rest[..count], slot).await {
                answer(at, acquired.map_err(|failure| failure.during("acquire")));
                at += 1;
            }
        }
    }

    /// Makes one attempt for each claim, in one pipeline. All names are in one slot.
    async fn acquire_together(&self, claims: &[&Claim], slot: u16) -> Vec<Result<Acquired, Failure>> {
        let channel = match self.waiters.listening(slot).await {
            Ok(channel) => channel,
            Err(failure) => return vec![Err(failure); claims.len()],
        };
        let calls: Vec<Cmd> = claims.iter().map(|claim| self.acquire_call(claim, true, 0)).collect();
        let mark_sent = || claims.iter().for_each(|claim| claim.mark_sent());
        let replies = match &self.replicated {
            Some(replicated) => replicated.run_in_order(&ACQUIRE, &calls, Some(&mark_sent)).await,
            None => self.route.run_in_order(&ACQUIRE, &calls, slot, Some(&mark_sent)).await,
        };
        let replies = match replies {
            Ok(replies) => replies,
            Err(failure) => return vec![Err(failure); claims.len()],
        };
        let mut answers = Vec::with_capacity(claims.len());
        for (claim, reply) in claims.iter().zip(replies) {
            let acquired = match reply {
                // Not executed: the slot moves, or the server has lost the script meanwhile.
                Err(failure) if failure.is_unknown_script() || failure.is_moving() => {
                    self.attempt(claim, claim, Some(&channel), 0).await
                }
                reply => match self.acquired(claim, Some(&channel), reply).await {
                    Ok(Some(acquired)) => Ok(acquired),
                    Ok(None) => self.attempt(claim, claim, Some(&channel), 0).await,
                    Err(failure) => Err(failure),
                },
            };
            if let Ok(Acquired::Granted { .. }) = acquired {
                self.waiters.known.leave(&claim.owner);
            }
            answers.push(acquired);
        }
        answers
    }
}
