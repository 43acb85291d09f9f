//! The leases of one JavaScript environment, by number, and the functions that take such a number.
//!
//! A number is valid until `forget`, which JavaScript calls when the `Lock` is garbage collected. For an unknown number, a function
//! returns the same as for a released lease.

use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use napi::Env;
use napi::bindgen_prelude::{BigInt, Result, Unknown};
use napi_derive::napi;
use serde_json::json;

use super::bridge::Bridge;
use super::deferred::Deferred;
use super::error::to_json;
use super::notifier::Notifier;
use super::options::ttl;
use crate::service::{Lease, Locks, ReleaseOutcome};

/// A lease that JavaScript has a number for.
#[derive(Clone)]
pub(super) struct Entry {
    pub(super) locks: Locks,
    pub(super) lease: Arc<Lease>,
    pub(super) notifier: Arc<Notifier>,
}

/// The leases by number.
#[derive(Default)]
pub(super) struct Leases {
    last: u64,
    entries: HashMap<u64, Entry>,
}

impl Leases {
    /// Adds a lease and returns its number, which is never zero.
    pub(super) fn add(&mut self, entry: Entry) -> f64 {
        self.last += 1;
        self.entries.insert(self.last, entry);
        self.last as f64
    }
}

fn entry(env: &Env, id: f64) -> Option<(Rc<Bridge>, Entry)> {
    let bridge = Bridge::existing(env)?;
    let entry = bridge.leases.borrow().entries.get(&(id as u64)).cloned()?;
    Some((bridge, entry))
}

fn lease(env: &Env, id: f64) -> Option<Arc<Lease>> {
    Some(entry(env, id)?.1.lease)
}

/// Releases a lease. Resolves to whether this call released it.
#[napi(ts_return_type = "Promise<boolean>")]
pub fn release(env: &Env, id: f64) -> Result<Unknown<'_>> {
    let Some((bridge, Entry { locks, lease, .. })) = entry(env, id) else {
        return Deferred::settled(env, Ok(false));
    };
    bridge.promise(env, &locks, locks.release(&lease), |_, outcome| outcome.is_freed())
}

/// Releases the lease of `using` or `acquireAndExecute`. Resolves to the JSON text of a `LOCK_LOST` error, or to null.
#[napi(ts_return_type = "Promise<string | null>")]
pub fn finish(env: &Env, id: f64) -> Result<Unknown<'_>> {
    let Some((bridge, Entry { locks, lease, .. })) = entry(env, id) else {
        return Deferred::settled(env, Ok(None::<String>));
    };
    let was_released = lease.is_released();
    let loss = lease.loss();
    let released = locks.release(&lease);
    let service = locks.clone();
    let finished = async move {
        // A release without an answer is repeated in the background. The job has been done under the lock.
        let is_gone = matches!(released.await, Ok(ReleaseOutcome::NotHeld)) && !was_released;
        Ok(loss.or_else(|| is_gone.then(|| lease.lost_at_release(service.is_closed()))))
    };
    bridge.promise(env, &locks, finished, |_, loss| {
        loss.map(|loss| to_json(&loss).to_string())
    })
}

/// Extends a lease to at least `ttl_ms` milliseconds from now on.
#[napi(ts_return_type = "Promise<void>")]
pub fn extend(env: &Env, id: f64, ttl_ms: f64) -> Result<Unknown<'_>> {
    let Some((bridge, Entry { locks, lease, .. })) = entry(env, id) else {
        return Deferred::settled(env, Ok(()));
    };
    let service = locks.clone();
    let extending = async move { service.extend(&lease, ttl(ttl_ms)).await };
    bridge.promise(env, &locks, extending, |_, ()| ())
}

/// Whether the lease is held, by the native clock.
#[napi]
pub fn is_held(env: &Env, id: f64) -> bool {
    lease(env, id).is_some_and(|lease| lease.is_held())
}

/// Returns the rest of the lease in milliseconds, by the native clock.
#[napi]
pub fn remaining_ms(env: &Env, id: f64) -> f64 {
    lease(env, id).map_or(0.0, |lease| lease.remaining().as_secs_f64() * 1000.0)
}

/// Returns the fencing token; zero for an unknown lease.
#[napi]
pub fn fencing_token(env: &Env, id: f64) -> BigInt {
    lease(env, id).map_or(0, |lease| lease.fence().0).into()
}

/// Returns the other properties of a lease as JSON text.
#[napi]
pub fn describe(env: &Env, id: f64) -> Option<String> {
    let lease = lease(env, id)?;
    Some(
        json!({
            "token": lease.token(),
            "ttlMs": lease.ttl().as_millis(),
            "renew": lease.is_renewed(),
            "metadata": lease.metadata(),
        })
        .to_string(),
    )
}

/// Returns the JSON text of the `LOCK_LOST` error if the lease is lost by the native clock.
#[napi]
pub fn loss(env: &Env, id: f64) -> Option<String> {
    Some(to_json(&lease(env, id)?.loss()?).to_string())
}

/// Sends a message when the lease is lost. Returns `false` if it was released, and so cannot be lost.
#[napi]
pub fn watch(env: &Env, id: f64) -> bool {
    let Some((_, Entry { lease, notifier, .. })) = entry(env, id) else {
        return false;
    };
    lease.on_loss(Box::new(move |error| notifier.lost(id as u64, &error)));
    !lease.is_released()
}

/// Removes the number of a lease. The lease continues. Returns whether it is still held and renewed.
#[napi]
pub fn forget(env: &Env, id: f64) -> bool {
    let removed = Bridge::existing(env).and_then(|bridge| bridge.leases.borrow_mut().entries.remove(&(id as u64)));
    removed.is_some_and(|Entry { lease, .. }| lease.is_renewed() && lease.is_held())
}
