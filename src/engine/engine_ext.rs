//! Single calls of an engine, whose methods take lists.

use std::time::Duration;

use super::{Acquired, Description, Engine, Read, Released, Renewal, Renewed, Result};
use crate::error::EngineError;
use crate::model::{Claim, Key, LockInfo, Ttl};

/// Single calls of an engine. Their errors are those of the engine.
pub trait EngineExt: Engine {
    /// Makes one attempt.
    fn try_acquire(&self, claim: &Claim) -> impl Future<Output = Result<Acquired>> + Send {
        async move {
            let mut answer = None;
            self.try_acquire_all(&[claim], &mut |_, acquired| answer = Some(acquired))
                .await;
            answer.unwrap_or_else(|| unanswered(self, "acquire"))
        }
    }

    /// Renews one lease.
    fn renew(&self, claim: &Claim, ttl: Ttl) -> impl Future<Output = Result<Renewed>> + Send {
        async move {
            let mut answer = None;
            self.renew_all(&[Renewal { claim, ttl }], &mut |_, renewed| answer = Some(renewed))
                .await;
            answer.unwrap_or_else(|| unanswered(self, "renew"))
        }
    }

    /// Releases one claim.
    fn release(&self, claim: &Claim, keep: Duration) -> impl Future<Output = Result<Released>> + Send {
        async move {
            let mut answer = None;
            self.release_all(&[claim], keep, &mut |_, released| answer = Some(released))
                .await;
            answer.unwrap_or_else(|| unanswered(self, "release"))
        }
    }

    /// Reads the holders of a name: at most one, or those of all shares of a shared name.
    fn holders(&self, key: &Key, waits_for_token: bool) -> impl Future<Output = Result<Vec<LockInfo>>> + Send {
        async move { self.read(Read::Name { key, waits_for_token }).await }
    }

    /// Reads the holder of a name. `None`: it is free.
    fn inspect(&self, key: &Key) -> impl Future<Output = Result<Option<LockInfo>>> + Send {
        async move { Ok(self.holders(key, true).await?.pop()) }
    }

    /// Reads the holder of a name like [`EngineExt::inspect`], without a wait for a fencing token that the store shows later.
    fn inspect_now(&self, key: &Key) -> impl Future<Output = Result<Option<LockInfo>>> + Send {
        async move { Ok(self.holders(key, false).await?.pop()) }
    }

    /// Reads the locks whose name starts with `prefix`, with a time limit for each page.
    fn list(&self, prefix: &str, page_timeout: Duration) -> impl Future<Output = Result<Vec<LockInfo>>> + Send {
        async move { self.read(Read::Prefix { prefix, page_timeout }).await }
    }

    /// Returns the error of a call that had no answer within `timeout`.
    fn no_answer(&self, op: &'static str, timeout: Duration) -> EngineError {
        let Description { name, address, .. } = self.describe();
        EngineError::no_answer(name, &address, op, timeout)
    }
}

impl<E: Engine + ?Sized> EngineExt for E {}

/// Returns the error of a call that an engine has not answered.
fn unanswered<T>(engine: &(impl Engine + ?Sized), op: &'static str) -> Result<T> {
    let text = "a bug in holdfast: the call has no answer";
    Err(EngineError::new(engine.describe().name, op, false, text))
}
