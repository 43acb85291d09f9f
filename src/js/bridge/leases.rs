//! The leases of one JavaScript environment, by number, and the functions that take such a number.
//!
//! A number is valid until `forget`, which JavaScript calls after a release, or when the `Lock` is garbage collected. For an unknown
//! number, a function returns the same as for a released lease.

use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use futures_util::FutureExt;
use napi::Env;
use napi::bindgen_prelude::{Result, Unknown};
use napi_derive::napi;

use super::Bridge;
use super::deferred::{Deferred, to_json};
use super::memory::Burst;
use super::notifier::Notifier;
use crate::js::options::{duration, ttl};
use crate::service::{Lease, Locks};

/// A lease that JavaScript has a number for.
#[derive(Clone)]
pub(in crate::js) struct Entry {
    pub(in crate::js) locks: Locks,
    pub(in crate::js) lease: Arc<Lease>,
    pub(in crate::js) notifier: Arc<Notifier>,
}

/// The leases by number.
#[derive(Default)]
pub(in crate::js) struct Leases {
    last: u64,
    entries: HashMap<u64, Entry>,
    burst: Burst,
}

impl Leases {
    /// Adds a lease and returns its number, which is never zero.
    pub(in crate::js) fn add(&mut self, entry: Entry) -> f64 {
        self.last += 1;
        self.entries.insert(self.last, entry);
        self.burst.began(self.entries.len());
        self.last as f64
    }

    /// Removes a lease. Returns it, and whether most leases of a burst are removed now: V8 collects them later than the calls end.
    fn remove(&mut self, id: u64) -> (Option<Entry>, bool) {
        let removed = self.entries.remove(&id);
        let has_ended = self.burst.has_ended(self.entries.len());
        if has_ended {
            self.entries.shrink_to_fit();
        }
        (removed, has_ended)
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

/// Releases a lease. Resolves to its description if this call released it, otherwise to null.
#[napi(ts_return_type = "Promise<string | null>")]
pub fn release(env: &Env, id: f64) -> Result<Unknown<'_>> {
    let Some((bridge, Entry { locks, lease, .. })) = entry(env, id) else {
        return Deferred::settled(env, Ok(None::<String>));
    };
    bridge.answer(env, &locks, locks.release(&lease), move |_, is_freed| {
        Ok(is_freed.then(|| lease.description()))
    })
}

/// Releases the lease of `using` or `acquireAndExecute`. Resolves to its description, or to null if it was released before. Rejects
/// with `LOCK_LOST` if it was lost.
#[napi(ts_return_type = "Promise<string | null>")]
pub fn finish(env: &Env, id: f64) -> Result<Unknown<'_>> {
    let Some((bridge, Entry { locks, lease, .. })) = entry(env, id) else {
        return Deferred::settled(env, Ok(None::<String>));
    };
    let was_released = lease.is_released();
    let service = locks.clone();
    // A release without an answer is repeated in the background. The job has been done under the lock.
    let released = locks.release(&lease).map(Ok);
    bridge.answer(env, &locks, released, move |_, released| {
        let is_gone = matches!(released, Ok(false)) && !was_released;
        let loss = lease.loss();
        match loss.or_else(|| is_gone.then(|| lease.lost_at_release(service.is_closed()))) {
            Some(loss) => Err(loss),
            None => Ok((!was_released).then(|| lease.description())),
        }
    })
}

/// Keeps the name of a lease busy after an earlier release, until `ms` milliseconds have passed since the grant.
#[napi]
pub fn set_min_hold(env: &Env, id: f64, ms: f64) {
    if let (Some(lease), Some(min_hold)) = (lease(env, id), duration(ms)) {
        lease.set_min_hold(min_hold);
    }
}

/// Extends a lease to at least `ttl_ms` milliseconds from now on.
#[napi(ts_return_type = "Promise<void>")]
pub fn extend(env: &Env, id: f64, ttl_ms: f64) -> Result<Unknown<'_>> {
    let Some((bridge, Entry { locks, lease, .. })) = entry(env, id) else {
        return Deferred::settled(env, Ok(()));
    };
    let service = locks.clone();
    let extending = async move { service.extend(&lease, ttl(ttl_ms)).await };
    bridge.answer(env, &locks, extending, |_, ()| Ok(()))
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

/// Returns the description of a lease: owner token, fencing token, ttl in milliseconds, whether it is renewed, and the JSON text of
/// its metadata, which may be empty. They are separated by spaces.
#[napi]
pub fn describe(env: &Env, id: f64) -> Option<String> {
    Some(lease(env, id)?.description())
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

/// Removes the number of a lease. The lease continues. Returns its (first) name if it is still held and renewed.
#[napi]
pub fn forget(env: &Env, id: f64) -> Option<String> {
    let bridge = Bridge::existing(env)?;
    let (removed, has_ended) = bridge.leases.borrow_mut().remove(id as u64);
    if has_ended {
        bridge.return_memory();
    }
    let lease = removed?.lease;
    (lease.renew && lease.is_held()).then(|| lease.names()[0].to_string())
}
